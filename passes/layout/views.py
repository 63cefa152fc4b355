"""Views: values seen through the operators that only move elements, and through scalar factors.

Grammar of what `Viewer.view` looks through, from a value towards its source:

    layout   := Transpose | Reshape | Flatten | Squeeze | Unsqueeze | Identity | Expand | Tile | Concat(x, ..., x)
              | Gather(x, i)     i constant, 0 0 1 1 ... or 0 1 ... 0 1 ...: the repeated heads of grouped attention
    factor   := Mul(x, c) | Mul(c, x) | Div(x, c) | Neg(x)      c one finite number known before the run
    widening := Cast(16-bit -> float32 | float32 -> float64)    only when asked for
    same     := Cast(T -> T) | Dropout that drops nothing | Pad of no width
              | Add(x, 0) | Add(0, x) | Sub(x, 0)               as large as x, as Paddle writes a scale without bias

A view looks through a layout operator only where the resulting arrangement is proven (see axes.py). Otherwise the
operator's output is the base of the view. A factor is multiplied into `scale`. The contraction that reads the view is
linear, so the factor may be applied to the product instead; only the rounding changes. A widening cast is exact.
Adding 0 keeps every number, NaN and infinities included, but for -0, which becomes 0. A sum of products that begins at
0 is the same with either, and so is a comparison with 0; nothing that reads a view divides by its numbers. The
fused operator reads the base itself, so other readers of the values in between do not matter.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.algebra.symbolic import Atom, Dim, product
from fa_compiler.passes.answer.budget import spend
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.movers import LAYOUT_OPS, REPEATS
from fa_compiler.passes.ir.nodes import constant, input_of, int_attr, is_op, permutation, places_of
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import ShapeInfo
from fa_compiler.passes.values.slices import keeps_everything

WIDENING = {
    (ir.DataType.FLOAT16, ir.DataType.FLOAT),
    (ir.DataType.BFLOAT16, ir.DataType.FLOAT),
    (ir.DataType.FLOAT, ir.DataType.DOUBLE),
}
MAX_BASES = 16
"""So many bases in a row are tried, each one operator further down. The next one tried is the result of the operator at
which the last of them failed: else a long chain would be walked from each of its values."""
RESIZING = ("Reshape", "Flatten", "Expand", "Tile", "Concat", "Gather")


@dataclass(frozen=True)
class View:
    """`value == scale * rearranged(base)`.

    `base_dims` holds the axes of each dimension of the base, `dims` those of each dimension of the value. The base is
    broadcast along axes that are in `dims` and not in `base_dims`. `equivalent_values` are values between the base and
    the viewed value, the base first, each with its arrangement. They hold the same elements in the base's type and
    scale, so any of them can be read instead of the base.
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
    """Results that scores.py keeps here: why a value does not come from a product, or None when it does."""
    depth: int = 0

    @property
    def info(self) -> ShapeInfo:
        """Shapes and types."""
        return self.facts.info

    def base_dims(self, value: ir.Value) -> Arrangement:
        """New axes for the dimensions of a value; empty when its rank is unknown."""
        return tuple(self.space.new(size) for size in self.info.shape(value) or ())

    def base_view(self, value: ir.Value) -> View | None:
        """The value as its own base; None when its rank is unknown."""
        if self.info.shape(value) is None:
            return None
        dims = self.base_dims(value)
        return View(value, dims, dims, equivalent_values=((value, dims),))

    def view(self, value: ir.Value, widening: bool = False, factors: bool = True, shallow: bool = False) -> View | None:
        """The view whose base lies furthest upstream of a value; None when the value's rank is unknown.

        `widening` and `factors` say whether it looks through widening casts and factors. With `shallow` it looks
        through no operator that merges, splits or repeats dimensions.
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

    def view_along(self, value: ir.Value, dims: Sequence[Axes | None], factors: bool = False) -> View | None:
        """The view of a value whose dimensions run along these axes; an entry None allows any axes. Returns None where
        the sizes are not proven to be equal."""
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
        """The axes along which each dimension of an operand runs when it is broadcast to an arrangement; () for a
        dimension of 1.

        Raises Decline when the operand may be larger than the arrangement. An unknown size counts as 1 where the result
        of `node` is proven to have the size 1.
        """
        shape = self.info.shape(value)
        if shape is None:
            raise Decline(Code.SHAPE, f"the rank of {value.name!r} is unknown", node)
        if len(shape) > len(dims):
            raise Decline(Code.SHAPE, f"{value.name!r} has more dimensions than the scores", node)
        aligned = dims[len(dims) - len(shape) :]
        result = self.info.shape(node.outputs[0])
        alike = result is not None and len(result) == len(dims)
        ones = [size == 1 for size in result or ()] if alike else [False] * len(dims)
        ones = ones[len(dims) - len(shape) :]
        for size, dim, one in zip(shape, aligned, ones, strict=True):
            if not dim and size.const != 1 and not (one and size.const is None):
                raise Decline(Code.SHAPE, f"{value.name!r} may enlarge the scores", node)
        return tuple(() if size.const == 1 else dim for size, dim in zip(shape, aligned, strict=True))

    def broadcast_view(self, value: ir.Value, dims: Arrangement, node: ir.Node) -> View:
        """The view of an operand that is broadcast to an arrangement, in the axes of that arrangement. The view looks
        through no factors. Raises Decline where the operand is not proven to fit."""
        wanted = self.alignment(value, dims, node)
        sizes = self.info.shape(value) or ()
        # An operand that may enlarge the arrangement is its own base: an Expand above it may be what enlarges it.
        fits = all(size.const == 1 or size == self.space.size(dim) for size, dim in zip(sizes, wanted, strict=True))
        view = self.view(value, factors=False) if fits else self.base_view(value)
        if view is None:
            raise Decline(Code.RANK, f"the rank of {value.name!r} is unknown", node)
        for own, other in zip(view.dims, wanted, strict=True):
            if own and not self.space.unify(own, other):
                raise Decline(Code.SHAPE, f"the shape of {value.name!r} was not proven to fit", node)
        return view

    def _source(self, value: ir.Value, widening: bool, factors: bool) -> ir.Value | None:
        """The input of an operator that the view looks through; None where the view must end."""
        node = value.producer()
        if node is None:
            return None
        if is_op(node, *LAYOUT_OPS, *REPEATS) or (is_op(node, "Pad") and keeps_everything(node, self.info)):
            return node.inputs[0]
        if is_op(node, "Concat") and len(node.inputs) > 1:
            return node.inputs[0] if all(each is node.inputs[0] for each in node.inputs) else None
        if is_op(node, "Gather") and _repeats(node) is not None:
            return node.inputs[0]
        if is_op(node, "Dropout") and drops_nothing(node):
            return node.inputs[0] if value is node.outputs[0] else None
        if (same := self._without_zero(node)) is not None:
            return same
        if is_op(node, "Cast"):
            source = node.inputs[0]
            if source is None:
                return None
            pair = (self.info.dtype(source), self.info.dtype(value))
            return source if pair[0] == pair[1] is not None or (widening and pair in WIDENING) else None
        if factors and (peeled := self.factor(node)) is not None:
            return peeled[0]
        return None

    def _without_zero(self, node: ir.Node) -> ir.Value | None:
        """The tensor that a node adds 0 to, or takes 0 from, if the result is as large; None for other nodes."""
        return unchanged_operand(node, self.info) if is_op(node, "Add", "Sub") else None

    def uniform_value(self, value: ir.Value, beside: ir.Value) -> float | None:
        """The one number that a tensor holds, if each of its sizes is 1 or that of the tensor beside it; else None."""
        number = self.info.scalar(value)
        if number is not None:
            return number
        own, wide = self.info.shape(value), self.info.shape(beside)
        if own is None or wide is None or len(own) > len(wide):
            return None
        fits = all(a == 1 or a == b for a, b in zip(own, wide[len(wide) - len(own) :], strict=True))
        return self.facts.sets.only(value) if fits else None

    def factor(self, node: ir.Node) -> tuple[ir.Value, float] | None:
        """The tensor x and the factor of x*c, c*x, x/c and -x; None for other nodes."""
        if is_op(node, "Neg") and node.inputs[0] is not None:
            return node.inputs[0], -1.0
        if not is_op(node, "Mul", "Div"):
            return None
        left, right = node.inputs[0], node.inputs[1]
        if left is None or right is None:
            return None
        candidates = [(left, right)] if node.op_type == "Div" else [(left, right), (right, left)]
        for tensor, number in candidates:
            scalar = self.info.scalar(number)
            if scalar is None or not math.isfinite(scalar) or self._rank(number) > self._rank(tensor):
                continue
            if node.op_type == "Mul":
                return tensor, scalar
            if scalar != 0.0:
                return tensor, 1.0 / scalar
        return None

    def _rank(self, value: ir.Value) -> int:
        shape = self.info.shape(value)
        return 99 if shape is None else len(shape)

    def step(self, view: View, value: ir.Value) -> View | None:
        """The view of `value`, given the view of the input of the operator that makes it; None when unproven."""
        node = value.producer()
        assert node is not None
        if (peeled := self.factor(node)) is not None:
            return replace(view, scale=view.scale * peeled[1])
        dims = self.rearranged(node, view.dims)
        if dims is None:
            return None
        same = view.scale == 1.0 and self.info.dtype(value) == self.info.dtype(view.base)
        return replace(
            view,
            dims=dims,
            equivalent_values=(*view.equivalent_values, (value, dims)) if same else view.equivalent_values,
        )

    def rearranged(self, node: ir.Node, dims: Arrangement) -> Arrangement | None:
        """The arrangement of a layout operator's result, given that of its input; None when unproven."""
        match node.op_type:
            case "Identity" | "Cast" | "Dropout":
                return dims
            case "Add" | "Sub":
                return dims if self._without_zero(node) is not None else None
            case "Slice" | "Pad":
                return dims if keeps_everything(node, self.info) else None
            case "Transpose":
                perm = permutation(node, len(dims))
                return None if perm is None else tuple(dims[axis] for axis in perm)
            case "Reshape" | "Flatten" | "Squeeze" | "Unsqueeze":
                return self._reshaped(node, dims)
            case "Expand" | "Tile":
                return self._broadcast(node, dims)
            case "Concat":
                return self._repeated(dims, int_attr(node, "axis", 0), len(node.inputs), in_turns=True)
            case "Gather":
                return self._gathered(node, dims)
        return None

    def _reshaped(self, node: ir.Node, dims: Arrangement) -> Arrangement | None:
        target = self._target(node, dims)
        if target is None:
            return None
        if node.op_type == "Unsqueeze" and (axes := self._axes(node, len(target))) is not None:
            rest = iter(dims)
            return tuple(() if axis in axes else next(rest) for axis in range(len(target)))
        if node.op_type == "Squeeze" and (axes := self._axes(node, len(dims))) is not None:
            # A squeezed dimension is 1 in every run that succeeds. All the same the view ends where it has axes.
            if any(self.space.resolve(dims[axis]) for axis in axes):
                return None
            return tuple(dim for axis, dim in enumerate(dims) if axis not in axes)
        if len(target) == len(dims) and all(self.space.size(d) == t for d, t in zip(dims, target, strict=True)):
            return dims
        return self.space.reshape(dims, target) or self._counted(dims, target)

    def _counted(self, dims: Arrangement, target: Sequence[Dim]) -> Arrangement | None:
        """`reshape` with one size computed from the others, since a Reshape keeps the number of elements.

        Models of tf2onnx need this. Where query and key have different names for the batch size, the Reshape after
        their product has the larger of the two as its batch size.
        """
        total = product(self.space.size(dim) for dim in dims)
        for place in range(len(target)):
            before, after = target[:place], target[place + 1 :]
            own = total.exact_div(product((*before, *after)))
            if own is not None and own != target[place]:
                return self.space.reshape(dims, (*before, own, *after))
        return None

    def _target(self, node: ir.Node, dims: Arrangement) -> tuple[Dim, ...] | None:
        """The sizes of a layout operator's result, written in the sizes of its input's arrangement.

        The input's own sizes differ from those where a mask was added whose sizes have other names: the size of the sum
        is then the broadcast of both. It is the arrangement's size in every run in which the mask does not enlarge the
        scores.
        """
        target = self.info.shape(node.outputs[0])
        source = self.info.shape(node.inputs[0]) if node.inputs[0] is not None else None
        if target is None or source is None or len(source) != len(dims):
            return target
        own: dict[Atom, Dim] = {}
        for size, dim in zip(source, dims, strict=True):
            walked = self.space.size(dim)
            for atom in (atom for atom in size.atoms if atom.op == "broadcast"):
                parts = (*atom.args, walked) if _is_part(walked, atom) else atom.args
                own.update((atom, part) for part in parts if size.substitute({atom: part}) == walked != size)
        return tuple(size.substitute(own) for size in target) if own else target

    def _axes(self, node: ir.Node, rank: int) -> set[int] | None:
        axes = places_of(node, rank, limit=64)
        return None if axes is None else set(axes)

    def _repeated(self, dims: Arrangement, axis: int, times: int, in_turns: bool) -> Arrangement:
        """The arrangement with one dimension repeated: as a whole if `in_turns`, else element by element."""
        place = axis % len(dims)
        own, again = dims[place], self.space.new(Dim(times))
        return (*dims[:place], again + own if in_turns else own + again, *dims[place + 1 :])

    def _gathered(self, node: ir.Node, dims: Arrangement) -> Arrangement | None:
        axis, found = int_attr(node, "axis", 0), _repeats(node)
        if found is None or self.space.size(dims[axis % len(dims)]) != found[0]:
            return None
        return self._repeated(dims, axis, found[1], found[2])

    def _broadcast(self, node: ir.Node, dims: Arrangement) -> Arrangement | None:
        target = self.info.shape(node.outputs[0])
        source = self.info.shape(node.inputs[0]) if node.inputs[0] is not None else None
        if target is None or source is None:
            return None
        padded: tuple[Axes, ...] = ((),) * (len(target) - len(dims)) + dims
        sizes = [None] * (len(target) - len(source)) + list(source)
        result: list[Axes] = []
        for dim, size, wanted in zip(padded, sizes, target, strict=True):
            if size is not None and size == wanted:
                result.append(dim)
            elif size is None or size.const == 1:
                result.append(self.space.new(wanted))
            elif node.op_type == "Tile" and (times := wanted.exact_div(size)) is not None:
                result.append(self.space.new(times) + dim)
            else:
                return None
        return tuple(result)


