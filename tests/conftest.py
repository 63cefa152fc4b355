"""Settings for all tests."""

import gc
import os
from pathlib import Path
from typing import Any

import onnxruntime as ort
import pytest
from hypothesis import HealthCheck, settings

# A busy machine must not fail a test, and a failure must be the same one next time.
settings.register_profile(
    "fa_compiler",
    deadline=None,
    derandomize=True,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
# HYPOTHESIS_PROFILE=explore draws new examples on every run, FA_COMPILER_EXAMPLES=20 twenty times as many
# (examples.py): for a longer search by hand.
settings.register_profile("explore", settings.get_profile("fa_compiler"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fa_compiler"))

# GNU's readline, which pytest imports, sets this variable for the programs that are started, as pytest-xdist does it.
os.environ.pop("COLUMNS", None)

# The garbage collector looks at ten thousand tests and all modules again and again otherwise, and finds nothing.
gc.set_threshold(100_000, 20, 100)

THOROUGH = Path(__file__).with_name("thorough.txt")
"""Slow rows that run nothing that others do not run: `make thorough` runs them, `make test` does not. The list is
written by tools/mutants/thin.py."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest looks at the marks."""
    listed = frozenset(THOROUGH.read_text().splitlines())
    for item in items:
        if item.nodeid in listed:
            item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    """What exists before the first test stays: the garbage collector need not look at it."""
    gc.collect()
    gc.freeze()


class _SleepingThreads(ort.SessionOptions):  # type: ignore[misc]  # onnxruntime is not typed
    """Options of a session whose threads sleep while they wait. By default they spin, and take a core from the process
    that runs the other half of the tests."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for pool in ("intra", "inter"):
            self.add_session_config_entry(f"session.{pool}_op.allow_spinning", "0")


ort.SessionOptions = _SleepingThreads
