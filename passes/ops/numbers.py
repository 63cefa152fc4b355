"""The numbers that operators give, from those of their operands: as intervals, and as small sets.

    operators                                 interval of the result
    ----------------------------------------  ----------------------------------------------------------------------
    Sigmoid, Softmax, Tanh, Sin, Cos          a fixed one; Softmax, Sin and Cos make NaN of an infinity
    Exp, Sqrt, Softplus                       at the ends of the operand's interval
    Abs, Relu, Neg, Reciprocal, Add, Sub,     by the arithmetic of algebra/intervals.py
    Mul, Div, Pow
    Clip, Min, Max                            a limit of one operand is a limit of the result
    ReduceSum, ReduceMean                     of a known number of elements, each addition rounded
    moves, Split, Concat, Where               that of all operands together of which it holds elements (`passed_on`)
    Cast                                      that of the operand

An operator without a rule gives any number. Sets have rules of their own kind: `passed_on`,
comparisons, Where, Pad, Trilu and arithmetic over all pairs, rounded as the result's type rounds.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import ml_dtypes
import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.cases import ARITHMETIC, BITS, COMPARE
from fa_compiler.passes.algebra.intervals import (
    EVERYTHING,
    UNKNOWN,
    Bound,
    Interval,
    absolute,
    hull,
    least,
    most,
    negative,
    over,
    plus,
    rectified,
    rising,
    root,
    times,
    to_power,
)
from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import product
from fa_compiler.passes.ir.nodes import (
    all_known,
    constant,
    float_attr,
    input_of,
    inputs_of,
    is_op,
    producer,
    text_attr,
    without_none,
)
from fa_compiler.passes.ops.context import (
    Known,
)
from fa_compiler.passes.ops.elementwise import INTEGER_RANGES
from fa_compiler.passes.ops.generate import fill_of
from fa_compiler.passes.ops.movers import MOVES

LONGEST_SUM = 2**16
"""Sums of more elements have no interval here."""
ROUNDING = {
    ir.DataType.FLOAT: 2.0**-24,
    ir.DataType.FLOAT16: 2.0**-11,
    ir.DataType.BFLOAT16: 2.0**-8,
}
"""How far a sum is rounded at most, relatively."""
LIMITS = ("Clip", "Min", "Max")
NUMPY = {
    ir.DataType.FLOAT: np.float32,
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
    ir.DataType.DOUBLE: np.float64,
    ir.DataType.INT32: np.int32,
    ir.DataType.INT64: np.int64,
}
"""The types in which numbers are computed here."""


def kind_of(dtype: ir.DataType | None) -> type | None:
    """The NumPy type in which numbers of a type are computed; None where they are not."""
    if dtype is None:
        return None
    return NUMPY.get(dtype)


# -- elements that stay as they are ---------------------------------------------------------------

CHOICES = {"Where": (1, 2), "ScatterND": (0, 2), "ScatterElements": (0, 2)}
"""Operators that choose each element from one of several operands, and the places of these
operands."""
PASSING = (*MOVES, "Split", "Trilu", "Concat", *CHOICES)
"""Operators whose result holds elements of operands, and no other numbers but the zeros of a Trilu.
A Scatter may combine them instead."""

COMPUTING = (
    *(*PASSING, "Add", "Sub", "Mul", "Div", "Neg", "Abs", "Cast"),
    *("CumSum", "Max", "Min"),
)
"""Operators whose result holds numbers of operands, or what sums, products and quotients make of
them."""
KEEP_WHOLE = (
    *(*PASSING, "Add", "Sub", "Mul", "Neg", "Abs", "Cast"),
    *("Einsum", "MatMul", "ReduceSum"),
)
"""Operators that make whole numbers of whole numbers: a rounded sum or product of them is one."""


def passed_on(node: ir.Node) -> list[ir.Value]:
    """The operands of which the result of a PASSING operator holds elements; none where it computes
    new ones."""
    if not is_op(node, *PASSING) or not overwrites(node):
        return []
    if is_op(node, "Concat"):
        return inputs_of(node)
    given = (input_of(node, place) for place in CHOICES.get(node.op_type, (0,)))
    return without_none(given)


def overwrites(node: ir.Node) -> bool:
    """Does a Scatter replace elements by its updates, and not combine them?"""
    return text_attr(node, "reduction", "none") == "none"


# -- intervals ------------------------------------------------------------------------------------


class Operands(Protocol):
    """What a rule asks of the operands of a node."""

    @property
    def info(self) -> Known: ...

    def of(self, value: ir.Value | None) -> Bound | None: ...

    def unless_nan(self, value: ir.Value | None) -> Interval | None: ...


IntervalRule = Callable[[ir.Node, Operands], Bound | None]
INTERVALS: dict[str, IntervalRule] = {}


def interval(*op_types: str) -> Callable[[IntervalRule], IntervalRule]:
    """Enter the rule for the interval of these operators' results."""

    def enter(rule: IntervalRule) -> IntervalRule:
        INTERVALS.update(dict.fromkeys(op_types, rule))
        return rule

    return enter


