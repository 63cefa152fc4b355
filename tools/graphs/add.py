"""Keep a new graph as a regression test: its spelling, without its weights.

    python -m tools.graphs.add NAME MODEL.onnx INPUTS.npz --source "exporter and version, what it is"
    python -m tools.graphs.update NAME

The second command records what the compiler makes of it; look at the diff of index.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx

from tests.graphs import harness


def add(
    name: str, model: onnx.ModelProto, feeds: dict[str, np.ndarray], source: str, assume: Sequence[str] = ()
) -> None:
    """Store the graph and its entry, which says nothing yet of what the compiler makes of it."""
    wanted = {value.name for value in model.graph.input}
    described = {
        key: harness.describe_input(array, seed) for seed, (key, array) in enumerate(feeds.items()) if key in wanted
    }
    harness.store(name, model)
    index = harness.read_index() if harness.INDEX.exists() else {}
    index[name] = {"source": source, "inputs": described, **({"assume": list(assume)} if assume else {})}
    harness.write_index(index)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("model", type=Path)
    parser.add_argument("inputs", type=Path, help="an npz; two-byte void arrays are bfloat16")
    parser.add_argument("--source", required=True)
    parser.add_argument("--assume", action="append", default=[], help="an assumption under which it is fused")
    arguments = parser.parse_args()
    with np.load(arguments.inputs) as archive:
        feeds = {key: archive[key] for key in archive.files}
    feeds = {k: v.view(ml_dtypes.bfloat16) if v.dtype.kind == "V" else v for k, v in feeds.items()}
    add(arguments.name, onnx.load(str(arguments.model)), feeds, arguments.source, arguments.assume)


if __name__ == "__main__":
    main()
