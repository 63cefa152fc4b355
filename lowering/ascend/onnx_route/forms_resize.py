"""Forms of Resize and Upsample.

| operator | becomes | where |
| --- | --- | --- |
| Resize of some axes | Resize of all axes | scales or sizes are constant |
| Resize to the nearest pixel | Gather along each axis | GE's operator takes other pixels; all sizes are known |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fa_compiler.lowering.ascend.onnx_route.plugin_reads import RIGHT_PIXELS, TIES
from fa_compiler.lowering.ascend.onnx_route.rewrite import Rewrite
from fa_compiler.passes.ir.nodes import constant, int_attr


def resize(rewrite: Rewrite) -> None:
    """Resize of opset 11 and newer, Upsample of 9 and Resize of 10."""
    mode = rewrite.text("mode", "nearest")
    if rewrite.builder.opset > 10:
        _resized_axes(rewrite)
        if len(rewrite.node.inputs) < 3:
            rewrite.fail("it has neither scales nor sizes")
    if mode == "nearest":
        _resize_to_nearest(rewrite)


def _resize_to_nearest(rewrite: Rewrite) -> None:
    """Gather along each axis, unless GE's operator takes the same pixels."""
    coordinates, rounding = _rule(rewrite)
    sizes = [size.const for size in rewrite.shape(rewrite.needed(0))]
    scales, wanted = _scales(rewrite)
    known = [size for size in sizes if size is not None]
    pixels = None
    if len(known) == len(sizes) and coordinates != "tf_crop_and_resize":
        pixels = _nearest(rewrite, known, scales, wanted, coordinates, rounding)
    if pixels is None:
        return _trust(rewrite, scales, coordinates, rounding)
    changed = {
        axis: places for axis, places in enumerate(pixels) if places != list(range(known[axis]))
    }
    if len(sizes) == 4 and changed.keys() <= {2, 3} and _by_operator(sizes, pixels, coordinates):
        return None
    result = rewrite.needed(0)
    for axis, places in changed.items():
        result = rewrite.op(
            "Gather", [result, rewrite.builder.ints(places)], result, {"axis": axis}
        )
    return rewrite.replace(result if changed else rewrite.op("Identity", [result], result))


def _rule(rewrite: Rewrite) -> tuple[str, str]:
    """The coordinates and the rounding of the nearest pixel. Up to opset 10 the operator decides
    them."""
    if rewrite.builder.opset > 10:
        coordinates = rewrite.text("coordinate_transformation_mode", "half_pixel")
        return coordinates, rewrite.text("nearest_mode", "round_prefer_floor")
    return "asymmetric", "downwards" if rewrite.node.op_type == "Upsample" else "simple"


def _scales(rewrite: Rewrite) -> tuple[np.ndarray | None, list[int] | None]:
    """The scales and the sizes; None if they are absent or not constant."""
    place = 2 if rewrite.builder.opset > 10 else 1
    scales, sizes = (constant(rewrite.given(index)) for index in (place, 3))
    scales = scales if scales is not None and scales.size else None
    return scales, None if sizes is None or not sizes.size else [
        int(size) for size in sizes.reshape(-1)
    ]


def _nearest(
    rewrite: Rewrite,
    sizes: Sequence[int],
    scales: np.ndarray | None,
    wanted: Sequence[int] | None,
    coordinates: str,
    rounding: str,
) -> list[list[int]] | None:
    """The index of the nearest pixel for every output index of each axis; None for an unknown
    rule."""
    if wanted is None and scales is None:
        return None
    if wanted is not None and rewrite.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        return None
    pixels = []
    for axis, size in enumerate(sizes):
        if wanted is not None:
            length = wanted[axis]
            scale = np.float32(length / size) if size else np.float32(1)
        else:
            assert scales is not None
            scale = np.float32(scales.reshape(-1)[axis])
            length = int(np.floor(np.float32(size) * scale))
        places = _pixels(size, length, scale, coordinates, rounding)
        if places is None:
            return None
        pixels.append(places)
    return pixels


_HALF = np.float32(0.5)

COORDINATES: Mapping[str, Callable[[np.ndarray, int, int, np.float32], np.ndarray]] = {
    "asymmetric": lambda places, size, length, scale: places / scale,
    "half_pixel": lambda places, size, length, scale: (places + _HALF) / scale - _HALF,
    "pytorch_half_pixel": lambda places, size, length, scale: (places + _HALF) / scale - _HALF,
    "align_corners": lambda places, size, length, scale: (
        places * np.float32(size - 1) / np.float32(length - 1)
    ),
    "tf_half_pixel_for_nn": lambda places, size, length, scale: (places + _HALF) / scale,
}
"""The coordinates of the output's places in the input, by ONNX's names. `size` is that of the
input, `length` that of the output."""

