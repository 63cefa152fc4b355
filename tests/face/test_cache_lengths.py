"""Inputs are made for attention over caches whose sizes, totals and lengths agree, and `verify` runs such models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.command_line.main import main
from fa_compiler.comparison.feeds import LENGTH, random_inputs
from fa_compiler.errors import InputError

from .builders import saved

HEADS, KEY_HEADS, SIZE = 4, 2, 16
Dims = list[int | str | None]
TYPES = {"attention_mask": TensorProto.INT64, "seqlens_k": TensorProto.INT32, "total": TensorProto.INT32}


def decoder(layers: int = 2, **shapes: Dims | int) -> onnx.ModelProto:
    """Layers of GroupQueryAttention. Their lengths come from an `attention_mask` where one has a shape, as exporters
    for ONNX Runtime write them, else from inputs; an integer in place of a shape is a constant."""
    given: dict[str, Dims | int] = {"q": ["B", "S", HEADS * SIZE], "past": ["B", KEY_HEADS, "P", SIZE], **shapes}
    nodes: list[onnx.NodeProto] = []
    weights = [numpy_helper.from_array(np.array([1], np.int64), "one")]
    if "attention_mask" in given:
        nodes += [
            helper.make_node("ReduceSum", ["attention_mask", "one"], ["sum"], keepdims=0),
            helper.make_node("Sub", ["sum", "one"], ["less"]),
            helper.make_node("Cast", ["less"], ["seqlens_k"], to=TensorProto.INT32),
            helper.make_node("Shape", ["attention_mask"], ["shape"]),
            helper.make_node("Gather", ["shape", "one"], ["size"]),
            helper.make_node("Cast", ["size"], ["total"], to=TensorProto.INT32),
        ]
    else:
        given = {"seqlens_k": ["B"], "total": [], **given}
    for name in ("k", "v"):
        nodes.append(helper.make_node("Slice", ["q", "zero", "half", "two"], [name]))
    numbers = {"zero": 0, "half": KEY_HEADS * SIZE, "two": 2}
    weights += [numpy_helper.from_array(np.array([number], np.int64), name) for name, number in numbers.items()]
    past, outputs, last = given.pop("past"), [], "q"
    for layer in range(layers):
        pasts = [] if past == 0 else [f"past_{kind}.{layer}" for kind in "kv"]
        given.update(dict.fromkeys(pasts, past))
        presents = [f"present_{kind}.{layer}" for kind in "kv"]
        inputs = [last, "k", "v", *(pasts or ["", ""]), "seqlens_k", "total"]
        last = f"y{layer}"
        nodes.append(
            helper.make_node(
                "GroupQueryAttention",
                inputs,
                [last, *presents],
                f"layer{layer}",
                domain="com.microsoft",
                num_heads=HEADS,
                kv_num_heads=KEY_HEADS,
            )
        )
        outputs += presents
    values = []
    for name, shape in given.items():
        if isinstance(shape, int):
            weights.append(numpy_helper.from_array(np.array(shape, np.int32), name))
        else:
            values.append(helper.make_tensor_value_info(name, TYPES.get(name, TensorProto.FLOAT), shape))
    ranks = {last: 3, **dict.fromkeys(outputs, 4)}
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in ranks.items()]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    graph = helper.make_graph(nodes, "g", values, results, weights)
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


TAKEN: dict[str, tuple[dict[str, Dims | int], tuple[int, int, int], list[int]]] = {
    "inputs of their own": ({}, (2, 1, LENGTH), [16, 12]),
    "vectors": ({"seqlens_k": ["B", 1], "total": [1]}, (2, 1, LENGTH), [16, 12]),
    "a mask": ({"attention_mask": ["B", "T"]}, (2, 1, LENGTH), [16, 12]),
    "a mask of a sum": ({"attention_mask": ["B", "P + S"]}, (2, 1, LENGTH), [16, 12]),
    "a mask without names": ({"attention_mask": [None, None]}, (2, 1, LENGTH), [16, 12]),
    "a cache without names": ({"past": ["B", KEY_HEADS, None, SIZE]}, (2, 1, LENGTH), [16, 12]),
    "a cache of known size": ({"past": ["B", KEY_HEADS, 40, SIZE]}, (2, 1, 40), [39, 29]),
    "several rows declared": ({"q": ["B", 4, HEADS * SIZE]}, (1, 4, LENGTH), [19]),
    "rows and batch declared": (
        {"q": [3, 4, HEADS * SIZE], "past": [3, KEY_HEADS, "P", SIZE], "seqlens_k": [3]},
        (3, 4, LENGTH),
        [3, 2, 3],
    ),
    "a total that is known": ({"total": 9}, (2, 1, LENGTH), [8, 6]),
    "a prompt": ({"past": 0}, (2, LENGTH, 0), [15, 11]),
}


@pytest.mark.parametrize("name", TAKEN)
def test_made_inputs_agree(name: str) -> None:
    """ONNX Runtime runs the model with them; batch entries have different numbers of keys."""
    shapes, (batch, rows, past), lengths = TAKEN[name]
    model = decoder(**shapes)
    feeds = random_inputs(model, "m")
    assert feeds["q"].shape[:2] == (batch, rows)
    if past:
        assert feeds["past_k.0"].shape[2] == past
    if "attention_mask" in feeds:
        assert list(feeds["attention_mask"].sum(1) - 1) == lengths
        assert feeds["attention_mask"].shape[1] == lengths[0] + 1
    else:
        assert list(feeds["seqlens_k"].reshape(-1)) == lengths
    assert all(np.isfinite(result).all() for result in run(model, feeds))


@pytest.mark.parametrize("name", ["past_key", "input.cache.layers.0.keys"])
def test_a_mask_covers_the_cache_and_the_new_tokens(name: str) -> None:
    """The exporter names its length in a way that says nothing. The rows of a mask are looked up by the number of a
    key, so that a mask without the new tokens fails."""
    nodes = [helper.make_node("Identity", [each], [f"{each}.out"]) for each in ("ids", "mask", name)]
    shapes: dict[str, Dims] = {"ids": ["B", 1], "mask": ["B2", "M"], name: ["B", "2", "P", "8"]}
    inputs = [
        helper.make_tensor_value_info(each, TensorProto.FLOAT if each == name else TensorProto.INT64, shape)
        for each, shape in shapes.items()
    ]
    outputs = [helper.make_empty_tensor_value_info(f"{each}.out") for each in shapes]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs))
    feeds = random_inputs(model, "m")
    assert feeds[name].shape == (2, 2, LENGTH, 8)
    assert feeds["mask"].shape == (2, LENGTH + 1)


def test_attention_24_has_lengths() -> None:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["B", 2, "S", 8]) for name in "qkv"]
    values.append(helper.make_tensor_value_info("lengths", TensorProto.INT64, ["B"]))
    node = helper.make_node("Attention", ["q", "k", "v", "", "", "", "lengths"], ["y"])
    result = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    model = helper.make_model(
        helper.make_graph([node], "g", values, [result]), opset_imports=[helper.make_opsetid("", 24)], ir_version=10
    )
    feeds = random_inputs(model, "m")
    total = feeds["k"].shape[2]
    assert list(feeds["lengths"]) == [total, total - max(1, total // 4)]
    run(model, feeds)


def roomy(op_type: str, mask: Dims | None = None, past: int | str = "M", rows: int | str = 1) -> onnx.ModelProto:
    """One MultiHeadAttention or DecoderMaskedMultiHeadAttention on a cache with room for more keys."""
    cache: Dims = ["B", HEADS, past, SIZE]
    shapes: dict[str, Dims] = {name: ["B", rows, HEADS * SIZE] for name in "qkv"} | {
        "past_key": cache,
        "past_value": cache,
    }
    decoder_only = op_type.startswith("Decoder")
    attrs = {"past_present_share_buffer": 1} if decoder_only else {}
    places = [
        "q",
        "k",
        "v",
        *([] if decoder_only else [""]),
        "mask" if mask else "",
        "",
        "past_key",
        "past_value",
        "held",
    ]
    node = helper.make_node(
        op_type, places, ["y", "present_key", "present_value"], "op", domain="com.microsoft", num_heads=HEADS, **attrs
    )
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    values.append(helper.make_tensor_value_info("held", TensorProto.INT32, [1]))
    if mask:
        values.append(helper.make_tensor_value_info("mask", TensorProto.INT32, mask))
    ranks = {"y": 3, "present_key": 4, "present_value": 4}
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * rank) for name, rank in ranks.items()]
    imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", values, results), opset_imports=imports, ir_version=9)


ROOMY: dict[str, tuple[onnx.ModelProto, int, int]] = {
    "a decoder": (roomy("DecoderMaskedMultiHeadAttention"), 11, 16),
    "a decoder and a mask": (roomy("DecoderMaskedMultiHeadAttention", ["B", "T"]), 11, 16),
    "a mask of known size": (roomy("MultiHeadAttention", ["B", 9]), 8, 16),
    "a cache of known size": (roomy("MultiHeadAttention", ["B", "T"], 40), 29, 40),
    "several rows": (roomy("MultiHeadAttention", ["B", "T"], "M", 4), 8, 16),
    "rows open": (roomy("MultiHeadAttention", ["B", "T"], "M", "S"), 11, 16),
}


@pytest.mark.parametrize("name", ROOMY)
def test_caches_with_room(name: str, tmp_path: Path) -> None:
    """The keys held, the new ones and the mask agree, and some room is left; `--verify` needs no word."""
    model, held, room = ROOMY[name]
    feeds = random_inputs(model, "m")
    assert feeds["held"] == [held]
    assert feeds["past_key"].shape[2] == room
    if "mask" in feeds:
        assert feeds["mask"].shape == (2, held + feeds["q"].shape[1])
    run(model, feeds)
    out = tmp_path / "b.onnx"
    assert main(["optimize", str(saved(model, tmp_path / "a.onnx")), "-o", str(out), "--verify", "--quiet"]) == 0
    assert "FlashAttention" in [node.op_type for node in onnx.load(out).graph.node]


REFUSED: dict[str, tuple[onnx.ModelProto, str]] = {
    "fewer keys than rows": (
        decoder(total=3, q=["B", 4, HEADS * SIZE]),
        "4 rows come with 3 keys in GroupQueryAttention 'layer0'",
    ),
    "more keys than past can hold": (
        decoder(total=50, past=["B", KEY_HEADS, 8, SIZE]),
        "1 rows and a past of 8 come with 50 keys",
    ),
    "a mask of one size and caches of another": (
        decoder(attention_mask=[2, 64], past=["B", KEY_HEADS, 8, SIZE]),
        "1 rows and a past of 8 come with 64 keys",
    ),
    "a cache without room": (
        roomy("MultiHeadAttention", ["B", 9], 4),
        "1 rows after 8 keys come with room for 4 in MultiHeadAttention 'op'",
    ),
    "several rows of several entries": (
        decoder(total=20, q=[2, 4, HEADS * SIZE], past=[2, KEY_HEADS, 32, SIZE]),
        "4 rows of 2 batch entries come after a past",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_no_inputs_agree(name: str) -> None:
    model, reason = REFUSED[name]
    with pytest.raises(InputError) as raised:
        random_inputs(model, "m")
    assert reason in str(raised.value)
    assert "give inputs with --inputs" in str(raised.value)
    assert "\n" not in str(raised.value)


def test_lengths_that_the_model_computes_are_looked_at() -> None:
    """Three times the sum of a mask is no length; the model's own nodes tell so before the run."""
    model = decoder(attention_mask=["B", "T"])
    model.graph.initializer.append(numpy_helper.from_array(np.array([3], np.int64), "three"))
    model.graph.node.insert(1, helper.make_node("Mul", ["sum", "three"], ["thrice"]))
    model.graph.node[2].input[0] = "thrice"
    with pytest.raises(InputError, match="a batch entry has 51 keys of 17"):
        random_inputs(model, "m")


