"""What ONNX Runtime's training leaves in graphs: its gradients, as GE operators and back, against finite differences.

The ordinary onnxruntime cannot run these operators, but it runs those they are the gradients of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as rt
import pytest
from onnx import TensorProto, helper

from fa_compiler.lowering.ascend.air import parse, serialise
from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from tools.ge_to_onnx import from_ge

RNG = np.random.default_rng(3)
STEP = 1e-3
MICROSOFT = "com.microsoft"


def draw(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape).astype(np.float32)


def model_of(nodes: Sequence[onnx.NodeProto], inputs: Sequence[np.ndarray], outputs: Sequence[str]) -> onnx.ModelProto:
    given = [
        helper.make_tensor_value_info(f"i{place}", helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for place, array in enumerate(inputs)
    ]
    results = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in outputs]
    graph = helper.make_graph(list(nodes), "g", given, results)
    imports = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def run(model: onnx.ModelProto, inputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    session = rt.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    made: list[np.ndarray] = session.run(None, dict(zip(names, inputs, strict=True)))
    return made


def through_ge(nodes: Sequence[onnx.NodeProto], inputs: Sequence[np.ndarray], count: int = 1) -> list[np.ndarray]:
    model = model_of(nodes, inputs, [f"o{place}" for place in range(count)])
    return run(from_ge(parse(serialise(to_ge(ir.from_proto(model)))[0])), inputs)


def grad(op_type: str, inputs: int, outputs: int = 1, **attrs: Any) -> onnx.NodeProto:
    names = [f"i{place}" for place in range(inputs)], [f"o{place}" for place in range(outputs)]
    return helper.make_node(op_type, *names, domain=MICROSOFT, **attrs)


def difference(function: Callable[[np.ndarray], np.ndarray], x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """The gradient of sum(function(x) * dy) by central differences."""
    slope = np.zeros(x.shape)
    for place in np.ndindex(x.shape):
        ends = []
        for sign in (1, -1):
            moved = x.copy()
            moved[place] += sign * STEP
            ends.append(float((function(moved).astype(np.float64) * dy).sum()))
        slope[place] = (ends[0] - ends[1]) / (2 * STEP)
    return slope


def forward(op_type: str, *inputs: np.ndarray, domain: str = "", **attrs: Any) -> np.ndarray:
    names = [f"i{place}" for place in range(len(inputs))]
    return run(model_of([helper.make_node(op_type, names, ["y"], domain=domain, **attrs)], inputs, ["y"]), inputs)[0]


def close(got: np.ndarray, want: np.ndarray) -> None:
    """Differences of float32 with this step are good to about three digits."""
    np.testing.assert_allclose(got, want, rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("axis", [-1, 1])
def test_softmax(axis: int) -> None:
    x, dy = draw(2, 3, 4), draw(2, 3, 4)
    made = through_ge([grad("SoftmaxGrad_13", 2, axis=axis)], [dy, forward("Softmax", x, axis=axis)])
    close(made[0], difference(lambda v: forward("Softmax", v, axis=axis), x, dy))


@pytest.mark.parametrize("second", ["input", "output"])
def test_tanh_from_either_of_its_ends(second: str) -> None:
    x, dy = draw(2, 3), draw(2, 3)
    tanh = helper.make_node("Tanh", ["i1"], ["t"])
    node = helper.make_node("TanhGrad", ["i0", "t" if second == "output" else "i1"], ["o0"], domain=MICROSOFT)
    close(through_ge([tanh, node], [dy, x])[0], difference(lambda v: forward("Tanh", v), x, dy))


def test_gelu_and_its_bias() -> None:
    x, bias, dy = draw(2, 3), draw(3), draw(2, 3)
    want = difference(lambda v: forward("Gelu", v + bias, domain=MICROSOFT), x, dy)
    close(through_ge([grad("BiasGeluGrad_dX", 3)], [dy, x, bias])[0], want)
    close(through_ge([grad("GeluGrad", 2)], [dy, x + bias])[0], want)


def test_layer_normalization() -> None:
    x, gamma, beta, dy = draw(2, 3, 4), draw(4), draw(4), draw(2, 3, 4)
    mean = x.mean(-1, keepdims=True)
    rate = (1 / np.sqrt(x.var(-1, keepdims=True) + 1e-5)).astype(np.float32)
    node = grad("LayerNormalizationGrad", 5, 3, axis=-1)
    dx, dgamma, dbeta = through_ge([node], [dy, x, gamma, mean, rate], 3)
    close(dx, difference(lambda v: forward("LayerNormalization", v, gamma, beta), x, dy))
    close(dgamma, difference(lambda v: forward("LayerNormalization", x, v, beta), gamma, dy))
    close(dbeta, difference(lambda v: forward("LayerNormalization", x, gamma, v), beta, dy))


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_gather(axis: int) -> None:
    x, indices = draw(3, 4, 2), np.array([[0, 1], [-1, 1]])
    y = forward("Gather", x, indices, axis=axis)
    dy = draw(*y.shape)
    made = through_ge([grad("GatherGrad", 3, axis=axis)], [np.array(x.shape), indices, dy])
    close(made[0], difference(lambda v: forward("Gather", v, indices, axis=axis), x, dy))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [None, 1])
def test_cross_entropy(reduction: str, ignore: int | None) -> None:
    x, labels = draw(4, 3), np.array([0, 2, 1, 2])
    attrs = {"reduction": reduction} | ({} if ignore is None else {"ignore_index": ignore})
    dy = draw(4) if reduction == "none" else draw()
    made = through_ge(
        [grad("SoftmaxCrossEntropyLossGrad", 3, **attrs)], [np.asarray(dy), forward("LogSoftmax", x, axis=1), labels]
    )
    close(made[0], difference(lambda v: forward("SoftmaxCrossEntropyLoss", v, labels, **attrs), x, dy))


def test_accumulation_adds_or_overwrites() -> None:
    old, new = draw(2, 3), draw(2, 3)
    nodes = [helper.make_node("InPlaceAccumulatorV2", ["i0", "i1", "i2"], ["flag", "o0"], domain=MICROSOFT)]
    for overwrite in (True, False):
        made = through_ge(nodes, [old, new, np.array([overwrite])])
        np.testing.assert_allclose(made[0], new if overwrite else old + new)


@pytest.mark.parametrize("outputs", [["flag"], ["flag", "unread"]])
def test_an_accumulation_in_place_is_refused(outputs: list[str]) -> None:
    """The sum would be in a buffer that a GE graph does not give back; what makes the gradient would be dead."""
    nodes = [
        helper.make_node("MatMul", ["x", "x"], ["dy"], "gradient"),
        *(
            helper.make_node("InPlaceAccumulatorV2", ["buffer", "dy"], [f"{number}_{each}" for each in outputs],
                             f"accumulate_{number}", domain=MICROSOFT)
            for number in range(5)
        ),
    ]  # fmt: skip
    square = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 2]) for name in ("x", "buffer")]
    flags = [helper.make_tensor_value_info(f"{number}_flag", TensorProto.BOOL, [1]) for number in range(5)]
    model = helper.make_model(
        helper.make_graph(nodes, "step", square, flags),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)],
    )
    with pytest.raises(UnmappedError) as caught:
        to_ge(ir.from_proto(model))
    line = str(caught.value)
    assert line.startswith("5 nodes have no counterpart among GE's operators: ")
    assert "'accumulate_0', 'accumulate_1', 'accumulate_2' and 2 more: it adds a gradient into its first input" in line
    assert line.endswith("make its second output, updated_buffer, an output of the model")


def test_scale_divides_or_multiplies() -> None:
    x, scale = draw(2, 3), np.array(4, np.float32)
    np.testing.assert_allclose(through_ge([grad("Scale", 2)], [x, scale])[0], x * 4)
    np.testing.assert_allclose(through_ge([grad("Scale", 2, scale_down=1)], [x, scale])[0], x / 4)