def _of_one(function: Callable[[Bound], Bound | None]) -> IntervalRule:
    """The rule of an operator that gives something known even of unknown numbers."""
    return lambda node, operands: function(operands.of(node.inputs[0]) or UNKNOWN)


def _within(ends: Interval, *, of_finite: bool = False) -> IntervalRule:
    """The rule of an operator whose results are between two numbers, and NaN for an infinity if
    `of_finite`."""

    def rule(node: ir.Node, operands: Operands) -> Bound | None:
        given = operands.of(node.inputs[0]) or UNKNOWN
        return Bound(ends, given.may_be_nan or (of_finite and not given.is_finite))

    return rule


INTERVALS.update(
    {
        "Sigmoid": _within((0.0, 1.0)),
        "Tanh": _within((-1.0, 1.0)),
        "Softmax": _within((0.0, 1.0), of_finite=True),
        "Sin": _within((-1.0, 1.0), of_finite=True),
        "Cos": _within((-1.0, 1.0), of_finite=True),
        "Exp": _of_one(lambda one: rising(math.exp, one)),
        "Softplus": _of_one(
            lambda one: rising(lambda x: max(x, 0.0) + math.log1p(math.exp(-abs(x))), one)
        ),
        "Sqrt": _of_one(root),
        "Abs": _of_one(absolute),
        "Relu": _of_one(rectified),
    }
)


@interval("Cast")
def _converted(node: ir.Node, operands: Operands) -> Bound | None:
    return operands.of(node.inputs[0])


@interval(*MOVES, "Split", "Concat", "Where")
def _passed_on(node: ir.Node, operands: Operands) -> Bound | None:
    given = [operands.of(value) for value in passed_on(node)]
    return functools.reduce(hull, given) if given else None


@interval("Neg")
def _negated(node: ir.Node, operands: Operands) -> Bound | None:
    return if_known(negative, operands.of(node.inputs[0]))


@interval("Reciprocal")
def _reciprocal(node: ir.Node, operands: Operands) -> Bound | None:
    return if_known(over, Bound((1.0, 1.0), False), operands.of(node.inputs[0]))


@interval("Add", "Sub", "Mul", "Div", "Pow")
def _combined(node: ir.Node, operands: Operands) -> Bound | None:
    one = operands.of(node.inputs[0])
    if node.op_type == "Mul" and node.inputs[0] is node.inputs[1] and one is None:
        return Bound((0.0, math.inf), True)
    if one is None or (other := operands.of(node.inputs[1])) is None:
        return None
    if node.op_type == "Pow":
        return to_power(one, other, _is_whole(node.inputs[1], operands.info))
    if node.op_type == "Sub":
        return plus(one, negative(other))
    return _OF_TWO[node.op_type](one, other)


_OF_TWO: Mapping[str, Callable[[Bound, Bound], Bound | None]] = {
    "Add": plus,
    "Mul": times,
    "Div": over,
}


