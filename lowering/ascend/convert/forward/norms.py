"""Softmax and the normalisations."""

from __future__ import annotations

from collections.abc import Sequence

from fa_compiler.lowering.ascend.convert.emit import Tensor, Type
from fa_compiler.lowering.ascend.convert.errors import CannotMapError
from fa_compiler.lowering.ascend.convert.forward.onnx_call import MICROSOFT, OnnxCall, handles

_PER_AXIS = 13
"""The opset since which Softmax runs over one axis. Before, it runs over all axes from its axis
on."""


@handles("Softmax", "LogSoftmax")
def _softmax(call: OnnxCall) -> Tensor:
    """Before opset 13 the axes from `axis` on are flattened to one axis."""
    x, out = call.x(), call.out()
    op_type = "SoftmaxV2" if call.node.op_type == "Softmax" else "LogSoftmaxV2"
    flat = call.opset < _PER_AXIS
    axis = call.integer("axis", 1 if flat else -1)
    if x.shape is not None:
        axis = call.front(axis, x.rank)
    if not flat or axis == -1 or (x.shape is not None and axis == x.rank - 1):
        return call.emitter.op(op_type, x, axes=[axis], out=out)
    front = [call.size(x, place) for place in range(axis)]
    if len([size for size in x.shape or () if size == -1]) and 0 in (x.shape or ()):
        raise CannotMapError(
            "an old Softmax of a tensor that may be empty", "export with opset 13 or newer"
        )
    shape = call.shape(x)
    rows = call.reshape(x, [*front, -1])
    return call.emitter.op("Reshape", call.unary(op_type, rows, axes=[len(front)]), shape, out=out)


@handles("LayerNormalization")
def _layer_norm(call: OnnxCall) -> Sequence[Tensor]:
    """GE needs a bias, and both weights in the shape of the normalised axes.

    LayerNorm gives the variance. LayerNormV3 gives the reciprocal of the deviation, as ONNX does,
    but in ONNX's type only for float32.
    """
    x = call.x()
    axis = call.axis(-1)
    gamma = _of_shape(call, call.x(1), x, axis)
    beta = _of_shape(call, call.x(2), x, axis) if call.has(2) else _zeros(call, gamma)
    reads = call.wanted(1) or call.wanted(2)
    if reads and x.dtype != "DT_FLOAT":
        raise CannotMapError(
            "its mean or deviation is read, which GE gives in another type", "use float32"
        )
    made = _normalised(call, "LayerNormV3" if reads else "LayerNorm", x, gamma, beta, axis, 1e-5)
    return made[: len(call.node.outputs)]


def _normalised(
    call: OnnxCall, op_type: str, x: Tensor, gamma: Tensor, beta: Tensor, axis: int, epsilon: float
) -> Sequence[Tensor]:
    """What a LayerNorm gives that runs over the axes from `axis` on. `epsilon` is the default."""
    statistics = _statistics(x, axis)
    return call.emitter.ops(
        op_type,
        x,
        gamma,
        beta,
        begin_norm_axis=axis,
        begin_params_axis=axis,
        epsilon=call.number("epsilon", epsilon),
        outs=[call.out(0), statistics, statistics],
    )


def _statistics(x: Tensor, axis: int) -> Type:
    """The type of a mean or deviation over the axes from `axis` on."""
    return Type("DT_FLOAT", (*x.sizes[:axis], *(1,) * (x.rank - axis)))


def _of_shape(call: OnnxCall, weight: Tensor, x: Tensor, axis: int) -> Tensor:
    """A weight in the shape of the normalised axes; in ONNX it broadcasts to them."""
    wanted = x.sizes[axis:]
    if weight.shape == wanted:
        return weight
    if weight.shape is not None and len(weight.shape) == len(wanted) and 1 not in weight.shape:
        return weight  # a size that is unknown on one side only
    target = call.vector([call.size(x, place) for place in range(axis, x.rank)])
    if weight.shape is not None and len(weight.shape) > len(wanted):
        raise CannotMapError("its scale has more axes than it normalises", "reshape the scale")
    return call.emitter.op("BroadcastTo", weight, target, out=weight.with_shape(wanted))


