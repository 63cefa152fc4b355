"""Makes other inputs for a model: with other sizes along its symbolic axes, other masks, and rows masked everywhere.

The corpus has one set of inputs for each model. A fused model may be correct for these inputs only: sizes may be
frozen, a mask may have no effect, and no row is empty.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping

import numpy as np
import onnx

VARIANTS = ("other sizes", "longer, random mask", "one sequence, last row masked everywhere")
"""What each variant changes, in words."""

BATCHES = (3, 1, 2)
LONGER = (-1, 5, 0)
"""For each variant: the size of a symbolic first axis, and the number that is added to any other symbolic axis."""

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
}

Feeds = dict[str, np.ndarray]


def vary(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], variant: int) -> Feeds:
    """The inputs of a variant, drawn to resemble `feeds`.

    Symbolic axes get new sizes. Axes of the same name have the same size, and an axis that is a sum of names has the
    sum of their sizes. Integers stay within the range of the given ones, 0/1 masks stay masks, and floats keep the mean
    and the deviation, or are drawn from the given values if there are few different ones.
    """
    rng = np.random.default_rng(variant)
    sizes = _sizes(model, feeds, variant)
    result: Feeds = {}
    for value in model.graph.input:
        if value.name not in feeds:
            continue
        old = feeds[value.name]
        dims = value.type.tensor_type.shape.dim
        shape = [
            _size(dim.dim_param, sizes, length) if dim.dim_param else length
            for dim, length in zip(dims, old.shape, strict=True)
        ]
        result[value.name] = _draw(old, shape, variant, rng)
    return result


def _sizes(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], variant: int) -> dict[str, int]:
    """New sizes of the symbolic axes that are single names. The first axis is the batch."""
    sizes: dict[str, int] = {}
    for value in model.graph.input:
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.dim_param.isidentifier() and value.name in feeds:
                old = feeds[value.name].shape[axis]
                new = BATCHES[variant] if axis == 0 else max(old + LONGER[variant], 1)
                sizes.setdefault(dim.dim_param, new)
    return sizes


def _size(expression: str, sizes: Mapping[str, int], otherwise: int) -> int:
    """The size of a symbolic axis: a name, or a sum or product of names and numbers."""
    try:
        return _evaluate(ast.parse(expression, mode="eval").body, sizes)
    except (SyntaxError, KeyError):
        return otherwise


def _evaluate(node: ast.expr, sizes: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int(number)):
            return number
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_evaluate(left, sizes), _evaluate(right, sizes))
    raise KeyError(ast.dump(node))


def _draw(old: np.ndarray, shape: list[int], variant: int, rng: np.random.Generator) -> np.ndarray:
    if old.dtype.kind not in "biuf" or old.size == 0:
        return np.resize(old, shape)
    flat = old.reshape(-1)
    distinct = np.unique(flat)
    if old.dtype.kind == "f" and len(distinct) > 4:
        finite = flat[np.isfinite(flat)].astype(np.float64)
        return rng.normal(finite.mean(), finite.std(), shape).astype(old.dtype)
    if set(distinct.tolist()) <= {0, 1} and len(shape) >= 2 and old.shape[-1] > 1:
        drawn = rng.integers(0, 2, shape) if variant != 0 else np.ones(shape, int)
        if variant == 0:
            drawn[-1, ..., : shape[-1] // 3] = 0
        if variant == 2:
            drawn[-1] = 0
        return drawn.astype(old.dtype)
    if old.dtype.kind == "f" or old.dtype == np.bool_:
        return rng.choice(distinct, shape)
    return rng.integers(int(flat.min()), int(flat.max()) + 1, shape).astype(old.dtype)
