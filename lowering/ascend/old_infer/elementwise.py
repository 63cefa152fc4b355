"""Elementwise operators: the result has the shape of the input, or the shape to which the inputs broadcast.

Small integer tensors are computed, because they become shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fa_compiler.lowering.ascend.dtypes import attr_name
from fa_compiler.lowering.ascend.old_infer.rules import NOTHING, Fact, InferenceError, OpFacts, Values, broadcast, rule

_INTEGERS = ("DT_INT32", "DT_INT64")
_MAX_ELEMENTS = 1024
"""The most elements of an integer tensor whose values are computed."""


@rule(
    *("Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Ceil", "Cos", "Cosh", "Elu", "Erf", "Exp", "FastGelu"),
    *("Floor", "Gelu", "GeluV2", "HardSigmoid", "HardSwish", "Invert", "LeakyRelu", "Log", "LogicalNot"),
    *("Mish", "Neg", "PRelu", "QuickGelu", "Reciprocal", "Relu", "Round", "Rsqrt", "Selu", "Sigmoid", "Sign", "Sin"),
    *("Sinh", "Softplus", "Softsign", "Sqrt", "Square", "Swish", "Tan", "Tanh", "Tril", "Triu", "Cumsum"),
)
def _same(call: OpFacts) -> Sequence[Fact]:
    x = call.inputs.get("x") or call.inputs.get("features") or call.inputs.get("input_x") or _first(call)
    return [x.with_shape(x.shape, _computed(lambda a: -a, x) if call.op.type == "Neg" else None)]


def _first(call: OpFacts) -> Fact:
    return next(iter(call.inputs.values()), NOTHING)


@rule("Identity")
def _identity(call: OpFacts) -> Sequence[Fact]:
    return [_first(call)]


@rule("IsNan", "IsInf", "IsFinite")
def _tests(call: OpFacts) -> Sequence[Fact]:
    return [Fact("DT_BOOL", _first(call).shape)]


@rule("Cast")
def _cast(call: OpFacts) -> Sequence[Fact]:
    x, dtype = call.x(), attr_name(call.attr("dst_type"))
    if dtype is None:
        raise InferenceError(f"dst_type {call.attr('dst_type')} is not a type of GE")
    return [Fact(dtype, x.shape, x.value if dtype in _INTEGERS else None)]


_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "Add": lambda a, b: a + b,
    "Sub": lambda a, b: a - b,
    "Mul": lambda a, b: a * b,
    "Minimum": min,
    "Maximum": max,
    "TruncateDiv": lambda a, b: abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1),
}


@rule(
    *("Add", "Sub", "Mul", "RealDiv", "TruncateDiv", "FloorDiv", "FloorMod", "Mod", "Minimum", "Maximum"),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LogicalAnd", "LogicalOr"),
)
def _binary(call: OpFacts) -> Sequence[Fact]:
    left, right = call.x("x1"), call.x("x2")
    if left.dtype and right.dtype and left.dtype != right.dtype:
        raise InferenceError(f"x1 is {left.dtype} and x2 {right.dtype}; GE does not convert between them")
    compute = _ARITHMETIC.get(call.op.type)
    value = _computed(compute, left, right) if compute else None
    return [Fact(left.dtype or right.dtype, broadcast(left.shape, right.shape), value)]


@rule("Pow")
def _pow(call: OpFacts) -> Sequence[Fact]:
    return [Fact(call.x("x1").dtype, broadcast(call.x("x1").shape, call.x("x2").shape))]


@rule("Equal", "NotEqual", "Greater", "GreaterEqual", "Less", "LessEqual")
def _compare(call: OpFacts) -> Sequence[Fact]:
    left, right = call.x("x1"), call.x("x2")
    if left.dtype and right.dtype and left.dtype != right.dtype:
        raise InferenceError(f"x1 is {left.dtype} and x2 {right.dtype}; GE does not convert between them")
    value = _computed(lambda a, b: int(a == b), left, right) if call.op.type == "Equal" else None
    return [Fact("DT_BOOL", broadcast(left.shape, right.shape), value)]


@rule("SelectV2")
def _select(call: OpFacts) -> Sequence[Fact]:
    condition, then, other = call.x("condition"), call.x("then"), call.x("else")
    if condition.dtype not in ("", "DT_BOOL"):
        raise InferenceError(f"its condition is {condition.dtype}, not DT_BOOL")
    if then.dtype and other.dtype and then.dtype != other.dtype:
        raise InferenceError(f"then is {then.dtype} and else {other.dtype}")
    value = _computed(lambda c, a, b: a if c else b, condition, then, other)
    return [Fact(then.dtype, broadcast(condition.shape, then.shape, other.shape), value)]


@rule("AddN")
def _add_n(call: OpFacts) -> Sequence[Fact]:
    facts = call.dynamic("x")
    return [Fact(facts[0].dtype if facts else "", broadcast(*(fact.shape for fact in facts)))]


@rule("SoftmaxGrad", "TanhGrad", "SigmoidGrad", "GeluGradV2", "GeluGrad")
def _gradient(call: OpFacts) -> Sequence[Fact]:
    facts = list(call.inputs.values())
    return [Fact(facts[0].dtype, broadcast(*(fact.shape for fact in facts)))]


def _computed(function: Callable[..., int], *facts: Fact) -> Values | None:
    """A function of small integer tensors, None if one is not known. An unknown element gives an unknown element."""
    values = [fact.value for fact in facts if fact.value is not None and fact.value.size <= _MAX_ELEMENTS]
    if len(values) < len(facts):
        return None

    def apply(*items: int | None) -> int | None:
        if any(item is None for item in items):
            return None
        try:
            return function(*items)
        except ZeroDivisionError:
            return None

    try:
        made = np.frompyfunc(apply, len(values), 1)(*values)
    except ValueError:  # they do not broadcast; the rule reports that
        return None
    return np.asarray(made, dtype=object)
