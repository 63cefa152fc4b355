"""Attention to the keys a row selected: from FlashAttentionScore with a mask to SparseFlashAttention with a list."""

from fa_compiler.passes.sparse.fuse import Selected, to_selected

__all__ = ["Selected", "to_selected"]
