"""The operators that this project fuses to: nodes of the domain "ascend", for its own kernels or its reference."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.backward.reading import MEANINGS, Reading
from fa_compiler.op_registry import DOMAIN, names
from fa_compiler.op_registry.spec import Kind


def _fused(r: Reading) -> Sequence[str]:
    """Inputs in REG_OP order, absent ones empty; a dynamic one with its count; every attribute."""
    inputs: list[str] = []
    attrs = {entry.name: r.attr(entry.name) for entry in r.spec.attrs}
    for entry in r.spec.inputs:
        if entry.kind is Kind.DYNAMIC:
            tensors = r.dynamic(entry.name)
            inputs += tensors
            if len(tensors) != 1:
                attrs[f"{entry.name}_count"] = len(tensors)
        else:
            inputs.append(r.maybe(entry.name))
    attrs = {name: int(value) if isinstance(value, bool) else value for name, value in attrs.items()}
    return r.nodes(r.spec.name, *inputs, count=len(r.spec.outputs), domain=DOMAIN, **attrs)


MEANINGS.update(dict.fromkeys(names(), _fused))
