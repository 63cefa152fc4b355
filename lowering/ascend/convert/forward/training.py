"""Operators of the training graphs of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa_compiler.lowering.ascend.convert.emit import Tensor, Type
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import MICROSOFT, OnnxCall, handles
from fa_compiler.passes.ir.nodes import is_op


@handles("TanhGrad", domain=MICROSOFT)
def _tanh_grad(call: OnnxCall) -> Tensor:
    """The second input is the output of Tanh in some versions of ONNX Runtime, and its input in
    others. The graph shows which one it is."""
    value = call.node.inputs[1]
    assert value is not None
    producer = value.producer()
    y = call.x(1)
    if not is_op(producer, "Tanh"):
        if not any(is_op(use.node, "Tanh") for use in value.uses()):
            raise CannotMapError(
                "its second input is neither the input nor the output of a Tanh of this graph"
            )
        y = call.unary("Tanh", y)
    return call.emitter.op("TanhGrad", y, call.x(0), out=y)


@handles("SoftmaxGrad_13", domain=MICROSOFT)
def _softmax_grad(call: OnnxCall) -> Tensor:
    """The inputs are the gradient and the probabilities."""
    return call.emitter.op(
        "SoftmaxGrad", call.x(1), call.x(0), axes=[call.axis(-1)], out=call.out()
    )


@handles("GeluGrad", domain=MICROSOFT)
def _gelu_grad(call: OnnxCall) -> Tensor:
    return call.emitter.op("GeluGradV2", call.x(0), call.x(1), approximate="none", out=call.x(1))


@handles("BiasGeluGrad_dX", domain=MICROSOFT)
def _bias_gelu_grad(call: OnnxCall) -> Tensor:
    """The inputs are dY, X and the bias that is added to X."""
    x = call.binary("Add", call.x(1), call.x(2))
    return call.emitter.op("GeluGradV2", call.x(0), x, approximate="none", out=x)


@handles("LayerNormalizationGrad", domain=MICROSOFT)
def _layer_norm_grad(call: OnnxCall) -> Sequence[Tensor]:
    """The inputs are dY, X, scale, mean and the reciprocal of the deviation."""
    dy, x, gamma, mean, rate = (call.x(place) for place in range(5))
    axis = call.axis(-1, of=1)
    if axis != x.rank - 1:
        raise CannotMapError("it normalises several axes", "normalise the last axis only")
    outs = [x, Type("DT_FLOAT", gamma.shape), Type("DT_FLOAT", gamma.shape)]
    dx, dgamma, dbeta = call.emitter.ops("LayerNormGradV3", dy, x, rate, mean, gamma, outs=outs)
    return [dx, call.cast(dgamma, gamma.dtype), call.cast(dbeta, gamma.dtype)][
        : len(call.node.outputs)
    ]


@handles("GatherGrad", domain=MICROSOFT)
def _gather_grad(call: OnnxCall) -> Tensor:
    """The inputs are the shape of the data, the indices and dY. Each slice of dY is added at its
    index.

    For this, the axes of the indices are moved to the front of dY, and the rows of the result are
    moved back.
    """
    shape, indices, dy = call.x(0), call.x(1), call.x(2)
    many = indices.rank
    rank = dy.rank - many + 1
    axis = call.front(call.integer("axis", 0), rank)
    others = [place for place in range(dy.rank) if not axis <= place < axis + many]
    turned = call.transpose(dy, [*range(axis, axis + many), *others])
    flat = call.reshape(turned, [-1, *(call.size(turned, place) for place in range(many, dy.rank))])
    rows = call.element(shape, axis)
    ids = call.reshape(indices, [-1])
    below = call.binary("Less", ids, call.like(0, ids), "DT_BOOL")
    ids = call.emitter.op(
        "SelectV2", below, call.binary("Add", ids, call.cast(rows, ids.dtype)), ids, out=ids
    )
    number = call.cast(call.squeeze(rows, [0]), "DT_INT32")
    out = Type(dy.dtype, (-1, *(flat.shape or ())[1:]))
    return call.transpose(
        call.emitter.op("UnsortedSegmentSum", flat, ids, number, out=out),
        [*range(1, axis + 1), 0, *range(axis + 1, rank)],
    )


@handles("SoftmaxCrossEntropyLossGrad", domain=MICROSOFT)
def _cross_entropy_grad(call: OnnxCall) -> Tensor:
    """The inputs are dY, the logarithms of the probabilities p [N, C, ...] and the labels [N, ...].

    The result is (p - onehot(label)) dY. If the loss is a mean, it is divided by the number of
    labels. It is 0 for ignored labels.
    """
    if call.has(3) or call.has(4):
        raise CannotMapError("it has weights of classes, or adds to another gradient")
    dy, logarithms, labels = call.x(0), call.x(1), call.x(2)
    dtype, classes = logarithms.dtype, call.size(logarithms, 1)
    labels = labels if labels.dtype in ("DT_INT32", "DT_INT64") else call.cast(labels, "DT_INT64")
    depth = (
        call.emitter.ints(classes, "DT_INT32")
        if isinstance(classes, int)
        else call.cast(classes, "DT_INT32")
    )
    if not isinstance(classes, int):
        depth = call.squeeze(depth, [0])
    one, zero = call.like(1, logarithms), call.like(0, logarithms)
    hot = call.emitter.op(
        "OneHot", labels, depth, one, zero, axis=1, out=Type(dtype, logarithms.shape)
    )
    gap = call.binary("Sub", call.unary("Exp", logarithms), hot)
    ignored = call.node.attributes.get("ignore_index")
    counted = Type("DT_BOOL", labels.shape)
    if ignored is None:
        valid = call.emitter.op("Equal", labels, labels, out=counted)
    else:
        valid = call.emitter.op(
            "NotEqual", labels, call.like(ignored.as_int(), labels), out=counted
        )
    weight = call.cast(valid, dtype)
    reduction = call.text("reduction", "mean")
    if reduction == "none":
        return call.binary("Mul", gap, call.unsqueeze(call.binary("Mul", weight, dy), [1]))
    dy = call.squeeze(dy, list(range(dy.rank)))
    if reduction == "mean":
        axes = call.emitter.ints(range(labels.rank))
        total = call.reduced("ReduceSum", weight, axes, Type(dtype, ()))
        dy = call.binary("RealDiv", dy, call.binary("Maximum", total, one))
    return call.binary("Mul", call.binary("Mul", gap, call.unsqueeze(weight, [1])), dy)


@handles("InPlaceAccumulatorV2", domain=MICROSOFT)
def _accumulate(call: OnnxCall) -> Sequence[Tensor]:
    """The sum of the old and the new gradient, or the new one if an input says to overwrite. Output
    0 is a flag.

    The operator also adds into its first input, in place. A GE graph does not give this back, so
    the sum has to be an output of the node that something reads.
    """
    if len(call.node.outputs) < 2 or not (
        call.node.outputs[1].uses() or call.node.outputs[1].is_graph_output()
    ):
        raise CannotMapError(
            "it adds a gradient into its first input, in place, and a GE graph does not give this back",
            "make its second output, updated_buffer, an output of the model",
        )
    overwrite = call.array(2) if call.has(2) else np.zeros(1)
    if overwrite is None:
        flag = call.x(2)
        total = call.binary("Add", call.x(0), call.x(1))
        result = call.emitter.op("SelectV2", flag, call.x(1), total, out=total)
    elif overwrite.any():
        result = call.x(1)
    else:
        result = call.binary("Add", call.x(0), call.x(1))
    updated = call.emitter.const([True], "DT_BOOL")
    return [updated, result][: len(call.node.outputs)]


@handles("Scale", domain=MICROSOFT)
def _scale(call: OnnxCall) -> Tensor:
    """The input divided by the scale or multiplied by it."""
    scale = call.cast(call.x(1), call.x().dtype)
    scale = call.squeeze(scale, list(range(scale.rank)))
    return call.binary("RealDiv" if call.integer("scale_down", 0) else "Mul", call.x(), scale)
