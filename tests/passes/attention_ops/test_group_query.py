"""com.microsoft GroupQueryAttention gives what ONNX Runtime gives, or is left with a true reason."""

from __future__ import annotations

import math
from typing import Any

import hypothesis.strategies as st
import numpy as np
import onnx.parser
import pytest
from hypothesis import given, settings

from fa_compiler.passes.answer.options import Target
from tests.examples import examples
from tests.passes.operators import Operator, check_same, check_shapes, declined
from tests.passes.running import Array, fused

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

LOWEST = float(np.finfo(np.float32).min)
NAMES = (
    *("q", "k", "v", "past_key", "past_value", "seqlens", "total", "cos", "sin", "positions", "addend", "sink"),
    *("k_scale", "v_scale", "q_norm", "k_norm", "query_seqlens"),
)
ATTRS = (
    *("num_heads", "kv_num_heads", "scale", "softcap", "do_rotary", "smooth_softmax", "local_window_size", "causal"),
    *("qk_output", "sliding_window_cache"),
)
PACKED: dict[str, Any] = {"q": "B S 64", "k": None, "v": None}
EVERYTHING = ("y", "present_key", "present_value")


def prompt(dtype: str = "float32", fixed: bool = False, rows: int = 4, **given: Any) -> Operator:
    """Four query heads of size 8 and two key heads; the second batch is shorter."""
    attrs = {name: given.pop(name) for name in ATTRS if name in given}
    outputs = given.pop("outputs", ("y",))
    default = {
        "q": "B S 32",
        "k": "B S 16",
        "v": "B S 16",
        "seqlens": ("B", np.array([rows - 1, rows - 2], np.int32)),
        "total": ("", np.array(rows, np.int32)),
    }
    inputs = {name: {**default, **given}.get(name) for name in NAMES}
    while inputs[list(inputs)[-1]] is None:
        del inputs[list(inputs)[-1]]
    attrs = {"num_heads": 4, "kv_num_heads": 2, **attrs}
    ranks = {"present_key": 4, "present_value": 4, "qk": 4}
    domain, op_type = "com.microsoft", "GroupQueryAttention"
    return Operator(op_type, inputs, outputs, attrs, domain, 17, {"S": rows}, dtype, (), fixed=fixed, ranks=ranks)


def addend(*shape: int, excluded: float | None = None) -> Array:
    """A bias; in the third row every element that counts is this number."""
    numbers = np.random.default_rng(6).standard_normal(shape).astype(np.float32)
    if excluded is not None:
        numbers[..., 2, :] = excluded
        numbers[..., 3, 1] = excluded
    return numbers


