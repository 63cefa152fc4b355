"""Nodes of the registry's operators: how they are made, and the form in which the registry checks
them: tensors by REG_OP name, with their shapes and known contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from fa_compiler.op_registry import (
    DOMAIN,
    NodeView,
    OpSpec,
    TensorInfo,
    bind_inputs,
    bind_outputs,
    dtypes,
    full_attrs,
    get,
    place_inputs,
    variants,
)
from fa_compiler.op_registry.errors import UnknownVariant
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import attribute_values, constant, without_absent, without_none
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.shapes import ShapeInfo

CONTENT_LIMIT = 1 << 23


def prototype(op_type: str, options: Options, node: ir.Node) -> OpSpec:
    """The prototype of an operator for the CANN that the user named. Raises Decline where none is
    known."""
    try:
        return get(op_type, options.cann)
    except UnknownVariant as error:
        first = next((each.cann for each in variants(op_type) if each.cann), None)
        hint = "" if first is None else f"--cann {first} or newer, if your CANN is"
        raise Decline(Code.ILLEGAL, str(error), node, hint) from None


def registry_node(
    spec: OpSpec,
    inputs: Mapping[str, ir.Value | None],
    attrs: Mapping[str, int | float | str],
    builder: Builder,
) -> ir.Node:
    """A node of an operator with its attributes in full; not yet in the graph, and without names
    for its outputs."""
    node = ir.Node(
        DOMAIN,
        spec.name,
        place_inputs(spec, without_absent(inputs)),
        [
            ir.convenience.convert_attribute(name, value)
            for name, value in full_attrs(spec, attrs).items()
        ],
        num_outputs=len(spec.outputs),
        name=builder.fused_name(spec.name),
    )
    return builder.lone(node)


def node_view(node: ir.Node, info: ShapeInfo) -> NodeView:
    """The view of a node of the registry's domain. Raises UnknownOp for an operator the registry
    does not have."""
    spec = get(node.op_type)
    attrs = attribute_values(node)
    outputs = [output if output.name else None for output in node.outputs]
    return NodeView(
        op_type=node.op_type,
        name=label(node),
        inputs=_infos(bind_inputs(spec, list(node.inputs), attrs), info),
        outputs=_infos(bind_outputs(spec, outputs, attrs), info),
        attrs=attrs,
    )


def _infos(bound: dict[str, Any], info: ShapeInfo) -> dict[str, Any]:
    """What is known of the tensors behind these names, several behind that of a list."""
    known: dict[str, Any] = {}
    for name, value in bound.items():
        if isinstance(value, Sequence):
            known[name] = [_info(part, info) for part in without_none(value)]
        elif value is not None:
            known[name] = _info(value, info)
    return known


def _info(value: ir.Value, info: ShapeInfo) -> TensorInfo:
    """What the registry checks of a tensor."""
    dtype = info.dtype(value) or ir.DataType.UNDEFINED
    return TensorInfo(
        dtypes.from_onnx(int(dtype)) or "",
        _sizes(info.shape(value)),
        constant(value, CONTENT_LIMIT),
    )


def _sizes(shape: Shape | None) -> tuple[int | str, ...] | None:
    """The sizes as the registry has them: numbers, and the formulas of those that are open."""
    if shape is None:
        return None
    return tuple(str(size) if size.const is None else size.const for size in shape)
