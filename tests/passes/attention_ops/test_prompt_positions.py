"""A note where GroupQueryAttention is given positions that it does not read: prompts of transformers 5's rewrites."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.passes.running import ORIGINAL_OFF, Array, fused, parse, run

CONSTANTS = """<int64 zero = {0}, int64 one = {1}, int64[1] front = {0}, int64[2] column = {-1, 1},
    float[8] frequencies = {1.0, 0.6, 0.3, 0.2, 0.1, 0.06, 0.03, 0.02}>"""
SIZES = "sizes = Shape(position_ids) rows0 = Shape<start=1, end=2>(position_ids) rows = Squeeze(rows0) "
LENGTHS = """
    most = Cast<to=6>(rows0) total = Squeeze(most) one32 = Cast<to=6>(one) last = Sub(most, one32)
    batch = Shape<start=0, end=1>(q) seqlens = Expand(last, batch)
"""
ANGLES = """
    tokens0 = Cast<to=1>({}) tokens = Reshape(tokens0, column) angles = Mul(tokens, frequencies) cos = Cos(angles)
    sin = Sin(angles)
"""
NUMBERED = "all0 = ReduceProd<keepdims=0>(sizes) all = Range(zero, all0, one) positions = Reshape(all, sizes) "
COUNTED = "counted = Range(zero, rows, one) row = Unsqueeze(counted, front) positions = Expand(row, sizes) "
OF_TOKENS = ANGLES.format("position_ids")
OF_POSITIONS = "most1 = ReduceMax<keepdims=0>(sizes) up = Range(zero, most1, one) " + ANGLES.format("up")
GIVEN = "positions = Identity(position_ids) "


def model(
    positions: str,
    past: bool = False,
    attrs: str = ", do_rotary=1",
    operands: str = "cos, sin, positions",
    batch: str = "B",
) -> onnx.ModelProto:
    """Four query heads of size 16 and two key heads."""
    inputs = f"float[{batch},S,64] q, float[{batch},S,32] k, float[{batch},S,32] v, int64[{batch},S] position_ids"
    if past:
        inputs += f", float[{batch},2,P,16] past_k, float[{batch},2,P,16] past_v"
    call = f"GroupQueryAttention<num_heads=4, kv_num_heads=2{attrs}>"
    caches = "past_k, past_v" if past else ","
    given = f"q, k, v, {caches}, seqlens, total, {operands}"
    return parse(
        f"{SIZES}{LENGTHS}{positions}y, keys, values = com.microsoft.{call}({given})",
        inputs=inputs,
        outputs="float[B,S,W] y, float[B,2,T,16] keys, float[B,2,T,16] values",
        initializers=CONSTANTS,
    )


def notes(proto: onnx.ModelProto) -> list[str]:
    _, report = fused(proto)
    return [note for note in report.notes if "reads only the first number" in note]


NOTED = {
    "a number for each token of the batch": model(NUMBERED + OF_TOKENS),
    "the model's own": model(GIVEN + OF_POSITIONS),
    "the model's own, of one entry": model(GIVEN + OF_POSITIONS, batch="1"),
}


@pytest.mark.parametrize("name", NOTED)
def test_positions_that_are_not_read(name: str) -> None:
    (note,) = notes(NOTED[name])
    assert "Where 'position_ids' differs" in note


SILENT = {
    "the same for all entries": model(COUNTED + OF_POSITIONS),
    "one entry": model(NUMBERED + OF_TOKENS, batch="1"),
    "no positions": model(OF_POSITIONS, operands="cos, sin"),
    "a past": model(NUMBERED + OF_TOKENS, past=True),
    "nothing is turned": model(NUMBERED + OF_TOKENS, attrs=""),
}


@pytest.mark.parametrize("name", SILENT)
def test_no_note(name: str) -> None:
    assert notes(SILENT[name]) == []


def keys_of(proto: onnx.ModelProto, positions: Array) -> Array:
    rng = np.random.default_rng(1)
    feeds = {name: rng.standard_normal((2, 3, width)).astype(np.float32) for name, width in (("q", 64), ("k", 32))}
    feeds |= {"v": feeds["k"], "position_ids": positions}
    expected = run(proto, feeds, ORIGINAL_OFF)
    for one, other in zip(run(fused(proto)[0], feeds), expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    return expected[1]


@pytest.mark.parametrize("name", list(NOTED)[:2])
def test_what_the_note_says_of_the_numbers(name: str) -> None:
    """The second entry is turned by the positions of the first one."""
    alike = keys_of(NOTED[name], np.array([[0, 1, 2], [0, 1, 2]]))
    padded = keys_of(NOTED[name], np.array([[0, 1, 2], [0, 0, 1]]))
    np.testing.assert_array_equal(padded, alike)
