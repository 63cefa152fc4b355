"""What a page tells of the command that made it: program, date, machine, and the file that it
wrote."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fa_compiler import shell
from fa_compiler.page.wording import unbroken
from fa_compiler.pipeline.how_to_run import HowToRun
from fa_compiler.version import __version__

if TYPE_CHECKING:
    from fa_compiler.comparison.compare import Comparison


@dataclass(frozen=True)
class Provenance:
    """The program, the minute, the command and the machine that made a page."""

    program: str
    date: str
    command: str
    machine: str

    @staticmethod
    def of(words: Sequence[str]) -> Provenance:
        """Of a command line with these words, on this machine, now."""
        date = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        return Provenance(
            f"fa_compiler {__version__}", date, shell.command(["fa-compiler", *words]), _machine()
        )

    def section(self) -> Iterator[str]:
        """The section of a page."""
        yield "<section aria-labelledby='made'><h2 id='made'>How this page was made</h2><dl class='facts'>"
        facts = {"program": self.program, "date": self.date, "machine": self.machine}
        yield from (
            f"<div><dt>{name}</dt><dd>{escape(fact)}</dd></div>" for name, fact in facts.items()
        )
        yield f"<div><dt>command</dt><dd><code>{unbroken(self.command)}</code></dd></div></dl></section>"


@dataclass(frozen=True)
class Written:
    """The file that a command wrote, and what is known of it: how it is run, the bytes of all files
    of the model before and after, and what a verification found. What is not known is None."""

    output: Path
    how: HowToRun | None = None
    sizes: tuple[int, int] | None = None
    compared: Comparison | None = None


def gain_beside(page: Path) -> Path:
    """Where the measurement that belongs to a page is expected: page.html has gain.html, bert.html
    has bert.gain.html."""
    return page.with_name(
        page.name.replace("page", "gain")
        if "page" in page.name
        else f"{page.stem}.gain{page.suffix}"
    )


def page_beside(gain: Path) -> Path:
    """The page that a measurement belongs to, the other way round."""
    stem = gain.stem.removesuffix(".gain")
    return gain.with_name(
        f"{stem}{gain.suffix}" if stem != gain.stem else gain.name.replace("gain", "page")
    )


def _machine() -> str:
    """The processor, the number of its cores that this process may use, and the system."""
    return f"{_processor()}, {_cores()}, {platform.system()} {platform.machine()}"


def _processor() -> str:
    with suppress(OSError):
        for line in (
            Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        ):
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or "unknown processor"


def _cores() -> str:
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return f"{count} core{'s' if count > 1 else ''}"
