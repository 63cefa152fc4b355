"""Attention as the operators of ONNX and ONNX Runtime: which one, told what, and that it gives the same."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.reference import ReferenceEvaluator

from fa_compiler.op_registry.runtimes import RUNTIMES, Runtime
from fa_compiler.passes import Options, Report, fuse
from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.answer.report import Code, MissedCode
from tests.examples import examples
from tests.passes.builder import build
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, assert_same, feeds_of, parse, random_feeds, run
from tests.passes.spelling import Spelling
from tests.passes.strategies import SPELLINGS

CAUSAL = (
    "low = Constant<value=float {-1e30}>() n = Shape(s) r = Gather<axis=0>(n, two) c = Gather<axis=0>(n, three) "
    "i0 = Range(zero, r, one) j = Range(zero, c, one) i = Unsqueeze(i0, one1) "
)
NUMBERS = (
    "<int64 zero = {0}, int64 one = {1}, int64 two = {2}, int64 three = {3}, int64[1] one1 = {1}, float cap = {2.0}>"
)
SQUARE = "float[B,4,S,8] q, float[B,4,S,8] k, float[B,4,S,8] v"
GROUPED = "float[B,4,S,8] q, float[B,2,S,8] k2, float[B,2,S,8] v2"
REPEAT = (
    "a2 = Constant<value_ints=[2]>() e = Constant<value_ints=[1,1,2,1,1]>() f = Constant<value_ints=[0,4,-1,8]>() "
    "k3 = Unsqueeze(k2, a2) k4 = Expand(k3, e) k = Reshape(k4, f) v3 = Unsqueeze(v2, a2) v4 = Expand(v3, e) "
    "v = Reshape(v4, f) "
)
BAND = "o = Less(i, j) x = Where(o, low, {}) "
WINDOW = "o1 = Less(i, j) w = Sub(i, two) o2 = LessOrEqual(j, w) o = Or(o1, o2) x = Where(o, low, s) "


def rewritten(
    model: onnx.ModelProto, target: Target, runtime: str | None = None, *assume: str
) -> tuple[onnx.ModelProto, Report]:
    """The model for a target and a runtime, checked, and the report."""
    graph = ir.from_proto(model)
    chosen = None if runtime is None else Runtime.of(runtime)
    report = fuse(graph, Options(target, runtime=chosen, assume=frozenset(assume)))
    result = ir.to_proto(graph)
    onnx.checker.check_model(result, full_check=True)
    return result, report


def attributes(node: onnx.NodeProto) -> dict[str, Any]:
    """The attributes of a node, but for its scale."""
    return {each.name: onnx.helper.get_attribute_value(each) for each in node.attribute if each.name != "scale"}


def attention(
    body: str, inputs: str = SQUARE, more: str = "", opset: int = 17, dtype: str = "float", size: int = 8
) -> onnx.ModelProto:
    """Scores, `body` that makes x of the scores s, softmax, product."""
    text = f"{REPEAT if 'k2' in inputs else ''}{PRODUCT_QK}{CAUSAL if 'i, j' in body else ''}{body} "
    model = f"{text}{SOFTMAX.format('x')}{PRODUCT_PV}"
    inputs, more = inputs.replace("float[", f"{dtype}["), more.replace("float[", f"{dtype}[")
    outputs = f"{dtype}[B,4,S,{size}] y"
    return parse(model, more, inputs=inputs, outputs=outputs, opset=opset, initializers=NUMBERS)


PLAIN = "x = Identity(s)"
PADDED = "low = Constant<value=float {-1e30}>() x = Where(m, s, low)"
CASES: dict[str, tuple[onnx.ModelProto, Target, str, str, Mapping[str, Any], list[int]]] = {
    # the model; target, runtime; the operator, its attributes, the places of the inputs behind query, key and value
    "no mask": (attention(PLAIN), "contrib", "ort-cpu", "MultiHeadAttention", {"num_heads": 4}, []),
    "no mask, ONNX": (attention(PLAIN), "onnx", "ort-cpu", "Attention", {}, []),
    "causal": (
        *(attention(BAND.format("s")), "contrib", "ort-cpu", "MultiHeadAttention"),
        *({"num_heads": 4, "unidirectional": 1}, []),
    ),
    "causal, ONNX": (attention(BAND.format("s")), "onnx", "ort-cpu", "Attention", {"is_causal": 1}, []),
    "padding as a mask of keys": (
        *(attention(PADDED, more="bool[B,1,1,S] m"), "contrib", "ort-cpu", "MultiHeadAttention"),
        *({"num_heads": 4, "mask_filter_value": np.float32(-1e29)}, [4]),
    ),
    "padding where a runtime has no mask of keys": (
        *(attention(PADDED, more="bool[B,1,1,S] m"), "contrib", "ort-webgpu", "MultiHeadAttention"),
        *({"num_heads": 4}, [5]),
    ),
    "a mask of rows and keys": (
        *(attention(PADDED, more="bool[B,1,S,S] m"), "contrib", "ort-cpu", "MultiHeadAttention"),
        *({"num_heads": 4}, [5]),
    ),
    "a bias": (
        *(attention("x = Add(s, b)", more="float[1,4,S,S] b"), "contrib", "ort-cpu", "MultiHeadAttention"),
        *({"num_heads": 4}, [5]),
    ),
    "grouped heads": (
        *(attention(BAND.format("s"), GROUPED), "contrib", "ort-cpu", "GroupQueryAttention"),
        *({"num_heads": 4, "kv_num_heads": 2}, [5, 6]),
    ),
    "grouped heads that are not causal": (
        *(attention(PLAIN, GROUPED), "contrib", "ort-cpu", "GroupQueryAttention"),
        *({"num_heads": 4, "kv_num_heads": 2, "causal": 0}, [5, 6]),
    ),
    "grouped heads for an older version are repeated": (
        *(attention(PLAIN, GROUPED), "contrib", "ort-cpu=1.29", "MultiHeadAttention"),
        *({"num_heads": 4}, []),
    ),
    "grouped heads are repeated for OpenVINO": (attention(PLAIN, GROUPED), "onnx", "openvino", "Attention", {}, []),
    "grouped heads, ONNX": (attention(PLAIN, GROUPED), "onnx", "ort-cpu", "Attention", {}, []),
    "a window": (
        *(attention(WINDOW), "contrib", "ort-cpu", "GroupQueryAttention"),
        *({"num_heads": 4, "kv_num_heads": 4, "local_window_size": 2}, [5, 6]),
    ),
    "a soft cap": (
        *(attention("d = Div(s, cap) t = Tanh(d) u = Mul(t, cap) " + BAND.format("u")), "contrib", "ort-cpu"),
        *("GroupQueryAttention", {"num_heads": 4, "kv_num_heads": 4, "softcap": 2.0}, [5, 6]),
    ),
    "float16 where only float32 is taken": (
        *(attention(PLAIN, dtype="float16"), "contrib", "ort-cpu=1.29", "MultiHeadAttention"),
        *({"num_heads": 4}, []),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_operator_is_told_what_the_model_said(name: str) -> None:
    model, target, runtime, op, told, places = CASES[name]
    result, report = rewritten(model, target, runtime)
    (block,) = report.blocks
    assert (block.status, block.op) == ("fused", op), block
    (node,) = (node for node in result.graph.node if node.op_type == op)
    assert attributes(node) == told
    assert [place for place, value in enumerate(node.input) if value and place > 2] == places
    feeds = random_feeds(model)
    tolerance = 2e-3 if "16" in name else 1e-5
    assert_same(run(result, feeds)[0], run(model, feeds)[0], tolerance)
    if target == "onnx":
        assert_same(ReferenceEvaluator(result).run(None, feeds)[0], run(model, feeds)[0], tolerance)
    missed = {each.code for each in block.missed}
    assert ("float16" in name, "repeated" in name) == ("wide" in missed, "repeated_heads" in missed)


@pytest.mark.parametrize("runtime", ["ort-cpu", "ort-cuda", None])
def test_a_boolean_mask_stays_boolean(runtime: str | None) -> None:
    """Attention takes it as it is, so nothing has to be made of it but its inverse."""
    result, _ = rewritten(attention(PADDED, more="bool[B,1,S,S] m"), "onnx", runtime, "no-empty-rows")
    (node,) = (node for node in result.graph.node if node.op_type == "Attention")
    makers = {name: other.op_type for other in result.graph.node for name in other.output}
    assert node.input[3] == "m" or makers[node.input[3]] == "Not"


def test_a_mask_is_repeated_where_a_runtime_shares_none() -> None:
    """DirectML takes a bias of all batch entries and heads only."""
    model = attention(PADDED, more="bool[B,1,S,S] m")
    shapes = {}
    for runtime in ("ort-cpu", "ort-dml"):
        result, _ = rewritten(model, "contrib", runtime)
        (node,) = (node for node in result.graph.node if node.op_type == "MultiHeadAttention")
        result.graph.output.append(onnx.helper.make_tensor_value_info(node.input[5], 1, None))
        feeds = random_feeds(model)
        got, mask = run(result, feeds)
        assert_same(got, run(model, feeds)[0], 1e-5)
        shapes[runtime] = mask.shape
    assert shapes == {"ort-cpu": (2, 1, 5, 5), "ort-dml": (2, 4, 5, 5)}


TALL = "float[B,4,S,8] q, float[C,4,T,8] k, float[E,4,T,8] v"
UNLIKE: dict[str, tuple[str, str, str, bool, list[dict[str, int]]]] = {
    # query, key and value; the mask; the terms; are sizes unproven? runs
    "batch sizes": (
        *(TALL, "float[F,1,S,T] b", "x = Add(s, b)", True),
        [{}, {"B": 1, "E": 1, "F": 1}, {"C": 1, "E": 1}, {"B": 1, "C": 1, "E": 1}, {"B": 1, "C": 1, "F": 1}],
    ),
    "batch sizes beside padding": (
        *(TALL, "bool[F,1,1,T] m", PADDED, True),
        [{}, {"B": 1, "F": 1}, {"C": 1, "E": 1}, {"B": 1, "C": 1, "E": 1}],
    ),
    "rows": (SQUARE, "float[B,1,R,S] b", "x = Add(s, b)", True, [{"R": 5}, {"R": 1}]),
    "one query": ("float[1,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v", "", PLAIN, False, [{}, {"B": 1}]),
}


@pytest.mark.parametrize("target", ["contrib", "onnx"])
@pytest.mark.parametrize("name", UNLIKE)
def test_sizes_that_may_be_1_are_repeated(name: str, target: Target) -> None:
    """The operators do not broadcast. Where sizes are not proven to agree, the largest of each run is taken."""
    inputs, mask, terms, unproven, runs = UNLIKE[name]
    body = PRODUCT_QK + terms + " " + SOFTMAX.format("x") + PRODUCT_PV
    model = parse(body, mask, inputs=inputs, outputs="float[U,4,V,8] y", opset=17, initializers=NUMBERS)
    result, report = rewritten(model, target, "ort-cpu", "no-empty-rows")
    (block,) = report.blocks
    assert block.status == "fused", block
    assert ("expanded" in [missed.code for missed in block.missed]) == unproven
    vouched, _ = rewritten(model, target, "ort-cpu", "no-empty-rows", "same-sizes")
    assert ("ReduceMax" in [node.op_type for node in result.graph.node]) == unproven
    assert "ReduceMax" not in [node.op_type for node in vouched.graph.node]
    for sizes in runs:
        feeds = feeds_of(model, {"S": 5, "T": 5, "R": 5, **dict.fromkeys("BCEF", 2), **sizes})
        if "m" in feeds:
            feeds["m"][..., 0] = True
        assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize(("bias", "status"), [("float[C,1,2,S,T] b", "declined"), ("float[B,1,2,S,T] b", "fused")])
def test_a_batch_of_several_dimensions_is_not_repeated(bias: str, status: str) -> None:
    """Groups of heads are a part of the batch here. A mask with another batch size cannot be laid out like that."""
    numbers = "<int64[5] five = {0,2,2,-1,8}, int64[4] four = {0,4,-1,8}, int64[1] two1 = {2}>"
    body = (
        "q5 = Reshape(q, five) kt = Transpose<perm=[0,1,3,2]>(k2) k5 = Unsqueeze(kt, two1) v5 = Unsqueeze(v2, two1) "
        "s = MatMul(q5, k5) x = Add(s, b) p = Softmax<axis=-1>(x) y5 = MatMul(p, v5) y = Reshape(y5, four) "
    )
    inputs, outputs = "float[B,4,S,8] q, float[B,2,T,8] k2, float[B,2,T,8] v2", "float[U,4,V,8] y"
    model = parse(body, bias, inputs=inputs, outputs=outputs, opset=17, initializers=numbers)
    _, report = rewritten(model, "contrib", "ort-cpu")
    assert [block.status for block in report.blocks] == [status]


NEW = "float[B,4,S,8] q, float[B,{0},P,8] pk, float[B,{0},P,8] pv, float[B,{0},S,8] nk, float[B,{0},S,8] nv"
JOINED = "k{0} = Concat<axis=2>(pk, nk) v{0} = Concat<axis=2>(pv, nv) "
BEHIND_PAST = CAUSAL.replace("i = Unsqueeze(i0, one1)", "more = Sub(c, r) i1 = Add(i0, more) i = Unsqueeze(i1, one1)")


def with_past(terms: str, more: str = "", heads: int = 4, outputs: str = "") -> onnx.ModelProto:
    """Attention over keys that a Concat appends to, which the model gives as k and v."""
    joined = JOINED.format("2" if heads == 2 else "") + (REPEAT if heads == 2 else "")
    body = joined + PRODUCT_QK + BEHIND_PAST + terms + SOFTMAX.format("x") + PRODUCT_PV
    names = ("k2", "v2") if heads == 2 else ("k", "v")
    given = "".join(f", float[B,{heads},T,8] {name}" for name in names) if outputs == "" else outputs
    inputs = NEW.format(heads)
    return parse(body, more, inputs=inputs, outputs=f"float[B,4,S,8] y{given}", opset=17, initializers=NUMBERS)


PASTS: dict[str, tuple[onnx.ModelProto, list[int], bool]] = {
    # the model; the places of the operator's inputs; does it give what the Concats gave?
    "causal": (with_past(BAND.format("s")), [0, 1, 2, 4, 5], True),
    "causal, grouped heads": (with_past(BAND.format("s"), heads=2), [0, 1, 2, 4, 5], True),
    "causal and padding": (
        *(with_past("s1 = Where(m, s, low) " + BAND.format("s1"), "bool[B,1,1,T] m"), [0, 1, 2, 3, 4, 5], True),
    ),
    "a bias that depends on their number": (
        with_past(
            "size = Shape<start=2, end=3>(k) number = Cast<to=1>(size) w = Mul(b, number) s1 = Add(s, w) "
            "minus = Constant<value=float {-inf}>() o = Less(i, j) x = Where(o, minus, s1) ",
            "float[1,1,1,1] b",
        ),
        *([0, 1, 2, 3, 4, 5], False),
    ),
    "nobody else needs the keys": (with_past(BAND.format("s"), outputs=" "), [0, 1, 2, 4, 5], True),
}


@pytest.mark.parametrize("name", PASTS)
def test_keys_that_grow_are_a_past_and_new_ones(name: str) -> None:
    model, places, joined = PASTS[name]
    result, report = rewritten(model, "onnx", "ort-cpu", "no-empty-rows", "same-sizes")
    (block,) = report.blocks
    assert block.status == "fused", block
    (node,) = (node for node in result.graph.node if node.op_type == "Attention")
    assert attributes(node) == {"is_causal": 1}
    assert [place for place, value in enumerate(node.input) if value] == places
    assert len(node.output) == 3
    made = [other.op_type for other in result.graph.node if set(other.output) & {"k", "v", "k2", "v2"}]
    assert ("Concat" in made) != joined
    for rows, past in ((5, 3), (1, 4), (4, 9), (3, 0)):
        feeds = feeds_of(model, {"B": 2, "S": rows, "P": past, "T": rows + past})
        if "m" in feeds:
            feeds["m"][..., 0] = True
        for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, 1e-5)
        for got, wanted in zip(ReferenceEvaluator(result).run(None, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, 1e-5)


STEP = with_past("x = Identity(s) ", heads=2)
STEPS: dict[str, tuple[onnx.ModelProto, list[int]]] = {
    # the model; the places of the operator's inputs
    "grouped heads": (STEP, [0, 1, 2, 3, 4, 5, 6]),
    "causal": (with_past(BAND.format("s"), heads=2), [0, 1, 2, 3, 4, 5, 6]),
    "causal and padding": (
        *(with_past("s1 = Where(m, s, low) " + BAND.format("s1"), "bool[B,1,1,T] m", 2), [0, 1, 2, 3, 4, 5, 6, 10]),
    ),
}


@pytest.mark.parametrize("size", ["S", "1"])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_behind_a_past(name: str, size: str) -> None:
    """GroupQueryAttention takes the past, where there is one row: by its size, or by the user's word."""
    kept, places = STEPS[name]
    model = onnx.ModelProto()
    model.CopyFrom(kept)
    if size == "1":
        for value in (*model.graph.input, *model.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                if dim.dim_param == "S":
                    dim.dim_value = 1
    word = ["decode"] if size == "S" else []
    result, report = rewritten(model, "contrib", "ort-cpu", "no-empty-rows", "same-sizes", *word)
    (block,) = report.blocks
    assert (block.op, "decode" in block.assumed) == ("GroupQueryAttention", size == "S"), block
    assert MissedCode.COPIES not in [missed.code for missed in block.missed]  # the operator appends to the cache itself
    (node,) = (node for node in result.graph.node if node.op_type == "GroupQueryAttention")
    assert attributes(node) == {"num_heads": 4, "kv_num_heads": 2}
    assert [place for place, value in enumerate(node.input) if value] == places
    assert "Concat" not in [each.op_type for each in result.graph.node if set(each.output) & {"k2", "v2"}]
    for batch, past in ((2, 3), (1, 9), (2, 1), (1, 0)):
        feeds = feeds_of(model, {"B": batch, "S": 1, "P": past, "T": 1 + past})
        if "m" in feeds:
            feeds["m"][..., 0] = True
        for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, 1e-5)


