"""Views: values seen through the operators that only move elements, and through scalar factors.

Grammar of what `Viewer.view` looks through, from a value towards its source:

    layout   := Transpose | Reshape | Flatten | Squeeze | Unsqueeze | Identity | Expand | Tile |
             Concat(x, ..., x)
              | Gather(x, i)     i constant, 0 0 1 1 ... or 0 1 ... 0 1 ...: the repeated heads of
                                 grouped attention
    factor   := Mul(x, c) | Mul(c, x) | Div(x, c) | Neg(x)      c one finite number known before the
                                                                run
    widening := Cast(16-bit -> float32 | float32 -> float64)    only when asked for
    same     := Cast(T -> T) | Dropout that drops nothing | Pad of no width
              | Add(x, 0) | Add(0, x) | Sub(x, 0)               as large as x, as Paddle writes a
                                                                scale without bias

A view looks through a layout operator only where the resulting arrangement is proven (see axes.py).
Otherwise the operator's output is the base of the view. A factor is multiplied into `scale`. The
contraction that reads the view is linear, so the factor may be applied to the product instead; only
the rounding changes. A widening cast is exact. Why adding 0 is harmless is said in ops/moves.py.
The fused operator reads the base itself, so other readers of the values in between do not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.answer.budget import spend
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import certain, is_op
from fa_compiler.passes.ops.movers import REPEATS
from fa_compiler.passes.ops.moves import Converted, Move, move_of
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import ShapeInfo

WIDENING = {
    (ir.DataType.FLOAT16, ir.DataType.FLOAT),
    (ir.DataType.BFLOAT16, ir.DataType.FLOAT),
    (ir.DataType.FLOAT, ir.DataType.DOUBLE),
}
MAX_BASES = 16
"""So many bases in a row are tried, each one operator further down. The next one tried is the
result of the operator at which the last of them failed: else a long chain would be walked from each
of its values."""
RESIZING = ("Reshape", "Flatten", *REPEATS, "Concat", "Gather")


@dataclass(frozen=True)
class View:
    """`value == scale * rearranged(base)`.

    `base_dims` holds the axes of each dimension of the base, `dims` those of each dimension of the
    value. The base is broadcast along axes that are in `dims` and not in `base_dims`.
    `equivalent_values` are values between the base and the viewed value, the base first, each with
    its arrangement. They hold the same elements in the base's type and scale, so any of them can be
    read instead of the base.
    """

    base: ir.Value
    base_dims: Arrangement
    dims: Arrangement
    scale: float = 1.0
    equivalent_values: tuple[tuple[ir.Value, Arrangement], ...] = ()


@dataclass
class Viewer:
    """Makes views of values in one axis space."""

    facts: Facts
    space: AxisSpace
    failures: dict[ir.Value, Decline | None] = field(default_factory=dict)
    """Results that scores.py keeps here: why a value does not come from a product, or None when it
    does."""
    depth: int = 0

    @property
    def info(self) -> ShapeInfo:
        """Shapes and types."""
        return self.facts.info

    def base_dims(self, value: ir.Value) -> Arrangement:
        """New axes for the dimensions of a value; empty when its rank is unknown."""
        return tuple(self.space.new(size) for size in self.info.sizes(value))

    def base_view(self, value: ir.Value) -> View | None:
        """The value as its own base; None when its rank is unknown."""
        if self.info.shape(value) is None:
            return None
        dims = self.base_dims(value)
        return View(value, dims, dims, equivalent_values=((value, dims),))

    def view(
        self, value: ir.Value, widening: bool = False, factors: bool = True, shallow: bool = False
    ) -> View | None:
        """The view whose base lies furthest upstream of a value; None when the value's rank is
        unknown.

        `widening` and `factors` say whether it looks through widening casts and factors. With
        `shallow` it looks through no operator that merges, splits or repeats dimensions.
        """
        chain: list[ir.Value] = [value]
        while (source := self._source(chain[-1], widening, factors)) is not None:
            maker = chain[-1].producer()
            if shallow and is_op(maker, *RESIZING):
                break
            chain.append(source)
            spend(maker)
        start = len(chain) - 1
        for attempt in itertools.count(1):
            view, place = self.base_view(chain[start]), start
            while view is not None and place > 0:
                place -= 1
                spend(chain[place].producer())
                view = self.step(view, chain[place])
            if view is not None or start == 0:
                return view
            start = place if attempt % MAX_BASES == 0 and place < start else start - 1
        raise AssertionError("unreachable")

    def view_along(
        self, value: ir.Value, dims: Sequence[Axes | None], factors: bool = False
    ) -> View | None:
        """The view of a value whose dimensions run along these axes; an entry None allows any axes.
        Returns None where the sizes are not proven to be equal."""
        view = self.view(value, factors=factors)
        if view is None or len(view.dims) != len(dims):
            return None
        for own, other in zip(view.dims, dims, strict=True):
            if other is None:
                continue
            if self.space.size(own) != self.space.size(other) or not self.space.unify(own, other):
                return None
        return view

    def alignment(self, value: ir.Value, dims: Arrangement, node: ir.Node) -> Arrangement:
        """The axes along which each dimension of an operand runs when it is broadcast to an
        arrangement; () for a dimension of 1.

        Raises Decline when the operand may be larger than the arrangement. An unknown size counts
        as 1 where the result of `node` is proven to have the size 1.
        """
        shape = self.info.shape(value)
        if shape is None:
            raise Decline(Code.SHAPE, f"the rank of {value.name!r} is unknown", node)
        if len(shape) > len(dims):
            raise Decline(Code.SHAPE, f"{value.name!r} has more dimensions than the scores", node)
        aligned = dims[len(dims) - len(shape) :]
        result = self.info.sizes(node.outputs[0])
        ones = {
            place for place, size in enumerate(result) if size == 1 and len(result) == len(dims)
        }
        for place, (size, dim) in enumerate(
            zip(shape, aligned, strict=True), len(dims) - len(shape)
        ):
            counts_as_one = size.const == 1 or (size.const is None and place in ones)
            if not dim and not counts_as_one:
                raise Decline(Code.SHAPE, f"{value.name!r} may enlarge the scores", node)
        return tuple(
            () if size.const == 1 else dim for size, dim in zip(shape, aligned, strict=True)
        )

    def broadcast_view(self, value: ir.Value, dims: Arrangement, node: ir.Node) -> View:
        """The view of an operand that is broadcast to an arrangement, in the axes of that
        arrangement. The view looks through no factors. Raises Decline where the operand is not
        proven to fit."""
        wanted = self.alignment(value, dims, node)
        sizes = self.info.sizes(value)
        # An operand that may enlarge the arrangement is its own base: an Expand above it may be
        # what enlarges it.
        fits = all(
            size.const == 1 or size == self.space.size(dim)
            for size, dim in zip(sizes, wanted, strict=True)
        )
        view = self.view(value, factors=False) if fits else self.base_view(value)
        if view is None:
            raise Decline(Code.RANK, f"the rank of {value.name!r} is unknown", node)
        for own, other in zip(view.dims, wanted, strict=True):
            if own and not self.space.unify(own, other):
                raise Decline(
                    Code.SHAPE, f"the shape of {value.name!r} was not proven to fit", node
                )
        return view

    def _source(self, value: ir.Value, widening: bool, factors: bool) -> ir.Value | None:
        """The input of an operator that the view looks through; None where the view must end."""
        node = value.producer()
        move = move_of(node, self.info)
        if move is not None and (move.is_layout or isinstance(move, Converted)):
            if not self._keeps_numbers(move, value, widening):
                return None
            return move.source
        if node is None or not factors or (peeled := self.factor(node)) is None:
            return None
        return peeled[0]

    def _keeps_numbers(self, move: Move, value: ir.Value, widening: bool) -> bool:
        """Does a value hold the numbers of the source of a move? Another output of the operator
        does not. A Cast has to keep the type, or to widen it with `widening`."""
        if not isinstance(move, Converted):
            return value is move.result
        source, target = self.info.dtype(move.source), self.info.dtype(move.result)
        return source == target is not None or (widening and (source, target) in WIDENING)

    def uniform_value(self, value: ir.Value, beside: ir.Value) -> float | None:
        """The one number that a tensor holds, if its sizes are 1 or those of the tensor beside it;
        else None."""
        number = self.info.scalar(value)
        if number is not None:
            return number
        own, wide = self.info.shape(value), self.info.shape(beside)
        if own is None or wide is None or len(own) > len(wide):
            return None
        fits = all(a == 1 or a == b for a, b in zip(own, wide[len(wide) - len(own) :], strict=True))
        if not fits:
            return None
        return self.facts.sets.only(value)

    def factor(self, node: ir.Node | None) -> tuple[ir.Value, float] | None:
        """The tensor x and the factor of x*c, c*x, x/c and -x; None for other nodes."""
        if is_op(node, "Neg") and node.inputs[0] is not None:
            return node.inputs[0], -1.0
        if not is_op(node, "Mul", "Div"):
            return None
        left, right = node.inputs[0], node.inputs[1]
        if left is None or right is None:
            return None
        if is_op(node, "Div"):
            divisor = self._scalar_beside(right, left)
            if not divisor:
                return None
            return left, 1.0 / divisor
        for tensor, number in ((left, right), (right, left)):
            scalar = self._scalar_beside(number, tensor)
            if scalar is not None:
                return tensor, scalar
        return None

    def _scalar_beside(self, number: ir.Value, tensor: ir.Value) -> float | None:
        """The finite number that a tensor of one element holds, if it does not raise the rank of
        the tensor beside it; else None."""
        scalar = self.info.scalar(number)
        if scalar is None or not math.isfinite(scalar) or self._rank(number) > self._rank(tensor):
            return None
        return scalar

    def _rank(self, value: ir.Value) -> int:
        """The rank of a value; 99 where it is unknown."""
        shape = self.info.shape(value)
        return 99 if shape is None else len(shape)

    def step(self, view: View, value: ir.Value) -> View | None:
        """The view of `value`, given the view of the input of the operator that makes it; None when
        unproven."""
        node = certain(value.producer())
        if (peeled := self.factor(node)) is not None:
            return replace(view, scale=view.scale * peeled[1])
        dims = self.rearranged(node, view.dims)
        if dims is None:
            return None
        rearranged = replace(view, dims=dims)
        if view.scale != 1.0 or self.info.dtype(value) != self.info.dtype(view.base):
            return rearranged
        return replace(rearranged, equivalent_values=(*view.equivalent_values, (value, dims)))

    def rearranged(self, node: ir.Node, dims: Arrangement) -> Arrangement | None:
        """The arrangement of a layout operator's result, given that of its input; None when
        unproven."""
        if is_op(node, "Dropout"):
            return dims  # also of one that drops: what is left stays in its place
        move = move_of(node, self.info)
        if move is None:
            return None
        return move.arrangement(dims, self.space, self.info)
