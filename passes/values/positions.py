"""What a mask holds at each position, as a formula over its indices.

    j = torch.arange(past + length)
    i = past + torch.arange(length)[:, None]
    mask = torch.full((length, past + length), -inf)
    mask = torch.where(j > i, mask, 0.0)                          # -inf where j - i - 1 >= 0, elsewhere 0

Grammar of what is read from the graph, top down. The element that is asked for is given by an
`index`: for every dimension of a value an Affine over the indices of the mask.

    number := a constant | a small tensor of known content | Range(start, limit, step)
            | number + number | number - number | number * number | -number | |number|
            | min(number, number) | max(number, number)
            | BitwiseAnd(number, number) | BitwiseOr(number, number)     of numbers that are known,
                                                                  such as 0 and 1
            | CumSum(the same whole number everywhere)            c, 2c, 3c, ..., or 0, c, 2c, ...
                                                                  (exclusive); also of floats
            | Mod(flat, n) | Div(flat, n)          flat = 0, 1, 2, ... reshaped to [.., n]: the
                                                   column, the row (tf2onnx writes a band of a
                                                   matrix with these)
            | Where(truth, number, number) | truth as 0 and 1
            | Trilu(number)                                       number or 0
            | Concat(number, number, ...)                         by the place along its axis; of
                                                                  truths where the tensor runs along
                                                                  rows and keys
    truth  := a comparison of numbers | And | Or | Xor | Not | Where(truth, truth, truth)
            | a comparison of two elements of one integer tensor, whatever it holds (ElementComparison), or of a number
              linear in the index and such an element (IndexLessThanElement)
            | Trilu(truth) | number != 0 | a constant of bands, also in blocks on the diagonal: two elements of the
              blocks' numbers are then equal (ElementComparison)
            | any other boolean tensor, as it is, or its first elements (BooleanTensor)
            | number + element == 0, where the number is 0 or beyond all integers: the element of an integer tensor,
              of which nothing is known, is 0 (transformers merges padding into a causal mask so)
    either := seen through Identity, Cast, Unsqueeze, Squeeze, Reshape and Flatten, Transpose,
              Expand, Tile of a dimension of 1, Slice, Gather at affine positions, ScatterND that
              writes to every place the update of the same place (an assignment to a whole slice)

Every step is exact. The type of an integer has to hold it, which float32 does for up to 2^19
positions. Constant floats are combined as their type rounds. An operand is followed through
broadcasting only where its size is 1 or proven to be that of the result, so a formula holds for all
values of the symbolic sizes. An index beyond a tensor has no element, so the formula claims nothing
there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import onnx_ir as ir

from fa_compiler.passes.algebra.cases import (
    ARITHMETIC,
    BITS,
    EXACT_FLOATS,
    INTEGERS,
    MAX_CASES,
    Case,
    Number,
    arithmetic,
    as_integer,
    case,
    cast,
    compared,
    condition_for,
    count,
    if_representable,
    nonzero,
    unequal,
    whole,
)
from fa_compiler.passes.algebra.formula import (
    TRUE,
    Affine,
    BooleanLiteral,
    BooleanTensor,
    ElementComparison,
    Formula,
    Index,
    IndexLessThanElement,
    TooLargeError,
    at_least_zero,
    choice,
    conjunction,
    disjunction,
    negation,
)
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Atom, Dim, simplify_given
from fa_compiler.passes.answer.budget import spend
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    constant,
    input_of,
    int_attr,
    is_op,
    producer,
    without_none,
)
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.ops.elementwise import COMPARISONS
from fa_compiler.passes.ops.generate import fill_of
from fa_compiler.passes.ops.moves import ELEMENTS, Regrouped, fitted, move_of, only_element
from fa_compiler.passes.ops.numbers import overwrites
from fa_compiler.passes.values.position_contents import (
    number_of_array,
    number_of_content,
    number_of_large,
    scalar,
)
from fa_compiler.passes.values.shapes import ShapeInfo

MAX_DEPTH = 60
"""Longer chains of operators are given up, as in analysis.py."""
MAX_ASKED = 2000
"""The most elements that are looked at for one: a Concat of a tensor with itself has its elements
at two places, and a chain of them at thousands. Masks of real models take up to 81."""
LABELS = (ir.DataType.INT64, ir.DataType.INT32)
"""Types whose comparisons may be negated. Those of floats may not: every comparison with NaN is
false."""
Found = TypeVar("Found")
Element = tuple[ir.Value | None, Index | None]
"""An element of a tensor: the tensor, and the index in it."""
NOWHERE: Element = (None, None)
"""The element of which nothing is known."""


@dataclass
class Positions:
    """Reads masks of one shape, in runs in which the atoms in `known` are these sizes."""

    info: ShapeInfo
    sizes: Shape
    known: Mapping[Atom, Dim] = field(default_factory=dict)
    cuts: bool = False
    """May a boolean tensor be longer than the mask in one dimension?"""
    _truths: dict[tuple[ir.Value, Index], Formula | None] = field(default_factory=dict)
    _numbers: dict[tuple[ir.Value, Index], Number | None] = field(default_factory=dict)
    _depth: int = 0
    _asked: int = 0
    """How many elements were asked for since a question from outside."""
    _everywhere: dict[ir.Value, int | None] = field(default_factory=dict)
    """The tensors that were asked for one number, also by the readers that a running sum needs."""

    @property
    def rank(self) -> int:
        """How many dimensions the masks have."""
        return len(self.sizes)

    @cached_property
    def _present(self) -> Shape:
        """Integers that are at least 0 in every run in which the mask has elements."""
        return tuple(size - 1 for size in self.sizes)

    @property
    def identity_index(self) -> Index:
        """The index that runs over all elements of a mask; dimensions of 1 stay at 0."""
        return tuple(
            self._zero if size.const == 1 else Affine.index(k, self.rank)
            for k, size in enumerate(self.sizes)
        )

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The shape in runs in which the mask has elements; other runs do not matter."""
        shape = self.info.shape(value)
        if shape is None:
            return None
        return tuple(simplify_given(size.substitute(self.known), self._present) for size in shape)

    def truth(self, value: ir.Value | None, index: Index | None) -> Formula | None:
        """The condition under which the element at `index` is true; None when it is unknown."""
        if value is None or index is None:
            return None
        key = (value, index)
        if key not in self._truths:
            if self._is_too_far():
                return self._given(value, index)
            self._truths[key] = self._deeper(self._truth, value, index) or self._given(value, index)
        return self._truths[key]

    def number(self, value: ir.Value | None, index: Index | None) -> Number | None:
        """The element at `index`; None when it is unknown."""
        if value is None or index is None:
            return None
        key = (value, index)
        if key not in self._numbers:
            if self._is_too_far():
                return None
            self._numbers[key] = self._deeper(self._held, value, index)
        return self._numbers[key]

    def number_everywhere(self, value: ir.Value | None) -> int | None:
        """The whole number that all elements of a tensor are; None when they differ or it is
        unknown."""
        shape = self.info.shape(value)
        if value is None or shape is None:
            return None
        if value not in self._everywhere:
            own = Positions(
                self.info,
                shape,
                _depth=self._depth,
                _asked=self._asked,
                _everywhere=self._everywhere,
            )
            number = own.number(value, own.identity_index)
            integer = (
                None if number is None or isinstance(number, Case) else whole(number, own.rank)
            )
            self._everywhere[value] = None if integer is None else integer.const
        return self._everywhere[value]

    def _deeper(
        self, find: Callable[[ir.Value, Index], Found], value: ir.Value, index: Index
    ) -> Found | None:
        """What is found at an element; None where a formula would be too large."""
        spend(value.producer())
        self._asked = self._asked + 1 if self._depth else 0
        self._depth += 1
        try:
            return find(value, index)
        except TooLargeError:
            return None
        finally:
            self._depth -= 1

    def _is_too_far(self) -> bool:
        return self._depth >= MAX_DEPTH or (self._depth > 0 and self._asked >= MAX_ASKED)

    def _held(self, value: ir.Value, index: Index) -> Number | None:
        number = if_representable(self._number(value, index), self.info.dtype(value))
        if number is None or count(number) > MAX_CASES:
            return None
        return number

    def nonzero(self, value: ir.Value, index: Index | None = None) -> Formula | None:
        """The condition under which the element of a tensor of any type, at this index or at its
        own, is not 0 or is true; None when it is unknown."""
        index = index or self.identity_index
        if self.info.dtype(value) == ir.DataType.BOOL:
            return self.truth(value, index)
        return self._deeper(self._unequal_to_zero, value, index)

    def _unequal_to_zero(self, value: ir.Value, index: Index) -> Formula | None:
        return if_known(nonzero, self.number(value, index))

    # -- truth values ---------------------------------------------------------------------------

    def _truth(self, value: ir.Value, index: Index) -> Formula | None:
        if self.info.dtype(value) != ir.DataType.BOOL:
            return self._unequal_to_zero(value, index)
        known = self._constant(value, index)
        if known is not None:
            return nonzero(known)
        node = value.producer()
        if node is None:
            return None
        if is_op(node, *TRUTHS):
            return TRUTHS[node.op_type](self, node, index)
        if is_op(node, *ELEMENTS):
            return (
                if_known(nonzero, ELEMENTS[node.op_type](self, node, index))
                if self._is_plane(index)
                else None
            )
        return self.truth(*self._before_move(value, index))

    def _is_plane(self, index: Index) -> bool:
        """Does an index run along the last two dimensions of a mask, its rows and keys? A tensor
        along the keys alone is padding, and may stay the tensor that it is."""
        return self.rank > 1 and all(any(place.steps[k] for place in index) for k in (-2, -1))

    def _negated(self, node: ir.Node, index: Index) -> Formula | None:
        return if_known(negation, self.truth(node.inputs[0], index))

    def _connected(self, node: ir.Node, index: Index) -> Formula | None:
        """And, Or, Xor, and a Where between truth values."""
        parts, origin = (
            [self.truth(*operand) for operand in self.operands(node, index)],
            self._origin(node, index),
        )
        known: list[Formula] = without_none(parts)
        if len(known) < len(parts):
            return None
        if node.op_type == "And":
            return conjunction(known, origin)
        if node.op_type == "Or":
            return disjunction(known, origin)
        if node.op_type == "Xor":
            return choice(known[0], negation(known[1]), known[1], origin)
        return choice(known[0], known[1], known[2], origin)

    def _compared(self, node: ir.Node, index: Index) -> Formula | None:
        one, other = self.operands(node, index)
        left, right, origin = self.number(*one), self.number(*other), self._origin(node, index)
        if (
            node.op_type == "Equal"
            and (zero := self._sum_is_zero((left, right), (one, other), origin)) is not None
        ):
            return zero
        if left is None or right is None:
            bounded = self._below(node.op_type, (left, right), (one, other), origin)
            return bounded or self._entries(node.op_type, one, other, origin)
        return compared(node.op_type, left, right)

    def _cast_truth(self, node: ir.Node, index: Index) -> Formula | None:
        return self.truth(node.inputs[0], index)

    def _truth_in_triangle(self, node: ir.Node, index: Index) -> Formula | None:
        kept, inner = self._triangle(node, index), self.truth(node.inputs[0], index)
        return if_known(lambda *parts: conjunction(parts, self._origin(node, index)), kept, inner)

    def _constant_truth(self, node: ir.Node, _: Index) -> Formula | None:
        return BooleanLiteral(bool(fill_of(node).any()))

    def _origin(self, node: ir.Node, index: Index) -> BooleanTensor | None:
        return self._given(node.outputs[0], index)

    def _entries(
        self,
        op: str,
        left: Element,
        right: Element,
        origin: BooleanTensor | None,
    ) -> ElementComparison | None:
        """The comparison of two elements of one integer tensor, the nearest one that both operands
        are moved from; None where there is no such tensor."""
        mine, theirs = dict(self.origins(*left)), dict(self.origins(*right))
        value = next((value for value in mine if value in theirs), None)
        if value is None or self.info.dtype(value) not in LABELS:
            return None
        pair = mine[value], theirs[value]
        if op == "Equal":
            return ElementComparison(value, *pair, origin=origin)
        # a < b is the negation of b <= a, and a >= b is b <= a.
        turned = pair[::-1] if op in ("Less", "GreaterOrEqual") else pair
        return ElementComparison(value, *turned, "LessOrEqual", op.endswith("OrEqual"), origin)

    def _below(
        self,
        op: str,
        numbers: tuple[Number | None, Number | None],
        operands: tuple[Element, Element],
        origin: BooleanTensor | None,
    ) -> IndexLessThanElement | None:
        """The comparison of a number that is linear in the index with an integer element of which
        nothing is known; None for other operands."""
        place = _place_of_known(numbers)
        affine, (value, index) = as_integer(numbers[place]), operands[1 - place]
        if (
            affine is None
            or value is None
            or index is None
            or self.info.dtype(value) not in LABELS
            or op == "Equal"
        ):
            return None
        # element < a is the negation of a - 1 < element, and element <= a that of a < element.
        turned = place == 1
        strict = op in ("Less", "Greater")
        less = op.startswith("Less")
        shift = -int(strict != (less != turned))
        return IndexLessThanElement(affine + shift, value, index, less != turned, origin)

    def _sum_is_zero(
        self,
        numbers: tuple[Number | None, Number | None],
        operands: tuple[Element, Element],
        origin: BooleanTensor | None,
    ) -> Formula | None:
        """Where the sum of a number and an integer element of which nothing is known is 0; None for
        other operands.

        The number has to be 0, or larger than every integer of 64 bits: then no element cancels it.
        """
        place = _place_of_known(numbers)
        zero = numbers[place]
        value, index = operands[1 - place]
        node = producer(value)
        if numbers[1 - place] is not None or zero is None or compared("Equal", zero, 0.0) != TRUE:
            return None
        if index is None or not is_op(node, "Add"):
            return None
        parts = self.operands(node, index)
        known = [self.number(*part) for part in parts]
        place = _place_of_known(known)
        added, unknown = known[place], parts[1 - place]
        if added is None or None not in known or not _is_zero_or_beyond_integers(added):
            return None
        element = self._integer_entry(*unknown)
        if element is None:
            return None
        return condition_for(
            added, lambda x: conjunction((negation(unequal(x, 0)), negation(element)), origin)
        )

    def _integer_entry(self, value: ir.Value | None, index: Index | None) -> BooleanTensor | None:
        """The tensor of integers or booleans from which a Cast made this element, read as "is not
        0"; None without one.

        No Cast to a float makes 0 of another integer. One to another integer may: 65536 is 0 in
        uint16.
        """
        while value is not None and index is not None and self.info.dtype(value) not in INTEGERS:
            if self.info.dtype(value) not in (*EXACT_FLOATS, *SIXTEEN_BITS):
                return None
            value, index = self._before_move(value, index)
        return if_known(self.whole, value, index)

    def origins(
        self, value: ir.Value | None, index: Index | None
    ) -> Iterator[tuple[ir.Value, Index]]:
        """The element at `index` of a value, and then each element upstream that moving operators
        took it from, up to a change of type."""
        while value is not None and index is not None:
            yield value, index
            if is_op(value.producer(), "Cast"):
                break
            value, index = self._before_move(value, index)

    def _before_move(self, value: ir.Value, index: Index) -> Element:
        """The element that a moving operator takes for the element at `index` of its result;
        NOWHERE when unknown."""
        node = value.producer()
        if node is None:
            return NOWHERE
        return self.moved(node, index) or NOWHERE

    def _given(self, value: ir.Value, index: Index) -> BooleanTensor | None:
        """The boolean tensor itself, where each of its dimensions is a whole dimension of the mask
        or 1; else None.

        With `cuts`, one dimension may be longer than that of the mask."""
        if self.info.dtype(value) != ir.DataType.BOOL:
            return None
        return self.whole(value, index)

    def whole(self, value: ir.Value, index: Index) -> BooleanTensor | None:
        """A tensor read as "is not 0", under the condition of `_given`."""
        shape = self.shape(value)
        if shape is None or len(shape) != len(index):
            return None
        axes: list[int | None] = []
        cut: int | None = None
        for dimension, (place, size) in enumerate(zip(index, shape, strict=True)):
            if place == self._zero and size.const == 1:
                axes.append(None)
                continue
            along = next((k for k in range(self.rank) if place == Affine.index(k, self.rank)), None)
            if along is None or along in axes:
                return None
            if size != self.sizes[along]:
                if not self.cuts or cut is not None or not self._is_longer(size, self.sizes[along]):
                    return None
                cut = dimension
            axes.append(along)
        return BooleanTensor(value, tuple(axes), cut=cut)

    def _is_longer(self, size: Dim, other: Dim) -> bool:
        """Is a size proven to be at least another one?"""
        return Dim.min(size, other).substitute(self.known) == other

    # -- numbers --------------------------------------------------------------------------------

    def _number(self, value: ir.Value, index: Index) -> Number | None:
        dtype = self.info.dtype(value)
        if dtype == ir.DataType.BOOL:
            return case(self.truth(value, index), self._int(1), self._int(0))
        known = self._constant(value, index)
        if known is not None:
            return known
        content = self.info.fact(value).content
        if content is not None:
            return number_of_content(content, index, self.rank, self.info.labels)
        node = value.producer()
        if node is None:
            return None
        if is_op(node, *NUMBERS):
            return NUMBERS[node.op_type](self, node, index)
        return self.number(*self._before_move(value, index))

    def _constant(self, value: ir.Value, index: Index) -> Number | None:
        """The element of a constant; None for other values, and where the element is unknown."""
        array = constant(value)
        if array is not None:
            return number_of_array(array, index, self.rank, self.info.labels)
        large, shape = self.info.large.of(value), self.info.shape(value)
        if large is None or shape is None:
            return None
        return number_of_large(large, shape, index, self.rank, self.info.labels)

    def _computed(self, node: ir.Node, index: Index) -> Number | None:
        """An operator of ARITHMETIC or BITS with two operands."""
        if len(node.inputs) != 2:
            return None
        left, right = (self.number(*operand) for operand in self.operands(node, index))
        return arithmetic(node.op_type, left, right, self.info.dtype(node.outputs[0]))

    def _signed(self, node: ir.Node, index: Index) -> Number | None:
        """Neg and Abs."""
        inner, dtype = self.number(node.inputs[0], index), self.info.dtype(node.outputs[0])
        negative = arithmetic("Sub", self._int(0), inner, dtype)
        if node.op_type == "Neg":
            return negative
        return arithmetic("Max", inner, negative, dtype)

    def _chosen(self, node: ir.Node, index: Index) -> Number | None:
        first, second, third = self.operands(node, index)
        return case(self.truth(*first), self.number(*second), self.number(*third))

    def _cast_number(self, node: ir.Node, index: Index) -> Number | None:
        return cast(self.number(node.inputs[0], index), self.info.dtype(node.outputs[0]))

    def _number_in_triangle(self, node: ir.Node, index: Index) -> Number | None:
        kept, inner = self._triangle(node, index), self.number(node.inputs[0], index)
        return case(kept, inner, self._zero_of(inner))

    def _constant_number(self, node: ir.Node, _: Index) -> Number | None:
        return scalar(fill_of(node), self.rank)

    @property
    def _zero(self) -> Affine:
        return self._int(0)

    def _int(self, number: Dim | int) -> Affine:
        return Affine.number(number, self.rank)

    def _zero_of(self, like: Number | None) -> Number:
        while isinstance(like, Case):
            like = like.chosen
        return self._zero if isinstance(like, Affine) else 0.0

    def _place_in_rows(self, node: ir.Node, index: Index) -> Number | None:
        """The numbers 0, 1, 2, ..., counted through the rows of a matrix, modulo the length of a
        row (the column) or divided by it (the row). They have to be int64, because there may be
        more of them than other types hold."""
        shape, (flat, _), (length, place) = self.shape(node.outputs[0]), *self.operands(node, index)
        if flat is None or shape is None or len(shape) != 2 or self.shape(flat) != shape:
            return None
        size = as_integer(self.number(length, place))
        if size != self._int(shape[1]) or not self._counts_up(flat):
            return None
        return index[1] if node.op_type == "Mod" else index[0]

    def _counts_up(self, matrix: ir.Value) -> bool:
        """Does a matrix hold the int64 numbers 0, 1, 2, ... of a vector, in this order?"""
        move = move_of(matrix.producer(), self.info)
        if not isinstance(move, Regrouped):
            return False
        counted = self.info.shape(move.source)
        if (
            counted is None
            or len(counted) != 1
            or self.info.dtype(move.source) != ir.DataType.INT64
        ):
            return False
        line = Positions(self.info, counted)
        return line.number(move.source, line.identity_index) == Affine.index(0, 1)

    def _triangle(self, node: ir.Node, index: Index) -> Formula | None:
        """Where Trilu keeps its input: k <= j - i for the upper triangle, j - i <= k for the lower
        one."""
        given = input_of(node, 1)
        k = self._zero if given is None else as_integer(only_element(given, self))
        if k is None or len(index) < 2:
            return None
        distance = index[-1] - index[-2]
        if int_attr(node, "upper", 1):
            return at_least_zero(distance - k)
        return at_least_zero(k - distance)

    # -- moves ----------------------------------------------------------------------------------

    def operands(self, node: ir.Node, index: Index) -> list[Element]:
        """The operands of an element-wise operator, each with its index; the index is None where
        the operand is not proven to fit."""
        result = self.shape(node.outputs[0])
        return [
            (operand, fitted(self.shape(operand), result, index, self.rank))
            for operand in node.inputs
        ]

    def moved(self, node: ir.Node, index: Index) -> tuple[ir.Value, Index] | None:
        """The input and the index in it of the element that a moving operator puts at `index`; None
        when unknown."""
        if is_op(node, "ScatterND"):
            return self._overwritten(node, index)
        move, shape = move_of(node, self.info), self.shape(node.outputs[0])
        if move is None or shape is None or len(shape) != len(index):
            return None
        own = self.shape(move.source)
        place = None if own is None else move.place(index, own, shape, self)
        if place is None:
            return None
        return (move.source, place)

    def _overwritten(self, node: ir.Node, index: Index) -> tuple[ir.Value, Index] | None:
        """The update that a ScatterND puts at `index`, where it writes every place once, each with
        the update of that place. What is not such an assignment gives None."""
        data, indices, updates = node.inputs
        if data is None or indices is None or updates is None or not overwrites(node):
            return None
        whole, places = self.info.shape(data), self.info.shape(indices)
        if (
            whole is None
            or not places
            or self.info.shape(updates) != whole
            or len(index) != len(whole)
        ):
            return None
        depth = places[-1].const
        if depth is None or not 0 < depth <= len(whole) or places[:-1] != whole[:depth]:
            return None
        line = Positions(self.info, whole[:depth])
        own = line.identity_index
        same = all(
            line.number(indices, (*own, Affine.number(k, depth))) == own[k] for k in range(depth)
        )
        if not same:
            return None
        return (updates, index)


