"""Parts of the sequence: what each rank has of a tensor, and a whole tensor made of all parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from fa_compiler.errors import InputError
from fa_compiler.op_registry.collectives import CYCLIC, Chunk, chunks, owners, positions, shortest
from fa_compiler.parallel.communicator import Array, Communicator, Shape


@dataclass(frozen=True)
class Parts:
    """How a sequence of `length` tokens is divided among ranks.

    Raises:
        InputError: the sequence is so short that a rank would have no token.
    """

    order: str
    ranks: int
    length: int

    def __post_init__(self) -> None:
        least = shortest(self.order, self.ranks)
        if self.length < least:
            raise InputError(
                f"the sequence has {self.length} tokens, and the {self.ranks} ranks of this model need at least {least}"
            )

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """The chunks of a rank."""
        return chunks(self.order, self.ranks, rank, self.length)

    def count(self, rank: int) -> int:
        """The number of tokens of a rank."""
        return sum(stop - start for start, stop in self.chunks(rank))

    def positions(self, rank: int) -> Array:
        """The positions of a rank's tokens, int64."""
        return positions(self.chunks(rank))

    @cached_property
    def owners(self) -> tuple[Array, Array]:
        """The owner of every position of the sequence, and the place of the position among the
        owner's tokens."""
        return owners([self.positions(rank) for rank in range(self.ranks)])

    def own(self, whole: Array, axis: int, rank: int) -> Array:
        """A rank's part of a tensor along an axis."""
        pieces = [cut(whole, axis, start, stop) for start, stop in self.chunks(rank)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis)

    def joined(self, parts: Sequence[Array], axis: int) -> Array:
        """The tensor of which every rank has a part along an axis."""
        shape = list(parts[0].shape)
        shape[axis] = self.length
        whole = np.empty(shape, parts[0].dtype)
        for rank, part in enumerate(parts):
            begin = 0
            for start, stop in self.chunks(rank):
                cut(whole, axis, start, stop)[...] = cut(part, axis, begin, begin + stop - start)
                begin += stop - start
        return whole

    def shapes(self, part: Array, axis: int) -> list[Shape]:
        """The shapes of all ranks' parts, by that of one rank."""
        return [
            (*part.shape[:axis], self.count(rank), *part.shape[axis + 1 :])
            for rank in range(self.ranks)
        ]


class CyclicParts(Parts):
    """How the tokens of caches are divided: rank r of N has the positions r, r + N, and so on.
    There may be none."""

    def __post_init__(self) -> None:
        """Any length will do."""

    def chunks(self, rank: int) -> tuple[Chunk, ...]:
        """Each token by itself."""
        return tuple((start, start + 1) for start in range(rank, self.length, self.ranks))

    def count(self, rank: int) -> int:
        return len(range(rank, self.length, self.ranks))

    def positions(self, rank: int) -> Array:
        return np.arange(rank, self.length, self.ranks, dtype=np.int64)

    def own(self, whole: Array, axis: int, rank: int) -> Array:
        return np.ascontiguousarray(whole[(*(slice(None),) * axis, slice(rank, None, self.ranks))])

    def joined(self, parts: Sequence[Array], axis: int) -> Array:
        shape = list(parts[0].shape)
        shape[axis] = self.length
        whole = np.empty(shape, parts[0].dtype)
        for rank, part in enumerate(parts):
            whole[(*(slice(None),) * axis, slice(rank, None, self.ranks))] = part
        return whole


def divided(order: str, ranks: int, length: int) -> Parts:
    """How a sequence is divided in an order. Raises InputError as Parts does."""
    return CyclicParts(order, ranks, length) if order == CYCLIC else Parts(order, ranks, length)


def gathered(communicator: Communicator, parts: Parts, part: Array, axis: int) -> Array:
    """The whole tensor on every rank."""
    return parts.joined(communicator.gather_all(part, parts.shapes(part, axis)), axis)


