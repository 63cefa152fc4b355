"""Masks that say how many keys each batch entry has: they exclude the keys from a length on, or those before a start.

    kept := j + c < length | not j + c < start | All(kept, ..., rest, ...)
                                                            j the key's index, c a known number

    accepted    `j + c < length`, where the length is an integer tensor of one element or of one for each batch entry,
                in every spelling that positions.py reads: compared with `<`, `<=` and their opposites, negated, joined
                with others by And, made a float mask by Where or arithmetic. `j + c >= start` likewise: batches that
                are padded on the left
    emitted     the lengths in int64, [1] or [batch], clamped to the range from 0 to the number of keys. A mask is all
                true or all false for a length outside it, but the operator refuses such a length. With starts the
                length is the number of keys from the start to the end, and kv_padding_size, one number, is that of the
                keys after the end
    refused     everything else stays a mask: lengths by head, key indices with a step, an Or; starts where the keys are
                pages, and starts beside lengths that differ between batch entries

The comparison is one of mathematical integers: positions.py reads numbers only where their type holds them, and the
elements of the tensor are compared as they are. The result is computed as min(max(length, c), keys + c) - c, in which
nothing overflows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
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
from fa_compiler.passes.layout.plan import plan_moves
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.score_ops import Add, BiasOp, ExcludedPositions, Select
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class Length:
    """A bound on the key index j: keys with `j + shift < value` are the kept ones if `kept`, else the excluded ones.

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

    def build(self, match: AttentionMatch, keys: ir.Value, emitter: LayoutEmitter) -> dict[str, ir.Value]:
        """The operator's inputs; `keys` is the number of all keys, int64 [1]."""
        builder = emitter.builder
        end = _combined("Min", self.ends, match, keys, emitter) or keys
        start = _combined("Max", self.starts, match, keys, emitter)
        if start is None:
            return {"actual_seq_lengths": end}
        between = builder.op("Max", [builder.op("Sub", [end, start], INT64), builder.ints([0])], INT64)
        return {"actual_seq_lengths": between, "kv_padding_size": builder.op("Sub", [keys, end], INT64)}


def _combined(
    op_type: str, lengths: Sequence[Length], match: AttentionMatch, keys: ir.Value, emitter: LayoutEmitter
) -> ir.Value | None:
    """The smallest (Min) or largest (Max) of these lengths, int64 [batch] or [1]; None where there are no lengths.

    Each length is limited to the range from 0 to `keys` first.
    """
    builder = emitter.builder
    total: ir.Value | None = None
    for length in lengths:
        plan = plan_moves(length.dims, (match.roles.batch if any(length.dims) else (),))
        assert plan is not None  # `_length` takes only values by batch entry
        given = emitter.apply(builder.cast(length.value, INT64), length.dims, plan)
        shift = builder.ints([length.shift])
        most = builder.op("Add", [keys, shift], INT64) if length.shift else keys
        least = builder.op("Max", [given, shift], INT64)
        held = builder.op("Min", [least, most], INT64)
        own = builder.op("Sub", [held, shift], INT64) if length.shift else held
        total = own if total is None else builder.op(op_type, [total, own], INT64)
    return total


def read_lengths(masks: Sequence[ExcludedPositions], match: AttentionMatch, info: ShapeInfo, starts: bool) -> Lengths:
    """The lengths in these masks, and the starts if `starts` allows them; other masks are left as they are."""
    found: list[Length] = []
    rest: list[ExcludedPositions] = []
    for mask in masks:
        taken = _read(mask, match, info, starts) if mask.cut is None else None
        if taken is None:
            rest.append(mask)
        else:
            found.extend(part for part in taken if isinstance(part, Length))
            rest.extend(part for part in taken if isinstance(part, ExcludedPositions))
    ends, begins = (tuple(each for each in found if each.kept == kept) for kept in (True, False))
    if begins and any(any(end.dims) for end in ends):
        return read_lengths(masks, match, info, starts=False)
    return Lengths(ends, begins, tuple(rest))


