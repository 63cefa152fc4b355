"""IncreFlashAttention where the query is one token: for Ascend, and on the CPU where caches are quantised."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper

from fa_compiler import reference
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.op_registry import verify
from fa_compiler.passes import Options, analyse, fuse
from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.answer.report import MissedCode
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.passes.rewrite.quantization import match_dequantize
from tests.passes import running
from tests.passes.operators import Operator
from tests.passes.running import ORIGINAL_OFF, Array, parse

INT8 = (
    "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) t = Mul(s, c) w = Where(m, t, low) "
    "p = Softmax<axis=-1>(w) y = MatMul(p, v)"
)
DEQUANTIZE = "k = DequantizeLinear(k8, ks, kz) v = DequantizeLinear(v8, vs, vz) "
SCALES = "<float ks={0.02}, int8 kz={3}, float vs={0.03}, int8 vz={-5}, float low={-3.4e38}, float c={0.3}>"


def quantised(rows: str = "1", scales: str = SCALES, body: str = DEQUANTIZE + INT8) -> onnx.ModelProto:
    inputs = f"float[B,4,{rows},8] q, int8[B,4,T,8] k8, int8[B,4,T,8] v8, bool[B,1,1,T] m"
    return parse(body, inputs=inputs, outputs=f"float[B,4,{rows},8] y", initializers=scales, opset=19)


def feeds() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    mask = rng.random((2, 1, 1, 20)) < 0.6
    mask[1] = False  # masked everywhere: the mean of the values
    return {
        "q": rng.normal(size=(2, 4, 1, 8)).astype(np.float32),
        "k8": rng.integers(-128, 128, (2, 4, 20, 8)).astype(np.int8),
        "v8": rng.integers(-128, 128, (2, 4, 20, 8)).astype(np.int8),
        "m": mask,
    }


def fused(model: onnx.ModelProto, target: Target, assume: tuple[str, ...] = ()) -> onnx.ModelProto:
    """The model after the passes; every block of it is fused, and its node breaks nothing."""
    graph = ir.serde.deserialize_model(model)
    report = fuse(graph, Options(target=target, assume=frozenset(assume)))
    assert [block.status for block in report.blocks] == ["fused"], report.blocks[0].reason
    info = analyse(graph)
    for node in graph.graph:
        if node.domain == "ascend":
            assert node.op_type == report.blocks[0].op
            found = verify(node_view(node, info), "ort" if target == "ort" else "A2")
            assert all(violation.extension and target == "ort" for violation in found)
    return ir.serde.serialize_model(graph)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def agree(model: onnx.ModelProto, after: onnx.ModelProto, given: dict[str, Array], tolerance: float) -> None:
    options = ort.SessionOptions()
    options.graph_optimization_level = ORIGINAL_OFF
    before = ort.InferenceSession(model.SerializeToString(), options).run(None, given)[0]
    options = ort.SessionOptions()
    register_custom_ops(options)
    kernel = ort.InferenceSession(after.SerializeToString(), options).run(None, given)[0]
    exact = reference.evaluator(after).run(None, given)[0]
    for result in (kernel, exact):
        np.testing.assert_allclose(result.astype(np.float64), before.astype(np.float64), rtol=0, atol=tolerance)


VOUCHED = ("masks-dominate",)


@pytest.mark.parametrize(("rows", "assume"), [("1", VOUCHED), ("S", ("decode", *VOUCHED))])
def test_dequantised_caches_are_read_as_they_are(rows: str, assume: tuple[str, ...]) -> None:
    model = quantised(rows)
    after = fused(model, "ort", assume)
    assert operators(after) == ["Not", "IncreFlashAttention"]
    agree(model, after, feeds(), 2e-6)


@pytest.mark.parametrize(("rows", "assume"), [("S", VOUCHED), ("1", ())])
def test_nothing_is_taken_for_granted(rows: str, assume: tuple[str, ...]) -> None:
    """An open number of queries, and scores of float32 that may be lower than those of masked keys."""
    model = quantised(rows)
    after = fused(model, "ort", assume)
    assert operators(after) == ["DequantizeLinear", "DequantizeLinear", "Not", "FlashAttentionScore"]
    agree(model, after, feeds(), 2e-6)


def numbers(count: int) -> str:
    return ",".join(str(0.01 + 0.001 * n) for n in range(count))


CHANNELS = {
    "a number of a head": (3, 8, "{1,-2,3,0,0,5,-6,7}"),
    "a head": (1, 4, "{1,-2,3,0}"),
    "a head, without zero points": (1, 4, ""),
}


@pytest.mark.parametrize("values", [False, True])
@pytest.mark.parametrize("name", CHANNELS)
def test_scales_by_channel(name: str, values: bool) -> None:
    """Of keys alone, or of values, too: one scale then stands for all channels."""
    axis, count, points = CHANNELS[name]
    scales, body = SCALES, DEQUANTIZE
    for letter, zero in (("k", "3"), ("v", "-5"))[: 1 + values]:
        old = scales[scales.index(f"float {letter}s") : scales.index(f"{letter}z={{{zero}}}")]
        scales = scales.replace(
            f"{old}{letter}z={{{zero}}}",
            f"float[{count}] {letter}s={{{numbers(count)}}}, int8[{count}] "
            f"{letter}z={points or '{' + '0,' * (count - 1) + '0}'}",
        )
        body = body.replace(f"DequantizeLinear({letter}8", f"DequantizeLinear<axis={axis}>({letter}8")
    model = quantised(scales=scales, body=body + INT8)
    after = fused(model, "ort", VOUCHED)
    assert operators(after) == ["Not", "IncreFlashAttention"]
    agree(model, after, feeds(), 4e-6)


@pytest.mark.parametrize("form", ["", "[1,4,1,8]", "[4,1,8]", "[8]", "[1,4,1,1]"])
def test_caches_widened_and_multiplied(form: str) -> None:
    """A Cast and a Mul say the same with zero points of 0."""
    count = int(np.prod([int(size) for size in form.strip("[]").split(",")])) if form else 1
    scales = ", ".join(f"float{form} {name}={{{numbers(count)}}}" for name in ("ks", "vs"))
    body = "kf = Cast<to=1>(k8) k = Mul(kf, ks) vf = Cast<to=1>(v8) v = Mul(vs, vf) "
    model = quantised(scales=f"<{scales}, float low={{-3.4e38}}, float c={{0.3}}>", body=body + INT8)
    after = fused(model, "ort", VOUCHED)
    assert operators(after) == ["Not", "IncreFlashAttention"]
    agree(model, after, feeds(), 4e-6)


def test_a_cache_of_too_many_dimensions() -> None:
    """NumPy has no array of 65 dimensions: the numbers of a damaged model's Mul do not broadcast to them."""
    wide = ir.Value(name="k8", shape=ir.Shape([1] * 65), type=ir.TensorType(ir.DataType.INT8))
    cast = ir.node("Cast", [wide], {"to": 1})
    scale = ir.Value(name="ks", const_value=ir.tensor(np.float32([0.5])))
    key = ir.node("Mul", [cast.outputs[0], scale]).outputs[0]
    graph = ir.Graph([wide], [key], nodes=[cast, key.producer()], initializers=[scale], opset_imports={"": 17})
    dims = ((),) * 65
    found = match_dequantize(key, dims, ir.DataType.FLOAT, analyse(ir.Model(graph, ir_version=9)))
    assert found is not None and found.channels is None


