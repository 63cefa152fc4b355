"""What ONNX Runtime's training leaves in a graph."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fa_compiler.lowering.ascend.convert.emit import Tensor, Type
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.call import MICROSOFT, Call, handles


@handles("TanhGrad", domain=MICROSOFT)
def _tanh_grad(call: Call) -> Tensor:
    """Inputs are dY and X in some versions and dY and Y in others: without training kernels here, X is not told from
    Y."""
    raise CannotMapError("its second input is the input or the output of Tanh, depending on the version")


@handles("SoftmaxGrad_13", domain=MICROSOFT)
def _softmax_grad(call: Call) -> Tensor:
    """From the gradient and the probabilities."""
    return call.e.op("SoftmaxGrad", call.x(1), call.x(0), axes=[call.axis(-1)], out=call.out())


@handles("GeluGrad", domain=MICROSOFT)
def _gelu_grad(call: Call) -> Tensor:
    return call.e.op("GeluGradV2", call.x(0), call.x(1), approximate="none", out=call.x(1))


@handles("BiasGeluGrad_dX", domain=MICROSOFT)
def _bias_gelu_grad(call: Call) -> Tensor:
    """Inputs are dY, X and the bias that was added to X."""
    x = call.binary("Add", call.x(1), call.x(2))
    return call.e.op("GeluGradV2", call.x(0), x, approximate="none", out=Type(x.dtype, x.shape))


@handles("LayerNormalizationGrad", domain=MICROSOFT)
def _layer_norm_grad(call: Call) -> Sequence[Tensor]:
    """Inputs are dY, X, scale, mean and the reciprocal of the deviation."""
    dy, x, gamma, mean, rate = (call.x(place) for place in range(5))
    axis = call.axis(-1, of=1)
    if axis != x.rank - 1:
        raise CannotMapError("it normalises several axes", "normalise the last axis only")
    outs = [Type(x.dtype, x.shape), Type("DT_FLOAT", gamma.shape), Type("DT_FLOAT", gamma.shape)]
    dx, dgamma, dbeta = call.e.op("LayerNormGradV3", dy, x, rate, mean, gamma, out=outs)
    return [dx, call.cast(dgamma, gamma.dtype), call.cast(dbeta, gamma.dtype)][: len(call.node.outputs)]


@handles("GatherGrad", domain=MICROSOFT)
def _gather_grad(call: Call) -> Tensor:
    """Inputs are the shape of the data, the indices and dY: each row of dY is added where its index says."""
    shape, indices, dy = call.x(0), call.x(1), call.x(2)
    if call.integer("axis", 0) != 0:
        raise CannotMapError("it gathered along another axis than the first")
    rows = call.element(shape, 0)
    count = indices.rank
    width = [call.size(dy, axis) for axis in range(count, dy.rank)]
    flat = call.reshape(dy, [-1, *width])
    ids = call.reshape(indices, [-1])
    below = call.binary("Less", ids, call.like(0, ids), "DT_BOOL")
    ids = call.e.op("SelectV2", below, call.binary("Add", ids, call.cast(rows, ids.dtype)), ids, out=ids)
    number = call.cast(call.squeeze(rows, [0]), "DT_INT32")
    return call.e.op("UnsortedSegmentSum", flat, ids, number, out=Type(dy.dtype, (-1, *(dy.shape or ())[count:])))


@handles("InPlaceAccumulatorV2", domain=MICROSOFT)
def _accumulate(call: Call) -> Sequence[Tensor]:
    """The new gradient, or its sum with the old one unless an input says to overwrite. Output 0 is a flag."""
    overwrite = call.array(2) if call.has(2) else np.zeros(1)
    if overwrite is None:
        flag = call.x(2)
        total = call.binary("Add", call.x(0), call.x(1))
        result = call.e.op("SelectV2", flag, call.x(1), total, out=total)
    elif overwrite.any():
        result = call.x(1)
    else:
        result = call.binary("Add", call.x(0), call.x(1))
    updated = call.e.const([True], "DT_BOOL")
    return [updated, result][: len(call.node.outputs)]


@handles("Scale", domain=MICROSOFT)
def _scale(call: Call) -> Tensor:
    """Divided by the scale, or multiplied with it."""
    scale = call.cast(call.x(1), call.x().dtype)
    scale = call.squeeze(scale, list(range(scale.rank)))
    return call.binary("RealDiv" if call.integer("scale_down", 0) else "Mul", call.x(), scale)
