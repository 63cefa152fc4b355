"""atc.sh: the exact command line."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from fa_compiler.atc.job import RouteResult
from fa_compiler.atc.request import Request
from fa_compiler.atc.sizes import atc_text
from fa_compiler.version import __version__

PRECISIONS = (
    "origin",
    "fp16",
    "cube_fp16in_fp32out",
    "mixed_float16",
    "mixed_bfloat16",
    "cube_hif8",
    "mixed_hif8",
)
"""The values of ATC's --precision_mode_v2. ATC's default, fp16, converts bfloat16 and float32 to
float16; our default, origin, keeps the model's types."""


def command(request: Request, built: RouteResult) -> list[str]:
    """The command as a list of words, to be run in the folder."""
    stem = re.sub(r"\.[a-z]+$", "", built.model)
    sizes = {entry.name: entry.sizes for entry in built.inputs}
    if request.gears:
        sizes = {
            name: tuple(size if isinstance(size, int) else (1, -1) for size in row)
            for name, row in sizes.items()
        }
    words = [
        "atc",
        "--mode=0",
        f"--framework={built.framework}",
        *(built.cluster or [f"--model={built.model}"]),
        f"--output={stem}",
        f"--soc_version={request.soc.name}",
        "--input_format=ND",
        f"--precision_mode_v2={request.precision}",
    ]
    if sizes and not built.cluster:  # the files of the ranks hold their sizes
        words.append(f"--input_shape={atc_text(sizes)}")
    if request.gears:
        words.append(
            f"--dynamic_dims={';'.join(','.join(map(str, group)) for group in request.gears)}"
        )
    return [*words, "--log=error"]


def script(title: str, commands: Sequence[Sequence[str]], before: Sequence[str] = ()) -> str:
    """A shell script that runs commands in its own folder. The script's own arguments are passed to
    each of them.

    `before` are steps that the user takes first. The script names them in comments.
    """
    body = "\n".join(f'{shlex.join(words)} "$@"' for words in commands)
    steps = "".join(f"# First, {step}.\n" for step in before)
    return f"""\
#!/bin/sh
# {title}
{steps}# Written by fa-compiler {__version__}. Further options of atc may follow.
set -e
unset CDPATH
cd "$(dirname "$0")"
command -v atc >/dev/null || {{
  echo "error: there is no atc on the PATH: source the set_env.sh of the installed CANN first" >&2
  exit 1
}}
{body}
"""
