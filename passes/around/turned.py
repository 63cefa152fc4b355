"""Tensors of rotary positions in the arrangement that the operators take, of Ascend and of ONNX."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from fa_compiler.passes.around.records import Rotary
from fa_compiler.passes.emit.build import Builder


def without_pair_axis(found: Rotary, builder: Builder) -> Rotary:
    """A rotation of complex numbers as one of heads whose pairs are neighbours: x has four axes, and so have the
    tables."""
    x, info = found.x, builder.info
    if len(info.shape(x) or ()) == 5:
        size = (info.shape(found.result) or ())[-1].const or 0
        x = builder.op("Reshape", [x, builder.ints([0, 0, 0, size])], info.dtype(x))
    cos, sin = (builder.units("Squeeze", table, [4]) for table in (found.cos, found.sin))
    return replace(found, x=x, cos=cos, sin=sin)


def pairs_as_halves(x: ir.Value, size: int, builder: Builder) -> ir.Value:
    """A tensor of four axes, `size` numbers in each head, whose elements of even places along the last one stand in
    front of the odd ones."""
    dtype = builder.info.dtype(x)
    pairs = builder.op("Reshape", [x, builder.ints([0, 0, 0, size // 2, 2])], dtype)
    moved = builder.op("Transpose", [pairs], dtype, {"perm": (0, 1, 2, 4, 3)})
    return builder.op("Reshape", [moved, builder.ints([0, 0, 0, size])], dtype)