def _is_part(size: Dim, whole: Atom) -> bool:
    """Is a size the broadcast of some, but not all, of the sizes that `whole` is the broadcast of?"""
    atom = size.single_atom
    return atom is not None and atom.op == "broadcast" and set(atom.args) < set(whole.args)


def _repeats(node: ir.Node) -> tuple[int, int, bool] | None:
    """The size of the dimension that a Gather repeats, how often, and whether as a whole; None for other Gathers."""
    indices = constant(input_of(node, 1), limit=1 << 12)
    if indices is None or indices.ndim != 1 or indices.size == 0 or indices.min() != 0:
        return None
    size = int(indices.max()) + 1
    times, rest = divmod(indices.size, size)
    if rest or times < 2:
        return None
    for in_turns in (False, True):
        wanted = np.tile(np.arange(size), times) if in_turns else np.repeat(np.arange(size), times)
        if np.array_equal(indices, wanted):
            return size, times, in_turns
    return None


NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
"""The number beside which an operator changes nothing."""


def unchanged_operand(node: ir.Node, info: ShapeInfo) -> ir.Value | None:
    """The operand that a sum with 0, or a product or quotient with 1, gives as it is, if the result is as large; None
    for other nodes."""
    left, right = node.inputs[:2] if is_op(node, *NEUTRAL) else (None, None)
    if left is None or right is None:
        return None
    for tensor, number in ((left, right), (right, left))[: 2 if is_op(node, "Add", "Mul") else 1]:
        shape = info.shape(tensor)
        as_large = shape is not None and shape == info.shape(node.outputs[0])
        if as_large and info.scalar(number) == NEUTRAL[node.op_type]:
            return tensor
    return None


def drops_nothing(node: ir.Node) -> bool:
    """Does a Dropout pass its input on? Its training_mode is absent or constant false, an is_test is 1, or its ratio is
    constant 0: ONNX Runtime then copies the input, NaN and infinities included, and keeps everything in the mask."""
    ratio = constant(input_of(node, 1), limit=1)
    if ratio is not None and not ratio.any():
        return True
    mode = input_of(node, 2)
    if mode is None:
        return int_attr(node, "is_test", 1) == 1
    flag = constant(mode, limit=1)
    return flag is not None and not flag.any()
