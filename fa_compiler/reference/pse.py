"""The position bias (pse): a tensor (pse_type 0 and 1), or computed from slopes (pse_type 2 and 3).

pse_type 1 adds it before the scale, S = scale*(A + pse); the other types add it after the scale, S
= scale*A + pse.
"""

from __future__ import annotations

import itertools

import numpy as np

from fa_compiler.reference.call import Array, Floats, OpCall
from fa_compiler.reference.layouts import Side
from fa_compiler.reference.masks import AllowedSet, mask_batch

_COMPRESSED_ROWS = 1024


class Pse:
    """The bias of a call, one (batch, query head) at a time. `name` is its input: real_shift, or
    pse_shift in the gradient."""

    def __init__(
        self, call: OpCall, name: str, query: Side, key: Side, allowed: AllowedSet
    ) -> None:
        self.call = call
        self.name = name
        self.query = query
        self.key = key
        self.allowed = allowed
        self.type = int(call.attrs["pse_type"])
        if self.type not in (0, 1, 2, 3):
            raise call.error("pse_type", f"must be 0, 1, 2 or 3, got {self.type}")
        self.given = call.optional(name) is not None
        if not self.given:
            if self.type != 1:
                raise call.error(
                    name,
                    f"absent, but pse_type {self.type} needs it (without it pse_type must be 1)",
                )
        elif self.type in (2, 3):
            self._set_slopes(call.tensor(name))
        else:
            self._set_tensor(call.tensor(name))

    @property
    def before_scale(self) -> bool:
        """Whether the bias is added to Q K^T before the scale."""
        return self.type == 1

    def bias(self, batch: int, head: int) -> Floats | None:
        """The bias of one batch entry and query head, [S1, S2] or [1, S2]; None if there is
        none."""
        if not self.given:
            return None
        s1, s2 = self.query.lengths[batch], self.key.lengths[batch]
        if self.type in (2, 3):
            return self._from_slope(batch, head, s1, s2)
        if self.flat is not None:
            return self._from_flat(batch, head, s1, s2)
        rows = self.tensor[batch % self.tensor.shape[0], head if self.tensor.shape[1] > 1 else 0]
        rows = rows.astype(np.float64)
        if self.compressed:
            return _decompress(rows, s1, s2, self.key.longest)
        return np.broadcast_to(rows, (s1, s2))

    # Slopes (ALiBi inside the operator): -slope * |distance|, or -slope * sqrt(|distance|).

    def _set_slopes(self, slopes: Array) -> None:
        shape = (len(self.query.lengths), self.query.heads)
        if slopes.shape not in (shape, shape[1:]):
            raise self.call.error(
                self.name,
                f"slopes of pse_type {self.type} have shape {list(shape)} or "
                f"{list(shape[1:])}, got {list(slopes.shape)}",
            )
        self.slopes = np.broadcast_to(slopes.astype(np.float64), shape)
        self.start = self._start_index("kv_start_idx") - self._start_index("q_start_idx")

    def _start_index(self, name: str) -> int:
        """The first element of a start index; the operator reads no other."""
        values = self.call.optional(name)
        return 0 if values is None or values.size == 0 else int(values.reshape(-1)[0])

    def _from_slope(self, batch: int, head: int, s1: int, s2: int) -> Floats:
        # In mode 8 only the first sequence is cut, so the start indices do not apply to later batch
        # entries.
        start = 0 if self.allowed.mode == 8 and batch > 0 else self.start
        distance = np.abs(np.arange(s2)[None, :] - np.arange(s1)[:, None] + start).astype(
            np.float64
        )
        if self.type == 3:
            distance = np.sqrt(distance)
        bias: Floats = -self.slopes[batch, head] * distance
        return bias

    # Tensors.

    def _set_tensor(self, tensor: Array) -> None:
        self.tensor = tensor
        self.flat: Array | None = None
        self.compressed = False
        heads, batches = self.query.heads, mask_batch(self.call, tensor, self.query)
        if self.query.layout == "TND":
            if tensor.ndim == 4 and tensor.shape[2] == _COMPRESSED_ROWS:
                expected: tuple[int, ...] = (batches, heads, _COMPRESSED_ROWS, self.key.longest)
                self.compressed = True
            else:
                self._set_flat(tensor)
                return
        elif (
            tensor.ndim == 4
            and tensor.shape[2] == _COMPRESSED_ROWS
            and self.query.total > _COMPRESSED_ROWS
        ):
            expected = (batches, heads, _COMPRESSED_ROWS, self.key.total)
            self.compressed = True
        else:
            expected = (batches, heads, self.query.total, self.key.total)
        if tensor.ndim != 4 or any(
            have not in (1, want) for have, want in zip(tensor.shape, expected, strict=True)
        ):
            raise self.call.error(
                self.name,
                f"shape {list(tensor.shape)} is not {list(expected)}, nor that with axes of size 1",
            )
        if self.compressed:
            self._check_compressed()

    def _check_compressed(self) -> None:
        """Raise ReferenceInputError if a key above the diagonal is attended: only the bias up to it
        can be rebuilt."""
        if any(s1 != s2 for s1, s2 in zip(self.query.lengths, self.key.lengths, strict=True)):
            raise self.call.error(
                self.name, "a bias compressed to 1024 rows needs as many queries as keys"
            )
        allowed, longest = self.allowed, self.query.longest
        causal = allowed.given and (
            allowed.mode in (2, 3)
            or (allowed.mode == 0 and allowed.pre >= longest and allowed.next == 0)
            or (
                allowed.mode == 4
                and self.query.layout == "TND"
                and allowed.pre >= longest
                and allowed.next == 0
            )
        )
        if not causal:
            raise self.call.error(
                self.name,
                "a bias compressed to 1024 rows needs a causal atten_mask: sparse_mode "
                "2 or 3, or pre_tockens >= S1 and next_tockens 0 in mode 0 (TND also 4)",
            )

    def _set_flat(self, tensor: Array) -> None:
        """Packed batch entries back to back, each [N1,S1_b,S2_b] or [N1,S2_b]; of rank 2 or more,
        in the gradient 1."""
        backward = self.name == "pse_shift"
        heads = self.query.heads
        full = [
            heads * s1 * s2 for s1, s2 in zip(self.query.lengths, self.key.lengths, strict=True)
        ]
        rows = [heads * s2 for s2 in self.key.lengths]
        count = tensor.shape[0] if tensor.ndim else 0
        rank_fits = tensor.ndim == 1 if backward else tensor.ndim >= 2
        if not rank_fits or tensor.size != count or count not in (sum(full), sum(rows)):
            raise self.call.error(
                self.name,
                f"shape {list(tensor.shape)} is not a bias of layout TND: [B or 1, N1, 1024, maxS2], or "
                f"{sum(rows)} or {sum(full)} elements as a tensor of "
                + ("rank 1" if backward else "rank 2 or more with all of them on axis 0"),
            )
        if sum(full) == sum(rows) and full != rows:
            raise self.call.error(
                self.name, "with these lengths the bias could be one row or a matrix a batch"
            )
        self.flat_is_full = count == sum(full)
        sizes = full if self.flat_is_full else rows
        self.flat = tensor.reshape(-1)
        self.flat_starts = list(itertools.accumulate(sizes, initial=0))

    def _from_flat(self, batch: int, head: int, s1: int, s2: int) -> Floats:
        assert self.flat is not None
        size = s1 * s2 if self.flat_is_full else s2
        start = self.flat_starts[batch] + head * size
        values = self.flat[start : start + size].astype(np.float64)
        return values.reshape(s1 if self.flat_is_full else 1, s2)


def _decompress(stored: Floats, s1: int, s2: int, longest: int) -> Floats:
    """The full [S1, S2] bias from the last 1024 rows of an ALiBi bias, which is constant along
    diagonals.

    The stored row r is row longest - 1024 + r of the bias. An earlier row i is read from the stored
    row 0, at the column with the same i - j. The bias above the diagonal is unknown. It is set to
    0, and it is never attended.
    """
    stored = np.broadcast_to(stored, (_COMPRESSED_ROWS, longest))
    i = np.arange(s1)[:, None]
    j = np.arange(s2)[None, :]
    row = np.maximum(i - (longest - _COMPRESSED_ROWS), 0)
    column = longest - _COMPRESSED_ROWS + row - (i - j)
    known = j <= i
    return np.where(known, stored[row, np.where(known, column, 0)], 0.0)
