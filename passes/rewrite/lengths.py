"""Masks that say how many keys each batch entry has: they exclude the keys from a length on, or
those before a start.

    keys = np.arange(scores.shape[-1])
    scores = np.where(keys < lengths[:, None, None, None], scores, -np.inf)         # padded on the right
    scores = np.where(keys >= starts[:, None, None, None], scores, -np.inf)         # padded on the left

    kept := j + c < length | not j + c < start | All(kept, ..., rest, ...)
                                                            j the key's index, c a known number

    accepted    `j + c < length`, where the length is an integer tensor of one element or of one for
                each batch entry, in every spelling that positions.py reads: compared with `<`, `<=`
                and their opposites, negated, joined with others by And, made a float mask by Where
                or arithmetic. `j + c >= start` likewise: batches that are padded on the left
    emitted     the lengths in int64, [1] or [batch], clamped to the range from 0 to the number of
                keys. A mask is all true or all false for a length outside it, but the operator
                refuses such a length. With starts the length is the number of keys from the start
                to the end, and kv_padding_size, one number, is that of the keys after the end
    refused     everything else stays a mask: lengths by head, key indices with a step, an Or;
                starts where the keys are pages, and starts beside lengths that differ between batch
                entries

The comparison is one of mathematical integers: positions.py reads numbers only where their type
holds them, and the elements of the tensor are compared as they are. The result is computed as
min(max(length, c), keys + c) - c, in which nothing overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.cases import Case, Number
from fa_compiler.passes.algebra.formula import (
    Affine,
    All,
    AtLeastZero,
    BooleanLiteral,
    BooleanTensor,
    Formula,
    IndexLessThanElement,
    negation,
)
from fa_compiler.passes.emit.build import INT64, LayoutEmitter
from fa_compiler.passes.ir.nodes import instances, sole
from fa_compiler.passes.layout.plan import plan_moves
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.score_ops import Add, BiasOp, ExcludedPositions, Select
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.entries import entry_dims
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class Length:
    """A bound on the key index j: keys with `j + shift < value` are the kept ones if `kept`, else
    the excluded ones.

    `dims` is the arrangement of `value`.
    """

    value: ir.Value
    dims: Arrangement
    shift: int
    kept: bool = True


@dataclass(frozen=True)
class Lengths:
    """The lengths and starts that masks consist of, and the masks that are left (`rest`).

    Of several lengths (`ends`) the smallest counts, of several starts the largest.
    """

    ends: tuple[Length, ...] = ()
    starts: tuple[Length, ...] = ()
    rest: tuple[ExcludedPositions, ...] = ()

    @property
    def any(self) -> bool:
        """Is there a length or a start?"""
        return bool(self.ends or self.starts)

    def build(
        self, match: AttentionMatch, keys: ir.Value, emitter: LayoutEmitter
    ) -> dict[str, ir.Value]:
        """The operator's inputs; `keys` is the number of all keys, int64 [1]."""
        builder = emitter.builder
        end = _combined("Min", self.ends, match, keys, emitter) or keys
        start = _combined("Max", self.starts, match, keys, emitter)
        if start is None:
            return {"actual_seq_lengths": end}
        between = builder.max(builder.sub(end, start), builder.ints([0]))
        return {"actual_seq_lengths": between, "kv_padding_size": builder.sub(keys, end)}


def _combined(
    op_type: str,
    lengths: Sequence[Length],
    match: AttentionMatch,
    keys: ir.Value,
    emitter: LayoutEmitter,
) -> ir.Value | None:
    """The smallest (Min) or largest (Max) of these lengths, int64 [batch] or [1]; None where there
    are no lengths.

    Each length is limited to the range from 0 to `keys` first.
    """
    if not lengths:
        return None
    clamped = (_clamped(length, match, keys, emitter) for length in lengths)
    return reduce(lambda one, other: emitter.builder.op(op_type, [one, other]), clamped)


def _clamped(
    length: Length, match: AttentionMatch, keys: ir.Value, emitter: LayoutEmitter
) -> ir.Value:
    """A length, limited to the range from 0 to `keys`, int64 [batch] or [1]."""
    builder = emitter.builder
    form: Arrangement = ((),)
    if any(length.dims):
        form = (match.roles.batch,)
    given = emitter.arranged(builder.cast(length.value, INT64), length.dims, form)
    shift, most = builder.ints([length.shift]), keys
    if length.shift:
        most = builder.add(keys, shift)
    least = builder.max(given, shift)
    shifted = builder.min(least, most)
    if not length.shift:
        return shifted
    return builder.sub(shifted, shift)


