"""Reads a mask of rows and keys as a causal mask and keys that are hidden from every row.

    mask = torch.arange(T) > torch.arange(S)[:, None] + T - S       # causal
    mask = ~attention_mask.bool()[:, None, :]                       # padding

    visible     := where the mask leaves a key to a row, read by positions.py as a conjunction of
                   key <= row + keys - rows, the last row sees all      causal
                   the same of a single row, which sees all keys        nothing
                   a tensor over the keys, or batch and keys            hidden keys (padding)

A mask with any other part is not read. What is read holds at every position and in every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.formula import (
    TRUE,
    All,
    AtLeastZero,
    BooleanTensor,
    Formula,
    negation,
)
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import without_none
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class PaddedKeys:
    """Keys are hidden where `value` as a truth value is `when`.

    `units` are the dimensions of `value` that have size 1; the others are the keys, or batch and
    keys.
    """

    value: ir.Value
    when: bool
    units: tuple[int, ...]


@dataclass(frozen=True)
class KeyMask:
    """A mask as sparse_mode 3, if `causal`, or 0, and hidden keys."""

    causal: bool = False
    hidden: frozenset[PaddedKeys] = frozenset()

    def __and__(self, other: KeyMask) -> KeyMask:
        """What both leave visible."""
        return KeyMask(self.causal or other.causal, self.hidden | other.hidden)


def read_key_mask(
    value: ir.Value, when: bool, rows: Dim, keys: Dim, info: ShapeInfo
) -> KeyMask | None:
    """What is visible under a mask that excludes where `value` as a truth value is `when`; None
    where it is not read.

    The last two dimensions of `value` are the rows (or 1) and the keys. In front of them may be the
    batch, or the batch and a dimension of size 1.
    """
    shape = info.sizes(value)
    if not 2 <= len(shape) <= 4 or shape[-2] not in (rows, Dim(1)) or shape[-1] != keys:
        return None
    if len(shape) == 4 and shape[1].const != 1:
        return None
    formula = Positions(info, shape).nonzero(value)
    if formula is None:
        return None
    if when:
        formula = negation(formula)
    parts = formula.parts if isinstance(formula, All) else (formula,)
    visible = KeyMask()
    for part in parts:
        mask = _visible(part, shape, rows, keys)
        if mask is None:
            return None
        visible = visible & mask
    return visible


def _visible(part: Formula, shape: Shape, rows: Dim, keys: Dim) -> KeyMask | None:
    """What a part of a formula leaves visible; None where it is neither the causal mask nor one of
    keys."""
    rank = len(shape)
    if part == TRUE:
        return KeyMask()
    if isinstance(part, AtLeastZero):
        return _compared(part, shape, rows, keys)
    if isinstance(part, BooleanTensor):
        along = without_none(part.axes)
        if along != [rank - 1] and (rank == 2 or along != [0, rank - 1]):
            return None
        units = tuple(place for place, axis in enumerate(part.axes) if axis is None)
        return KeyMask(hidden=frozenset([PaddedKeys(part.value, not part.when, units)]))
    return None


def _compared(part: AtLeastZero, shape: Shape, rows: Dim, keys: Dim) -> KeyMask | None:
    """What a comparison of positions leaves visible; None where it is neither the causal mask nor
    true everywhere."""
    if part.affine.least(shape).is_at_least(0):
        return KeyMask()
    rank = len(shape)
    steps = {axis: step for axis, step in enumerate(part.affine.steps) if step}
    if steps == {rank - 2: 1, rank - 1: -1} and part.affine.offset == keys - rows:
        return KeyMask(causal=True)
    return None


def hidden_keys(hidden: PaddedKeys, whole: Sequence[ir.Value], builder: Builder) -> ir.Value:
    """Whether each key is hidden, [B,T]; `whole` are B and T as vectors of one element."""
    value = builder.cast(builder.squeeze(hidden.value, hidden.units), ir.DataType.BOOL)
    if not hidden.when:
        value = builder.not_(value)
    shape = builder.concat(list(whole), 0)
    return builder.expand(value, shape)
