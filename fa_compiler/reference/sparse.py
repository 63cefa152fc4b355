"""The common part of the sparse operators: the sequences of a call, their keys (paged or not), and
the keys that a row selects.

The tokens of both layouts are one list: BSND [B,S,N,D] is read as [B*S,N,D], in which sequence b
begins at b*S, and TND is such a list already. So every tensor with an entry for each query token is
indexed by the token in both layouts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from fa_compiler.op_registry.sparse_sizes import KEY_LAYOUTS, PAGED, QUERY_LAYOUTS
from fa_compiler.reference.call import Array, Floats, OpCall

Ints = npt.NDArray[np.int64]

EMPTY_MAX = -2e38
"""softmax_max of a row without a key; its softmax_sum is 0."""


@dataclass(frozen=True)
class Sequence:
    """One batch entry.

    Its query tokens begin at token `first`; `covered` tokens belong to it, and the first `queries`
    of them are computed. `keys` are the positions of its keys in the list of all key tokens.
    """

    first: int
    covered: int
    queries: int
    keys: Ints


@dataclass(frozen=True)
class Row:
    """One query token to be computed: its index among all tokens, its position in its sequence, and
    how many keys of the sequence are visible to it."""

    token: int
    position: int
    visible: int
    sequence: Sequence


class SparseCall:
    """The sequences and sizes of a call.

    `lengths` names the inputs with the lengths of query and key, `layouts` the attributes with
    their layouts, `mode` the attribute with the sparse mode. With `counted`, BSND has lengths, too;
    otherwise its sequences are full.
    """

    def __init__(
        self,
        call: OpCall,
        lengths: tuple[str, str],
        layouts: tuple[str, str] = ("layout", "layout"),
        counted: bool = False,
        mode: str = "sparse_mode",
    ) -> None:
        self.call = call
        self.layout, self.key_layout = (str(call.attrs[name]) for name in layouts)
        if self.layout not in QUERY_LAYOUTS:
            raise call.error(
                layouts[0], f"{self.layout!r} is not one of {', '.join(QUERY_LAYOUTS)}"
            )
        known = KEY_LAYOUTS if layouts[0] != layouts[1] else QUERY_LAYOUTS
        if self.key_layout not in known or self.key_layout not in (self.layout, PAGED):
            raise call.error(
                layouts[1], f"{self.key_layout!r} does not fit {layouts[0]} {self.layout!r}"
            )
        self.mode = int(call.attrs[mode])
        if self.mode not in (0, 3):
            raise call.error(mode, f"must be 0 or 3, got {self.mode}")
        query, key = call.tensor("query"), call.tensor("key")
        for name, tensor, rank in (
            ("query", query, QUERY_LAYOUTS[self.layout]),
            ("key", key, KEY_LAYOUTS[self.key_layout]),
        ):
            if tensor.ndim != rank:
                raise call.error(name, f"has rank {tensor.ndim}, expected {rank}")
        self.token_dims = query.shape[:-2]
        self.tokens = int(np.prod(self.token_dims))
        self.heads, self.width = query.shape[-2:]
        self.key_dims = key.shape[:-2]
        self.key_heads = key.shape[-2]
        if self.key_heads == 0 or self.heads % self.key_heads:
            raise call.error(
                "key", f"has {self.key_heads} heads, which do not divide the {self.heads} of query"
            )
        self.group = self.heads // self.key_heads
        self.sequences = self._sequences(lengths, counted)

    def rows(self) -> Iterator[Row]:
        """The rows that are computed, in the order of their tokens.

        In mode 0 all keys are visible to a row. In mode 3 only the keys up to its own position are;
        the last row sees all keys.
        """
        for sequence in self.sequences:
            count = len(sequence.keys)
            for i in range(sequence.queries):
                visible = (
                    count
                    if self.mode == 0
                    else min(count, max(0, count - sequence.queries + i + 1))
                )
                yield Row(sequence.first + i, i, visible, sequence)

    def by_token(self, name: str, *dims: int) -> Floats:
        """A tensor with one entry for each query token as [tokens, *dims]; -1 in `dims` stands for
        any size."""
        return self._flat(name, self.token_dims, dims, (self.tokens,))

    def by_key(self, name: str, *dims: int) -> Floats:
        """A tensor with one entry for each key token as [key tokens, *dims]."""
        return self._flat(name, self.key_dims, dims, (int(np.prod(self.key_dims)),))

    def _flat(
        self, name: str, front: tuple[int, ...], dims: tuple[int, ...], flat: tuple[int]
    ) -> Floats:
        tensor = self.call.tensor(name)
        expected = (*front, *dims)
        is_valid = tensor.ndim == len(expected) and all(
            d in (-1, s) for d, s in zip(expected, tensor.shape, strict=True)
        )
        if not is_valid:
            raise self.call.error(name, f"has shape {tensor.shape}, expected {expected}")
        return tensor.astype(np.float64).reshape(flat + tensor.shape[len(front) :])

    def indices(self, any_heads: bool = False) -> Ints:
        """sparse_indices as [tokens, key heads, K]. With `any_heads`, one list may be for all key
        heads."""
        heads = self.call.tensor("sparse_indices").shape[-2:-1]
        wanted = 1 if any_heads and heads == (1,) else self.key_heads
        lists = self.by_token("sparse_indices", wanted, -1).astype(np.int64)
        return np.broadcast_to(lists, (self.tokens, self.key_heads, lists.shape[-1]))

    def statistics(self, name: str) -> Floats:
        """softmax_max or softmax_sum, [B,N2,S1,G] or [N2,T1,G], as [tokens, heads]."""
        tensor = self.call.tensor(name).astype(np.float64)
        expected = (*self.token_dims[:-1], self.key_heads, self.token_dims[-1], self.group)
        if tensor.shape != expected:
            raise self.call.error(name, f"has shape {tensor.shape}, expected {expected}")
        return np.swapaxes(tensor, -3, -2).reshape(self.tokens, self.heads)

    def sinks(self) -> Floats | None:
        """The sinks, one additional score for each head, or None."""
        tensor = self.call.optional("sinks")
        if tensor is not None and tensor.shape != (self.heads,):
            raise self.call.error("sinks", f"has shape {tensor.shape}, expected {(self.heads,)}")
        return None if tensor is None else tensor.astype(np.float64)

    def pack_statistics(self, values: Floats) -> Floats:
        """The inverse of `statistics`."""
        split = values.reshape(*self.token_dims, self.key_heads, self.group)
        return np.ascontiguousarray(np.swapaxes(split, -3, -2))

    def shaped(self, values: Floats) -> Floats:
        """[tokens, ...] in the query's layout."""
        return values.reshape(self.token_dims + values.shape[1:])

    def shaped_keys(self, values: Floats) -> Floats:
        """[key tokens, ...] in the key's layout."""
        return values.reshape(self.key_dims + values.shape[1:])

    def _sequences(self, lengths: tuple[str, str], counted: bool) -> list[Sequence]:
        call = self.call
        given = [
            None
            if (tensor := call.optional(name)) is None
            else np.asarray(tensor, np.int64).reshape(-1)
            for name in lengths
        ]
        queries: list[tuple[int, int, int]]
        if self.layout == "TND":
            ends = self._ends(lengths[0], given[0], self.tokens)
            queries = [(start, end - start, end - start) for start, end in pairwise((0, *ends))]
        else:
            batch, size = self.token_dims
            counts = self._counts(lengths[0], given[0] if counted else None, batch, size)
            queries = [(b * size, size, count) for b, count in enumerate(counts)]
        keys = self._key_places(lengths[1], given[1], len(queries), counted)
        if len(keys) != len(queries):
            raise call.error(
                lengths[1], f"has {len(keys)} entries, expected {len(queries)} as {lengths[0]}"
            )
        return [Sequence(*query, places) for query, places in zip(queries, keys, strict=True)]

    def _key_places(self, name: str, given: Ints | None, batch: int, counted: bool) -> list[Ints]:
        call = self.call
        if self.key_layout == "TND":
            ends = self._ends(name, given, self.key_dims[0])
            return [np.arange(start, end) for start, end in pairwise((0, *ends))]
        if self.key_layout == PAGED:
            if given is None:
                raise call.error(name, f"is absent, expected lengths with {PAGED}")
            table = np.asarray(call.tensor("block_table"), np.int64)
            blocks, page = self.key_dims
            counts = self._counts(name, given, batch, table.shape[1] * page)
            places = []
            for row, count in zip(table, counts, strict=True):
                used = row[: -(-count // page)]
                if ((used < 0) | (used >= blocks)).any():
                    raise call.error("block_table", f"names blocks outside of 0 to {blocks - 1}")
                places.append((used[:, None] * page + np.arange(page)).reshape(-1)[:count])
            return places
        key_batch, size = self.key_dims
        if key_batch != batch:
            raise call.error("key", f"has batch {key_batch}, expected {batch}")
        counts = self._counts(name, given if counted else None, batch, size)
        return [np.arange(b * size, b * size + count) for b, count in enumerate(counts)]

    def _ends(self, name: str, given: Ints | None, total: int) -> list[int]:
        if given is None:
            raise self.call.error(name, "is absent, expected cumulative lengths with TND")
        ends: list[Any] = given.tolist()
        if any(b < a for a, b in zip([0, *ends], ends, strict=False)) or (
            ends and ends[-1] > total
        ):
            raise self.call.error(name, f"is {ends}, expected cumulative lengths up to {total}")
        return ends

    def _counts(self, name: str, given: Ints | None, batch: int, most: int) -> list[int]:
        if given is None:
            return [most] * batch
        if given.shape != (batch,) or (given < 0).any() or (given > most).any():
            raise self.call.error(
                name, f"is {given.tolist()}, expected {batch} lengths up to {most}"
            )
        return [int(count) for count in given]


def chosen(entries: Array, block: int, visible: int, capped: bool) -> Ints:
    """The key positions that a list of block indices selects, as often as they are listed.

    The list ends at the first negative entry and, if `capped`, after as many entries as there are
    visible blocks. In a block only the positions below `visible` are selected.
    """
    ended = np.flatnonzero(entries < 0)
    count = int(ended[0]) if ended.size else len(entries)
    if capped:
        count = min(count, -(-visible // block))
    listed = np.asarray(entries[:count], np.int64)
    # Positions after the last visible key are never computed, because a block may be larger than
    # memory.
    listed = listed[listed < -(-visible // block)]
    tokens = (listed[:, None] * block + np.arange(min(block, visible))).reshape(-1)
    return tokens[tokens < visible]


def joined(side: SparseCall, name: str, rope: str, keys: bool) -> Floats:
    """The concatenation of query or key and its rope part, [tokens, heads, D + Dr]."""
    read, heads = (side.by_key, side.key_heads) if keys else (side.by_token, side.heads)
    plain = read(name, heads, -1)
    if side.call.optional("query_rope") is None and side.call.optional("key_rope") is None:
        return plain
    return np.concatenate([plain, read(rope, heads, -1)], axis=-1)
