"""The sizes of one decoding call. query has one token; keys and values are one tensor, a list or
pages.

| keys are in | shape |
|---|---|
| one tensor | the input layout: B,S,H or B,S,N2,D or B,N2,S,D |
| a list | one such tensor of batch 1 for each batch entry; the tensors differ in S only |
| pages | blocks,block_size,H; for BNSD also blocks,N2,block_size,D |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fa_compiler.op_registry.constraints.core import CheckedNode
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import (
    differ,
    divide,
    product,
    shape_of,
    shapes_differ,
    sizes_by_letter,
)
from fa_compiler.op_registry.node import Dim, TensorInfo

DECODE_LAYOUTS = ("BSH", "BNSD", "BSND")
"""The layouts of IncreFlashAttention."""


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes of a call, None where unknown. `s` is the number of keys that a mask or bias must
    cover: the longest S, or with pages the number of columns of the block table times block_size.
    `lengths` holds the S of each key tensor. `n2` is num_key_value_heads, or `n1` if that is 0."""

    layout: str
    b: Dim = None
    n1: Dim = None
    n2: Dim = None
    s1: Dim = None
    d: Dim = None
    s: Dim = None
    lengths: tuple[Dim, ...] = ()
    paged: bool = False
    block_size: int = 0

    @property
    def listed(self) -> bool:
        """Whether each batch entry has a key tensor of its own."""
        return len(self.lengths) > 1

    def cache(self, tensor: TensorInfo) -> tuple[Dim, Dim, Dim]:
        """Entries (batch or blocks), tokens and H (N2*D) of a key or value tensor; all None if its
        rank is wrong."""
        shape = tensor.shape
        folded = self.layout == "BSH" or (self.paged and shape is not None and len(shape) == 3)
        if shape is None or len(shape) != (3 if folded else 4):
            return None, None, None
        if folded:
            return shape[0], shape[1], shape[2]
        tokens, heads = (2, 1) if self.paged or self.layout == "BNSD" else (1, 2)
        return shape[0], shape[tokens], product(shape[heads], shape[3])


def sizes_of(call: CheckedNode) -> DecodeSizes:
    """The sizes as far as they are known. Nothing is checked here."""
    layout, heads = call.attr("input_layout"), call.attr("num_heads")
    if layout not in DECODE_LAYOUTS:
        return DecodeSizes("")
    q = sizes_by_letter(call["query"], layout)
    n1, d = q.get("N"), q.get("D")
    if layout == "BSH":
        n1 = heads if heads > 0 else None
        d = divide(q["H"], n1)
    stated, table = call.attr("num_key_value_heads"), call["block_table"]
    sizes = DecodeSizes(
        layout,
        q["B"],
        n1,
        stated if stated > 0 else n1,
        q["S"],
        d,
        paged=table is not None and 0 not in (table.shape or ()),
        block_size=call.attr("block_size"),
    )
    lengths = tuple(sizes.cache(tensor)[1] for tensor in call.lists.get("key", ()))
    s = _pages_of(table, sizes.block_size) if sizes.paged else _longest(lengths)
    return replace(sizes, s=s, lengths=lengths)


def _pages_of(table: TensorInfo | None, block_size: int) -> Dim:
    """The number of keys for which a block table has room; unknown if block_size is not legal."""
    if block_size <= 0 or block_size % 16:
        return None
    return product(shape_of(table, 2)[1], block_size)


def _longest(lengths: tuple[Dim, ...]) -> Dim:
    """The length of the only key tensor, or the longest of a list, or None if one of a list is
    unknown."""
    if len(lengths) == 1:
        return lengths[0]
    known = [length for length in lengths if isinstance(length, int)]
    return max(known) if known and len(known) == len(lengths) else None


def query_heads(call: CheckedNode, layout: str, n1: Dim) -> Iterator[Diagnostic]:
    """num_heads, which is positive, is the head count of query, or in BSH divides its width."""
    given = call.attr("num_heads")
    width = shape_of(call["query"], 3)[2] if layout == "BSH" else None
    if isinstance(width, int) and width % given:
        yield Diagnostic(
            "num_heads", f"num_heads is {given}, expected a divisor of the width {width} of query"
        )
    elif differ(n1, given):
        yield Diagnostic(
            "num_heads", f"num_heads is {given}, expected {n1}, the head count of query"
        )


def shorter(found: Dim, needed: Dim) -> bool:
    """Whether a size is certainly less than the one needed."""
    return isinstance(found, int) and isinstance(needed, int) and found < needed


def unlike(tensor: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors certainly have different shapes."""
    a, b = tensor.shape, other.shape
    return a is not None and b is not None and shapes_differ(a, b)
