"""Linear attention in plain operators (tests/linear_composer.py), right or with one or two things changed: whatever is
fused computes what the original computes, at several numbers of tokens and sequences.

The tolerance. Both models add float32 numbers in another order, and a chunk multiplies what the recurrence adds up.
So a result agrees within `BASE` of its largest number, and beyond that within `FACTOR` times what a change of the
inputs by half of their last bit does to the original: a state that grows enlarges every rounding.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.checker import ValidationError
from onnx.shape_inference import InferenceError

from fa_compiler.passes import Options, Report, fuse
from fa_compiler.passes.answer.options import FINITE_SCORES, Target
from tests.linear_composer import FORMS, LAYOUTS, LOW_RANK, RULES, TOKEN_FORMS, TURNS, Change, Model, Recipe, feeds
from tools.fuzz.difference import Array, run_original, session
from tools.fuzz.kind import Finding, Kind, Outcome

BASE, FACTOR = 1e-4, 64.0
CHANGES: Mapping[str, tuple[Any, ...]] = {
    "turns": TURNS,
    "divided": (True,),
    "memory_key": ("q",),
    "memory_state": ("old",),
    "memory_sign": ("Add",),
    "beta": ("memory", "value", "squared", "none"),
    "write_key": ("q",),
    "write_sign": ("Sub",),
    "read_key": ("k",),
    "read_state": ("decayed", "old"),
    "decay": ("after", "twice", "none"),
    "bonus": (True,),
    "correction": ("turned", "key", "state", "written", "decayed", "key on both"),
    "bent": ("Tanh", "Relu", "Neg", "Abs"),
    "gate_factor": (1.0009765625, 0.5, -1.0),
    "per_value": (True,),
    "turned": (True,),
    "reset": ("half", "turned", "late"),
    "shifted": ("k", "v", "d", "b", "q", "z"),
    "rolled": ("k", "v", "d", "b", "q", "z"),
    "reversed": ("k", "v", "d", "b", "q", "z"),
    "head_mean": (True,),
    "last": ("before", "first"),
    "late": ("decay", "state", "beta", "output"),
    "diagonal": (-1, 1),
    "decay_sign": (-1,),
    "inner_decay": (False,),
    "outer_decay": (False,),
    "key_decay": (False,),
    "state_decay": ("first",),
    "exclusive": (True,),
    "inverse": ("short", "plus", "turned"),
    "lower_beta": (False,),
    "corrected_decay": (False,),
    "order": ("swapped",),
    "whole_sums": (True,),
}
"""The other values of each field of a `Change`."""
TURNED = 0.5
"""So many of those that are changed and whose number of tokens is open show the change at one number of them."""
RIGHT = 0.3
"""So many models are right."""
RESET = 0.3
"""So many of those by tokens reset their states."""
REFUSED = ("out of data bounds", "out of bounds", "Reshape")
"""What a fused model says of a number of tokens that it refuses."""
TARGETS: tuple[Target, ...] = ("ort", "ort", "ort", "contrib", "onnx")


class LinearPlain(Kind):
    """One model, run at several lengths."""

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        recipe = drawn(rng)
        try:
            model = Model(recipe).proto()
        except (ValidationError, InferenceError):  # the change does not fit the sizes
            return Outcome("skipped")
        target = rng.choice(TARGETS)
        result, report = _fused(model, target, [FINITE_SCORES] if recipe.reset == "chosen" else [])
        if not report.count("fused"):
            is_right = recipe.change == Change() and target == "ort" and recipe.gate != "raw"
            is_right &= not (recipe.reset and recipe.rule == "dplr")  # which reads the state before the decay
            return Outcome("missed" if is_right else "declined")  # a right one that is left is no fault
        for sizes in _lengths(recipe, rng):
            fault = _fault(model, result, report, feeds(model, sizes, seed))
            if fault:
                data = model.SerializeToString()
                return Outcome("fused", Finding(f"{fault} [{recipe.form}]", f"{sizes} {target} {recipe!r}", data))
        return Outcome("fused")


def drawn(rng: random.Random) -> Recipe:
    """A random recipe."""
    form = rng.choice(FORMS)
    heads = rng.choice([1, 2, 2, 3, 4])
    key = rng.choice([2, 3, 4, 8])
    value = rng.choice([key, 1, 2, 5, 8])
    rule = rng.choice((*RULES, *LOW_RANK) if form in TOKEN_FORMS else RULES)
    recipe = Recipe(
        form,
        rule,
        by_key=rng.random() < 0.4,
        gate=rng.choice(["exp", "exp", "sigmoid", "softplus", *(["raw"] if "chunk" not in form else [])]),
        products=rng.choice(["mul", "matmul", "einsum"]),
        layout=rng.choice(list(LAYOUTS)),
        merged=rng.random() < 0.3,
        by_value=rng.random() < 0.4,
        scale=rng.choice([None, 0.5, key**-0.5, 0.1]),
        has_state=rng.random() < 0.7,
        sizes=(rng.choice([1, 2, 3]), heads, key, value),
        key_heads=rng.choice([0, 0, *(each for each in (1, 2) if heads % each == 0)]),
        chunk=rng.choice([2, 4, 8]),
        mask=rng.choice(["where", "trilu"]),
        open_batch=rng.random() < 0.3,
        is_subtracted=rng.random() < 0.5,
        is_gated=rng.random() < 0.3,
        turn=rng.randint(7, 90),
    )
    if form in TOKEN_FORMS and rng.random() < RESET:
        recipe = replace(recipe, reset=rng.choice(["factor", "chosen"]))
    if form in ("scan", "loop") and rng.random() < 0.3:
        recipe = replace(recipe, tokens=rng.choice([2, 3, 7]))
    changed = {} if rng.random() < RIGHT else _changes(rng)
    if changed and recipe.length is None and rng.random() < TURNED:
        changed = {"turns": rng.choice(TURNS)}
    return replace(recipe, change=Change(**changed))


def _changes(rng: random.Random) -> dict[str, Any]:
    names = rng.sample([field.name for field in fields(Change)], rng.choice([1, 1, 1, 2]))
    return {name: rng.choice(CHANGES[name]) for name in names}


def _lengths(recipe: Recipe, rng: random.Random) -> Iterator[dict[str, int]]:
    """The sizes of a few runs."""
    chunk = recipe.chunk
    lengths = [1, 2, chunk, chunk + 1, 3 * chunk + 1, rng.randint(3, 40)] if recipe.length is None else [0, 0]
    if recipe.change.turns and recipe.length is None:
        lengths.append(recipe.turn)
    for length in lengths:
        yield {"T": length, "B": rng.choice([1, 2, 4])}


def _fused(model: onnx.ModelProto, target: Target, assume: Sequence[str]) -> tuple[onnx.ModelProto, Report]:
    graph = ir.from_proto(model)
    report = fuse(graph, Options(target, opset=27 if target == "onnx" else 0, assume=frozenset(assume)))
    return ir.to_proto(graph), report


def _fault(model: onnx.ModelProto, result: onnx.ModelProto, report: Report, given: Mapping[str, Array]) -> str | None:
    """What is wrong with one run of the fused model."""
    original = session(model, custom=False)
    try:
        wanted = run_original(original, given)
    except Exception:  # of ONNX Runtime
        return None
    try:
        got = session(result, custom=True).run(None, dict(given))
    except Exception as error:  # of ONNX Runtime
        is_refused = any("other numbers are refused" in note for note in report.notes)
        return (
            None if is_refused and any(word in str(error) for word in REFUSED) else f"only the original runs: {error}"
        )
    moved = {
        name: array if array.dtype == bool else array * (1 + np.float32(2.0**-24)) for name, array in given.items()
    }
    for one, other, shaken in zip(got, wanted, run_original(original, moved), strict=True):
        if one.shape != other.shape:
            return "another shape"
        if not (np.isnan(one) == np.isnan(other)).all():
            return "NaN at another place"
        if not np.isfinite(other).all():
            continue
        scale = float(np.abs(other).max(initial=1e-30))
        allowed = BASE * scale + FACTOR * float(np.abs(shaken - other).max(initial=0))
        if float(np.abs(one - other).max(initial=0)) > allowed:
            return "another result"
    return None