FIRST_PIXEL = ("pytorch_half_pixel", "align_corners")
"""The coordinates of which an output of one pixel takes the first one."""

ROUNDINGS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "floor": np.floor,
    "downwards": np.floor,
    "ceil": np.ceil,
    "round_prefer_ceil": lambda exact: np.floor(exact + _HALF),
    "round_prefer_floor": lambda exact: np.ceil(exact - _HALF),
}
"""How coordinates become pixels. "downwards" is the rule of Upsample."""


def _pixels(
    size: int, length: int, scale: np.float32, coordinates: str, rounding: str
) -> list[int] | None:
    """The indices by ONNX's definition, in float32 as in ONNX Runtime."""
    if length == size and scale == 1:
        return list(range(size))
    if rounding == "simple":
        rounding = "floor" if scale >= 1 else "ceil"
    if coordinates not in COORDINATES or rounding not in ROUNDINGS:
        return None
    exact = np.zeros(length, np.float32)
    if length > 1 or coordinates not in FIRST_PIXEL:
        exact = COORDINATES[coordinates](np.arange(length, dtype=np.float32), size, length, scale)
    rounded = ROUNDINGS[rounding](exact)
    return [int(place) for place in np.clip(rounded, 0, max(size - 1, 0))]


def _by_operator(
    sizes: Sequence[int | None], pixels: Sequence[Sequence[int]], coordinates: str
) -> bool:
    """Whether GE's operator takes these pixels along axes 2 and 3.

    It computes them from the sizes only: it rounds down, or to the nearest pixel with aligned
    corners.
    """
    for axis in (2, 3):
        size, length = sizes[axis] or 0, len(pixels[axis])
        if coordinates == "align_corners":
            found = [
                math.floor(place * (size - 1) / max(length - 1, 1) + 0.5) for place in range(length)
            ]
        else:
            centre = 0.5 if coordinates in ("half_pixel", "pytorch_half_pixel") else 0.0
            found = [math.floor((place + centre) * size / length) for place in range(length)]
        if [min(place, size - 1) for place in found] != list(pixels[axis]):
            return False
    return True


def _trust(rewrite: Rewrite, scales: np.ndarray | None, coordinates: str, rounding: str) -> None:
    """Refuse a rule that differs from GE's, because the pixels cannot be compared: the sizes are
    not known."""
    if (
        not _is_rule_of_ge(rewrite, scales, coordinates, rounding)
        or len(rewrite.shape(rewrite.needed(0))) != 4
    ):
        rewrite.fail(
            f"coordinates {coordinates} with nearest_mode {rounding} and unknown sizes or scales, which ATC's plugin "
            "computes otherwise; fix the sizes, or export with coordinates asymmetric and nearest_mode floor"
        )


def _is_rule_of_ge(
    rewrite: Rewrite, scales: np.ndarray | None, coordinates: str, rounding: str
) -> bool:
    """Whether GE's operator takes the pixels of this rule, whatever the sizes are.

    With integral scales of axes 2 and 3, it takes those of more rules.
    """
    if coordinates == "align_corners" and rounding != "round_prefer_ceil":
        return False
    pair = (coordinates, "floor" if rounding in ("simple", "downwards") else rounding)
    if scales is None:
        return rewrite.builder.opset > 10 and pair in RIGHT_PIXELS
    factors = scales.reshape(-1)
    if len(factors) != 4 or any(factors[:2] != 1):
        return False
    integral = all(scale == int(scale) and scale >= 1 for scale in factors)
    return integral and pair in RIGHT_PIXELS | TIES


def _resized_axes(rewrite: Rewrite) -> None:
    """The attributes of opset 18."""
    node = rewrite.node
    if int_attr(node, "antialias", 0):
        rewrite.fail("antialias, which ATC's plugin does not read; export without it")
    if rewrite.text("keep_aspect_ratio_policy", "stretch") != "stretch":
        rewrite.fail(
            "keep_aspect_ratio_policy, which ATC's plugin does not read; give the sizes that it leads to"
        )
    attr = node.attributes.get("axes")
    rewrite.drop("antialias", "keep_aspect_ratio_policy")
    if attr is None:
        return
    shape = rewrite.shape(rewrite.needed(0))
    axes = [axis % len(shape) for axis in attr.as_ints()]
    if rewrite.text("coordinate_transformation_mode", "half_pixel") == "tf_crop_and_resize":
        rewrite.fail(
            "axes together with a region, which ATC's plugin does not read; export without axes"
        )
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
            else rewrite.builder.concat(every, 0)
        )
        node.replace_input_with(3, joined)
    else:
        rewrite.fail("axes with scales or sizes that are computed; export without axes")
    rewrite.drop("axes")