def excluding(step: BiasOp, info: ShapeInfo) -> ExcludedPositions | None:
    """The mask that is equal to a step of a bias; None where there is none.

    A step is a mask where it gives some keys -inf and leaves the others as they are: a key with -inf has no weight.
    """
    if isinstance(step, Select):
        return ExcludedPositions.by(step) if step.fill == -math.inf else None
    shape = info.shape(step.operand.view.base) if isinstance(step, Add) and step.sign > 0 else None
    if not isinstance(step, Add) or shape is None:
        return None
    positions = Positions(info, shape)
    number = positions.number(step.operand.view.base, positions.identity_index)
    values = set() if number is None else _leaves(number)
    return ExcludedPositions(step.operand.view) if values == {0.0, -math.inf} else None


def _leaves(number: Number) -> set[float | None]:
    """The constants that a number may be; None stands for one that depends on the position."""
    if isinstance(number, Case):
        return _leaves(number.chosen) | _leaves(number.other)
    return {number.const if isinstance(number, Affine) else number}


def _read(
    mask: ExcludedPositions, match: AttentionMatch, info: ShapeInfo, starts: bool
) -> list[Length | ExcludedPositions] | None:
    base, shape = mask.view.base, info.shape(mask.view.base)
    if shape is None:
        return None
    positions = Positions(info, shape)
    truth = positions.nonzero(base)
    if truth is None:
        return None
    kept = negation(truth) if mask.when else truth
    dims = mask.view.base_dims
    result: list[Length | ExcludedPositions] = []
    for part in kept.parts if isinstance(kept, All) else (kept,):
        read = None
        if isinstance(part, IndexLessThanElement) and (part.when or starts):
            read = _length(part, dims, match, positions)
        beside = read or _beside(part, dims)
        if beside is None:
            return None
        result.append(beside)
    return result if any(isinstance(part, Length) for part in result) else None


def _length(
    part: IndexLessThanElement, dims: Arrangement, match: AttentionMatch, positions: Positions
) -> Length | None:
    """The bound on the key index that a comparison states; None where it is not one for each batch entry."""
    roles, rank = match.roles, positions.rank
    shift = part.affine.offset.const
    columns = [k for k, dim in enumerate(dims) if dim and dim == roles.kv_seq]
    if shift is None or len(columns) != 1:
        return None
    if part.affine.steps != Affine.index(columns[0], rank).steps:
        return None
    if match.space.size(roles.kv_seq) != positions.sizes[columns[0]]:
        return None
    sizes = positions.info.shape(part.value)
    if sizes is None or len(sizes) != len(part.index):
        return None
    placed: Arrangement = ()
    for size, place in zip(sizes, part.index, strict=True):
        along = [k for k in range(rank) if place == Affine.index(k, rank)]
        # All elements of the value have to be used: neither a slice of it, nor one of several.
        if size != (positions.sizes[along[0]] if along else 1) or (not along and place.const != 0):
            return None
        placed = (*placed, dims[along[0]] if along else ())
    own = {axis for dim in placed for axis in dim}
    if not own <= set(roles.batch) or plan_moves(placed, (roles.batch,)) is None:
        return None
    return Length(part.value, placed, shift, part.when)


def _beside(part: Formula, dims: Arrangement) -> ExcludedPositions | None:
    """A part that stays a mask, read from its boolean tensor; None where the graph has no such tensor."""
    if isinstance(part, BooleanLiteral | AtLeastZero):
        return None
    given = part if isinstance(part, BooleanTensor) else part.origin
    if given is None:
        return None
    placed = tuple(() if axis is None else dims[axis] for axis in given.axes)
    return ExcludedPositions(
        View(given.value, placed, placed, equivalent_values=((given.value, placed),)), not given.when
    )
