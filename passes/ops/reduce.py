"""Reductions along axes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial, reduce

import onnx_ir as ir

from fa_compiler.passes.algebra.cases import Number
from fa_compiler.passes.algebra.formula import Index
from fa_compiler.passes.algebra.symbolic import Dim, product
from fa_compiler.passes.ir.nodes import axes_of, elsewhere, input_of, int_attr, operand_at, opset
from fa_compiler.passes.ops.context import (
    Content,
    Context,
    Fact,
    Known,
    Shape,
    axes_in,
    axis_in,
    content_fact,
    dim_array,
    fresh,
    rank_of,
    rule,
    shape_of_groups,
    shape_rule,
)
from fa_compiler.passes.ops.elementwise import does_not_overflow
from fa_compiler.passes.ops.linear import NCHWC, PRODUCTS
from fa_compiler.passes.ops.moves import Reader, element

SUMMING = (*PRODUCTS, "ReduceSum", "CumSum")
"""Operators that add up elements of a tensor, or products of the elements of two. CumSum gives
every sum on the way."""

TOTALS, EXTREMES = ("ReduceSum", "ReduceMean"), ("ReduceMax", "ReduceMin")
"""Reductions of tensors in parts: the results of the parts are added up, or reduced once more."""
REDUCTIONS = (
    *(*TOTALS, *EXTREMES, "ReduceProd", "ReduceL1", "ReduceL2"),
    *("ReduceLogSum", "ReduceLogSumExp", "ReduceSumSquare"),
)
"""Operators that make one number of all elements along some axes."""
ARGUMENTS = ("ArgMax", "ArgMin")
"""Those that give the place of a number along an axis."""
SOFTMAXES = ("Softmax", "LogSoftmax", "Hardmax")
"""Before opset 13 they run along all dimensions from their axis on."""
LAYER_NORMS = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization")
"""Norms along all dimensions from their axis on, with weights along these."""
ALONG_AXES = (*SOFTMAXES, *LAYER_NORMS, "LpNormalization", "CumSum", "TopK")
"""Operators that make each element of several ones along an axis, and keep the axis."""


def axes_combined(node: ir.Node, rank: int, opset: int, known: Known) -> range | None:
    """The dimensions along which an operator of ALONG_AXES combines the elements of its first
    operand; None where they are unknown."""
    flattens = node.op_type in SOFTMAXES and opset < 13
    axis = int_attr(node, "axis", 1 if flattens else -1)
    if node.op_type == "CumSum":
        given = known.integer(input_of(node, 1))
        if given is None or given.const is None:
            return None
        axis = given.const
    first = axis_in(axis, rank)
    if first is None:
        return None
    return range(first, rank if flattens or node.op_type in LAYER_NORMS else first + 1)


def keeps_last_axis(node: ir.Node, known: Known) -> bool:
    """Does a reduction run along the last axis alone, which stays with size 1?"""
    shape = known.shape(operand_at(node, 0))
    return (
        shape is not None
        and int_attr(node, "keepdims", 1) == 1
        and axes_of(node) in ([-1], [len(shape) - 1])
    )


def axes_as_input(op_type: str) -> int:
    """The first opset in which a reduction has its axes as an input."""
    return 13 if op_type == "ReduceSum" else 18


@rule(*REDUCTIONS)
def _reduce(ctx: Context) -> Fact:
    shape, dtype = ctx.shape(0), ctx.dtype(0)
    keep = ctx.int_attr("keepdims", 1) == 1
    present, axes = ctx.axes("axes", 1, axes_as_input(ctx.node.op_type))
    if shape is None:
        return Fact(() if not present and not keep else None, dtype)
    if present and axes is None:
        return Fact(fresh(len(shape)) if keep else None, dtype)
    if not axes and ctx.int_attr("noop_with_empty_axes", 0) == 1:
        # ReduceSumSquare and the like still change each element, so only the shape is known.
        return Fact(shape, dtype)
    gone = axes_in(axes or range(len(shape)), len(shape))
    if gone is None:
        return Fact(None, dtype)
    result = _without(shape, gone, keep)
    total = _total_of_all(ctx)
    if total is None or len(gone) < len(shape):
        return Fact(result, dtype)
    return content_fact(total.reshape([1] * len(result)), dtype)


def _without(shape: Shape, gone: Collection[int], keep: bool) -> Shape:
    """A shape whose dimensions `gone` are 1, or left out if they are not to be kept."""
    if keep:
        return tuple(Dim(1) if index in gone else dim for index, dim in enumerate(shape))
    return tuple(elsewhere(shape, gone))


_TOTALS: Mapping[str, Callable[[list[Dim]], Dim]] = {
    "ReduceProd": product,
    "ReduceSum": partial(reduce, Dim.__add__),
    "ReduceMax": partial(reduce, Dim.max),
    "ReduceMin": partial(reduce, Dim.min),
}
"""What the reductions of integers make of all elements."""


def _total_of_all(ctx: Context) -> Content | None:
    """The reduction of all elements of a small tensor of integers; None where it is unknown."""
    content, total = ctx.content(0), _TOTALS.get(ctx.node.op_type)
    if content is None or content.dtype != object or not content.size or total is None:
        return None
    folded = dim_array(total(list(content.reshape(-1))))
    return folded if does_not_overflow(folded, ctx.dtype(0)) else None


@rule(*ARGUMENTS)
def _arg(ctx: Context) -> Fact:
    shape = ctx.shape(0)
    axis = ctx.axis_attr(rank_of(shape))
    if shape is None or axis is None:
        return Fact(None, ir.DataType.INT64)
    return Fact(_without(shape, [axis], ctx.int_attr("keepdims", 1) != 0), ir.DataType.INT64)


@shape_rule("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
@shape_rule("GlobalAveragePool", "GlobalMaxPool", domain=NCHWC)
def _global_pool(ctx: Context, shape: Shape) -> Shape:
    return (*shape[:2], *[Dim(1)] * (len(shape) - 2))


@rule("LayerNormalization", "RMSNormalization")
def _layer_norm(ctx: Context) -> list[Fact]:
    shape = ctx.shape(0)
    statistics = shape_of_groups(shape, ctx.int_attr("axis", -1))
    stash = Fact(statistics, ctx.dtype_attr("stash_type") or ir.DataType.FLOAT)
    # the weight's type, which may differ before opset 17
    return [Fact(shape, ctx.dtype(1)), stash, stash]


@rule("BatchNormalization")
def _batch_norm(ctx: Context) -> list[Fact]:
    return [Fact(ctx.shape(0), ctx.dtype(0))]


@element("CumSum")
def _running_sum(reader: Reader, node: ir.Node, index: Index) -> Number | None:
    """The running sum of one number everywhere: that number times the count of elements that were
    summed. What is known of the element at `index` is not enough: the elements in front of it may
    be other ones."""
    summed = reader.number_everywhere(input_of(node, 0))
    axes = axes_combined(node, len(index), opset(node), reader.info)
    if summed is None or axes is None or int_attr(node, "reverse", 0):
        return None
    return (index[axes.start] + int(not int_attr(node, "exclusive", 0))).times(summed)
