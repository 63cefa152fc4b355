"""The attentions of the kept graphs, each cut out with the numbers it was given in a run.

A snippet goes from the projections of query, key and value to the layout behind the second product; what masks the
scores is followed to the inputs of the graph. Values at the cut are inputs, fed with what they were in the whole graph.
They are made once, and kept in `build/fuzz/snippets`.
"""

from __future__ import annotations

import hashlib
import pickle
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, shape_inference

from tests.graphs import harness
from tools.fuzz.difference import Array
from tools.fuzz.graph import Case, Input, Size

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "fuzz" / "snippets"

PRODUCTS = ("MatMul", "Gemm", "Einsum", "FusedMatMul", "Conv", "MatMulInteger", "QLinearMatMul")
FAR = ("LayerNormalization", "SimplifiedLayerNormalization", "ReduceMean", "Erf", "Gelu", "Tanh", "BatchNormalization")
"""What belongs to the layers between attentions."""
ATTENTION_OPS = ("Attention", "MultiHeadAttention", "GroupQueryAttention", "FlexAttention")
LAYOUT = ("Transpose", "Reshape", "Cast", "Div", "Mul", "Squeeze", "Unsqueeze", "Identity")
MOST_NODES = 200
"""Constants not counted."""
MOST_BYTES = 1 << 18
"""Of one weight: larger ones belong to layers."""


@dataclass(frozen=True)
class Snippet:
    """A model, and an array for each input."""

    model: bytes
    arrays: Mapping[str, Array]


def names() -> list[str]:
    """The kept graphs."""
    return sorted(harness.read_index())


def snippets(name: str) -> list[Snippet]:
    """The snippets of one kept graph; none where ONNX Runtime does not run it, or it holds no attention."""
    digest = hashlib.sha256((harness.HERE / f"{name}.onnx.xz").read_bytes() + Path(__file__).read_bytes()).hexdigest()
    path = KEPT / f"{name}-{digest[:12]}.pickle"
    if path.exists():
        kept: list[Snippet] = pickle.loads(path.read_bytes())
        return kept
    made = _made(name)
    KEPT.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{id(made)}")
    part.write_bytes(pickle.dumps(made))
    part.replace(path)
    return made


def _made(name: str) -> list[Snippet]:
    model = harness.load(name)
    entry = harness.read_index()[name]
    try:
        if model.functions:
            model = onnx.inliner.inline_local_functions(model)
        model = shape_inference.infer_shapes(model)
        cuts = [cut for cut in (_cut(model, node) for node in _anchors(model)) if cut is not None][:2]
        return _filled(model, cuts, harness.inputs(entry))
    except Exception:  # of onnx and of ONNX Runtime: a graph that does not run is no source
        return []


def _anchors(model: onnx.ModelProto) -> list[onnx.NodeProto]:
    return [node for node in model.graph.node if node.op_type in ("Softmax", "LogSoftmax", *ATTENTION_OPS)]


def _cut(model: onnx.ModelProto, anchor: onnx.NodeProto) -> onnx.ModelProto | None:
    """The part of the model around a softmax or an operator; None where it is too large or of unknown types."""
    graph = model.graph
    maker = {output: index for index, node in enumerate(graph.node) for output in node.output if output}
    readers: dict[str, list[int]] = {}
    for index, node in enumerate(graph.node):
        for value in node.input:
            readers.setdefault(value, []).append(index)
    weights = {tensor.name: tensor for tensor in graph.initializer}
    chosen: set[int] = set()
    cuts: set[str] = set()

    def follow(value: str, products: int) -> None:
        if not value or value in weights or value not in maker or value in cuts:
            return
        node = graph.node[maker[value]]
        if node.op_type in FAR or (node.op_type in PRODUCTS and not products):
            cuts.add(value)
            return
        if maker[value] in chosen:
            return
        chosen.add(maker[value])
        for each in node.input:
            follow(each, products - (node.op_type in PRODUCTS))

    chosen.add(maker[anchor.output[0]])
    ready = anchor.op_type in ATTENTION_OPS
    for value in anchor.input:
        follow(value, 0 if ready else 1)
    last, product = anchor.output[0], ready
    for _ in range(12):
        following = [graph.node[index] for index in readers.get(last, ())]
        node = next((each for each in following if each.op_type in PRODUCTS), following[0] if following else None)
        if node is None or (product and node.op_type not in LAYOUT) or len(node.output) != 1:
            break
        if product and node.op_type in ("Mul", "Div", "Cast") and len(following) > 1:
            break
        chosen.add(maker[node.output[0]])
        for value in node.input:
            if value != last:
                follow(value, 0)
        product |= node.op_type in PRODUCTS
        last = node.output[0]
    counted = sum(graph.node[index].op_type != "Constant" for index in chosen)
    if not product or counted > MOST_NODES:
        return None
    return _model(model, sorted(chosen), last, weights)


