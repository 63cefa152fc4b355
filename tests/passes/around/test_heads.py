"""Parts of one tensor that are cut into heads, where something was fused."""

from __future__ import annotations

import onnx
import pytest

from tests.passes.around.running import assert_equal, fused, others, parse

NORM = "p = Mul(x, x) m = ReduceMean<keepdims=1>(p, last) g1 = Add(m, e) h = Sqrt(g1) n0 = Div(x, h) n = Mul(n0, w) "
NUMBERS = "int64[1] last = {-1}, int64[1] zero = {0}, int64[1] two = {2}, int64[1] four = {4}, int64[1] end = {1000}"
NUMBERS += ", int64[3] sizes = {2,2,4}, int64[4] pairs = {0,0,-1,2}, int64[4] whole = {0,0,1,-1}"
SPLIT = "a0, b0, c0 = Split<axis=-1>(t, sizes) "
SLICES = "c0 = Slice(t, four, end, last) a0 = Slice(t, zero, two, last) b0 = Slice(t, two, four, last) "
HEADS = "a = Reshape(a0, pairs) b = Reshape(b0, pairs) c = Reshape(c0, pairs) "
END = "y0 = Neg(a) y1 = Neg(b) y2 = Neg(c)"
OUTS = "float[B,S,K,D] y0, float[B,S,L,E] y1, float[B,S,M,F] y2"


def model(body: str, outputs: str = OUTS) -> onnx.ModelProto:
    return parse(NORM + "t = Neg(n) " + body, "float[B,S,8] x", outputs, 20, NUMBERS)


@pytest.mark.parametrize("cut", [SPLIT, SLICES], ids=["2", "3"])
def test_parts_in_heads(cut: str) -> None:
    proto = model(cut + HEADS + END)
    result, _ = fused(proto)
    assert [op for op in others(result) if op != "Neg"] == ["Reshape", "Split"]
    assert_equal(proto, result)


APART = {
    "heads of other sizes": SPLIT + HEADS.replace("c0, pairs", "c0, whole") + END,
    "a part without heads": SPLIT + HEADS.replace("c = Reshape(c0, pairs)", "c = Unsqueeze(c0, last)") + END,
    "the tensor is read elsewhere": SPLIT + HEADS + END + " y3 = Neg(t)",
    "the tensor is read elsewhere than by slices": SLICES + HEADS + END + " y3 = Abs(t)",
    "a part is read elsewhere": SPLIT + HEADS + END + " y3 = Neg(a0)",
    "slices that are not all of it": SLICES.replace("Slice(t, four, end", "Slice(t, two, end") + HEADS + END,
}


@pytest.mark.parametrize("miss", APART)
def test_what_stays(miss: str) -> None:
    more = ", float[B,S,Z] y3" if "y3" in APART[miss] else ""
    proto = model(APART[miss], OUTS + more)
    result, _ = fused(proto)
    assert others(result).count("Reshape") == others(proto).count("Reshape")
    assert_equal(proto, result)
