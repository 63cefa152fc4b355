"""The custom-op library, which runs fused nodes in ONNX Runtime on a CPU.

`register_custom_ops` registers the library (library.py), whose sources are in csrc/. eager.py runs
one operator.
"""

from fa_compiler.lowering.ort.library import (
    LibraryNotBuilt,
    LibraryNotLoaded,
    LibraryUnusable,
    custom_ops_library,
    have_custom_ops,
    library_path,
    loaded_library,
    register_custom_ops,
)

__all__ = [
    "LibraryNotBuilt",
    "LibraryNotLoaded",
    "LibraryUnusable",
    "custom_ops_library",
    "have_custom_ops",
    "library_path",
    "loaded_library",
    "register_custom_ops",
]
