"""The values of a region that can be operands or outputs of a linear attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.ir.nodes import FLOATS, inputs_of, is_op, number_of, reached, source_through
from fa_compiler.passes.linear.arrangement import arranged, has_order
from fa_compiler.passes.linear.evaluation import Evaluation
from fa_compiler.passes.linear.regions import Region
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.ops.elementwise import FOUR_OPERATIONS
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.values.shapes import ShapeInfo

MOVERS = (*MOVES, "Cast", "Pad", "Split")
"""Operators whose first operand is looked at, too: it may be the operand in another arrangement."""
ARITHMETIC = ("Mul", "Div", "Neg", "Exp")
"""Operators whose operands are looked at, too: a product with beta, a scale, a decay."""
MOST_VALUES = 256
MOST_PARTS = 4
"""So many parts of one shape of one tensor are looked at. Those of an unrolled loop are one for
each token."""
STEPS_BACK = 2


@dataclass(frozen=True)
class Operand:
    """A value as an operand. `order` names the axes in it; `heads` is its own number of heads, and
    `batch` and `tokens` tell whether it has these axes or is the same along them. The last `cut`
    dimensions are read at index 0, because the value is the same along them. A decay is
    `logarithmic` where the value is its logarithm.

    In `order`, d are the dimensions of a key, and e those of a value."""

    value: ir.Value
    order: str
    heads: int
    cut: int = 0
    has_batch: bool = True
    has_tokens: bool = True
    logarithmic: bool = False


@dataclass(frozen=True)
class Sizes:
    """The sizes of one hypothesis: batch, tokens, heads, key and value dimensions."""

    batch: int
    tokens: int
    heads: int
    key: int
    value: int

    @property
    def of_state(self) -> dict[str, int]:
        """The sizes of the axes of a state."""
        return {"b": self.batch, "h": self.heads, "k": self.key, "v": self.value}


def upstream(region: Region, info: ShapeInfo) -> dict[ir.Value, int]:
    """The values that may be operands, each with the number of products between it and the region:
    those that enter the region's products, and what these are made of. A product with a single
    number does not count. What stands first in the graph comes last."""
    found, seen = dict[ir.Value, int](), set[ir.Value]()
    parts = Counter[tuple[ir.Value, Shape | None]]()
    pending = [(value, 0) for value in region.locals]
    while pending and len(found) < MOST_VALUES:
        value, steps = pending.pop(0)
        if value in seen or region.depth(value) or info.dtype(value) not in FLOATS:
            continue
        seen.add(value)
        part = (source_through(value, *MOVERS), info.shape(value))  # what it is a part of, or holds
        parts[part] += 1
        if parts[part] <= MOST_PARTS:
            found[value] = steps
        node = value.producer()
        if node in region.members:
            same, further = _sources(node)
            pending[:0] = [(source, steps) for source in same]
            pending.extend((source, steps + 1) for source in further if steps < STEPS_BACK)
    places = {output: place for place, node in enumerate(region.nodes) for output in node.outputs}
    return dict(sorted(found.items(), key=lambda item: places.get(item[0], -1), reverse=True))


def _sources(node: ir.Node) -> tuple[list[ir.Value], list[ir.Value]]:
    """The operands that hold the same numbers as the result, but for their places and a scale, and
    the others of a product. What a Where chooses beside one number, such as a first state that is
    reset, is a product."""
    given = inputs_of(node)
    if is_op(node, *MOVERS):
        return given[:1], []
    if is_op(node, "Mul", "Div") and any(map(_is_single, given)):
        return [operand for operand in given if not _is_single(operand)], []
    if is_op(node, "Where"):
        chosen = [value for value in given[1:] if not _is_filler(value)]
        return [], chosen if len(chosen) == 1 else []
    return [], given if is_op(node, *ARITHMETIC) else []


def _is_single(value: ir.Value) -> bool:
    return number_of(value) is not None


def _is_filler(value: ir.Value) -> bool:
    return _is_single(value) or is_op(value.producer(), "ConstantOfShape")


def downstream(region: Region) -> list[ir.Value]:
    """The values that may be outputs or last states: the exits, and what they are made of without a
    product. Those behind the most products come first, because an output is a product with the last
    state."""

    def behind(value: ir.Value) -> Iterator[ir.Value]:
        node = value.producer()
        if is_op(node, *MOVERS, *ARITHMETIC, *FOUR_OPERATIONS, "Where"):
            deep = [each for each in inputs_of(node) if region.depth(each)]
            yield from deep if len(deep) == 1 else ()

    return sorted(reached(region.exits, behind, limit=MOST_VALUES), key=region.depth, reverse=True)


def read(operand: Operand, point: Evaluation, sizes: Sizes) -> np.ndarray | None:
    """The numbers of a token's operand: [B,T,H,D] or [B,T,H], with as many heads as it has. A decay
    is returned as its power, [B,T,H,1 or Dk]. None where the value has another size, or is not the
    same along what is cut."""
    tensor = point.tensor(operand.value)
    numbers = tensor.powers() if operand.logarithmic else tensor.numbers()
    return if_known(arranged_as, if_known(cut, numbers, operand.cut), operand, sizes)


def arranged_as(numbers: np.ndarray, operand: Operand, sizes: Sizes) -> np.ndarray | None:
    """Numbers whose axes lie as an operand says, with the axes in the usual order; None where they
    do not fit."""
    own = own_sizes(operand, sizes)
    if set(own) != set(operand.order) or not has_order(numbers.shape, operand.order, own):
        return None
    return arranged(numbers, operand.order, own)


def own_sizes(operand: Operand, sizes: Sizes) -> dict[str, int]:
    """The sizes of the axes that an operand has."""
    own = rows_of(operand, sizes)
    if "d" in operand.order:
        own["d"] = sizes.key
    if "e" in operand.order:
        own["e"] = sizes.value
    return own


def rows_of(operand: Operand, sizes: Sizes) -> dict[str, int]:
    """The sizes of batch, tokens and heads; 1 along those that an operand lacks."""
    along = {"b": (sizes.batch, operand.has_batch), "t": (sizes.tokens, operand.has_tokens)}
    return {axis: size if has else 1 for axis, (size, has) in along.items()} | {"h": operand.heads}


def cut(numbers: np.ndarray, count: int) -> np.ndarray | None:
    """An array at index 0 of its last dimensions; None where it differs along them."""
    if not count:
        return numbers
    if numbers.ndim < count:
        return None
    flat = numbers.reshape(*numbers.shape[: numbers.ndim - count], -1)
    one = flat[(slice(0, 1),) * (flat.ndim - 1)]
    if (one != one[..., :1]).any():
        return None
    return flat[..., 0] if (flat == flat[..., :1]).all() else None
