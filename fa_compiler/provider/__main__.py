"""`python -m fa_compiler.provider script.py ...` runs a script with the provider in all its sessions.

    python -m fa_compiler.provider [-m MODULE | SCRIPT] [arguments of the script ...]

The script is not changed and need not know of this package. At its end one line on stderr tells how many attentions
were fused, and what was declined.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from fa_compiler import provider
from fa_compiler.errors import FaCompilerError
from fa_compiler.provider.sessions import watch_all

USAGE = "usage: python -m fa_compiler.provider [-m MODULE | SCRIPT] [ARGUMENT ...]"

_USAGE_ERROR = 2


def _run(arguments: Sequence[str]) -> None:
    """Run a script or module as Python itself does."""
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(arguments)
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    runpy.run_path(arguments[0], run_name="__main__")


def main(arguments: Sequence[str]) -> int:
    """The command line. The exit code of the script becomes that of the program."""
    if list(arguments) in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if list(arguments) in ([], ["-m"]):
        print(USAGE, file=sys.stderr)
        return _USAGE_ERROR
    if arguments[0] != "-m" and not Path(arguments[0]).is_file():
        print(f"error: {arguments[0]}: no such file", file=sys.stderr)
        return _USAGE_ERROR
    try:
        provider.register_provider()
    except FaCompilerError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE_ERROR
    watch_all().report_at_end()
    _run(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
