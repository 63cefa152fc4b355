"""One call of the attention kernel on some rows and some keys of the sequence.

The ranks compute in the layout SBH, in which tokens come first: chunks of tokens are then
contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry import TensorInfo
from fa_compiler.op_registry.collectives import Chunk, keys_in_band
from fa_compiler.op_registry.geometry import UNLIMITED, Geometry, measure
from fa_compiler.parallel.communicator import Array

LARGEST = np.finfo(np.float32).max
"""softmax_sum of a row without a key; its softmax_max is the negative number."""

FREE_OF_OTHER_KEYS = ("", "zero", "nan")
"""The values of cpu_empty_rows for which the result of a row without a key does not depend on any
key."""
WITHOUT_GRADIENTS = ("", "zero")
"""The values of cpu_empty_rows for which a row without a key adds nothing to the gradients of
values."""


def without_key(total: Array) -> Array:
    """Where is softmax_sum that of a row without a key?

    softmax_max does not tell: the scores of keys may be the lowest number of float32, too, as masks
    make them. The sum of a row with keys is at most the number of keys.
    """
    return np.asarray(total == LARGEST)


def sizes_of(attrs: Mapping[str, Any], inputs: Mapping[str, Array]) -> Geometry:
    """The sizes of an attention with these attributes and inputs by name."""
    query, key, value = (TensorInfo("", inputs[name].shape) for name in ("query", "key", "value"))
    return measure(
        str(attrs["input_layout"]), int(attrs["head_num"]), query, key, value, repeats=True
    )


def tokens_first(array: Array, layout: str) -> Array:
    """A tensor of query, key or value as [S, B, heads * size]."""
    if layout == "SBH":
        return array
    if layout == "BSH":
        return np.ascontiguousarray(array.swapaxes(0, 1))
    batch, tokens = (
        (array.shape[0], array.shape[1]) if layout == "BSND" else (array.shape[0], array.shape[2])
    )
    moved = array.transpose(1, 0, 2, 3) if layout == "BSND" else array.transpose(2, 0, 1, 3)
    return np.ascontiguousarray(moved).reshape(tokens, batch, -1)


def from_tokens_first(array: Array, layout: str, heads: int) -> Array:
    """The inverse of `tokens_first`, for a tensor of this number of heads."""
    if layout == "SBH":
        return array
    if layout == "BSH":
        return np.ascontiguousarray(array.swapaxes(0, 1))
    tokens, batch, width = array.shape
    split = array.reshape(tokens, batch, heads, width // heads)
    return np.ascontiguousarray(
        split.transpose(1, 0, 2, 3) if layout == "BSND" else split.transpose(1, 2, 0, 3)
    )


@dataclass(frozen=True)
class Call:
    """The attention of one rank: its attributes, and the tensors that do not travel.

    `mask` and `bias` have the keys of the whole sequence as columns (or 1), and as rows those of
    the queries that they are used with (or 1). `pre` and `after` are the diagonals of the band,
    counted in positions of the sequence.
    """

    attrs: Mapping[str, Any]
    heads: int
    key_heads: int
    pre: int
    after: int
    mask: Array | None = None
    bias: Array | None = None
    sink: Array | None = None

    def keys_of(
        self, rows: Chunk, keys: Chunk, free: Sequence[str] = FREE_OF_OTHER_KEYS
    ) -> Chunk | None:
        """The keys of a range that the results of the rows may depend on; None if there are none.

        Rows without a key depend on keys that the band excludes, unless `free` has cpu_empty_rows.
        """
        if str(self.attrs.get("cpu_empty_rows", "")) not in free or "cpu_mask_value" in self.attrs:
            return keys
        return keys_in_band(rows, keys, self.pre, self.after)

    def keys_with_gradients(self, rows: Chunk, keys: Chunk) -> Chunk | None:
        """The keys of a range to whose gradients the rows may add anything; None if there are
        none."""
        return self.keys_of(rows, keys, WITHOUT_GRADIENTS)

    def of_heads(self, heads: slice, key_heads: slice) -> Call:
        """The same for some of the heads."""
        return replace(
            self,
            heads=heads.stop - heads.start,
            key_heads=key_heads.stop - key_heads.start,
            mask=_of_heads(self.mask, heads),
            bias=_of_heads(self.bias, heads),
            sink=None if self.sink is None else self.sink[heads],
        )

    def run(
        self,
        query: Sequence[Array],
        keys: Sequence[Array],
        rows: Chunk,
        columns: Chunk,
        first: int = 0,
        wanted: Sequence[str] = ("attention_out",),
        **changes: Any,
    ) -> dict[str, Array]:
        """The outputs of the kernel for the rows and keys of these positions.

        `query` is query and query_rope, `keys` is key, value and key_rope, all [S, B, heads * size]
        and of these rows and columns. `first` is the place of the first row among the rows of mask
        and bias. `changes` are attributes.
        """
        mask, band = self._band(rows, columns, first)
        inputs = {
            "query": query[0],
            "key": keys[0],
            "value": keys[1],
            "real_shift": _cut(self.bias, rows, columns, first),
            "atten_mask": mask,
            "sink": self.sink,
        }
        if len(query) > 1:
            inputs |= {"query_rope": query[1], "key_rope": keys[2]}
        return eager.run("FlashAttentionScore", inputs, {**self._attrs, **changes, **band}, wanted)

    def run_gradient(
        self, tensors: Mapping[str, Array], rows: Chunk, columns: Chunk, first: int = 0
    ) -> dict[str, Array]:
        """dq, dk and dv for the rows and keys of these positions.

        `tensors` are query, key, value, dy and attention_in, all [S, B, heads * size], and the
        statistics [B, N, S, 8], of these rows and columns. `first` is as in `run`.
        """
        mask, band = self._band(rows, columns, first)
        inputs = {**tensors, "pse_shift": _cut(self.bias, rows, columns, first), "atten_mask": mask}
        return eager.run(
            "FlashAttentionScoreGrad", inputs, {**self._attrs, **band}, ("dq", "dk", "dv")
        )

    @property
    def _attrs(self) -> dict[str, Any]:
        return {**self.attrs, "head_num": self.heads, "input_layout": "SBH", "sparse_mode": 0}

    def _band(self, rows: Chunk, columns: Chunk, first: int) -> tuple[Array | None, dict[str, int]]:
        """The mask of these rows and keys, and the attributes of the band."""
        shift = rows[0] - columns[0]
        pre = self.pre if self.pre >= UNLIMITED else self.pre - shift
        after = self.after if self.after >= UNLIMITED else self.after + shift
        mask = _cut(self.mask, rows, columns, first)
        banded = pre < rows[1] - rows[0] - 1 or after < columns[1] - columns[0] - 1
        # this attribute goes with a mask
        if mask is None and (banded or self.attrs.get("cpu_masked_bias")):
            mask = np.zeros((1, 1), np.bool_)
        limits = (pre, after) if banded else (UNLIMITED, UNLIMITED)
        return mask, dict(zip(("pre_tockens", "next_tockens"), limits, strict=True))


def _cut(array: Array | None, rows: Chunk, columns: Chunk, first: int) -> Array | None:
    """The part of a mask or bias for these rows and columns."""
    if array is None:
        return None
    if array.shape[-2] != 1:
        array = array[..., first : first + rows[1] - rows[0], :]
    return array if array.shape[-1] == 1 else array[..., columns[0] : columns[1]]


def _of_heads(array: Array | None, heads: slice) -> Array | None:
    return array if array is None or array.ndim < 4 or array.shape[1] == 1 else array[:, heads]
