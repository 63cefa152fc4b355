"""The open sizes of sounds and images, whose tokens a model makes itself, many numbers for each.

    sound := a float input [batch, samples]                         SAMPLES
    image := a float input [batch, channels, height, width]         PIXELS for height and width

With the sizes of a text, such a model has one token or none. One token attends itself alone,
whatever the scale and the mask are, so that nothing of an attention is compared. The sizes count
only if no other input has them; a mask, as that of the samples, may. Caches are neither.

A name that is a number, as the exporter of transformers writes for a size that it could not leave
open, has this size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import onnx

from fa_compiler.comparison.cache_lengths import size_name
from fa_compiler.comparison.masks import FLOATS, is_mask
from fa_compiler.protos.cache_names import CACHE_WORDS

SAMPLES = 4000
"""A quarter of a second at 16,000 samples a second. Models of sound make 10 to 20 tokens of it."""
PIXELS = 64
"""Sixteen patches of the usual 16 x 16 pixels."""


def signal_sizes(inputs: Sequence[onnx.ValueInfoProto]) -> Mapping[str, int]:
    """The sizes of sounds and images among the inputs, by their symbols."""
    found: dict[str, int] = {}
    others: set[str] = set()
    for info in inputs:
        symbols = _symbols(info)
        axes = _signal_axes(info, symbols)
        found |= {symbols[axis]: size for axis, size in axes.items()}
        if not is_mask(info):
            others |= {symbol for axis, symbol in enumerate(symbols) if axis not in axes}
    return {symbol: size for symbol, size in found.items() if symbol not in others}


def signal_inputs(inputs: Sequence[onnx.ValueInfoProto]) -> list[str]:
    """The names of the sounds and images among the inputs whose sizes are open."""
    sizes = signal_sizes(inputs)
    return [
        info.name
        for info in inputs
        if not is_mask(info) and not sizes.keys().isdisjoint(_symbols(info))
    ]


def numbers_as_names(inputs: Iterable[onnx.ValueInfoProto]) -> Mapping[str, int]:
    """The sizes that symbols name, such as 32 for the symbol "32"."""
    symbols = {dim.dim_param for info in inputs for dim in info.type.tensor_type.shape.dim}
    return {symbol: int(symbol) for symbol in symbols if symbol.isdecimal() and int(symbol)}


def _symbols(info: onnx.ValueInfoProto) -> list[str]:
    """The symbol of each size; empty where it is known."""
    dims = info.type.tensor_type.shape.dim
    return [
        ""
        if dim.HasField("dim_value") and dim.dim_value != -1
        else dim.dim_param or size_name(info.name, axis)
        for axis, dim in enumerate(dims)
    ]


def _signal_axes(info: onnx.ValueInfoProto, symbols: Sequence[str]) -> Mapping[int, int]:
    """The axes of a sound or of an image with an open size, and the size that they get."""
    name = info.name.lower()
    if (
        info.type.tensor_type.elem_type not in FLOATS
        or is_mask(info)
        or any(word in name for word in CACHE_WORDS)
    ):
        return {}
    if len(symbols) == 2 and symbols[1]:
        return {1: SAMPLES}
    if len(symbols) == 4 and symbols[2] and symbols[3]:
        return {2: PIXELS, 3: PIXELS}
    return {}
