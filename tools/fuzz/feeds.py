"""What users can feed: plain numbers, and everything that is not plain.

An input's role says what its numbers mean:

    value    query, key, value: normal numbers                  bias     normal numbers, added to scores
    fmask    a float mask: 0 and the number of the mask         scale01  floats that are 0 or 1
    bool     true where a key is kept                           int01    1 where a key is kept, else 0
    labels   which packed sequence a token is of                index    indices below the size of a dimension
    sink     one more score of a row                            window   a small whole number
    lengths  how many keys count, of each batch entry           int8     any int8: caches
    table    numbers of blocks, negative ones counted from the end
    factor   a number that scores are multiplied with, or divided by
    integers LOW HIGH    any integer from LOW to HIGH

A style changes what a run is fed. A user's word (--assume) leaves out what breaks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tools.fuzz.difference import LARGEST, Array, Feed
from tools.fuzz.graph import Case, Input

OWN_HEADS = frozenset("KV")
"""How many heads key and value have: 1 is repeated for all of the query."""
MASKS = ("bool", "int01", "scale01", "fmask")
STYLES = (
    "ones", "zeros", "rows", "twos", "negative", "packed", "mixed", "many", "large", "huge", "near", "nan keys",
    "nan values", "infinite keys", "infinite values", "nan bias", "infinite bias", "sizes", "empty", "one batch",
    "overflow", "low bias", "one size",
)  # fmt: skip
FACTORS = (0.0, 0.0, -1.0, 1e-30, 1e37, np.inf, np.nan)
"""Of a factor in the style "many": as a divisor, 0 makes infinite scores. In float16, 1e37 is infinite."""
NUMBERS = (0.0, -1e4, -1e9, -LARGEST, -LARGEST / 2, -np.inf, -65504.0, 1e4, 1.0, -30.0, -1e30)
TAME = ("plain", "ones", "sizes", "one batch", "one size")
"""Styles that break nobody's word: scores stay small, masks hold what they are for."""
FIXED = ("plain", "ones", "one batch")
"""The same where inputs hold given numbers, as lengths that would be beyond another size."""
Rng = np.random.Generator


def feeds(case: Case, seed: int, count: int = 4) -> list[Feed]:
    """Plain ones first, then others in a random choice of styles."""
    rng = np.random.default_rng(seed)
    tame = FIXED if case.base else TAME
    styles = [style for style in STYLES if not case.assume or style in tame]
    # A late division or a factor on the probabilities loses sums that are too large, and the kernels do not.
    if {"late", "factor behind"}.intersection(case.words):
        styles = [style for style in styles if style != "overflow"]
    named = ["plain", *rng.choice(styles, count - 1, replace=False)] if count > 1 else ["plain"]
    roles = {each.role for each in case.inputs}
    wanted = {"zeros": roles.intersection(MASKS), "many": bool(roles.intersection(("sink", "factor")))}
    named += [style for style, holds in wanted.items() if holds and style not in named and not case.assume]
    if case.open & OWN_HEADS and "one size" not in named:
        named.append("one size")
    return [feed(case, str(style), rng) for style in named]