EMPTY_STEPS = {
    "-inf": "minus = Constant<value=float {-inf}>() x = Where(m, s, minus) ",
    "a bias of the lowest number": (
        "most = Constant<value=float {3.4028234663852886e38}>() b = Mul(fm, most) x = Sub(s, b) "
    ),
    "the lowest number": "least = Constant<value=float {-3.4028234663852886e38}>() x = Where(m, s, least) ",
}


@pytest.mark.parametrize("runtime", [None, "ort-cpu"])
@pytest.mark.parametrize("name", EMPTY_STEPS)
def test_a_step_behind_a_past_whose_row_has_no_key(name: str, runtime: str | None) -> None:
    """The kernel that ONNX Runtime takes there makes 0 of such a row where -inf or the lowest number masks it."""
    more = "float[B,1,1,T] fm" if "fm, most" in EMPTY_STEPS[name] else "bool[B,1,1,T] m"
    model = with_past(EMPTY_STEPS[name], more, heads=2)
    result, report = rewritten(model, "contrib", runtime, "same-sizes", "decode")
    (block,) = report.blocks
    kept = name == "the lowest number"  # which a larger one replaces
    assert block.op == ("GroupQueryAttention" if kept else "MultiHeadAttention"), block
    for past in (3, 0):
        feeds = feeds_of(model, {"B": 2, "S": 1, "P": past, "T": 1 + past})
        mask = "fm" if "fm" in feeds else "m"
        feeds[mask] = np.zeros_like(feeds[mask])
        feeds[mask][0 if mask == "fm" else 1] = 1
        for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
            assert_same(got, wanted, 1e-5)
    _, report = rewritten(model, "contrib", runtime, "same-sizes", "decode", "no-empty-rows")
    assert report.blocks[0].op == "GroupQueryAttention"


