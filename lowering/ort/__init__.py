"""The custom-op library, which runs fused nodes in ONNX Runtime on a CPU."""

from fa_compiler.lowering.ort.library import (
    LibraryNotBuilt,
    custom_ops_library,
    have_custom_ops,
    library_path,
    register_custom_ops,
)

__all__ = ["LibraryNotBuilt", "custom_ops_library", "have_custom_ops", "library_path", "register_custom_ops"]