NEAR_MISSES = {
    "a bias beside the mask": {
        "body": DEQUANTIZE + INT8.replace("w = Where(m, t, low)", "u = Add(t, b) w = Where(m, u, low)"),
        "scales": SCALES.replace("<", "<float[1,4,1,1] b={-1e20,0,0,0}, "),
    },
    "rows masked everywhere are NaN": {"scales": SCALES.replace("-3.4e38", "-inf")},
    "two queries": {"rows": "2"},
    "a scale for each key": {
        "scales": SCALES.replace(
            "float ks={0.02}, int8 kz={3}", f"float[20] ks={{{numbers(20)}}}, int8[20] kz={{{'0,' * 19}0}}"
        ),
        "body": DEQUANTIZE.replace("DequantizeLinear(k8", "DequantizeLinear<axis=2>(k8") + INT8,
    },
    "more scales than numbers, with which it never runs": {
        "scales": SCALES.replace(
            "float ks={0.02}, int8 kz={3}", f"float[20] ks={{{numbers(20)}}}, int8[20] kz={{{'0,' * 19}0}}"
        ),
        "body": DEQUANTIZE.replace("DequantizeLinear(k8", "DequantizeLinear<axis=3>(k8") + INT8,
    },
    "values that are not quantised": {
        "body": "k = DequantizeLinear(k8, ks, kz) vf = Cast<to=1>(v8) vm = Mul(vf, vs) v = Abs(vm) " + INT8,
        "scales": SCALES.replace("int8 vz={-5}, ", ""),
    },
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_other_attention_stays_as_it_was(name: str) -> None:
    model = quantised(**NEAR_MISSES[name])
    after = fused(model, "ort", VOUCHED)
    assert "FlashAttentionScore" in operators(after)
    assert not [value.name for value in after.graph.initializer if "antiquant" in value.name]


GROUPED = (
    "c = Cast<to=10>(cf) ku = Unsqueeze(k, two) ke = Expand(ku, e) kk = Reshape(ke, r) vu = Unsqueeze(v, two) "
    "ve = Expand(vu, e) vv = Reshape(ve, r) kt = Transpose<perm=[0,1,3,2]>(kk) s = MatMul(q, kt) t = Mul(s, c) "
    "p = Softmax<axis=-1>(t) y = MatMul(p, vv)"
)


def grouped(rows: str) -> onnx.ModelProto:
    inputs = f"float16[B,4,{rows},16] q, float16[B,2,T,16] k, float16[B,2,T,16] v"
    constants = "<float cf={0.25}, int64[5] e={1,1,2,1,1}, int64[1] two={2}, int64[4] r={0,4,-1,16}>"
    return parse(GROUPED, inputs=inputs, outputs=f"float16[B,4,{rows},16] y", initializers=constants)


def test_ascend_decodes_with_grouped_heads() -> None:
    rng = np.random.default_rng(1)
    given = {"q": rng.normal(size=(2, 4, 1, 16)).astype(np.float16)}
    given |= {name: rng.normal(size=(2, 2, 20, 16)).astype(np.float16) for name in "kv"}
    model = grouped("1")
    after = fused(model, "ascend")
    (node,) = after.graph.node
    assert node.op_type == "IncreFlashAttention"
    attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
    assert attrs["num_key_value_heads"] == 2
    assert attrs["input_layout"] == b"BNSD"
    agree(model, after, given, 2e-3)
    assert operators(fused(grouped("S"), "ascend")) == ["FlashAttentionScore"]
    assert operators(fused(grouped("S"), "ascend", ("decode",))) == ["IncreFlashAttention"]
    assert operators(fused(model, "ort")) == ["FlashAttentionScore"]


def test_a_cann_without_a_prototype_of_the_step() -> None:
    """The step stays a FlashAttentionScore, and the report says from which CANN on there is more."""
    (block,) = fuse(ir.from_proto(grouped("1")), Options("ascend", cann="8.0")).blocks
    assert block.op == "FlashAttentionScore"
    told = {missed.code: (missed.reason, missed.hint) for missed in block.missed}
    assert told[MissedCode.NOT_INCRE] == (
        "no variant of IncreFlashAttention is known for CANN 8.0; the first is of CANN 8.5.0-beta.1",
        "--cann 8.5.0-beta.1 or newer, if your CANN is",
    )


@pytest.mark.parametrize(
    ("rows", "assume", "words"),
    [
        ("1", ("no-empty-rows",), "and a lower score would count less"),
        ("S", ("no-empty-rows", "decode"), "and a lower score would count less"),
        ("S", ("no-empty-rows",), ""),
    ],
)
def test_the_report_says_why_ascend_does_not_decode(rows: str, assume: tuple[str, ...], words: str) -> None:
    inputs = f"bfloat16[B,4,{rows},16] q, bfloat16[B,4,T,16] k, bfloat16[B,4,T,16] v, bool[B,1,1,T] m"
    body = (
        "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) f = Cast<to=1>(s) w = Where(m, f, low) "
        "pf = Softmax<axis=-1>(w) p = Cast<to=16>(pf) y = MatMul(p, v)"
    )
    outputs = f"bfloat16[B,4,{rows},16] y"
    model = parse(body, inputs=inputs, outputs=outputs, initializers="<float low={-inf}>")
    report = fuse(ir.serde.deserialize_model(model), Options("ascend", assume=frozenset(assume)))
    assert report.blocks[0].op == "FlashAttentionScore"
    lines = [line for line in report.missed if "missed IncreFlashAttention" in line]
    assert len(lines) == bool(words)
    assert all(words in line and "try: --assume masks-dominate" in line for line in lines)


def test_a_mask_whose_number_a_bias_does_not_hold_is_declined() -> None:
    wide = "tf = Cast<to=1>(t) w = Where(m, tf, lf) pf = Softmax<axis=-1>(w) p = Cast<to=10>(pf)"
    inputs = "float16[B,4,1,16] q, float16[B,2,T,16] k, float16[B,2,T,16] v, bool[B,1,1,T] m"
    constants = (
        "<float cf={0.25}, float lf={-3.4e38}, int64[5] e={1,1,2,1,1}, int64[1] two={2}, int64[4] r={0,4,-1,16}>"
    )
    body = GROUPED.replace("p = Softmax<axis=-1>(t)", wide)
    model = parse(body, inputs=inputs, outputs="float16[B,4,1,16] y", initializers=constants)
    graph = ir.serde.deserialize_model(model)
    report = fuse(graph, Options(target="ascend"))
    assert [block.code for block in report.blocks] == ["empty_rows"]
    assert "Softmax" not in operators(fused(model, "ascend", ("no-empty-rows",)))


@pytest.mark.parametrize("rows", ["1", "S"])
def test_added_biases_are_taken_along(rows: str) -> None:
    body = GROUPED.replace("p = Softmax<axis=-1>(t)", "u = Add(t, b) p = Softmax<axis=-1>(u)")
    inputs = f"float16[B,4,{rows},16] q, float16[B,2,T,16] k, float16[B,2,T,16] v, float16[B,4,{rows},T] b"
    constants = "<float cf={0.25}, int64[5] e={1,1,2,1,1}, int64[1] two={2}, int64[4] r={0,4,-1,16}>"
    model = parse(body, inputs=inputs, outputs=f"float16[B,4,{rows},16] y", initializers=constants)
    after = fused(model, "ascend", () if rows == "1" else ("decode",))
    assert operators(after) == ["IncreFlashAttention"]
    rng = np.random.default_rng(2)
    given: dict[str, Array] = {"q": rng.normal(size=(2, 4, 1, 16)).astype(np.float16)}
    given |= {name: rng.normal(size=(2, 2, 20, 16)).astype(np.float16) for name in "kv"}
    agree(model, after, given | {"b": rng.normal(size=(2, 4, 1, 20)).astype(np.float16)}, 2e-3)


def attention(**given: Any) -> Operator:
    """ai.onnx Attention of one row in float16."""
    names = ("q", "k", "v", "mask", "past_key", "past_value", "lengths")
    default = {"q": "B 4 1 16", "k": "B 2 T 16", "v": "B 2 T 16"}
    inputs = {name: {**default, **given}.get(name) for name in names}
    outputs = ("y", "present_key", "present_value") if "past_key" in given else ("y",)
    ranks = {"present_key": 4, "present_value": 4}
    return Operator("Attention", inputs, outputs, {}, "", 24, {}, "float16", fixed=True, ranks=ranks)


NEW = {"k": "B 2 1 16", "v": "B 2 1 16", "past_key": "B 2 P 16", "past_value": "B 2 P 16"}
OPERATORS: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "none"),
    "lengths": ({"lengths": ("B", np.array([2, 6]))}, "lengths"),
    "an entry without keys": ({"lengths": ("B", np.array([0, 6]))}, "lengths"),
    "a past": (NEW, "none"),
}


