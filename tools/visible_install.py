"""`pip install` of this checkout that shows what is compiled: `python tools/visible_install.py [pip's arguments]`.

pip shows nothing of a build, or everything. This shows each file that was compiled and how many there are, as Ninja
counts them: on a terminal in one line that changes. If pip fails, its whole output follows.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

SECONDS_OF_A_FILE = 10
"""What a file takes of one core, on average; measured with GCC 12."""

PIP = (sys.executable, "-m", "pip", "install", "--verbose", "--disable-pip-version-check", "--no-build-isolation")


def step(line: str) -> str | None:
    """What is shown for a line of pip's output; None for most of them."""
    compiled = re.match(r"\s*(\[\d+/\d+\]) .*?(\S+)$", line)
    if compiled is not None:
        file = re.sub(r"^CMakeFiles/|\.dir(?=/)|\.o$", "", compiled[2])
        return f"{compiled[1]} {file}"
    loaded = re.match(r"(Collecting \S+|Installing collected packages)", line)
    return loaded[1] if loaded is not None else None


def estimate(line: str) -> str | None:
    """What is shown before the first file of a build: how many there are, and how long they take."""
    first = re.match(r"\s*\[1/(\d+)\] ", line)
    if first is None:
        return None
    files, cores = int(first[1]), os.cpu_count() or 1
    minutes = max(1, round(files * SECONDS_OF_A_FILE / cores / 60))
    what = "1 file" if files == 1 else f"{files} files"
    return f"compiling {what} of the kernels on {cores} cores, about {minutes} min"


def main() -> int:
    """Run pip and return its exit code."""
    process = subprocess.Popen(
        [*PIP, *sys.argv[1:]],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        announced = estimate(line)
        if announced is not None:
            print(announced, flush=True)
        shown = step(line.rstrip())
        if shown is not None:
            show(shown)
    code = process.wait()
    if sys.stdout.isatty():
        show("")
    if code:
        sys.stdout.writelines(said)
    return code


def show(text: str) -> None:
    """Print a line. On a terminal it takes the place of the one before."""
    if sys.stdout.isatty():
        width = shutil.get_terminal_size().columns - 1
        print(f"\r\x1b[K{text[:width]}", end="", flush=True)
    else:
        print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
