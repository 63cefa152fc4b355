"""An editable installation of this checkout that shows what is compiled.

    python tools/visible_install.py [--variants native] [--extra NAME ...] [options of pip]

pip shows nothing of a build, or everything. This shows each file that was compiled and how many there are, as Ninja
counts them: on a terminal in one line that changes. A second pip loads and installs the packages that the project
requires at the same time: a single one begins to compile when it has loaded them. If one of the two fails, its whole
output follows.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).parents[1]

SECONDS_OF_A_FILE = 10
"""What a file takes of one core, on average; measured with GCC 12."""

PIP = (sys.executable, "-m", "pip", "install", "--disable-pip-version-check")
COMPILING = ("--verbose", "--no-build-isolation", "--no-deps")


PROJECT = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def requirements(extras: list[str]) -> list[str]:
    """The packages that pyproject.toml requires, and those of these extras."""
    return PROJECT["dependencies"] + [
        package for extra in extras for package in PROJECT["optional-dependencies"][extra]
    ]


def step(line: str) -> str | None:
    """What is shown for a line of pip's output; None for most of them."""
    compiled = re.match(r"\s*(\[\d+/\d+\]) .*?(\S+)$", line)
    if compiled is None:
        return None
    file = re.sub(r"^CMakeFiles/|\.dir(?=/)|\.o$", "", compiled[2])
    return f"{compiled[1]} {file}"


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
    """Install the checkout and what it requires; return pip's exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--variants", default="all", choices=("all", "native"), help="of the kernels")
    parser.add_argument("--extra", action="append", default=[], choices=PROJECT["optional-dependencies"])
    asked, options = parser.parse_known_args()
    print("loading the packages that it requires", flush=True)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        other = subprocess.Popen(loading(options, asked.extra), stdout=said, stderr=subprocess.STDOUT)
        code = visibly(compiling(options, asked.variants))
        if other.wait():
            said.seek(0)
            sys.stdout.write(said.read())
    return code or other.returncode


def loading(options: list[str], extras: list[str]) -> list[str]:
    """The command that installs what the checkout requires."""
    return [*PIP, *options, *requirements(extras)]


def compiling(options: list[str], variants: str) -> list[str]:
    """The command that compiles and installs the checkout alone."""
    kernels = f"--config-settings=cmake.define.FA_VARIANTS={variants}"
    return [*PIP, "--verbose", "--no-build-isolation", "--no-deps", *options, kernels, "--editable", str(CHECKOUT)]


def visibly(command: list[str]) -> int:
    """Run a command that compiles, show each file that it has compiled, and return its exit code."""
    process = subprocess.Popen(
        command,
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
        for shown in (estimate(line), step(line.rstrip())):
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