@pytest.mark.parametrize("word", ["separate-caches", "shared-caches"])
@pytest.mark.parametrize("mask", [True, False])
def test_verify_runs_a_decoder(word: str, mask: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Under shared-caches past and present are bound to one buffer, in both models."""
    model = decoder(attention_mask=["B", "T"]) if mask else decoder()
    path, out = saved(model, tmp_path / "a.onnx"), tmp_path / "b.onnx"
    assert main(["optimize", str(path), "-o", str(out), "--assume", word, "--verify"]) == 0
    assert "all 5 outputs agree" in capfd.readouterr().out
    operators = [node.op_type for node in onnx.load(out).graph.node]
    assert "GroupQueryAttention" not in operators
    assert ("ScatterND" in operators) == (word == "shared-caches")
    flags: list[list[str]] = [["--assume", word], ["--shared-caches"] if word == "shared-caches" else []]
    for flag in flags:
        assert main(["verify", str(path), str(out), *flag]) == 0
    if word == "shared-caches" and mask:  # what the file writes has no place in caches of their own
        assert main(["verify", str(path), str(out)]) == 1
        assert (
            "if it was fused with the assumption shared-caches, verify it with this assumption, too; ["
            in capfd.readouterr().err
        )


def test_shared_buffers_differ_from_buffers_of_their_own(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """What the one word allows the other does not: the rows behind a shorter batch entry differ."""
    path, out = saved(decoder(), tmp_path / "a.onnx"), tmp_path / "b.onnx"
    assert main(["optimize", str(path), "-o", str(out), "--assume", "separate-caches"]) == 0
    capfd.readouterr()
    assert main(["verify", str(path), str(out)]) == 0
    assert main(["verify", str(path), str(out), "--shared-caches"]) == 1
    assert "4 of 5 outputs differ" in capfd.readouterr().out


def test_a_decoder_whose_caches_are_never_shared(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its mask is read behind as many tokens as a past has room for. In a shared buffer these are too many."""
    model = decoder(attention_mask=["B", "T"])
    nodes = [
        helper.make_node("Shape", ["past_k.0"], ["places"], start=2, end=3),
        helper.make_node("Gather", ["attention_mask", "places"], ["newest"], axis=1),
    ]
    model.graph.node.extend(nodes)
    model.graph.output.append(helper.make_tensor_value_info("newest", TensorProto.INT64, [None, 1]))
    path = str(saved(model, tmp_path / "a.onnx"))
    assert main(["verify", path, path]) == 0
    assert main(["verify", path, path, "--assume", "shared-caches"]) == 2
    told = capfd.readouterr().err
    assert "with separate caches it runs, so that shared-caches cannot be assumed of it: ONNX Runtime can" in told
    assert "indices element out of data bounds" in told and "give inputs" not in told
