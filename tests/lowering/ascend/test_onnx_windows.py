"""Convolutions, pools and resizes of random sizes: what the route writes computes the same, or is refused."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper, numpy_helper

from fa_compiler.lowering.ascend.onnx_route import UnsupportedModel, lower
from fa_compiler.lowering.ascend.onnx_route.check import check_model
from tests.lowering.ascend.onnx_models import run

AUTO = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "SAME_LOWER", "VALID")
COORDINATES = ("half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel")
ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
SCALES = (0.25, 0.5, 0.6, 1.0, 1.5, 1.7, 2.0, 2.3, 3.0)

Drawn = tuple[str, list[int], dict[str, Any], list[np.ndarray | None]]


def pool(draw: random.Random, op_type: str) -> Drawn:
    """A Conv or a pool: operator, shape of x, attributes, further inputs."""
    shape, kernel, strides = _sizes(draw)
    attrs: dict[str, Any] = {"strides": strides, "auto_pad": draw.choice(AUTO)}
    if op_type != "Conv" or draw.random() < 0.5:
        attrs["kernel_shape"] = kernel
    if attrs["auto_pad"] == "NOTSET":
        attrs["pads"] = [draw.randint(0, size - 1) for size in kernel] * 2
    if op_type in ("Conv", "MaxPool") and not attrs["auto_pad"].startswith("SAME") and draw.random() < 0.4:
        attrs["dilations"] = [draw.randint(1, 2) for _ in kernel]
    if op_type in ("AveragePool", "MaxPool"):
        attrs["ceil_mode"] = draw.randint(0, 1)
    if op_type == "AveragePool":
        attrs["count_include_pad"] = draw.randint(0, 1)
    weights: list[np.ndarray | None] = [np.ones((3, shape[1], *kernel), np.float32)] if op_type == "Conv" else []
    return op_type, shape, attrs, weights


def transposed(draw: random.Random) -> Drawn:
    """A ConvTranspose."""
    shape, kernel, strides = _sizes(draw)
    attrs: dict[str, Any] = {"strides": strides, "auto_pad": draw.choice(AUTO)}
    if draw.random() < 0.5:
        reached = [
            stride * (size - 1) + window for stride, size, window in zip(strides, shape[2:], kernel, strict=True)
        ]
        attrs["output_shape"] = [size + draw.randint(-2, 2) for size in reached]
        attrs["auto_pad"] = draw.choice(("NOTSET", "SAME_UPPER", "SAME_LOWER"))
    return "ConvTranspose", shape, attrs, [np.ones((shape[1], 2, *kernel), np.float32)]


def resized(draw: random.Random) -> Drawn:
    """A Resize to the nearest pixels, by scales or by sizes."""
    shape, _, _ = _sizes(draw)
    attrs = {"coordinate_transformation_mode": draw.choice(COORDINATES), "nearest_mode": draw.choice(ROUNDINGS)}
    if draw.random() < 0.5:
        scales = np.array([1, 1, *(draw.choice(SCALES) for _ in shape[2:])], np.float32)
        return "Resize", shape, attrs, [None, scales]
    sizes = np.array([*shape[:2], *(draw.randint(1, 14) for _ in shape[2:])])
    return "Resize", shape, attrs, [None, None, sizes]


def _sizes(draw: random.Random) -> tuple[list[int], list[int], list[int]]:
    spatial = draw.choice((1, 2, 2, 3))
    shape = [1, 2, *(draw.randint(3, 9) for _ in range(spatial))]
    return shape, [draw.randint(1, 3) for _ in range(spatial)], [draw.randint(1, 3) for _ in range(spatial)]


def model_of(drawn: Drawn, is_open: bool) -> onnx.ModelProto:
    """The model of one node; `is_open`: it says nothing of the sizes of x behind its channels."""
    op_type, shape, attrs, more = drawn
    names = ["" if array is None else f"w{place}" for place, array in enumerate(more)]
    weights = [
        numpy_helper.from_array(array, name) for name, array in zip(names, more, strict=True) if array is not None
    ]
    node = helper.make_node(op_type, ["x", *names], ["y"], name="node", **attrs)
    known = [*shape[:2], *([None] * len(shape[2:]) if is_open else shape[2:])]
    ends = [
        helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, sizes)
        for name, sizes in (("x", known), ("y", None))
    ]
    graph = helper.make_graph([node], "g", ends[:1], ends[1:], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


MAKERS = {
    **{name: (lambda draw, name=name: pool(draw, name)) for name in ("AveragePool", "Conv", "LpPool", "MaxPool")},
    "ConvTranspose": transposed,
    "Resize": resized,
}


@pytest.mark.parametrize("op_type", sorted(MAKERS))
def test_random_sizes(op_type: str) -> None:
    draw = random.Random(op_type)
    written = 0
    for number in range(60):
        drawn = MAKERS[op_type](draw)
        model = onnx.shape_inference.infer_shapes(model_of(drawn, is_open=number % 4 == 0))
        x = np.random.default_rng(number).normal(size=drawn[1]).astype(np.float32)
        try:
            (expected,) = run(model, {"x": x})
        except Exception:  # ONNX Runtime does not take the original, in words of its own
            continue
        lowered = ir.from_proto(model)
        try:
            lower(lowered)
        except UnsupportedModel as error:
            assert "; export" in str(error) or "; fix" in str(error)
            continue
        result = ir.to_proto(lowered)
        assert check_model(result, None) == [], drawn
        (found,) = run(result, {"x": x})
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=str(drawn))
        written += 1
    assert written > 25
