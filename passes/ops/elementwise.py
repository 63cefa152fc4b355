"""Operators that work element by element, with numpy's broadcasting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import (
    constant,
    input_of,
    int_attr,
    is_op,
    operand_at,
    operand_orders,
    without_none,
)
from fa_compiler.passes.ops.context import (
    LIMIT,
    Content,
    Context,
    Fact,
    Known,
    broadcast,
    content_fact,
    dim_array,
    integers_of,
    rule,
)
from fa_compiler.passes.ops.moves import Converted, Neutral, Same, mover

INTEGER_RANGES = {
    ir.DataType.INT64: (-(2**63), 2**63 - 1),
    ir.DataType.INT32: (-(2**31), 2**31 - 1),
    ir.DataType.INT16: (-(2**15), 2**15 - 1),
    ir.DataType.INT8: (-128, 127),
    ir.DataType.UINT64: (0, 2**64 - 1),
    ir.DataType.UINT32: (0, 2**32 - 1),
    ir.DataType.UINT16: (0, 2**16 - 1),
    ir.DataType.UINT8: (0, 255),
    ir.DataType.BOOL: (0, 1),
}
"""The integers that a type holds; a boolean counts as 0 or 1."""


def does_not_overflow(content: Content, dtype: ir.DataType | None) -> bool:
    """Whether the integers stay inside the dtype, so that arithmetic on them does not wrap around.

    Sizes and products of sizes are taken to fit 32 bits, because ONNX Runtime's own shape
    arithmetic breaks beyond that. Narrower types hold only constants.
    """
    if dtype not in INTEGER_RANGES:
        return False
    bounds = INTEGER_RANGES[dtype]
    for dim in content.reshape(-1):
        value = dim.const
        if value is None:
            narrow = bounds[1] < 2**31 - 1
            if dtype != ir.DataType.BOOL and (
                narrow or (bounds[0] == 0 and not dim.is_at_least(0))
            ):
                return False
        elif not bounds[0] <= value <= bounds[1]:
            return False
    return True


def is_float(content: Content) -> bool:
    """Whether the content is floating point (an array in its dtype) and not integers (Dim
    objects)."""
    return content.dtype != object


def truth(value: bool | None) -> Dim:
    """0 or 1, or an unknown truth value."""
    return Dim.fresh() if value is None else Dim(int(value))


def equal(a: Dim, b: Dim) -> bool | None:
    """True when a == b in every run, False when in no run, None when it is unknown."""
    difference = (a - b).const
    if difference is not None:
        return difference == 0
    if (a - b).is_at_least(1) or (b - a).is_at_least(1):
        return False
    return None


def less(a: Dim, b: Dim) -> bool | None:
    """True when a < b in every run, False when in no run, None when it is unknown."""
    if (b - a).is_at_least(1):
        return True
    if (a - b).is_at_least(0):
        return False
    return None


def _not(value: bool | None) -> bool | None:
    if value is None:
        return None
    return not value


def _bool(dim: Dim) -> bool | None:
    return _not(equal(dim, Dim(0)))


def _both(a: bool | None, b: bool | None) -> bool | None:
    if a is False or b is False:
        return False
    return (a and b) or None


def _sign(dim: Dim) -> Dim:
    """1 above 0, -1 below. torch divides a size by rounding down where its sign is 1, and otherwise
    corrects it."""
    if dim.is_at_least(1):
        return Dim(1)
    if (-dim).is_at_least(1):
        return Dim(-1)
    if dim.const == 0:
        return dim
    return Dim.fresh(0 if dim.is_at_least(0) else None)


_INT: dict[str, Callable[..., Dim]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Div": Dim.truncdiv,
    "Min": Dim.min,
    "Max": Dim.max,
    "Neg": lambda a: -a,
    "Abs": lambda a: Dim.max(a, -a),
    "Sign": _sign,
    "Equal": lambda a, b: truth(equal(a, b)),
    "Less": lambda a, b: truth(less(a, b)),
    "LessOrEqual": lambda a, b: truth(_not(less(b, a))),
    "Greater": lambda a, b: truth(less(b, a)),
    "GreaterOrEqual": lambda a, b: truth(_not(less(a, b))),
    "And": lambda a, b: truth(_both(_bool(a), _bool(b))),
    "Or": lambda a, b: truth(_not(_both(_not(_bool(a)), _not(_bool(b))))),
    "Xor": lambda a, b: truth(_not(equal(a, b))),
    "Not": lambda a: truth(_not(_bool(a))),
}

_FLOAT: dict[str, Callable[..., Any]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Neg": np.negative,
    "Abs": np.abs,
    "Sqrt": np.sqrt,
    "Reciprocal": lambda a: a.dtype.type(1) / a,
    "Exp": np.exp,
    "Log": np.log,
    "Tanh": np.tanh,
    "Floor": np.floor,
    "Ceil": np.ceil,
    "Min": np.minimum,
    "Max": np.maximum,
    "Equal": np.equal,
    "Less": np.less,
    "LessOrEqual": np.less_equal,
    "Greater": np.greater,
    "GreaterOrEqual": np.greater_equal,
    "IsNaN": np.isnan,
    "IsInf": np.isinf,
}


def fold(op: str, *operands: Content | None) -> Content | None:
    """The element-wise result on known contents: symbolic for integers, in their dtype for floats.
    None when unknown."""
    known = without_none(operands)
    if len(known) < len(operands) or not _are_followed(known):
        return None
    floats = [is_float(operand) for operand in known]
    if all(floats):
        return _fold_floats(op, known)
    if any(floats) or op not in _INT:
        return None
    function = np.frompyfunc(_INT[op], len(known), 1)
    return np.asarray(function(*known), dtype=object)


def _are_followed(operands: Sequence[Content]) -> bool:
    """Can the operands be broadcast to each other, to a result that is small enough?"""
    if all(operand.size == 1 for operand in operands):
        return True
    try:
        shape = np.broadcast_shapes(*(operand.shape for operand in operands))
    except ValueError:
        return False
    return math.prod(shape) <= LIMIT


def _fold_floats(op: str, operands: Sequence[Content]) -> Content | None:
    """`fold` of floats. Truth values become integers."""
    function = _FLOAT.get(op)
    if function is None:
        return None
    with np.errstate(all="ignore"):
        result = np.asarray(function(*operands))
    return dim_array(result.astype(np.int64)) if result.dtype == np.bool_ else result


ORDERINGS = ("Less", "LessOrEqual", "Greater", "GreaterOrEqual")
COMPARISONS = ("Equal", *ORDERINGS)
_UNARY = (
    "Neg",
    "Abs",
    "Sign",
    "Sqrt",
    "Reciprocal",
    "Exp",
    "Log",
    "Tanh",
    "Floor",
    "Ceil",
    "Not",
    "IsNaN",
    "IsInf",
)
_LOGIC = ("And", "Or", "Xor", "Not", "IsNaN", "IsInf")
TRUTHS = dict.fromkeys((*COMPARISONS, *_LOGIC), ir.DataType.BOOL)
"""The type of the operators that make truth values."""


def _result(ctx: Context, op: str, count: int, dtype: ir.DataType | None) -> Fact:
    if count == 1 and op in ("Min", "Max", "Add"):
        return ctx.fact(0)
    content = _result_content(ctx, op, count)
    if content is not None and (is_float(content) or does_not_overflow(content, dtype)):
        return content_fact(content, dtype)
    return Fact(broadcast(*(ctx.shape(index) for index in range(count))), dtype)


def _result_content(ctx: Context, op: str, count: int) -> Content | None:
    """The content of the result of an operator of so many operands; None where it is unknown."""
    if op == "IsInf" and (
        ctx.int_attr("detect_negative", 1),
        ctx.int_attr("detect_positive", 1),
    ) != (1, 1):
        return None
    content = ctx.content(0)
    if op in _UNARY:
        return fold(op, content)
    if count == 1:
        return None
    for index in range(1, count):
        content = fold(op, content, ctx.content(index))
    return content


FOUR_OPERATIONS = ("Add", "Sub", "Mul", "Div")
COMMUTATIVE = ("Add", "Mul", "Max", "Min", "Or", "And", "Equal")
"""Operators of two operands whose result is the same in either order of them."""
_BINARY = (
    *(*FOUR_OPERATIONS, *COMPARISONS, "And", "Or", "Xor"),
    *("PRelu", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitShift"),
)
_VARIADIC = ("Min", "Max", "Sum", "Mean")
_ACTIVATIONS = (
    *(*_UNARY, "Round", "Erf", "BitwiseNot"),
    *("Sin", "Cos", "Tan", "Asin", "Acos", "Atan", "Sinh", "Cosh", "Asinh", "Acosh", "Atanh"),
    *(
        "Sigmoid",
        "HardSigmoid",
        "HardSwish",
        "Relu",
        "LeakyRelu",
        "ThresholdedRelu",
        "Elu",
        "Selu",
        "Celu",
    ),
    *("Softplus", "Softsign", "Mish", "Gelu", "Swish", "Shrink"),
)
WRITERS = ("ScatterND", "ScatterElements", "Scatter", "TensorScatter")
"""Operators that write updates into a tensor."""
POINTWISE = (
    *(*_BINARY, *_VARIADIC, *_ACTIVATIONS),
    *("Identity", "Cast", "Clip", "Pow", "Mod", "Where"),
)
"""Each element of the result is made of one element of each operand. The operands are broadcast as
in NumPy."""


@rule("SwiGLU")
def _swiglu(ctx: Context) -> Fact:
    # equal: nothing is broadcast
    return Fact(ctx.shape(0) or ctx.shape(1), ctx.dtype(0) or ctx.dtype(1))


@rule(*_BINARY)
def _binary(ctx: Context) -> Fact:
    op = ctx.node.op_type
    dtype = TRUTHS.get(op) or ctx.dtype(0) or ctx.dtype(1)
    # Before opset 7 the second operand was broadcast by another rule, from the attribute `axis` on.
    if ctx.opset < 7:
        return Fact(ctx.shape(0), dtype)
    return _result(ctx, op, 2, dtype)


@rule(*_VARIADIC)
def _variadic(ctx: Context) -> Fact:
    op = {"Sum": "Add"}.get(ctx.node.op_type, ctx.node.op_type)
    return _result(ctx, op, len(ctx.facts), ctx.dtype(0))


@rule(*_ACTIVATIONS)
def _unary(ctx: Context) -> Fact:
    op = ctx.node.op_type
    return _result(ctx, op, 1, TRUTHS.get(op) or ctx.dtype(0))


@rule(
    "Softmax",
    "LogSoftmax",
    "Hardmax",
    "InstanceNormalization",
    "GroupNormalization",
    "LpNormalization",
)
@rule("LRN", "MeanVarianceNormalization", "CumSum", "Bernoulli")
@rule(*WRITERS)
def _shape_of_first(ctx: Context) -> Fact:
    return Fact(ctx.shape(0), ctx.dtype(0))


@rule("Identity", "Trilu", "Clip", "Dropout", "RotaryEmbedding")
def _keeps(ctx: Context) -> list[Fact]:
    op = ctx.node.op_type
    fact = ctx.fact(0)
    if op == "Dropout":
        # A dropout that drops (opset 12 on: training_mode) changes values, never the shape.
        return [Fact(fact.shape, fact.dtype), Fact(fact.shape, ir.DataType.BOOL)]
    if op == "Identity":
        return [fact]
    return [Fact(fact.shape, fact.dtype)]


@rule("Pow")
def _pow(ctx: Context) -> Fact:
    shape = broadcast(ctx.shape(0), ctx.shape(1))
    base, exponent = ctx.content(0), ctx.content(1)
    if (
        base is None
        or exponent is None
        or not is_float(base)
        or not base.size == exponent.size == 1
    ):
        return Fact(shape, ctx.dtype(0))
    power = _floats(exponent, base.dtype)
    if power is None:
        return Fact(shape, ctx.dtype(0))
    with np.errstate(all="ignore"):
        return content_fact(np.asarray(np.power(base, power)), ctx.dtype(0))


@rule("Mod")
def _mod(ctx: Context) -> Fact:
    left, right = ctx.content(0), ctx.content(1)
    if left is not None and right is not None and not is_float(left) and not is_float(right):
        function = np.frompyfunc(Dim.fmod if ctx.int_attr("fmod", 0) else Dim.mod, 2, 1)
        try:
            return content_fact(np.asarray(function(left, right), dtype=object), ctx.dtype(0))
        except ValueError:
            pass
    return Fact(broadcast(ctx.shape(0), ctx.shape(1)), ctx.dtype(0))


@rule("Where")
def _where(ctx: Context) -> Fact:
    shape = broadcast(ctx.shape(0), ctx.shape(1), ctx.shape(2))
    dtype = ctx.dtype(1) or ctx.dtype(2)
    condition, x, y = ctx.content(0), ctx.content(1), ctx.content(2)
    if (
        condition is None
        or x is None
        or y is None
        or is_float(condition)
        or is_float(x) != is_float(y)
    ):
        return Fact(shape, dtype)
    try:
        size = np.broadcast(condition, x, y).size
    except ValueError:
        return Fact(shape, dtype)
    if size > LIMIT:
        return Fact(shape, dtype)
    if is_float(x):
        decided = [_bool(item) for item in condition.reshape(-1)]
        if None in decided:
            return Fact(shape, dtype)
        flags = np.array(decided, dtype=bool).reshape(condition.shape)
        return content_fact(np.asarray(np.where(flags, x, y)), dtype)
    choose = np.frompyfunc(_choose, 3, 1)
    return content_fact(np.asarray(choose(condition, x, y), dtype=object), dtype)


def _choose(condition: Dim, x: Dim, y: Dim) -> Dim:
    decided = _bool(condition)
    if decided is not None:
        return x if decided else y
    if x == y:
        return x
    never_negative = x.is_at_least(0) and y.is_at_least(0)
    return Dim.fresh(0 if never_negative else None)


@rule("Cast", "CastLike", "BitCast")
def _cast(ctx: Context) -> Fact:
    to = ctx.dtype(1) if ctx.node.op_type == "CastLike" else ctx.dtype_attr("to")
    content = None
    if to is not None and ctx.node.op_type != "BitCast":
        content = cast(ctx.content(0), ctx.dtype(0), to)
    return Fact(ctx.shape(0), to, content)


def cast(content: Content | None, source: ir.DataType | None, to: ir.DataType) -> Content | None:
    """`content` converted as ONNX Runtime's Cast does; None where that is not known."""
    if content is None:
        return None
    if to == ir.DataType.BOOL:
        if is_float(content):
            return dim_array((content != 0).astype(np.int64))
        return np.asarray(np.frompyfunc(lambda dim: truth(_bool(dim)), 1, 1)(content), dtype=object)
    if to in INTEGER_RANGES:
        return _integers(content, to)
    if not to.is_floating_point():
        return None
    return _floats(content, to.numpy())


