"""Finds the compiled custom-op library, and registers it with a session."""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
import sys
import weakref
from pathlib import Path

import onnxruntime as ort

from fa_compiler.op_registry.errors import FaCompilerError, suggests_keywords

_FILE = "fa_compiler_ort.dll" if sys.platform == "win32" else "libfa_compiler_ort.so"

OPERATORS = "fa_compiler.operators"
"""An entry of the options of a session whose fused nodes are of few types, of domain `ascend`
alone: these types, with commas between them. The library then registers no other operators. Such a
session is made in a fraction of the time."""


class LibraryUnusable(FaCompilerError, RuntimeError):
    """The compiled library is not there, or cannot be loaded."""


class LibraryNotBuilt(LibraryUnusable):
    """The compiled library was not found in any place where an installation or a build puts it."""

    def __init__(self) -> None:
        super().__init__(
            f"the custom-op library {_FILE} is not built: run 'pip install .' (or 'pip install -e .') in the "
            "checkout of fa_compiler; it needs a C++20 compiler"
        )


class LibraryNotLoaded(LibraryUnusable):
    """The system does not load the compiled library, or it lacks a function that this release of
    the package calls."""

    def __init__(self, path: str, error: Exception) -> None:
        reason = " ".join(str(error).split()).removeprefix(f"{path}: ")
        super().__init__(
            f"the custom-op library {path} cannot be loaded: {reason}; install fa_compiler again, on this machine or "
            "from a wheel ('fa-compiler docs install')"
        )


@functools.cache
def library_path() -> str:
    """The absolute path of the compiled library. Raises LibraryNotBuilt.

    The library is beside this module in a regular installation. In an editable one it is in
    site-packages, where the distribution's record finds it. In a checkout that was only compiled it
    is under build/.
    """
    for path in (Path(__file__).with_name(_FILE), _recorded(), *_built()):
        if path is not None and path.is_file():
            return str(path.resolve())
    raise LibraryNotBuilt


def custom_ops_library() -> str:
    """The path for `SessionOptions.register_custom_ops_library`; the same as `library_path()`."""
    return library_path()


def loaded_library(*functions: str) -> ctypes.CDLL:
    """The compiled library, with these functions. Raises LibraryNotBuilt or LibraryNotLoaded."""
    path = library_path()
    try:
        library = ctypes.CDLL(path)
        for function in functions:
            getattr(library, function)
    except (OSError, AttributeError) as error:
        raise LibraryNotLoaded(path, error) from None
    return library


_registered: weakref.WeakSet[ort.SessionOptions] = weakref.WeakSet()


@suggests_keywords
def register_custom_ops(session_options: ort.SessionOptions) -> None:
    """Register the fused operators for sessions with these options. Raises LibraryNotBuilt or
    LibraryNotLoaded.

    A second call with the same object does nothing, because ONNX Runtime accepts a library only
    once.
    """
    if not hasattr(session_options, "register_custom_ops_library"):
        kind = type(session_options).__name__
        raise TypeError(
            f"register_custom_ops takes the SessionOptions that a session is made with, not {kind}"
        )
    if session_options in _registered:
        return
    try:
        session_options.register_custom_ops_library(library_path())
    except LibraryNotBuilt:
        raise
    except Exception:  # the exceptions of ONNX Runtime share no class
        loaded_library("RegisterCustomOps")
        raise
    _registered.add(session_options)


def have_custom_ops(session_options: ort.SessionOptions) -> bool:
    """Whether `register_custom_ops` has registered the operators with these options."""
    return session_options in _registered


def _recorded() -> Path | None:
    """The library of the installed distribution, if this module was imported from the checkout
    instead."""
    try:
        distribution = importlib.metadata.distribution("fa_compiler")
    except importlib.metadata.PackageNotFoundError:
        return None
    return Path(str(distribution.locate_file(f"fa_compiler/lowering/ort/{_FILE}")))


def _built() -> list[Path]:
    """The libraries that installations left in the checkout's build folder, the newest first.

    Builds with sanitizers and builds for another processor are left out.
    """
    root = Path(__file__).resolve().parents[2]
    return sorted(
        root.glob(f"build/py3-*/{_FILE}"), key=lambda path: path.stat().st_mtime, reverse=True
    )
