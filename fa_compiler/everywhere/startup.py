"""The environment variable FA_COMPILER_PROVIDER: all sessions of a process have the provider,
without an import.

The wheel holds this file a second time, as `_fa_compiler_startup` beside the package, and
`fa_compiler.pth`, whose one line imports it when Python starts and the variable is set. Hence this
file imports nothing before the program imports onnxruntime, and the package only when the first
session is made. No error leaves it.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # as in typing, which takes time to import
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

watching = False
"""Whether new sessions are made here."""


class _Finder:
    """The first finder of modules, until onnxruntime is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """For onnxruntime the answer of the other finders, with a loader that watches the sessions
        afterwards."""
        if name != "onnxruntime":
            return None
        others = (finder for finder in [*sys.meta_path] if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_watch(module: ModuleType) -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _watch(module)

        try:
            spec.loader.exec_module = execute_and_watch  # type: ignore[method-assign]
        except AttributeError as error:
            _tell(error)
        return spec


def _watch(onnxruntime: Any) -> None:
    """From now on, the sessions of this process are made by `fa_compiler.everywhere`."""
    import functools

    global watching
    # another package of this name, or a damaged one
    if not hasattr(onnxruntime, "InferenceSession"):
        return
    make = onnxruntime.InferenceSession.__init__
    failed = False

    @functools.wraps(make)
    def make_with_provider(session: Any, *arguments: Any, **kwargs: Any) -> None:
        nonlocal failed
        if not failed:
            try:
                from fa_compiler.everywhere import sessions
            except Exception as error:
                failed = True
                _tell(error)
        if failed:
            make(session, *arguments, **kwargs)
        else:
            sessions.make(make, session, *arguments, **kwargs)

    onnxruntime.InferenceSession.__init__ = make_with_provider
    watching = True


def _tell(error: Exception) -> None:
    text = " ".join(str(error).split())
    print(
        f"fa_compiler: sessions run without fused attention: {type(error).__name__}: {text}",
        file=sys.stderr,
    )


sys.meta_path.insert(0, _Finder())