def test_several_rows_behind_a_past_are_no_step() -> None:
    """Heads are repeated then: the kernels of GroupQueryAttention take them for one batch entry only."""
    _, report = rewritten(STEP, "contrib", "ort-cpu")
    assert report.blocks[0].op == "MultiHeadAttention"
    (missed,) = (missed for missed in report.blocks[0].missed if missed.code == "repeated_heads")
    assert missed.hint == "--assume decode if every run decodes one token"
    _, report = rewritten(STEP, "contrib", "ort-dml", "decode")
    assert report.blocks[0].op == "MultiHeadAttention"


REFUSED: dict[str, tuple[onnx.ModelProto, Target, str | None, Code, str]] = {
    "a runtime without the operator": (
        *(attention(PLAIN), "onnx", "ort-webgpu"),
        *(Code.RUNTIME, "ort-webgpu has no kernel of Attention"),
    ),
    "a feature that is not taken": (
        *(attention("d = Div(s, cap) t = Tanh(d) x = Mul(t, cap)"), "onnx", "tensorrt"),
        *(Code.RUNTIME, "Attention of tensorrt does not take a soft cap on the scores"),
    ),
    "a feature of a later version": (
        *(attention("d = Div(s, cap) t = Tanh(d) u = Mul(t, cap) " + BAND.format("u")), "onnx", "ort-cpu=1.26"),
        *(Code.RUNTIME, "Attention of ort-cpu 1.26 does not take a mask behind a soft cap"),
    ),
    "what nobody knows": (
        *(attention("low = Constant<value=float {-inf}>() x = Where(m, s, low)", more="bool[B,1,S,S] m"), "contrib"),
        *("ort-webgpu", Code.RUNTIME, "whether MultiHeadAttention of ort-webgpu takes rows without a key whose result"),
    ),
    "a schema that lacks it": (
        *(attention("d = Div(s, cap) t = Tanh(d) x = Mul(t, cap)"), "contrib", None),
        *(Code.RUNTIME, "GroupQueryAttention does not take attention that is not causal"),
    ),
    "a bias that may exclude a whole row": (
        *(attention("x = Add(s, b)", more="float[1,4,S,S] b"), "onnx", "ort-cpu"),
        *(Code.EMPTY_ROWS, "may exclude every key of a row"),
    ),
    "a bias that may hold the lowest number, which a kernel takes for -inf": (
        *(attention("x = Add(s, b)", more="float[1,4,S,S] b"), "contrib", "ort-cuda"),
        *(Code.EMPTY_ROWS, "MultiHeadAttention of ort-cuda does not take a whole row of the lowest number in a mask"),
    ),
    "an opset that has no kernel": (
        *(attention(PLAIN, opset=25), "onnx", "ort-cpu"),
        *(Code.RUNTIME, "from 25 on runtimes expand Attention into parts"),
    ),
    "an opset that is too old": (
        *(attention(PLAIN.replace("Identity", "Abs"), opset=12), "onnx", "ort-cpu"),
        *(Code.OPSET, "an opset below 13 is not raised to 23"),
    ),
}


