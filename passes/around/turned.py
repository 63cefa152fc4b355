"""Tensors of rotary positions in the arrangement that the operators take, of Ascend and of ONNX."""

from __future__ import annotations

from dataclasses import replace

import onnx_ir as ir

from fa_compiler.passes.around.records import Rotary
from fa_compiler.passes.emit.build import Builder


def without_pair_axis(found: Rotary, builder: Builder) -> Rotary:
    """A rotation of complex numbers as one of heads whose pairs are neighbours: x has four axes,
    and so have the tables."""
    x, info = found.x, builder.info
    if len(info.sizes(x)) == 5:
        size = info.sizes(found.result)[-1].const or 0
        x = builder.reshape(x, [0, 0, 0, size])
    cos, sin = (builder.squeeze(table, [4]) for table in (found.cos, found.sin))
    return replace(found, x=x, cos=cos, sin=sin)


def pairs_as_halves(x: ir.Value, size: int, builder: Builder) -> ir.Value:
    """A tensor of four axes, `size` numbers in each head, whose elements of even places along the
    last one stand in front of the odd ones."""
    pairs = builder.reshape(x, [0, 0, 0, size // 2, 2])
    moved = builder.transpose(pairs, (0, 1, 2, 4, 3))
    return builder.reshape(moved, [0, 0, 0, size])
