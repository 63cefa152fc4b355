"""Checks models with onnx alone: the full checker, without our schemas, and node counts.

A helper process of coverage.py, with one JSON job (`original`, `optimised`) and one verdict on each line. A job with
`variant` writes other inputs for `original` (see compare_inputs.py) to the file `to` instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx

from tools.corpus import compare_inputs
from tools.corpus.compare_outputs import TOLERANCES
from tools.processes import serve

OURS = ("ascend", "fa_compiler")
"""The domains of the fused nodes."""
HALVES = {onnx.TensorProto.FLOAT16: "float16", onnx.TensorProto.BFLOAT16: "bfloat16"}


def check(job: Mapping[str, Any]) -> dict[str, Any]:
    """Check both models with onnx.

    In the verdict, `original_problem` and `problem` are the first lines of the full checker's messages, or null.
    `softmaxes` is the number of Softmax and attention nodes of the original, and `nodes` is the number of nodes of our
    domain in the optimised model. `coarsest` is the coarsest half-precision type of the original, or null.
    `same_interface` says that inputs, outputs and IR version are unchanged.
    """
    original, optimised = onnx.load(job["original"]), onnx.load(job["optimised"])
    kinds = Counter((node.domain, node.op_type) for node in _nodes(original.graph.node))
    ours = [node for node in _nodes(optimised.graph.node) if node.domain in OURS]
    return {
        "original_problem": full_check(job["original"]),
        "problem": full_check(job["optimised"]),
        "softmaxes": sum(n for (_, op), n in kinds.items() if op in ("Softmax", "Attention", "FlexAttention")),
        "nodes": len(ours) + sum(_in_functions(optimised, optimised.graph.node)),
        "coarsest": coarsest_type(original),
        "same_interface": _interface(original) == _interface(optimised),
    }


def full_check(path: str) -> str | None:
    """The first line of the full checker's message about an invalid model file, or None."""
    try:
        onnx.checker.check_model(path, full_check=True)
    except Exception as error:  # any failure is a finding
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
    return None


def _nodes(nodes: Iterable[onnx.NodeProto]) -> Iterable[onnx.NodeProto]:
    for node in nodes:
        yield node
        for attribute in node.attribute:
            for graph in (attribute.g, *attribute.graphs):
                yield from _nodes(graph.node)


def _in_functions(model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]) -> Iterable[int]:
    """A 1 for each node of our domain in each call of a model-local function."""
    bodies = {(function.domain, function.name): function for function in model.functions}
    for node in _nodes(nodes):
        body = bodies.get((node.domain, node.op_type))
        if body is not None:
            yield from (1 for inner in _nodes(body.node) if inner.domain in OURS)
            yield from _in_functions(model, body.node)


def coarsest_type(model: onnx.ModelProto) -> str | None:
    """The coarsest half-precision type that a model declares, or None."""
    graph = model.graph
    found = {HALVES.get(tensor.data_type) for tensor in graph.initializer}
    for value in (*graph.input, *graph.value_info):
        found.add(HALVES.get(value.type.tensor_type.elem_type))
    return max((name for name in found if name), key=TOLERANCES.__getitem__, default=None)


def _interface(model: onnx.ModelProto) -> list[bytes]:
    """The serialised inputs and outputs, and the IR version. None of them may change."""
    values = (*model.graph.input, *model.graph.output)
    described = [value.name.encode() + value.type.SerializeToString(deterministic=True) for value in values]
    return [*described, str(model.ir_version).encode()]


def answer(job: Mapping[str, Any]) -> dict[str, Any]:
    """Check two models, or write a variant of the inputs."""
    if "variant" not in job:
        return check(job)
    with np.load(job["inputs"]) as archive:
        feeds = {name: archive[name] for name in archive.files}
    varied = compare_inputs.vary(onnx.load(job["original"]), feeds, job["variant"])
    np.savez(job["to"], allow_pickle=False, **varied)
    return {}


if __name__ == "__main__":
    serve(answer, {"onnx": onnx.__version__})
