"""The measured problems, the amount of work in each, and the share of the limit that it should reach.

This file uses only the standard library, because the workers of other interpreters import it, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "decode", "backward", "both"]
Mask = Literal["none", "causal", "window", "pad", "bias"]
Dtype = Literal["float32", "float16", "bfloat16"]

PRODUCTS = {"forward": 2, "decode": 2, "backward": 5, "both": 7}
"""The number of matrix products over all pairs of a row and a key. The backward part recomputes the scores, as in
FlashAttention; an unfused backward part that keeps the probabilities needs 4 products."""

EXPONENTIALS = {"forward": 1, "decode": 1, "backward": 1, "both": 2}


@dataclass(frozen=True)
class Case:
    """One problem. Query is [batch, rows, heads * size], key and value are [batch, keys, kv_heads * size]. In `decode`,
    key and value are a cache [batch, kv_heads, keys, size] in memory, not in the processor's caches.

    `window` is the number of keys of a sliding window, including the row's own. `pad` masks the last eighth of the
    keys, and `bias` adds a tensor [1, heads, rows, keys] to the scores.
    """

    name: str
    kind: Kind
    batch: int
    heads: int
    kv_heads: int
    rows: int
    keys: int
    size: int
    dtype: Dtype = "float32"
    mask: Mask = "none"
    window: int = 0

    @property
    def pairs(self) -> int:
        """The number of needed pairs of a row and a key. Padded keys count, because a float mask may hold any
        number."""
        one = self.rows * self.keys
        if self.mask == "causal":
            one = sum(min(self.keys, row + 1 + self.keys - self.rows) for row in range(self.rows))
        elif self.mask == "window":
            one = sum(min(row + 1, self.window) for row in range(self.rows))
        return self.batch * self.heads * one

    @property
    def flops(self) -> float:
        """The number of multiplications and additions in the matrix products."""
        return 2.0 * PRODUCTS[self.kind] * self.size * self.pairs

    @property
    def exponentials(self) -> int:
        """The number of exponentials: one for each pair, each time that the probabilities are computed."""
        return EXPONENTIALS[self.kind] * self.pairs

    @property
    def cache_bytes(self) -> int:
        """The bytes of key and value."""
        return 2 * self.batch * self.kv_heads * self.keys * self.size * (4 if self.dtype == "float32" else 2)

    @property
    def moved_bytes(self) -> int:
        """The bytes of operands and results, each once."""
        rows = self.batch * self.rows * self.heads * self.size * (4 if self.dtype == "float32" else 2)
        keys = self.cache_bytes
        return {"forward": 2 * rows + keys, "decode": 2 * rows + keys, "backward": 4 * rows + 2 * keys,
                "both": 4 * rows + 2 * keys}[self.kind]  # fmt: skip

    @property
    def score_bytes(self) -> int:
        """The bytes of a float32 tensor of all scores, which most peers make."""
        return 4 * self.batch * self.heads * self.rows * self.keys

    @property
    def gradient(self) -> bool:
        return self.kind in ("backward", "both")

    @property
    def shape(self) -> str:
        """The sizes as a short text for the tables."""
        heads = f"{self.heads}" if self.heads == self.kv_heads else f"{self.heads}/{self.kv_heads}"
        mask = {"none": "", "window": f", window of {self.window}"}.get(self.mask, f", {self.mask}")
        return f"{self.batch} x {heads} heads, {self.rows} x {self.keys}, size {self.size}{mask}"

    @property
    def aim(self) -> int | None:
        """The aim in percent of the limit; None for a small case, in which the start of a node takes most of the
        time."""
        if self.name == "small":
            return None
        narrow = self.dtype != "float32"
        if self.kind == "decode":
            return 75 if narrow else 85
        if self.gradient:
            return 50 if narrow else 75
        if self.mask == "window":
            return 70
        dense, causal = {"float32": (85, 80), "float16": (80, 75), "bfloat16": (70, 65)}[self.dtype]
        return causal if self.mask == "causal" else dense


def _forward() -> list[Case]:
    return [
        Case("small", "forward", 1, 12, 12, 64, 64, 64),
        Case("bert", "forward", 1, 12, 12, 512, 512, 64),
        Case("bert-pad", "forward", 1, 12, 12, 512, 512, 64, mask="pad"),
        Case("t5-bias", "forward", 1, 12, 12, 512, 512, 64, mask="bias"),
        Case("vit", "forward", 8, 12, 12, 197, 197, 64),
        Case("whisper-cross", "forward", 1, 20, 20, 448, 1500, 64),
        Case("gpt2", "forward", 1, 12, 12, 1024, 1024, 64, mask="causal"),
        Case("llama-prefill", "forward", 1, 32, 8, 2048, 2048, 128, mask="causal"),
        Case("long", "forward", 1, 8, 8, 8192, 8192, 64),
        Case("long-causal", "forward", 1, 8, 8, 8192, 8192, 64, mask="causal"),
        Case("sliding", "forward", 1, 8, 8, 8192, 8192, 128, mask="window", window=512),
        Case("bert-bf16", "forward", 1, 12, 12, 512, 512, 64, "bfloat16"),
        Case("llama-prefill-bf16", "forward", 1, 32, 8, 2048, 2048, 128, "bfloat16", "causal"),
        Case("bert-f16", "forward", 1, 12, 12, 512, 512, 64, "float16"),
        Case("llama-prefill-f16", "forward", 1, 32, 8, 2048, 2048, 128, "float16", "causal"),
    ]


def _decode(suffix: str, dtype: Dtype) -> list[Case]:
    return [
        Case(f"decode-gqa-b1{suffix}", "decode", 1, 32, 8, 1, 4096, 128, dtype),
        Case(f"decode-gqa-b8{suffix}", "decode", 8, 32, 8, 1, 4096, 128, dtype),
        Case(f"decode-mha-16k{suffix}", "decode", 1, 32, 32, 1, 16384, 128, dtype),
    ]


def _gradient(prefix: str, kind: Kind, suffix: str, dtype: Dtype) -> list[Case]:
    return [
        Case(f"{prefix}-bert{suffix}", kind, 1, 12, 12, 512, 512, 64, dtype),
        Case(f"{prefix}-gpt2{suffix}", kind, 1, 12, 12, 1024, 1024, 64, dtype, "causal"),
        Case(f"{prefix}-d128{suffix}", kind, 1, 12, 12, 1024, 1024, 128, dtype, "causal"),
        Case(f"{prefix}-4k{suffix}", kind, 1, 8, 8, 4096, 4096, 64, dtype, "causal"),
    ]


CASES = (
    *_forward(),
    *_decode("", "float32"),
    *_decode("-bf16", "bfloat16"),
    *_decode("-f16", "float16"),
    *_gradient("bwd", "backward", "", "float32"),
    *_gradient("fwdbwd", "both", "", "float32"),
    *_gradient("bwd", "backward", "-bf16", "bfloat16"),
    *_gradient("fwdbwd", "both", "-bf16", "bfloat16"),
)

LENGTHS = {"32k": 1 << 15, "128k": 1 << 17, "512k": 1 << 19, "1m": 1 << 20}
LONG_ROWS = {"row": 1, "chunk": 512, "rows": 8192}
"""The query rows of the long cases: one, a chunk of a prompt whose earlier part is cached, and many."""


def _long() -> list[Case]:
    return [
        case
        for name, keys in LENGTHS.items()
        for case in (
            Case(f"row-{name}", "decode", 1, 8, 2, LONG_ROWS["row"], keys, 64),
            Case(f"chunk-{name}", "forward", 1, 4, 1, LONG_ROWS["chunk"], keys, 64, mask="causal"),
            Case(f"rows-{name}", "forward", 1, 1, 1, LONG_ROWS["rows"], keys, 64),
        )
    ]


LONG = tuple(_long())
"""Many keys: the share of the limit and the memory of a call should not depend on their number."""

QUICK = ("bert", "gpt2", "bert-bf16", "decode-gqa-b1", "decode-gqa-b1-bf16", "bwd-gpt2", "fwdbwd-bert-bf16")
"""The cases of `--quick`."""
