"""Models of onnxruntime-genai's builder: their nodes fix sizes that their inputs leave open; genai runs them fused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.command_line.main import main
from fa_compiler.comparison.feeds import LENGTH, random_inputs

from .builders import saved
from .genai import CONTEXT, HEADS, KEY_HEADS, LAYERS, SIZE, WIDTH, WORDS, Decoder

FORMS: dict[str, tuple[dict[str, bool], list[str]]] = {
    "GroupQueryAttention, caches of their own": ({}, ["--assume", "separate-caches"]),
    "GroupQueryAttention, one buffer": ({}, ["--assume", "shared-caches"]),
    "query, key and value in one tensor": ({"packed": True}, ["--assume", "shared-caches"]),
    "MultiHeadAttention": ({"group_query": False}, []),
}


@pytest.mark.parametrize("name", FORMS)
def test_verify_needs_no_inputs(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """`kv_cache_dim` is the size of a head, which is not the size that other symbols get."""
    form, words = FORMS[name]
    model = Decoder(**form).model
    assert random_inputs(model, "m")["past_key_values.1.value"].shape[3] == SIZE != LENGTH
    path, out = saved(model, tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    assert main(["optimize", str(path), "-o", str(out), "--verify", *words]) == 0
    assert f"all {1 + 2 * LAYERS} outputs agree" in capfd.readouterr().out
    operators = [node.op_type for node in onnx.load(out).graph.node]
    assert operators.count("FlashAttention") == LAYERS
    flag = ["--shared-caches"] if "shared-caches" in words else []
    assert main(["verify", str(path), str(out), "--quiet", *flag]) == 0


@pytest.mark.parametrize("assume", ["shared-caches", "decode,shared-caches"])
def test_run_makes_buffers_with_room(assume: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """No input counts the tokens of the buffers; the mask does, and it has ones for the new tokens, too."""
    path, out = saved(Decoder().model, tmp_path / "model.onnx"), tmp_path / "fused.onnx"
    assert main(["optimize", str(path), "-o", str(out), "--quiet", "--assume", assume]) == 0
    assert main(["run", str(out)]) == 0
    assert f"past_key_values.0.key float32 [2, {KEY_HEADS}, {2 * LENGTH}, {SIZE}]" in capfd.readouterr().out


def test_a_cache_whose_operator_is_not_fused_stays() -> None:
    """The operator appends the new keys by itself. What would fuse it stands beside the attention."""
    report = fa_compiler.optimize(Decoder().model, in_place_caches=True).report
    assert [cache.reason for cache in report.caches] == ["GroupQueryAttention appends to it, and is not fused"] * 4
    assert "--assume shared-caches" in (report.blocks[0].hint or "")


def one_node(node: onnx.NodeProto, shapes: dict[str, list[int | str | None]], opset: int = 23) -> onnx.ModelProto:
    """A model of one node whose inputs have these shapes; `w` is a weight."""
    values = [helper.make_tensor_value_info(k, TensorProto.FLOAT, shape) for k, shape in shapes.items() if k != "w"]
    weights = [numpy_helper.from_array(np.ones(shapes["w"], np.float32), "w")] if "w" in shapes else []
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in node.output]
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph([node], "g", values, results, weights)
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def attention(layout: str) -> onnx.ModelProto:
    """ai.onnx Attention over a cache with heads and head size open; the new rows have 3 or 4 axes."""
    places = ["q", "k", "v", "", "past_key", "past_value"]
    heads = {"q_num_heads": 6, "kv_num_heads": 2} if layout == "BSH" else {}
    node = helper.make_node("Attention", places, ["y", "present_key", "present_value"], **heads)
    new: list[int | str | None] = ["B", "S", 48] if layout == "BSH" else ["B", 2, "S", 24]
    query: list[int | str | None] = ["B", "S", 144] if layout == "BSH" else ["B", 6, "S", 24]
    cache: list[int | str | None] = ["B", "heads", "P", "width"]
    return one_node(node, {"q": query, "k": new, "v": new, "past_key": cache, "past_value": cache})


def joined(axis: int) -> onnx.ModelProto:
    """A Concat of past and new keys; the past leaves its heads and their size open."""
    node = helper.make_node("Concat", ["past", "new"], ["present"], axis=axis)
    return one_node(node, {"past": ["B", "heads", "P", "width"], "new": ["B", 4, "S", 24]})


def written() -> onnx.ModelProto:
    """A ScatterND of new rows into a buffer that leaves the size of a head open."""
    node = helper.make_node("ScatterND", ["past", "w", "new"], ["present"])
    model = one_node(node, {"past": ["B", "heads", "P", "width"], "new": [1, 1, 1, 24]})
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((1, 1, 1, 3), np.int64), "w"))
    return model


DEMANDED: dict[str, tuple[onnx.ModelProto, str, tuple[int, ...]]] = {
    "a weight": (
        one_node(helper.make_node("MatMul", ["x", "w"], ["y"]), {"x": ["B", "S", "hidden"], "w": [24, 5]}),
        "x",
        (2, LENGTH, 24),
    ),
    "a weight, the size has no name": (
        one_node(helper.make_node("MatMul", ["x", "w"], ["y"]), {"x": ["B", "S", None], "w": [24, 5]}),
        "x",
        (2, LENGTH, 24),
    ),
    "a weight on the left": (
        one_node(helper.make_node("MatMul", ["w", "x"], ["y"]), {"x": ["B", "S", "hidden"], "w": [5, 24]}),
        "x",
        (2, 24, LENGTH),
    ),
    "Attention of three axes": (attention("BSH"), "past_value", (2, 2, LENGTH, 24)),
    "Attention of four axes": (attention("BNSD"), "past_value", (2, 2, LENGTH, 24)),
    "a ScatterND": (written(), "past", (2, LENGTH, LENGTH, 24)),
    "a Concat": (joined(2), "past", (2, 4, LENGTH, 24)),
    "a Concat, its axis counted from the end": (joined(-2), "past", (2, 4, LENGTH, 24)),
}


@pytest.mark.parametrize("name", DEMANDED)
def test_sizes_that_nodes_demand(name: str, tmp_path: Path) -> None:
    model, value, shape = DEMANDED[name]
    assert random_inputs(model, "m")[value].shape == shape
    path = saved(model, tmp_path / "model.onnx")
    assert main(["optimize", str(path), "-o", str(tmp_path / "out.onnx"), "--verify", "--quiet"]) == 0


def configured(model: Path, shared: bool, fused: bool) -> str:
    """The folder of a model, with a configuration by which genai loads it.

    A fused model has a copy of our library beside it: genai loads only a library in the model's folder or in the
    current one.
    """
    options = {}
    if fused:
        library = Path(shutil.copy(fa_compiler.custom_ops_library(), model.parent))
        options = {"custom_ops_library": library.name}
    kinds = ("key", "value")
    decoder = {
        "session_options": options,
        "filename": model.name,
        "head_size": SIZE,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "num_hidden_layers": LAYERS,
        "inputs": {"input_ids": "input_ids", "attention_mask": "attention_mask"}
        | {f"past_{kind}_names": f"past_key_values.%d.{kind}" for kind in kinds},
        "outputs": {"logits": "logits"} | {f"present_{kind}_names": f"present.%d.{kind}" for kind in kinds},
    }
    entry = {"type": "llama", "vocab_size": WORDS, "context_length": CONTEXT, "decoder": decoder}
    entry |= {"bos_token_id": 1, "eos_token_id": [WORDS - 1], "pad_token_id": 0}
    search = {"do_sample": False, "max_length": CONTEXT, "past_present_share_buffer": shared}
    (model.parent / "genai_config.json").write_text(json.dumps({"model": entry, "search": search}))
    return str(model.parent)


@pytest.mark.parametrize("word", ["separate-caches", "shared-caches"])
def test_genai_generates_the_same_tokens(word: str, tmp_path: Path) -> None:
    """With `custom_ops_library` in genai_config.json, where onnxruntime-genai is installed."""
    genai = pytest.importorskip("onnxruntime_genai")
    original, fused = (tmp_path / name / "model.onnx" for name in ("original", "fused"))
    original.parent.mkdir()
    fused.parent.mkdir()
    fa_compiler.optimize(saved(Decoder().model, original), fused, assume=[word])
    tokens = []
    for path in (original, fused):
        model = genai.Model(configured(path, word == "shared-caches", path is fused))
        parameters = genai.GeneratorParams(model)
        parameters.set_search_options(max_length=30, do_sample=False)
        generator = genai.Generator(model, parameters)
        generator.append_tokens(np.array([[3, 1, 4, 1, 5]], np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        tokens.append([int(token) for token in generator.get_sequence(0)])
    assert tokens[0] == tokens[1]
    assert len(set(tokens[0])) > 5