def _zeros(call: OnnxCall, like: Tensor) -> Tensor:
    return call.emitter.op("Fill", call.shape(like), call.like(0, like), out=like)


@handles("RMSNormalization")
@handles("SimplifiedLayerNormalization")
def _rms_norm(call: OnnxCall) -> Sequence[Tensor]:
    """The normalised axes are those of the scale."""
    x, axis = call.x(), call.axis(-1)
    gamma = _of_shape(call, call.x(1), x, axis)
    if call.wanted(1):
        raise CannotMapError("its deviation is read", "leave out what reads it")
    outs = [call.out(0), _statistics(x, axis)]
    return call.emitter.ops("RmsNorm", x, gamma, epsilon=call.number("epsilon", 1e-5), outs=outs)[
        :1
    ]


@handles("BatchNormalization")
def _batch_norm(call: OnnxCall) -> Sequence[Tensor]:
    """With the statistics of the training, it is an affine function of each channel, which is axis
    1."""
    trains = call.integer("training_mode", 0) or (call.opset < 7 and not call.integer("is_test", 0))
    if trains or any(call.wanted(index) for index in range(1, len(call.node.outputs))):
        raise CannotMapError(
            "it computes statistics of the batch", "export for inference (model.eval())"
        )
    if not call.integer("spatial", 1):
        raise CannotMapError("it has statistics for each position", "export with opset 9 or newer")
    x = call.x()
    scale, bias, mean, variance = (_channels(call, call.x(place), x.rank) for place in range(1, 5))
    floor = call.binary("Add", variance, call.like(call.number("epsilon", 1e-5), variance))
    factor = call.binary("Mul", scale, call.unary("Rsqrt", floor))
    centred = call.binary("Sub", x, call.cast(mean, x.dtype))
    return [
        call.binary(
            "Add", call.binary("Mul", centred, call.cast(factor, x.dtype)), call.cast(bias, x.dtype)
        )
    ]


def _channels(call: OnnxCall, vector: Tensor, rank: int) -> Tensor:
    """A vector of channels as a tensor that broadcasts along axis 1."""
    return call.unsqueeze(vector, list(range(1, rank - 1)))


@handles("InstanceNormalization")
def _instance_norm(call: OnnxCall) -> Tensor:
    """Each channel of each sample is normalised by its own mean and variance."""
    x = call.x()
    axes = call.emitter.ints(range(2, x.rank))
    out = x.with_shape((*x.sizes[:2], *(1,) * (x.rank - 2)))
    centred = call.binary("Sub", x, call.reduced("ReduceMean", x, axes, out, keep=True))
    variance = call.reduced("ReduceMean", call.unary("Square", centred), axes, out, keep=True)
    rate = call.unary(
        "Rsqrt", call.binary("Add", variance, call.like(call.number("epsilon", 1e-5), x))
    )
    scaled = call.binary(
        "Mul", call.binary("Mul", centred, rate), _channels(call, call.x(1), x.rank)
    )
    return call.binary("Add", scaled, _channels(call, call.x(2), x.rank))


@handles("SkipLayerNormalization", domain=MICROSOFT)
def _skip_layer_norm(call: OnnxCall) -> Sequence[Tensor]:
    """The sum of the first two inputs and the bias, normalised over the last axis. Output 3 is the
    sum."""
    if call.wanted(1) or call.wanted(2):
        raise CannotMapError("its mean or deviation is read", "leave out what reads it")
    total = call.binary("Add", call.x(0), call.x(1))
    if call.has(4):
        total = call.binary("Add", total, call.x(4))
    beta = call.x(3) if call.has(3) else _zeros(call, call.x(2))
    made = _normalised(call, "LayerNorm", total, call.x(2), beta, total.rank - 1, 1e-12)
    return [*made, total][: len(call.node.outputs)]
