"""PromptFlashAttention and FusedInferAttentionScore in float64.

S = scale * (Q K^T + Q_rope K_rope^T) + bias;  O = softmax(S without the excluded keys) V

layouts        the first word of input_layout is the layout of query, key and value, the second that
               of the result; NBSD is [N,B,S,D]
heads          query head n uses key head n // (num_heads / num_key_value_heads)
lengths        batch entry b has actual_seq_lengths[b] rows; a single value is for all entries. In
               TND and NTD the lengths are cumulative, and their number is the batch. All other rows
               give 0. Keys: prompt_keys.py
padding        with query_padding_size, the rows of an entry end that many positions before the end
bias           pse_shift (pse_type 0), -slope * distance (2) or -slope * sqrt(distance) (3), with
               distance = |j - i + kv_start - q_start|
sparse_mode    without a mask no key is excluded. With a mask, d = key - row and off = keys - rows
               of the entry (a prefix included), a key is allowed by
                   0  the mask and -pre <= d <= next (with padding: the mask alone)
                   1  the mask
                   2  d <= 0
                   3  d <= off
                   4  -pre <= d - off <= next
               The columns of masks and biases are positions in the storage of the keys, the rows
               are positions in query. In packed layouts both begin at the batch entry
one row        FusedInferAttentionScore with one row of query in BSH, BSND or BNSD is computed as a
               decoding step if value is as wide as key and there is no rope part: the mask excludes
               keys, the mode has no effect
empty rows     a row without keys is 0 if the mode alone excludes all keys, if bit 1 of
               inner_precise is set, or if there is a sink; otherwise it is the mean of the values,
               because all keys have the same low score. In a call with one row of query, that bit
               has an effect for some head sizes only
INT8           with an INT8 query S = scale * ((Q K^T) * dequant_scale1) + bias. exp(S - max) is
               replaced by round(exp(S - max) * quant_scale1), saturated, and O = (P V) *
               dequant_scale2 / sum. An INT8 result is round(O * quant_scale2 + quant_offset2), with
               ties to even, saturated. Rows that are not computed are 0
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fa_compiler.reference.call import Array, Bools, Floats, OpCall
from fa_compiler.reference.prompt_keys import (
    Keys,
    Sizes,
    Span,
    cumulative,
    lengths,
    split,
    typed,
    vector,
)
from fa_compiler.reference.quantised import FLOATS, Integers, channels, saturated
from fa_compiler.reference.softmax import softmax, weighted_sum

ZERO_ROWS = 2
"""The bit of inner_precise with which rows without a key are 0."""

ONE_ROW_ZERO_SIZES = ((512, 64, 512), (128, 0, 128), (64, 0, 64), (192, 64, 128), (128, 64, 128))
"""The head sizes of query, its rope part and value for which this bit has an effect in a call with
one row of query."""

_MASKED = -1e12
"""The score of a masked key with an INT8 query."""


class Operator(NamedTuple):
    """The differences of the two operators: the layouts, the name of the scale attribute, the names
    of the inputs with the INT8 scales, and whether a call with one row is a decoding step (`fused`:
    FusedInferAttentionScore)."""

    layouts: tuple[str, ...]
    scale: str
    int8_scales: tuple[str, str, str]
    fused: bool


class Results(NamedTuple):
    """attention_out in its layout, its type, and softmax_lse.

    softmax_lse is the logarithm of the sum of the exponentials, [B,N1,S1,1] or, in packed layouts,
    [T,N1,1]. It is +inf for rows without keys.
    """

    out: Floats
    dtype: np.dtype[np.generic]
    lse: Floats


class Stored(NamedTuple):
    """The keys, the values and the rope part of the keys of a batch entry, each [N2, L, D]."""

    key: Floats
    value: Floats
    rope: Floats | None


class HeadRows(NamedTuple):
    """The results [S1, Dv] and softmax_lse [S1] of one batch entry and head."""

    out: Floats
    lse: Floats


class Prompt:
    """One call, computed one (batch, query head) at a time. Raises ReferenceInputError for invalid
    inputs."""

    def __init__(self, call: OpCall, operator: Operator) -> None:
        self.call, self.operator = call, operator
        given, _, wanted = str(call.attrs["input_layout"]).partition("_")
        if call.attrs["input_layout"] not in operator.layouts:
            known = ", ".join(operator.layouts)
            raise call.error(
                "input_layout", f"must be one of {known}, got {call.attrs['input_layout']}"
            )
        self.layout, self.out_layout = given, wanted or given
        self.packed = "T" in given
        self.scale = float(call.attrs[operator.scale])
        self.heads = int(call.attrs["num_heads"])
        key_heads = int(call.attrs["num_key_value_heads"]) or self.heads
        if self.heads <= 0 or key_heads <= 0 or self.heads % key_heads:
            raise call.error(
                "num_key_value_heads",
                f"{key_heads} does not divide the {self.heads} heads of query",
            )
        query = call.tensor("query")
        if query.dtype.name not in (*FLOATS, "int8"):
            raise call.error(
                "query", f"dtype {query.dtype.name} is not one of {', '.join(FLOATS)}, int8"
            )
        self.query = split(call, "query", query, given, self.heads).astype(np.float64)
        self.rows = self._rows()
        sizes = Sizes(given, key_heads, self.query.shape[3], len(self.rows), query.dtype)
        self.keys = Keys(call, sizes)
        self.group = self.heads // key_heads
        self.rope = self._rope(key_heads)
        same = self.keys.widths["value"] == sizes.width and self.rope is None
        self.one_row = (
            operator.fused
            and not self.packed
            and given != "NSD"
            and self.query.shape[2] == 1
            and same
        )
        self.mode = int(call.attrs["sparse_mode"])
        self.mask = self._mask()
        self.bias = self._bias()
        self.slopes = self._slopes()
        self.sink = self._sink()
        self.integers = self._integers()
        self._check_results()

    def compute(self) -> Results:
        """The results of the call."""
        width = self.keys.widths["value"]
        out = np.zeros((*self.query.shape[:3], width))
        lse = np.full(self.query.shape[:3], np.inf)
        for entry, (first, count) in enumerate(self.rows):
            if not count or not self.keys.count(entry) or not self.query.shape[3]:
                continue
            allowed, structural = self._allowed(entry)
            rope = None if self.rope is None else self.keys.fetch("key_rope", entry)
            stored = Stored(self.keys.fetch("key", entry), self.keys.fetch("value", entry), rope)
            batch = 0 if self.packed else entry
            for head in range(self.heads):
                rows = self._head(entry, head, stored, allowed, structural)
                quantised = self._quantised(rows.out, head)
                quantised[~structural.any(axis=1)] = 0.0
                out[batch, head, first : first + count] = quantised
                lse[batch, head, first : first + count] = rows.lse
        statistics = lse[0].T[..., None] if self.packed else lse[..., None]
        return Results(self._join(out), self._type(), statistics)

    def _head(
        self, entry: int, head: int, stored: Stored, allowed: Bools, structural: Bools
    ) -> HeadRows:
        scores, value = self._scores(entry, head, stored), stored.value[head // self.group]
        empty = ~allowed.any(axis=1)
        if self.integers is not None:
            out, lse = _by_integers(scores, allowed, value, self.integers)
        else:
            result = softmax(
                scores, allowed, None if self.sink is None else float(self.sink[head]), "mean"
            )
            out = weighted_sum(result.probabilities, value, result.read)
            lse = result.max + np.log(result.sum)
        if self._zero_rows() or self.sink is not None:
            out[empty] = 0.0
        out[~structural.any(axis=1)] = 0.0
        return HeadRows(out, np.where(empty, np.inf, lse))

    def _scores(self, entry: int, head: int, stored: Stored) -> Floats:
        first, count = self.rows[entry]
        batch, key_head = 0 if self.packed else entry, head // self.group
        with np.errstate(invalid="ignore", over="ignore"):
            scores = self.query[batch, head, first : first + count] @ stored.key[key_head].T
            if self.rope is not None and stored.rope is not None:
                scores = (
                    scores + self.rope[batch, head, first : first + count] @ stored.rope[key_head].T
                )
            if self.integers is not None:
                scores = scores * self.integers.dequant_scale1
            scores = self.scale * scores
            if self.bias is not None:
                row, column = self._origin(entry)
                own = self.bias[entry if len(self.bias) > 1 else 0, head]
                scores = scores + own[row : row + count, column : column + scores.shape[1]]
            if self.slopes is not None:
                scores = scores + self._slope(entry, head) * self._distances(scores.shape)
        result: Floats = scores
        return result

    def _allowed(self, entry: int) -> tuple[Bools, Bools]:
        """The allowed keys [rows, keys] of a batch entry, and the keys that the mode alone
        allows."""
        rows, keys = self.rows[entry].size, self.keys.count(entry)
        every = np.ones((rows, keys), np.bool_)
        if self.mask is None:
            return every, every
        distance = np.arange(keys)[None, :] - np.arange(rows)[:, None]
        pre, following = int(self.call.attrs["pre_tokens"]), int(self.call.attrs["next_tokens"])
        offset, mode = keys - rows, 1 if self.one_row else self.mode
        if mode == 0 and self._padded():
            mode = 1
        structure = {
            0: (distance >= -pre) & (distance <= following),
            1: every,
            2: distance <= 0,
            3: distance <= offset,
            4: (distance - offset >= -pre) & (distance - offset <= following),
        }[mode]
        if mode > 1:
            return structure, structure
        row, column = self._origin(entry)
        own = self.mask[entry if len(self.mask) > 1 else 0]
        return structure & ~own[row : row + rows, column : column + keys], structure

    def _origin(self, entry: int) -> tuple[int, int]:
        """The row and the column of a mask or bias for the first row and the first key of an
        entry."""
        return 0 if self.packed else self.rows[entry].first, self.keys.column(entry)

    def _padded(self) -> bool:
        return any(
            self.call.optional(name) is not None
            for name in ("query_padding_size", "kv_padding_size")
        )

    def _zero_rows(self) -> bool:
        if not int(self.call.attrs["inner_precise"]) & ZERO_ROWS:
            return False
        sizes = (
            self.query.shape[3],
            0 if self.rope is None else self.rope.shape[3],
            self.keys.widths["value"],
        )
        one = self.operator.fused and not self.packed and self.query.shape[2] == 1
        return not one or sizes in ONE_ROW_ZERO_SIZES

    def _rows(self) -> list[Span]:
        call, name, (batch, _, s1, _) = self.call, "actual_seq_lengths", self.query.shape
        padding = vector(call, "query_padding_size")
        if self.packed:
            if padding is not None:
                raise call.error(
                    "query_padding_size", f"given with the packed layout {self.layout}"
                )
            return cumulative(call, name, s1)
        counts = lengths(call, name, [s1] * batch)
        if padding is None or s1 == 1:
            return [Span(0, count) for count in counts]
        if padding.shape != (1,) or call.optional(name) is None:
            raise call.error(
                "query_padding_size", "needs the shape [1] and actual_seq_lengths beside it"
            )
        padding_size = max(0, int(padding[0]))
        if any(s1 - padding_size - count < 0 for count in counts):
            raise call.error(
                "query_padding_size",
                f"{padding_size} places and {max(counts)} rows are more than {s1}",
            )
        return [Span(s1 - padding_size - count, count) for count in counts]

    def _rope(self, key_heads: int) -> Floats | None:
        """query_rope [B,N1,S1,Dr]."""
        call = self.call
        query, key = call.optional("query_rope"), call.optional("key_rope")
        if (query is None) != (key is None):
            raise call.error(
                "query_rope" if query is None else "key_rope",
                "query_rope and key_rope: both or none",
            )
        if query is None or key is None:
            return None
        for name in (
            "query_padding_size",
            "kv_padding_size",
            "pse_shift",
            "key_shared_prefix",
            "quant_scale2",
        ):
            if call.optional(name) is not None:
                raise call.error(name, "given beside query_rope, expected none")
        for name, own in (("query_rope", query), ("key_rope", key)):
            if own.dtype != call.tensor("query").dtype or own.dtype == np.int8:
                raise call.error(
                    name, f"dtype {own.dtype} is not the floating-point dtype of query"
                )
        if self.keys.listed or self.keys.antiquant:
            raise call.error("key_rope", "given with a list or INT8 keys, expected none")
        rope = split(call, "query_rope", query, self.layout, self.heads).astype(np.float64)
        if rope.shape[:3] != self.query.shape[:3]:
            raise call.error(
                "query_rope",
                f"shape {list(query.shape)} differs from query in more than its last size",
            )
        self._check_key_rope(key, key_heads, rope.shape[3])
        return rope

    def _check_key_rope(self, key: Array, key_heads: int, width: int) -> None:
        if self.keys.table is not None:
            found = self.keys.page_width("key_rope", key)
            like = len(key) == len(self.keys.tensors["key"][0])
        else:
            shape = split(self.call, "key_rope", key, self.layout, key_heads).shape
            own = split(self.call, "key", self.keys.tensors["key"][0], self.layout, key_heads).shape
            found, like = shape[3], shape[:3] == own[:3]
        if found != width or not like:
            raise self.call.error(
                "key_rope", f"shape {list(key.shape)} is not that of key with the size {width}"
            )

    def _mask(self) -> Bools | None:
        """The mask, True for an excluded key: [1 or B,S1,S2], or [1 or B,1,S2] in a call with one
        row of query."""
        given = self.call.optional("atten_mask")
        if given is None:
            return None
        if self.mode not in range(5):
            raise self.call.error("sparse_mode", f"{self.mode} is not one of 0 to 4")
        if given.dtype not in (np.bool_, np.int8, np.uint8):
            raise self.call.error(
                "atten_mask", f"dtype must be bool, int8 or uint8, got {given.dtype}"
            )
        mask: Bools = given != 0
        if self.one_row:
            return self._row_mask(mask)
        return self._compressed_mask(mask) if self.mode in (2, 3, 4) else self._full_mask(mask)

    def _compressed_mask(self, mask: Bools) -> Bools:
        """The mask of the compressed modes: [2048,2048], True above the diagonal."""
        compressed = np.triu(np.ones((2048, 2048), np.bool_), 1)
        has_size = mask.shape[-2:] == compressed.shape and mask.size == compressed.size
        if not has_size or (mask.reshape(compressed.shape) ^ compressed).any():
            raise self.call.error(
                "atten_mask", f"sparse_mode {self.mode} takes [2048,2048], 1 above the diagonal"
            )
        return mask.reshape(1, *compressed.shape)

    def _full_mask(self, mask: Bools) -> Bools:
        """A mask [S1,S2], [1 or B,S1,S2] or [1 or B,1,S1,S2], which covers the scores."""
        full = mask
        if mask.ndim == 2:
            full = mask[None]
        if mask.ndim == 4 and mask.shape[1] == 1:
            full = mask[:, 0]
        rows, columns = self._covered()
        is_valid = full.ndim == 3 and full.shape[0] in (1, len(self.rows))
        if not is_valid or full.shape[1] < rows or full.shape[2] < columns:
            raise self.call.error(
                "atten_mask", f"shape {list(mask.shape)} does not cover {[rows, columns]}"
            )
        return full

    def _row_mask(self, mask: Bools) -> Bools:
        batch, columns = len(self.rows), self.keys.columns
        shapes = ((1,), (batch,))
        if (
            mask.ndim not in (2, 3, 4)
            or mask.shape[:1] not in shapes
            or any(size != 1 for size in mask.shape[1:-1])
        ):
            what = f"shape {list(mask.shape)} is not [{batch},keys], with ones between"
            raise self.call.error(
                "atten_mask",
                f"{what}: with one row of query every sparse_mode takes a mask of keys",
            )
        if mask.shape[-1] < columns:
            raise self.call.error(
                "atten_mask", f"shape {list(mask.shape)} does not cover {[1, columns]}"
            )
        return mask.reshape(mask.shape[0], 1, mask.shape[-1])

    def _covered(self) -> tuple[int, int]:
        """The least numbers of rows and columns of a mask or bias for all scores."""
        rows = (
            max((size for _, size in self.rows), default=0) if self.packed else self.query.shape[2]
        )
        return rows, self.keys.columns

    def _pse_type(self) -> int:
        kind = int(self.call.attrs.get("pse_type", 0))
        if kind not in (0, 2, 3):
            raise self.call.error("pse_type", f"{kind} is not one of 0, 2, 3")
        return kind

    def _bias(self) -> Floats | None:
        given = typed(self.call, "pse_shift", *FLOATS)
        if given is None or self._pse_type():
            return None
        if self.packed:
            raise self.call.error(
                "pse_shift", f"given with the packed layout {self.layout}, expected none"
            )
        rows, columns = self._covered()
        if (
            given.ndim != 4
            or given.shape[0] not in (1, len(self.rows))
            or given.shape[1] != self.heads
        ):
            raise self.call.error("pse_shift", f"shape {list(given.shape)} is not [1|B,N1,S1,S2]")
        if given.shape[2] < rows or given.shape[3] < columns:
            raise self.call.error(
                "pse_shift", f"shape {list(given.shape)} does not cover {[rows, columns]}"
            )
        return given.astype(np.float64)

    def _slopes(self) -> Floats | None:
        """The slopes, [1 or B, N1]."""
        kind = self._pse_type()
        if not kind:
            return None
        given = self.call.optional("pse_shift")
        if given is None or given.shape not in ((self.heads,), (len(self.rows), self.heads)):
            found = "absent" if given is None else f"of the shape {list(given.shape)}"
            raise self.call.error(
                "pse_shift", f"{found}; pse_type {kind} takes slopes [N1] or [B,N1]"
            )
        if given.dtype.name not in ("float32", "float64"):
            raise self.call.error("pse_shift", f"dtype {given.dtype} of slopes is not float32")
        starts = [vector(self.call, name) for name in ("q_start_idx", "kv_start_idx")]
        query, key = (0 if start is None else int(start[0]) for start in starts)
        self.start = key - query
        if not -(2**31) <= self.start < 2**31:
            raise self.call.error(
                "kv_start_idx", f"{key} less q_start_idx, {query}, needs more than 32 bits"
            )
        return given.astype(np.float64).reshape(-1, self.heads)

    def _slope(self, entry: int, head: int) -> float:
        assert self.slopes is not None
        return -float(self.slopes[entry if len(self.slopes) > 1 else 0, head])

    def _distances(self, shape: tuple[int, ...]) -> Floats:
        places = np.arange(shape[1])[None, :] - np.arange(shape[0])[:, None] + self.start
        distance: Floats = np.abs(places).astype(np.float64)
        return np.sqrt(distance) if self._pse_type() == 3 else distance

    def _sink(self) -> Floats | None:
        sink = typed(self.call, "learnable_sink", *FLOATS)
        if sink is None:
            return None
        if sink.shape != (self.heads,):
            raise self.call.error(
                "learnable_sink", f"shape {list(sink.shape)} is not [{self.heads}]"
            )
        return sink.astype(np.float64)

    def _integers(self) -> Integers | None:
        """The scales of an INT8 query, or None. An INT8 query cannot be combined with many other
        features."""
        call = self.call
        if call.tensor("query").dtype != np.int8:
            for name in self.operator.int8_scales:
                if call.optional(name) is not None:
                    raise call.error(name, "given beside a query of floats, expected none")
            return None
        if self.operator.fused and not self.packed and self.query.shape[2] == 1:
            raise call.error("query", "an INT8 query has more than one row")
        if (
            self.packed
            or self.sink is not None
            or self.slopes is not None
            or call.attrs.get("softmax_lse_flag")
        ):
            raise call.error(
                "query", "an INT8 query has no packed layout, sink, slopes and softmax_lse"
            )
        if self.keys.widths["value"] != self.query.shape[3]:
            raise call.error(
                "value",
                f"has the head size {self.keys.widths['value']}, expected that of an INT8 query",
            )
        return Integers(call, self.operator.int8_scales)

    def _check_results(self) -> None:
        """Check quant_scale2 and quant_offset2. With them, no row may be without keys."""
        call, width = self.call, self.keys.widths["value"]
        self.quant = tuple(
            channels(call, name, self.heads, width) for name in ("quant_scale2", "quant_offset2")
        )
        scale, offset = self.quant
        if scale is None:
            if offset is not None:
                raise call.error("quant_scale2", "absent beside quant_offset2")
            return
        if offset is not None and offset.shape != scale.shape:
            raise call.error("quant_offset2", "has not as many numbers as quant_scale2")
        if self.packed or self.keys.listed:
            raise call.error("quant_scale2", "given with a packed layout or a list, expected none")
        if scale.size > 1 and (self._padded() or call.attrs.get("softmax_lse_flag")):
            raise call.error("quant_scale2", "given for channels beside padding or softmax_lse")
        if offset is not None or not self.operator.fused:
            self._check_rows()

    def _check_rows(self) -> None:
        """Every row has a key."""
        for entry, (_, count) in enumerate(self.rows):
            if count and self.keys.count(entry) and not self._allowed(entry)[1].any(axis=1).all():
                problem = f"{self.mode} leaves rows without a key, which INT8 results do not allow"
                raise self.call.error("sparse_mode", problem)

    def _quantised(self, out: Floats, head: int) -> Floats:
        scale, offset = self.quant
        if scale is None:
            return out
        result: Floats = out * scale[head if len(scale) > 1 else 0]
        if offset is not None:
            result = result + offset[head if len(offset) > 1 else 0]
        return result if self.call.exact else saturated(result)

    def _type(self) -> np.dtype[np.generic]:
        if self.quant[0] is not None:
            return np.dtype(np.int8)
        query = self.call.tensor("query").dtype
        return np.dtype(np.float16) if query == np.int8 else query

    def _join(self, out: Floats) -> Floats:
        """A tensor [B,N1,S1,Dv] in the layout of the result."""
        batch, heads, rows, width = out.shape
        joined: Mapping[str, Floats] = {
            "BSH": out.transpose(0, 2, 1, 3).reshape(batch, rows, heads * width),
            "BSND": out.transpose(0, 2, 1, 3),
            "BNSD": out,
            "NBSD": out.transpose(1, 0, 2, 3),
        }
        if self.out_layout in joined:
            return joined[self.out_layout]
        packed: Floats = out[0].transpose(1, 0, 2) if self.out_layout == "TND" else out[0]
        return packed


def _by_integers(
    scores: Floats, allowed: Bools, value: Floats, integers: Integers
) -> tuple[Floats, Floats]:
    """Results [S1,Dv] and softmax_lse [S1] of rows whose probabilities are rounded to INT8."""
    scores = np.where(allowed, scores, _MASKED)
    top = scores.max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
    rounded = integers.rounded(weights)
    out = weighted_sum(rounded, value, allowed | (rounded != 0))
    return out * integers.dequant_scale2 / total, (top + np.log(total))[:, 0]