COARSE = (
    "low = Constant<value=float16 {64511}>() none = Constant<value=float16 {0}>() f = Where(m, none, low) x = Add(s, f)"
)
"""64511 are the bits of -65504."""


def test_a_mask_of_16_bits_whose_sums_are_not_rounded() -> None:
    """ONNX Runtime computes the model in float32 on the CPU, and so is the operator, which lacks float16 there. CUDA's
    adds in 16 bits."""
    model = attention(COARSE, more="bool[B,1,1,S] m", dtype="float16")
    result, report = rewritten(model, "contrib", "ort-cpu")
    assert [missed.code for missed in report.blocks[0].missed if missed.code == "wide"] == ["wide"]
    rng = np.random.default_rng(1)
    for length in (3, 40):
        feeds = {name: rng.standard_normal((2, 4, length, 8)).astype(np.float16) for name in "qkv"}
        feeds["m"] = rng.random((2, 1, 1, length)) < 0.5
        feeds["m"][1] = False
        assert_same(run(result, feeds)[0], run(model, feeds)[0], 2e-3)
    for target, runtime in (("contrib", "ort-cuda"), ("contrib", None), ("onnx", "ort-cpu")):
        _, report = rewritten(model, target, runtime)
        assert report.blocks[0].code == Code.EMPTY_ROWS
    _, report = rewritten(model, "contrib", "ort-cuda", "no-empty-rows")
    assert report.blocks[0].status == "fused"