def feed(case: Case, style: str, rng: Rng) -> Feed:
    """Inputs of one style."""
    sizes, lenient = dict(case.sizes), False
    # ONNX Runtime's kernels of these divide by a size of 0, which ends the process.
    least = any(node.op_type in ("ScatterElements", "Einsum") for node in case.model.graph.node)
    if style == "sizes" and case.open:
        for letter in sorted(case.open):
            if rng.random() < 0.6:
                sizes[letter] = int(rng.choice([int(least), 1, 2, 3, 5, 7]))
        matched = rng.random() < 0.8
        sizes["M"] = sizes.get("B", 1) if matched else sizes.get("M", 1)
        lenient = not matched or bool(case.open & {"N", "D"})
    elif style == "one size" and case.open:
        letter = str(rng.choice(sorted(case.open & OWN_HEADS or case.open)))
        sizes[letter] = sizes["M" if letter == "B" else letter] = 1
        # Batches of 1 are repeated; what else does not agree may be refused. Where tokens come first, the first
        # dimension is no batch: a mask of more keys enlarges the scores of one.
        lenient = not any(len(each.dims) > 2 and each.dims[0] == letter for each in case.inputs)
        lenient |= letter in ("N", "D", "S", "T")
    elif style == "empty" and case.open and not least:
        letter = sorted(case.open - {"M"})[int(rng.integers(len(case.open - {"M"})))]
        sizes[letter] = 0
        sizes["M"] = sizes.get("B", 1)
        # ONNX Runtime's Concat leaves out an operand without elements, whatever its other sizes are.
        lenient = all(each.role == "sink" for each in case.inputs if letter in each.dims)
    elif style == "one batch":
        # A mask whose batch stays what it was enlarges the result, and is refused (recognised.md).
        sizes.update(dict.fromkeys([each for each in case.open if each == "B" or "batch" in each], 1))
        batches = (each.dims[0] for each in case.inputs if len(each.dims) > 2)
        lenient = any(isinstance(each, str) and sizes[each] > sizes.get("B", 1) for each in batches)
    arrays = {each.name: _array(case, each, _shape(each, sizes), style, rng) for each in case.inputs}
    spoiled = _spoil(case, arrays, style, rng)
    if style == "near":  # equal keys: masks decide, and nothing else; values half-way between whole multiples
        for each in case.inputs:
            if each.role == "value" and each.name != "v" and not case.base:
                arrays[each.name] = np.ones_like(arrays[each.name])
            elif each.role == "value":
                halves = rng.integers(-80, 80, arrays[each.name].shape) + 0.5
                arrays[each.name] = (halves * rng.choice([0.03, 0.1, 2.0**-5])).astype(each.dtype)
    # Heads of key and value have to agree (recognised.md).
    lenient |= "V" in case.open and sizes.get("K") != sizes["V"]
    lenient |= case.loose and style in ("sizes", "empty", "one batch", "one size")
    return Feed(style, arrays, lenient, spoiled)


def _shape(given: Input, sizes: Mapping[str, int]) -> tuple[int, ...]:
    return tuple(each if isinstance(each, int) else sizes[each] for each in given.dims)


def _array(case: Case, given: Input, shape: tuple[int, ...], style: str, rng: Rng) -> Array:
    dtype = np.dtype(given.dtype)
    made: Any
    base = case.base.get(given.name)
    if base is not None and (given.role in ("fixed", "value") or style == "plain"):
        with np.errstate(all="ignore"):
            made = np.resize(base, shape) if base.size else np.zeros(shape)
            if given.role == "value":
                large = made.astype(np.float64) * _size(given, style, rng)
                made = np.where(np.isfinite(made), np.clip(large, -LARGEST, LARGEST), made)
            return made.astype(dtype)
    with np.errstate(all="ignore"):
        match given.role:
            case "value":
                made = np.clip(rng.standard_normal(shape) * _size(given, style, rng), -LARGEST, LARGEST)
            case "bias":
                made = rng.standard_normal(shape) * (1e4 if style == "low bias" else 1.0)
                made = made - (2e4 if style == "low bias" else 0.0)
                if style == "many" and dtype == np.float32:
                    made = rng.choice(NUMBERS, shape)
            case "sink":
                made = rng.standard_normal(shape) * (50.0 if style in ("large", "huge") else 1.0)
                if style == "many":
                    made = np.where(rng.random(shape) < 0.3, np.inf * rng.choice([1, -1], shape), made)
            case "factor":
                made = given.number * rng.uniform(0.5, 1.5, shape)
                if style == "many":
                    made = np.where(rng.random(shape) < 0.5, rng.choice(FACTORS, shape), made)
            case "labels":
                made = _labels(case, shape, style, rng)
            case "window":
                made = rng.integers(0, 4, shape)
            case "int8":
                made = rng.integers(-128, 128, shape)
            case role if role.startswith("integers "):
                made = rng.integers(*map(int, role.split()[1:]), shape, endpoint=True)
            case "table":
                made = rng.integers(-int(given.number), int(given.number), shape)
            case "index":
                made = rng.integers(0, max(1, int(given.number)), shape)
            case "lengths":
                made = rng.integers(1, int(given.number) + 1, shape)
            case _:
                made = _mask(case, given, shape, style, rng)
        return np.asarray(made).astype(dtype)


