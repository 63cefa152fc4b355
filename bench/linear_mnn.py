"""MNN's operator LinearAttention: a helper process of linear.py, in the interpreter that has the package MNN.

    python -m venv MNN && MNN/bin/pip install MNN

It answers as peers.py says. The question for a case is that of linear_peers.py. The only case is "layer", because MNN's
operator is a convolution with SiLU and the gated delta rule behind it, in float32. A model of this one operator is
written as JSON, which the converter in the package makes a file of MNN. MNN keeps the states from run to run; the first
run begins with zeros.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers import Peers, Run
from tools.processes import serve

NAME = "MNN"


def model(shapes: dict[str, tuple[int, ...]], heads: int, size: int) -> dict[str, Any]:
    """A model of one LinearAttention with inputs of these names and shapes, as the converter reads it."""
    inputs = [
        {"type": "Input", "name": name, "main_type": "Input", "main": {"dims": shape}, "outputIndexes": [place]}
        for place, (name, shape) in enumerate(shapes.items())
    ]
    sizes = {"num_k_heads": heads, "num_v_heads": heads, "head_k_dim": size, "head_v_dim": size}
    rule = {
        "type": "LinearAttention",
        "name": "output",
        "main_type": "LinearAttentionParam",
        "main": {"attn_type": "gated_delta_rule", **sizes, "use_qk_l2norm": False},
        "inputIndexes": [*range(len(shapes))],
        "outputIndexes": [len(shapes)],
    }
    nodes = [node | {"defaultDimentionFormat": "NCHW"} for node in [*inputs, rule]]
    return {"oplists": nodes, "tensorName": [*shapes, "output"]}


def layer(given: dict[str, np.ndarray], heads: int, threads: int, folder: Path) -> Run:
    """A run of the model that is written to this folder."""
    import _tools  # MNN's converter. Both print when they are imported, so that serve must have begun.
    import MNN

    described, converted = folder / "layer.json", folder / "layer.mnn"
    size = given["input"].shape[1] // 3 // heads
    described.write_text(json.dumps(model({name: array.shape for name, array in given.items()}, heads, size)))
    _tools.mnnconvert(["", "-f", "JSON", "--modelFile", str(described), "--MNNModel", str(converted)])
    module = MNN.nn.load_module_from_file(
        str(converted), [*given], ["output"], precision_mode=MNN.expr.PrecisionMode.High, thread_num=threads
    )
    feeds = []
    for array in given.values():
        feeds.append(MNN.expr.placeholder(list(array.shape), MNN.expr.NCHW, MNN.expr.float))
        feeds[-1].write(array)

    def run() -> Any:
        return module.forward(feeds)

    return run


def prepared(question: dict[str, Any]) -> dict[str, Run]:
    """The peer of a case, if there is one."""
    if question["case"] != "layer" or question["type"] != "float32":
        return {}
    inputs = Path(question["inputs"])
    with np.load(inputs) as file:
        given = {name: file[name] for name in ("input", "decay", "beta", "weight")}
    return {NAME: layer(given, question["heads"], question["threads"], inputs.parent)}


if __name__ == "__main__":
    serve(Peers(prepared, lambda results: results[0].read()).answer, {})
