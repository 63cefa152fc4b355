"""Linear attention in the forms of older opsets, some of whose operators mean something else."""

from __future__ import annotations

import onnx
import pytest
from onnx import TensorProto, helper

from tests.passes.running import assert_same, feeds_of, fused, parse, run

STEP = (
    "kp = Pad<pads=[0,0,0,0,0,1],value=FILLER>(k) k0 = Pad<pads=[0,0,0,0,0,1]>(k) column = Unsqueeze<axes=[3]>(kp) "
    "row = Unsqueeze<axes=[2]>(k0) qr = Unsqueeze<axes=[2]>(q) mr = MatMul(row, s0) m = Squeeze<axes=[2]>(mr) "
    "w = Sub(v, m) wr = Unsqueeze<axes=[2]>(w) u = MatMul(column, wr) s1 = Add(s0, u) yr = MatMul(qr, s1) "
    "y = Squeeze<axes=[2]>(yr) "
)
SHAPES = {"q": [1, 4], "k": [4, 1], "v": [1, 6]}


@pytest.mark.parametrize("filler", ["0.0", "1.0"])
def test_a_pad_has_its_number_as_an_attribute(filler: str) -> None:
    """With another number than 0 the two keys differ."""
    inputs = "float[2,3,4] q, float[2,3,3] k, float[2,3,6] v, float[2,3,4,6] s0"
    body = STEP.replace("FILLER", filler)
    proto = parse(body, inputs=inputs, outputs="float[2,3,6] y, float[2,3,4,6] s1", opset=10)
    result, report = fused(proto)
    assert report.count("fused")
    feeds = feeds_of(proto, {})
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


def scan(opset: int) -> onnx.ModelProto:
    """Four tokens; in opset 8 of four sequences, which are one axis more, and an input for their lengths."""

    def entry(name: str, shape: list[int]) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)

    batch, given = ([4], [""]) if opset == 8 else ([], [])
    steps = (["k", "v"], "u"), (["q", "s2"], "o")
    nodes = [helper.make_node("MatMul", operands, [made]) for operands, made in steps]
    nodes.insert(1, helper.make_node("Add", ["s", "u"], ["s2"]))
    tokens = [entry(name, shape) for name, shape in SHAPES.items()]
    body = helper.make_graph(nodes, "b", [entry("s", [4, 6]), *tokens], [entry("s2", [4, 6]), entry("o", [1, 6])])
    names = [*given, "s0", *(f"{name}s" for name in SHAPES)]
    node = helper.make_node("Scan", names, ["s1", "y"], num_scan_inputs=3, body=body)
    inputs = [entry(f"{name}s", [*batch, 4, *shape]) for name, shape in SHAPES.items()]
    outputs = [entry("s1", [*batch, 4, 6]), entry("y", [*batch, 4, 1, 6])]
    graph = helper.make_graph([node], "g", [entry("s0", [*batch, 4, 6]), *inputs], outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4)


@pytest.mark.parametrize(("opset", "count"), [(8, 0), (9, 1)])
def test_a_scan_has_a_batch(opset: int, count: int) -> None:
    """As many sequences as tokens, which are the second axis, and not the first one."""
    proto = scan(opset)
    result, report = fused(proto)
    assert report.count("fused") == count
    feeds = feeds_of(proto, {})
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
