"""A model with a few things changed, and who judges it: what the kinds have in common that change models."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from fa_compiler.passes.masks.magnitudes import FLOAT16_MAX
from fa_compiler.protos.subgraphs import all_nodes
from tools.fuzz.difference import Array, Feed
from tools.fuzz.feeds import feeds
from tools.fuzz.graph import Case
from tools.fuzz.mutations import change, forget
from tools.fuzz.oracle import NARROWED, ROUNDED, SCORE_BITS, STEEP, Judge
from tools.fuzz.snippets import case_of

OVERFLOWING = ("huge", "overflow")
"""Styles in which gradients, sums of products of sums, are no numbers, and not the same ones."""
DOUBLING = ("overflow",)
"""The style in which a change that doubles probabilities makes sums overflow, and the kernels' sums do not."""
UNDEFINED = re.compile(r"(is|Mul|Add|Sub|Max|Min) -?(nan|inf|[\d.]+e\+3[0-9])|is Div$|Div of \[.*\] inf")
"""Changes that put in what is no number, or make infinities of query, key and value, as dividing by a cache does. The
operator may not come to these, in another order. In float16 a factor beyond its numbers is infinite, too."""
NARROWING = "Cast before"
"""A Cast to 16 bits and back."""
SHORT_FLOATS = (onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16)
WIDENING = "computes in float64"
"""Sums of 16 bits that are cast twice ONNX Runtime rounds where somebody else reads their shape."""
LARGE_FACTOR = 100.0
"""With a factor of this size the numbers of float16 masks are beyond float16, where ONNX Runtime does not round them:
sums of them round otherwise in another order."""
LOGARITHMS = ("Log", "ReduceLogSumExp")
"""Scores less the logarithm of a sum are as rounded as the scores: of large ones the exponential may be infinite."""
APART = "a size of"
"""A dimension that was told apart from those it equals."""
SPREAD = "Expand to"
"""A batch that is spread to a number: it is the number, or 1."""
JOINED = "axis of Concat"
"""Its operands need not agree along the axes that it had and has. ONNX Runtime leaves out an empty one."""
OVERFLOWS = 1e15
"""With a factor of this size the number of a mask may be infinite in float32, where it is any of the larger ones."""
FACTOR = re.compile(r"(?:Mul|Div|Add|Sub|Max|Min) (?:of \[.*?\] )?(-?[\d.]+(?:e[+-]?\d+)?) before")

TURNED = re.compile(r"Add \S+ is Sub")
MULTIPLIED = re.compile(r"(?:Mul|Div) (?:of \[.*?\] )?(-?[\d.]+(?:e[+-]?\d+)?) before")
OVERFLOWS_HUGE = 1e8
"""With a factor of this size the values of a `huge` feed, up to 1e30, are infinite."""
SUMMED = re.compile(r"(?:Add|Sub|Max|Min) (?:of \[.*?\] )?(-?[\d.]+(?:e[+-]?\d+)?) before \w*(?:MatMul|Einsum|Gemm)")
"""A large number that a product sums up: what it is added to is rounded as large scores are."""
TERMS = 10.0
"""So many of it, at most, as heads have numbers."""


