"""Dropout from a bit mask: bit 1 keeps a probability, the least significant bit comes first, there
is no padding."""

from __future__ import annotations

import itertools

import numpy as np

from fa_compiler.reference.call import Floats, OpCall
from fa_compiler.reference.layouts import Side


class Dropout:
    """The factors of dropout for the probabilities of a call: 0 or 1/keep_prob."""

    def __init__(self, call: OpCall, query: Side, key: Side) -> None:
        self.keep_prob = float(call.attrs["keep_prob"])
        if not 0.0 < self.keep_prob <= 1.0:
            raise call.error("keep_prob", f"must be in (0, 1], got {self.keep_prob}")
        # With keep_prob 1 the operator does not read the mask.
        self.active = self.keep_prob < 1.0
        if not self.active:
            return
        mask = call.optional("drop_mask")
        if mask is None:
            raise call.error(
                "drop_mask",
                "absent with keep_prob < 1: dropout drawn from seed and offset exists on "
                "one product only and is not part of this reference; give the bits",
            )
        if mask.dtype != np.uint8:
            raise call.error("drop_mask", f"dtype must be uint8 (packed bits), got {mask.dtype}")
        self.bytes = mask.reshape(-1)
        self.sizes = list(zip(query.lengths, key.lengths, strict=True))
        bits = [query.heads * s1 * s2 for s1, s2 in self.sizes]
        self.first_bit = list(itertools.accumulate(bits, initial=0))
        needed = (self.first_bit[-1] + 7) // 8
        if self.bytes.size < needed:
            raise call.error("drop_mask", f"has {self.bytes.size} bytes, {needed} are needed")

    def factors(self, batch: int, head: int) -> Floats | None:
        """The factors [S1, S2] of one batch and query head, or None if nothing is dropped."""
        if not self.active:
            return None
        s1, s2 = self.sizes[batch]
        first = self.first_bit[batch] + head * s1 * s2
        last = first + s1 * s2
        bits = np.unpackbits(self.bytes[first // 8 : (last + 7) // 8], bitorder="little")
        kept = bits[first % 8 : first % 8 + s1 * s2].reshape(s1, s2)
        return kept.astype(np.float64) / self.keep_prob