STANDARD: tuple[Target, ...] = ("onnx", "contrib")
CAST_UP = (
    "u = Cast<to=1>(s) low = Constant<value=float {-10000.0}>() none = Constant<value=float {0.0}>() "
    "f = Where(m, none, low) x = Add(u, f) p0 = Softmax<axis=-1>(x) p = Cast<to=10>(p0) "
)


def test_a_mask_that_is_added_in_32_bits_beside_operands_of_16() -> None:
    """The operators of ONNX and ONNX Runtime may add it in 16 bits, which rounds a row that is masked everywhere. Ours
    adds in 32 bits."""
    short = SQUARE.replace("float[", "float16[")
    body = PRODUCT_QK + CAST_UP + PRODUCT_PV
    model = parse(body, "bool[B,1,1,S] m", inputs=short, outputs="float16[B,4,S,8] y", initializers=NUMBERS)
    for target, words in itertools.product(STANDARD, ((), ("no-empty-rows",))):
        _, report = rewritten(model, target, None, *words)
        (block,) = report.blocks
        assert block.code == (None if words else Code.EMPTY_ROWS), (target, block.reason)
    result, report = rewritten(model, "ort")
    assert report.blocks[0].status == "fused"
    feeds = random_feeds(model)
    feeds["m"][1] = False
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 2e-3)


@pytest.mark.parametrize("target", ["onnx", "contrib"])
def test_two_masks_of_16_bits_are_finite_or_infinite_together(target: Target) -> None:
    """Their sum lies between -inf and 0. A guard makes rows of -inf 0, and not those of the lowest number.

    64511 are the bits of -65504.
    """
    terms = (
        "low = Constant<value=float16 {64511}>() none = Constant<value=float16 {0}>() f = Where(m, none, low) "
        "g = Where(o, none, low) t = Add(f, g) x = Add(s, t) "
    )
    guard = "n = IsNaN(p) p0 = Where(n, none, p) y = MatMul(p0, v)"
    inputs, outputs = (each.replace("float[", "float16[") for each in (SQUARE, "float[B,4,S,8] y"))
    masks = "bool[B,1,1,S] m, bool[1,1,S,S] o"
    model = parse(PRODUCT_QK + terms + SOFTMAX.format("x") + guard, masks, inputs=inputs, outputs=outputs, opset=17)
    _, report = rewritten(model, target, "ort-cpu")
    assert [block.code for block in report.blocks] == [Code.EMPTY_ROWS]


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_target_cannot_say_is_declined(name: str) -> None:
    model, target, runtime, code, reason = REFUSED[name]
    result, report = rewritten(model, target, runtime)
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", code), block
    assert reason in (block.reason or ""), block.reason
    assert block.hint
    assert [node.op_type for node in result.graph.node] == [node.op_type for node in model.graph.node]


