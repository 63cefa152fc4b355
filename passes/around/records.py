"""What is known of a norm or of a gated activation before anything is built."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import NON_FINITE_SCORES, Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import FLOATS, SIXTEEN_BITS
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.shapes import ShapeInfo

FLOAT = ir.DataType.FLOAT


@dataclass(frozen=True)
class Weight:
    """The weight or the bias of a norm: a value of the model, or numbers that are known before it
    runs."""

    value: ir.Value | None
    numbers: np.ndarray | None = None

    @property
    def is_given(self) -> bool:
        """Is there one? Without a weight the rows are multiplied by 1, without a bias 0 is
        added."""
        return self.value is not None or self.numbers is not None

    @property
    def is_constant(self) -> bool:
        """Is it the same in every run, and so computed from nothing?"""
        return self.numbers is not None or (
            self.value is not None and self.value.const_value is not None
        )


@dataclass(frozen=True)
class Norm:
    """A norm of the rows of x, along the last axis: result = x / sqrt(mean(x^2) + epsilon) * gamma
    + beta.

    If `centred`, it is a LayerNorm, where x stands for x - mean(x); only this has a beta. `nodes`
    are what computes it, the last one the maker of the result. `rounded` tells that the model
    rounds something in between to 16 bits.
    """

    anchor: ir.Node
    x: ir.Value
    gamma: Weight
    epsilon: float
    result: ir.Value
    nodes: tuple[ir.Node, ...]
    rounded: bool = False
    centred: bool = False
    beta: Weight = Weight(None)


@dataclass(frozen=True)
class SummedNorm:
    """A norm of a sum, which is a result, too. A `bias`, a vector, is added to the two operands."""

    norm: Norm
    operands: tuple[ir.Value, ir.Value]
    total: ir.Value
    nodes: tuple[ir.Node, ...]
    """What computes the sum and the norm."""
    bias: ir.Value | None = None

    @property
    def is_total_read(self) -> bool:
        """Is the sum read by anything but the norm, or is it an output?"""
        return self.total.is_graph_output() or any(
            node not in self.nodes for node, _ in self.total.uses()
        )


@dataclass(frozen=True)
class Activation:
    """An activation, or a gated one: an operator of `attrs`.

    `operands` are its only operand, or the gate and what it multiplies, which are joined along
    their last axis. `rounded` tells that the model rounds more to 16 bits than the operator.
    """

    anchor: ir.Node
    op_type: str
    attrs: Mapping[str, int | float | str]
    operands: tuple[ir.Value, ...]
    result: ir.Value
    nodes: tuple[ir.Node, ...]
    rounded: bool


HALF, INTERLEAVE, INTERLEAVE_HALF = 0, 1, 3
"""The modes of RotaryPositionEmbedding: which elements of the last axis are a pair, before and
behind it."""


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: result = x * cos + (-x2, x1) * sin, where x1 and x2 are the parts of x
    along its last axis that the mode names.

    x has four axes. Tokens stand in front of the heads, or behind them (`heads_first`).
    `read_behind` is what a Transpose of these two axes makes x from, if nothing else reads x. If
    `is_half_table`, cos and sin hold one number for each pair. If `is_complex`, the pairs are
    complex numbers: cos and sin have a further last axis of 1, and so may x, of 2. If
    `moves_pairs`, the operator gets x with the elements of even places in front of those of odd
    ones. `others` are joined to what is rotated, in front of it and behind it, along the last axis:
    the result holds them, too.
    """

    anchor: ir.Node
    x: ir.Value
    cos: ir.Value
    sin: ir.Value
    result: ir.Value
    nodes: tuple[ir.Node, ...]
    mode: int = HALF
    is_half_table: bool = False
    heads_first: bool = False
    read_behind: ir.Value | None = None
    moves_pairs: bool = False
    is_complex: bool = False
    others: tuple[Sequence[ir.Value], Sequence[ir.Value]] = ((), ())


def known_shape(value: ir.Value, info: ShapeInfo, node: ir.Node) -> Shape:
    """The shape of a tensor of at least one axis. Raises Decline where not even its rank is
    known."""
    shape = info.shape(value)
    if not shape:
        raise Decline(Code.RANK, f"the rank of {value.name!r} is not known", node)
    return shape


def is_float(value: ir.Value, info: ShapeInfo, node: ir.Node) -> ir.DataType:
    """The type of a tensor that the operators take. Raises Decline for another one."""
    dtype = info.dtype(value)
    if dtype not in FLOATS:
        raise Decline(
            Code.DTYPE,
            f"{value.name!r} is of the type {'unknown' if dtype is None else dtype.name}",
            node,
        )
    return dtype


def expect_finite(dtype: ir.DataType, options: Options, node: ir.Node) -> None:
    """Raises Decline where 16 bits may hold what overflowed: the model may then make NaN of what it
    rounds to 0."""
    if dtype in SIXTEEN_BITS and NON_FINITE_SCORES in options.assume:
        reason = "what is rounded to 0 in 16 bits makes NaN of an infinity, and the operator does not round it"
        raise Decline(
            Code.DTYPE,
            reason,
            node,
            f"leave out --assume {NON_FINITE_SCORES} if all numbers are finite",
        )
