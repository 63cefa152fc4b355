"""The file of a plan, which lowering/ort/csrc/provider/plan.hpp reads. The grammar stands there."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

from fa_compiler.passes import Report
from fa_compiler.provider.matching import Replacement

MAGIC = b"fa_compiler plan 2\n"


def entry(graph: bytes, found: Replacement) -> bytes:
    """The entry of a graph of a session.

    Args:
        graph: what the library hands to the matcher: the same bytes in every process that shows the
            same graph.
        found: what the matcher answers.
    """
    weights = b"".join(_number(place) + _digest(content) for place, content in found.read.items())
    return b"".join(
        (
            _digest(graph),
            _text(_line(found.report).encode()),
            _text(found.model or b""),
            _number(len(found.sizes)),
            struct.pack(f"<{len(found.sizes)}q", *found.sizes),
            _number(len(found.read)),
            weights,
        )
    )


def _line(report: Report) -> str:
    """The line for the log of a session: how much is fused, and what the user vouched for."""
    assumed = sorted(
        {word for block in report.blocks if block.status == "fused" for word in block.assumed}
    )
    return f"{report.outcome}; assumed: {', '.join(assumed)}" if assumed else report.outcome


def plan_bytes(
    entries: Sequence[bytes], package: str, runtime: str, level: str, source: str
) -> bytes:
    """The file with these entries. `source` names the model, for messages."""
    words = b"".join(
        _text(word.encode(errors="replace")) for word in (package, runtime, level, source)
    )
    return signed(words + _number(len(entries)) + b"".join(entries))


def signed(content: bytes) -> bytes:
    """The content with what stands before it in the file."""
    return MAGIC + _digest(content) + content


def _digest(content: bytes | memoryview) -> bytes:
    return hashlib.sha256(content).digest()


def _text(text: bytes) -> bytes:
    return _number(len(text)) + text


def _number(number: int) -> bytes:
    return struct.pack("<Q", number)
