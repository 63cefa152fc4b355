"""The command `completion`: what a shell needs to complete the words of `fa-compiler`, by the
package argcomplete."""

from __future__ import annotations

import argparse

from fa_compiler.command_line.exit_codes import OK
from fa_compiler.errors import InputError

SHELLS = ("bash", "zsh", "fish")
COMPLETING = "_ARGCOMPLETE"
"""The environment variable with which a shell asks for completions."""


def script(args: argparse.Namespace) -> int:
    """Print the code that a shell runs when it starts."""
    if args.shell not in SHELLS:
        raise InputError(f"unknown shell {args.shell!r}: known are {', '.join(SHELLS)}")
    try:
        from argcomplete.shell_integration import shellcode
    except ImportError:
        raise InputError(
            "completion needs the package argcomplete: pip install argcomplete"
        ) from None
    print(shellcode(["fa-compiler"], shell=args.shell))
    return OK


def complete(parser: argparse.ArgumentParser) -> None:
    """Answer a shell and end the process."""
    from argcomplete import autocomplete

    autocomplete(parser)
