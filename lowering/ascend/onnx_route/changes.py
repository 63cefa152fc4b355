"""Converts a node to an older opset.

`CHANGES` lists, for every operator of the parser that changed after opset 17, the versions at which
it changed. The entry is a rule that converts the node to the version before. It is None if only
more types were added, or values that the parser's plugin does not take: the node then stays
unchanged, and is checked at the end. An operator that did not change is not in the table.

| what | becomes | because |
| --- | --- | --- |
| Cast, CastLike | without saturate, round_mode | both have an effect for 8-bit floats only |
| Reduce* with axes as input | axes as attribute | only for constant axes; a reduction over no axis is an Identity |
| Reduce* with another noop_with_empty_axes than 0 and 1 | refused | ONNX defines only these |
| ReduceMax, ReduceMin of booleans | of uint8 with 0 and 1 | max is or, min is and |
| Split with num_outputs | sizes as input | equal parts, the last one smaller, as in that version |
| Pad with axes | pads for all axes | only if axes and pads are constant and the rank is known |
| AveragePool, LpPool with dilations; ceil_mode | refused | no dilations before; the last window counts differently |
| Resize | refused with half_pixel_symmetric | new in 19; `forms` handles the attributes of 18 |
| GridSample linear, cubic | bilinear, bicubic | the older names, for images of 4 dimensions |
| Range with stash_type | without | it has an effect for 16 bits only, which no Range has before |
| SpaceToDepth with mode CRD | refused | blocks were ordered as DCR before |
| Mod of floats with fmod 0 | as in `forms` | the remainder has the sign of the divisor, as that of integers |
| IsInf of float16 | of float32 | the cast keeps infinities and makes no new ones |
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite, RewriteRule
from fa_compiler.passes.ir.nodes import axes_of, constant, int_attr

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def drop(*names: str) -> RewriteRule:
    """Leave out attributes that have no effect for the parser's types."""

    def rule(rewrite: Rewrite) -> None:
        rewrite.drop(*names)

    return rule


def refuse(**defaults: int | str | None) -> RewriteRule:
    """Leave out attributes that have their default, and refuse other values. The default None
    refuses any value."""

    def rule(rewrite: Rewrite) -> None:
        for name, default in defaults.items():
            attr = rewrite.node.attributes.pop(name, None)
            if attr is not None and (default is None or attr.value != default):
                rewrite.fail(
                    f"{name} is {attr.value!r}, which opset {rewrite.builder.opset} does not have"
                )

    return rule


def defined_noop(rewrite: Rewrite) -> None:
    """Refuse a noop_with_empty_axes other than 0 and 1: ONNX and ONNX Runtime differ about such
    numbers."""
    noop = int_attr(rewrite.node, "noop_with_empty_axes", 0)
    if noop not in (0, 1):
        rewrite.fail(
            f"noop_with_empty_axes is {noop}; ONNX defines 0 and 1 only, so write one of these"
        )


def axes_as_attribute(rewrite: Rewrite) -> None:
    """A reduction of opset 18."""
    defined_noop(rewrite)
    node = rewrite.node
    noop = int_attr(node, "noop_with_empty_axes", 0) == 1
    node.attributes.pop("noop_with_empty_axes", None)
    axes = axes_of(node) if rewrite.given(1) is not None else []
    if axes is None:
        rewrite.fail("its axes are not constant")
    if axes:
        node.attributes["axes"] = ir.AttrInt64s("axes", axes)
    elif noop:
        if node.op_type not in ("ReduceMax", "ReduceMin", "ReduceMean", "ReduceProd"):
            rewrite.fail("a reduction over no axis")
        return rewrite.replace(rewrite.op("Identity", [rewrite.needed(0)], rewrite.needed(0)))
    node.resize_inputs(1)
    return None


