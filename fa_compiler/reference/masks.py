"""The allowed set: the keys that a query row attends, from atten_mask, sparse_mode,
pre/next_tockens and prefix.

With d = j - i and off = S2 - S1 of the batch entry, a key is allowed by

    0 default        mask == 0 and -pre <= d <= next
    1 all            mask == 0
    2 causal, top left       d <= 0
    3 causal, bottom right   d <= off
    4 band           -pre + off <= d <= next + off
    5 prefix         mask == 0 (the mask is expected to say: d <= off or j < prefix)
    6 prefix         d <= off or j < prefix
    7 TND            mode 3, but mode 4 on the last batch with queries
    8 TND            mode 2, but mode 4 on the first batch with queries

A mask element other than 0 excludes a key. Without atten_mask the operator ignores the mode and
attends all keys. Modes 2, 3, 4, 6, 7 and 8 take a compressed mask (2048x2048, or 3072x2048 in mode
6): its content is checked and not used. The masks of modes 0, 1 and 5 may have size 1 on any axis
(extension EXT-MASK-BROADCAST). In modes 2, 3 and 4 a mask [B|1,N1|1,1,S2|1] excludes keys in
addition to the band (extension EXT-BAND-MASK). With the attribute cpu_mask_batch (extension
EXT-MASK-BATCH) the batch of a mask may be a divisor W of B: entry b of the batch reads entry b % W.
"""

from __future__ import annotations

import functools

import numpy as np

from fa_compiler.reference.call import Array, Bools, OpCall
from fa_compiler.reference.layouts import Side

FULL_MASK_MODES = (0, 1, 5)
_COMPRESSED = 2048


def mask_batch(call: OpCall, mask: Array, query: Side) -> int:
    """The batch size that a mask or bias [B,N1,S1,S2] has to have: that of query, or with
    cpu_mask_batch its own, if that divides the query's."""
    batches = len(query.lengths)
    if call.attrs.get("cpu_mask_batch") != "repeated" or mask.ndim != 4:
        return batches
    return mask.shape[0] if mask.shape[0] and batches % mask.shape[0] == 0 else batches