@interval(*LIMITS)
def _limited(node: ir.Node, operands: Operands) -> Bound | None:
    """A limit of one operand is a limit of the result."""
    given = [operands.of(value) or UNKNOWN for value in inputs_of(node)]
    if not given:
        return None
    intervals = [bound.unless_nan for bound in given]
    if node.op_type == "Clip":
        low, high = _limit(node, 1, "min", -1, operands), _limit(node, 2, "max", 1, operands)
        result = least(high, most(low, intervals[0]))
    else:
        result = functools.reduce({"Min": least, "Max": most}[node.op_type], intervals)
    if result == EVERYTHING:
        return None
    return Bound(result, any(bound.may_be_nan for bound in given))


def _limit(node: ir.Node, index: int, attribute: str, sign: int, operands: Operands) -> Interval:
    """The interval of a limit of Clip, which is an attribute before opset 11. A limit that is
    absent is the largest or the lowest finite number of the type. ONNX Runtime may compute 16 bits
    as float32, where it is that of float32."""
    value = input_of(node, index)
    if value is not None:
        return operands.unless_nan(value) or EVERYTHING
    if attribute in node.attributes:
        number = float_attr(node, attribute, 0.0)
        return number, number
    dtype = operands.info.dtype(node.outputs[0])
    near = float(dtype.max) if dtype in (*ROUNDING, ir.DataType.DOUBLE) else 0.0
    far = near if dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE) else math.inf
    return (near, far) if sign > 0 else (-far, -near)


@interval("ReduceSum", "ReduceMean")
def _reduced(node: ir.Node, operands: Operands) -> Bound | None:
    """The interval of a sum or mean of a known number of elements. Each addition may round. None
    where a sum may overflow."""
    one = operands.of(node.inputs[0])
    count = _summed_elements(node, operands.info)
    dtype = operands.info.dtype(node.outputs[0]) or ir.DataType.UNDEFINED
    unit = ROUNDING.get(dtype)
    if one is None or not count or count > LONGEST_SUM or unit is None:
        return None
    low, high = one.unless_nan
    largest = max(abs(low), abs(high))
    if not largest * count < float(dtype.max) / 2:
        return None
    error = largest * math.expm1((count + 1) * math.log1p(unit))
    factor = {"ReduceSum": count}.get(node.op_type, 1)
    return Bound((factor * (low - error), factor * (high + error)), one.may_be_nan)


def _summed_elements(node: ir.Node, known: Known) -> int | None:
    """How many elements a reduction makes one of; None where that is unknown."""
    source, result = node.inputs[0], known.shape(node.outputs[0])
    shape = known.shape(source)
    if shape is None or result is None:
        return None
    ratio = product(shape).exact_div(product(result))
    if ratio is None:
        return None
    return ratio.const


def _is_whole(value: ir.Value | None, known: Known) -> bool:
    """Is every element a whole number, by its type or as a constant?"""
    array = constant(value)
    if array is not None and array.dtype.kind == "f":
        return bool((np.isfinite(array) & (array == np.round(array))).all())
    return value is not None and known.dtype(value) in INTEGER_RANGES


# -- sets -----------------------------------------------------------------------------------------

LIMIT = 6
"""Sets larger than this are given up: a mask has two values, an intermediate step a few more."""
EXACT = 2**53
"""Sets are made of floats, which hold every integer up to this one. Larger integers are not put
into sets."""

ValueSet = frozenset[float]
BOOLEAN: ValueSet = frozenset((0.0, 1.0))
ZERO: ValueSet = frozenset((0.0,))
SHORT_FLOATS = (np.float16, ml_dtypes.bfloat16)
"""Types whose results may be rounded or not: ONNX Runtime may keep them in float32 from one
operator to the next."""
PAIRWISE: Mapping[str, Callable[..., np.ndarray]] = {**ARITHMETIC, **BITS, "Div": np.divide}


class Sets(Protocol):
    """What a rule asks of the operands of a node."""

    @property
    def info(self) -> Known: ...

    def of(self, value: ir.Value | None) -> ValueSet | None: ...


SetRule = Callable[[ir.Node, Sets], ValueSet | None]
SETS: dict[str, SetRule] = {}


def numbers(*op_types: str) -> Callable[[SetRule], SetRule]:
    """Enter the rule for the set of numbers of these operators' results."""

    def enter(rule: SetRule) -> SetRule:
        SETS.update(dict.fromkeys(op_types, rule))
        return rule

    return enter


