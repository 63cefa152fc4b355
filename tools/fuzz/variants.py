"""Models of one operator for ATC's ONNX front end: a right call at a random opset, with at most a few things changed.

`BASES` has a call of each operator of the table: its inputs as arrays, those of them that are constants, and its
attributes. A variant changes or leaves out an attribute, leaves out an input, adds an output, or changes the type of
the first input. Its place changes, too: behind another node, twice, in a branch of an If, or with constants for all
inputs. A variant need not be valid: the judge asks ONNX's checker.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from onnx import defs, helper, numpy_helper

Array = np.ndarray[Any, np.dtype[Any]]

OPSETS = range(8, 19)


@dataclass(frozen=True)
class Call:
    """One node. An input of None is absent; those at the places of `fixed` are constants. The first `outputs` outputs
    are read, and the last `unread` of them are named and not read."""

    op_type: str
    inputs: Sequence[Array | None]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    fixed: frozenset[int] = frozenset()
    outputs: int = 1
    unread: int = 0


@dataclass(frozen=True)
class Variant:
    """A model, its inputs, and the operator that it is about."""

    model: onnx.ModelProto
    feeds: Mapping[str, Array]
    op_type: str
    text: str


Maker = Callable[[int, random.Random], Call]


# -- right calls ------------------------------------------------------------------------------------


def _floats(*shape: int) -> Array:
    """Few different numbers of both signs, so that equal ones and zeros occur."""
    count = int(np.prod(shape))
    return ((np.arange(count) * 7 % 11 - 5) / 2).astype(np.float32).reshape(shape)


def _ints(*numbers: int) -> Array:
    return np.array(numbers, np.int64)


X = _floats(2, 3, 4)
PLACES = np.array([[[0, 1, 1, 0]], [[1, 0, 0, 1]]])


def call(op_type: str, *inputs: Array | None, fixed: Sequence[int] = (), outputs: int = 1, **attrs: Any) -> Maker:
    """The maker of one and the same call."""
    return lambda version, rng: Call(op_type, inputs, attrs, frozenset(fixed), outputs)


def reduction(op_type: str, since: int) -> Maker:
    """A reduction, whose axes are an input from opset `since` on."""

    def make(version: int, rng: random.Random) -> Call:
        x = np.abs(X) + 1 if "Log" in op_type else X
        axes = rng.choice(([1], [0, 2], [-1], None))
        if axes is None:
            return Call(op_type, [x])
        if version >= since:
            return Call(op_type, [x, _ints(*axes)], {}, frozenset((1,)))
        return Call(op_type, [x], {"axes": axes})

    return make


def window(op_type: str) -> Maker:
    """A pool or a convolution over one to three axes, which often leaves out what has a default."""

    def make(version: int, rng: random.Random) -> Call:
        axes = rng.choice((1, 2, 3))
        kernel = [rng.choice((2, 3)) for _ in range(axes)]
        attrs: dict[str, Any] = {"kernel_shape": kernel}
        optional = {"strides": [rng.choice((1, 2)) for _ in range(axes)], "pads": [0, *[1] * (2 * axes - 1)]}
        attrs |= {name: value for name, value in optional.items() if rng.random() < 0.5}
        x = _floats(1, 2, *(5, 6, 7)[:axes])
        if "Conv" not in op_type:
            return Call(op_type, [x], attrs)
        if op_type == "ConvTranspose" and rng.random() < 0.3:
            steps = attrs.get("strides", [1] * axes)
            sizes = zip(steps, x.shape[2:], kernel, strict=True)
            attrs["output_shape"] = [step * (size - 1) + width for step, size, width in sizes]
            attrs.pop("pads", None)
        if rng.random() < 0.3:
            del attrs["kernel_shape"]
        return Call(op_type, [x, _floats(2, 2, *kernel)], attrs, frozenset((1,)))

    return make


def global_pool(op_type: str) -> Maker:
    return lambda version, rng: Call(op_type, [_floats(2, 3, *(4, 3, 2)[: rng.choice((1, 2, 3))])])


def over_axis(op_type: str) -> Maker:
    """Softmax and its like, whose axis has another meaning before opset 13."""

    def make(version: int, rng: random.Random) -> Call:
        axis = rng.choice((None, 0, 1, 2, 2, -1) if version >= 11 else (None, 0, 1, 2, 2))
        return Call(op_type, [X], {} if axis is None else {"axis": axis})

    return make


def _slice(version: int, rng: random.Random) -> Call:
    if version < 10:
        return Call("Slice", [X], {"starts": [1], "ends": [3], "axes": [2]})
    return Call("Slice", [X, _ints(1), _ints(3), _ints(2)], {}, frozenset((1, 2, 3)))


def _pad(version: int, rng: random.Random) -> Call:
    mode, pads = rng.choice(("constant", "edge", "reflect")), [0, 1, 0, 0, 0, 1]
    if version < 11:
        return Call("Pad", [X], {"mode": mode, "pads": pads, "value": 2.0})
    return Call("Pad", [X, _ints(*pads), np.float32(2)], {"mode": mode}, frozenset((1, 2)))


def _clip(version: int, rng: random.Random) -> Call:
    if version < 11:
        return Call("Clip", [X], {"min": -1.0, "max": 1.5})
    return Call("Clip", [X, rng.choice((np.float32(-1), None)), np.float32(1.5)], {}, frozenset((1, 2)))


def _split(version: int, rng: random.Random) -> Call:
    if version >= 18 and rng.random() < 0.6:
        return Call("Split", [X], {"axis": 2, "num_outputs": rng.choice((2, 3))}, outputs=2)
    if version >= 13:
        return Call("Split", [X, _ints(1, 3)], {"axis": 2}, frozenset((1,)), outputs=2)
    return Call("Split", [X], {"axis": 2, "split": [1, 3]}, outputs=2)


def _random_like(op_type: str) -> Maker:
    return lambda version, rng: Call(op_type, [X.astype(rng.choice((np.float32, np.float16, np.float64)))])


def _sequence(version: int, rng: random.Random) -> Call:
    sizes = rng.choice(([], [], [np.int64(1)], [_ints(1, 3)]))
    return Call("SplitToSequence", [X, *sizes], {"axis": 2, "keepdims": rng.choice((0, 1))}, frozenset((1,)))


def _squeezing(op_type: str, x: Array) -> Maker:
    def make(version: int, rng: random.Random) -> Call:
        if version < 13:
            return Call(op_type, [x], {"axes": [1]})
        return Call(op_type, [x, _ints(1)], {}, frozenset((1,)))

    return make


def _top_k(version: int, rng: random.Random) -> Call:
    if version < 10:
        return Call("TopK", [X], {"k": 2}, outputs=2)
    return Call("TopK", [X, _ints(2)], {}, frozenset((1,)), outputs=2)


def _dropout(version: int, rng: random.Random) -> Call:
    if version < 12 or rng.random() < 0.5:
        return Call("Dropout", [X])
    return Call("Dropout", [X, np.float32(0.5)], {}, frozenset((1,)))


def _resize(version: int, rng: random.Random) -> Call:
    scales = np.array([1, 1, rng.choice((2, 1.5)), 2], np.float32)
    if version == 10:
        return Call("Resize", [_floats(1, 2, 3, 4), scales], {}, frozenset((1,)))
    attrs = {"mode": rng.choice(("nearest", "linear"))}
    if attrs["mode"] == "nearest":
        attrs |= {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    inputs = [_floats(1, 2, 3, 4), None if version >= 13 else np.zeros(0, np.float32), scales]
    return Call("Resize", inputs, attrs, frozenset((1, 2)))


def _scatter_nd(version: int, rng: random.Random) -> Call:
    attrs = {} if version < 16 else {"reduction": rng.choice(("none", "add", "mul", "max", "min"))}
    return Call("ScatterND", [X, np.array([[1, 2], [1, 2], [0, -1]]), _floats(3, 4)], attrs)


def _scatter_elements(version: int, rng: random.Random) -> Call:
    attrs: dict[str, Any] = {"axis": 1}
    attrs |= {} if version < 16 else {"reduction": rng.choice(("none", "add", "mul", "max", "min"))}
    return Call("ScatterElements", [X, PLACES, _floats(2, 1, 4)], attrs)


def _normal(version: int, rng: random.Random) -> Call:
    wide = rng.choice((np.float32, np.float16, np.float64))
    inputs = [X.astype(wide), np.ones(4, wide), np.ones(4, wide)]
    return Call("LayerNormalization", inputs[: rng.choice((2, 3))], {}, frozenset((1, 2)))


def _batch_norm(version: int, rng: random.Random) -> Call:
    row = np.array([1, 2, 0.5], np.float32)
    outputs = 5 if 9 <= version < 14 and rng.random() < 0.3 else 1
    return Call("BatchNormalization", [X, row, row, row, row], {}, frozenset((1, 2, 3, 4)), outputs)


def _recurrent(op_type: str, gates: int) -> Maker:
    def make(version: int, rng: random.Random) -> Call:
        weights = [_floats(1, gates * 3, 4) / 4, _floats(1, gates * 3, 3) / 4]
        return Call(op_type, [_floats(5, 2, 4), *weights], {"hidden_size": 3}, frozenset((1, 2)))

    return make


def _loss(version: int, rng: random.Random) -> Call:
    return Call("SoftmaxCrossEntropyLoss", [_floats(3, 5), _ints(0, 4, 2)], {"ignore_index": rng.choice((0, 2, -1))})


def _divided(version: int, rng: random.Random) -> Call:
    whole = rng.random() < 0.5
    left, right = (_ints(-7, 7, 5, -1), _ints(2, -2, 3, 4)) if whole else (X, X + 9)
    return Call("Div", [left, right])


def _constant(version: int, rng: random.Random) -> Call:
    values: dict[str, Any] = {"value": numpy_helper.from_array(_floats(4))}
    if version >= 12:
        values |= {"value_float": 1.5, "value_floats": [1.0, 2.0, 0.5, 1.0], "value_int": 3, "value_ints": [1, 2, 3, 4]}
    name = rng.choice(sorted(values))
    return Call("Constant", [], {name: values[name]})


IMAGE, BOXES = _floats(1, 2, 6, 6), np.array([[0, 0, 3, 3], [1, 1, 5, 5]], np.float32)

BASES: Mapping[str, Maker] = {
    **{name: call(name, X) for name in ("Celu", "Elu", "HardSigmoid", "LeakyRelu", "Selu", "ThresholdedRelu")},
    "Shrink": call("Shrink", X),
    **{name: _random_like(name) for name in ("RandomNormalLike", "RandomUniformLike")},
    **{name: call(name, X, axis=1) for name in ("ArgMax", "ArgMin", "Flatten", "LpNormalization")},
    **{name: over_axis(name) for name in ("Hardmax", "LogSoftmax", "Softmax")},
    **{name: window(name) for name in ("AveragePool", "Conv", "ConvTranspose", "LpPool", "MaxPool")},
    **{name: global_pool(name) for name in ("GlobalAveragePool", "GlobalLpPool", "GlobalMaxPool")},
    **{
        name: reduction(name, 13 if name == "ReduceSum" else 18)
        for name in (
            *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
            *("ReduceProd", "ReduceSum", "ReduceSumSquare"),
        )
    },
    **{name: call(name, shape=[2, 3]) for name in ("RandomNormal", "RandomUniform")},
    "BatchNormalization": _batch_norm,
    "Bernoulli": call("Bernoulli", np.full((2, 4), 0.5, np.float32)),
    "BitShift": call("BitShift", np.array([1, 6, 9], np.uint8), np.array([1, 2, 1], np.uint8), direction="LEFT"),
    "Cast": call("Cast", X, to=onnx.TensorProto.INT32),
    "Clip": _clip,
    "Col2Im": call("Col2Im", _floats(1, 5, 5), _ints(5, 5), _ints(1, 5), fixed=(1, 2)),
    "Compress": call("Compress", X, np.array([True, False, True]), fixed=(1,), axis=1),
    "Concat": call("Concat", X, X, axis=1),
    "Constant": _constant,
    "ConstantOfShape": call(
        "ConstantOfShape", _ints(2, 3), value=numpy_helper.from_array(np.array([2], np.float16), "value")
    ),
    "CumSum": call("CumSum", X, _ints(1)[0], fixed=(1,)),
    "DepthToSpace": call("DepthToSpace", _floats(1, 8, 2, 2), blocksize=2),
    "Div": _divided,
    "Dropout": _dropout,
    "Einsum": call("Einsum", _floats(2, 3), _floats(3, 4), equation="ij,jk->ik"),
    "EyeLike": call("EyeLike", _floats(3, 4)),
    "GRU": _recurrent("GRU", 3),
    "Gather": call("Gather", X, _ints(0, 2), axis=1),
    "GatherElements": call("GatherElements", X, PLACES, axis=1),
    "GatherND": call("GatherND", X, np.array([[1], [0]])),
    "Gemm": call("Gemm", _floats(3, 3), _floats(3, 3), _floats(3)),
    "GridSample": call("GridSample", IMAGE, np.clip(_floats(1, 3, 3, 2), -1, 1)),
    "InstanceNormalization": call("InstanceNormalization", X, _floats(3), _floats(3), fixed=(1, 2)),
    "IsInf": call("IsInf", np.array([1, np.inf, -np.inf, np.nan], np.float32)),
    "LRN": call("LRN", IMAGE, size=3),
    "LSTM": _recurrent("LSTM", 4),
    "LayerNormalization": _normal,
    "MaxUnpool": call(
        "MaxUnpool", _floats(1, 1, 2, 2), _ints(5, 7, 13, 15).reshape(1, 1, 2, 2), kernel_shape=[2, 2], strides=[2, 2]
    ),
    "Mean": call("Mean", X, X),
    "MeanVarianceNormalization": call("MeanVarianceNormalization", IMAGE),
    "Mod": call("Mod", _ints(-7, 7, 5, -1), _ints(2, -2, 3, 4)),
    "Multinomial": call("Multinomial", _floats(2, 4)),
    "NonMaxSuppression": call(
        "NonMaxSuppression", BOXES[None], np.array([[[0.9, 0.8]]], np.float32), _ints(2), np.array([0.5], np.float32)
    ),
    "OneHot": call("OneHot", _ints(0, 2, 1), _ints(4), np.array([0, 1], np.float32), fixed=(1, 2)),
    "Pad": _pad,
    "Reshape": call("Reshape", X, _ints(0, -1), fixed=(1,)),
    "Resize": _resize,
    "ReverseSequence": call("ReverseSequence", _floats(3, 2), _ints(2, 3), batch_axis=1, time_axis=0),
    "RoiAlign": call("RoiAlign", IMAGE, BOXES, _ints(0, 0), output_height=2, output_width=2),
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": call("Shape", X),
    "Size": call("Size", X),
    "Slice": _slice,
    "SoftmaxCrossEntropyLoss": _loss,
    "SpaceToDepth": call("SpaceToDepth", _floats(1, 2, 4, 4), blocksize=2),
    "Split": _split,
    "SplitToSequence": _sequence,
    "Squeeze": _squeezing("Squeeze", _floats(2, 1, 3)),
    "Sum": call("Sum", X, X),
    "TopK": _top_k,
    "Transpose": call("Transpose", X, perm=[2, 0, 1]),
    "Trilu": call("Trilu", _floats(4, 4)),
    "Unique": call("Unique", _ints(2, 1, 1, 3)),
    "Unsqueeze": _squeezing("Unsqueeze", X),
    "Upsample": call("Upsample", IMAGE, np.array([1, 1, 2, 3], np.float32), fixed=(1,)),
}
"""A maker of right calls for each operator. It may draw, and it knows the opset."""

JOINED = "SplitToSequence"
"""Its result is a sequence, which another node makes a tensor."""


# -- what changes -----------------------------------------------------------------------------------

WORDS: Mapping[str, Sequence[str]] = {
    "auto_pad": ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"),
    "coordinate_transformation_mode": ("half_pixel", "align_corners", "asymmetric", "output_half_pixel"),
    "direction": ("forward", "reverse", "LEFT", "RIGHT"),
    "keep_aspect_ratio_policy": ("stretch", "not_larger"),
    "mode": ("nearest", "linear", "cubic", "DCR", "CRD", "avg", "max", "bilinear", "constant", "edge", "reflect"),
    "nearest_mode": ("round_prefer_floor", "floor", "ceil"),
    "padding_mode": ("zeros", "border", "reflection"),
    "reduction": ("none", "add", "mul", "max", "min", "mean", "sum"),
}
"""Words for attributes that hold one, of all operators."""

NUMBERS: Mapping[str, Sequence[Any]] = {
    "dtype": (1, 6, 7, 10, 11),
    "to": (1, 6, 7, 9, 10),
    "sample_size": (1, 2, 5),
    # ONNX Runtime ends the process at other numbers of these three.
    "high": (1.5, 2.0),
    "low": (0.0, 0.5),
    "scale": (0.5, 1.0, 2.0),
    "seed": (0.0, 1.0, 2.5),
    "fmod": (0, 1),
    "keepdims": (0, 1),
    "num_outputs": (2, 3),
}
"""Numbers for attributes that hold one of a few; others get the numbers of `_drawn`."""

TYPES = (np.float16, np.float64, np.int32, np.int64, np.float32)


def _drawn(rng: random.Random, attribute: defs.OpSchema.Attribute, axes: int) -> Any:
    """A value for an attribute; None where there is none to draw."""
    kinds = defs.OpSchema.AttrType
    if attribute.type == kinds.STRING:
        return rng.choice(WORDS[attribute.name]) if attribute.name in WORDS else None
    if attribute.name in NUMBERS:
        return rng.choice(NUMBERS[attribute.name])
    if attribute.type == kinds.INT:
        return rng.choice((-1, 0, 1, 2))
    if attribute.type == kinds.FLOAT:
        return rng.choice((0.0, 0.5, 1.0, -0.25))
    if attribute.type == kinds.INTS:
        count = {"pads": 2 * axes, "output_shape": axes}.get(attribute.name, rng.choice((axes, axes, 1)))
        return [rng.choice((0, 1, 1, 2, 2)) for _ in range(count)]
    return None


def _changed(one: Call, version: int, rng: random.Random) -> Call:
    """One thing of the call, changed."""
    schema = defs.get_schema(one.op_type, version)
    axes = max((np.ndim(array) for array in one.inputs[:1] if array is not None), default=3) - 2
    kind = rng.choice(("attribute", "attribute", "attribute", "left out", "input", "output", "type"))
    if kind == "attribute" and schema.attributes:
        name = rng.choice(sorted(schema.attributes))
        value = _drawn(rng, schema.attributes[name], max(axes, 1))
        if value is None:
            return one
        # ONNX has pads or auto_pad, not both.
        kept = {key: each for key, each in one.attrs.items() if {key, name} != {"pads", "auto_pad"}}
        return replace(one, attrs={**kept, name: value})
    if kind == "left out" and one.attrs:
        name = rng.choice(sorted(one.attrs))
        return replace(one, attrs={key: value for key, value in one.attrs.items() if key != name})
    if kind == "input" and len(one.inputs) > 1:
        place = rng.randrange(1, len(one.inputs))
        cut = rng.random() < 0.5
        kept = one.inputs[:place] if cut else [None if at == place else each for at, each in enumerate(one.inputs)]
        return replace(one, inputs=kept)
    if kind == "output" and len(schema.outputs) > one.outputs:
        unread = rng.choice((0, 1))
        return replace(one, outputs=one.outputs + 1, unread=unread)
    if kind == "type" and one.inputs and one.inputs[0] is not None:
        was, now = one.inputs[0].dtype, rng.choice(TYPES)
        with np.errstate(invalid="ignore"):
            inputs = [None if each is None else each.astype(now) if each.dtype == was else each for each in one.inputs]
        return replace(one, inputs=inputs)
    return one


# -- the model --------------------------------------------------------------------------------------


def operator_of(seed: int) -> str:
    """The operator that a seed draws."""
    return random.Random(seed).choice(sorted(BASES))


def drawn(seed: int) -> Variant | None:
    """The model of a seed; None where the operator does not have the drawn opset, or a variant is no model at all."""
    rng = random.Random(seed)
    op_type = rng.choice(sorted(BASES))
    version = rng.choice(OPSETS)
    try:
        schema = defs.get_schema(op_type, version)
    except defs.SchemaError:
        return None
    if schema.deprecated:
        return None
    one = BASES[op_type](version, rng)
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        one = _changed(one, version, rng)
    return _placed(one, version, rng)


def _placed(one: Call, version: int, rng: random.Random) -> Variant | None:
    """A model in which the call has its place; None where nobody knows the types of its outputs."""
    place = rng.choice(("plain", "plain", "behind", "behind", "twice", "branch", "constant", "constant branch"))
    if not one.inputs and "constant" in place:
        place = "plain"
    nodes: list[onnx.NodeProto] = []
    weights: list[onnx.TensorProto] = []
    feeds: dict[str, Array] = {}
    names = []
    for index, array in enumerate(one.inputs):
        name = f"x{index}"
        if array is None:
            name = ""
        elif index in one.fixed or "constant" in place:
            weights.append(numpy_helper.from_array(array, name))
        else:
            feeds[name] = array
            if place == "behind":
                nodes.append(helper.make_node("Identity", [name], [f"{name}_behind"], name=f"identity{index}"))
                name = f"{name}_behind"
        names.append(name)
    feeds["other"] = np.array([1, -2], np.float32)
    node = helper.make_node(one.op_type, names, [f"y{index}" for index in range(one.outputs)], name="node", **one.attrs)
    if one.op_type == JOINED:
        place = "plain" if place not in ("behind", "constant") else place
        nodes.append(node)
        stacks = one.attrs.get("keepdims", 1) == 0 and len(one.inputs) < 2
        node = helper.make_node(
            "ConcatFromSequence", node.output, ["joined"], name="joining", axis=0, new_axis=int(stacks)
        )
    read = list(node.output[: one.outputs - one.unread])
    last = helper.make_node("Neg", ["other"], ["last"], name="negative")
    if place == "twice" and one.attrs:
        nodes.append(node)
        node = _again(node, rng)
        read += node.output[: one.outputs - one.unread]
    plain = _model(
        [*nodes, node, last], feeds, [onnx.ValueInfoProto(name=name) for name in (*read, "last")], weights, version
    )
    try:
        ends = list(onnx.shape_inference.infer_shapes(plain).graph.output)
    except onnx.shape_inference.InferenceError:
        return None
    for end in ends:  # ONNX's inference gives the statistics no types
        if one.op_type == "BatchNormalization" and not end.type.HasField("tensor_type"):
            end.CopyFrom(helper.make_tensor_value_info(end.name, ends[0].type.tensor_type.elem_type, [3]))
    if not all(end.type.HasField("tensor_type") for end in ends):
        return None
    if "branch" in place:
        inside = weights if "constant" in place else []
        node = _chosen(node, ends[:-1], inside)
        weights = [] if "constant" in place else weights
        feeds["chosen"] = np.array(True)
        ends = [_renamed(end, f"{end.name}_chosen") for end in ends[:-1]] + ends[-1:]
    model = _model([*nodes, node, last], feeds, ends, weights, version)
    shapes = [None if array is None else (array.dtype.name, array.shape) for array in one.inputs]
    attrs = {name: value for name, value in one.attrs.items() if not isinstance(value, onnx.TensorProto)}
    text = f"{one.op_type} of opset {version}, {place}: {shapes}, {attrs}, {one.outputs} outputs, {one.unread} unread"
    return Variant(onnx.shape_inference.infer_shapes(model), feeds, one.op_type, text)


def _model(
    nodes: Sequence[onnx.NodeProto],
    feeds: Mapping[str, Array],
    ends: Sequence[onnx.ValueInfoProto],
    weights: Sequence[onnx.TensorProto],
    version: int,
) -> onnx.ModelProto:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in feeds.items()
    ]
    graph = helper.make_graph(nodes, "variant", inputs, ends, weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=8)


def _again(node: onnx.NodeProto, rng: random.Random) -> onnx.NodeProto:
    """The node once more, without one of its attributes: a plugin may keep something of the first one."""
    second = onnx.NodeProto.FromString(node.SerializeToString())
    second.name = f"second_{node.name}"
    for place, name in enumerate(second.output):
        second.output[place] = f"second_{name}"
    del second.attribute[rng.randrange(len(second.attribute))]
    return second


def _renamed(value: onnx.ValueInfoProto, name: str) -> onnx.ValueInfoProto:
    copy = onnx.ValueInfoProto.FromString(value.SerializeToString())
    copy.name = name
    return copy


def _chosen(
    node: onnx.NodeProto, ends: Sequence[onnx.ValueInfoProto], weights: Sequence[onnx.TensorProto]
) -> onnx.NodeProto:
    """An If whose first branch is the node, and whose second one is the same under other names."""
    branches = {}
    for branch in ("then_branch", "else_branch"):
        own = onnx.NodeProto.FromString(node.SerializeToString())
        own.name = f"{branch}_node"
        held = {tensor.name: onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in weights}
        for name, tensor in held.items():
            tensor.name = f"{branch}_{name}"
        for place, name in enumerate(own.input):
            own.input[place] = f"{branch}_{name}" if name in held else name
        for place, name in enumerate(own.output):
            own.output[place] = f"{branch}_{name}"
        # What one branch reads from outside is an input of both.
        outer = [helper.make_node("Neg", ["other"], ["inner"], name="inner_negative")] if "else" in branch else []
        inner_ends = [_renamed(end, f"{branch}_{end.name}") for end in ends]
        branches[branch] = helper.make_graph([own, *outer], branch, [], inner_ends, list(held.values()))
    return helper.make_node("If", ["chosen"], [f"{end.name}_chosen" for end in ends], name="choice", **branches)
