"""The last check of every fused node against the registry, whatever made it."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler import op_registry
from fa_compiler.errors import InternalError
from fa_compiler.passes.node_view import node_view
from fa_compiler.passes.shapes import analyse


def verify_fused(model: ir.Model, target: str) -> None:
    """Check the nodes of the registry's domain for `target`, "ort" or a product.

    Raises:
        InternalError: a node breaks a constraint; the passes should have declined it.
    """
    info = analyse(model)
    for node in _fused_nodes(model):
        for violation in op_registry.verify(node_view(node, info), target):
            if target == "ort" and violation.extension is not None:
                continue
            broken = f"{violation.constraint} for {target}: {violation.message}"
            raise InternalError(f"the fused node '{node.name}' breaks {broken}")


def _fused_nodes(model: ir.Model) -> list[ir.Node]:
    """Nodes of the domain, in subgraphs and functions too."""
    owners: list[ir.Graph | ir.Function] = [model.graph, *model.functions.values()]
    return [
        node
        for owner in owners
        for node in ir.traversal.RecursiveGraphIterator(owner)
        if node.domain == op_registry.DOMAIN
    ]