@numbers(*MOVES, "Split", "Concat", "ScatterND", "ScatterElements")
def _of_operands(node: ir.Node, sets: Sets) -> ValueSet | None:
    given = passed_on(node)
    return union(map(sets.of, given)) if given else None


DECIDED: Mapping[str, Callable[..., bool]] = {**COMPARE, "Not": operator.not_}
"""The comparisons whose result follows from the numbers that the operands can hold."""
EXACT_TYPES = frozenset(
    (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL)
)
"""Types whose elements are compared as they are in the sets."""


@numbers(*DECIDED, "And", "Or", "Xor", "IsNaN", "IsInf")
def _compared(node: ir.Node, sets: Sets) -> ValueSet:
    """0 and 1, or only one of them if the sets of the operands decide."""
    compare = DECIDED.get(node.op_type)
    operands = inputs_of(node)
    known = all_known(map(sets.of, node.inputs))
    types = {sets.info.dtype(value) for value in operands}
    if compare is None or known is None or not types <= EXACT_TYPES:
        return BOOLEAN
    return frozenset(float(compare(*pair)) for pair in itertools.product(*known))


@numbers("Cast")
def _cast(node: ir.Node, sets: Sets) -> ValueSet | None:
    source, target = sets.of(node.inputs[0]), sets.info.dtype(node.outputs[0])
    if target == ir.DataType.BOOL:
        return BOOLEAN if source is None else frozenset(float(x != 0.0) for x in source)
    kind = kind_of(target)
    if source is None or kind is None:
        return None
    if np.issubdtype(kind, np.integer):
        if not held_by(source, kind):
            return None
        return source
    given = np.array(sorted(source), dtype=np.float64)
    with np.errstate(all="ignore"):
        rounded: np.ndarray = given.astype(kind)
    # Beyond the range of 16 bits ONNX Runtime gives infinity or the number, depending on later
    # nodes.
    beyond = np.isfinite(given) & ~np.isfinite(rounded)
    if kind in SHORT_FLOATS and beyond.any():
        return None
    return set_of(rounded)


@numbers("Where")
def _selected(node: ir.Node, sets: Sets) -> ValueSet | None:
    """In Where(x != 0, c, x) the third operand is reached only where x is 0."""
    condition, chosen, other = node.inputs[0], node.inputs[1], node.inputs[2]
    if _truth_of(condition) is other is not None:
        return union((sets.of(chosen), ZERO))
    return union((sets.of(chosen), sets.of(other)))


@numbers("Pad")
def _padded(node: ir.Node, sets: Sets) -> ValueSet | None:
    """The elements of the input, and in the mode that pads with a number this number."""
    if text_attr(node, "mode", "constant") != "constant":
        return sets.of(node.inputs[0])
    return union((sets.of(node.inputs[0]), _padding(node, sets)))


def _padding(node: ir.Node, sets: Sets) -> ValueSet | None:
    """The number with which a Pad of any opset pads; None where it is unknown."""
    given, kind = input_of(node, 2), kind_of(sets.info.dtype(node.outputs[0]))
    if given is not None:
        return sets.of(given)
    if "value" not in node.attributes:
        return ZERO
    if kind is None:
        return None
    with np.errstate(over="ignore"):
        return set_of(np.array(float_attr(node, "value", 0.0)).astype(kind))


@numbers("Trilu")
def _triangle(node: ir.Node, sets: Sets) -> ValueSet | None:
    return union((sets.of(node.inputs[0]), ZERO))


@numbers("ConstantOfShape")
def _filled(node: ir.Node, sets: Sets) -> ValueSet | None:
    return set_of(fill_of(node))


@numbers("Neg")
def _opposite(node: ir.Node, sets: Sets) -> ValueSet | None:
    values, dtype = sets.of(node.inputs[0]), sets.info.dtype(node.outputs[0])
    if values is None or dtype is None:
        return None
    result = frozenset(-x + 0.0 for x in values)
    if dtype.is_floating_point():
        return result
    # The least integer of a type is its own negative.
    kind = kind_of(dtype)
    if kind is not None and held_by(result, kind):
        return result
    return None


