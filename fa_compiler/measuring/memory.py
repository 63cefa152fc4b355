"""The peak memory of a process that runs a model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from fa_compiler.errors import InputError


def peak_of(module: str, *words: str) -> int:
    """The bytes that a module of this package prints of a process of its own."""
    command = [sys.executable, "-m", f"fa_compiler.measuring.{module}", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise InputError(
            f"a process that runs {words[0]} ended with code {done.returncode}: {done.stderr.strip()[-300:]}"
        )
    return int(done.stdout)


def own_peak() -> int:
    """The peak memory of this process in bytes.

    What Linux's getrusage calls the largest resident set includes the one of the process that
    started this one.
    """
    if sys.platform == "win32":
        from fa_compiler.measuring import windows

        return windows.own_peak()
    if sys.platform == "darwin":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024