@pytest.mark.parametrize("name", OPERATORS)
def test_an_attention_op_decodes(name: str) -> None:
    """For Ascend, and the presents stay what they were."""
    features, mask = OPERATORS[name]
    operator = attention(**features)
    given = operator.feeds()
    model = operator.model(given)
    after, report = running.fused(model, "ascend")
    assert [(block.op, block.mask) for block in report.blocks] == [("IncreFlashAttention", mask)]
    for got, wanted in zip(running.run(after, given), running.run(model, given), strict=True):
        running.assert_same(got, wanted, 4e-3)


def test_an_attention_op_reads_int8_caches() -> None:
    body = DEQUANTIZE + "y = Attention<scale=0.3>(q, k, v, , , , len)"
    inputs = "float[B,4,1,8] q, int8[B,4,T,8] k8, int8[B,4,T,8] v8, int64[B] len"
    model = parse(body, inputs=inputs, outputs="float[B,4,1,8] y", initializers=SCALES, opset=24)
    after = fused(model, "ort")
    assert "IncreFlashAttention" in operators(after)
    assert "DequantizeLinear" not in operators(after)
    given = {name: each for name, each in feeds().items() if name != "m"}
    agree(model, after, given | {"len": np.array([0, 13])}, 2e-6)


POSITIONS = (
    "shape = Shape(k8) count = Gather(shape, three0) all = Range(zero, count, one) j = Unsqueeze(all, three) "
    "first = Unsqueeze(pad, last3) "
)
NUMBERS = (
    "int64 zero={0}, int64 one={1}, int64 three0={2}, int64[3] three={0,1,2}, int64[3] last3={1,2,3}, float ninf={-inf}"
)
STARTS = {
    "at least": ("m = GreaterOrEqual(j, first)", "starts"),
    "not before": ("b = Less(j, first) m = Not(b)", "starts"),
    "after": ("f = Sub(first, one) m = Greater(j, f)", "starts"),
    "between two": ("a = GreaterOrEqual(j, first) b = Less(j, end) m = And(a, b)", "lengths+starts"),
    "the later of two": ("a = GreaterOrEqual(j, first) b = Greater(j, least) m = And(a, b)", "starts"),
}


