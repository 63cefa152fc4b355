"""What single operators make of tensors at a random point (tensors.py).

An operator that is not listed, or whose operands do not allow its rule, is an unknown function of
its operands where it works element by element (POINTWISE). What any other operator gives is not
followed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from hashlib import blake2b
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.ir.nodes import (
    all_known,
    attribute_values,
    certain,
    first,
    int_attr,
    is_op,
    operand_at,
    source_through,
    text_attr,
    without_none,
)
from fa_compiler.passes.linear.field import hashed, matmul, power, reduced, times
from fa_compiler.passes.linear.tensors import (
    FailedError,
    Tensor,
    UnknownError,
    added,
    broadcast,
    divided,
    exact,
    fields_of,
    least_scale,
    moved,
    multiplied,
    of_field,
    summed,
)
from fa_compiler.passes.ops.elementwise import POINTWISE
from fa_compiler.passes.ops.movers import ARRAY_MOVES
from fa_compiler.passes.ops.moves import LARGEST_ARRAY, listed, plain_move
from fa_compiler.passes.ops.parts import concat_on_arrays, split_on_arrays

Operands: TypeAlias = Sequence[Tensor | None]
Rule: TypeAlias = Callable[["Call"], list[Tensor]]
RULES: dict[str, Rule] = {}
SUMS: set[str] = set()
"""The operators through which exponents are followed as sums."""
FLOAT_BITS: Mapping[ir.DataType | None, int] = {
    ir.DataType.FLOAT16: 16,
    ir.DataType.BFLOAT16: 16,
    ir.DataType.FLOAT: 32,
    ir.DataType.DOUBLE: 64,
}
SIXTEEN_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FAR = 128
FAR_IN_16_BITS = 2
"""Where a constant of this size or more is added, the other operand loses bits: x + 12582912 -
12582912 is x rounded to an integer, and no x. Of 0.01 x it is a hundredth of this size."""
LARGE = 2.0**32
"""Where a constant of this size or more is a factor or a divisor, the result may be infinite or 0:
x 1e38 1e38 / 1e38 / 1e38 is no x."""
INVERSES = 0x1DE
"""Of the numbers that stand for 1 divided by what may be 0."""


class Call:
    """A node with its operands. `with_sums` tells whether the exponents of the result are asked
    for."""

    def __init__(
        self, node: ir.Node, operands: Operands, dtype: ir.DataType | None, with_sums: bool
    ) -> None:
        """`dtype` is the type of the first operand."""
        self.node = node
        self.operands = operands
        self.dtype = dtype
        self.with_sums = with_sums

    def __getitem__(self, index: int) -> Tensor:
        """An operand. Raises FailedError where it is absent."""
        operand = self._given(index)
        if operand is None:
            raise FailedError(f"{self.node.op_type} lacks operand {index}")
        return operand

    def _given(self, index: int) -> Tensor | None:
        return first(self.operands[index : index + 1])

    def has(self, index: int) -> bool:
        """Is this operand given?"""
        return self._given(index) is not None

    @property
    def constants(self) -> list[np.ndarray]:
        """The operands that are the same in every run with these sizes."""
        return without_none(operand.exact for operand in without_none(self.operands))

    def required(self, index: int) -> np.ndarray:
        """An operand of integers that are the same in every run with these sizes. Raises
        FailedError where it is absent, and UnknownError where the numbers differ from run to
        run."""
        array = self[index].integers
        if array is None:
            raise UnknownError(f"operand {index} of {self.node.op_type} is not known")
        return array

    def integers(self, index: int) -> np.ndarray | None:
        """`required` of an operand that may be absent; None where it is."""
        return self.required(index) if self.has(index) else None

    def ints(self, index: int) -> list[int]:
        """The numbers of `required`, in one list."""
        return [int(number) for number in self.required(index).reshape(-1)]

    def moved(self, move: Callable[..., np.ndarray], *sources: Tensor) -> list[Tensor]:
        """The result of a move of the sources, or of the first operand."""
        return [moved(sources or (self[0],), move, self.with_sums)]

    def attr(self, name: str, default: Any = None) -> Any:
        """The value of an attribute."""
        return attribute_values(self.node).get(name, default)


def rule(*op_types: str, with_sums: bool = False) -> Callable[[Rule], Rule]:
    """Enter a rule for these operators. `with_sums`: exponents are followed through them as
    sums."""

    def enter(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(op_types, function))
        SUMS.update(op_types if with_sums else ())
        return function

    return enter


@rule("Identity", with_sums=True)
def _identity(call: Call) -> list[Tensor]:
    return [call[0]]


@rule("Cast", with_sums=True)
def _cast(call: Call) -> list[Tensor]:
    """A type that holds the numbers of the source, which may be truth values; another one rounds,
    and is an unknown function."""
    wanted = ir.DataType(call.attr("to"))
    source = call[0]
    if source.exact is not None:
        return [exact(source.exact.astype(wanted.numpy()))]
    is_truth = call.dtype == ir.DataType.BOOL and wanted in FLOAT_BITS
    return [source] if is_truth or holds(wanted, call.dtype) else unknown_function(call)


def holds(wanted: ir.DataType | None, given: ir.DataType | None) -> bool:
    """Does a floating-point type hold all numbers of another? Of the two of 16 bits none holds
    those of the other."""
    if not {wanted, given} <= FLOAT_BITS.keys():
        return False
    return wanted == given or FLOAT_BITS[wanted] > FLOAT_BITS[given]


@rule(*ARRAY_MOVES, with_sums=True)
def _move(call: Call) -> list[Tensor]:
    """What only moves the elements of its first operand, by the record of the operator."""
    move = plain_move(call.node).on_arrays(call[0].shape, call.integers)
    if move is None:
        raise UnknownError(f"{call.node.op_type} with these operands")
    return call.moved(move)


def _check_size(shape: Sequence[int]) -> None:
    if int(np.prod(shape, dtype=np.int64)) > LARGEST_ARRAY:
        raise FailedError("a tensor of too many elements")


@rule("Concat", with_sums=True)
def _concat(call: Call) -> list[Tensor]:
    parts = without_none(call.operands)
    return call.moved(concat_on_arrays(call.node), *parts)


@rule("Split", with_sums=True)
def _split(call: Call) -> list[Tensor]:
    moves = split_on_arrays(call.node, call[0].shape, call.integers)
    if moves is None:
        raise FailedError("the parts of a Split do not fit")
    return [moved((call[0],), move, call.with_sums) for move in moves]


@rule("Pad", with_sums=True)
def _pad(call: Call) -> list[Tensor]:
    """Zeros, or another constant, around the source."""
    pads = call.ints(1) if call.has(1) else list(call.attr("pads") or ())
    if text_attr(call.node, "mode", "constant") != "constant":
        raise UnknownError("Pad")
    rank = len(call[0].shape)
    axes = [axis % rank for axis in call.ints(3)] if call.has(3) else list(range(rank))
    before, after = [0] * rank, [0] * rank
    for place, axis in enumerate(axes):
        before[axis], after[axis] = pads[place], pads[place + len(axes)]
    # opset 10 has an attribute
    filler = call[2].exact if call.has(2) else np.array(call.attr("value", 0.0))
    if filler is None or filler.reshape(-1)[0] != 0:
        raise UnknownError("Pad with another number than 0")
    widths = [(max(0, b), max(0, a)) for b, a in zip(before, after, strict=True)]
    sizes = [s + b + a for s, b, a in zip(call[0].shape, before, after, strict=True)]
    cuts = tuple(
        slice(max(0, -b), max(0, -b) + size) for b, size in zip(before, sizes, strict=True)
    )
    if min(sizes, default=0) < 0:
        raise FailedError("more is cut off than there is")
    return call.moved(lambda array: np.pad(array, widths)[cuts])


@rule("Trilu", with_sums=True)
def _trilu(call: Call) -> list[Tensor]:
    """Elements on one side of a diagonal; the others become 0."""
    diagonal = call.ints(1)[0] if call.has(1) else 0
    upper = bool(int_attr(call.node, "upper", 1))
    kept = np.triu if upper else np.tril
    return call.moved(lambda array: kept(array, diagonal))


@rule("ScatterElements", "Scatter", with_sums=True)
def _scatter_elements(call: Call) -> list[Tensor]:
    _no_reduction(call)
    indices, axis = call.required(1), int_attr(call.node, "axis", 0)
    size = call[0].shape[axis]
    places = np.where(indices < 0, indices + size, indices)
    if places.size and not (places.min() >= 0 and places.max() < size):
        raise FailedError("an index beyond the end")

    def move(data: np.ndarray, updates: np.ndarray) -> np.ndarray:
        result = data.copy()
        grid: list[np.ndarray] = list(np.indices(places.shape, sparse=True))
        grid[axis % data.ndim] = places
        result[tuple(grid)] = updates
        return result

    return call.moved(move, call[0], call[2])


@rule("ScatterND", with_sums=True)
def _scatter_nd(call: Call) -> list[Tensor]:
    _no_reduction(call)
    places = tuple(np.moveaxis(call.required(1), -1, 0))

    def move(data: np.ndarray, updates: np.ndarray) -> np.ndarray:
        result = data.copy()
        result[places] = np.broadcast_to(updates, result[places].shape) if updates.size else updates
        return result

    return call.moved(move, call[0], call[2])


def _no_reduction(call: Call) -> None:
    if text_attr(call.node, "reduction", "none") != "none":
        raise UnknownError(f"{call.node.op_type} that adds")


@rule("Where", with_sums=True)
def _where(call: Call) -> list[Tensor]:
    condition = call[0].exact
    if condition is None:
        return _chosen(call)
    return call.moved(
        lambda one, other: np.asarray(np.where(condition, one, other)), call[1], call[2]
    )


def _chosen(call: Call) -> list[Tensor]:
    """c x + (1 - c) y for a truth value c that differs from run to run: for every number c, and so
    for 0 and 1. That is so where x and y are finite (`chooses`)."""
    fields = fields_of([call[place] for place in range(3)])
    if fields is None:
        return unknown_function(call)
    truth, one, other = fields
    _check_size(broadcast(call[0], call[1], call[2]))
    return [
        of_field(
            reduced(other + times(truth, reduced(one - other))), least_scale([call[1], call[2]])
        )
    ]


def chooses(node: ir.Node, operands: Operands) -> bool:
    """Is a node a Where whose truth values differ from run to run? What it does not choose may be
    NaN or infinite, but for constants."""
    truth, *choices = operands if is_op(node, "Where") else (None,)
    if truth is None or truth.exact is not None:
        return False
    arrays = [None if choice is None else choice.exact for choice in choices]
    return not all(array is not None and np.isfinite(array).all() for array in arrays)


@rule("Not")
def _not(call: Call) -> list[Tensor]:
    """1 - c of a truth value c that differs from run to run."""
    truth = call[0].numbers()
    return [Tensor(call[0].shape) if truth is None else of_field(reduced(1 - truth))]


@rule("Add", with_sums=True)
def _add(call: Call) -> list[Tensor]:
    return [_rounded(call, added(call[0], call[1], 1, call.with_sums))]


@rule("Sub", with_sums=True)
def _sub(call: Call) -> list[Tensor]:
    return [_rounded(call, added(call[0], call[1], -1, call.with_sums))]


@rule("Sum", with_sums=True)
def _sum(call: Call) -> list[Tensor]:
    total = call[0]
    for index in range(1, len(call.operands)):
        total = added(total, call[index], 1, call.with_sums)
    return [_rounded(call, total)]


def _rounded(call: Call, total: Tensor) -> Tensor:
    """A sum. Its elements to which a large constant is added are unknown functions of the
    operands."""
    far = (FAR_IN_16_BITS if call.dtype in SIXTEEN_BITS else FAR) * min(1.0, total.scale)
    is_far = np.zeros(total.shape, bool)
    floats = (array for array in call.constants if array.dtype.kind not in "biu")
    for array in floats:
        wide = np.abs(array.astype(np.float64))
        is_far |= (wide >= far) & np.isfinite(wide) & (wide > 0)
    if not is_far.any():
        return total
    (other,) = unknown_function(call)
    return moved(
        (other, total), lambda one, rest: np.asarray(np.where(is_far, one, rest)), call.with_sums
    )


@rule("Neg", with_sums=True)
def _neg(call: Call) -> list[Tensor]:
    return [added(exact(np.zeros((), np.float32)), call[0], -1, call.with_sums)]


@rule("Mul", with_sums=True)
def _mul(call: Call) -> list[Tensor]:
    _check_size(broadcast(call[0], call[1]))
    return _scaled(call, multiplied(call[0], call[1], call.with_sums))


def _scaled(call: Call, product: Tensor) -> list[Tensor]:
    """A product or a quotient. Beside a large number, or a small one or divisor, it is an unknown
    function. The decays of tables may be small (powers.py)."""
    for array in call.constants:
        least, most = exact(array).scales()
        is_small = least <= 1 / LARGE and (array.size == 1 or is_op(call.node, "Div"))
        if most >= LARGE or is_small:
            return unknown_function(call)
    return [product]


@rule("Div")
def _div(call: Call) -> list[Tensor]:
    """That of integers is cut, and an unknown function. So is 1 divided by what may be 0: x y / y
    is no x there."""
    if call.dtype not in FLOAT_BITS:
        return unknown_function(call)
    right = call[1].numbers()
    if right is None or not right.all():
        return [Tensor(broadcast(call[0], call[1]))]
    if call[1].exact is None and not _is_power(operand_at(call.node, 1)):
        return _scaled(call, multiplied(call[0], of_field(hashed([right], INVERSES)), False))
    return _scaled(call, divided(call[0], call[1]))


def _is_power(value: ir.Value) -> bool:
    """Is a value an exponential, in any order of its elements? It is never 0."""
    return is_op(source_through(value, *ARRAY_MOVES).producer(), "Exp")


@rule("Exp")
def _exp(call: Call) -> list[Tensor]:
    """A power of the root, and 0 for minus infinity."""
    sums = call[0].exponents()
    if sums is None:
        return [Tensor(call[0].shape)]
    numbers = power(sums.numbers)
    return [of_field(numbers if sums.blocked is None else np.where(sums.blocked, 0, numbers))]


@rule("MatMul")
def _matmul(call: Call) -> list[Tensor]:
    fields = fields_of([call[0], call[1]])
    if fields is None:
        zeros = (
            np.broadcast_to(np.zeros((), np.int8), tensor.shape) for tensor in (call[0], call[1])
        )
        return [Tensor(np.matmul(*zeros).shape)]  # it raises where the shapes do not fit
    return [of_field(matmul(*fields), call[0].scales()[1] * call[1].scales()[1])]


@rule("Einsum")
def _einsum(call: Call) -> list[Tensor]:
    """Two operands, each axis named by one letter."""
    fields = fields_of([call[index] for index in range(len(call.operands))])
    equation = text_attr(call.node, "equation", "").replace(" ", "")
    terms, _, out = equation.partition("->")
    labels = terms.split(",")
    if (
        "->" not in equation
        or "." in equation
        or any(len(set(each)) < len(each) for each in (*labels, out))
    ):
        raise UnknownError("an Einsum of another form")
    if fields is None:
        raise UnknownError("an Einsum of numbers that are not finite")
    result, own = fields[0], labels[0]
    for index in range(1, len(fields)):
        later = {*out, *chain.from_iterable(labels[index + 1 :])}
        result, own = _product(result, own, fields[index], labels[index], later)
    result, own = _reduce(result, own, set(out))
    return [of_field(np.transpose(result, [own.index(letter) for letter in out]))]


def _reduce(array: np.ndarray, labels: str, kept: set[str]) -> tuple[np.ndarray, str]:
    """The sum over the axes that are not kept."""
    axes = tuple(axis for axis, letter in enumerate(labels) if letter not in kept)
    if not axes:
        return array, labels
    own = certain(summed(of_field(array), lambda each: each.sum(axis=axes), False).field)
    return own, "".join(letter for letter in labels if letter in kept)


def _product(
    left: np.ndarray, own: str, right: np.ndarray, other: str, later: set[str]
) -> tuple[np.ndarray, str]:
    """One contraction as a matrix product: batches, rows, summed axes, columns."""
    left, own = _reduce(left, own, {*other, *later})
    right, other = _reduce(right, other, {*own, *later})
    batch = "".join(letter for letter in own if letter in other and letter in later)
    summed_over = "".join(letter for letter in own if letter in other and letter not in later)
    rows = "".join(letter for letter in own if letter not in other)
    columns = "".join(letter for letter in other if letter not in own)
    sizes = dict(zip(own, left.shape, strict=True)) | dict(zip(other, right.shape, strict=True))
    for letters, array in ((own, left), (other, right)):
        if any(sizes[letter] != size for letter, size in zip(letters, array.shape, strict=True)):
            raise FailedError("the sizes of an Einsum differ")

    def grouped(array: np.ndarray, letters: str, *groups: str) -> np.ndarray:
        order = np.transpose(array, [letters.index(letter) for group in groups for letter in group])
        return order.reshape(
            [int(np.prod([sizes[each] for each in group], dtype=np.int64)) for group in groups]
        )

    product = matmul(
        grouped(left, own, batch, rows, summed_over),
        grouped(right, other, batch, summed_over, columns),
    )
    letters = batch + rows + columns
    return product.reshape([sizes[letter] for letter in letters]), letters


@rule("ReduceSum", with_sums=True)
def _reduce_sum(call: Call) -> list[Tensor]:
    axes, keeps = (
        listed(call.node, "axes", call.integers(1)),
        bool(int_attr(call.node, "keepdims", 1)),
    )
    if not axes and int_attr(call.node, "noop_with_empty_axes", 0) == 1:
        return [call[0]]
    chosen = tuple(axes) if axes else None
    return [summed(call[0], lambda array: array.sum(axis=chosen, keepdims=keeps), call.with_sums)]


@rule("CumSum", with_sums=True)
def _cumsum(call: Call) -> list[Tensor]:
    (axis,) = call.ints(1)
    reverse, exclusive = (bool(int_attr(call.node, name, 0)) for name in ("reverse", "exclusive"))

    def total(array: np.ndarray) -> np.ndarray:
        turned = np.flip(array, axis) if reverse else array
        sums = np.cumsum(turned, axis)
        if exclusive:
            sums = sums - turned
        return np.flip(sums, axis) if reverse else sums

    return [summed(call[0], total, call.with_sums)]


def unknown_function(call: Call) -> list[Tensor]:
    """An unknown function of the operands, the same for equal operands."""
    places = [place for place, operand in enumerate(call.operands) if operand is not None]
    given = without_none(call.operands)
    fields = all_known(
        operand.numbers() if operand.exact is None else _bits(operand.exact) for operand in given
    )
    shape = broadcast(*given)
    if fields is None:
        return [Tensor(shape)]
    attributes = sorted((name, repr(attr.value)) for name, attr in call.node.attributes.items())
    seed = blake2b(repr((call.node.op_type, attributes, places)).encode(), digest_size=8).digest()
    return [of_field(np.broadcast_to(hashed(fields, int.from_bytes(seed, "big")), shape))]


def _bits(array: np.ndarray) -> np.ndarray:
    """Numbers that may be infinite as integers, a different one for each."""
    if array.dtype.kind in "iub":
        return array.astype(np.int64)
    return np.ascontiguousarray(array.astype(np.float64)).view(np.int64).reshape(array.shape)


def _exact_max(*arrays: np.ndarray) -> np.ndarray:
    return np.asarray(reduce(np.maximum, arrays))


def _exact_min(*arrays: np.ndarray) -> np.ndarray:
    return np.asarray(reduce(np.minimum, arrays))


def _integer_or_float_division(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    if left.dtype.kind == "f":
        return np.asarray(left / right)
    quotient = np.abs(left) // np.abs(right)
    return np.asarray(np.where((left < 0) == (right < 0), quotient, -quotient))


EXACT: Mapping[str, Callable[..., np.ndarray]] = {
    "Abs": np.abs,
    "Add": np.add,
    "And": np.logical_and,
    "Ceil": np.ceil,
    "Cos": np.cos,
    "Div": _integer_or_float_division,
    "Equal": np.equal,
    "Exp": np.exp,
    "Floor": np.floor,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Log": np.log,
    "MatMul": np.matmul,
    "Max": _exact_max,
    "Min": _exact_min,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Not": np.logical_not,
    "Or": np.logical_or,
    "Pow": np.power,
    "Reciprocal": np.reciprocal,
    "Sign": np.sign,
    "Sin": np.sin,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
    "Where": np.where,
    "Xor": np.logical_xor,
}
"""Operators on numbers that are the same in every run."""


@rule("Shape")
def _shape(call: Call) -> list[Tensor]:
    sizes = call[0].shape
    start, end = int_attr(call.node, "start", 0), int_attr(call.node, "end", len(sizes))
    return [exact(np.array(sizes[start:end], dtype=np.int64))]


@rule("Size")
def _size(call: Call) -> list[Tensor]:
    return [exact(np.array(int(np.prod(call[0].shape, dtype=np.int64))))]


@rule("ConstantOfShape")
def _constant_of_shape(call: Call) -> list[Tensor]:
    attr = call.node.attributes.get("value")
    filler = np.zeros(1, np.float32) if attr is None else attr.as_tensor().numpy()
    _check_size(call.ints(0))
    return [exact(np.full(call.ints(0), filler.reshape(-1)[0], dtype=filler.dtype))]


@rule("Range")
def _range(call: Call) -> list[Tensor]:
    bounds = all_known(call[index].exact for index in range(3))
    if bounds is None:
        raise UnknownError("a Range of unknown length")
    start, limit, delta = bounds
    if any(array != np.trunc(array) for array in (start, delta)):
        raise UnknownError("a Range of fractions, which ONNX and ONNX Runtime round in two ways")
    return [exact(np.arange(start.item(), limit.item(), delta.item(), dtype=start.dtype))]


@rule("Mod")
def _mod(call: Call) -> list[Tensor]:
    arrays = all_known((call[0].exact, call[1].exact))
    if arrays is None:
        return unknown_function(call)
    return [
        exact(np.asarray(np.fmod(*arrays) if int_attr(call.node, "fmod", 0) else np.mod(*arrays)))
    ]


@rule("OneHot")
def _one_hot(call: Call) -> list[Tensor]:
    """Known where the indices are."""
    indices, values = call.required(0), call[2].exact
    (depth,) = call.ints(1)
    if values is None or int_attr(call.node, "axis", -1) not in (-1, indices.ndim):
        raise UnknownError("a OneHot of another form")
    # an index beyond the ends stands for no column
    places = np.where(indices < 0, indices + depth, indices)
    hot = np.equal(places[..., None], np.arange(depth))
    return [exact(np.where(hot, values[1], values[0]))]


@rule("EyeLike")
def _eye_like(call: Call) -> list[Tensor]:
    dtype = call.attr("dtype")
    if dtype is None:
        raise UnknownError("EyeLike of an unknown type")
    rows, columns = call[0].shape
    return [
        exact(np.eye(rows, columns, int_attr(call.node, "k", 0), dtype=ir.DataType(dtype).numpy()))
    ]


def evaluated(
    node: ir.Node, operands: Operands, dtype: ir.DataType | None, with_sums: bool
) -> list[Tensor]:
    """What a node of the standard domain makes of tensors. Raises UnknownError where it is not
    followed, and FailedError where it fails, as the run would, or where its operands are not
    known."""
    call = Call(node, operands, dtype, with_sums)
    arrays = all_known(operand.exact for operand in without_none(operands))
    try:
        with np.errstate(all="ignore"):
            if arrays and node.op_type in EXACT:
                result = np.asarray(EXACT[node.op_type](*arrays))
                return [exact(_typed(result, arrays[0] if node.op_type == "Pow" else arrays[-1]))]
            if is_followed(node):
                return RULES.get(node.op_type, unknown_function)(call)
    except (ValueError, IndexError, ZeroDivisionError, OverflowError, MemoryError) as error:
        raise FailedError(f"{node.op_type} {node.name}: {error}") from None
    raise UnknownError(f"{node.op_type} is not followed")


def _typed(result: np.ndarray, operand: np.ndarray) -> np.ndarray:
    """A result of arithmetic in the type of an operand; a truth value stays one."""
    return result if result.dtype.kind == "b" else result.astype(operand.dtype)


def is_followed(node: ir.Node) -> bool:
    """Has the node a rule here, or is it an unknown function?"""
    return node.op_type in RULES or node.op_type in POINTWISE
