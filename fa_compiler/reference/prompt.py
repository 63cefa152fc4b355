"""What PromptFlashAttention and FusedInferAttentionScore compute of a prompt, in float64.

    S = scale * Q K^T + pse_shift;  O = softmax(S without the excluded keys) V

    layouts        query, key and value in the first word of input_layout, the result in the second
    heads          query head n uses key head n // (num_heads / num_key_value_heads)
    lengths        batch b has actual_seq_lengths[b] rows and actual_seq_lengths_kv[b] keys from the start on; one value
                   is for all; rows behind them give 0
    sparse_mode    without a mask nothing is excluded; with one (d = key - row, off = keys - rows of the batch):
                   0 mask, and -pre <= d <= next; 1 mask; 2 d <= 0; 3 d <= off; 4 -pre <= d - off <= next
    empty rows     0 where the mode alone leaves a row without keys, or where bit 1 of inner_precise asks for it; else
                   the mean of the values, for every key has the same low score then

What is quantised, paged, packed or padded, and prefixes and inner biases, are not computed here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fa_compiler.reference.call import Array, Bools, Call, Floats
from fa_compiler.reference.softmax import softmax, weighted_sum

LAYOUTS = ("BSH", "BSND", "BNSD")
_HEADS_FIRST = {"BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3), "NBSD": (1, 0, 2, 3)}
ZERO_ROWS = 2
"""The bit of inner_precise that asks for 0 in rows without a key."""


@dataclass(frozen=True)
class Rows:
    """The result of one batch and head: [S1, Dv], and the logarithm of the sum of exponentials, +inf of empty rows."""

    out: Floats
    lse: Floats


class Prompt:
    """One call, computed one (batch, query head) at a time. `scale` is the attribute's name."""

    def __init__(self, call: Call, scale: str, not_computed: tuple[str, ...]) -> None:
        self.call = call
        for name in not_computed:
            if call.inputs.get(name) is not None:
                raise call.error(name, "this reference computes no call with it")
        given, _, wanted = str(call.attrs["input_layout"]).partition("_")
        self.layout, self.out_layout = given, wanted or given
        if given not in LAYOUTS or self.out_layout not in (*LAYOUTS, "NBSD"):
            raise call.error(
                "input_layout", f"this reference knows {', '.join(LAYOUTS)}, got {call.attrs['input_layout']}"
            )
        self.scale = float(call.attrs[scale])
        self.heads = int(call.attrs["num_heads"])
        self.kv_heads = int(call.attrs["num_key_value_heads"]) or self.heads
        if self.heads <= 0 or self.heads % self.kv_heads:
            raise call.error("num_key_value_heads", f"{self.kv_heads} does not divide the {self.heads} heads of query")
        self.query = self._split("query", self._one("query"), self.heads)
        self.key = self._split("key", self._one("key"), self.kv_heads)
        self.value = self._split("value", self._one("value"), self.kv_heads)
        batch, _, self.s1, _ = self.query.shape
        self.s2 = self.key.shape[2]
        self.rows = self._lengths("actual_seq_lengths", batch, self.s1)
        self.keys = self._lengths("actual_seq_lengths_kv", batch, self.s2)
        self.mode = int(call.attrs["sparse_mode"])
        self.mask = self._mask()
        self.bias = self._bias(batch)

    def compute(self, sink: Floats | None = None, one_row_mode: bool = False) -> tuple[Floats, Floats]:
        """attention_out in its layout, and the statistics [B,N1,S1,1]."""
        batch, heads, s1, _ = self.query.shape
        out = np.zeros((batch, heads, s1, self.value.shape[3]))
        lse = np.full((batch, heads, s1, 1), np.inf)
        group = self.heads // self.kv_heads
        for b in range(batch):
            allowed, structural = self._allowed(b, one_row_mode)
            for head in range(heads):
                own = None if sink is None else float(sink[head])
                rows = self._head(b, head, head // group, allowed, structural, own)
                out[b, head, : self.rows[b]] = rows.out
                lse[b, head, : self.rows[b], 0] = rows.lse
        return self._join(out), lse

    def _head(self, b: int, head: int, kv_head: int, allowed: Bools, structural: Bools, sink: float | None) -> Rows:
        rows, keys = self.rows[b], self.keys[b]
        value = self.value[b, kv_head, :keys]
        if not keys:
            return Rows(np.zeros((rows, value.shape[1])), np.full(rows, np.inf))
        scores = self.scale * (self.query[b, head, :rows] @ self.key[b, kv_head, :keys].T)
        if self.bias is not None:
            scores = scores + self.bias[b if len(self.bias) > 1 else 0, head, :rows, :keys]
        result = softmax(scores, allowed, sink, "mean")
        out = weighted_sum(result.probabilities, value, result.read)
        empty = ~allowed.any(axis=1)
        if int(self.call.attrs["inner_precise"]) & ZERO_ROWS:
            out[empty] = 0.0
        out[~structural.any(axis=1)] = 0.0
        return Rows(out, np.where(empty, np.inf, result.max + np.log(result.sum)))

    def _allowed(self, b: int, one_row_mode: bool) -> tuple[Bools, Bools]:
        """What may be attended, [rows, keys] of a batch, and what the mode alone would allow."""
        rows, keys = self.rows[b], self.keys[b]
        every = np.ones((rows, keys), np.bool_)
        if self.mask is None:
            return every, every
        own = (
            self.mask
            if self.mask.ndim == 2
            else self.mask[b if len(self.mask) > 1 else 0].reshape(self.mask.shape[-2:])
        )
        if one_row_mode:
            return ~np.broadcast_to(own[:, :keys], (rows, keys)), every
        distance = np.arange(keys)[None, :] - np.arange(rows)[:, None]
        pre, following = int(self.call.attrs["pre_tokens"]), int(self.call.attrs["next_tokens"])
        offset = keys - rows
        structure = {
            0: (distance >= -pre) & (distance <= following),
            1: every,
            2: distance <= 0,
            3: distance <= offset,
            4: (distance - offset >= -pre) & (distance - offset <= following),
        }[self.mode]
        return (structure & ~own[:rows, :keys] if self.mode in (0, 1) else structure), structure

    def _mask(self) -> Bools | None:
        """The mask as [S1,S2] or [1|B,...,S1,S2], True where a key is excluded."""
        given = self.call.optional("atten_mask")
        if given is None:
            return None
        if self.mode not in range(5):
            raise self.call.error("sparse_mode", f"{self.mode} is not one of 0 to 4")
        if given.dtype not in (np.bool_, np.int8, np.uint8):
            raise self.call.error("atten_mask", f"dtype must be bool, int8 or uint8, got {given.dtype}")
        mask: Bools = given != 0
        if self.mode in (2, 3, 4):
            triangle = np.triu(np.ones((2048, 2048), np.bool_), 1)
            if (
                mask.shape[-2:] != triangle.shape
                or mask.size != triangle.size
                or (mask.reshape(triangle.shape) ^ triangle).any()
            ):
                raise self.call.error("atten_mask", f"sparse_mode {self.mode} takes [2048,2048], 1 above the diagonal")
            return mask
        if self.s1 == 1 and mask.ndim in (2, 3) and mask.shape[0] == len(self.query):
            mask = mask.reshape(mask.shape[0], 1, mask.shape[-1])
        lead = mask.shape[:-2]
        fits = (
            mask.ndim in (2, 3, 4)
            and all(size == 1 for size in lead[1:])
            and lead[:1] in ((), (1,), (len(self.query),))
        )
        if not fits or mask.shape[-2] < self.s1 or mask.shape[-1] < self.s2:
            raise self.call.error("atten_mask", f"shape {list(given.shape)} does not cover {[self.s1, self.s2]}")
        return mask

    def _bias(self, batch: int) -> Floats | None:
        given = self.call.optional("pse_shift")
        if given is None:
            return None
        if given.ndim != 4 or given.shape[0] not in (1, batch) or given.shape[1] != self.heads:
            raise self.call.error("pse_shift", f"shape {list(given.shape)} is not [1|B,N1,S1,S2]")
        if given.shape[2] < self.s1 or given.shape[3] < self.s2:
            raise self.call.error("pse_shift", f"shape {list(given.shape)} does not cover {[self.s1, self.s2]}")
        return given.astype(np.float64)

    def _lengths(self, name: str, batch: int, whole: int) -> list[int]:
        given = self.call.optional(name)
        if given is None:
            return [whole] * batch
        numbers = [int(number) for number in given.reshape(-1)]
        numbers = numbers * batch if len(numbers) == 1 else numbers[:batch]
        if len(numbers) < batch or not all(0 <= number <= whole for number in numbers):
            raise self.call.error(name, f"{numbers} are not {batch} lengths from 0 to {whole}")
        return numbers

    def _one(self, name: str) -> Array:
        given = self.call.inputs.get(name)
        if isinstance(given, list | tuple):
            if len(given) != 1:
                raise self.call.error(name, "this reference computes no lists of tensors")
            given = given[0]
        if not isinstance(given, np.ndarray):
            raise self.call.error(name, "this input is needed and absent")
        if given.dtype.name not in ("float16", "bfloat16", "float32", "float64"):
            raise self.call.error(name, f"this reference computes floats, got {given.dtype}")
        return given.astype(np.float64)

    def _split(self, name: str, array: Array, heads: int) -> Floats:
        """[B,N,S,D]."""
        if array.ndim != len(self.layout):
            raise self.call.error(name, f"rank {array.ndim} is not that of {self.layout}")
        if self.layout == "BSH":
            if array.shape[2] % heads:
                raise self.call.error(name, f"the width {array.shape[2]} is no multiple of {heads} heads")
            array = array.reshape(*array.shape[:2], heads, array.shape[2] // heads)
        split: Floats = array.transpose(_HEADS_FIRST["BNSD" if self.layout == "BNSD" else "BSND"])
        if split.shape[1] != heads:
            raise self.call.error(name, f"has {split.shape[1]} heads, expected {heads}")
        return split

    def _join(self, out: Floats) -> Floats:
        if self.out_layout == "BSH":
            batch, heads, rows, width = out.shape
            return out.transpose(0, 2, 1, 3).reshape(batch, rows, heads * width)
        return out.transpose(_HEADS_FIRST[self.out_layout])
