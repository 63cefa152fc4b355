"""A plugin of pytest: which blocks each test runs, and how long it takes. `python -m tools.mutants record` loads it.

Each process of pytest-xdist writes a file of its own into the folder that FA_COMPILER_MUTANTS names. What a test starts
as a new program is not seen, and what tests share (a fixture, a cache) counts for the first of them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest

from tools.mutants import blocks

FOLDER = "FA_COMPILER_MUTANTS"


def _now() -> float:
    return time.process_time() + os.times().children_user + os.times().children_system


class _Recorder:
    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / f"{name}.npz"
        self.ran = blocks.watch()
        self.tests: list[str] = []
        self.seconds: list[float] = []
        self.bits: list[np.ndarray] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        self.ran[:] = bytes(len(self.ran))
        start = _now()
        try:
            return (yield)
        finally:
            self.tests.append(item.nodeid)
            self.seconds.append(_now() - start)
            self.bits.append(np.packbits(np.frombuffer(self.ran[:], np.uint8)))

    def pytest_sessionfinish(self) -> None:
        if self.tests:
            np.savez_compressed(
                self.path, tests=np.array(self.tests), seconds=np.array(self.seconds), ran=np.stack(self.bits)
            )


# Made while pytest loads its plugins: before a test imports any of the sources.
_RECORDER = _Recorder(Path(os.environ[FOLDER]), os.environ.get("PYTEST_XDIST_WORKER", "main"))


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_RECORDER)
