"""The common part of FlashAttentionScore and its gradient: the inputs as [N,S,D] of each batch
entry, the scores S, the allowed set, dropout and the sink.

    A = Q K^T (+ Q_rope K_rope^T);  S = scale*(A + pse) for pse_type 1, scale*A + pse otherwise

With the extension attribute cpu_softcap, c, the scaled product x = scale*A becomes c * tanh(x / c)
before pse is added. Query head n uses key and value head n // (N1/N2).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from fa_compiler.reference.call import Bools, Floats, OpCall
from fa_compiler.reference.dropout import Dropout
from fa_compiler.reference.layouts import sides
from fa_compiler.reference.masks import AllowedSet
from fa_compiler.reference.pse import Pse
from fa_compiler.reference.softmax import capped

FLOATS = ("float16", "bfloat16", "float32", "float64")
_QUANTISED = (
    "d_scale_q",
    "d_scale_k",
    "d_scale_v",
    "d_scale_dy",
    "d_scale_o",
    "ds_scale",
    "p_scale",
)

# A bias of this size or larger acts as a mask. The sum in float32 loses digits of the score that
# are visible in the result: digits below 2^-13 at 1024, and all digits at -3.4e38. So its rounding
# is part of the operator's meaning.
_MASK_LIKE_BIAS = 1024.0


class Attention:
    """One attention problem, computed one (batch, query head) at a time."""

    def __init__(self, call: OpCall, pse_name: str) -> None:
        self.call = call
        self._check_dtypes()
        self.query_side, self.key_side = sides(call)
        self.allowed_set = AllowedSet(call, self.query_side, self.key_side)
        self.pse = Pse(call, pse_name, self.query_side, self.key_side, self.allowed_set)
        self.dropout = Dropout(call, self.query_side, self.key_side)
        self.scale = float(call.attrs["scale_value"])
        self.softcap = float(np.float32(call.attrs.get("cpu_softcap", 0.0)))
        # Biases are compared with this number, so it is rounded to float32, the type of an
        # attribute.
        self.mask_value = float(np.float32(call.attrs.get("cpu_mask_value", -np.inf)))
        self.width = self.query_side.width(call, "query")
        self.rope_width = self._rope_width()
        self.value_width = self.key_side.width(call, "value") if self.key_side.heads else self.width
        # The rope parts only widen Q and K: the sum of two products is the product of the
        # concatenations.
        self.query = self._with_rope("query")
        self.key = self._with_rope("key")
        self.value = self.key_side.split(call.tensor("value"), self.value_width)
        self.sink = self._sink()

    def heads(self) -> Iterator[tuple[int, int, int]]:
        """(batch, query head, key head) of each pair with a query and a key. The results of all
        other pairs are 0."""
        if self.width == 0 or self.key_side.heads == 0:
            return
        group = self.query_side.heads // self.key_side.heads
        for batch, (s1, s2) in enumerate(
            zip(self.query_side.lengths, self.key_side.lengths, strict=True)
        ):
            if s1 and s2:
                for head in range(self.query_side.heads):
                    yield batch, head, head // group

    def scores(self, batch: int, head: int, kv_head: int) -> Floats:
        """S [S1,S2] before masking.

        Unless the call is exact, a sum with a mask-like bias is rounded to float32, as on every
        target, and its product with the scale, too.
        """
        with np.errstate(invalid="ignore", over="ignore"):
            product: Floats = self.query[batch][head] @ self.key[batch][kv_head].T
            bias = self.pse.bias(batch, head)
            if bias is None:
                return capped(self.scale * product, self.softcap)
            if self.pse.before_scale:
                return self._rounded(self.scale * self._rounded(product + bias, bias), bias)
            return self._rounded(capped(self.scale * product, self.softcap) + bias, bias)

    def slopes_of_scores(self, batch: int, head: int, kv_head: int) -> Floats | float:
        """The derivative [S1,S2] of the scores with respect to scale*A: 1 - tanh(x / c)^2 with
        cpu_softcap, else 1."""
        if self.softcap == 0.0:
            return 1.0
        with np.errstate(invalid="ignore", over="ignore"):
            product: Floats = self.query[batch][head] @ self.key[batch][kv_head].T
            # 1 / cosh^2 keeps its digits where tanh is close to 1.
            slopes: Floats = 1.0 / np.cosh(self.scale * product / self.softcap) ** 2
            return slopes

    def masked_scores(self, batch: int, head: int) -> Floats:
        """`mask_value` plus the bias [S1,S2]: the scores of masked keys with cpu_masked_bias.

        Unless the call is exact, the sum is rounded to float32.
        """
        bias = self.pse.bias(batch, head)
        if bias is None:
            raise self.call.error("cpu_masked_bias", f"needs the input {self.pse.name}")
        lengths = self.query_side.lengths[batch], self.key_side.lengths[batch]
        with np.errstate(invalid="ignore", over="ignore"):
            factor = self.scale if self.pse.before_scale else 1.0
            total: Floats = self.mask_value + np.broadcast_to(bias * factor, lengths)
            return total if self.call.exact else total.astype(np.float32).astype(np.float64)

    def _rounded(self, total: Floats, bias: Floats) -> Floats:
        if self.call.exact:
            return total
        return np.where(
            np.abs(bias) >= _MASK_LIKE_BIAS, total.astype(np.float32).astype(np.float64), total
        )

    def allowed(self, batch: int, head: int) -> Bools:
        """The allowed set [S1,S2]."""
        return self.allowed_set.allowed(batch, head)

    def _check_dtypes(self) -> None:
        call = self.call
        dtype = call.tensor("query").dtype
        if dtype.name not in FLOATS:
            raise call.error(
                "query",
                f"dtype {dtype.name} is not part of this reference; it takes {', '.join(FLOATS)}",
            )
        for name in ("key", "value", "query_rope", "key_rope", "dy", "attention_in"):
            other = call.optional(name)
            if other is not None and other.dtype != dtype:
                raise call.error(
                    name, f"dtype {other.dtype.name} differs from the query's {dtype.name}"
                )
        for name in _QUANTISED:
            if call.optional(name) is not None:
                raise call.error(name, "quantised (FP8) attention is not part of this reference")

    def _rope_width(self) -> int:
        given = [
            name for name in ("query_rope", "key_rope") if self.call.optional(name) is not None
        ]
        if not given:
            return 0
        if len(given) == 1:
            raise self.call.error(given[0], "query_rope and key_rope come together or not at all")
        return self.query_side.width(self.call, "query_rope")

    def _with_rope(self, name: str) -> list[Floats]:
        side = self.query_side if name == "query" else self.key_side
        parts = []
        for part, width in ((name, self.width), (f"{name}_rope", self.rope_width)):
            if part == f"{name}_rope" and self.call.optional(part) is None:
                continue
            have = side.width(self.call, part)
            if have != width and side.heads:
                raise self.call.error(part, f"head size {have} differs from the query's {width}")
            parts.append(side.split(self.call.tensor(part), have))
        return [np.concatenate(batch, axis=-1) for batch in zip(*parts, strict=True)]

    def _sink(self) -> Floats | None:
        sink = self.call.optional("sink")
        if sink is None:
            return None
        if sink.shape != (self.query_side.heads,):
            raise self.call.error(
                "sink", f"shape {list(sink.shape)} is not [{self.query_side.heads}]"
            )
        return sink.astype(np.float64)