AROUND = "minus = Constant<value=int64 {-2}>() d = Sub(i, j) o1 = Less(d, minus) "
WINDOWS: Mapping[str, tuple[str, dict[str, int]]] = {
    "behind the row": (WINDOW, {"is_causal": 1, "left_window_size": 1}),
    "before the row": (AROUND + "x = Where(o1, low, s) ", {"right_window_size": 2}),
    "around the row": (
        AROUND + "o2 = Greater(d, one) o = Or(o1, o2) x = Where(o, low, s) ",
        {"left_window_size": 1, "right_window_size": 2},
    ),
}


@pytest.mark.parametrize("opset", [24, 25])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_attention(name: str, opset: int) -> None:
    """They are attributes from opset 25 on, which a model of opset 17 is raised to if the user asks for it."""
    body, wanted = WINDOWS[name]
    model = attention(body)
    graph = ir.from_proto(model)
    (block,) = fuse(graph, Options("onnx", opset=opset)).blocks
    result = ir.to_proto(graph)
    (node,) = (node for node in result.graph.node if node.op_type == "Attention")
    assert (block.mask, attributes(node)) == (("band", wanted) if opset == 25 else ("atten_mask", {}))
    assert next(each.version for each in result.opset_import if each.domain == "") == opset
    feeds = feeds_of(model, {"B": 2, "S": 7})
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize("type_of_powers", ["int64", "float"])
def test_slopes_that_are_powers(type_of_powers: str) -> None:
    """ALiBi as transformers computes it: the bias is bounded, so no row of Attention is without a key."""
    body = PRODUCT_QK + "base = Constant<value=float {0.25}>() last = Constant<value=int64 {5}>() "
    body += f"r = Range(one, last, one) powers = Cast<to={1 if type_of_powers == 'float' else 7}>(r) "
    body += "slope = Pow(base, powers) shape = Constant<value_ints=[4,1,1]>() each = Reshape(slope, shape) "
    body += "n = Shape(s) keys = Gather<axis=0>(n, three) at = Range(zero, keys, one) place = Cast<to=1>(at) "
    body += "alibi = Mul(each, place) x = Add(s, alibi) " + SOFTMAX.format("x") + PRODUCT_PV
    proto = parse(body, initializers=NUMBERS)
    result, report = rewritten(proto, "onnx", "ort-cpu")
    assert [each.op for each in report.blocks] == ["Attention"], report.blocks
    feeds = random_feeds(proto)
    assert_same(run(result, feeds)[0], run(proto, feeds)[0], 1e-5)


def test_the_opset_of_a_model_is_not_lowered() -> None:
    graph = ir.from_proto(attention(WINDOW, opset=25))
    (block,) = fuse(graph, Options("onnx", opset=23)).blocks
    assert (block.mask, graph.opset_imports[""]) == ("band", 25)


def test_a_band_that_is_not_taken_as_an_attribute_is_a_mask() -> None:
    """Up to 1.27 a single row with `is_causal` sees all keys."""
    model = attention(BAND.format("s"))
    result, report = rewritten(model, "onnx", "ort-cpu=1.27")
    (block,) = report.blocks
    assert (block.status, block.mask) == ("fused", "atten_mask")
    assert any("does not take a causal mask as an attribute" in missed.reason for missed in block.missed)
    (node,) = (node for node in result.graph.node if node.op_type == "Attention")
    assert not attributes(node)
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize(("dtype", "form"), [("float", "bool[B,1,S,S]"), ("float16", "bool[B,1,1,S]")])
def test_rows_that_are_nan_on_cuda(dtype: str, form: str) -> None:
    """In float32, or if key_padding_mask masks them."""
    low = "low32 = Constant<value=float {-inf}>() "
    model = attention(f"{low} low = CastLike(low32, s) x = Where(m, s, low)", more=f"{form} m", dtype=dtype)
    result, report = rewritten(model, "contrib", "ort-cuda=1.31")
    assert report.blocks[0].status == "fused", report
    assert "wide" not in [missed.code for missed in report.blocks[0].missed]
    feeds = random_feeds(model)
    feeds["m"][1] = False
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 2e-3)


def test_keys_behind_a_band_have_no_weight_where_those_before_it_are_padded() -> None:
    """MultiHeadAttention gives keys behind the row the lowest number, which padding gives to those before it."""
    padding = (
        "minus = Constant<value=float {-inf}>() least = Constant<value=float {-3.4028234663852886e38}>() "
        "f = Cast<to=1>(m) h = Mul(f, least) z = Add(s, h) o = Less(i, j) x = Where(o, minus, z)"
    )
    model = attention(padding, more="bool[B,1,1,S] m")
    feeds = feeds_of(model, {"B": 2, "S": 5})
    feeds["m"] = np.zeros_like(feeds["m"])
    feeds["m"][0, ..., 0] = feeds["m"][1, ..., :2] = True
    result, report = rewritten(model, "contrib", "ort-cpu")
    assert (report.blocks[0].op, report.blocks[0].mask) == ("GroupQueryAttention", "causal+real_shift")
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)
    _, report = rewritten(model, "contrib", "ort-cpu", "no-empty-rows")
    assert (report.blocks[0].op, report.blocks[0].mask) == ("MultiHeadAttention", "causal+real_shift")