def _place_of_known(numbers: Sequence[Number | None]) -> int:
    """The place of the known one of two numbers; of the second where both are known."""
    return int(numbers[1] is not None)


def _is_zero_or_beyond_integers(number: Number) -> bool:
    """Is the number 0, or of a magnitude that no integer of 64 bits has?"""
    if isinstance(number, Case):
        return _is_zero_or_beyond_integers(number.chosen) and _is_zero_or_beyond_integers(
            number.other
        )
    return number.const == 0 if isinstance(number, Affine) else number == 0 or abs(number) > 2.0**64


TRUTHS: Mapping[str, Callable[[Positions, ir.Node, Index], Formula | None]] = {
    "Not": Positions._negated,
    **dict.fromkeys(("And", "Or", "Xor", "Where"), Positions._connected),
    **dict.fromkeys(COMPARISONS, Positions._compared),
    "Cast": Positions._cast_truth,
    "Trilu": Positions._truth_in_triangle,
    "ConstantOfShape": Positions._constant_truth,
}
"""How a truth value follows from the operands of an operator. Operators that are not listed may
choose it from several operands (ELEMENTS), or move it (ops/moves.py)."""
NUMBERS: Mapping[str, Callable[[Positions, ir.Node, Index], Number | None]] = {
    **ELEMENTS,
    **dict.fromkeys((*ARITHMETIC, *BITS), Positions._computed),
    **dict.fromkeys(("Neg", "Abs"), Positions._signed),
    "Where": Positions._chosen,
    "Cast": Positions._cast_number,
    "Trilu": Positions._number_in_triangle,
    "ConstantOfShape": Positions._constant_number,
    **dict.fromkeys(("Mod", "Div"), Positions._place_in_rows),
}
"""How a number follows from the operands of an operator: ELEMENTS from the index or from one of
several operands. Operators that are not listed may move it (ops/moves.py)."""
