"""The registry's attention operators: nodes of the domain "ascend", which run with the CPU kernels or the
reference."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.ge_call import HANDLERS, GeCall
from fa_compiler.op_registry import DOMAIN, attention_names
from fa_compiler.op_registry.spec import Kind


def _fused(call: GeCall) -> Sequence[str]:
    """The inputs in REG_OP order, "" for an absent one, with the count of each dynamic input, and every attribute."""
    inputs: list[str] = []
    attrs = {entry.name: call.attr(entry.name) for entry in call.spec.attrs}
    for entry in call.spec.inputs:
        if entry.kind is Kind.DYNAMIC:
            tensors = call.dynamic(entry.name)
            inputs += tensors
            if len(tensors) != 1:
                attrs[f"{entry.name}_count"] = len(tensors)
        else:
            inputs.append(call.maybe(entry.name))
    attrs = {name: int(value) if isinstance(value, bool) else value for name, value in attrs.items()}
    return call.nodes(call.spec.name, *inputs, count=len(call.spec.outputs), domain=DOMAIN, **attrs)


HANDLERS.update(dict.fromkeys(attention_names(), _fused))
