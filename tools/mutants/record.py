"""What a run of the suite with `tools.mutants.recording` has shown."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tools.mutants.blocks import all_blocks


@dataclass(frozen=True)
class Record:
    """The tests of a run, how long they took, and which blocks they ran."""

    tests: list[str]
    seconds: np.ndarray  # [tests] of processor time, with that of child processes
    ran: np.ndarray  # [tests, blocks / 8] bits

    def covering(self, block: int) -> list[int]:
        """The tests that run a block."""
        found: list[int] = np.flatnonzero(self.ran[:, block // 8] >> (7 - block % 8) & 1).tolist()
        return found

    def covered(self) -> set[int]:
        """The blocks that some test runs."""
        return set(np.flatnonzero(np.unpackbits(np.bitwise_or.reduce(self.ran, axis=0))).tolist())


def prepare(folder: Path) -> None:
    """Make an empty folder for a record of the sources as they are."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.npz"):
        old.unlink()
    (folder / "blocks.json").write_text(json.dumps([f"{file}:{line}" for file, line in all_blocks()]))


def load(folder: Path) -> Record:
    """The record that the processes of a run have left in a folder."""
    parts = [np.load(path) for path in sorted(folder.glob("*.npz"))]
    if not parts:
        raise SystemExit(f"error: {folder} holds no record; run python -m tools.mutants record")
    if json.loads((folder / "blocks.json").read_text()) != [f"{file}:{line}" for file, line in all_blocks()]:
        raise SystemExit(f"error: the sources have changed since {folder} was recorded; record again")
    return Record(
        [test for part in parts for test in part["tests"].tolist()],
        np.concatenate([part["seconds"] for part in parts]),
        np.concatenate([part["ran"] for part in parts]),
    )
