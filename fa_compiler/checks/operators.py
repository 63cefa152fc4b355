"""The last check: every node of a registry operator in the result has to satisfy the registry's
constraints."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from fa_compiler import op_registry
from fa_compiler.errors import InputError, InternalError
from fa_compiler.passes.ir.nodes import all_nodes
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.passes.values.shapes import ShapeInfo, analyse
from fa_compiler.protos import subgraphs


def registry_nodes(model: ir.Model) -> list[ir.Node]:
    """The nodes whose domain and operator are the registry's, including those in subgraphs and
    functions."""
    owners: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    if not any(op_registry.DOMAIN in owner.opset_imports for owner in owners):
        return []
    known = set(op_registry.names())
    return [
        node
        for owner in owners
        for node in all_nodes(owner)
        if node.domain == op_registry.DOMAIN and node.op_type in known
    ]


def needs_library(proto: onnx.ModelProto) -> bool:
    """Does a model hold operators whose kernels are in the library, such as those that an earlier
    run made?"""
    return any(node.domain in op_registry.DOMAINS for node in subgraphs.all_nodes(proto.graph.node))


def without_kernel(proto: onnx.ModelProto) -> list[str]:
    """The registry's operators in a model that have neither a CPU kernel nor a body in it, in
    alphabetical order."""
    found = {
        node.op_type
        for node in subgraphs.all_nodes(proto.graph.node)
        if node.domain == op_registry.DOMAIN
    }
    found -= {
        function.name for function in proto.functions if function.domain == op_registry.DOMAIN
    }
    return sorted(
        name for name in found & {*op_registry.names()} if not op_registry.has_kernel(name)
    )


def verify_nodes(
    model: ir.Model, given: list[ir.Node], target: str, cann: str | None
) -> ShapeInfo | None:
    """Check the nodes of registry operators.

    Args:
        model: the result of the passes.
        given: the registry nodes that the input model already had. They are not checked for "ort".
        target: "ort" or a product.
        cann: a CANN version; None is the newest.

    Raises:
        InputError: a node of the input model breaks a constraint of the product.
        InternalError: a node of the passes breaks a constraint; they should have declined the
            attention.

    Returns:
        What is known of the model, if nodes were checked.
    """
    nodes = registry_nodes(model)
    old = {id(node) for node in given}
    if target == "ort":
        nodes = [node for node in nodes if id(node) not in old]
    if not nodes:
        return None
    info = analyse(model)
    platform = f"{target} with CANN {cann}" if cann and target != "ort" else target
    for node in nodes:
        broken = _broken(node, info, target, cann, platform)
        if broken is None:
            continue
        if id(node) in old:
            raise InputError(
                f"the model is fused already, and not for {platform}: node '{node.name}' {broken}; start from the "
                "original model"
            )
        raise InternalError(f"the fused node '{node.name}' {broken}")
    return info


def _broken(
    node: ir.Node, info: ShapeInfo, target: str, cann: str | None, platform: str
) -> str | None:
    """What stands behind the name of a node in a sentence about the first constraint that it
    breaks."""
    try:
        violations = op_registry.verify(node_view(node, info), target, cann)
    except op_registry.UnknownVariant as error:
        return f"is refused by {platform}: {error}"
    for violation in violations:
        if target != "ort" or violation.extension is None:
            return violation.refusal(platform)
    return None