def test_rows_that_are_0_on_cuda_and_nan_in_the_model() -> None:
    """In 16 bits the kernel gives 0, so the attention is computed in float32."""
    low = "low32 = Constant<value=float {-inf}>() low = CastLike(low32, s) x = Where(m, s, low)"
    result, report = rewritten(attention(low, more="bool[B,1,S,S] m", dtype="float16"), "contrib", "ort-cuda")
    assert "wide" in [missed.code for missed in report.blocks[0].missed]
    assert "MultiHeadAttention" in [node.op_type for node in result.graph.node]


def test_group_query_attention_has_all_results_where_a_kernel_needs_them() -> None:
    """CUDA's refuses to run without present key and value."""
    model = attention("o = Less(i, j) least = CastLike(low, s) x = Where(o, least, s)", GROUPED, dtype="float16")
    named = {}
    for runtime in ("ort-cpu", "ort-cuda", None):
        result, report = rewritten(model, "contrib", runtime)
        assert report.blocks[0].status == "fused", report
        (node,) = (node for node in result.graph.node if node.op_type == "GroupQueryAttention")
        named[runtime] = len(node.output)
        feeds = random_feeds(model)
        assert_same(run(result, feeds)[0], run(model, feeds)[0], 2e-3)
    assert named == {"ort-cpu": 1, "ort-cuda": 3, None: 3}


def test_a_hint_names_a_runtime_that_takes_it() -> None:
    model = attention("d = Div(s, cap) t = Tanh(d) x = Mul(t, cap)")
    _, report = rewritten(model, "onnx", "tensorrt")
    assert report.blocks[0].hint == "--runtime ort-cpu, which takes it"
    _, report = rewritten(model, "onnx", "ort-cpu")
    assert report.blocks[0].status == "fused"


@pytest.mark.parametrize(
    ("target", "runtime", "hint"),
    [
        ("onnx", "ort-webgpu", "--target contrib, because ort-webgpu has kernels of its operators"),
        ("contrib", "tensorrt", "--target onnx, because tensorrt has kernels of its operators"),
        ("onnx", "ort-coreml", "--runtime ort-cpu, which takes it"),
        ("onnx", "qnn", "give the inputs fixed sizes: export again, or onnxruntime.tools.make_dynamic_shape_fixed"),
    ],
)
def test_a_hint_names_the_target_that_suits_a_runtime(target: Target, runtime: str, hint: str) -> None:
    """It is the user's runtime that has to run the file: another one is no help, if this one takes another target."""
    _, report = rewritten(attention(PLAIN), target, runtime)
    assert report.blocks[0].hint == hint


def guarded(body: str, more: str = "", guard: str = "g = IsNaN(p) p0 = Where(g, none, p) ") -> onnx.ModelProto:
    """Attention whose probabilities are 0 where they would be NaN, or where `guard` makes them 0."""
    scores = f"none = Constant<value=float {{0}}>() {PRODUCT_QK}{CAUSAL if 'i, j' in body else ''}{body} "
    text = f"{scores}{SOFTMAX.format('x')}{guard}y = MatMul(p0, v)"
    return parse(text, more, inputs=SQUARE, outputs="float[B,4,S,8] y", opset=17, initializers=NUMBERS)


@pytest.mark.parametrize("runtime", ["tensorrt", "mlx"])
def test_a_hint_names_what_the_user_can_vouch_for(runtime: str) -> None:
    """Only rows without a key stand in the way: another runtime is no help to the user of this one."""
    model = guarded(PADDED, "bool[B,1,S,S] m", "p0 = Where(m, p, none) ")
    _, report = rewritten(model, "onnx", runtime)
    assert report.blocks[0].hint == "--assume no-empty-rows if no query row is masked everywhere"
    _, report = rewritten(model, "onnx", runtime, "no-empty-rows")
    assert report.blocks[0].status == "fused"


@pytest.mark.parametrize("body", [PLAIN, BAND.format("s")], ids=["no mask", "causal"])
@pytest.mark.parametrize(("target", "runtime"), [("onnx", "tensorrt"), ("onnx", "mlx"), ("contrib", "ort-webgpu")])
def test_a_guard_needs_nothing_where_every_row_has_a_key(body: str, target: Target, runtime: str) -> None:
    """What a runtime makes of rows without a key need not be known then."""
    model = guarded(body)
    result, report = rewritten(model, target, runtime)
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


@pytest.mark.parametrize(
    ("target", "runtime", "newer"),
    [
        ("onnx", "openvino=2020", "openvino takes it from 2026.3 on: --runtime openvino=2026.3"),
        ("onnx", "tensorrt=10.13.9", "tensorrt takes it from 10.14 on: --runtime tensorrt=10.14"),
        ("contrib", "ort-cpu=1.9", "ort-cpu takes it from 1.23 on: --runtime ort-cpu=1.23"),
    ],
)
def test_a_hint_names_the_first_version_that_takes_it(target: str, runtime: str, newer: str) -> None:
    """All that the attention needs is taken from there on; a version of the future takes what the newest one takes."""
    _, report = rewritten(attention(PLAIN), target, runtime)
    assert report.blocks[0].hint == newer
    for version in (newer.rpartition("=")[2], "3000.1"):
        _, report = rewritten(attention(PLAIN), target, f"{runtime.partition('=')[0]}={version}")
        assert report.blocks[0].status == "fused"


def test_no_version_takes_it() -> None:
    _, report = rewritten(attention(PLAIN, dtype="bfloat16"), "contrib", "ort-cpu=1.9")
    assert report.blocks[0].status == "declined"
    assert "1.23" not in (report.blocks[0].hint or "")


