"""Marks for tests of what only some systems have, each with its reason."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

IS_WINDOWS = sys.platform == "win32"
ROOT = Path(__file__).parent.parent


def _makes_links() -> bool:
    """May this user make symbolic links? On Windows that is a right of its own, and Wine follows none."""
    with tempfile.TemporaryDirectory() as folder:
        target, link = Path(folder) / "target", Path(folder) / "link"
        target.write_bytes(b"text")
        try:
            link.symlink_to(target)
            return link.is_symlink() and link.read_bytes() == b"text"
        except OSError:
            return False


SOURCES = pytest.mark.skipif(
    not (ROOT / "lowering").is_dir(),
    reason="a wheel is tested, and no sources of the package lie beside the tests",
)
LINKS = pytest.mark.skipif(not _makes_links(), reason="this user may not make symbolic links")
SCRIPTS = pytest.mark.skipif(IS_WINDOWS, reason="Windows runs no scripts of a shell; those of ATC are for Linux")
TOOLS = pytest.mark.skipif(IS_WINDOWS, reason="the tools for developers are for Linux")
SIGNALS = pytest.mark.skipif(IS_WINDOWS, reason="Windows sends no signals to other processes")
FORK = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
NAMED_PIPES = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no named pipes in folders")
DEVICES = pytest.mark.skipif(IS_WINDOWS, reason="Windows has no devices in folders, such as /dev/stdout")
ELF = pytest.mark.skipif(
    sys.platform != "linux", reason="the library is no file of Linux; make wheels checks the other systems' libraries"
)
TERMINALS = pytest.mark.skipif(
    importlib.util.find_spec("termios") is None, reason="Windows has no terminals that a program can make"
)
PEAK_MEMORY = pytest.mark.skipif(
    importlib.util.find_spec("resource") is None, reason="Windows has no getrusage, which tells the peak of the memory"
)
MODES = pytest.mark.skipif(IS_WINDOWS, reason="files have no modes for owner, group and others on Windows")
LIMITS = pytest.mark.skipif(
    importlib.util.find_spec("resource") is None, reason="Windows has no setrlimit, by which the tool limits memory"
)
NAMES_OF_BYTES = pytest.mark.skipif(IS_WINDOWS, reason="the names of files are text on Windows")
COPIES_IN_THE_KERNEL = pytest.mark.skipif(
    not hasattr(os, "copy_file_range"), reason="Python has copy_file_range on Linux only"
)
FILES_GO_AT_ONCE = pytest.mark.skipif(IS_WINDOWS, reason="on Windows a removed file stays until the last one closes it")

LISTENS_TO_INTERRUPTS: dict[str, Any] = (
    {} if IS_WINDOWS else {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
)
"""Options of a process. A test run in a shell's background inherits an interrupt that is ignored, and hands it down."""


def said(text: str) -> str:
    """What a program said, without the line that ONNX Runtime writes in Wine, where it looks for a GPU, and without the
    zeros of its log, which has two bytes a letter on Windows."""
    return text.replace("Failed to create DXGI factory.\n", "").replace("\0", "")
