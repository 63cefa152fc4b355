"""Attention that ranks compute together, and its gradient, against one call of the kernel.

methods      gather, all-to-all and ring, and the merge of caches in parts; both directions where there is a gradient
lengths      that the ranks do not divide; fewer keys than ranks, and none, of caches
operands     masks and biases with 1 in place of batch, heads, rows or keys; a key and value of one batch entry
odd rows     without a key, by the mask, the band or a part; scores that are all the lowest number of float32; NaN and
             infinities in any operand; every attribute that says what becomes of such rows
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np

from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry.collectives import (
    CYCLIC,
    FORWARD_OUTPUTS,
    GATHER,
    GRADIENT_OUTPUTS,
    METHODS,
    ORDERS,
    RING,
    STATISTICS,
    shortest,
)
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS, UNLIMITED
from fa_compiler.parallel.cached import KEYS, cache_attention
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.methods import sequence_attention, sequence_gradient
from fa_compiler.parallel.parts import Parts, divided
from fa_compiler.parallel.threads import run_threads
from fa_compiler.passes.parallel.attention_rule import refused_with_gradient
from fa_compiler.passes.parallel.methods import refused_methods
from tests.parallel.running import shape_in
from tools.fuzz.kind import Finding, Kind, Outcome
from tools.fuzz.kinds.ranks import TIMEOUT

LOWEST = float(np.finfo(np.float32).min)
ODD = (np.nan, np.inf, -np.inf)
TOLERANCE = {"float32": 2e-5, "float16": 6e-3}
"""Relative to the largest number. A ring rounds a result of 16 bits once for each part."""


class RankCalls(Kind):
    """A random call of an attention. All ranks together give what the kernel gives."""

    def check(self, seed: int) -> Outcome:
        call = _Call(random.Random(seed))
        try:
            expected = call.by_kernel()
        except eager.KernelError:
            return Outcome("skipped")
        found = call.by_ranks()
        for name, array in expected.items():
            wrong = _fault(array, found[name], call.terms(name))
            if wrong is not None:
                title = f"{call.method} gives {wrong} in {name} [{' '.join(sorted(call.odd))}]"
                return Outcome("wrong", Finding(title, call.detail))
        return Outcome(f"{call.method}{' with gradient' if call.dy is not None else ''}")


class _Call:
    """One call: attributes, inputs and how the ranks divide it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.numbers = rng, np.random.default_rng(rng.getrandbits(32))
        self.ranks = rng.choice((1, 2, 2, 3, 3, 4))
        self.key_heads = rng.choice((1, 2, 3))
        self.heads = self.key_heads * rng.choice((1, 2, 4))
        self.batch, self.size = rng.choice((1, 2, 3)), rng.choice((4, 8))
        self.layout = rng.choice(("BSH", "SBH", "BSND", "BNSD"))
        self.axis = SEQUENCE_AXIS[self.layout]
        self.kind = np.dtype(rng.choice((np.float32, np.float32, np.float16)))
        self.odd: set[str] = set()
        self.cached = rng.random() < 0.35
        self.order = CYCLIC if self.cached else rng.choice(ORDERS)
        self.length = rng.randint(1, 12) if self.cached else rng.randint(shortest(self.order, self.ranks), 19)
        self.rows = rng.randint(1, 4) if self.cached else self.length
        self.attrs = self.attributes()
        self.inputs = self.operands()
        self.method, self.dy = self.choice()

    def attributes(self) -> dict[str, Any]:
        rng = self.rng
        limits = rng.choice(((UNLIMITED, UNLIMITED), (UNLIMITED, 0), (3, 0), (2, 4), (0, UNLIMITED)))
        found: dict[str, Any] = {"head_num": self.heads, "input_layout": self.layout, "scale_value": 0.3}
        found |= {"keep_prob": 1.0, "sparse_mode": rng.choice((0, 4)) if self.cached else 0}
        found |= dict(zip(("pre_tockens", "next_tockens"), limits, strict=True))
        if rng.random() < 0.7:
            found["cpu_empty_rows"] = rng.choice(("zero", "mean", "nan", "nan", "unmasked"))
        if rng.random() < 0.3:
            found["cpu_nan_rows"] = rng.choice(("zero", "infinite"))
        if rng.random() < 0.4:
            found["cpu_mask_value"] = rng.choice((-2.0, LOWEST, LOWEST))
        if rng.random() < 0.15:
            found["cpu_softcap"] = 1.5
        return found

    def operands(self) -> dict[str, Array]:
        rng = self.rng
        keys = 1 if self.batch > 1 and rng.random() < 0.1 else self.batch
        shapes = {"query": (self.batch, self.heads, self.rows)}
        shapes |= dict.fromkeys(("key", "value"), (keys, self.key_heads, self.length))
        found = {}
        for name, (batch, heads, tokens) in shapes.items():
            shape = shape_in(self.layout, batch, heads, tokens, self.size)
            found[name] = self.numbers.standard_normal(shape).astype(self.kind)
        if rng.random() < 0.6:
            found["atten_mask"] = self.mask()
        if rng.random() < 0.5:
            found["real_shift"] = self.bias()
            self.attrs["pse_type"] = 0
            if "atten_mask" in found and "cpu_mask_value" in self.attrs and rng.random() < 0.5:
                self.attrs["cpu_masked_bias"] = "added"
        if self.kind == np.float16 and rng.random() < 0.1:
            found["sink"] = np.linspace(-1, 1, self.heads, dtype=np.float32)
        for name in ("query", "key", "value", "real_shift"):
            if name in found and rng.random() < (0.3 if name == "value" else 0.08):
                number = rng.choice(ODD)
                found[name].flat[self.numbers.integers(found[name].size, size=rng.choice((1, 3)))] = number
                self.odd.add(f"{number} in {name}")
        return found

    def shape(self) -> list[int]:
        """The shape of a mask or bias."""
        sizes = (self.batch, self.heads, self.rows, self.length)
        return [
            1 if self.rng.random() < chance else size for size, chance in zip(sizes, (0.3, 0.5, 0.3, 0.05), strict=True)
        ]

    def mask(self) -> Array:
        mask = self.numbers.random(self.shape()) < self.rng.choice((0.1, 0.5, 0.8))
        if self.rng.random() < 0.5:
            mask[-1, ..., : self.rng.randint(1, self.length)] = True  # padded on the left
            self.odd.add("padded")
        if self.rng.random() < 0.6:
            mask[0, 0, self.rng.randrange(mask.shape[2])] = True
            self.odd.add("masked row")
        return np.asarray(mask)

    def bias(self) -> Array:
        bias = self.numbers.standard_normal(self.shape()).astype(np.float32)
        for number in (LOWEST, -np.inf):
            if self.rng.random() < 0.3:
                place = (slice(None), slice(None), self.rng.randrange(bias.shape[2]))
                bias[place if self.rng.random() < 0.5 else (..., slice(0, self.rng.randint(1, bias.shape[3])))] = number
                self.odd.add(f"{number:g} as bias")
        return bias

    def choice(self) -> tuple[str, Array | None]:
        """The method, and the gradient of the result if there is one."""
        if self.cached:
            return "merge", None
        empty = str(self.attrs.get("cpu_empty_rows", ""))
        refused = refused_methods(self.heads, self.key_heads, self.ranks, "sink" in self.inputs, empty)
        dy = None
        plain = not {"sink"} & self.inputs.keys() and self.inputs["key"].shape == self.inputs["value"].shape
        if plain and self.rng.random() < 0.5 and empty != "unmasked" and self.kind == np.float32:
            dy = self.numbers.standard_normal(self.inputs["query"].shape).astype(self.kind)
            refused |= refused_with_gradient(self.attrs)
        return self.rng.choice(
            [each for each in METHODS if each not in refused and (each != RING or self.ranks > 1)] or [GATHER]
        ), dy

    def whole_inputs(self) -> dict[str, Array]:
        """Those of one call, with the band as a mask where the call has caches."""
        mask = self.inputs.get("atten_mask", np.zeros((1, 1), np.bool_))
        if self.cached:
            places = np.arange(self.rows)[:, None]
            places = places + (self.length - self.rows if self.attrs["sparse_mode"] == 4 else 0)
            apart = np.arange(self.length)[None] - places
            mask = mask | (apart < -self.attrs["pre_tockens"]) | (apart > self.attrs["next_tockens"])
        return {**self.inputs, "atten_mask": mask}

    def by_kernel(self) -> dict[str, Array]:
        """The results of one call."""
        inputs, attrs = self.whole_inputs(), dict(self.attrs)
        if self.cached:
            attrs |= {"sparse_mode": 0, "pre_tockens": UNLIMITED, "next_tockens": UNLIMITED}
            return eager.run("FlashAttentionScore", inputs, attrs, FORWARD_OUTPUTS[:1])
        forward = eager.run("FlashAttentionScore", inputs, attrs, FORWARD_OUTPUTS)
        if self.dy is None:
            return {"attention_out": forward["attention_out"]}
        backward = _of_gradient(inputs, forward, self.dy)
        return {**forward, **eager.run("FlashAttentionScoreGrad", backward, attrs, GRADIENT_OUTPUTS)}

    def by_ranks(self) -> dict[str, Array]:
        """The results of the ranks, joined."""
        parts = divided(CYCLIC, self.ranks, self.length) if self.cached else Parts(self.order, self.ranks, self.length)
        if self.cached:
            made = run_threads(self.ranks, lambda own: self.merged(own, parts), TIMEOUT)
            return {"attention_out": made[0]}
        results = run_threads(self.ranks, lambda own: self.own_results(own, parts), TIMEOUT)
        return {
            name: parts.joined([each[name] for each in results], 2 if name in STATISTICS else self.axis)
            for name in results[0]
        }

    def merged(self, own: Communicator, parts: Parts) -> Array:
        """The result of one rank, of caches."""
        mine = {name: parts.own(x, self.axis, own.rank) if name in KEYS else x for name, x in self.inputs.items()}
        return cache_attention(own, parts, self.attrs, mine)

    def own_results(self, own: Communicator, parts: Parts) -> dict[str, Array]:
        """The results of one rank, of a sequence."""
        mine = {name: self.part(name, array, own.rank, parts) for name, array in self.inputs.items()}
        attrs = {**self.attrs, "method": self.method}
        if self.dy is None:
            return {"attention_out": sequence_attention(own, parts, attrs, mine)[0]}
        forward = dict(zip(FORWARD_OUTPUTS, sequence_attention(own, parts, attrs, mine, FORWARD_OUTPUTS), strict=True))
        backward = _of_gradient(mine, forward, parts.own(self.dy, self.axis, own.rank))
        gradients = sequence_gradient(own, parts, attrs, backward)
        return {**forward, **dict(zip(GRADIENT_OUTPUTS, gradients, strict=True))}

    def part(self, name: str, array: Array, rank: int, parts: Parts) -> Array:
        """What a rank has of an input."""
        if name in ("query", "key", "value"):
            return parts.own(array, self.axis, rank)
        rows = name != "sink" and self.method != "all-to-all" and array.shape[-2] != 1
        return parts.own(array, array.ndim - 2, rank) if rows else array

    def terms(self, name: str) -> float:
        """How large the terms are that may cancel in a result."""
        return 1.0 if name in GRADIENT_OUTPUTS else 0.0

    @property
    def detail(self) -> str:
        """The call for the reader."""
        shapes = {name: f"{array.dtype}{list(array.shape)}" for name, array in self.inputs.items()}
        return f"{self.ranks} ranks, {self.order}, {self.attrs}, {shapes}, {sorted(self.odd)}"


def _of_gradient(inputs: Mapping[str, Array], forward: Mapping[str, Array], dy: Array) -> dict[str, Array]:
    """The inputs of the gradient."""
    made = {name.replace("real_shift", "pse_shift"): array for name, array in inputs.items()}
    statistics = {name: forward[name] for name in STATISTICS}
    return {**made, **statistics, "attention_in": forward["attention_out"], "dy": dy}


def _fault(wanted: Array, got: Array, terms: float) -> str | None:
    """How two results differ; None where they agree."""
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return "another shape or type"
    if (np.isnan(wanted) != np.isnan(got)).any():
        return "NaN at other places"
    finite = np.isfinite(wanted)
    if (np.isfinite(got) != finite).any() or (wanted != got)[~finite & ~np.isnan(wanted)].any():
        return "infinities at other places"
    near = TOLERANCE[str(wanted.dtype)]
    largest = max(float(np.abs(wanted, where=finite, out=np.zeros_like(wanted)).max(initial=0.0)), terms)
    with np.errstate(all="ignore"):
        apart = np.abs(np.where(finite, wanted.astype(np.float64) - got, 0))
    return None if (apart <= near * largest).all() else "other numbers"
