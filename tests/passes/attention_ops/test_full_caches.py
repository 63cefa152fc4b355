"""com.microsoft GroupQueryAttention as exporters call it: every batch entry has all keys, so that the caches grow.

    total = Shape(past_key)[2] + Shape(query)[1]
    seqlens_k = Expand(total - 1, [B])

Nobody has to vouch for anything then, and the bias that an exporter makes of its mask is a band and padding again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from fa_compiler.passes.answer.options import Target
from tests.passes.attention_ops.test_group_cache import HEADS, KEY_HEADS, SCALES, SIZE, TOLERANCE, Case
from tests.passes.running import Array, assert_same, fused, parse, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

LOWEST = float(np.finfo(np.float32).min)


def full(case: Case, past: int) -> Case:
    """The case with so many keys in a past that has no room, the same number in each batch entry.

    ONNX Runtime takes several rows behind a past for one batch entry only.
    """
    total = past + case.rows
    return replace(case, room=past, total=total, lengths=(total - 1,) * (2 if case.rows == 1 else 1))


def model_of(case: Case, behind: int = 1) -> onnx.ModelProto:
    """The node, its lengths computed from the shapes of past and query. With 1 `behind`, they are full."""
    model = case.model()
    graph = model.graph
    for name in ("seqlens", "total"):
        graph.input.remove(next(each for each in graph.input if each.name == name))
    graph.initializer.append(helper.make_tensor("behind", TensorProto.INT32, [1], [behind]))
    made = [
        helper.make_node("Shape", ["past_key"], ["held"], start=2, end=3),
        helper.make_node("Shape", ["q"], ["rows"], start=1, end=2),
        helper.make_node("Shape", ["q"], ["batch"], start=0, end=1),
        helper.make_node("Add", ["held", "rows"], ["sum"]),
        helper.make_node("Cast", ["sum"], ["most"], to=TensorProto.INT32),
        helper.make_node("Squeeze", ["most"], ["total"]),
        helper.make_node("Sub", ["most", "behind"], ["last"]),
        helper.make_node("Expand", ["last", "batch"], ["seqlens"]),
    ]
    nodes = [*made, *graph.node]
    del graph.node[:]
    graph.node.extend(nodes)
    return model


FULL: dict[str, Case] = {
    "plain": Case(),
    "declared": Case(batch=2, length=1),
    "chunk": Case(rows=3),
    "chunk, declared": Case(rows=3, length=3),
    "16 bits": Case(rows=3, dtype="float16"),
    "side by side": Case(packed=True),
    "bidirectional": Case(rows=3, attrs={"causal": 0}),
    "window": Case(rows=3, attrs={"local_window_size": 2}),
    "window of a row of 16 bits": Case(dtype="float16", length=1, attrs={"local_window_size": 2}),
    "cap": Case(rows=3, attrs={"softcap": 0.8}),
    "sink": Case(sink=True),
    "smooth softmax": Case(rows=3, attrs={"smooth_softmax": 1}),
    "rotary": Case(rows=3, rotary=8),
    "rotary, side by side": Case(rotary=8, packed=True),
    "bias": Case(bias="numbers", attrs={"causal": 0}),
    "bias of a chunk": Case(rows=3, length=3, bias="infinite"),
    "bias of a chunk, the lowest number": Case(rows=3, length=3, bias="lowest"),
    "bias of 16 bits": Case(dtype="float16", bias="infinite"),
    "bias and a window": Case(rows=3, length=3, bias="infinite", attrs={"local_window_size": 2}),
    "int8": Case(rows=3, length=3, quantised="PER_CHANNEL"),
    "int8, one row": Case(length=1, quantised="PER_TENSOR"),
}


@pytest.mark.parametrize("past", [0, 1, 4])
@pytest.mark.parametrize("name", FULL)
def test_caches_grow(name: str, past: int) -> None:
    case = full(FULL[name], past)
    model = model_of(case)
    feeds = {name: array for name, array in case.feeds().items() if name not in (*SCALES, "seqlens", "total")}
    result, report = fused(model)
    (block,) = report.blocks
    assert block.status == "fused", (block.code, block.reason)
    assert not block.assumed
    assert {node.op_type for node in result.graph.node if "past_key" in node.input} - {"Shape"} == {"Concat"}
    for index, (got, wanted) in enumerate(zip(run(result, feeds), run(model, feeds), strict=True)):
        assert_same(got, wanted, TOLERANCE[case.dtype] if index == 0 else 0.0)


def test_other_lengths_are_declined() -> None:
    """A batch entry that lacks a key leaves a row of present that depends on the buffers."""
    case = full(Case(rows=3), 4)
    _, report = fused(model_of(case, behind=2))
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert "one buffer" in (block.reason or "")


MASK = """
rows = Shape<start=1, end=2>(q) batch = Shape<start=0, end=1>(q)
most = Add({held}, rows) most32 = Cast<to=6>(most) total = Squeeze(most32) last = Sub(most32, one32)
seqlens = Expand(last, batch)
scalar = Squeeze(most) from = Squeeze({held}) key = Range(zero, scalar, one)
own = Range(from, scalar, one) row = Unsqueeze(own, last_axis)
{kept}
shape = Concat<axis=0>(batch, ones, rows, most) band4 = Unsqueeze(band, front)
own_mask = Gather<axis=1>(attention_mask, key) real = Cast<to=9>(own_mask) padding = Unsqueeze(real, middle)
both = And(band4, padding) kept = Expand(both, shape)
left = Not(kept) number = Cast<to=1>(left) bias = Mul(number, lowest)
"""
CAUSAL = "band = LessOrEqual(key, row)"
WINDOW = "seen = LessOrEqual(key, row) first = Sub(row, three) near = Greater(key, first) band = And(seen, near)"
CONSTANTS = (
    "<int32[1] one32 = {1}, int64 zero = {0}, int64 one = {1}, int64[1] ones = {1}, int64[1] last_axis = {1}, "
    f"int64[2] front = {{0, 1}}, int64[2] middle = {{1, 2}}, int64 three = {{3}}, float lowest = {{{LOWEST!r}}}, "
    "int64[1] none = {0}>"
)
WIDTH, KEY_WIDTH = HEADS * SIZE, KEY_HEADS * SIZE
PAST = ("key", "value")


def exported(kept: str, past: bool, attrs: str = "", rows: int | str = "S") -> onnx.ModelProto:
    """A call beside the bias that an exporter makes of its mask, and the guard that zeroes rows without a key."""
    caches = "past_key, past_value" if past else ","
    call = f"GroupQueryAttention<num_heads={HEADS}, kv_num_heads={KEY_HEADS}{attrs}>"
    inputs = f"float[B,{rows},{WIDTH}] q, float[B,{rows},{KEY_WIDTH}] k, float[B,{rows},{KEY_WIDTH}] v, "
    held = ""
    if past:
        inputs += "".join(f"float[B,{KEY_HEADS},P,{SIZE}] past_{name}, " for name in PAST)
        held = "held = Shape<start=2, end=3>(past_key)"
    return parse(
        held
        + MASK.format(kept=kept, held="held" if past else "none")
        + f"y, present_key, present_value = com.microsoft.{call}(q, k, v, {caches}, seqlens, total, , , , bias)",
        inputs=f"{inputs}int64[B,M] attention_mask",
        outputs="float[B,S,W] y, float[B,N,T,D] present_key, float[B,N,T,D] present_value",
        initializers=CONSTANTS,
    )


def feeds_for(mask: Sequence[Sequence[int]], past: int | None) -> dict[str, Array]:
    rng, given = np.random.default_rng(0), np.array(mask, np.int64)
    batch, keys = given.shape
    rows = keys - (past or 0)
    shapes: dict[str, tuple[int, ...]] = {"q": (batch, rows, WIDTH)}
    shapes |= dict.fromkeys(("k", "v"), (batch, rows, KEY_WIDTH))
    if past is not None:
        shapes |= {f"past_{name}": (batch, KEY_HEADS, past, SIZE) for name in PAST}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} | {
        "attention_mask": given
    }


BEHIND: Mapping[str, tuple[int, Sequence[Sequence[int]]]] = {
    "left padding": (3, [[1, 1, 1, 1], [0, 0, 1, 1]]),
    "a chunk": (2, [[0, 1, 1, 0, 1, 1]]),
    "a chunk without a key": (2, [[0, 0, 0, 0, 0]]),
    "a row without a key": (3, [[1, 1, 1, 1], [0, 0, 0, 0]]),
    "one key": (0, [[1], [1]]),
    "one key, which is masked": (0, [[1], [0]]),
    "two keys, which are masked": (1, [[1, 1], [0, 0]]),
}


@pytest.mark.parametrize("runs", BEHIND)
@pytest.mark.parametrize(("kept", "mask"), [(CAUSAL, "causal+atten_mask"), (WINDOW, "band+atten_mask")])
def test_a_mask_behind_a_past(kept: str, mask: str, runs: str) -> None:
    check(exported(kept, past=True), mask, feeds_for(BEHIND[runs][1], BEHIND[runs][0]))


PROMPTS: Mapping[str, Sequence[Sequence[int]]] = {
    "left padding": [[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]],
    "right padding": [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]],
    "no key": [[0, 0, 0, 0, 0], [1, 1, 1, 1, 1]],
    "one key": [[1], [1]],
    "one key, which is masked": [[1], [0]],
}


@pytest.mark.parametrize("runs", PROMPTS)
@pytest.mark.parametrize(
    ("kept", "attrs", "mask"),
    [
        (CAUSAL, "", "causal+atten_mask"),
        (WINDOW, "", "band+atten_mask"),
        (CAUSAL, ", local_window_size=2", "band+atten_mask"),
        (WINDOW, ", local_window_size=3", "band+atten_mask"),
        (WINDOW, ", local_window_size=2", "band+atten_mask"),
    ],
)
def test_a_mask_of_a_prompt(kept: str, attrs: str, mask: str, runs: str) -> None:
    check(exported(kept, past=False, attrs=attrs), mask, feeds_for(PROMPTS[runs], None))


def test_a_row_behind_a_past_sees_all() -> None:
    """Of a single row the band is nothing: padding alone is left."""
    model = exported(CAUSAL, past=True, rows=1)
    check(model, "atten_mask", feeds_for([[1, 1, 1], [0, 0, 1]], 2))


@pytest.mark.parametrize(("target", "mask"), [("ort", "band+atten_mask"), ("ascend", "atten_mask")])
def test_a_band_beside_lengths(target: Target, mask: str) -> None:
    """On Ascend the mask of a sparse_mode is a triangle of a fixed size, so that no other mask stands beside it."""
    model = exported(WINDOW, past=False)
    place = next(place for place, node in enumerate(model.graph.node) if node.output[0] == "padding")
    model.graph.node[place].CopyFrom(helper.make_node("ConstantOfShape", ["ones"], ["all"]))
    model.graph.node.insert(place + 1, helper.make_node("Equal", ["all", "all"], ["padding"]))
    model.graph.input.append(helper.make_tensor_value_info("lengths", TensorProto.INT32, ["B"]))
    call = model.graph.node[-1]
    call.input[list(call.input).index("seqlens")] = "lengths"
    feeds = feeds_for([[1, 1, 1, 1, 1], [1, 1, 1, 1, 1]], None) | {"lengths": np.array([4, 2], np.int32)}
    result, report = fused(model, target)
    assert report.blocks[0].mask == mask
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


def check(model: onnx.ModelProto, mask: str, feeds: Mapping[str, Array]) -> None:
    """The fused model has this mask, needs no word of the user, and gives what the original gives."""
    result, report = fused(model)
    (block,) = report.blocks
    assert block.status == "fused", (block.code, block.reason)
    assert (block.mask, block.assumed) == (mask, ())
    for index, (got, wanted) in enumerate(zip(run(result, feeds), run(model, feeds), strict=True)):
        assert_same(got, wanted, 1e-5 if index == 0 else 0.0)
