"""`python -m fa_compiler.provider script.py ...` runs a script with the provider in all its
sessions.

    python -m fa_compiler.provider [-m MODULE | SCRIPT] [arguments of the script ...]

The script is not changed and need not know of this package. On stderr one line for each session,
and one at the end, tell how many attentions were fused, and what was declined.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from fa_compiler import provider
from fa_compiler.errors import FaCompilerError
from fa_compiler.provider.sessions import watch_all

USAGE = """\
usage: python -m fa_compiler.provider [-m MODULE | SCRIPT] [ARGUMENT ...]

Runs a script or a module of Python. Every session of ONNX Runtime that it makes fuses its attention. One line for each
session, and one at the end, tell on stderr what was fused. More: fa-compiler docs provider
"""

_USAGE_ERROR = 2
_MODELS = (".onnx", ".ort")


def _fault(arguments: Sequence[str]) -> str | None:
    """Why Python cannot run this script or module."""
    if arguments[0] == "-m":
        return _fault_of_module(arguments[1])
    path = Path(arguments[0])
    if arguments[0].startswith("-") and not path.exists():
        return f"unknown option {arguments[0]!r}; options of the script stand behind its name (--help tells more)"
    if path.is_dir():
        return (
            None
            if (path / "__main__.py").is_file()
            else f"{path}: this folder has no __main__.py to run"
        )
    if path.suffix in _MODELS:
        return f"{path} is a model; give the script or module that runs it"
    return None if path.is_file() else f"{path}: no such file"


def _fault_of_module(name: str) -> str | None:
    if "" in name.split("."):
        return f"{name!r} is no name of a module"
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            main = importlib.util.find_spec(f"{name}.__main__")
            return None if main is not None else f"{name}: this package has no __main__ to run"
    except ModuleNotFoundError as error:  # of a package above it
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        spec = None
    return None if spec is not None else f"{name}: no such module"


def _run(arguments: Sequence[str]) -> None:
    """Run a script or module as Python itself does."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    place = Path(arguments[0]).resolve()
    sys.path[0] = str(place if place.is_dir() else place.parent)
    runpy.run_path(arguments[0], run_name="__main__")


def main(arguments: Sequence[str]) -> int:
    """The command line. The exit code of the script becomes that of the program."""
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE, end="")
        return 0
    if list(arguments) in ([], ["-m"]):
        print(USAGE, end="", file=sys.stderr)
        return _USAGE_ERROR
    if (fault := _fault(arguments)) is not None:
        print(f"error: {fault}", file=sys.stderr)
        return _USAGE_ERROR
    try:
        provider.check_available()
    except FaCompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    watch_all().report()
    _run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