HEADS_OF_1000 = "float[B,4,S,1000] q, float[B,4,S,1000] k, float[B,4,S,1000] v"


@pytest.mark.parametrize(
    ("target", "body", "operator"),
    [
        ("onnx", PLAIN, "Attention"),
        ("contrib", PLAIN, "MultiHeadAttention"),
        ("contrib", "d = Div(s, cap) t = Tanh(d) u = Mul(t, cap) " + BAND.format("u"), "GroupQueryAttention"),
    ],
)
def test_heads_wider_than_our_kernels_take(target: Target, body: str, operator: str) -> None:
    model = attention(body, HEADS_OF_1000, size=1000)
    _, declined = rewritten(model, "ort")
    assert declined.blocks[0].code == Code.HEAD_SIZE_OVER_768
    assert f"--target {target}" in (declined.blocks[0].hint or "")
    for runtime in ("ort-cpu", None):
        result, report = rewritten(model, target, runtime)
        assert report.blocks[0].op == operator, report.blocks[0].what
        feeds = random_feeds(model)
        assert_same(run(result, feeds)[0], run(model, feeds)[0], 2e-5)
    _, report = rewritten(model, target, "openvino")
    assert report.blocks[0].status == "declined"


def test_ready_made_heads_wider_than_our_kernels_take() -> None:
    body = "y = com.microsoft.MultiHeadAttention<num_heads = 2>(q, k, v)"
    inputs = "float[B,S,2000] q, float[B,T,2000] k, float[B,T,2000] v"
    model = parse(body, inputs=inputs, outputs="float[B,S,2000] y")
    result, report = rewritten(model, "onnx", "ort-cpu")
    assert report.blocks[0].op == "Attention"
    feeds = random_feeds(model)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 2e-5)


def test_an_operator_of_the_target_stays() -> None:
    first, _ = rewritten(attention(PLAIN), "contrib", "ort-cpu")
    second, report = rewritten(first, "contrib", "ort-cpu")
    assert (report.blocks[0].status, report.blocks[0].code) == ("already_fused", Code.ALREADY_FUSED)
    assert [node.op_type for node in second.graph.node] == [node.op_type for node in first.graph.node]


@pytest.mark.parametrize(
    ("target", "runtime"), [("ort", None), ("onnx", "ort-cpu"), ("onnx", "ort-cuda"), ("contrib", "ort-cuda")]
)
def test_casts_around_the_softmax(target: Target, runtime: str | None) -> None:
    """Diffusion models in float16, whose softmax is computed in float32."""
    wide = "w = Cast<to=1>(s) p32 = Softmax<axis=-1>(w) p = Cast<to=10>(p32) "
    model = parse(
        "e = Constant<value=float {0.125}>() eighth = Cast<to=10>(e) qs = Mul(q, eighth) "
        "kt = Transpose<perm=[0,1,3,2]>(k) "
        f"s = MatMul(qs, kt) {wide} {PRODUCT_PV}",
        inputs=SQUARE.replace("float", "float16"),
        outputs="float16[B,4,S,8] y",
    )
    result, report = rewritten(model, target, runtime)
    assert report.blocks[0].status == "fused" and "Softmax" not in [node.op_type for node in result.graph.node]
    feeds = random_feeds(model)
    if runtime != "ort-cuda":
        assert_same(run(result, feeds)[0], run(model, feeds)[0], 2e-3)


@pytest.mark.parametrize(("first", "then"), [("contrib", "onnx"), ("onnx", "contrib")])
def test_one_target_becomes_the_other(first: Target, then: Target) -> None:
    model = attention(PADDED, more="bool[B,1,1,S] m", opset=23)
    between, _ = rewritten(model, first, "ort-cpu", "no-empty-rows")
    result, report = rewritten(between, then, "ort-cpu", "no-empty-rows")
    assert report.blocks[0].status == "fused", report
    feeds = random_feeds(model)
    feeds["m"][..., 0] = True
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)
    if then == "onnx":
        assert_same(ReferenceEvaluator(result).run(None, feeds)[0], run(model, feeds)[0], 1e-5)


@settings(max_examples=examples(25))
@given(SPELLINGS, st.integers(0, 1 << 16), st.sampled_from(["onnx", "contrib"]))
def test_any_spelling_gives_the_same(spelling: Spelling, seed: int, target: Target) -> None:
    case = build(spelling)
    result, report = rewritten(case.model, target, "ort-cpu")
    (block,) = report.blocks
    if block.status != "fused":
        plain = not spelling.masks and spelling.guard == "none" and not spelling.sink
        explained = {Code.CAST, Code.OPSET, Code.RUNTIME} if plain else set(Code)
        assert block.code in explained, block
        return
    feeds = case.feeds(seed)
    _, tolerance = case.formula(feeds)
    assert_same(run(result, feeds)[0], run(case.model, feeds)[0], tolerance)


def test_every_runtime_is_asked() -> None:
    """Whatever a runtime is told to take passes the checker, and gives the same where ONNX Runtime can run it."""
    model = attention(BAND.format("s"))
    taken = set()
    for name in RUNTIMES:
        for target in ("onnx", "contrib"):
            result, report = rewritten(model, target, name)  # type: ignore[arg-type]  # a Literal in a loop
            if report.blocks[0].status == "fused":
                taken.add(name)
                feeds = random_feeds(model)
                assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)
    assert taken == set(RUNTIMES) - {"ort-coreml", "qnn"}  # no kernel; static sizes only