def read_lengths(
    masks: Sequence[ExcludedPositions], match: AttentionMatch, info: ShapeInfo, starts: bool
) -> Lengths:
    """The lengths in these masks, and the starts if `starts` allows them; other masks are left as
    they are."""
    parts = [part for mask in masks for part in _lengths_and_masks(mask, match, info, starts)]
    bounds = instances(parts, Length)
    ends, begins = (
        tuple(bound for bound in bounds if bound.kept == kept) for kept in (True, False)
    )
    if begins and any(any(end.dims) for end in ends):
        return read_lengths(masks, match, info, starts=False)
    return Lengths(ends, begins, tuple(instances(parts, ExcludedPositions)))


def excluding(step: BiasOp, info: ShapeInfo) -> ExcludedPositions | None:
    """The mask that is equal to a step of a bias; None where there is none.

    A step is a mask where it gives some keys -inf and leaves the others as they are: a key with
    -inf has no weight.
    """
    if isinstance(step, Select) and step.fill == -math.inf:
        return ExcludedPositions.by(step)
    if not isinstance(step, Add) or step.sign <= 0:
        return None
    view = step.operand.view
    shape = info.shape(view.base)
    if shape is None:
        return None
    positions = Positions(info, shape)
    number = positions.number(view.base, positions.identity_index)
    if number is None or _leaves(number) != {0.0, -math.inf}:
        return None
    return ExcludedPositions(view)


def _leaves(number: Number) -> set[float | None]:
    """The constants that a number may be; None stands for one that depends on the position."""
    if isinstance(number, Case):
        return _leaves(number.chosen) | _leaves(number.other)
    if isinstance(number, Affine):
        return {number.const}
    return {number}


def _lengths_and_masks(
    mask: ExcludedPositions, match: AttentionMatch, info: ShapeInfo, starts: bool
) -> Sequence[Length | ExcludedPositions]:
    """What a mask consists of, lengths and masks; the mask itself where no part is a length."""
    base, shape = mask.view.base, info.shape(mask.view.base)
    if shape is None or mask.cut is not None:
        return [mask]
    positions = Positions(info, shape)
    kept = positions.nonzero(base)
    if kept is None:
        return [mask]
    if mask.when:
        kept = negation(kept)
    conditions: tuple[Formula, ...] = (kept,)
    if isinstance(kept, All):
        conditions = kept.parts
    parts: list[Length | ExcludedPositions] = []
    for condition in conditions:
        part = _length(condition, mask.view.base_dims, match, positions, starts) or _beside(
            condition, mask.view.base_dims
        )
        if part is None:
            return [mask]
        parts.append(part)
    if not any(isinstance(part, Length) for part in parts):
        return [mask]
    return parts


def _length(
    part: Formula, dims: Arrangement, match: AttentionMatch, positions: Positions, starts: bool
) -> Length | None:
    """The bound on the key index that a comparison states; None where it is not one for each batch
    entry, and where it is a start which `starts` does not allow."""
    if not isinstance(part, IndexLessThanElement) or not (part.when or starts):
        return None
    shift, batch = part.affine.offset.const, match.roles.batch
    if shift is None or not _counts_keys(part.affine, dims, match, positions):
        return None
    own = entry_dims(positions.info.shape(part.value), part.index, positions.sizes, dims)
    if own is None or not set(batch).issuperset(chain(*own)) or plan_moves(own, (batch,)) is None:
        return None
    return Length(part.value, own, shift, part.when)


def _counts_keys(
    place: Affine, dims: Arrangement, match: AttentionMatch, positions: Positions
) -> bool:
    """Is a place the index of a key, of all keys, plus a constant?"""
    keys = match.roles.kv_seq
    column = sole([k for k, dim in enumerate(dims) if dim and dim == keys])
    return (
        column is not None
        and place.steps == Affine.index(column, positions.rank).steps
        and match.space.size(keys) == positions.sizes[column]
    )


def _beside(part: Formula, dims: Arrangement) -> ExcludedPositions | None:
    """A part that stays a mask, read from its boolean tensor; None where the graph has no such
    tensor."""
    if isinstance(part, BooleanLiteral | AtLeastZero):
        return None
    tensor = part if isinstance(part, BooleanTensor) else part.origin
    if tensor is None:
        return None
    along: dict[int | None, Axes] = {None: (), **dict(enumerate(dims))}
    own = tuple(along[axis] for axis in tensor.axes)
    return ExcludedPositions(
        View(tensor.value, own, own, equivalent_values=((tensor.value, own),)), not tensor.when
    )
