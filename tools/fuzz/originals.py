"""Files that are as they should be, to be damaged: models, what `fa-compiler atc` makes of them, and the rest."""

from __future__ import annotations

import io
import json
import lzma
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.lowering.ascend.air import serialise
from fa_compiler.lowering.ascend.single_op import to_json
from tests.lowering.ascend.graphs import attention, branches
from tools.fuzz.damage import ROOT, command
from tools.fuzz.grammar import compose

COMPOSED = 60
LARGEST = 9000
"""Bytes of a kept graph that is damaged; larger ones take longer and hold nothing else."""
EXTERNAL = "w.bin"
"""The file that external data of the models lie in, and its size."""
EXTERNAL_BYTES = 4096


@cache
def models() -> list[bytes]:
    """ONNX models: composed ones, small kept ones, and those with what attentions do not have."""
    kept = (lzma.decompress(path.read_bytes()) for path in sorted((ROOT / "tests" / "graphs").glob("*.onnx.xz")))
    composed = [compose(seed).model.SerializeToString() for seed in range(COMPOSED)]
    special = [each.SerializeToString() for each in (_functions(), _branches(), _external(), _large())]
    return [*composed, *(model for model in kept if len(model) <= LARGEST), *special * 4]


def _value(name: str, *dims: int | str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, dims)


def _functions() -> onnx.ModelProto:
    """Model-local functions that call each other."""
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("own", 1)]
    softmax = helper.make_node("Softmax", ["s"], ["p"], axis=-1)
    inner = helper.make_function(
        "own", "soft", ["q", "k"], ["p"],
        [helper.make_node("Transpose", ["k"], ["t"], perm=[0, 1, 3, 2]), helper.make_node("MatMul", ["q", "t"], ["s"]),
         softmax], opsets, [],
    )  # fmt: skip
    outer = helper.make_function(
        "own", "attend", ["q", "k", "v"], ["o"],
        [helper.make_node("soft", ["q", "k"], ["p"], domain="own"), helper.make_node("MatMul", ["p", "v"], ["o"])],
        opsets, ["scale"],
    )  # fmt: skip
    node = helper.make_node("attend", ["q", "k", "v"], ["o"], "call", domain="own", scale=0.5)
    values = [_value(name, 2, 2, 4, 8) for name in "qkvo"]
    graph = helper.make_graph([node], "functions", values[:3], values[3:])
    return helper.make_model(graph, opset_imports=opsets, functions=[outer, inner], ir_version=9)


