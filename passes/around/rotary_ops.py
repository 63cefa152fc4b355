"""Rotary positions that the model has ready made: the operators RotaryEmbedding of ONNX and of ONNX
Runtime.

Grammar; the code cites the numbers of the cases:

    operator :=
      1     RotaryEmbedding(x, cos, sin, positions)         of ONNX
      2   | RotaryEmbedding(x, positions, cos, sin)         of com.microsoft, with scale 1 and
                                                            batches that are not packed
    x :=
      3     [B, S, N D]                    N is num_heads; where that is 0, D is twice the width of
                                           the tables
      4   | [B, N, S, D]
      5   | Reshape(z)                     of z [B, S, N, D] to case 3: the operator reads z
    tables :=
      6     [rows, R / 2], and positions [B, S] or [1, S]: a Gather of rows for each token
      7   | [B, S, R / 2] or [1, S, R / 2]                  of ONNX, without positions
    what is rotated :=
      8     the first R numbers of a head: rotary_embedding_dim
      9   | all of it                      R is D
    the operator's mode :=
     10     0 (half) | 1 (interleave)      the attribute interleaved

The definition of both is that of rotary.py, 6: x1 cos - x2 sin, x2 cos + x1 sin. In 16 bits the
operator may compute in float32 and round once, where the definition rounds three times; the report
says so. So it may not overflow where the definition does: without the assumption that all numbers
are finite, 16 bits are declined. Positions are rows of the tables: what ONNX Runtime does with
others is no part of its definition. One position for a whole batch, from which ONNX Runtime counts
the tokens, is declined.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.records import HALF, INTERLEAVE, expect_finite, is_float, known_shape
from fa_compiler.passes.ir.nodes import float_attr, int_attr, is_op, operand_at
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.values.shapes import ShapeInfo

NAME, MICROSOFT = "RotaryEmbedding", "com.microsoft"


@dataclass(frozen=True)
class RotaryOp:
    """A ready-made operator that rotates the first `part` of the `size` numbers of each head.

    x has its heads in front of the tokens, or behind them (`heads_first`), and then both axes of a
    head may be one (`is_flat`). cos and sin hold one number for each pair. They have a row for each
    of the `positions`, or without these a row for each token.
    """

    node: ir.Node
    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    positions: ir.Value | None
    heads: int
    size: int
    part: int
    mode: int
    heads_first: bool
    is_flat: bool


def is_anchor(node: ir.Node) -> bool:
    """Is this an operator of rotary positions?"""
    return is_op(node, NAME) or (node.domain, node.op_type) == (MICROSOFT, NAME)


def rotary_op(node: ir.Node, info: ShapeInfo, options: Options) -> RotaryOp:
    """What the operator computes. Raises Decline where Ascend's operator does not compute it."""
    x, cos, sin, positions = _operands(node, info)
    expect_finite(is_float(x, info, node), options, node)
    shape = known_shape(x, info, node)
    if len(shape) not in (3, 4):
        raise Decline(Code.RANK, f"{x.name!r} has rank {len(shape)}", node)
    flat = len(shape) == 3  # 3 and 4
    _expect_tables(node, (cos, sin), positions, (shape[0], shape[1] if flat else shape[2]), info)
    heads, size, part = _sizes(node, shape[-1].const, known_shape(cos, info, node)[-1].const, flat)
    mode = INTERLEAVE if int_attr(node, "interleaved", 0) else HALF  # 10
    source = _before_reshape(x, heads, size, info) if flat else None
    return RotaryOp(
        node,
        source or x,
        cos,
        sin,
        positions,
        heads,
        size,
        part,
        mode,
        not flat,
        flat and source is None,
    )


def _operands(
    node: ir.Node, info: ShapeInfo
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value | None]:
    """What is rotated, the two tables, and the positions if they are given. Raises Decline."""
    contrib = node.domain == MICROSOFT
    if contrib and (unknown := unknown_part(node)) is not None:
        reason = f"{node.op_type} has {unknown}, and what it means is not known here"
        raise Decline(Code.ILLEGAL, reason, node, "")
    if contrib and (
        float_attr(node, "scale", 1.0) != 1.0 or int_attr(node, "is_packed_batching", 0)
    ):
        raise Decline(Code.ILLEGAL, "its positions are scaled, or its batches are packed", node, "")
    places = (2, 3, 1) if contrib else (1, 2, 3)  # 1 and 2
    x, (cos, sin, positions) = operand_at(node, 0), (operand_at(node, place) for place in places)
    dtype = is_float(x, info, node)
    if info.dtype(cos) != dtype or info.dtype(sin) != dtype:
        raise Decline(
            Code.DTYPE,
            "the tables of cosines and sines have another type than what is rotated",
            node,
        )
    return x, cos, sin, positions if positions.name else None


def _sizes(node: ir.Node, width: int | None, half: int | None, flat: bool) -> tuple[int, int, int]:
    """The heads along the last axis, the size of each, and how much of it is rotated. Raises
    Decline."""
    if width is None or half is None:
        raise Decline(Code.SHAPE, "the size of a head is not known", node, "")
    heads = int_attr(node, "num_heads", 0) or width // (2 * half) if flat else 1
    size = width // heads if heads > 0 else 0
    part = int_attr(node, "rotary_embedding_dim", 0) or size  # 8 and 9
    if size < 1 or size * heads != width or part != 2 * half or part > size:
        raise Decline(
            Code.SHAPE,
            "the sizes of the tables are not proven to be those of what is rotated",
            node,
            "",
        )
    return heads, size, part


def _before_reshape(x: ir.Value, heads: int, size: int, info: ShapeInfo) -> ir.Value | None:
    """The tensor of four axes that a Reshape makes x from; None where something else makes it."""
    node = x.producer()
    source, wanted = operand_at(node, 0), (*info.sizes(x)[:2], Dim(heads), Dim(size))
    return source if is_op(node, "Reshape") and info.shape(source) == wanted else None  # 5


def _expect_tables(
    node: ir.Node,
    tables: tuple[ir.Value, ir.Value],
    positions: ir.Value | None,
    tokens: tuple[Dim, Dim],
    info: ShapeInfo,
) -> None:
    """Raises Decline where it is not proven that the tables, or the positions, have a row for each
    token."""
    shape, other = map(info.sizes, tables)
    rank = 3 if positions is None else 2  # 6 and 7
    if len(shape) != rank or other != shape:
        raise Decline(
            Code.SHAPE,
            "the tables of cosines and sines have different shapes, or unknown ones",
            node,
            "",
        )
    rows = shape[:2] if positions is None else info.sizes(positions)
    if len(rows) != 2 or rows[0] not in (Dim(1), tokens[0]) or rows[1] != tokens[1]:
        raise Decline(
            Code.SHAPE, "it is not proven that there is a position for each token", node, ""
        )
