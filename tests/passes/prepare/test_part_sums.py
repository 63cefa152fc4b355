"""Terms that are written into a part of the scores (MViTv2): they become terms of all scores, or nothing changes."""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler.passes.answer.options import Target
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, SOFTMAX, Array, assert_same, fused, parse, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

SIZES = "zero = Constant<value=int64 {0}>() one = Constant<value=int64 {1}>() last = Constant<value=int64[1] {-1}>() "
SIZES += "start = Constant<value=int64[2] {1, 1}>() end = Constant<value=int64[2] {9999, 9999}>() "
SIZES += "axes = Constant<value=int64[2] {2, 3}>() "
LINES = (
    "all = Shape(s) b_, h_, r_, c_ = Split<axis=0>(all) "
    "bs = Squeeze(b_) hs = Squeeze(h_) rs = Squeeze(r_) cs = Squeeze(c_) "
    "nb = Range(zero, bs, one) nh = Range(zero, hs, one) nr = Range(one, rs, one) nc = Range(one, cs, one) "
    "db = Constant<value=int64[4] {-1, 1, 1, 1}>() dh = Constant<value=int64[3] {-1, 1, 1}>() "
    "dr = Constant<value=int64[2] {-1, 1}>() lb = Reshape(nb, db) lh = Reshape(nh, dh) lr = Reshape(nr, dr) "
)
BOX = "part = Slice(s, start, end, axes) sum = Add(part, t) box = Shape(part) "
PLACES = (
    "wb = Expand(lb, box) wh = Expand(lh, box) wr = Expand(lr, box) wc = Expand(nc, box) "
    "pb = Unsqueeze(wb, last) ph = Unsqueeze(wh, last) pr = Unsqueeze(wr, last) pc = Unsqueeze(wc, last) "
    "places = Concat<axis=-1>(pb, ph, pr, pc) "
)
WRITTEN = "wide = Expand(sum, box) x = ScatterND(s, places, wide) "
BODY = SIZES + PRODUCT_QK + LINES + BOX + PLACES + WRITTEN + SOFTMAX.format("x") + PRODUCT_PV
OPEN = "float[B,4,S,8] q, float[B,4,T,8] k, float[B,4,T,8] v, float[B,4,U,V] t"
FIXED = "float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,8] v, float[{}] t"


def feeds(term: tuple[int, ...], **given: Array) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 4, 5, 8), "k": (2, 4, 6, 8), "v": (2, 4, 6, 8), "t": term}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()} | given


@pytest.mark.parametrize("target", ["ort", "ascend"])
@pytest.mark.parametrize("term", [(2, 4, 4, 5), (1, 4, 4, 5), (4, 4, 5), (4, 5)], ids=str)
def test_a_term_of_a_part_is_padded(term: tuple[int, ...], target: Target) -> None:
    proto = parse(BODY, inputs=FIXED.format(",".join(map(str, term))), outputs="float[2,4,5,8] y")
    result, report = fused(proto, target)
    assert [(block.status, block.mask, block.assumed) for block in report.blocks] == [("fused", "real_shift", ())]
    assert not {"ScatterND", "Slice", "Softmax"} & {node.op_type for node in result.graph.node}
    for number in (0.0, np.nan, -np.inf) if target == "ort" else ():
        given = feeds(term)
        given["t"].reshape(-1)[1] += number
        assert_same(run(result, given)[0], run(proto, given)[0], 1e-5)


ALL_PLACES = BODY.replace("Range(one, ", "Range(zero, ")
GRID = (
    "grid = Constant<value=int64[6] {2,4,5,1,3,2}>() of_t = Constant<value=int64[6] {2,4,5,1,3,1}>() "
    "apart = Reshape(s, grid) t6 = Reshape(t, of_t) grown = Add(apart, t6) box = Shape(s) sum = Reshape(grown, box) "
)
SUMS = {"the scores": ("box = Shape(s) sum = Add(s, t) ", (2, 4, 5, 6)), "a grid of keys": (GRID, (2, 4, 5, 3))}


@pytest.mark.parametrize(("body", "term"), SUMS.values(), ids=SUMS)
def test_an_assignment_to_all_places_is_left_out(body: str, term: tuple[int, ...]) -> None:
    """MViTv2 without a class token: what is written may be of any form."""
    sizes = FIXED.format(",".join(map(str, term)))
    proto = parse(ALL_PLACES.replace(BOX, body), inputs=sizes, outputs="float[2,4,5,8] y")
    result, report = fused(proto)
    assert [(block.status, block.mask, block.assumed) for block in report.blocks] == [("fused", "real_shift", ())]
    assert "ScatterND" not in {node.op_type for node in result.graph.node}
    assert_same(run(result, feeds(term))[0], run(proto, feeds(term))[0], 1e-5)


def test_an_assignment_to_all_rows_but_one_stays() -> None:
    """The last row keeps its scores. The other ones are written in a form that cannot be read by the place."""
    cut = "ends = Constant<value=int64[2] {4, 9}>() origin = Constant<value=int64[2] {0, 0}>() "
    cut += "part = Slice(s, origin, ends, axes) four = Constant<value=int64 {4}>() "
    body = cut + GRID.replace("{2,4,5,", "{2,4,4,").replace("(s, grid)", "(part, grid)").replace(
        "Shape(s)", "Shape(part)"
    )
    before, after = ALL_PLACES.split(BOX)
    rows = before.replace(LINES.replace("Range(one, ", "Range(zero, "), "")
    lines = LINES.replace("Range(one, ", "Range(zero, ").replace("Range(zero, rs, one)", "Range(zero, four, one)")
    proto = parse(rows + body + lines + after, inputs=FIXED.format("2,4,4,3"), outputs="float[2,4,5,8] y")
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["declined"]
    assert_same(run(result, feeds((2, 4, 4, 3)))[0], run(proto, feeds((2, 4, 4, 3)))[0], 1e-5)