@numbers(*PAIRWISE)
def _arithmetic(node: ir.Node, sets: Sets) -> ValueSet | None:
    """One operand after the other."""
    kind, known = kind_of(sets.info.dtype(node.outputs[0])), all_known(map(sets.of, node.inputs))
    if kind is None or not known:
        return None
    result: ValueSet | None = known[0]
    for other in known[1:]:
        if result is None or len(result) * len(other) > LIMIT * LIMIT:
            return None
        result = _of_pairs(node.op_type, result, other, kind)
    return result


def _of_pairs(op: str, one: ValueSet, other: ValueSet, kind: type) -> ValueSet | None:
    """The results of all pairs in a type; None where one is not exact."""
    grid = [(a, b) for a in sorted(one) for b in sorted(other)]
    with np.errstate(all="ignore"):
        pairs: np.ndarray = np.array(grid, dtype=np.float64).reshape(-1, 2).astype(kind)
        whole = np.issubdtype(kind, np.integer)
        if op == "Div" and (whole or (pairs[:, 1] == 0).any()):
            return None
        if op in BITS:  # a type that holds two integers holds every number of their bits
            return set_of(BITS[op](*pairs.T)) if whole else None
        results, fits = PAIRWISE[op](pairs[:, 0], pairs[:, 1]), True
        if whole:
            # For two integers up to 2^53, float64 is close enough to see whether their sum or
            # product fits.
            fits = held_by(PAIRWISE[op](*pairs.astype(np.float64).T), kind)
        elif kind in SHORT_FLOATS:
            # A result of 16 bits has to be the same in float32, which does not round it.
            fits = bool(
                (PAIRWISE[op](*pairs.astype(np.float32).T) == results.astype(np.float32)).all()
            )
    if not fits:
        return None
    return set_of(results)


def held_by(values: Iterable[float], kind: type) -> bool:
    """Are all numbers whole numbers that an integer type holds, and that a float holds exactly?"""
    # A float beyond these may be a rounded integer.
    low, high = max(int(np.iinfo(kind).min), 1 - EXACT), min(int(np.iinfo(kind).max), EXACT - 1)
    return all(math.isfinite(x) and x == int(x) and low <= x <= high for x in values)


def set_of(array: np.ndarray) -> ValueSet | None:
    """The numbers of an array; None where they are too many, too large, or one is NaN."""
    flat = array.reshape(-1)
    if flat.size == 0:
        return frozenset()
    # The first elements rule out most large constants that are no masks, without sorting them.
    if len(np.unique(flat[:64])) > LIMIT:
        return None
    if array.dtype.kind in "iu" and max(int(flat.max()), -int(flat.min())) > EXACT:
        return None
    values = frozenset(float(x) + 0.0 for x in np.unique(flat).astype(np.float64))
    if len(values) > LIMIT or any(map(math.isnan, values)):
        return None
    return values


def union(sets: Iterable[ValueSet | None]) -> ValueSet | None:
    """The numbers of all sets; None where one is unknown, or they are too many."""
    result: frozenset[float] = frozenset()
    for known in sets:
        if known is None:
            return None
        result |= known
    if len(result) <= LIMIT:
        return result
    return None


def _truth_of(condition: ir.Value | None) -> ir.Value | None:
    """The x of a condition `x != 0`, through casts between booleans; None for other conditions."""
    node = producer(condition)
    while is_op(node, "Cast", "Identity"):
        assert node is not None
        attr = node.attributes.get("to")
        source = input_of(node, 0)
        if source is None or (attr is not None and attr.as_int() != ir.DataType.BOOL):
            return None
        inner = source.producer()
        if not is_op(inner, "Cast", "Identity") or _is_value_cast(inner):
            return source
        node = inner
    return None


def _is_value_cast(node: ir.Node | None) -> bool:
    """Is the node a cast to another type than bool? Its output is then the x of `_truth_of`."""
    if node is None or node.op_type != "Cast":
        return False
    attr = node.attributes.get("to")
    return attr is not None and attr.as_int() != ir.DataType.BOOL