SINK = ("4", np.array([1.0, -1.0, 0.5, 3.0], np.float32))
TAKEN: dict[str, tuple[dict[str, Any], str]] = {
    "plain": ({}, "causal+atten_mask"),
    "presents": ({"outputs": EVERYTHING}, "causal+atten_mask"),
    "fixed": ({"fixed": True, "outputs": EVERYTHING}, "causal+atten_mask"),
    "side by side": ({**PACKED, "outputs": EVERYTHING}, "causal+atten_mask"),
    "16 bits": ({"dtype": "float16", "outputs": EVERYTHING}, "causal+atten_mask"),
    "one row": ({"rows": 1, "seqlens": ("B", np.zeros(2, np.int32))}, "causal+atten_mask"),
    "short batches": ({"rows": 6, "seqlens": ("B", np.array([0, 2], np.int32))}, "causal+atten_mask"),
    "scale": ({"scale": 0.3}, "causal+atten_mask"),
    "negative scale": ({"scale": -0.3}, "causal+atten_mask"),
    "softcap": ({"softcap": 0.7, "outputs": EVERYTHING}, "causal+atten_mask"),
    # With a cap ONNX Runtime does not run its streaming kernel: -inf is added like any other number.
    "softcap, addend of the lowest": (
        {"softcap": 2.0, "addend": ("1 1 S S", addend(1, 1, 4, 4, excluded=LOWEST)), "outputs": EVERYTHING},
        "causal+atten_mask+real_shift",
    ),
    "softcap, addend of -inf": (
        {"softcap": 2.0, "addend": ("1 1 S S", addend(1, 1, 4, 4, excluded=-math.inf)), "outputs": EVERYTHING},
        "causal+atten_mask+real_shift",
    ),
    "softcap, sink": ({"softcap": 2.0, "sink": SINK}, "causal+atten_mask"),
    "bidirectional": ({"causal": 0}, "atten_mask"),
    "window": ({"local_window_size": 2, "rows": 6, "outputs": EVERYTHING}, "band+atten_mask"),
    "window of one": ({"local_window_size": 1, "outputs": EVERYTHING}, "band+atten_mask"),
    "window that empties rows": (
        {"local_window_size": 2, "rows": 6, "seqlens": ("B", np.array([1, 2], np.int32)), "outputs": EVERYTHING},
        "band+atten_mask",
    ),
    "wide window": ({"local_window_size": 99, "outputs": EVERYTHING}, "band+atten_mask"),
    "sink": ({"sink": SINK}, "causal+atten_mask"),
    "sink and smooth softmax": ({"sink": SINK, "smooth_softmax": 1}, "causal+atten_mask"),
    "smooth softmax": ({"smooth_softmax": 1}, "causal+atten_mask"),
    **{
        f"addend{what}, {len(outputs)} outputs": (
            {"addend": (words, content), "outputs": outputs, "fixed": True},
            "atten_mask+real_shift" if len(outputs) > 1 else "causal+atten_mask+real_shift",
        )
        for outputs in (("y",), EVERYTHING)
        for what, words, content in (
            ("", "1 1 S S", addend(1, 1, 4, 4)),
            (" of heads", "1 4 S S", addend(1, 4, 4, 4)),
            (" of batches", "B 4 S S", addend(2, 4, 4, 4)),
            (" of -inf", "1 1 S S", addend(1, 1, 4, 4, excluded=-math.inf)),
            (" of the lowest", "1 1 S S", addend(1, 1, 4, 4, excluded=LOWEST)),
            (" of -1e4", "1 1 S S", addend(1, 1, 4, 4, excluded=-1e4)),
        )
    },
    "addend, sink": (
        {"addend": ("1 1 S S", addend(1, 1, 4, 4, excluded=-math.inf)), "sink": SINK, "outputs": EVERYTHING},
        "causal+atten_mask+real_shift",
    ),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str) -> None:
    features, mask = TAKEN[name]
    check_same(prompt(**features), mask, tolerance=1e-3 if "-1e4" in name else None)


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "past": ({"past_key": "B 2 P 8", "past_value": "B 2 P 8", "outputs": EVERYTHING}, "ready_made", "one buffer"),
    "a negative softcap": ({"softcap": -2.0}, "softcap", "negative"),
    "a softcap that is no number": ({"softcap": math.nan}, "softcap", "not a number"),
    "an infinite softcap": ({"softcap": math.inf}, "softcap", "overflows"),
    "scores": ({"qk_output": 1, "outputs": (*EVERYTHING, "qk")}, "scores_are_output", "scores"),
    "probabilities": ({"qk_output": 2, "outputs": (*EVERYTHING, "qk")}, "probabilities_are_output", "probabilities"),
    "masked rows of unknown number": (
        {"addend": ("1 1 S S", addend(1, 1, 4, 4)), "outputs": EVERYTHING},
        "empty_rows",
        "has one key",
    ),
    "window without presents": ({"local_window_size": 2}, "ready_made", "padding behind a prompt"),
    "window and sink": (
        {"local_window_size": 2, "sink": SINK, "outputs": EVERYTHING},
        "ready_made",
        "padding behind a prompt",
    ),
    "empty window": ({"local_window_size": 0}, "ready_made", "window of no keys"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    features, code, words = REFUSED[name]
    got, reason = declined(prompt(**features))
    assert got == code
    assert words in reason


@pytest.mark.parametrize(("target", "in_place"), [("ort", False), ("ort", True), ("onnx", False), ("ascend", False)])
def test_rows_that_do_not_count(target: Target, in_place: bool) -> None:
    """query_seqlens keeps the rows behind it out of the caches: the operator stays, whatever is vouched for."""
    past = dict.fromkeys(("past_key", "past_value"), "B 2 P 8")
    features = {**past, "outputs": EVERYTHING, "total": ("", np.array(7, np.int32))}
    operator = prompt(query_seqlens=("B", np.array([4, 0], np.int32)), **features)
    feeds = operator.feeds()
    result, report = fused(operator.model(feeds), target, ["separate-caches", "decode"], in_place)
    (block,) = report.blocks
    assert block.code == "ready_made"
    assert "query_seqlens" in (block.reason or "")
    assert [node.op_type for node in result.graph.node] == ["GroupQueryAttention"]


@settings(max_examples=examples(20))
@given(data=st.data())
def test_random(data: st.DataObject) -> None:
    """All features together."""
    draw = data.draw
    rows = draw(st.integers(1, 7))
    causal, outputs = draw(st.booleans()), draw(st.sampled_from([("y",), EVERYTHING]))
    features: dict[str, Any] = {
        "rows": rows,
        "seqlens": ("B", np.array([draw(st.integers(0, rows - 1)) for _ in range(2)], np.int32)),
        "causal": int(causal),
        "outputs": outputs,
        **(
            {"local_window_size": draw(st.integers(1, 8))}
            if causal and rows > 1 and len(outputs) > 1 and draw(st.booleans())
            else {}
        ),
        **(PACKED if draw(st.booleans()) else {}),
        **({"scale": 0.7} if draw(st.booleans()) else {}),
    }
    if "local_window_size" not in features:
        features |= {"sink": SINK} if draw(st.booleans()) else {}
        features |= {"smooth_softmax": 1} if draw(st.booleans()) else {}
    if draw(st.booleans()):
        shape = (draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 4])), rows, rows)
        numbers = np.random.default_rng(draw(st.integers(0, 99))).standard_normal(shape).astype(np.float32)
        numbers[numbers > 0.5] = draw(st.sampled_from([-math.inf, LOWEST, -1e30, 2.0]))
        features["addend"] = (f"{shape[0]} {shape[1]} S S", numbers)
    fixed = "addend" in features or draw(st.booleans())
    check_same(prompt(fixed=fixed, **features), seed=draw(st.integers(0, 9)), tolerance=1e-4)


