"""Small models for the tests of the face."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

EXAMPLES = Path(__file__).parents[2] / "examples" / "models"

HEADS, SIZE = 4, 16


def attention(
    dtype: int = TensorProto.FLOAT, batch: int | str = "batch", length: int | str = "seq", ir_version: int = 8
) -> onnx.ModelProto:
    """softmax(q k^T / 4) v with heads in front: one block that is always fused."""

    def info(name: str) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, dtype, [batch, HEADS, length, SIZE])

    nodes = [
        helper.make_node("Transpose", ["key"], ["key_t"], "transpose", perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["query", "key_t"], ["product"], "scores"),
        helper.make_node("Mul", ["product", "scale"], ["scaled"], "scale_scores"),
        helper.make_node("Softmax", ["scaled"], ["probs"], "attn/Softmax", axis=-1),
        helper.make_node("MatMul", ["probs", "value"], ["out"], "context"),
    ]
    scale = numpy_helper.from_array(np.array(0.25, helper.tensor_dtype_to_np_dtype(dtype)), "scale")
    graph = helper.make_graph(nodes, "attention", [info("query"), info("key"), info("value")], [info("out")], [scale])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=ir_version)


def in_a_function() -> onnx.ModelProto:
    """The attention in a function of the model."""
    model = attention()
    names = [value.name for value in model.graph.input]
    body = helper.make_function(
        "local", "Attend", [*names, "scale"], ["out"], list(model.graph.node), list(model.opset_import)
    )
    del model.graph.node[:]
    model.graph.node.append(helper.make_node("Attend", [*names, "scale"], ["out"], "attend", domain="local"))
    model.functions.append(body)
    model.opset_import.append(helper.make_opsetid("local", 1))
    return model


def plain() -> onnx.ModelProto:
    """A model without attention."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", 4])
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"], "relu")], "plain", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def projected(folder: Path, location: str = "weights.bin", rows: int = SIZE) -> tuple[Path, np.ndarray]:
    """Attention whose query goes through a matrix in an external file; returns the model's path and the
    matrix.

    The file begins with 64 bytes that belong to nobody, so that offsets matter.
    """
    model = attention(batch=2, length=8)
    weight = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
    model.graph.initializer.append(external("w", weight.shape, location, 64))
    model.graph.node.insert(0, helper.make_node("MatMul", ["query", "w"], ["projected"], "project"))
    model.graph.node[2].input[0] = "projected"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    data = folder / location
    if data.parent.is_dir():
        data.write_bytes(bytes(64) + weight.tobytes())
    return path, weight


def external(name: str, shape: tuple[int, ...], location: str, offset: int, length: int | None = None) -> TensorProto:
    """A float32 tensor that lies in another file."""
    tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, data_location=TensorProto.EXTERNAL)
    size = 4 * int(np.prod(shape)) if length is None else length
    for key, value in (("location", location), ("offset", str(offset)), ("length", str(size))):
        tensor.external_data.add(key=key, value=value)
    return tensor


def saved(model: onnx.ModelProto, path: Path) -> Path:
    """Write a model and return its path."""
    path.write_bytes(model.SerializeToString())
    return path


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder, and of those below it."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def ops(path: Path) -> list[str]:
    """The op types of the main graph of a file, external data untouched."""
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


def feeds(length: int = 8, dtype: type[np.floating] = np.float32) -> dict[str, np.ndarray]:
    """Inputs for `attention` and `projected`."""
    rng = np.random.default_rng(1)
    shape = (2, HEADS, length, SIZE)
    return {name: rng.standard_normal(shape).astype(dtype) for name in ("query", "key", "value")}


def positions() -> onnx.ModelProto:
    """A table of 8 positions is added to a sequence of any length."""
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", "length", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", "length", 4])
    table = numpy_helper.from_array(np.zeros((8, 4), np.float32), "table")
    graph = helper.make_graph([helper.make_node("Add", ["x", "table"], ["y"], "add")], "positions", [x], [y], [table])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def with_caches_of_fixed_length(model: onnx.ModelProto) -> onnx.ModelProto:
    """The decoder, declared for one token behind four cached keys: as many exporters write it without dynamic axes."""
    sizes = {"seq": 1, "past": 4, "total": 5}
    for info in (*model.graph.input, *model.graph.output):
        for axis, dim in enumerate(info.type.tensor_type.shape.dim):
            if dim.dim_param in sizes:
                dim.dim_value = sizes[dim.dim_param]
            elif info.name.startswith("present") and axis == 2:
                dim.dim_value = sizes["total"]
    return model


def limited(most: int) -> onnx.ModelProto:
    """`attention` whose queries get positions from a table of `most` rows, as in a BERT."""
    model = attention()
    graph = model.graph
    nodes = [
        helper.make_node("Shape", ["query"], ["length"], "length", start=2, end=3),
        helper.make_node("Slice", ["table", "first", "length"], ["places"], "positions"),
        helper.make_node("Add", ["query", "places"], ["placed"], "embed"),
    ]
    for node in graph.node:
        node.input[:] = ["placed" if name == "query" else name for name in node.input]
    both = [*nodes, *graph.node]
    graph.ClearField("node")
    graph.node.extend(both)
    weights = {"table": np.ones((most, SIZE), np.float32), "first": np.array([0])}
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    return model
