"""Measures the memory by which one call makes a process grow, with 8,192 rows and keys.

Each peer has its own process, which holds only the inputs before. The memory of the inputs, of the results, and of the
library after loading does not count. If a peer needs a mask of full size, this mask is an input.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.speed import truth
from bench.speed.cases import Case
from bench.speed.rounds import too_large, write_unfused
from bench.speed.workers import Workers
from tools.processes import HelperError

CASES = (
    Case("long", "forward", 1, 8, 8, 8192, 8192, 64),
    Case("long-pad", "forward", 1, 8, 8, 8192, 8192, 64, mask="pad"),
    Case("long-causal", "forward", 1, 8, 8, 8192, 8192, 64, mask="causal"),
    Case("sliding", "forward", 1, 8, 8, 8192, 8192, 128, mask="window", window=512),
    Case("fwdbwd-long-causal", "both", 1, 8, 8, 8192, 8192, 64, mask="causal"),
)
AIM = 20
"""The most MiB for our operators."""


def result_bytes(case: Case) -> int:
    """The bytes of the results, which every peer has to write: dq has the size of out, dk and dv those of key and
    value."""
    rows = case.batch * case.rows * case.heads * case.size * (4 if case.dtype == "float32" else 2)
    return {"forward": rows, "decode": rows, "backward": rows + case.cache_bytes, "both": 2 * rows + case.cache_bytes}[
        case.kind
    ]


def measure(case: Case, threads: int, workers: Workers, wanted: list[tuple[str, str]]) -> Iterator[dict[str, Any]]:
    """A row of the results for each wanted (library, peer)."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        truth.write_inputs(case, folder)
        write_unfused(case, folder)
        for library, peer in wanted:
            answer: dict[str, Any] = {"not": too_large(peer, case)}
            if not answer["not"]:
                with workers.new(library, threads) as server:
                    try:
                        server.ask({"case": asdict(case), "folder": name})
                        answer = server.ask({"grow": peer})
                        if "mib" in answer:
                            answer["mib"] -= result_bytes(case) / (1 << 20)
                    except HelperError as error:
                        answer = {"not": f"failed: {error}"}
            yield {"case": case.name, "threads": threads, "peer": peer, **answer}