def regrouped(
    communicator: Communicator, tensors: Sequence[tuple[Array, int]], positions: Array
) -> tuple[list[Array], int]:
    """A rank's parts of tensors in the order of caches, and the number of tokens of all ranks.

    `tensors` are parts, each with the axis of its tokens, which are this rank's `positions` in any
    order. Every token goes straight to the rank that it belongs to.

    Raises:
        InputError: the positions of all ranks are not those of a sequence.
    """
    positions = positions.astype(np.int64)
    size, rank = communicator.size, communicator.rank
    fits = all(part.shape[axis] == len(positions) for part, axis in tensors)
    own = np.array([len(positions) if fits else -1], np.int64)
    counts = [int(count[0]) for count in communicator.gather_all(own, [(1,)] * size)]
    if -1 in counts:
        raise InputError(
            f"the caches of rank {counts.index(-1)} have another number of tokens than its positions"
        )
    every = communicator.gather_all(positions, [(count,) for count in counts])
    length = sum(counts)
    if not np.array_equal(np.sort(np.concatenate(every)), np.arange(length)):
        raise InputError(
            f"the positions of the ranks' caches are not those of one sequence of {length} tokens"
        )
    if all(
        np.array_equal(each, np.arange(other, length, size)) for other, each in enumerate(every)
    ):
        return [part for part, _ in tensors], length
    places = [np.flatnonzero(positions % size == other) for other in range(size)]
    mine = [each[each % size == rank] for each in every]
    order = np.argsort(np.concatenate(mine))
    found = []
    for part, axis in tensors:
        sends = [np.take(part, each, axis) for each in places]
        shapes = [(*part.shape[:axis], len(each), *part.shape[axis + 1 :]) for each in mine]
        found.append(
            np.take(np.concatenate(communicator.exchange(sends, shapes), axis), order, axis)
        )
    return found, length


def selected(
    communicator: Communicator, parts: Parts, part: Array, indices: Array, axis: int
) -> Array:
    """What Gather picks from the whole tensor: each rank sends the tokens that it has.

    Raises:
        InputError: an index is outside the sequence.
    """
    flat = indices.reshape(-1).astype(np.int64)
    if flat.size and not (-parts.length <= flat.min() and flat.max() < parts.length):
        raise InputError(
            f"a token is picked that the sequence of {parts.length} tokens does not have"
        )
    owner, place = (each[flat % parts.length] for each in parts.owners)
    mine = np.take(part, place[owner == communicator.rank], axis)
    shapes = [
        (*part.shape[:axis], int((owner == rank).sum()), *part.shape[axis + 1 :])
        for rank in range(parts.ranks)
    ]
    picked = np.empty((*part.shape[:axis], flat.size, *part.shape[axis + 1 :]), part.dtype)
    before = (slice(None),) * axis
    for rank, piece in enumerate(communicator.gather_all(mine, shapes)):
        picked[(*before, owner == rank)] = piece
    return picked.reshape((*part.shape[:axis], *indices.shape, *part.shape[axis + 1 :]))


def reduced(communicator: Communicator, part: Array) -> Array:
    """The sum over the ranks. All ranks add in the same order, so they get the same numbers."""
    every = communicator.gather_all(part, [part.shape] * communicator.size)
    with np.errstate(all="ignore"):  # infinities of both signs
        return np.asarray(reduce(np.add, every), part.dtype)


def extremes(
    communicator: Communicator, parts: Parts, part: Array, axis: int, inner: bool, reduction: str
) -> Array:
    """A tensor whose maximum (`reduction` max) or minimum along an axis is that of the whole
    tensor.

    `part` has the rank's tokens along this axis, alone or with `inner` behind others, else in front
    of them. The result has one number in place of the tokens: their maximum or minimum. Where an
    element of any rank is NaN, it is the whole tensor instead: what a runtime makes of it then
    depends on where the NaN is.
    """
    function = {"max": np.maximum, "min": np.minimum}[reduction]
    count = parts.count(communicator.rank)
    others = part.shape[axis] // count
    front, behind = part.shape[:axis], part.shape[axis + 1 :]
    tokens = axis + inner
    split = part.reshape(*front, *((others, count) if inner else (count, others)), *behind)
    own = function.reduce(split, axis=tokens)
    largest = function.reduce(communicator.gather_all(own, [own.shape] * communicator.size))
    if largest.dtype.kind == "f" and np.isnan(largest).any():
        return gathered(communicator, parts, split, tokens).reshape(
            *front, others * parts.length, *behind
        )
    return np.asarray(largest, part.dtype)


def cut(array: Array, axis: int, start: int, stop: int) -> Array:
    """A range along an axis."""
    return array[(*(slice(None),) * axis, slice(start, stop))]
