"""The numbers that a tensor can hold: they prove that a float mask contains only 0 and a very negative number.

`ValueSets.of(value)` is a small set that contains every element the value can have in any run, or None when no such set
was found. A set never contains NaN: where an element could become NaN the answer is None.

Sets are built from constants, comparisons ({0, 1}, or one of them if the operands' sets decide), Where, casts,
operators that only move elements, and element-wise arithmetic over all pairs, rounded as the tensor's type rounds. One
correlation is used: in `Where(Cast(x, bool), c, x)` the third operand is reached only where x is 0.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx_ir as ir

from fa_compiler.passes.ir.nodes import constant, input_of, is_op, text_attr
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.values.analysis import Analysis
from fa_compiler.passes.values.given_masks import inverted_mask

LIMIT = 6
"""Sets larger than this are given up: a mask has two values, an intermediate step a few more."""
EXACT = 2**53
"""Sets are made of floats, which hold every integer up to this one. Larger integers are not put into sets."""

ValueSet = frozenset[float]

COMPARISONS = (
    "Equal",
    "Greater",
    "GreaterOrEqual",
    "Less",
    "LessOrEqual",
    "And",
    "Or",
    "Xor",
    "Not",
    "IsNaN",
    "IsInf",
)
DECIDED: dict[str, Callable[..., bool]] = {
    "Equal": operator.eq,
    "Greater": operator.gt,
    "GreaterOrEqual": operator.ge,
    "Less": operator.lt,
    "LessOrEqual": operator.le,
    "Not": operator.not_,
}
"""The comparisons whose result follows from the numbers that the operands can hold."""
ARITHMETIC: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Min": np.minimum,
    "Max": np.maximum,
}
NUMPY = {
    ir.DataType.FLOAT: np.float32,
    ir.DataType.FLOAT16: np.float16,
    ir.DataType.BFLOAT16: ml_dtypes.bfloat16,
    ir.DataType.DOUBLE: np.float64,
    ir.DataType.INT32: np.int32,
    ir.DataType.INT64: np.int64,
}

EXACT_TYPES = frozenset((ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64, ir.DataType.BOOL))
"""Types whose elements are compared as they are in the sets."""

SHORT_FLOATS = (np.float16, ml_dtypes.bfloat16)
"""Types whose results may be rounded or not: ONNX Runtime may keep them in float32 from one operator to the next."""


@dataclass
class ValueSets(Analysis[ValueSet]):
    """The value sets of one model; with `binary_masks` those of runs whose masks hold only 0 and 1 (given_masks.py)."""

    binary_masks: bool = False

    def only(self, value: ir.Value) -> float | None:
        """The one number that a tensor holds in all runs; None where there are several, or unknown ones."""
        numbers = self.of(value)
        return next(iter(numbers)) if numbers is not None and len(numbers) == 1 else None

    def only_besides_zero(self, value: ir.Value) -> float | None:
        """The one number that a tensor may hold besides 0; None where there is none, or it is not finite."""
        others = (self.of(value) or frozenset()) - {0.0}
        number = next(iter(others)) if len(others) == 1 else math.nan
        return number if math.isfinite(number) else None

    def _compute(self, value: ir.Value) -> ValueSet | None:
        array = constant(value)
        if array is not None:
            return _content(array)
        large = self.info.large.of(value)
        if large is not None:
            return large.numbers
        if value.is_graph_input() or value.const_value is not None:
            return _BOOL if self.info.dtype(value) == ir.DataType.BOOL else None
        node = value.producer()
        if node is None or node.domain not in ("", "ai.onnx"):
            return _BOOL if self.info.dtype(value) == ir.DataType.BOOL else None
        found = self._of_node(node, value)
        if found is None and self.info.dtype(value) == ir.DataType.BOOL:
            return _BOOL
        return found

    def _of_node(self, node: ir.Node, value: ir.Value) -> ValueSet | None:
        op = node.op_type
        if op in COMPARISONS:
            return self._compared(node)
        if op in MOVES or op == "Split":
            return self.of(node.inputs[0])
        if op == "Cast":
            return self._cast(self.of(node.inputs[0]), value)
        if op == "Where":
            return self._where(node)
        if op == "Concat":
            return _union(self.of(operand) for operand in node.inputs)
        if op in ("ScatterND", "ScatterElements") and overwrites(node):
            return _union((self.of(node.inputs[0]), self.of(node.inputs[2])))
        if op == "Pad":
            return self._padded(node)
        if op == "Trilu":
            return _union((self.of(node.inputs[0]), _ZERO))
        if op == "ConstantOfShape":
            attr = node.attributes.get("value")
            return _ZERO if attr is None else _content(attr.as_tensor().numpy())
        if op == "Neg":
            return _negated(self.of(node.inputs[0]), self.info.dtype(value))
        if op in ARITHMETIC:
            return (inverted_mask(node, self.only) if self.binary_masks else None) or self._arithmetic(node, value)
        return None

    def _compared(self, node: ir.Node) -> ValueSet:
        """0 and 1, or only one of them if the sets of the operands decide."""
        compare = DECIDED.get(node.op_type)
        found = [self.of(operand) for operand in node.inputs if operand is not None]
        sets = [each for each in found if each is not None]
        types = {self.info.dtype(operand) for operand in node.inputs if operand is not None}
        if compare is None or len(sets) < len(node.inputs) or not types <= EXACT_TYPES:
            return _BOOL
        return frozenset(float(compare(*numbers)) for numbers in itertools.product(*sets))

    def _cast(self, source: ValueSet | None, value: ir.Value) -> ValueSet | None:
        target = self.info.dtype(value)
        if target == ir.DataType.BOOL:
            return _BOOL if source is None else frozenset(float(x != 0.0) for x in source)
        kind = NUMPY.get(target) if target is not None else None
        if source is None or kind is None:
            return None
        with np.errstate(all="ignore"):
            if not np.issubdtype(kind, np.integer):
                numbers = np.array(sorted(source), dtype=np.float64)
                rounded = numbers.astype(kind)
                # Beyond the range of 16 bits ONNX Runtime gives infinity or the number, depending on later nodes.
                beyond = np.isfinite(numbers) & ~np.isfinite(rounded)
                return None if kind in SHORT_FLOATS and beyond.any() else _content(rounded)
            return source if _held_by(source, kind) else None

    def _where(self, node: ir.Node) -> ValueSet | None:
        condition, chosen, other = node.inputs[0], node.inputs[1], node.inputs[2]
        if _truth_of(condition) is other is not None:
            return _union((self.of(chosen), _ZERO))
        return _union((self.of(chosen), self.of(other)))

    def _padded(self, node: ir.Node) -> ValueSet | None:
        """The elements of the input, and in the mode that pads with a number this number."""
        given, attr = input_of(node, 2), node.attributes.get("value")
        if text_attr(node, "mode", "constant") != "constant":
            return self.of(node.inputs[0])
        if attr is not None:
            dtype = self.info.dtype(node.outputs[0])
            if dtype not in NUMPY:
                return None
            with np.errstate(over="ignore"):
                number = np.array(attr.as_float()).astype(NUMPY[dtype])
            return _union((self.of(node.inputs[0]), _content(number)))
        return _union((self.of(node.inputs[0]), _ZERO if given is None else self.of(given)))

    def _arithmetic(self, node: ir.Node, value: ir.Value) -> ValueSet | None:
        dtype = self.info.dtype(value)
        kind = NUMPY.get(dtype) if dtype is not None else None
        sets = [self.of(operand) for operand in node.inputs]
        if kind is None or not sets or sets[0] is None:
            return None
        result: ValueSet | None = sets[0]
        for operand in sets[1:]:
            if result is None or operand is None or len(result) * len(operand) > LIMIT * LIMIT:
                return None
            grid = [(a, b) for a in sorted(result) for b in sorted(operand)]
            whole = np.issubdtype(kind, np.integer)
            with np.errstate(all="ignore"):
                pairs = np.array(grid, dtype=np.float64).reshape(-1, 2).astype(kind)
            if node.op_type == "Div" and (whole or (pairs[:, 1] == 0).any()):
                return None
            with np.errstate(all="ignore"):
                # For two integers up to 2^53, float64 is close enough to see whether their sum or product fits.
                found = ARITHMETIC[node.op_type](pairs[:, 0], pairs[:, 1])
                exact = ARITHMETIC[node.op_type](*pairs.astype(np.float64).T) if whole else found
            if (whole and not _held_by(exact, kind)) or (kind in SHORT_FLOATS and not _is_exact(node, pairs, found)):
                return None
            result = _content(found)
        return result


def _is_exact(node: ir.Node, pairs: np.ndarray, rounded: np.ndarray) -> bool:
    """Are the results the same as in float32, which does not round to 16 bits?"""
    with np.errstate(all="ignore"):
        wide = ARITHMETIC[node.op_type](*pairs.astype(np.float32).T)
        return bool((wide == rounded.astype(np.float32)).all())


_BOOL: ValueSet = frozenset((0.0, 1.0))
_ZERO: ValueSet = frozenset((0.0,))


def overwrites(node: ir.Node) -> bool:
    """Does a Scatter replace elements by its updates, and not combine them?"""
    return text_attr(node, "reduction", "none") == "none"


def _held_by(numbers: Iterable[float], kind: type) -> bool:
    """Are all numbers whole numbers that an integer type holds, and that a float holds exactly?"""
    # A float beyond these may be a rounded integer.
    low, high = max(int(np.iinfo(kind).min), 1 - EXACT), min(int(np.iinfo(kind).max), EXACT - 1)
    return all(math.isfinite(x) and x == int(x) and low <= x <= high for x in numbers)


def _content(array: np.ndarray) -> ValueSet | None:
    flat = array.reshape(-1)
    if flat.size == 0:
        return frozenset()
    # The first elements rule out most large constants that are no masks, without sorting them.
    if len(np.unique(flat[:64])) > LIMIT:
        return None
    if array.dtype.kind in "iu" and max(int(flat.max()), -int(flat.min())) > EXACT:
        return None
    values = {float(x) + 0.0 for x in np.unique(flat).astype(np.float64)}
    return None if len(values) > LIMIT or any(math.isnan(x) for x in values) else frozenset(values)


def _union(sets: Iterable[ValueSet | None]) -> ValueSet | None:
    result: frozenset[float] = frozenset()
    for each in sets:
        if each is None:
            return None
        result |= each
    return result if len(result) <= LIMIT else None


def _negated(values: ValueSet | None, dtype: ir.DataType | None) -> ValueSet | None:
    if values is None or dtype is None:
        return None
    result = frozenset(-x + 0.0 for x in values)
    if dtype.is_floating_point():
        return result
    # The least integer of a type is its own negative.
    kind = NUMPY.get(dtype)
    return None if kind is None or not _held_by(result, kind) else result


def _truth_of(condition: ir.Value | None) -> ir.Value | None:
    """The x of a condition `x != 0`, through casts between booleans; None for other conditions."""
    node = condition.producer() if condition is not None else None
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
