"""Attention to keys that are selected for each row: it becomes SparseFlashAttention with the list
of these keys.

A mask selects the keys (`fuse_masked_selection`), or a gather does (`fuse_gathered_keys`).
"""

from fa_compiler.passes.sparse.gathered_keys import fuse_gathered_keys
from fa_compiler.passes.sparse.masked_selection import Selected, fuse_masked_selection

__all__ = ["Selected", "fuse_gathered_keys", "fuse_masked_selection"]