def padded(mask: str, fill: str = "ninf") -> onnx.ModelProto:
    """Int8 caches of which the first keys count nothing, `pad` of each batch entry."""
    body = DEQUANTIZE + POSITIONS + mask + " " + INT8.replace("low)", f"{fill})")
    inputs = (
        "float[B,4,1,8] q, int8[B,4,20,8] k8, int8[B,4,20,8] v8, int64[B] pad, int64 end, int64 least, int64[B] ends"
    )
    scales = SCALES.replace("<", f"<{NUMBERS}, ")
    return parse(body, inputs=inputs, outputs="float[B,4,1,8] y", initializers=scales, opset=19)


def padding(*pads: int, end: int = 15, least: int = 3) -> dict[str, Array]:
    given = {name: array for name, array in feeds().items() if name != "m"}
    whole = {"end": end, "least": least}
    return given | {"pad": np.array(pads)} | {name: np.array(number) for name, number in whole.items()}


@pytest.mark.parametrize("pads", [(0, 7), (3, 19), (14, 1), (20, 4), (25, -3)])
@pytest.mark.parametrize("name", STARTS)
def test_batches_padded_on_the_left(name: str, pads: tuple[int, int]) -> None:
    """Keys from a start on become lengths and a padding behind them; an entry without keys stays NaN."""
    spelling, word = STARTS[name]
    model = padded(spelling)
    graph = ir.serde.deserialize_model(model)
    (block,) = fuse(graph, Options()).blocks
    assert (block.op, block.mask) == ("IncreFlashAttention", word)
    (node,) = (node for node in graph.graph if node.op_type == "IncreFlashAttention")
    assert node.inputs[4] is None or not node.inputs[4].name
    agree(model, ir.serde.serialize_model(graph), padding(*pads) | {"ends": np.array([9, 12])}, 4e-6)
    none = {name: array[:0] if array.ndim else array for name, array in padding(*pads).items()}
    agree(model, ir.serde.serialize_model(graph), none | {"ends": np.array([], np.int64)}, 4e-6)


