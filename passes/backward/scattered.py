"""Gradients of gathered keys and values, after the Scatter that adds them up where these were
gathered from.

    accepted    ScatterElements(zeros, list, g, reduction=add)    of GatherElements(source, list),
                both along one axis
                ScatterND(zeros, list, g, reduction=add)          of GatherND(source, list), without
                batch_dims
                g the last target after the gradient (gradient_targets.py), arranged as what was
                gathered; zeros as large as the source, and the very list that gathered; after it
                sums over any axes but tokens and head size
    emitted     the gradient with the targets from the Scatter on
    refused     another list, even an equal one; a sum with something else in front of the Scatter

Sound because adding each number where its key was read is the gradient of reading it, an entry that
is listed twice adding twice; and because the operator's gradient is that sum, over all rows.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Axes
from fa_compiler.passes.backward.gradient_targets import GradientTarget, targets_after
from fa_compiler.passes.backward.match import Gradient
from fa_compiler.passes.backward.tracing import Tracer
from fa_compiler.passes.ir.nodes import int_attr, is_op, only_reader, text_attr
from fa_compiler.passes.layout.plan import COPY_COST
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.sparse.gathers import GatheredOperand

SCATTERS = {"GatherElements": "ScatterElements", "GatherND": "ScatterND"}


def scattered(
    gradient: Gradient, view: View, read: GatheredOperand, depth: Axes, tracer: Tracer
) -> Gradient | None:
    """The gradient of what a view was gathered from, None where it is not added up so. `depth` is
    the head size."""
    space, gather, last = tracer.viewer.space, read.node, gradient.targets[-1]
    scatter = only_reader(last.value)
    if gather is None or view.base is not gather.outputs[0] or scatter is None:
        return None
    if space.resolve_all(last.dims) != space.resolve_all(view.base_dims) or not _returns(
        scatter, gather, last, tracer
    ):
        return None
    zeros = scatter.inputs[0]
    if zeros is None or tracer.viewer.facts.sets.of(zeros) != frozenset([0.0]):
        return None
    dims = space.resolve_all(read.source.dims)
    kept = {*space.resolve(read.tokens), *space.resolve(depth)}
    summable = set(chain.from_iterable(dims)) - kept
    start = GradientTarget(scatter.outputs[0], dims, last.factor, last.saved + COPY_COST)
    return replace(gradient, targets=targets_after(start, summable, tracer))


def _returns(scatter: ir.Node, gather: ir.Node, target: GradientTarget, tracer: Tracer) -> bool:
    """Does `scatter` add the gradient at exactly the entries that `gather` read?"""
    info = tracer.viewer.info
    if (
        not is_op(scatter, SCATTERS.get(gather.op_type, ""))
        or int_attr(gather, "batch_dims", 0) != 0
    ):
        return False
    zeros, indices, updates = scatter.inputs
    source = gather.inputs[0]
    if zeros is None or source is None or text_attr(scatter, "reduction", "none") != "add":
        return False
    shape = info.shape(source)
    if (
        shape is None
        or info.shape(zeros) != shape
        or indices is not gather.inputs[1]
        or updates is not target.value
    ):
        return False
    return int_attr(scatter, "axis", 0) % len(shape) == int_attr(gather, "axis", 0) % len(shape)
