"""Forms of Resize and Upsample.

| operator | becomes | where |
| --- | --- | --- |
| Resize of some axes | Resize of all axes | scales or sizes are constant |
| Resize to the nearest pixel | Gather along each axis | GE's operator takes other pixels; all sizes are known |
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.plugin_reads import RIGHT_PIXELS, TIES
from fa_compiler.lowering.ascend.onnx_route.rewrite import INT64, Rewrite
from fa_compiler.passes.ir.nodes import constant, int_attr


def resize(rewrite: Rewrite) -> None:
    """Resize of opset 11 and newer, Upsample of 9 and Resize of 10."""
    node = rewrite.node
    mode = rewrite.text("mode", "nearest")
    if rewrite.builder.opset > 10:
        _resized_axes(rewrite)
        if len(node.inputs) < 3:
            rewrite.fail("it has neither scales nor sizes")
    if mode != "nearest":
        return None
    if rewrite.builder.opset > 10:
        coordinates = rewrite.text("coordinate_transformation_mode", "half_pixel")
        rounding = rewrite.text("nearest_mode", "round_prefer_floor")
    else:
        coordinates, rounding = "asymmetric", "downwards" if node.op_type == "Upsample" else "simple"
    sizes = [size.const for size in rewrite.shape(rewrite.needed(0))]
    scales, wanted = _scales(rewrite)
    pixels = None
    if None not in sizes and (scales is not None or wanted is not None) and coordinates != "tf_crop_and_resize":
        known = [size or 0 for size in sizes]
        pixels = _nearest(rewrite, known, scales, wanted, coordinates, rounding)
    if pixels is None:
        return _trust(rewrite, scales, coordinates, rounding)
    changed = {axis: places for axis, places in enumerate(pixels) if places != list(range(sizes[axis] or 0))}
    if len(sizes) == 4 and changed.keys() <= {2, 3} and _by_operator(node, sizes, pixels, coordinates):
        return None
    result = rewrite.needed(0)
    for axis, places in changed.items():
        result = rewrite.op("Gather", [result, rewrite.builder.ints(places)], result, {"axis": axis})
    return rewrite.replace(result if changed else rewrite.op("Identity", [result], result))


def _scales(rewrite: Rewrite) -> tuple[np.ndarray | None, list[int] | None]:
    """The scales and the sizes; None if they are absent or not constant."""
    place = 2 if rewrite.builder.opset > 10 else 1
    scales, sizes = (constant(rewrite.given(index)) for index in (place, 3))
    scales = scales if scales is not None and scales.size else None
    return scales, None if sizes is None or not sizes.size else [int(size) for size in sizes.reshape(-1)]


def _nearest(
    rewrite: Rewrite,
    sizes: Sequence[int],
    scales: np.ndarray | None,
    wanted: Sequence[int] | None,
    coordinates: str,
    rounding: str,
) -> list[list[int]] | None:
    """The index of the nearest pixel for every output index of each axis; None for an unknown rule."""
    policy = rewrite.text("keep_aspect_ratio_policy", "stretch")
    pixels = []
    ratios = [] if wanted is None else [there / here for here, there in zip(sizes, wanted, strict=True) if here]
    for axis, size in enumerate(sizes):
        if wanted is None:
            assert scales is not None
            scale = np.float32(scales.reshape(-1)[axis])
            length = int(np.floor(np.float32(size) * scale))
        elif policy == "stretch":
            length = wanted[axis]
            scale = np.float32(length / size) if size else np.float32(1)
        else:
            return None
        places = _pixels(size, length, scale, coordinates, rounding)
        if places is None:
            return None
        pixels.append(places)
    return pixels if ratios or scales is not None else None


def _pixels(size: int, length: int, scale: np.float32, coordinates: str, rounding: str) -> list[int] | None:
    """The indices by ONNX's definition, in float32 as in ONNX Runtime."""
    if length == size and scale == 1:
        return list(range(size))
    places = np.arange(length, dtype=np.float32)
    half = np.float32(0.5)
    if coordinates == "asymmetric":
        exact = places / scale
    elif coordinates == "half_pixel" or (coordinates == "pytorch_half_pixel" and length > 1):
        exact = (places + half) / scale - half
    elif coordinates == "align_corners" and length > 1:
        exact = places * np.float32(size - 1) / np.float32(length - 1)
    elif coordinates in ("pytorch_half_pixel", "align_corners"):
        exact = np.zeros_like(places)
    elif coordinates == "tf_half_pixel_for_nn":
        exact = (places + half) / scale
    else:
        return None
    rounded: np.ndarray
    if rounding in ("floor", "downwards") or (rounding == "simple" and scale >= 1):
        rounded = np.floor(exact)
    elif rounding in ("ceil", "simple"):
        rounded = np.ceil(exact)
    elif rounding == "round_prefer_ceil":
        rounded = np.floor(exact + half)
    elif rounding == "round_prefer_floor":
        rounded = np.ceil(exact - half)
    else:
        return None
    return [int(place) for place in np.clip(rounded, 0, max(size - 1, 0))]


