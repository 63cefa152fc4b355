"""Attention to the keys a row selected, by a mask or by gathering them, as SparseFlashAttention with a list."""

from fa_compiler.passes.sparse.fuse import Selected, emit_selected
from fa_compiler.passes.sparse.listed import emit_listed

__all__ = ["Selected", "emit_listed", "emit_selected"]
