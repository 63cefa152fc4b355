"""Types and shapes of the outputs of a node. Each operator's file has its shape function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa_compiler.op_registry.attributes import full_attrs
from fa_compiler.op_registry.errors import NodeError
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.registry import get, later_attrs, names, operator
from fa_compiler.op_registry.spec import Kind


def infer(
    op_type: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], cann: str | None = None
) -> dict[str, TensorInfo]:
    """What is known of every output of a node, by name.

    `inputs` maps REG_OP names to TensorInfo, or to a list for a dynamic input; absent inputs are
    missing. `attrs` may lack attributes that have a default. `cann` chooses the variant of the
    prototype. A size that is not known stays a symbol or None. Raises NodeError if the attributes
    do not fit the operator, if the layout is unknown, or if query, key or value is missing or has
    another rank than the layout says.
    """
    spec = get(op_type, cann)
    for entry in spec.inputs[:3]:
        if entry.kind is not Kind.OPTIONAL and entry.name not in inputs:
            raise NodeError(f"{op_type} needs the input {entry.name}")
    return operator(op_type).infer(inputs, later_attrs(spec) | full_attrs(spec, attrs))


def can_infer(op_type: str) -> bool:
    """Whether the registry holds the operator and can therefore infer its outputs."""
    return op_type in names()
