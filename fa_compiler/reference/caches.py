"""The keys and values of a decoding call as [N2, L, D] of each batch entry, for every form of
storage.

They are stored in one tensor in the input layout, in a list of tensors of batch 1, or in pages that
a block table names. Only the L valid tokens of an entry are read: the first L or, with
kv_padding_size, the last L before the padding on the right.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa_compiler.reference.call import Array, OpCall

LAYOUTS = {"BSH": 3, "BSND": 4, "BNSD": 4}
"""The layouts of decoding, and the rank of query in each."""


class Valid(NamedTuple):
    """The valid tokens of one batch entry, [first, first + size). Masks and biases are read at
    these positions, too."""

    first: int
    size: int


class Caches:
    """The sizes, keys and values of a decoding call. Raises ReferenceInputError for invalid
    inputs."""

    def __init__(self, call: OpCall) -> None:
        self.call = call
        self.layout = str(call.attrs["input_layout"])
        if self.layout not in LAYOUTS:
            raise call.error(
                "input_layout", f"must be one of {', '.join(LAYOUTS)}, got {self.layout!r}"
            )
        self.heads = int(call.attrs["num_heads"])
        self.key_heads = int(call.attrs["num_key_value_heads"]) or self.heads
        if self.heads <= 0 or self.key_heads <= 0 or self.heads % self.key_heads:
            raise call.error(
                "num_key_value_heads", f"{self.key_heads} does not divide num_heads, {self.heads}"
            )
        self.batch, self.width = self._query_sizes()
        self.table = call.optional("block_table")
        self.tensors = {name: call.tensors(name) for name in ("key", "value")}
        self._check()
        self.room = self._room()
        self.valid = self._valid()

    @property
    def listed(self) -> bool:
        """Whether each batch entry has its own tensors."""
        return len(self.tensors["key"]) > 1

    def stored(self, name: str, entry: int) -> Array:
        """The valid tokens [N2, L, D] of a batch entry in the stored type; `name` is "key" or
        "value"."""
        first, count = self.valid[entry]
        tokens: Array
        if self.table is not None:
            tokens = self._pages(self.tensors[name][0], entry, count)
        else:
            tensor = self.tensors[name][entry if self.listed else 0]
            tokens = self._rows(tensor[0 if self.listed else entry])[first : first + count]
        return tokens.transpose(1, 0, 2)

    def query(self) -> Array:
        """The query as [B, N1, D]."""
        return self.call.tensor("query").reshape(self.batch, self.heads, self.width)

    def _query_sizes(self) -> tuple[int, int]:
        query = self.call.tensor("query")
        shape = query.shape
        tokens = {"BSH": 1, "BSND": 1, "BNSD": 2}[self.layout]
        heads = {"BSH": None, "BSND": 2, "BNSD": 1}[self.layout]
        if len(shape) != LAYOUTS[self.layout] or shape[tokens] != 1:
            raise self.call.error("query", f"shape {list(shape)} is not one token in {self.layout}")
        if heads is not None and shape[heads] != self.heads:
            raise self.call.error(
                "num_heads", f"{self.heads} is not the {shape[heads]} heads of query"
            )
        if heads is None and shape[2] % self.heads:
            raise self.call.error(
                "num_heads", f"{self.heads} does not divide the width {shape[2]} of query"
            )
        return shape[0], shape[2] // self.heads if heads is None else shape[3]

    def _rows(self, tensor: Array) -> Array:
        """One batch entry of a tensor, or one page, as [tokens, N2, D]."""
        if tensor.ndim == 2:
            return tensor.reshape(tensor.shape[0], self.key_heads, self.width)
        heads_first = self.table is not None or self.layout == "BNSD"
        return tensor.transpose(1, 0, 2) if heads_first else tensor

    def _pages(self, cache: Array, entry: int, count: int) -> Array:
        assert self.table is not None
        size = int(self.call.attrs["block_size"])
        used = self.table[entry, : -(-count // size)]
        if len(used) * size < count or (
            len(used) and not 0 <= used.min() <= used.max() < len(cache)
        ):
            raise self.call.error(
                "block_table",
                f"row {entry}, {list(used)}, does not name the blocks of {count} keys",
            )
        pages = [self._rows(cache[block]) for block in used]
        empty = np.zeros((0, self.key_heads, self.width), cache.dtype)
        return np.concatenate([empty, *pages])[:count]

    def _check(self) -> None:
        keys, values = self.tensors["key"], self.tensors["value"]
        if [key.shape for key in keys] != [value.shape for value in values]:
            raise self.call.error("value", "key and value differ in their shapes")
        if len(keys) not in (1, self.batch) or (self.table is not None and len(keys) > 1):
            raise self.call.error(
                "key", f"a list of {len(keys)} tensors for a batch of {self.batch}"
            )
        for key in keys:
            forms = self._forms(key)
            if key.shape not in forms:
                expected = " or ".join(str(list(form)) for form in forms)
                raise self.call.error("key", f"shape {list(key.shape)} is not {expected}")

    def _forms(self, key: Array) -> list[tuple[int, ...]]:
        """The shapes that a tensor with as many tokens as `key` may have: by the layout, or those
        of pages."""
        paged, heads = self.table is not None, self.key_heads
        heads_first = key.ndim != 3 and (paged or self.layout != "BSND")
        if paged:
            entries, length = key.shape[0], int(self.call.attrs["block_size"])
        else:
            entries, length = self.batch, key.shape[min(1 + heads_first, key.ndim - 1)]
            if self.listed:
                entries = 1
        folded = (entries, length, heads * self.width)
        by_head = (entries, length, heads, self.width)
        if heads_first:
            by_head = (entries, heads, length, self.width)
        if paged:
            return [folded, by_head] if self.layout == "BNSD" else [folded]
        return [folded] if self.layout == "BSH" else [by_head]

    def _room(self) -> list[int]:
        """The capacity of each entry in tokens. With pages it is the capacity of the entry's row of
        the table."""
        if self.table is not None:
            return [self.table.shape[1] * int(self.call.attrs["block_size"])] * self.batch
        tokens = {"BSH": 1, "BSND": 1, "BNSD": 2}[self.layout]
        keys = self.tensors["key"]
        return [keys[entry if self.listed else 0].shape[tokens] for entry in range(self.batch)]

    def _valid(self) -> list[Valid]:
        room, given = self.room, self.call.optional("actual_seq_lengths")
        if given is None:
            if self.table is not None:
                raise self.call.error("actual_seq_lengths", "absent beside a block_table")
            return [Valid(0, size) for size in room]
        counts = self._counts(given)
        padding = self.call.optional("kv_padding_size")
        if padding is None or self.table is not None or self.listed:
            return [Valid(0, count) for count in counts]
        padding_size = max(0, int(padding.reshape(-1)[0]))
        firsts = [size - padding_size - count for size, count in zip(room, counts, strict=True)]
        return [
            Valid(first, count) if first >= 0 else Valid(0, 0)
            for first, count in zip(firsts, counts, strict=True)
        ]

    def _counts(self, given: Array) -> list[int]:
        """The number of keys of each batch entry, by actual_seq_lengths."""
        if given.shape not in ((1,), (self.batch,)):
            raise self.call.error(
                "actual_seq_lengths", f"shape {list(given.shape)} is not [1] or [{self.batch}]"
            )
        counts = [int(count) for count in np.broadcast_to(given, (self.batch,))]
        for entry, (count, room) in enumerate(zip(counts, self.room, strict=True)):
            if not 0 <= count <= room:
                raise self.call.error(
                    "actual_seq_lengths", f"{count} keys in batch entry {entry} of {room}"
                )
        return counts
