"""Runs sharded models by threads, and the same models by one process."""

from __future__ import annotations

import atexit
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

import fa_compiler
from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.session import ShardedSession
from fa_compiler.parallel.sharding import Sharded
from fa_compiler.parallel.threads import run_threads
from tests.graphs import harness

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"
TOLERANCE = 1e-5
"""As `fa-compiler verify` has it for float32: relative to the largest number of an output."""

_FOLDER = tempfile.TemporaryDirectory(prefix="fa_compiler-parallel-")
atexit.register(_FOLDER.cleanup)


@functools.cache
def content(name: str) -> bytes:
    """A model of examples/models or tests/graphs."""
    path = EXAMPLES / f"{name}.onnx"
    return path.read_bytes() if path.exists() else harness.load(name).SerializeToString()


@functools.cache
def sharded(name: str, ranks: int, method: str = "auto") -> Sharded:
    """The model of the ranks."""
    return fa_compiler.shard(content(name), Path(_FOLDER.name) / f"{name}-{ranks}-{method}", ranks, method=method)


@functools.cache
def _session(name: str) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    return ort.InferenceSession(content(name), options)


def by_one(name: str, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """The outputs of the original model."""
    session = _session(name)
    return dict(zip((each.name for each in session.get_outputs()), session.run(None, dict(feeds)), strict=True))


def by_ranks(path: Path, ranks: int, feeds: Mapping[str, Array], timeout: float = 60) -> dict[str, Array]:
    """The outputs of a sharded model, gathered from threads."""

    def task(communicator: Communicator) -> dict[str, Array]:
        session = ShardedSession(path, communicator, threads=1)
        return session.gather(session.run(feeds), feeds)

    return run_threads(ranks, task, timeout)[0]


def text(name: str, length: int, padded: str = "right", batch: int = 2, seed: int = 0) -> dict[str, Array]:
    """Token ids, and a mask that leaves out some tokens of the second text. The example models know 256 tokens, the
    others 99."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(2, 256 if (EXAMPLES / f"{name}.onnx").exists() else 99, (batch, length))
    mask = np.ones((batch, length), np.int64)
    if padded == "right":
        mask[-1, -length // 3 :] = 0
    if padded == "left":
        mask[-1, : length // 3] = 0
    every = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": np.broadcast_to(np.arange(length), (batch, length)).copy(),
        "token_type_ids": rng.integers(0, 2, (batch, length)),
    }
    names = [each.name for each in onnx.load_model_from_string(content(name)).graph.input]
    return {name: every[name] for name in names if name in every}


BANDS = {"none": (UNLIMITED, UNLIMITED), "causal": (UNLIMITED, 0), "window": (3, 0), "both sides": (2, 4)}
"""The two diagonals of a band, before the row's own key and behind it."""


def shape_in(layout: str, batch: int, heads: int, tokens: int, size: int) -> tuple[int, ...]:
    """The shape of a query, key or value."""
    return {
        "BNSD": (batch, heads, tokens, size),
        "BSND": (batch, tokens, heads, size),
        "BSH": (batch, tokens, heads * size),
        "SBH": (tokens, batch, heads * size),
    }[layout]


def check(expected: Mapping[str, Array], found: Mapping[str, Array], tolerance: float = TOLERANCE) -> None:
    """The same outputs up to rounding, with NaN and infinities at the same places."""
    assert expected.keys() == found.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(np.isnan(array), np.isnan(found[name]), err_msg=name)
        largest = float(np.abs(array[np.isfinite(array)]).max(initial=0))
        np.testing.assert_allclose(found[name], array, rtol=0, atol=tolerance * largest, err_msg=name)
