"""Differential attention: the difference of two softmaxes times values, and the difference of two attentions."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import onnx_ir as ir
import pytest

from fa_compiler.passes import Report, fuse
from tests.passes.running import Array, assert_same, fused, parse, random_feeds, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

INPUTS = (
    "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,S,8] q2, float[B,4,T,8] k2, float[B,4,T,8] v, float[4,1,1] t, "
    "bool[B,1,S,T] m"
)
NUMBERS = "half = Constant<value=float {0.5}>() low = Constant<value=float {-inf}>() one = Constant<value=int64 {1}>() "
NUMBERS += "zero = Constant<value=int64 {0}>() share = Sigmoid(t) "
FIRST = "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) x = Where(m, s, low) p = Softmax<axis=-1>(x) "
SECOND = "kt2 = Transpose<perm=[0,1,3,2]>(k2) s2 = MatMul(q2, kt2) p2 = Softmax<axis=-1>(s2) "
BOTH = NUMBERS + FIRST + SECOND
LESS = "w = Mul(half, p2) d = Sub(p, w) y = MatMul(d, v) "
STACKED = NUMBERS + "qq = Concat<axis=1>(q, q2) kk = Concat<axis=1>(k, k2) kt = Transpose<perm=[0,1,3,2]>(kk) "
STACKED += "s = MatMul(qq, kt) p = Softmax<axis=-1>(s) "
HALVES = STACKED + "a, b = Split<axis=1>(p) w = Mul(half, b) d = Sub(a, w) y = MatMul(d, v) "
PLACES = (
    "at0 = Constant<value=int64[1] {0}>() at2 = Constant<value=int64[1] {2}>() at4 = Constant<value=int64[1] {4}>() "
)
PLACES += (
    "at6 = Constant<value=int64[1] {6}>() at8 = Constant<value=int64[1] {8}>() at1 = Constant<value=int64[1] {1}>() "
)
SLICES = PLACES + STACKED + "a = Slice(p, at0, at4, at1) b = Slice(p, at4, at8, at1) w = Mul(half, b) d = Sub(a, w) "
SLICES += "y = MatMul(d, v) "
LAMBDA = (
    "w1 = Constant<value=float[4] {0.1,0.2,-0.3,0.4}>() m1 = Mul(w1, w1) r1 = ReduceSum<keepdims=0>(m1) e1 = Exp(r1) "
)
LAMBDA += "m2 = Mul(w1, half) r2 = ReduceMean<keepdims=0>(m2) e2 = Exp(r2) d0 = Sub(e1, e2) lam = Add(d0, half) "
SPELLINGS = {
    "a factor that is computed from weights": (BOTH + LAMBDA + LESS.replace("half", "lam"), 2),
    "slices of one softmax": (SLICES, 1),
    "one factor": (BOTH + LESS, 2),
    "divided": (BOTH + LESS.replace("Mul(half, p2)", "Div(p2, half)"), 2),
    "a factor for each head": (BOTH + LESS.replace("half", "share"), 2),
    "a sum": (BOTH + LESS.replace("Sub", "Add"), 2),
    "halves of one softmax": (HALVES, 1),
    "neighbours in one softmax": (
        STACKED + "g = Constant<value=int64[5] {2,4,2,5,6}>() r = Reshape(p, g) a = Gather<axis=2>(r, zero) "
        "b = Gather<axis=2>(r, one) w = Mul(b, half) d = Sub(a, w) y = MatMul(d, v) ",
        1,
    ),
    "the difference of two attentions": (
        BOTH + "y1 = MatMul(p, v) y2 = MatMul(p2, v) w = Mul(t, y2) y = Sub(y1, w) ",
        2,
    ),
}


def attention(body: str, sizes: str = "BST") -> onnx.ModelProto:
    inputs = INPUTS
    for name, size in zip("BST", "256", strict=True):
        inputs = inputs if name in sizes else inputs.replace(name, size)
    return parse(body, inputs=inputs, outputs="float[B,4,S,8] y")


def nodes(proto: onnx.ModelProto) -> list[tuple[str, list[str], list[str]]]:
    return [(node.op_type, list(node.input), list(node.output)) for node in proto.graph.node]


def same(proto: onnx.ModelProto, *assume: str, **given: Array) -> tuple[onnx.ModelProto, Report]:
    """Compare before and after, with rows that are masked everywhere."""
    result, report = fused(proto, assume=assume)
    mask = np.random.default_rng(1).random((2, 1, 5, 6)) < 0.6
    mask[0, 0, 2] = False
    feeds = random_feeds(proto, m=mask, **given)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)
    return result, report


@pytest.mark.parametrize("body, blocks", SPELLINGS.values(), ids=SPELLINGS)
def test_spellings(body: str, blocks: int) -> None:
    proto = attention(body, "" if "Reshape" in body else "BST")
    result, report = same(proto, "finite-scores")
    assert report.count("fused") == len(report.blocks) == blocks
    assert not {"Softmax", "MatMul"} & {node.op_type for node in result.graph.node}
    moved = "d = " in body
    assert {block.assumed for block in report.blocks} == {("finite-scores",) if moved else ()}
    assert fused(proto, "ascend")[1].count("fused") == blocks
    if moved:
        result, report = same(proto, v=np.full((2, 4, 6, 8), np.inf, np.float32))
        assert report.count("fused") == 0 and "finite-scores" in (report.blocks[0].hint or "")
        assert nodes(result) == nodes(proto)


KEPT = {
    "a factor that may be infinite": BOTH + LESS.replace("half", "t"),
    "the difference is read, too": BOTH
    + LESS.replace("y = ", "y0 = ")
    + "n = ReduceSum<keepdims=1>(d) y = Add(y0, n) ",
    "a part is read, too": HALVES.replace("y = ", "y0 = ") + "n = ReduceSum<keepdims=1>(b) y = Add(y0, n) ",
    "slices that overlap": SLICES.replace("Slice(p, at4, at8, at1)", "Slice(p, at2, at6, at1)"),
    "slices of rows, too": SLICES.replace(
        "b = Slice(p, at4, at8, at1)",
        "s2 = Concat<axis=0>(at4, at0) e2 = Concat<axis=0>(at8, at6) x2 = Constant<value=int64[2] {1,3}>() "
        "b = Slice(p, s2, e2, x2)",
    ),
    "parts of the batch": NUMBERS + FIRST + "a, b = Split<axis=0>(p) d = Sub(a, b) y = MatMul(d, v) ",
    "the other softmax is of no product": NUMBERS + FIRST + "s2 = Abs(s) p2 = Softmax<axis=-1>(s2) " + LESS,
}


@pytest.mark.parametrize("body", KEPT.values(), ids=KEPT)
def test_what_stays_as_it_is(body: str) -> None:
    proto = attention(body, "")
    result, report = same(proto, "finite-scores")
    assert {block.status for block in report.blocks} <= {"declined", "not_attention"}
    assert nodes(result) == nodes(proto)


@pytest.mark.parametrize("axis", [-3, 1])
def test_values_of_one_dimension(axis: int) -> None:
    """Each product then lacks the last dimension of the probabilities, and factors and parts are those of others."""
    body = STACKED + f"a, b = Split<axis={axis}>(p) w = Mul(share, b) d = Sub(a, w) y = MatMul(d, v) "
    proto = parse(body, inputs=INPUTS.replace("float[B,4,T,8] v", "float[T] v"), outputs="float[B,4,S] y")
    result, _ = fused(proto, assume=["finite-scores"])
    feeds = random_feeds(proto)
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, 1e-5)


@pytest.mark.parametrize(("line", "fuses"), [("Mul(b, half)", True), ("Div(b, half)", False), ("Mul(b, two)", False)])
def test_factors_of_float16(line: str, fuses: bool) -> None:
    """Twice a result may overflow where twice the difference of probabilities does not."""
    numbers = "h = Constant<value=float {0.5}>() half = Cast<to=10>(h) two = Reciprocal(half) "
    body = (
        numbers + STACKED.replace(NUMBERS, "") + f"a, b = Split<axis=1>(p) w = {line} d = Sub(a, w) y = MatMul(d, v) "
    )
    inputs = INPUTS.replace("float[", "float16[")
    for assume, target in ((["finite-scores"], "ort"), ([], "ascend")):
        (block,) = fused(parse(body, inputs=inputs, outputs="float16[B,4,S,8] y"), target, assume)[1].blocks
        assert (block.status == "fused") == fuses, block.reason
        assert fuses or (block.code == "probability_term" and "may overflow" in (block.reason or ""))


def test_moved_back_where_the_target_refuses() -> None:
    """FlashAttentionScore of Ascend takes heads of up to 768."""
    proto = parse(
        BOTH + LESS,
        inputs=INPUTS.replace(",8]", ",1024]"),
        outputs="float[B,4,S,1024] y",
    )
    result, report = fused(proto, "ascend")
    assert [block.status for block in report.blocks] == ["declined"] * 2
    assert sorted(nodes(result)) == sorted(nodes(proto))


def test_a_factor_for_each_key_leaves_one_product() -> None:
    """The other attention is fused all the same."""
    body = BOTH + "e = Constant<value=float[6] {1,1,1,1,1,2}>() " + LESS.replace("half", "e")
    _, report = same(attention(body, ""), "finite-scores")
    assert [block.status for block in report.blocks] == ["fused", "declined"]


def test_a_part_of_a_scalar_is_no_error() -> None:
    """ONNX Runtime refuses such a model."""
    body = NUMBERS + FIRST + "g = Gather(half, zero) d = Sub(g, p) y = MatMul(d, v) "
    text = f'<ir_version: 8, opset_import: ["": 17]> g ({INPUTS}) => (float[B,4,S,8] y) {{ {body} }}'
    report = fuse(ir.from_proto(onnx.parser.parse_model(text)))
    assert report.count("fused") == 0
