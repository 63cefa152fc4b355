"""Decodes step by step with sharded models by threads, and with the same models by one process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.session import Caches, ShardedSession
from fa_compiler.parallel.sharding import Sharded
from fa_compiler.parallel.threads import run_threads
from tests.graphs import harness

Feeds = dict[str, Array]


def inputs_of(
    name: str, past: int, counts: Sequence[int], caches: Mapping[str, str], padded: int | None = None
) -> list[Feeds]:
    """The inputs of several steps for a kept graph, caches only in the first: `past` tokens before the first step, and
    `counts` new ones in each. The last text is padded on the left by `padded` tokens, or by three cached ones at
    most."""
    entry = harness.read_index()[name]
    rng = np.random.default_rng(past)
    feeds = []
    for step, count in enumerate(counts):
        given = harness.inputs(entry)
        before = past + sum(counts[:step])
        batch = given[next(iter(caches))].shape[0]
        for each in ("input_ids", "decoder_input_ids", "ids"):
            if each in given:
                given[each] = rng.integers(2, 60, (batch, count))
        if "position_ids" in given:
            given["position_ids"] = np.broadcast_to(np.arange(before, before + count), (batch, count)).copy()
        if "attention_mask" in given and "decoder_input_ids" not in given:
            given["attention_mask"] = np.ones((batch, before + count), np.int64)
            given["attention_mask"][-1, : min(3, before) if padded is None else padded] = 0
        for each in caches:
            array = given.pop(each)
            if step == 0:
                sizes = (*array.shape[:2], past, *array.shape[3:])
                given[each] = rng.standard_normal(sizes).astype(array.dtype)
        feeds.append(given)
    return feeds


def by_one(model: onnx.ModelProto | bytes, feeds: Sequence[Feeds], caches: Mapping[str, str]) -> list[Feeds]:
    """The outputs of each step."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    content = model if isinstance(model, bytes) else model.SerializeToString()
    session = ort.InferenceSession(content, options)
    names = [each.name for each in session.get_outputs()]
    found: list[Feeds] = []
    for step in feeds:
        grown = {past: found[-1][present] for past, present in caches.items()} if found else {}
        found.append(dict(zip(names, session.run(None, {**step, **grown}), strict=True)))
    return found


def by_ranks(result: Sharded, feeds: Sequence[Feeds]) -> tuple[list[list[Feeds]], list[Caches]]:
    """The outputs of the steps on each rank, and each rank's caches after the last one. The outputs of the first step
    are gathered, and those of the others are without caches."""
    ranks = result.report.ranks

    def task(communicator: Communicator) -> tuple[list[Feeds], Caches]:
        session = ShardedSession(result.path, communicator, threads=1)
        own = session.run(feeds[0])
        parts = session.parts({name: array.shape for name, array in feeds[0].items()})
        found = [session.gather(own, feeds[0])]
        caches = session.take_caches(own, session.parts_of_outputs(own, parts).positions(communicator.rank))
        for step in feeds[1:]:
            outputs, caches = session.step(step, caches)
            found.append(outputs)
        return found, caches

    results = run_threads(ranks, task, 60)
    return [found for found, _ in results], [caches for _, caches in results]


def saved(model: onnx.ModelProto, folder: Path) -> Path:
    """The model in a file."""
    onnx.save(model, folder / "step.onnx")
    return folder / "step.onnx"
