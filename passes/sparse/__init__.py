"""Attention to keys that a mask or a gather selects for each row: it becomes SparseFlashAttention with their list."""

from fa_compiler.passes.sparse.gathered_keys import fuse_gathered_keys
from fa_compiler.passes.sparse.masked_selection import Selected, fuse_masked_selection

__all__ = ["Selected", "fuse_gathered_keys", "fuse_masked_selection"]
