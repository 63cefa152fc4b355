"""Weights that are inputs of a graph: `verify` draws them as layers are initialised."""

from __future__ import annotations

import lzma
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest

import fa_compiler
from fa_compiler.comparison.compare import compare_models
from fa_compiler.comparison.feeds import random_inputs

from .builders import EXAMPLES, saved

TRAINING = EXAMPLES / "gpt_training.onnx.xz"


def _model(inputs: str, body: str) -> onnx.ModelProto:
    return onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g ({inputs}) => (float y) '
        f"<float[16,256] fixed = {{{', '.join(['1'] * 4096)}}}, float eighth = {{0.125}}> {{ {body} }}"
    )


SPREADS = {
    # the inputs, what reads w, and its standard deviation
    "a matrix": ("float[B,16] x, float[16,256] w", "y = MatMul(x, w)", 1 / 4),
    "a Gemm": ("float[B,256] x, float[16,256] w", "y = Gemm<transB=1>(x, w)", 1 / 16),
    "transposed": ("float[B,256] x, float[16,256] w", "t = Transpose(w) y = MatMul(x, t)", 1 / 16),
    "of half the width": (
        "float16[B,256] x, float16[16,256] w",
        "t = Transpose<perm=[1,0]>(w) c = Cast<to=10>(t) y = MatMul(x, c)",
        1 / 16,
    ),
    "with its gradient": (
        "float[B,256] x, float[16,256] w",
        "t = Transpose(w) h = MatMul(x, t) g = Neg(h) y = MatMul(g, w)",
        1 / 16,
    ),
    "in a classifier": ("float[B,16] x, float[16,256] w", "h = MatMul(x, w) y = LogSoftmax(h)", 1 / 4),
    "a kernel": ("float[B,4,9,9] x, float[32,4,8,8] w", "y = Conv(x, w)", 1 / 16),
    "keys": (
        "float[B,16] x, float[256,16] w",
        "t = Transpose(w) s = MatMul(x, t) m = Mul(s, eighth) y = Softmax(m)",
        1,
    ),
    "values": ("float[B,16] x, float[16,256] w", "p = Softmax(x) c = Cast<to=1>(p) y = MatMul(c, w)", 1),
    "values with a gradient": (
        "float[B,16] x, float[16,256] w",
        "p = Softmax(x) o = MatMul(p, w) t = Transpose(w) y = MatMul(o, t)",
        1,
    ),
    "multiplied with a constant": ("float[256,64] w", "y = MatMul(fixed, w)", 1),
    "of any size": ("float[B,16] x, float[16,N] w", "y = MatMul(x, w)", 1),
    "added": ("float[16,256] x, float[16,256] w", "y = Add(x, w)", 1),
    "on the left": ("float[256,4] x, float[16,256] w", "y = MatMul(w, x)", 1),
    "in front of more axes": ("float[B,4,16] x, float[4,16,64] w", "y = MatMul(x, w)", 1),
}


@pytest.mark.parametrize("case", SPREADS)
def test_the_spread_of_an_input(case: str) -> None:
    inputs, body, deviation = SPREADS[case]
    found = random_inputs(_model(inputs, body), "m")["w"]
    assert found.dtype == (np.float16 if "float16" in inputs else np.float32)
    assert float(np.std(found.astype(np.float64))) == pytest.approx(deviation, rel=0.1)


def test_a_variance_is_positive() -> None:
    """Square roots of negative numbers would make every output NaN, and every model right."""
    model = _model(
        "float[B,64,9] x, float[64] scale, float[64] bias, float[64] mean, float[64] w",
        "y = BatchNormalization(x, scale, bias, mean, w)",
    )
    assert float(random_inputs(model, "m")["w"].min()) > 0.1


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, onnx.ModelProto]:
    """A training graph, whose weights are inputs, and its fused form."""
    path = tmp_path_factory.mktemp("training") / "training.onnx"
    path.write_bytes(lzma.decompress(TRAINING.read_bytes()))
    return path, fa_compiler.optimize(path).model


def test_a_training_graph_is_right(training: tuple[Path, onnx.ModelProto], tmp_path: Path) -> None:
    path, fused = training
    found = compare_models(path, saved(fused, tmp_path / "fused.onnx"))
    assert found.same
    assert max(output.largest or 0.0 for output in found.outputs) < 1e-6
    assert all(output.noise is None for output in found.outputs)


@pytest.mark.parametrize("operator", ["FlashAttentionScore", "FlashAttentionScoreGrad"])
@pytest.mark.parametrize("layer", [0, -1])
def test_a_wrong_training_graph_is_found(
    operator: str, layer: int, training: tuple[Path, onnx.ModelProto], tmp_path: Path
) -> None:
    """The scale of one attention, or of one gradient, is a thousandth too large."""
    path, fused = training
    wrong = onnx.ModelProto()
    wrong.CopyFrom(fused)
    node = [node for node in wrong.graph.node if node.op_type == operator][layer]
    (scale,) = (attr for attr in node.attribute if attr.name == "scale_value")
    scale.f *= 1.001
    found = compare_models(path, saved(wrong, tmp_path / "wrong.onnx"))
    assert sum(output.fault is not None for output in found.outputs) > 1
