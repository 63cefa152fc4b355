"""TensorScatter in front of Attention of opset 24: caches written in place, with a length for each batch entry."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from tests.passes.running import Array, assert_same, fused, parse, run

ROOM, PAST = 12, (4, 6)


def model(causal: int, axis: int = 2) -> onnx.ModelProto:
    return parse(
        f"k = TensorScatter<axis={axis}>(past_k, new_k, at) v = TensorScatter<axis={axis}>(past_v, new_v, at) "
        f"y = Attention<is_causal={causal}>(q, k, v, , , , total) ",
        inputs="float[B,4,S,8] q, float[B,2,S,8] new_k, float[B,2,S,8] new_v, float[B,2,M,8] past_k, "
        "float[B,2,M,8] past_v, int64[B] at, int64[B] total",
        outputs="float[B,4,S,8] y, float[B,2,M,8] k, float[B,2,M,8] v",
        opset=24,
        ir_version=11,
    )


def feeds(rows: int) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"q": (4, rows), "new_k": (2, rows), "new_v": (2, rows), "past_k": (2, ROOM), "past_v": (2, ROOM)}
    given: dict[str, Array] = {name: rng.standard_normal((2, *shape, 8), np.float32) for name, shape in shapes.items()}
    return {**given, "at": np.array(PAST), "total": np.array(PAST) + rows}


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("rows", [1, 3])
def test_the_buffers_stay_and_the_attention_is_fused(causal: int, rows: int) -> None:
    """TensorScatter stays; ONNX Runtime's kernel writes the new rows only where past and present share their memory."""
    proto, given = model(causal), feeds(rows)
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["fused"]
    operators = [node.op_type for node in result.graph.node]
    assert operators.count("TensorScatter") == 2 and "Attention" not in operators
    for got, wanted in zip(run(result, given), run(proto, given), strict=True):
        assert_same(got, wanted, 1e-5)


def test_keys_behind_the_length_have_no_part() -> None:
    """Numbers that are there from an earlier use are excluded."""
    result, _ = fused(model(causal=1))
    given = feeds(1)
    wanted = run(result, given)[0]
    for name in ("past_k", "past_v"):
        given[name][:, :, PAST[1] + 1 :] = 1e6
    assert_same(run(result, given)[0], wanted, 1e-6)