@pytest.mark.parametrize("name", ["plain", "presents", "side by side", "16 bits"])
def test_shapes(name: str) -> None:
    check_shapes(prompt(**TAKEN[name][0]))


@pytest.mark.parametrize(
    ("types", "words"),
    [
        (
            "float16[B,1,32] q, float16[B,1,16] k, float16[B,1,16] v, float[B,2,P,8] pk, float[B,2,P,8] pv",
            "different types",
        ),
        ("float[0,1,32] q, float[0,1,16] k, float[0,1,16] v, float[0,2,P,8] pk, float[0,2,P,8] pv", "no elements"),
    ],
)
def test_caches_of_another_type_and_no_batch(types: str, words: str) -> None:
    """ONNX Runtime takes both: it reads the bytes of caches as the query's type, and has nothing to compute."""
    model = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g ({types}, int32[B] lengths, int32 total) => (float16[U,V,W] y, float16[U,2,R,8] nk, float16[U,2,R,8] nv)
        {{ y, nk, nv = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, k, v, pk, pv, lengths, total)
        }}"""
    )
    for output in model.graph.output:
        output.type.tensor_type.elem_type = model.graph.input[0].type.tensor_type.elem_type
    result, report = fused(model, "ort", ["separate-caches", "decode"])
    assert [(block.code, words in (block.reason or "")) for block in report.blocks] == [("ready_made", True)]
    assert [node.op_type for node in result.graph.node] == ["GroupQueryAttention"]


def test_a_past_without_presents() -> None:
    """Without room for the caches ONNX Runtime reads other memory in place of the past."""
    model = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]>
        g (float[B,1,32] q, float[B,1,16] k, float[B,1,16] v, float[B,2,P,8] pk, float[B,2,P,8] pv, int32[B] lengths,
           int32 total) => (float[B,1,32] y)
        { y = com.microsoft.GroupQueryAttention<num_heads=4, kv_num_heads=2>(q, k, v, pk, pv, lengths, total) }"""
    )
    _, report = fused(model, "ort", ["separate-caches", "decode"])
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert "reads other memory" in (block.reason or "")