class AllowedSet:
    """The allowed set of a call, one (batch, query head) at a time."""

    def __init__(self, call: OpCall, query: Side, key: Side) -> None:
        self.call = call
        self.query = query
        self.key = key
        self.pre = int(call.attrs["pre_tockens"])
        self.next = int(call.attrs["next_tockens"])
        self.given = call.optional("atten_mask") is not None
        # Other code must read this mode, not the call's attribute: without a mask it is 0, because
        # the operator then ignores the mode.
        self.mode = int(call.attrs["sparse_mode"]) if self.given else 0
        if self.given:
            self._check_mode()
            self.mask = self._checked_mask(call.tensor("atten_mask"))
            self.prefix = self._checked_prefix() if self.mode == 6 else ()

    def allowed(self, batch: int, head: int) -> Bools:
        """Booleans [S1, S2] of one batch entry and query head, True for an attended key."""
        s1, s2 = self.query.lengths[batch], self.key.lengths[batch]
        if not self.given:
            return np.ones((s1, s2), dtype=np.bool_)
        structure = self._structure(batch, s1, s2)
        if self.mode in FULL_MASK_MODES or self._is_beside_band(self.mask):
            structure &= ~self._given_mask(batch, head, s1, s2)
        return structure

    def _structure(self, batch: int, s1: int, s2: int) -> Bools:
        distance = np.arange(s2)[None, :] - np.arange(s1)[:, None]
        offset = s2 - s1
        mode = self.mode
        if mode in (7, 8):
            causal = 3 if mode == 7 else 2
            mode = 4 if batch == self._band_batch() else causal
        if mode == 0:
            return (distance >= -self.pre) & (distance <= self.next)
        if mode in (1, 5):
            return np.ones((s1, s2), dtype=np.bool_)
        if mode == 2:
            return distance <= 0
        if mode == 3:
            return distance <= offset
        if mode == 4:
            return (distance >= offset - self.pre) & (distance <= offset + self.next)
        return (distance <= offset) | (np.arange(s2) < self.prefix[batch])

    def _band_batch(self) -> int:
        """The batch entry to which modes 7 and 8 apply the band of mode 4: in mode 7 the last entry
        that has queries, in mode 8 the first.

        Mode 7 is for a sequence that is cut at its end, mode 8 for one that is cut at its start.
        """
        occupied = [batch for batch, length in enumerate(self.query.lengths) if length]
        return occupied[-1 if self.mode == 7 else 0]

    def _given_mask(self, batch: int, head: int, s1: int, s2: int) -> Bools:
        mask = self.mask
        if self.query.layout == "TND":
            if mask.shape == (self.query.longest, self.key.longest):
                return mask[:s1, :s2]
            row, column = self.query.starts[batch], self.key.starts[batch]
            return mask[row : row + s1, column : column + s2]
        if mask.ndim == 4:
            mask = mask[batch % mask.shape[0], head if mask.shape[1] > 1 else 0]
        return np.broadcast_to(mask, (s1, s2))

    def _check_mode(self) -> None:
        packed = self.query.layout == "TND"
        modes = (0, 1, 2, 3, 4, 6, 7, 8) if packed else (0, 1, 2, 3, 4, 5, 6)
        if self.mode not in modes:
            raise self.call.error(
                "sparse_mode",
                f"{self.mode} is not one of {modes}, which layout {self.query.layout} takes",
            )

    def _checked_mask(self, mask: Array) -> Bools:
        if mask.dtype not in (np.bool_, np.uint8):
            raise self.call.error("atten_mask", f"dtype must be bool or uint8, got {mask.dtype}")
        excluded: Bools = mask != 0
        if self.mode not in FULL_MASK_MODES and not self._is_beside_band(excluded):
            self._check_compressed(excluded)
        elif self.query.layout == "TND":
            excluded = self._packed_mask(excluded)
        else:
            shape = excluded.shape
            full = (
                mask_batch(self.call, excluded, self.query),
                self.query.heads,
                self.query.total,
                self.key.total,
            )
            if len(shape) not in (2, 4) or any(
                have not in (1, want) for have, want in zip(shape, full[-len(shape) :], strict=True)
            ):
                raise self.call.error(
                    "atten_mask",
                    f"shape {list(shape)} is neither {list(full)} nor "
                    f"{list(full[2:])}, nor one of these with axes of size 1",
                )
        return excluded

    def _is_beside_band(self, excluded: Bools) -> bool:
        return (
            self.mode in (2, 3, 4)
            and self.query.layout != "TND"
            and excluded.ndim == 4
            and excluded.shape[2] == 1
        )

    def _check_compressed(self, excluded: Bools) -> None:
        shape = (3072 if self.mode == 6 else _COMPRESSED, _COMPRESSED)
        if excluded.ndim not in (2, 4) or excluded.shape != (1,) * (excluded.ndim - 2) + shape:
            raise self.call.error(
                "atten_mask",
                f"sparse_mode {self.mode} takes the compressed mask {list(shape)}, got {list(excluded.shape)}",
            )
        if not np.array_equal(excluded.reshape(shape), _compressed_mask(shape[0])):
            content = "1 above the diagonal and 0 elsewhere"
            if self.mode == 6:
                content = "1 above the diagonal of the first 2048 rows and in the right half of the others, else 0"
            raise self.call.error(
                "atten_mask", f"sparse_mode {self.mode} takes a mask that is {content}"
            )

    def _packed_mask(self, excluded: Bools) -> Bools:
        if excluded.ndim == 4 and excluded.shape[:2] == (1, 1):
            excluded = excluded[0, 0]
        own = (self.query.longest, self.key.longest)
        joint = (sum(self.query.lengths), sum(self.key.lengths))
        if excluded.shape not in (own, joint):
            raise self.call.error(
                "atten_mask",
                f"shape {list(excluded.shape)} is neither [maxS1, maxS2] = {list(own)} nor [T1, T2] = {list(joint)}",
            )
        return excluded

    def _checked_prefix(self) -> tuple[int, ...]:
        prefix = tuple(int(value) for value in self.call.tensor("prefix").reshape(-1))
        if len(prefix) != len(self.query.lengths):
            raise self.call.error(
                "prefix", f"has {len(prefix)} values for {len(self.query.lengths)} batches"
            )
        for batch, value in enumerate(prefix):
            s1, s2 = self.query.lengths[batch], self.key.lengths[batch]
            low = max(0, s2 - s1)
            if s1 and not low <= value <= s2:
                raise self.call.error(
                    "prefix", f"value {value} of batch {batch} is not in [{low}, {s2}]"
                )
        return prefix


@functools.cache
def _compressed_mask(rows: int) -> Bools:
    """triu(ones(2048, 2048), 1); in mode 6, 1024 rows follow whose right half is 1."""
    mask = np.zeros((rows, _COMPRESSED), dtype=np.bool_)
    mask[:_COMPRESSED] = np.triu(np.ones((_COMPRESSED, _COMPRESSED), dtype=np.bool_), 1)
    mask[_COMPRESSED:, _COMPRESSED // 2 :] = True
    return mask