@pytest.mark.parametrize(("dtype", "number"), [("bfloat16", 16), ("float16", 10)])
def test_ascend_takes_a_start_without_a_word(dtype: str, number: int) -> None:
    """No mask is left whose score others might undercut."""
    inputs = f"{dtype}[2,4,1,16] q, {dtype}[2,2,20,16] k, {dtype}[2,2,20,16] v, int64[2] pad"
    constants = (
        "<float cf={0.25}, float ninf={-inf}, int64[5] e={1,1,2,1,1}, int64[1] two={2}, int64[4] r={0,4,-1,16}, "
        "int64 zero={0}, int64 one={1}, int64 count={20}, int64[3] three={0,1,2}, int64[3] last3={1,2,3}>"
    )
    mask = (
        "all = Range(zero, count, one) j = Unsqueeze(all, three) first = Unsqueeze(pad, last3) "
        "m = GreaterOrEqual(j, first) tf = Cast<to=1>(t) w = Where(m, tf, ninf) pf = Softmax<axis=-1>(w) "
        f"p = Cast<to={number}>(pf)"
    )
    body = GROUPED.replace("Cast<to=10>(cf)", f"Cast<to={number}>(cf)").replace("p = Softmax<axis=-1>(t)", mask)
    model = parse(body, inputs=inputs, outputs=f"{dtype}[2,4,1,16] y", initializers=constants)
    graph = ir.serde.deserialize_model(model)
    (block,) = fuse(graph, Options("ascend", assume=frozenset({"no-empty-rows"}))).blocks
    assert (block.op, block.mask, block.assumed) == ("IncreFlashAttention", "starts", ("no-empty-rows",))
    if dtype == "float16":  # ONNX Runtime has no products of bfloat16
        rng = np.random.default_rng(4)
        given: dict[str, Array] = {"q": rng.normal(size=(2, 4, 1, 16)).astype(np.float16)}
        given |= {name: rng.normal(size=(2, 2, 20, 16)).astype(np.float16) for name in "kv"}
        agree(model, ir.serde.serialize_model(graph), given | {"pad": np.array([3, 11])}, 2e-3)


