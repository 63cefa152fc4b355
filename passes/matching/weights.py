"""Weights among the values of a graph, rearranged or not: they tell a layer from the products of an
attention."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import is_weight
from fa_compiler.passes.layout.views import Viewer


def base_of(value: ir.Value, viewer: Viewer) -> ir.Value:
    """What a value is a view of; the value itself where its rank is unknown."""
    view = viewer.view(value)
    return value if view is None else view.base


def holds_weights(value: ir.Value, viewer: Viewer) -> bool:
    """Does a value hold weights?"""
    return is_weight(base_of(value, viewer))


def is_matrix(value: ir.Value, viewer: Viewer) -> bool:
    """Is a value a matrix of weights?"""
    base = base_of(value, viewer)
    return is_weight(base) and len(viewer.info.sizes(base)) == 2
