"""The sizes of one decoding call. query has one token; keys and values are one tensor, a list or pages.

| keys are in | shape |
|---|---|
| one tensor | the input layout: B,S,H or B,S,N2,D or B,N2,S,D |
| a list | one such tensor of batch 1 for each batch entry; the tensors differ in S only |
| pages | blocks,block_size,H; for BNSD also blocks,N2,block_size,D |
"""

from __future__ import annotations

from dataclasses import dataclass

from fa_compiler.op_registry.constraints.core import CheckedNode
from fa_compiler.op_registry.geometry import LAYOUTS, differ, divide, shape_of
from fa_compiler.op_registry.node import Dim, TensorInfo

DECODE_LAYOUTS = ("BSH", "BNSD", "BSND")
"""The layouts of IncreFlashAttention."""


@dataclass(frozen=True)
class DecodeSizes:
    """Sizes of a call, None where unknown. `s` is the number of keys that a mask or bias must cover: the longest S, or
    with pages the number of columns of the block table times block_size. `lengths` holds the S of each key tensor. `n2`
    is num_key_value_heads, or `n1` if that is 0."""

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
        """Entries (batch or blocks), tokens and H (N2*D) of a key or value tensor; all None if its rank is wrong."""
        shape = tensor.shape
        folded = self.layout == "BSH" or (self.paged and shape is not None and len(shape) == 3)
        if shape is None or len(shape) != (3 if folded else 4):
            return None, None, None
        if folded:
            return shape[0], shape[1], shape[2]
        tokens, heads = (2, 1) if self.paged or self.layout == "BNSD" else (1, 2)
        return shape[0], shape[tokens], product(shape[heads], shape[3])


def product(a: Dim, b: Dim) -> Dim:
    """a * b if both are numbers, otherwise None."""
    return a * b if isinstance(a, int) and isinstance(b, int) else None


def sizes_of(call: CheckedNode) -> DecodeSizes:
    """The sizes as far as they are known. Nothing is checked here."""
    layout, heads = call.attr("input_layout"), call.attr("num_heads")
    if layout not in DECODE_LAYOUTS:
        return DecodeSizes("")
    q = shape_of(call["query"], LAYOUTS[layout])
    if layout == "BSH":
        n1, s1, d = heads if heads > 0 else None, q[1], divide(q[2], heads)
    else:
        (n1, s1), d = (q[1:3] if layout == "BNSD" else (q[2], q[1])), q[3]
    stated = call.attr("num_key_value_heads")
    table = call["block_table"]
    paged = table is not None and not (table.shape is not None and 0 in table.shape)
    sizes = DecodeSizes(
        layout, q[0], n1, stated if stated > 0 else n1, s1, d, paged=paged, block_size=call.attr("block_size")
    )
    keys = [sizes.cache(tensor)[1] for tensor in call.lists.get("key", ())]
    s: Dim = None
    if paged and table is not None:
        s = product(shape_of(table, 2)[1], sizes.block_size if sizes.block_size % 16 == 0 < sizes.block_size else None)
    elif keys and (len(keys) == 1 or all(isinstance(key, int) for key in keys)):
        s = keys[0] if len(keys) == 1 else max(key for key in keys if isinstance(key, int))
    return DecodeSizes(layout, sizes.b, n1, sizes.n2, s1, d, s, tuple(keys), paged, sizes.block_size)


def shorter(found: Dim, needed: Dim) -> bool:
    """Whether a size is certainly less than the one needed."""
    return isinstance(found, int) and isinstance(needed, int) and found < needed


def unlike(tensor: TensorInfo, other: TensorInfo) -> bool:
    """Whether two tensors certainly have different shapes."""
    a, b = tensor.shape, other.shape
    return a is not None and b is not None and (len(a) != len(b) or any(map(differ, a, b)))