def test_a_start_beside_lengths_that_differ_stays_a_mask() -> None:
    spelling = "e = Unsqueeze(ends, last3) a = GreaterOrEqual(j, first) b = Less(j, e) m = And(a, b)"
    graph = ir.serde.deserialize_model(padded(spelling, "low"))
    (block,) = fuse(graph, Options(assume=frozenset({"no-empty-rows", "masks-dominate"}))).blocks
    assert (block.op, block.mask) == ("IncreFlashAttention", "lengths+atten_mask")
    given = padding(2, 5) | {"ends": np.array([9, 12])}
    agree(padded(spelling, "low"), ir.serde.serialize_model(graph), given, 4e-6)


PADDED = {
    "where": "b = Cast<to=9>(m4) m = Where(b, zero, low) w = Add(t, m) ",
    "arithmetic": "n = Cast<to=KIND>(m4) o = Sub(one, n) m = Mul(o, low) w = Add(t, m) ",
    "put": "b = Cast<to=9>(m4) w = Where(b, t, low) ",
}


def with_mask(spelling: str, length: str, kind: str = "float16", caches: bool = False) -> onnx.ModelProto:
    """One token on a cache, and the attention_mask of a batch that is padded on the left, of a length of its own."""
    number = {"float16": 10, "float": 1}[kind]
    keys = DEQUANTIZE if caches else "k = Concat<axis=2>(pk, nk) v = Concat<axis=2>(pv, nv) "
    body = (
        "axes = Constant<value_ints=[1,2]>() m4 = Unsqueeze(mask, axes) kt = Transpose<perm=[0,1,3,2]>(k) "
        f"s = MatMul(q, kt) t = Mul(s, c) {PADDED[spelling].replace('KIND', str(number))}"
        "p = Softmax<axis=-1>(w) y = MatMul(p, v)"
    )
    stored = ["int8[B,4,P,8] k8, int8[B,4,P,8] v8"] if caches else [f"{kind}[B,4,P,8] pk, {kind}[B,4,P,8] pv"]
    inputs = [f"{kind}[B,4,1,8] q", *stored, f"int64[B,{length}] mask"]
    inputs += [] if caches else [f"{kind}[B,4,1,8] nk, {kind}[B,4,1,8] nv"]
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 19]> g ({", ".join(inputs)}) => ({kind}[B,4,1,8] y) {{ {keys}{body} }}'
    )
    low = -65504.0 if kind == "float16" else -3.4e38
    for name, value in {"c": 0.3, "zero": 0.0, "one": 1.0, "low": low}.items():
        model.graph.initializer.append(helper.make_tensor(name, number, [], [value]))
    for name, scale, zero in (("k", 0.02, 3), ("v", 0.03, -5)) if caches else ():
        model.graph.initializer.append(helper.make_tensor(f"{name}s", number, [], [scale]))
        model.graph.initializer.append(helper.make_tensor(f"{name}z", onnx.TensorProto.INT8, [], [zero]))
    onnx.checker.check_model(model, full_check=True)
    return model


