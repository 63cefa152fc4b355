"""Scores that are the sum of two products, as of query and key with a part for positions: the second product becomes
query_rope and key_rope, so that no tensor of rows times keys is left; where it cannot, it is a bias as any other."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import pytest

from tests.pairs import pairwise
from tests.passes.running import assert_same, fused, parse, random_feeds, run

HEADS_FIRST = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v"
NUMBERS = (
    "half = Constant<value=float {0.5}>() third = Constant<value=float {0.3}>() low = Constant<value=float {-inf}>() "
    "last = Constant<value=int64[1] {-1}>() zero = Constant<value=float {0.0}>() "
    "least = Constant<value=float {-3.4028234663852886e38}>() "
)
MORE = "float[B,4,S,{d}] qr, float[B,{n},T,{d}] kr, bool[B,1,1,T] m, float[S] f, float[B,4,S,T] bias"


@dataclass(frozen=True)
class Spelling:
    """How two products make the scores. `width` and `heads` are those of the second."""

    order: str = "x = Add(s, r) "
    scale: str = "z = Mul(x, half) "
    second: str = "r = MatMul(qr, krt) "
    mask: str = "masked = Where(m, low, z) "
    width: int = 4
    heads: int = 4

    @property
    def model(self) -> onnx.ModelProto:
        body = (
            NUMBERS + "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) krt = Transpose<perm=[0,1,3,2]>(kr) "
            f"{self.second} {self.order} {self.scale} {self.mask} p = Softmax<axis=-1>(masked) y = MatMul(p, v) "
        )
        more = MORE.format(d=self.width, n=self.heads)
        return parse(body, more, inputs=HEADS_FIRST, opset=18)


CASES = pairwise(
    ["x = Add(s, r) ", "x = Add(r, s) ", "x = Sub(s, r) ", "x = Sub(r, s) ", "x = Sum(r, s) "],
    ["z = Mul(x, half) ", "z = Identity(x) ", "z = Div(x, third) ", "z = Neg(x) "],
    [
        "r = MatMul(qr, krt) ",
        "r0 = MatMul(qr, krt) r = Mul(r0, third) ",
        "r1 = MatMul(qr, krt) r = Neg(r1) ",
        "qs = Mul(qr, third) r = MatMul(qs, krt) ",
    ],
    [
        "masked = Where(m, low, z) ",
        "masked = Where(m, least, z) ",
        "masked = Identity(z) ",
        "b = Where(m, low, zero) masked = Add(z, b) ",
        "b = Where(m, least, zero) masked = Add(b, z) ",
        "b = Where(m, low, bias) masked = Add(b, z) ",
    ],
    [1, 4, 24],
    [1, 4],
)
"""Order, scale, second product, mask, width and heads."""


def check(model: onnx.ModelProto, seed: int = 0) -> onnx.NodeProto:
    """The fused node, after comparing the results, rows without a key included."""
    result, report = fused(model)
    feeds = random_feeds(model, seed, m=np.array([True, False])[:, None, None, None] | np.zeros((2, 1, 1, 6), bool))
    feeds["m"][1, 0, 0, seed % 6] = True
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 2e-5)
    assert [block.status for block in report.blocks] == ["fused"]
    return next(node for node in result.graph.node if node.domain == "ascend")


def second(node: onnx.NodeProto) -> bool:
    """Are query_rope and key_rope there, and no bias in place of them?"""
    return len(node.input) > 16 and bool(node.input[15]) and bool(node.input[16])


@pytest.mark.parametrize("number", range(len(CASES)))
def test_a_second_product_in_any_spelling(number: int) -> None:
    assert second(check(Spelling(*CASES[number]).model, number))


BIASES = {
    "a_bias_before_it": Spelling(order="t = Tanh(bias) sb = Add(s, t) x = Add(sb, r) "),
    "something_done_to_it": Spelling(second="r2 = MatMul(qr, krt) r = Relu(r2) "),
    "keys_of_one_row": Spelling(second="r2 = MatMul(qr, krt) r = ReduceMax(r2, last) "),
    "a_much_larger_scale": Spelling(second="e = Constant<value=float {2000.0}>() r2 = MatMul(qr, krt) r = Mul(r2, e) "),
    "a_much_smaller_scale": Spelling(
        second="e = Constant<value=float {0.0005}>() r2 = MatMul(qr, krt) r = Mul(r2, e) "
    ),
}


@pytest.mark.parametrize("name", BIASES)
def test_what_stays_a_bias(name: str) -> None:
    assert not second(check(BIASES[name].model))


@pytest.mark.parametrize("large", ["q", "qr"])
@pytest.mark.parametrize("width", [4, 24])
def test_no_query_overflows_in_float16(large: str, width: int) -> None:
    """Scales 8 times apart, and numbers beyond an eighth of what float16 holds in the query of the larger scale: the
    other one is multiplied by 1/8, also where it is the wider one."""
    scaled = "r8 = Mul(r, eight) x = Add(s, r8)" if large == "qr" else "s8 = Mul(s, eight) x = Add(s8, r)"
    body = (
        "e = Constant<value=float {8.0}>() eight = Cast<to=10>(e) kt = Transpose<perm=[0,1,3,2]>(k) "
        "krt = Transpose<perm=[0,1,3,2]>(kr) s = MatMul(q, kt) r = MatMul(qr, krt) "
        f"{scaled} p = Softmax<axis=-1>(x) y = MatMul(p, v) "
    )
    inputs, more = HEADS_FIRST.replace("float", "float16"), MORE.format(d=width, n=4).replace("float", "float16")
    model = parse(body, more, inputs=inputs, outputs="float16[B,4,S,8] y", opset=18)
    result, _ = fused(model)
    assert second(next(node for node in result.graph.node if node.domain == "ascend"))
    feeds = random_feeds(model)
    feeds[large] *= np.float16(10000)
    feeds["k" if large == "q" else "kr"] *= np.float16(1e-4)
    # Scores of up to 64 are rounded by 2^-6 where they are added.
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 2e-2)


def test_ascend_has_a_bias() -> None:
    model = Spelling(mask="masked = Identity(z) ", scale="z = Identity(x) ").model
    assert [block.mask for block in fused(model, "ascend")[1].blocks] == ["real_shift"]


ROWS = {
    "masked rows": 's = Einsum<equation="bshd,btd->bsht">(q, k) u = Unsqueeze(m, a2) x = Where(u, low, s) ',
    "a bias for each head": 's = Einsum<equation="bshd,btd->bsht">(q, k) x = Add(s, bias) ',
    "no mask": 's = Einsum<equation="bshd,btd->bsht">(q, k) x = Identity(s) ',
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("sizes", [("S", "T"), ("5", "6")])
def test_heads_behind_rows(name: str, sizes: tuple[str, str]) -> None:
    """Scores [B,S1,N,S2] as of one key head for all: rows are rows, and keys are not repeated for them."""
    rows, keys = sizes
    body = (
        NUMBERS
        + "a2 = Constant<value=int64[1] {2}>() "
        + ROWS[name]
        + ('p = Softmax<axis=-1>(x) y = Einsum<equation="bsht,bte->bshe">(p, v) ')
    )
    inputs = f"float[B,{rows},4,8] q, float[B,{keys},8] k, float[B,{keys},8] v"
    more = f"bool[B,{rows},{keys}] m, float[{rows},4,{keys}] bias"
    model = parse(body, more, inputs=inputs, outputs=f"float[B,{rows},4,8] y", opset=18)
    result, _ = fused(model)
    feeds = random_feeds(model, m=np.random.default_rng(1).random((2, 5, 6)) < 0.5)
    assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)
    if name == "masked rows" or rows == "S":
        assert "Expand" not in {node.op_type for node in result.graph.node}