def booleans(rewrite: Rewrite) -> None:
    """ReduceMax or ReduceMin of opset 20."""
    node, data, builder = rewrite.node, rewrite.needed(0), rewrite.builder
    if rewrite.dtype(data) != ir.DataType.BOOL:
        return
    node.replace_input_with(0, builder.cast(data, ir.DataType.UINT8))
    reduced = node.outputs[0]
    builder.info.set(reduced, builder.info.shape(reduced), ir.DataType.UINT8)
    result = builder.op("Cast", [reduced], {"to": int(ir.DataType.BOOL)})
    ir.convenience.replace_all_uses_with(reduced, result, replace_graph_outputs=True)
    maker = result.producer()
    assert maker is not None
    maker.replace_input_with(0, reduced)
    if result.is_graph_output():
        name, reduced.name = reduced.name, result.name
        result.name = name
    reduced.dtype = ir.DataType.UINT8


def split_sizes(rewrite: Rewrite) -> None:
    """Split of opset 18."""
    node, data, builder = rewrite.node, rewrite.needed(0), rewrite.builder
    attr = node.attributes.pop("num_outputs", None)
    if attr is None or rewrite.given(1) is not None:
        return
    count, shape = attr.as_int(), rewrite.shape(data)
    axis = rewrite.axis("axis", 0, len(shape))
    if count != len(node.outputs) or count < 1:
        rewrite.fail(f"num_outputs is {count} for {len(node.outputs)} outputs")
    size = shape[axis].const
    if builder.opset < 18 and shape[axis].exact_div(count) is not None:
        return
    if size is not None:
        part = -(-size // count)
        if part * (count - 1) > size:
            rewrite.fail(f"{size} elements have no {count} parts")
        sizes = builder.ints([*[part] * (count - 1), size - part * (count - 1)])
    else:
        shape_of = builder.shape_of(data)
        axis_size = builder.gather(shape_of, [axis], 0)
        raised = builder.add(axis_size, builder.ints([count - 1]))
        each = builder.div(raised, builder.ints([count]))
        last = builder.sub(axis_size, builder.mul(each, builder.ints([count - 1])))
        sizes = builder.concat([*[each] * (count - 1), last], 0)
    node.resize_inputs(2)
    node.replace_input_with(1, sizes)


def pads_of_all_axes(rewrite: Rewrite) -> None:
    """Pad of opset 18."""
    if rewrite.given(3) is None:
        return
    rank = len(rewrite.shape(rewrite.needed(0)))
    axes, pads = constant(rewrite.needed(3)), constant(rewrite.needed(1))
    if axes is None or pads is None:
        rewrite.fail("its axes and pads are not both constant")
    full = np.zeros((2, rank), np.int64)
    full[:, [int(axis) % rank for axis in axes.reshape(-1)]] = pads.reshape(2, -1)
    rewrite.node.replace_input_with(1, rewrite.builder.ints(full.reshape(-1).tolist()))
    rewrite.node.resize_inputs(3)


def no_wrap(rewrite: Rewrite) -> None:
    """Pad of opset 19."""
    if rewrite.text("mode", "constant") == "wrap":
        rewrite.fail("mode is 'wrap', which came with opset 19")


def pool(rewrite: Rewrite) -> None:
    """AveragePool of opset 19."""
    attr = rewrite.node.attributes.get("dilations")
    if attr is not None and any(step != 1 for step in attr.as_ints()):
        rewrite.fail("dilations came with opset 19")
    rewrite.node.attributes.pop("dilations", None)
    if int_attr(rewrite.node, "ceil_mode", 0):
        rewrite.fail("ceil_mode counts the last window differently before opset 19")


def not_symmetric(rewrite: Rewrite) -> None:
    """Resize of opset 19."""
    if rewrite.text("coordinate_transformation_mode", "half_pixel") == "half_pixel_symmetric":
        rewrite.fail("half_pixel_symmetric came with opset 19")


def grid_modes(rewrite: Rewrite) -> None:
    """GridSample of opset 20."""
    if len(rewrite.shape(rewrite.needed(0))) != 4:
        rewrite.fail("before opset 20 it takes 4 dimensions only")
    mode = {"linear": "bilinear", "cubic": "bicubic"}.get(
        name := rewrite.text("mode", "linear"), name
    )
    rewrite.node.attributes["mode"] = ir.AttrString("mode", mode)


def infinite_halves(rewrite: Rewrite) -> None:
    """IsInf of opset 20."""
    data = rewrite.needed(0)
    if rewrite.dtype(data) in HALVES:
        rewrite.node.replace_input_with(0, rewrite.builder.cast(data, ir.DataType.FLOAT))


_ANY: dict[int, RewriteRule | None] = dict.fromkeys((19, 21, 23, 24, 25))
_LATER: dict[int, RewriteRule | None] = dict.fromkeys((21, 23, 24, 25))
_CASTS: dict[int, RewriteRule | None] = {
    **_ANY,
    19: drop("saturate"),
    24: drop("round_mode"),
    28: None,
}
_REDUCE: dict[int, RewriteRule | None] = {18: axes_as_attribute}
_LOGARITHMS: dict[int, RewriteRule | None] = {18: axes_as_attribute, 28: None}
_EXTREMES: dict[int, RewriteRule | None] = {18: axes_as_attribute, 20: booleans}
_NEW_REDUCTIONS: dict[int, RewriteRule | None] = {18: None}
_TYPES_22: dict[int, RewriteRule | None] = {22: None}
_TYPES_28: dict[int, RewriteRule | None] = {28: None}
_ONLY_TYPES = (
    *("Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "Cos", "Cosh", "Sin", "Sinh", "Tan"),
    *(
        "Conv",
        "ConvTranspose",
        "Det",
        "EyeLike",
        "InstanceNormalization",
        "LpNormalization",
        "RoiAlign",
    ),
    *(
        "Dropout",
        "Elu",
        "HardSigmoid",
        "HardSwish",
        "Mish",
        "Round",
        "Selu",
        "Softplus",
        "Softsign",
        "ThresholdedRelu",
    ),
    *(
        "Bernoulli",
        "Multinomial",
        "RandomNormal",
        "RandomNormalLike",
        "RandomUniform",
        "RandomUniformLike",
    ),
    *(
        "GRU",
        "LSTM",
        "GlobalAveragePool",
        "GlobalLpPool",
        "GlobalMaxPool",
        "MaxPool",
        "MaxRoiPool",
        "MaxUnpool",
    ),
)

CHANGES: Mapping[str, Mapping[int, RewriteRule | None]] = {
    **dict.fromkeys(("Constant", "Identity", "If", "Reshape", "Shape", "Size"), _ANY),
    **dict.fromkeys(("Flatten", "Squeeze", "Transpose", "Unsqueeze"), _LATER),
    **dict.fromkeys(_ONLY_TYPES, _TYPES_22),
    **dict.fromkeys(("BitShift", "Celu", "Compress", "DepthToSpace", "Einsum", "Mod"), _TYPES_28),
    **dict.fromkeys(("OneHot", "ReverseSequence", "Unique"), _TYPES_28),
    **dict.fromkeys(("ReduceL1", "ReduceL2", "ReduceMean"), _REDUCE),
    **dict.fromkeys(("ReduceLogSum", "ReduceLogSumExp"), _LOGARITHMS),
    **dict.fromkeys(("ReduceProd", "ReduceSumSquare"), _REDUCE),
    **dict.fromkeys(("ReduceMax", "ReduceMin"), _EXTREMES),
    **dict.fromkeys(("ScatterElements", "ScatterND"), _NEW_REDUCTIONS),
    "AveragePool": {19: pool, 22: None},
    "Cast": _CASTS,
    "CastLike": {version: rule for version, rule in _CASTS.items() if version != 28},
    "ConstantOfShape": {20: None, **_LATER},
    "Equal": {19: None},
    "GridSample": {20: grid_modes, 22: None},
    "IsInf": {20: infinite_halves},
    "IsNaN": {20: None},
    "LpPool": {18: refuse(ceil_mode=0, dilations=None), 22: None},
    "Pad": {**_ANY, 18: pads_of_all_axes, 19: no_wrap},
    "Range": {27: drop("stash_type")},
    "Resize": {18: None, 19: not_symmetric},
    "SpaceToDepth": {28: refuse(mode="DCR")},
    "Split": {18: split_sizes},
    "SplitToSequence": {24: None},
    "TopK": {24: None},
}


def convert(rewrite: Rewrite, target: int) -> None:
    """Convert the node from its opset to an older one, one version after the other."""
    for version, rule in sorted(CHANGES.get(rewrite.node.op_type, {}).items(), reverse=True):
        if (
            target < version <= rewrite.source
            and rule is not None
            and rewrite.node.graph is not None
        ):
            rule(rewrite)
