"""Attention to keys that a mask or a gather selects for each row: it becomes SparseFlashAttention with their list."""

from fa_compiler.passes.sparse.fuse import Selected, emit_selected
from fa_compiler.passes.sparse.listed import emit_listed

__all__ = ["Selected", "emit_listed", "emit_selected"]