def _branches() -> onnx.ModelProto:
    """An If and a Loop, each with an attention in its graph."""

    def nodes(mark: str) -> list[onnx.NodeProto]:
        return [
            helper.make_node("MatMul", ["q", "k"], [f"s{mark}"], f"scores{mark}"),
            helper.make_node("Softmax", [f"s{mark}"], [f"p{mark}"], f"softmax{mark}", axis=-1),
            helper.make_node("MatMul", [f"p{mark}", "v"], [f"o{mark}"], f"values{mark}"),
        ]

    then = helper.make_graph(nodes("1"), "then", [], [_value("o1", 2, 2, 4, 8)])
    other = helper.make_graph([helper.make_node("Identity", ["q"], ["o2"])], "else", [], [_value("o2", 2, 2, 4, 8)])
    body = helper.make_graph(
        [*nodes("3"), helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Add", ["o3", "last"], ["next"])],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            _value("last", 2, 2, 4, 8),
        ],
        [helper.make_tensor_value_info("on", TensorProto.BOOL, []), _value("next", 2, 2, 4, 8)],
    )
    main = [
        helper.make_node("If", ["c"], ["x"], "if", then_branch=then, else_branch=other),
        helper.make_node("Loop", ["n", "c", "x"], ["o"], "loop", body=body),
    ]
    values = [_value("q", 2, 2, 4, 8), _value("k", 2, 2, 8, 4), _value("v", 2, 2, 4, 8)]
    values.append(helper.make_tensor_value_info("c", TensorProto.BOOL, []))
    graph = helper.make_graph(
        main, "branches", values, [_value("o", 2, 2, 4, 8)], [numpy_helper.from_array(np.array(2, np.int64), "n")]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _weighted(weight: onnx.TensorProto, depth: int) -> onnx.ModelProto:
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"], "project"),
        helper.make_node("Transpose", ["q"], ["t"], "turn", perm=[0, 2, 1]),
        helper.make_node("MatMul", ["q", "t"], ["s"], "scores"),
        helper.make_node("Softmax", ["s"], ["p"], "softmax", axis=-1),
        helper.make_node("MatMul", ["p", "q"], ["o"], "values"),
    ]
    ends = [_value("x", "batch", "length", depth)], [_value("o", "batch", "length", depth)]
    graph = helper.make_graph(nodes, "weighted", *ends, [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def _external() -> onnx.ModelProto:
    """A weight in a file of its own."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[32, 32], data_location=TensorProto.EXTERNAL)
    for key, value in (("location", EXTERNAL), ("offset", "0"), ("length", "4096")):
        weight.external_data.add(key=key, value=value)
    return _weighted(weight, 32)


def _large() -> onnx.ModelProto:
    """A weight that is left in the model's file while the model is in work."""
    return _weighted(numpy_helper.from_array(np.full((132, 132), 0.01, np.float32), "w"), 132)


@cache
def written() -> tuple[list[bytes], list[bytes]]:
    """`.air` files, and files of single operators, as `fa-compiler` writes them."""
    airs = [serialise(model)[0] for model in (attention(), branches())]
    singles = [json.dumps([to_json(attention().root.ops[-2], "fas")]).encode()]
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(COMPOSED):
            case = compose(seed)
            shapes = {
                each.name: ",".join(str(case.sizes.get(str(size), size)) for size in each.dims) for each in case.inputs
            }
            model, out = Path(folder) / f"{seed}.onnx", Path(folder) / str(seed)
            model.write_bytes(case.model.SerializeToString())
            sizes = ";".join(f"{name}:{shape}" for name, shape in shapes.items() if shape)
            where = ("--soc-version", "Ascend910B2", "--single-op", "--quiet", "--input-shape", sizes)
            command("atc", str(model), "-o", str(out), *where)
            if out.exists():
                airs += [each for each in ((out / "model.air").read_bytes(),) if len(each) <= 2 * LARGEST]
                singles += [path.read_bytes() for path in sorted(out.glob("single_op/*.json"))]
    return airs, singles


INPUTS = {"q": "float32", "mask": "bool", "ids": "int64", "b": "bfloat16", "half": "float16"}
"""Inputs of the model that the archives are for."""


def small_model() -> onnx.ModelProto:
    """A model of an input of each type."""
    nodes = [helper.make_node("Identity", [name], [f"{name}_out"]) for name in INPUTS]
    types = {name: getattr(TensorProto, dtype.replace("float32", "float").upper()) for name, dtype in INPUTS.items()}
    inputs = [helper.make_tensor_value_info(name, number, ["n", 3]) for name, number in types.items()]
    outputs = [helper.make_tensor_value_info(f"{name}_out", number, ["n", 3]) for name, number in types.items()]
    graph = helper.make_graph(nodes, "small", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@cache
def archives() -> list[bytes]:
    """Archives of NumPy with inputs for `small_model`."""
    made = []
    for rows in (0, 1, 2, 5):
        for save in (np.savez, np.savez_compressed):
            rng = np.random.default_rng(rows)
            arrays = {
                name: rng.integers(0, 2, (rows, 3)).astype("uint16" if dtype == "bfloat16" else dtype)
                for name, dtype in INPUTS.items()
            }
            stream = io.BytesIO()
            save(stream, **arrays)  # type: ignore[arg-type]
            made.append(stream.getvalue())
    return made