def masked_feeds(model: onnx.ModelProto, length: int = 20) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    mask = np.ones((2, length), np.int64)
    mask[0, :7] = 0
    found: dict[str, Array] = {"mask": mask}
    for value in model.graph.input:
        tensor = value.type.tensor_type
        if value.name != "mask":
            caches = tensor.elem_type == onnx.TensorProto.INT8
            keys = 1 if value.name in ("q", "nk", "nv") else 20 if caches else 19
            numbers = rng.integers(-128, 128, (2, 4, keys, 8)) if caches else rng.normal(size=(2, 4, keys, 8))
            found[value.name] = numbers.astype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return found


@pytest.mark.parametrize("spelling", PADDED)
def test_a_mask_whose_length_is_open(spelling: str) -> None:
    """It is taken, for the model adds it to the scores; a run in which it is shorter is refused, as in the model."""
    model = with_mask(spelling, "T")
    after = fused(model, "ascend", ("masks-dominate", "no-empty-rows"))
    assert "IncreFlashAttention" in operators(after)
    agree(model, after, masked_feeds(model), 2e-3)
    with pytest.raises(Exception, match="mask|expand shape"):
        running.run(after, masked_feeds(model, 12))


@pytest.mark.parametrize("spelling", ["where", "put"])
def test_a_mask_whose_length_is_open_beside_int8_caches(spelling: str) -> None:
    model = with_mask(spelling, "T", "float", caches=True)
    after = fused(model, "ort", ("masks-dominate", "no-empty-rows"))
    assert "IncreFlashAttention" in operators(after)
    agree(model, after, masked_feeds(model), 1e-5)


def test_a_mask_for_all_keys_at_once() -> None:
    """One number for all keys of a batch entry broadcasts in the model; the operator has a mask of every key."""
    model = with_mask("where", "1")
    after = fused(model, "ascend", ("masks-dominate", "no-empty-rows"))
    given = masked_feeds(model) | {"mask": np.ones((2, 1), np.int64)}
    agree(model, after, given, 2e-3)