def test_a_term_of_another_type_is_not_padded() -> None:
    """The sum is computed in float64 and cast back."""
    wide = BOX.replace(
        "sum = Add(part, t)", "p64 = Cast<to=11>(part) t64 = Cast<to=11>(t) u = Add(p64, t64) sum = Cast<to=1>(u)"
    )
    assert wide != BOX
    proto = parse(BODY.replace(BOX, wide), inputs=FIXED.format("2,4,4,5"), outputs="float[2,4,5,8] y")
    assert [block.status for block in fused(proto)[1].blocks] == ["declined"]


def turned(columns: range, rows: range, again: bool = True) -> str:
    """As torch.export writes it: columns into a Slice of the rows, then the rows, each as the first dimension; and once
    more what is there already."""
    body = SIZES + PRODUCT_QK
    for name, places in (("c", columns), ("r", rows)):
        body += f"at_{name} = Constant<value=int64[{len(places)},1] {{{','.join(map(str, places))}}}>() "
    body += (
        "a2 = Constant<value=int64[1] {2}>() a3 = Constant<value=int64[1] {3}>() o = Constant<value=int64[1] {1}>() "
    )
    body += "far = Constant<value=int64[1] {9999}>() low = Slice(s, o, far, a2) part = Slice(low, o, far, a3) "
    body += "sum = Add(part, t) "
    written, source = "sum", "s"
    for step in range(2 if again else 1):
        body += f"u{step} = Transpose<perm=[3,1,2,0]>({written}) d{step} = Transpose<perm=[3,1,2,0]>(low) "
        body += f"w{step} = ScatterND(d{step}, at_c, u{step}) e{step} = Transpose<perm=[2,1,3,0]>(w{step}) "
        body += f"f{step} = Transpose<perm=[2,1,0,3]>({source}) g{step} = ScatterND(f{step}, at_r, e{step}) "
        body += f"s_{step} = Transpose<perm=[2,1,0,3]>(g{step}) "
        if again and not step:
            body += "low_ = Slice(s_0, o, far, a2) part_ = Slice(low_, o, far, a3) "
        written, source = "part_", "s_0"
        body = body.replace("(low) w1", "(low_) w1")
    return body + SOFTMAX.format("s_1" if again else "s_0") + PRODUCT_PV


@pytest.mark.parametrize(
    ("columns", "rows", "again", "status"),
    [
        (range(1, 6), range(1, 5), True, "fused"),
        (range(1, 6), range(1, 5), False, "fused"),
        (range(5), range(1, 5), False, "declined"),
        (range(1, 6), range(4), False, "declined"),
        (range(5, 0, -1), range(1, 5), False, "declined"),
    ],
)
def test_rows_and_columns_written_apart(columns: range, rows: range, again: bool, status: str) -> None:
    proto = parse(turned(columns, rows, again), inputs=FIXED.format("2,4,4,5"), outputs="float[2,4,5,8] y")
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == [status]
    assert ("ScatterND" in {node.op_type for node in result.graph.node}) == (status == "declined")
    assert_same(run(result, feeds((2, 4, 4, 5)))[0], run(proto, feeds((2, 4, 4, 5)))[0], 1e-5)


NEAR = {
    "repeated": ("", "", (2, 4, 4, 1)),
    "another box is read": ("part = Slice(s, start, end, axes)", "part = Slice(s, zeros, ends, axes)", (2, 4, 4, 5)),
    "rows backwards": (
        "lr = Reshape(nr, dr)",
        "lq = Reshape(nr, dr) five = Squeeze(r_) lr = Sub(five, lq)",
        (2, 4, 4, 5),
    ),
    "added twice": ("x = ScatterND", 'x = ScatterND<reduction="add">', (2, 4, 4, 5)),
    "another sum": ("sum = Add(part, t)", "sum = Sub(part, t)", (2, 4, 4, 5)),
    "the part is read, too": (
        "wide = Expand(sum, box)",
        "kept = ReduceMax(part) w0 = Mul(t, kept) sum2 = Add(sum, w0) wide = Expand(sum2, box)",
        (2, 4, 4, 5),
    ),
}


@pytest.mark.parametrize(("old", "new", "term"), NEAR.values(), ids=NEAR)
def test_near_misses_stay_as_they_are(old: str, new: str, term: tuple[int, ...]) -> None:
    body = BODY.replace(old, new)
    assert not old or BODY.count(old) == 1
    more = "zeros = Constant<value=int64[2] {0, 0}>() ends = Constant<value=int64[2] {4, 5}>() "
    proto = parse(more + body, inputs=FIXED.format(",".join(map(str, term))), outputs="float[2,4,5,8] y")
    result, report = fused(proto)
    assert [block.status for block in report.blocks] == ["declined"]
    assert [node.op_type for node in result.graph.node] == [node.op_type for node in proto.graph.node]
    assert_same(run(result, feeds(term))[0], run(proto, feeds(term))[0], 1e-5)


def test_a_change_is_undone_where_the_target_refuses() -> None:
    """FlashAttentionScore of Ascend takes heads of up to 768."""
    proto = parse(BODY, inputs=FIXED.format("2,4,4,5").replace("8]", "1024]"), outputs="float[2,4,5,1024] y")
    result, report = fused(proto, "ascend")
    assert [block.status for block in report.blocks] == ["declined"]
    left, given = ([(each.op_type, [*each.input], [*each.output]) for each in m.graph.node] for m in (result, proto))
    assert sorted(left) == sorted(given)