def _size(given: Input, style: str, rng: Rng) -> float:
    """Of the numbers in query, key and value; the product of two numbers does not overflow."""
    if style == "overflow":  # of sums of values
        return 1.5e38 if given.name == "v" and given.dtype == "float32" else 1.0
    if style == "large":
        return 6.0
    if style != "huge":
        return 1.0
    if given.dtype == "float16":
        return float(rng.choice([4.0, 12.0]))
    if given.name == "v":
        return float(rng.choice([1.0, 1e3, 1e30]))
    return float(10.0 ** rng.uniform(1.0, 15.0))


def _labels(case: Case, shape: tuple[int, ...], style: str, rng: Rng) -> Array:
    if style in ("twos", "ones"):
        return np.full(shape, 2 if style == "twos" else 1)
    steps = rng.random(shape) < 0.4
    runs: Array = np.cumsum(steps, axis=-1)
    if style in ("mixed", "many") and "unbroken-sequences" not in case.assume:
        return rng.integers(-1, 3, shape)
    return runs


def _keep(shape: tuple[int, ...], style: str, rng: Rng, assume: Sequence[str]) -> Array:
    """Which keys are kept: true and false, the last axis are the keys."""
    if style == "ones":
        return np.ones(shape, np.bool_)
    if style == "zeros":
        return np.zeros(shape, np.bool_)
    keep = rng.random(shape) < rng.choice([0.3, 0.6, 0.9])
    if style == "rows" and shape:
        keep &= rng.random((*shape[:-1], 1)) < 0.5
    if "no-empty-rows" in assume and shape:
        keep[..., :1] = True
        if shape[-1] == 1:
            keep[...] = True
    return keep


def _mask(case: Case, given: Input, shape: tuple[int, ...], style: str, rng: Rng) -> Array:
    keep = _keep(shape, style, rng, case.assume)
    if given.role == "bool":
        return keep
    if given.role == "fmask":
        number = given.number
        if style == "many" and not case.assume:
            return rng.choice(NUMBERS, shape)
        if style == "mixed" and not case.assume:
            return np.where(keep, rng.standard_normal(shape), number)
        return np.where(keep, 0.0, number)
    whole = keep.astype(np.int64)
    if style == "twos":
        return np.full(shape, 2) if rng.random() < 0.5 else whole * 2
    if style == "negative":
        return -whole if rng.random() < 0.5 else np.full(shape, -1)
    if style in ("packed", "mixed"):
        return np.cumsum(rng.random(shape) < 0.5, axis=-1) if shape else np.array(2)
    if style == "many":
        return (
            rng.choice([0, 1, 2, -1, 3, 5], shape) if given.role == "int01" else rng.choice([0, 1, 0.5, 2, -1], shape)
        )
    return whole


def _spoil(case: Case, arrays: dict[str, Array], style: str, rng: Rng) -> tuple[str, ...]:
    """Put NaN or an infinity into one key or value, or into float masks; returns the names of the inputs."""
    if style == "many":
        return tuple(each.name for each in case.inputs if each.role == "factor")
    kind, _, where = style.partition(" ")
    if kind not in ("nan", "infinite") or where not in ("keys", "values", "bias"):
        return ()
    spoiled: list[str] = []
    number = np.nan if kind == "nan" else rng.choice([np.inf, -np.inf])
    wanted = {"keys": ("k",), "values": ("v",)}.get(where)
    for each in case.inputs:
        array = arrays[each.name]
        if array.dtype.kind != "f" or not array.size:
            continue
        if wanted is not None and each.name in wanted:
            # The whole of one token, or one number of it.
            axis = [index for index, dim in enumerate(each.dims) if dim in ("T", "S")]
            place: list[Any] = [slice(None) if rng.random() < 0.5 else int(rng.integers(size)) for size in array.shape]
            if axis:
                place[axis[0]] = int(rng.integers(array.shape[axis[0]]))
            array[tuple(place)] = number
            spoiled.append(each.name)
        elif wanted is None and each.role in ("bias", "fmask"):
            array[rng.random(array.shape) < 0.2] = number
            if number != -np.inf:
                spoiled.append(each.name)
    return tuple(spoiled)
