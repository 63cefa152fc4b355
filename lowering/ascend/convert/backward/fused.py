"""Operators that talk to other ranks (op_registry/hcom.py). They are nodes of the domain "ascend".
Their order, which control edges give in GE, is the order of the nodes."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.ge_call import HANDLERS, GeCall, onnx_type
from fa_compiler.op_registry import DOMAIN, hcom
from fa_compiler.op_registry.spec import Kind


def registered(call: GeCall) -> Sequence[str]:
    """The inputs in REG_OP order, "" for an absent one, with the count of each dynamic input, and
    every attribute."""
    inputs: list[str] = []
    attrs = {entry.name: call.attr(entry.name) for entry in call.spec.attrs}
    attrs |= {
        entry.name: onnx_type(attrs[entry.name])
        for entry in call.spec.attrs
        if entry.type == "Type"
    }
    for entry in call.spec.inputs:
        if entry.kind is Kind.DYNAMIC:
            tensors = call.dynamic(entry.name)
            inputs += tensors
            if len(tensors) != 1:
                attrs[f"{entry.name}_count"] = len(tensors)
        else:
            inputs.append(call.maybe(entry.name))
    attrs = {
        name: int(value) if isinstance(value, bool) else value for name, value in attrs.items()
    }
    return call.nodes(call.spec.name, *inputs, count=len(call.spec.outputs), domain=DOMAIN, **attrs)


HANDLERS.update(dict.fromkeys(hcom.OPERATORS, registered))