def _by_operator(node: ir.Node, sizes: Sequence[int | None], pixels: Sequence[Sequence[int]], coordinates: str) -> bool:
    """Whether GE's operator takes these pixels along axes 2 and 3.

    It computes them from the sizes only: it rounds down, or to the nearest pixel with aligned corners.
    """
    for axis in (2, 3):
        size, length = sizes[axis] or 0, len(pixels[axis])
        if coordinates == "align_corners":
            found = [math.floor(place * (size - 1) / max(length - 1, 1) + 0.5) for place in range(length)]
        else:
            centre = 0.5 if coordinates in ("half_pixel", "pytorch_half_pixel") else 0.0
            found = [math.floor((place + centre) * size / length) for place in range(length)]
        if [min(place, size - 1) for place in found] != list(pixels[axis]):
            return False
    return True


def _trust(rewrite: Rewrite, scales: np.ndarray | None, coordinates: str, rounding: str) -> None:
    """Refuse a rule that differs from GE's, because the pixels cannot be compared: the sizes are not known."""
    integral = scales is not None and all(scale == int(scale) and scale >= 1 for scale in scales.reshape(-1))
    inner = scales is None or (len(scales.reshape(-1)) == 4 and all(scales.reshape(-1)[:2] == 1))
    pair = (coordinates, "floor" if rounding in ("simple", "downwards") else rounding)
    right = pair in RIGHT_PIXELS if scales is None else integral and pair in RIGHT_PIXELS | TIES
    if rewrite.builder.opset <= 10 and scales is None:
        right = False
    if coordinates == "align_corners" and rounding != "round_prefer_ceil":
        right = False
    if not right or not inner or len(rewrite.shape(rewrite.needed(0))) != 4:
        rewrite.fail(
            f"coordinates {coordinates} with nearest_mode {rounding} and unknown sizes or scales, which ATC's plugin "
            "computes otherwise; fix the sizes, or export with coordinates asymmetric and nearest_mode floor"
        )


def _resized_axes(rewrite: Rewrite) -> None:
    """The attributes of opset 18."""
    node = rewrite.node
    if int_attr(node, "antialias", 0):
        rewrite.fail("antialias, which ATC's plugin does not read; export without it")
    if rewrite.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        rewrite.fail("keep_aspect_ratio_policy, which ATC's plugin does not read; give the sizes that it leads to")
    attr = node.attributes.get("axes")
    rewrite.drop("antialias", "keep_aspect_ratio_policy")
    if attr is None:
        return
    shape = rewrite.shape(rewrite.needed(0))
    axes = [axis % len(shape) for axis in attr.as_ints()]
    if rewrite.text("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        rewrite.fail("axes together with a region, which ATC's plugin does not read; export without axes")
    scales, sizes = _scales(rewrite)
    if scales is not None:
        full = np.ones(len(shape), np.float32)
        full[axes] = scales.reshape(-1)
        node.replace_input_with(2, rewrite.builder.constant(full, "scales"))
    elif sizes is not None:
        every = [rewrite.builder.dimension(rewrite.needed(0), axis) for axis in range(len(shape))]
        for axis, size in zip(axes, sizes, strict=True):
            every[axis] = rewrite.builder.ints([size])
        known = [constant(value) for value in every]
        joined = (
            rewrite.builder.ints([int(value[0]) for value in known if value is not None])
            if all(value is not None for value in known)
            else rewrite.builder.op("Concat", every, INT64, {"axis": 0})
        )
        node.replace_input_with(3, joined)
    else:
        rewrite.fail("axes with scales or sizes that are computed; export without axes")
    rewrite.drop("axes")
