"""Blocks with a change at random: whatever is fused of them computes what they compute."""

from __future__ import annotations

import os

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from tests.passes.around import test_clipped, test_gelu, test_layer_norm, test_rms_norm, test_rotary, test_swiglu
from tests.passes.around.running import assert_equal, feeds, fused, operators, run

ROUNDS = 60 * int(os.environ.get("FA_COMPILER_EXAMPLES", "1"))
NUMBERS = (0.0, 1.0, -1.0, 2.0, 0.5, 3.0, -0.5)


def blocks() -> list[onnx.ModelProto]:
    """The spellings of the other tests that ONNX Runtime runs."""
    norms = [test_rms_norm.model(body) for body in test_rms_norm.SPELLINGS.values()]
    halves = [
        test_rms_norm.model(body, test_rms_norm.HALF, test_rms_norm.HALF_Y) for body, _ in test_rms_norm.HALVES.values()
    ]
    sums = [
        test_rms_norm.model(f"x = Add(a, b) {test_rms_norm.NORM} y = Mul(n, w)", test_rms_norm.TWO, test_rms_norm.BOTH)
    ]
    centred = [test_layer_norm.model(body) for body in test_layer_norm.SPELLINGS.values()]
    centred += [
        test_layer_norm.model(body, test_layer_norm.HALF, test_layer_norm.HALF_Y)
        for body, _ in test_layer_norm.HALVES.values()
    ]
    centred += [
        test_layer_norm.model(body, test_layer_norm.TWO, test_layer_norm.BOTH) for body in test_layer_norm.SUMS.values()
    ]
    gates = [test_swiglu.model(body) for body in (*test_swiglu.HALVES.values(), *test_swiglu.JOINED.values())]
    gates += [
        test_gelu.model(test_gelu.SPLIT + body + "y = Mul(g1, b)")
        for body in (test_gelu.SPELLINGS | test_gelu.BY_TANH).values()
    ]
    gates += [test_clipped.model(body) for body in (test_clipped.SPELLINGS | test_clipped.JOINED).values()]
    gates += [
        test_gelu.model("a = Neg(x) " + body + "y = Neg(g1)", outputs="float[B,S,8] y")
        for body in test_gelu.WRITTEN_OUT.values()
    ]
    turns = [test_rotary.model(*spelling[:3]) for spelling in test_rotary.SPELLINGS.values()]
    turns += [test_rotary.model(*spelling[:3]) for spelling in test_rotary.OTHER_MODES.values()]
    return [*norms, *halves, *sums, *centred, *gates, *turns]


def changed(proto: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """The model with one change: an input of a node, an attribute, a constant, or one more output."""
    result = onnx.ModelProto.FromString(proto.SerializeToString())
    graph = result.graph
    node = graph.node[int(rng.integers(len(graph.node)))]
    kind = int(rng.integers(5))
    if kind == 0 and len(node.input) > 1:
        node.input[0], node.input[1] = node.input[1], node.input[0]
    elif kind == 1 and node.input:
        before = graph.node[: list(graph.node).index(node)]
        known = [*(value.name for value in graph.input), *(name for each in before for name in each.output)]
        node.input[int(rng.integers(len(node.input)))] = known[int(rng.integers(len(known)))]
    elif kind == 2 and node.attribute and node.attribute[0].type == onnx.AttributeProto.INT:
        node.attribute[0].i = int(rng.integers(-1, 3))
    elif kind == 3:
        tensor = graph.initializer[int(rng.integers(len(graph.initializer)))]
        array = numpy_helper.to_array(tensor).copy()
        array.flat[int(rng.integers(array.size))] = NUMBERS[int(rng.integers(len(NUMBERS)))]
        tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    elif node.output[0] not in {value.name for value in graph.output}:
        graph.output.append(onnx.ValueInfoProto(name=node.output[0]))
    return onnx.shape_inference.infer_shapes(result)


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_a_change_is_no_fault(seed: int) -> None:
    rng = np.random.default_rng(seed)
    proto = BLOCKS[seed % len(BLOCKS)]
    for _ in range(int(rng.integers(1, 3))):
        proto = changed(proto, rng)
    inferred = {value.name: value for value in proto.graph.value_info}
    for value in proto.graph.output:
        if not value.HasField("type") and value.name in inferred:
            value.CopyFrom(inferred[value.name])
    del proto.graph.value_info[:]
    try:
        onnx.checker.check_model(proto, full_check=True)
        run(proto, feeds(proto, seed, odd=False))
    except Exception:  # no model
        return
    result, _ = fused(proto)
    if operators(result):
        assert_equal(proto, result, odd=False)


BLOCKS = blocks()