def _model(
    model: onnx.ModelProto, chosen: Iterable[int], last: str, weights: Mapping[str, onnx.TensorProto]
) -> onnx.ModelProto | None:
    graph = model.graph
    known = {info.name: info for info in (*graph.input, *graph.value_info, *graph.output)}
    nodes = [graph.node[index] for index in chosen]
    made = {output for node in nodes for output in node.output}
    read = dict.fromkeys(value for node in nodes for value in node.input if value and value not in made)
    if any(each.HasField("g") for node in nodes for each in node.attribute):
        return None
    outer = [value for value in read if value not in weights or weights[value].ByteSize() > MOST_BYTES]
    inputs = [_known(value, known) for value in outer]
    held = [weights[value] for value in read if value in weights and value not in outer]
    made_graph = helper.make_graph(nodes, "snippet", inputs, [_known(last, known)], held)
    return helper.make_model(made_graph, opset_imports=model.opset_import, ir_version=model.ir_version)


def _known(value: str, known: Mapping[str, onnx.ValueInfoProto]) -> onnx.ValueInfoProto:
    """What is known of a value; of some it is the name only, and a run tells the rest."""
    info = known.get(value)
    if info is None or not info.type.tensor_type.HasField("shape"):
        return onnx.ValueInfoProto(name=value)
    return info


def _filled(model: onnx.ModelProto, cuts: list[onnx.ModelProto], feeds: Mapping[str, Array]) -> list[Snippet]:
    """The snippets with what their inputs are in a run of the whole graph."""
    if not cuts:
        return []
    wanted = {info.name for cut in cuts for info in (*cut.graph.input, *cut.graph.output)}
    held = {
        tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in model.graph.initializer if tensor.name in wanted
    }
    inner = sorted(wanted - set(feeds) - set(held))
    whole = onnx.ModelProto()
    whole.CopyFrom(model)
    declared = {output.name for output in whole.graph.output}
    known = {info.name: info for info in model.graph.value_info}
    whole.graph.output.extend(_known(name, known) for name in inner if name not in declared)
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = ort.InferenceSession(whole.SerializeToString(), options, providers=["CPUExecutionProvider"])
    values = dict(zip(inner, session.run(inner, dict(feeds)), strict=True)) if inner else {}
    values |= {**feeds, **held}
    for cut in cuts:
        for info in (*cut.graph.input, *cut.graph.output):
            if not info.HasField("type"):
                value = np.array(values[info.name])
                elem_type = helper.np_dtype_to_tensor_dtype(value.dtype)
                dims = [f"{re.sub(r'[^0-9A-Za-z]', '_', info.name)}_{axis}" for axis in range(value.ndim)]
                info.CopyFrom(helper.make_tensor_value_info(info.name, elem_type, dims))
    return [
        Snippet(cut.SerializeToString(), {info.name: np.array(values[info.name]) for info in cut.graph.input})
        for cut in cuts
        if all(values[info.name].size < 1 << 16 for info in cut.graph.input)
    ]


def training() -> list[str]:
    """The kept graphs of an attention with its gradient."""
    return [name for name in names() if name.startswith(("train_", "tftrain_")) and "_block_" not in name]


@cache
def whole(name: str) -> Snippet:
    """A kept graph as it is."""
    arrays = harness.inputs(harness.read_index()[name])
    return Snippet(harness.load(name).SerializeToString(), dict(arrays))


def case_of(model: onnx.ModelProto, arrays: Mapping[str, Array], words: list[str]) -> Case:
    """The case of a model whose inputs have these numbers in a plain run."""
    inputs, sizes = [], {}
    loose = False
    for info in model.graph.input:
        array = arrays[info.name]
        dims: list[Size] = []
        declared = info.type.tensor_type.shape.dim if info.type.tensor_type.HasField("shape") else ()
        dims.extend(array.shape[len(declared) :])
        for axis, dim in enumerate(declared):
            name = dim.dim_param if re.fullmatch(r"\w+", dim.dim_param or "") else ""
            if name and sizes.setdefault(name, array.shape[axis]) == array.shape[axis]:
                dims.append(name)
            else:
                loose |= bool(dim.dim_param) and not name  # a sum of others, which does not follow them
                dims.append(array.shape[axis])
        inputs.append(Input(info.name, _role(info.name, array), str(array.dtype), tuple(dims), _number(array)))
    return Case(model, inputs, sizes, frozenset(sizes), words, base=arrays, loose=loose)


def _role(name: str, array: Array) -> str:
    """What an input is for, as far as its numbers and its name tell."""
    if array.dtype == np.bool_:
        return "bool"
    zeros_and_ones = array.size and bool(np.isin(array, (0, 1)).all())
    if array.dtype.kind in "iu":
        return "int01" if zeros_and_ones and "mask" in name else "fixed"
    if array.size and (array <= -1e4).any() and (array == 0).any():
        return "fmask"
    if zeros_and_ones and "mask" in name:
        return "scale01"
    return "value" if array.ndim >= 2 else "fixed"


def _number(array: Array) -> float:
    return float(array.min()) if array.dtype.kind == "f" and array.size else 0.0
