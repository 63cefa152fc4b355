"""What structure the masks have that fused nodes read: seen in their numbers, not in the compiler's report.

A mask that is the same in all rows, or whose allowed keys form a band of diagonals, or a band with such a row, costs
nothing if it is a mode of the operator or a single row. A dense tensor of this kind is a structure that was lost.
"""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort

import fa_compiler
from fa_compiler.lowering.onnx_file import to_graph_operators
from fa_compiler.op_registry import DOMAIN, get

FILL = -1e3
"""A number at or below this in a bias excludes a key."""
MASK, BIAS, MODE = "atten_mask", "real_shift", "sparse_mode"

Feeds = dict[str, np.ndarray]


def allowed_keys(name: str, mask: np.ndarray) -> np.ndarray | None:
    """Where a mask or a bias lets a row see a key, with the axes [..., rows, keys]; None if there are no such axes."""
    if mask.ndim < 2:
        return None
    return mask == 0 if name == MASK else ~(mask.astype(np.float64) <= FILL)


def is_structured(allowed: np.ndarray) -> bool:
    """Is each matrix of [..., rows, keys] a band of diagonals, one choice of keys for all rows, or both?"""
    return all(_is_product(matrix) for matrix in allowed.reshape(-1, *allowed.shape[-2:]))


def _is_product(matrix: np.ndarray) -> bool:
    """Does the matrix equal the smallest band around its allowed keys, without the keys that no row of the band sees?

    A key is left out by the choice if no row sees it. A diagonal is left out by the band if no chosen key lies on it. A
    row that neither of them empties, but that sees nothing, is no such structure.
    """
    rows, keys = np.indices(matrix.shape)
    if not matrix.any():
        return True
    offsets = (keys - rows)[matrix]
    band = (keys - rows >= offsets.min()) & (keys - rows <= offsets.max())
    chosen = matrix.any(axis=0)
    return bool(np.array_equal(band & chosen, matrix))


def structures(fused: onnx.ModelProto, feeds: Feeds) -> dict[str, int]:
    """How many fused attentions keep a structure (`kept`), and how many read one as a dense tensor (`lost`).

    The names of the latter are the keys of the result besides. Raises what ONNX Runtime raises.
    """
    model = to_graph_operators(fused)
    graph = onnx.ModelProto()
    graph.CopyFrom(model)
    nodes = [node for node in graph.graph.node if node.domain == DOMAIN and _has_masks(node.op_type)]
    wanted = {name for node in nodes for name in _masks(node).values() if name}
    given = {value.name for value in graph.graph.output}
    graph.graph.output.extend(onnx.ValueInfoProto(name=name) for name in sorted(wanted - given))
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    fa_compiler.register_custom_ops(options)
    session = ort.InferenceSession(graph.SerializeToString(), options, providers=["CPUExecutionProvider"])
    own = {value.name for value in session.get_inputs()}
    names = sorted(wanted)
    values = session.run(names, {name: value for name, value in feeds.items() if name in own}) if names else []
    found = dict(zip(names, values, strict=True))
    result = {"kept": 0, "lost": 0}
    for node in nodes:
        word = _judged(node, found)
        if word:
            result[word] += 1
        if word == "lost":
            result[node.name] = 1
    return result


def _has_masks(op: str) -> bool:
    return MASK in [each.name for each in get(op).inputs]


def _masks(node: onnx.NodeProto) -> dict[str, str]:
    """The values of the mask and the bias of a node, by the names of the prototype."""
    given = dict(zip([each.name for each in get(node.op_type).inputs], node.input, strict=False))
    return {name: given.get(name, "") for name in (MASK, BIAS)}


def _judged(node: onnx.NodeProto, found: dict[str, np.ndarray]) -> str:
    """kept, lost, or nothing where there is no structure."""
    if next((each.i for each in node.attribute if each.name == MODE), 0) not in (0, 1):
        return "kept"
    word = ""
    for name, value in _masks(node).items():
        if not value:
            continue
        allowed = allowed_keys(name, found[value])
        if allowed is None or allowed.all():
            continue
        if allowed.shape[-2] == 1:
            word = "kept"
        elif is_structured(allowed):
            return "lost"
    return word