def _integers(content: Content, to: ir.DataType) -> Content | None:
    """The content as integers of a type; None where the type does not hold them: a Cast out of
    range is undefined behaviour."""
    if not is_float(content):
        if not does_not_overflow(content, to):
            return None
        return content
    low, high = INTEGER_RANGES[to]
    with np.errstate(all="ignore"):
        wide = np.asarray(np.trunc(content.astype(np.float64)))
    held = np.isfinite(wide).all() and (wide >= low).all() and (wide < high).all()
    if not held:
        return None
    return dim_array(wide)


def _floats(content: Content, dtype: Any) -> Content | None:
    """The content as floats of a type; None where an integer is not the same in every run."""
    with np.errstate(all="ignore"):
        if is_float(content):
            return content.astype(dtype)
        values = integers_of(content)
        return None if values is None else values.astype(np.float64).astype(dtype)


def bare(condition: ir.Value, known: Known) -> tuple[ir.Value, bool]:
    """A condition without the casts of booleans and negations around it, and whether these negate
    it."""
    value, negated = condition, False
    while is_op(node := value.producer(), "Cast", "Identity", "Not"):
        source = operand_at(node, 0)
        if known.dtype(source) != ir.DataType.BOOL:
            break
        negated ^= node.op_type == "Not"
        value = source
    return value, negated


NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
"""The number beside which an operator changes nothing."""


def unchanged_operand(node: ir.Node, known: Known) -> ir.Value | None:
    """The operand that a sum with 0, or a product or quotient with 1, gives as it is, if the result
    is as large; None for other nodes."""
    orders = operand_orders(node, *NEUTRAL)
    for tensor, number in orders if is_op(node, "Add", "Mul") else orders[:1]:
        as_large = known.shape(tensor) == known.shape(node.outputs[0]) is not None
        if as_large and known.scalar(number) == NEUTRAL[node.op_type]:
            return tensor
    return None


def drops_nothing(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Is a node a Dropout that passes its input on? Its training_mode is absent or constant false,
    an is_test is 1, or its ratio is constant 0: ONNX Runtime then copies the input, NaN and
    infinities included, and keeps everything in the mask."""
    if not is_op(node, "Dropout"):
        return False
    ratio = constant(input_of(node, 1), limit=1)
    if ratio is not None and not ratio.any():
        return True
    mode = input_of(node, 2)
    if mode is None:
        return int_attr(node, "is_test", 1) == 1
    flag = constant(mode, limit=1)
    return flag is not None and not flag.any()


def _kept(node: ir.Node, known: Known) -> ir.Value | None:
    """What a Dropout passes on."""
    if not drops_nothing(node):
        return None
    return input_of(node, 0)


mover("Identity", form=Same)
mover("Cast", form=Converted)
mover("Add", "Sub", form=Neutral, source=unchanged_operand)
mover("Dropout", form=Neutral, source=_kept)
