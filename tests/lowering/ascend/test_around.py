"""Norms, gated activations and rotary positions as GE operators: converted, checked, read back and run."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

import fa_compiler
from fa_compiler.lowering.ascend.air import read, write
from fa_compiler.lowering.ascend.air.check import check
from fa_compiler.lowering.ascend.convert import to_ge
from tests.passes.around import (
    test_clipped,
    test_gelu,
    test_layer_norm,
    test_pairs,
    test_products,
    test_rms_norm,
    test_rotary,
    test_swiglu,
)
from tests.passes.around.running import assert_equal, fused, operators
from tools.ge_to_onnx import from_ge

LLAMA = Path(__file__).parents[3] / "examples" / "models" / "llama.onnx"
MODELS = {
    "RmsNorm": test_rms_norm.model(test_rms_norm.SPELLINGS["2"]),
    "AddRmsNorm": test_rms_norm.model(
        f"x = Add(a, b) {test_rms_norm.NORM} y = Mul(n, w)", test_rms_norm.TWO, test_rms_norm.BOTH
    ),
    "LayerNormV4": test_layer_norm.model(test_layer_norm.NORM),
    "AddLayerNorm": test_layer_norm.model(test_layer_norm.SUMS["8"], test_layer_norm.TWO, test_layer_norm.BOTH),
    "SwiGlu": test_swiglu.model(test_swiglu.HALVES["1, 3 and 4"]),
    "GeGluV2": test_gelu.model(test_gelu.SPLIT + test_gelu.BY_TANH["3 and 5"] + "y = Mul(g1, b)"),
    "GeluV2": test_gelu.model(f"a = Neg(x) {test_gelu.SHARE}{test_gelu.GELU}y = Neg(g1)", outputs="float[B,S,8] y"),
    "ClippedSwiglu": test_clipped.model(test_clipped.SPELLINGS["1 to 3, 5 and 7"]),
    "RotaryPositionEmbedding": test_rotary.model(*test_rotary.SPELLINGS["12"][:3]),
    "ApplyRotaryPosEmb": test_pairs.model(test_pairs.BOTH),
}


@pytest.mark.parametrize("op_type", MODELS)
def test_the_file_computes_what_the_model_computes(op_type: str, tmp_path: Path) -> None:
    proto = MODELS[op_type]
    result, _ = fused(proto)
    assert operators(result) == [op_type]
    graph = to_ge(ir.from_proto(result))  # the functions of the file are not in the way
    assert [op.type for op in graph.root.of_type(op_type)] == [op_type]
    write(graph, tmp_path / "model.air")
    assert not check(tmp_path / "model.air")
    back = from_ge(read(tmp_path / "model.air"))
    names = [value.name for value in proto.graph.output]
    for node in back.graph.node:
        for place, name in enumerate(node.output):
            if name.startswith("output_"):
                node.output[place] = names[int(name.removeprefix("output_"))]
    for value, name in zip(back.graph.output, names, strict=True):
        value.name = name
    del back.graph.value_info[:]
    assert_equal(proto, back, odd=False)


def test_joined_products(tmp_path: Path) -> None:
    body, outputs, _ = test_products.SPELLINGS["4, one of three"]
    onnx.save(test_products.model(body, outputs), tmp_path / "model.onnx")
    fa_compiler.compile_for_atc(tmp_path / "model.onnx", tmp_path / "out", "Ascend910B2", input_shape={"x": (2, 3, 8)})
    assert not check(tmp_path / "out" / "model.air")
    counts = Counter(op.type for op in read(tmp_path / "out" / "model.air").root.ops)
    assert (counts["BatchMatMulV2"], counts["Add"], counts["Reshape"], counts["SplitV"]) == (1, 1, 1, 1)


def counted(folder: Path, only: str | None) -> Counter[str]:
    shapes = {"input_ids": (1, 16), "attention_mask": (1, 16)}
    fa_compiler.compile_for_atc(LLAMA, folder, "Ascend910B2", input_shape=shapes, only=only)
    graph = read(folder / "model.air")
    return Counter(op.type for op in graph.root.ops)


def test_a_decoder_with_and_without(tmp_path: Path) -> None:
    alone, all_of_it = counted(tmp_path / "alone", "attention"), counted(tmp_path / "all", None)
    layers = alone["FlashAttentionScore"]
    assert all_of_it["FlashAttentionScore"] == layers > 0
    assert alone["RmsNorm"] + alone["AddRmsNorm"] + alone["SwiGlu"] + alone["RotaryPositionEmbedding"] == 0
    assert all_of_it["RmsNorm"] + all_of_it["AddRmsNorm"] == 2 * layers + 1
    assert all_of_it["SwiGlu"] == layers
    assert all_of_it["RotaryPositionEmbedding"] == 2 * layers
    assert all_of_it.total() < alone.total() - 20 * layers
