"""The kept graphs: how one is stored, read, and judged. Shared by test_graphs.py and tools/graphs.

`NAME.onnx.xz` is an exported model without its weights (see examples/weights.py). `index.json` says for
each what it is of (`source`), its inputs, what is assumed (`assume`, if anything), and what the compiler makes of it.

An input is written as {"dtype", "shape"} and either "values" (the numbers, in order) or "normal"
[mean, std, seed]. bfloat16 is written as float32 values.
"""

from __future__ import annotations

import functools
import json
import lzma
import math
from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from examples import weights

HERE = Path(__file__).parent

INDEX = HERE / "index.json"

Index = dict[str, dict[str, Any]]


@functools.cache
def read_index() -> Index:
    """The index by graph name."""
    index: Index = json.loads(INDEX.read_text(encoding="utf-8"))
    return index


def write_index(index: Index) -> None:
    """Write the index with one graph a line, so that a diff shows which ones changed."""
    lines = (f"{json.dumps(name)}: {json.dumps(index[name])}" for name in sorted(index))
    INDEX.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def load(name: str) -> onnx.ModelProto:
    """The graph with weights drawn for it."""
    model = onnx.load_model_from_string(lzma.decompress((HERE / f"{name}.onnx.xz").read_bytes()))
    weights.fill(model)
    return model


def store(name: str, model: onnx.ModelProto) -> None:
    """Keep a model: without notes and large weights. The model is changed in place."""
    weights.without_notes(model)
    weights.strip(model)
    data = lzma.compress(model.SerializeToString(deterministic=True), preset=9 | lzma.PRESET_EXTREME)
    (HERE / f"{name}.onnx.xz").write_bytes(data)


def inputs(entry: dict[str, Any]) -> dict[str, np.ndarray]:
    """The inputs of a graph."""
    return {name: _read_input(spec) for name, spec in entry["inputs"].items()}


def describe_input(array: np.ndarray, seed: int) -> dict[str, Any]:
    """An input as the index holds it: literally if it is no plain float data, else as a recipe."""
    values = array.astype(np.float64)
    spec: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    plain = array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16
    if plain and array.size > 16 and np.isfinite(values).all() and np.unique(values).size > 4:
        mean, std = float(values.mean()), float(values.std())
        if np.abs(values - mean).max() < 8 * std:
            return {**spec, "normal": [round(mean, 4), round(std, 4), seed]}
    return {**spec, "values": [_to_json(item) for item in array.reshape(-1).tolist()]}


def _read_input(spec: dict[str, Any]) -> np.ndarray:
    dtype = np.dtype(spec["dtype"] if spec["dtype"] != "bfloat16" else ml_dtypes.bfloat16)
    if "values" in spec:
        values = [float(item) if isinstance(item, str) else item for item in spec["values"]]
        return np.array(values).astype(dtype).reshape(spec["shape"])
    mean, std, seed = spec["normal"]
    drawn: np.ndarray = np.random.default_rng(seed).normal(mean, std, spec["shape"])
    return drawn.astype(dtype)


def _to_json(item: Any) -> Any:
    return item if not isinstance(item, float) or math.isfinite(item) else str(item)


def summary(report: dict[str, Any]) -> dict[str, int]:
    """What became of the blocks of a JSON report: a description and how many blocks it fits.

    A fused block is described by its operator, layout and mask; another by
    its status and code.
    """
    words: Counter[str] = Counter()
    for block in report["blocks"]:
        if block["status"] == "fused":
            words[f"{block['op']} {block['layout']} {block['mask']}"] += 1
        else:
            words[f"{block['status']} {block['code'] or ''}".strip()] += 1
    return dict(sorted(words.items()))
