"""Does a piece of work in a child process: with a time limit, and harmless if it crashes."""

from __future__ import annotations

import os
import re
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

MEMORY = 12 << 30
"""The address space of one child, in bytes."""


def child(work: Callable[[], None], log: Path) -> None:
    """Do the work in this process, and end it. What it prints goes to a file."""
    with log.open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def attempt(work: Callable[[], None], log: Path, timeout: float) -> str:
    """What is wrong with the work, which is done in a child process; empty if it was done."""
    process = os.fork()
    if process == 0:
        child(work, log)
    end = time.monotonic() + timeout
    while True:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            break
        if time.monotonic() > end:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return f"took longer than {timeout:g} s"
        time.sleep(0.05)
    if status == 0:
        return ""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Unsupported\w*)\b", line)]
    return (errors or lines or [f"ended with status {status}"])[-1][:300]
