"""A note where a layer with a window looks its padding mask up at the first tokens, as files of transformers 5 do.

The same graph serves a cache of all tokens and one of the last ones, so the runs show what the note says.
"""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.passes.running import ORIGINAL_OFF, Array, fused, parse, run

TOKENS = 11
WINDOW = 4
BODY = """
    zero = Constant<value=int64 {{0}}>() one = Constant<value=int64 {{1}}>() window = Constant<value=int64 {{4}}>()
    front = Constant<value=int64[3] {{0, 1, 2}}>() behind = Constant<value=int64[3] {{1, 2, 3}}>()
    middle = Constant<value=int64[2] {{1, 2}}>() last = Constant<value=int64[1] {{-1}}>()
    first = Constant<value=int64[1] {{0}}>() axis = Constant<value=int64[1] {{1}}>()
    none = Constant<value=float {{0.0}}>() low = Constant<value=float {{-inf}}>()
    keys = Concat<axis=2>(past_k, k) values = Concat<axis=2>(past_v, v)
    before = Shape<start=2, end=3>(past_k) count = Add(before, one) total = Squeeze(count)
    places = Range(zero, total, one) j = Unsqueeze(places, front) i = Unsqueeze(before, front)
    least = Sub(i, window) near = Greater(j, least) causal = LessOrEqual(j, i) band = And(near, causal)
    t = Transpose<perm=[0, 1, 3, 2]>(keys) s0 = MatMul(q, t) given = Cast<to=9>(mask) {}
    f = Where(kept, none, low) s = Add(s0, f) p = Softmax<axis=-1>(s) y = MatMul(p, values)
"""
BY_GATHER = "g = Gather<axis=1>(given, places) padding = Unsqueeze(g, middle) "
BY_SLICE = "g = Slice(given, first, count, axis) padding = Unsqueeze(g, middle) "
BY_GATHER_ND = """
    b0 = Shape<start=0, end=1>(past_k) b1 = Squeeze(b0) b2 = Range(zero, b1, one) b3 = Unsqueeze(b2, behind)
    all = Max(b3, j) grid = Shape(all) b4 = Expand(b3, grid) b5 = Unsqueeze(b4, last) j4 = Expand(j, grid)
    j5 = Unsqueeze(j4, last) points = Concat<axis=-1>(b5, j5) padding = GatherND(given, points)
"""
AT_THE_END = """
    tokens = Shape<start=1, end=2>(mask) start = Sub(tokens, count) g = Slice(given, start, tokens, axis)
    padding = Unsqueeze(g, middle)
"""
IN_WINDOW = "kept = And(band, padding)"
PADDING_FIRST = "c1 = And(padding, causal) kept = And(c1, near)"
WITHOUT_WINDOW = "kept = And(causal, padding)"
BOTH = (
    IN_WINDOW
    + """
    kept1 = And(causal, padding) f1 = Where(kept1, none, low) s1 = Add(s0, f1) p1 = Softmax<axis=-1>(s1)
    y1 = MatMul(p1, values)
"""
)


def model(conditions: str, past: int | str = "P", tokens: int | str = "M", outputs: str = "") -> onnx.ModelProto:
    new = "float[B,4,1,8] q, float[B,4,1,8] k, float[B,4,1,8] v"
    caches = f"float[B,4,{past},8] past_k, float[B,4,{past},8] past_v"
    body = BODY.format(conditions)
    inputs = f"{new}, {caches}, int64[B,{tokens}] mask"
    return parse(body, inputs=inputs, outputs="float[B,4,1,8] y" + outputs)


def notes(proto: onnx.ModelProto) -> list[str]:
    _, report = fused(proto)
    return [note for note in report.notes if "is read at its first" in note]


@pytest.mark.parametrize("padding", [BY_GATHER, BY_GATHER_ND], ids=["Gather", "GatherND"])
@pytest.mark.parametrize("order", [IN_WINDOW, PADDING_FIRST], ids=["window first", "padding first"])
def test_first_positions_beside_a_window(padding: str, order: str) -> None:
    (note,) = notes(model(padding + order))
    assert "'mask' is read at its first P + 1 of M positions" in note
    assert "the cache 'past_k'" in note
    assert "caches of all tokens" in note


@pytest.mark.parametrize("padding", [BY_GATHER, BY_SLICE, BY_GATHER_ND], ids=["Gather", "Slice", "GatherND"])
@pytest.mark.parametrize("conditions", [IN_WINDOW, WITHOUT_WINDOW], ids=["window", "none"])
def test_fewer_keys_than_tokens_in_every_run(padding: str, conditions: str) -> None:
    """In a file of fixed sizes the window is folded away."""
    (note,) = notes(model(padding + conditions, WINDOW - 1, TOKENS))
    assert "'mask' is read at its first 4 of 11 positions" in note
    assert "last positions first" in note


SILENT = {
    "no window": model(BY_GATHER + WITHOUT_WINDOW),
    "last positions": model(AT_THE_END + IN_WINDOW),
    "last positions of fixed sizes": model(AT_THE_END + IN_WINDOW, WINDOW - 1, TOKENS),
    "as many tokens as keys": model(BY_GATHER_ND + IN_WINDOW, TOKENS - 1, TOKENS),
    "a layer without a window reads as many keys": model(BY_GATHER_ND + BOTH, outputs=", float[B,4,1,8] y1"),
    "no padding": model("kept = Identity(band)"),
    "a mask that excludes": model(BY_GATHER + "kept0 = Not(padding) kept = And(band, kept0)"),
}


@pytest.mark.parametrize("name", SILENT)
def test_no_note(name: str) -> None:
    assert notes(SILENT[name]) == []


def outputs_of(past: int, mask: Array) -> Array:
    """The result where the cache holds so many of 10 random tokens, the last ones."""
    rng = np.random.default_rng(3)
    q, k, v = (rng.standard_normal((2, 4, 1, 8)).astype(np.float32) for _ in range(3))
    keys, values = (rng.standard_normal((2, 4, TOKENS - 1, 8)).astype(np.float32)[:, :, -past:] for _ in range(2))
    feeds = {"q": q, "k": k, "v": v, "past_k": keys, "past_v": values, "mask": mask}
    original = model(BY_GATHER_ND + IN_WINDOW)
    (expected,) = run(original, feeds, ORIGINAL_OFF)
    (result,) = run(fused(original)[0], feeds)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    return expected


def test_what_the_note_says_of_the_numbers() -> None:
    mask = np.ones((2, TOKENS), np.int64)
    mask[1, :3] = 0
    whole, rolling = outputs_of(TOKENS - 1, mask), outputs_of(WINDOW - 1, mask)
    np.testing.assert_allclose(rolling[0], whole[0], rtol=1e-5, atol=1e-6)
    assert np.abs(rolling[1] - whole[1]).max() > 0.1
    np.testing.assert_allclose(outputs_of(WINDOW - 1, np.roll(mask, WINDOW, 1)), whole, rtol=1e-5, atol=1e-6)