def judged(
    case: Case, rng: random.Random, seed: int, gradient: bool = False, changes: int | None = None
) -> Judge | None:
    """The judge of a case after so many changes, or a few; None where they leave no model. `gradient` says whether its
    outputs are gradients."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    words = list(case.words)
    for _ in range(rng.choice([0, 1, 1, 1, 1, 2, 2, 3]) if changes is None else changes):
        try:
            words.append(change(model, rng) or "")
        except Exception:  # of onnx: the model is none any more, and cannot be changed again
            return None
    if changes != 0 and rng.random() < 0.9:
        forget(model)
    arrays = _fitting(case.base, model)
    if arrays is None:
        return None
    changed = case_of(model, arrays, words)
    roles = {each.name: (each.role, each.number) for each in case.inputs}
    changed.inputs = [replace(each, role=roles[each.name][0], number=roles[each.name][1]) for each in changed.inputs]
    # What the user vouches for holds of the model as it was.
    changed.assume = case.assume if changes == 0 else ()
    changed.loose |= any(word.startswith(APART) for word in words)
    open_sizes = are_open(words)
    narrowed = any(word.startswith(NARROWING) for word in words)

    def fed() -> list[Feed]:
        made = [replace(each, lenient=each.lenient or open_sizes) for each in feeds(changed, seed, 3)]
        if gradient:
            return [each for each in made if each.name not in OVERFLOWING and not each.spoiled]
        return [each for each in made if each.name not in (OVERFLOWING if narrowed else DOUBLING)]

    made = Judge(model, fed, changed.assume, seed % 32 == 0, "; ".join(words))
    made.loose = any(dim.dim_param for each in model.graph.input for dim in each.type.tensor_type.shape.dim)
    allow_for(made, words)
    if made.undefined and any(node.op_type == "TopK" for node in model.graph.node):
        return None  # of equal scores, or of NaN, any keys are selected
    # Queries and keys that a test makes infinite have no finite scores.
    given = (case.base[each.name] for each in case.inputs if each.role == "value" and each.name in case.base)
    made.undefined |= case.undefined or any(bool(np.isinf(array).any()) for array in given)
    # A mask of -inf that is subtracted gives scores of +inf.
    masked = any(bool(np.isneginf(array).any()) for array in case.base.values() if array.dtype.kind == "f")
    made.undefined |= masked and any(TURNED.match(word) for word in words)
    made.group = "a factor is NaN or infinite, " if made.undefined else ""
    if gradient:
        made.terms, made.most = multiplied(_terms, words), STEEP
    return made


def multiplied(terms: Callable[[Feed, str], float], words: Sequence[str]) -> Callable[[Feed, str], float]:
    """The size of terms that these changes multiply with numbers."""
    factor = math.prod(each for each in _factors(words) if 1.0 < each < math.inf)
    return lambda feed, output: terms(feed, output) * factor


def are_open(words: Sequence[str]) -> bool:
    """Do these changes leave sizes open that need not agree? Then a refusal is right (recognised.md)."""
    return any(word.startswith((APART, SPREAD, JOINED)) for word in words)


def allow_for(made: Judge, words: Sequence[str]) -> None:
    """Have a judge excuse what these changes do on purpose."""
    inputs = [each.type.tensor_type.elem_type for each in made.model.graph.input]
    short = onnx.TensorProto.FLOAT16 in inputs
    rounded = any(word.startswith(NARROWING) or (short and word.endswith(WIDENING)) for word in words)
    rounded |= not short and any(_narrows(node) for node in all_nodes(made.model.graph.node))
    large = short and max(_factors(words), default=0.0) > LARGE_FACTOR
    made.rough = NARROWED if rounded or large else 1.0
    summed = [abs(float(each)) for word in words for each in SUMMED.findall(word)]
    made.rough = max(made.rough, TERMS * max(summed, default=0.0) * SCORE_BITS)
    if any(node.op_type in LOGARITHMS for node in all_nodes(made.model.graph.node)):
        made.most = ROUNDED
    # The number of a mask, or a half of it, overflows with such a factor.
    infinite = max(_factors(words), default=0.0) > (FLOAT16_MAX if short else OVERFLOWS)
    infinite |= any(abs(float(each)) > OVERFLOWS_HUGE for word in words for each in MULTIPLIED.findall(word))
    made.undefined = infinite or any(UNDEFINED.search(word) for word in words)


def _narrows(node: onnx.NodeProto) -> bool:
    """Is it a Cast to 16 bits?"""
    return node.op_type == "Cast" and any(each.name == "to" and each.i in SHORT_FLOATS for each in node.attribute)


def _factors(words: Sequence[str]) -> list[float]:
    """The sizes of the numbers that these changes combine with values."""
    return [abs(float(each)) for word in words for each in FACTOR.findall(word)]


def _terms(feed: Feed, output: str) -> float:
    """How large the terms of a gradient may be, which cancel where scores are large or keys are few."""
    sizes = sorted(float(np.abs(each).max(initial=1.0)) for each in feed.arrays.values() if each.dtype.kind == "f")
    return float(np.prod(sizes[-2:]))


def _fitting(arrays: Mapping[str, Array], model: onnx.ModelProto) -> dict[str, Array] | None:
    """The numbers as the changed model takes them: another type at most. None where it declares other sizes."""
    fitting: dict[str, Array] = {}
    sizes: dict[str, int] = {}
    for info in model.graph.input:
        if info.name not in arrays:
            return None
        dtype = onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type)
        with np.errstate(all="ignore"):
            fitting[info.name] = np.asarray(arrays[info.name]).astype(dtype)
        dims = info.type.tensor_type.shape.dim
        named = zip(dims, fitting[info.name].shape, strict=True) if dims else ()
        if any(dim.dim_param and sizes.setdefault(dim.dim_param, size) != size for dim, size in named):
            return None  # what has one name has one size
    return fitting
