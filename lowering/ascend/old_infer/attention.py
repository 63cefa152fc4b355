"""The registry's operators, with the inference function of the registry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fa_compiler.lowering.ascend.graph import UNKNOWN, Opaque, Weight
from fa_compiler.lowering.ascend.old_infer.rules import Fact, InferenceError, OpFacts, rule
from fa_compiler.op_registry import NodeError, TensorInfo, can_infer, get, infer, names
from fa_compiler.op_registry.node import Dim
from fa_compiler.op_registry.spec import Kind


@rule(*(name for name in names() if can_infer(name)))
def _attention(call: OpFacts) -> Sequence[Fact]:
    spec = get(call.op.type)
    inputs: dict[str, Any] = {}
    for entry in spec.inputs:
        if entry.kind is Kind.DYNAMIC:
            tensors = [_info(fact) for fact in call.dynamic(entry.name)]
            if tensors:
                inputs[entry.name] = tensors
        elif entry.name in call.inputs:
            inputs[entry.name] = _info(call.inputs[entry.name])
    attrs = {
        name: attr.value
        for name, attr in call.op.attrs.items()
        if name in spec.attr_names and not isinstance(attr.value, Weight | Opaque)
    }
    try:
        found = infer(call.op.type, inputs, attrs)
    except NodeError as error:
        raise InferenceError(str(error)) from None
    return [_fact(found.get(entry.name)) for entry in spec.outputs]


def _info(fact: Fact) -> TensorInfo:
    dims: tuple[Dim, ...] | None = None
    if fact.shape is not None:
        dims = tuple(None if size == UNKNOWN else size for size in fact.shape)
    return TensorInfo(fact.dtype, dims)


def _fact(info: TensorInfo | None) -> Fact:
    if info is None or info.shape is None:
        return Fact("" if info is None else info.dtype)
    return Fact(info.dtype, tuple(size if isinstance(size, int) else UNKNOWN for size in info.shape))
