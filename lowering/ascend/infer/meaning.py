"""Types and shapes from an operator's meaning in ONNX: the rule of each ONNX node is applied as
soon as it is made.

This is the only place that knows ONNX's shape rules. A size that GE writes as -1, and an unknown
element of an integer tensor, are unknown numbers of which no two are equal; a size that is not the
same in every run becomes -1 again.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.convert.backward import HANDLERS, OPSET, GeCall
from fa_compiler.lowering.ascend.convert.errors import UnreadableError
from fa_compiler.lowering.ascend.graph import ge_shape
from fa_compiler.lowering.ascend.infer.facts import Fact, OpFacts, Shape
from fa_compiler.op_registry import dtypes
from fa_compiler.op_registry.errors import RegistryError
from fa_compiler.passes.algebra.symbolic import Dim, integer
from fa_compiler.passes.ops import RULES, Context
from fa_compiler.passes.ops import Fact as OnnxFact

_LIKE = {
    "BatchMatMul": "BatchMatMulV2",
    "EuclideanNorm": "ReduceMean",
    "IsFinite": "IsNan",
    "MatMul": "MatMulV2",
    "ReduceLogSum": "ReduceLogSumExp",
    "TensorScatterSub": "TensorScatterAdd",
}
"""Operators without a meaning in ONNX here, and operators with the same inputs and attributes whose
results have the same type and shape. No axes mean no axis to EuclideanNorm, which is TensorFlow's,
and all axes to ReduceLogSum, which is ONNX's."""

_TYPE_OF_FIRST = (
    *(
        "MatMulV2",
        "BatchMatMulV2",
        "MatMul",
        "BatchMatMul",
        "Conv2D",
        "Conv3DV2",
        "AvgPoolV2",
        "MaxPoolV3",
    ),
    *("GatherV2", "Transpose", "PadV3"),
)
"""Operators whose first result has the type of their first input, even if no more is known of
it."""

_STAND_IN = ir.DataType.FLOAT8E4M3FNUZ
"""The type in ONNX of a tensor with a type that only GE has. GE lacks this one."""


def is_known(op_type: str) -> bool:
    """Whether an operator has a meaning in ONNX, or is like one that has."""
    return _LIKE.get(op_type, op_type) in HANDLERS


def infer(facts: OpFacts) -> list[Fact]:
    """The facts of an operator's outputs. The list is empty if nothing is known of them."""
    try:
        call = _Call(facts)
        made = HANDLERS[call.op.type](call)
        call.expect_read()
    except UnreadableError:
        return [facts.first.with_shape(None)] if facts.op.type in _TYPE_OF_FIRST else []
    return [call.fact(name) for name in ([made] if isinstance(made, str) else made)]


@lru_cache(1 << 10)
def _node(domain: str, op_type: str, count: int, attrs: tuple[tuple[str, Any], ...]) -> ir.Node:
    """A node as the rules see it. They take the inputs from elsewhere, so calls share it."""
    made = [
        ir.AttrInt64s(key, ()) if value == () else ir.convenience.convert_attribute(key, value)
        for key, value in attrs
    ]
    return ir.Node(domain, op_type, (), attributes=made, num_outputs=count)


class _Call(GeCall):
    """The call that the functions of `convert/backward` get. It keeps what is known of each tensor.
    The rule of a node is applied when the node is made."""

    def __init__(self, facts: OpFacts) -> None:
        self._facts = facts
        self._known: dict[str, OnnxFact | None] = {"": None}
        inputs = {name: self._add(_to_onnx(fact)) for name, fact in facts.inputs.items()}
        super().__init__(replace(facts.op, type=_LIKE.get(facts.op.type, facts.op.type)), inputs)

    def _add(self, fact: OnnxFact) -> str:
        """A tensor of which this is known."""
        name = str(len(self._known))
        self._known[name] = fact
        return name

    def fact(self, name: str) -> Fact:
        """What is known of a tensor that was made."""
        found = self._known[name] or OnnxFact()
        if found.dtype == _STAND_IN:
            types = (fact.dtype for fact in self._facts.inputs.values())
            dtype = next((dtype for dtype in types if _onnx_type(dtype) == _STAND_IN), "")
        else:
            dtype = "" if found.dtype is None else dtypes.from_onnx(int(found.dtype)) or ""
        shape = None if found.shape is None else ge_shape([dim.const for dim in found.shape])
        value = None
        if found.content is not None and found.content.dtype == object:
            value = np.asarray(_NUMBERS(found.content), dtype=object)
        return Fact(dtype, shape, value)

    def dtype(self, name: str) -> str:
        return self._input(name).dtype

    def shape(self, name: str) -> Shape:
        return self._input(name).shape

    def _input(self, name: str) -> Fact:
        self.x(name)  # raises UnreadableError for an absent input
        return self._facts.inputs[name]

    def constant(self, name: str) -> np.ndarray[Any, Any]:
        numbers = self._facts.ints(name)
        if numbers is None:
            raise UnreadableError(f"its input {name} is not known")
        return np.array(numbers, dtype=object)

    def nodes(
        self, op_type: str, *inputs: str, count: int, domain: str = "", **attrs: Any
    ) -> list[str]:
        facts = [self._known[given] for given in inputs]
        while facts and facts[-1] is None:
            facts.pop()
        hashable = tuple(
            (key, tuple(value) if isinstance(value, list) else value)
            for key, value in attrs.items()
        )
        rule = RULES.get((domain, op_type))
        found = (
            rule(Context(_node(domain, op_type, count, hashable), facts, OPSET, {})) if rule else ()
        )
        made = [found] if isinstance(found, OnnxFact) else list(found)
        return [
            self._add(made[place] if place < len(made) else OnnxFact()) for place in range(count)
        ]

    def array(self, value: Any, dtype: str) -> str:
        array = np.asarray(value)
        content = (
            np.asarray(_DIMS(array), dtype=object)
            if array.dtype.kind == "i" or not array.size
            else None
        )
        return self._add(OnnxFact(tuple(map(integer, array.shape)), _onnx_type(dtype), content))

    def cast(self, name: str, dtype: str) -> str:
        return self.node("Cast", name, to=int(_onnx_type(dtype) or 0))


@cache
def _onnx_type(dtype: str) -> ir.DataType | None:
    if not dtype:
        return None
    try:
        number = dtypes.to_onnx(dtype)
    except RegistryError:
        number = None
    return _STAND_IN if number is None else ir.DataType(number)


def _to_onnx(fact: Fact) -> OnnxFact:
    sizes = [Dim.fresh() if size < 0 else integer(size) for size in fact.shape or ()]
    shape = None if fact.shape is None else tuple(sizes)
    content = None if fact.value is None else np.asarray(_DIMS(fact.value), dtype=object)
    return OnnxFact(shape, _onnx_type(fact.dtype), content)


_DIMS = np.frompyfunc(lambda item: Dim.fresh(None) if item is None else integer(int(item)), 1, 1)
_NUMBERS = np.frompyfunc(lambda dim: dim.const, 1, 1)
