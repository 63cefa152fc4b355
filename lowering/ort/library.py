"""Finding the compiled custom-op library, and giving it to a session."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import weakref
from pathlib import Path

import onnxruntime as ort

_STEM = "libfa_compiler_ort"
_FILE = f"{_STEM}.so"


class LibraryNotBuilt(RuntimeError):
    """The compiled library is not where an installation or a build would have put it."""

    def __init__(self) -> None:
        super().__init__(
            f"the custom-op library {_FILE} is not built: run 'pip install .' (or 'pip install -e .') in the "
            "checkout of fa_compiler; it needs a C++20 compiler"
        )


@functools.cache
def library_path() -> str:
    """Absolute path of the compiled library. Raises LibraryNotBuilt.

    It lies beside this module in a regular installation, in site-packages in an editable one (only the import
    system and the distribution's record know where), and under build/ in a checkout that was only compiled.
    """
    # Looked up as a module although it is none: this asks the import hook of an editable installation, too.
    spec = importlib.util.find_spec(f"{__package__}.{_STEM}")
    if spec is not None and spec.origin is not None and Path(spec.origin).is_file():
        return str(Path(spec.origin).resolve())
    for path in (_recorded(), *_built()):
        if path is not None and path.is_file():
            return str(path.resolve())
    raise LibraryNotBuilt


def custom_ops_library() -> str:
    """The path to pass to `SessionOptions.register_custom_ops_library`; the same as `library_path()`."""
    return library_path()


_registered: weakref.WeakSet[ort.SessionOptions] = weakref.WeakSet()


def register_custom_ops(session_options: ort.SessionOptions) -> None:
    """Makes sessions with these options know the fused operators.

    Calling it again with the same object does nothing (ONNX Runtime itself takes a library once only). Raises
    LibraryNotBuilt.
    """
    if session_options in _registered:
        return
    session_options.register_custom_ops_library(library_path())
    _registered.add(session_options)


def _recorded() -> Path | None:
    """Where the installed distribution has it, when this module was imported from the checkout instead."""
    try:
        distribution = importlib.metadata.distribution("fa_compiler")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(f"fa_compiler/lowering/ort/{_FILE}")))


def _built() -> list[Path]:
    """Libraries that installations left in the build folder of the checkout, the newest first; not those for
    sanitizers or another processor beside them."""
    root = Path(__file__).resolve().parents[2]
    return sorted(root.glob(f"build/py3-*/{_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True)
