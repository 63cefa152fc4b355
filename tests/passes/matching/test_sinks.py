"""Attention sinks: one more score in each row that takes part in the softmax and has no value."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import Block, fuse
from fa_compiler.passes.answer.options import Target
from fa_compiler.reference import evaluator
from tests.passes.running import PRODUCT_PV, PRODUCT_QK, Array, assert_same, fused, parse, random_feeds, run

NUMBERS = "".join(
    f"{name} = Constant<value=int64[1] {{{number}}}>() "
    for name, number in {"zero": 0, "one": 1, "two": 2, "three": 3, "last": -1, "end": 2**63 - 1}.items()
)
ROWS = "sh = Shape(s) rows = Slice(sh, zero, three, zero) full = Concat<axis=0>(rows, one) "
HEADS = "t = Constant<value=float[1,4,1,1] {-0.5,1.5,0.0,3.0}>() "
EXPANDED = ROWS + HEADS + "e = Expand(t, full) "
BEHIND = "c = Concat<axis=-1>(X, e) p0 = Softmax<axis=-1>(c) "
FRONT = "c = Concat<axis=3>(e, X) p0 = Softmax<axis=3>(c) "
DROP_LAST = "p = Slice(p0, zero, last, three, one) "
DROP_FIRST = "p = Slice(p0, one, end, three) "
PADDING = np.array([[0, 0, 0, 0, 0, 0], [1, 1, 0, 1, 1, 0]], np.bool_).reshape(2, 1, 1, 6)


def model(sink: str, drop: str, terms: str = "", more: str = "", inputs: str = "") -> onnx.ModelProto:
    """Attention in which `terms` make x of the product s, with X standing for the scores the sink is put beside."""
    body = NUMBERS + PRODUCT_QK + terms + sink.replace("X", "x" if terms else "s") + drop + PRODUCT_PV
    return parse(body, more, **({"inputs": inputs} if inputs else {}))


def same(proto: onnx.ModelProto, target: Target = "ort", **given: Array) -> Block:
    """Compare before and after; float32 rounds sums differently by 1e-5."""
    result, report = fused(proto, target)
    (block,) = report.blocks
    if block.status == "fused":
        feeds = random_feeds(proto, **given)
        assert "Concat" not in {node.op_type for node in result.graph.node if node.output[0] == "c"}
        for got, wanted in zip(evaluator(result).run(None, feeds), run(proto, feeds), strict=True):
            assert_same(np.asarray(got), wanted, 1e-5)
    return block


SPELLINGS = {
    "behind": (EXPANDED + BEHIND, DROP_LAST),
    "in_front": (EXPANDED + FRONT, DROP_FIRST),
    "less_its_maximum": (
        EXPANDED + "c = Concat<axis=-1>(X, e) m0 = ReduceMax<axes=[-1]>(c) d = Sub(c, m0) p0 = Softmax<axis=-1>(d) ",
        DROP_LAST,
    ),
    "decomposed": (
        EXPANDED + "c = Concat<axis=-1>(X, e) m0 = ReduceMax<axes=[-1]>(c) d = Sub(c, m0) ex = Exp(d) "
        "su = ReduceSum(ex, last) p0 = Div(ex, su) ",
        DROP_LAST,
    ),
    "split": (
        EXPANDED + BEHIND,
        "len = Shape<start=3>(s) sizes = Concat<axis=0>(len, one) p, rest = Split<axis=-1>(p0, sizes) ",
    ),
    "split_in_front": (
        EXPANDED + FRONT,
        "len = Shape<start=3>(s) sizes = Concat<axis=0>(one, len) rest, p = Split<axis=-1>(p0, sizes) ",
    ),
    "up_to_the_length": (EXPANDED + BEHIND, "len = Shape<start=3>(s) p = Slice(p0, zero, len, three) "),
    "one_dimension": (
        ROWS + "t1 = Constant<value=float[4] {-0.5,1.5,0.0,3.0}>() r = Constant<value=int64[4] {1,-1,1,1}>() "
        "t = Reshape(t1, r) e = Expand(t, full) " + BEHIND,
        DROP_LAST,
    ),
    "computed": (
        ROWS + HEADS + "half = Constant<value=float {0.5}>() u = Mul(t, half) e = Expand(u, full) " + BEHIND,
        DROP_LAST,
    ),
    "for_all_heads": (ROWS + "t = Constant<value=float {0.75}>() e = Expand(t, full) " + BEHIND, DROP_LAST),
    "zeros": (ROWS + "e = ConstantOfShape(full) " + BEHIND, DROP_LAST),
    "padded": ("w = Constant<value=int64[8] {0,0,0,0,0,0,0,1}>() c = Pad(X, w) p0 = Softmax<axis=-1>(c) ", DROP_LAST),
    "padded_in_front": (
        "w = Constant<value=int64[8] {0,0,0,1,0,0,0,0}>() n = Constant<value=float {-1.5}>() c = Pad(X, w, n) "
        "p0 = Softmax<axis=-1>(c) ",
        DROP_FIRST,
    ),
    "cast": (
        EXPANDED + "c = Concat<axis=-1>(X, e) c1 = Cast<to=1>(c) p1 = Softmax<axis=-1>(c1) p0 = Cast<to=1>(p1) ",
        DROP_LAST,
    ),
    "folded": (
        EXPANDED + "c = Concat<axis=-1>(X, e) n = Shape<start=2, end=3>(s) t1 = Shape<start=3>(s) more = Add(t1, one) "
        "r3 = Concat<axis=0>(last, n, more) four = Constant<value=int64[1] {4}>() "
        "r4 = Concat<axis=0>(last, four, n, more) c3 = Reshape(c, r3) p3 = Softmax<axis=-1>(c3) p0 = Reshape(p3, r4) ",
        DROP_LAST,
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_spellings(name: str) -> None:
    block = same(model(*SPELLINGS[name]))
    assert (block.status, block.mask) == ("fused", "none"), block


@pytest.mark.parametrize("guard", ["", "i = IsNaN(p0) g0 = Where(i, nought, p0) "])
@pytest.mark.parametrize("fill", ["-inf", "-3.4028234663852886e38", "-1e9"])
@pytest.mark.parametrize("terms", ["x = Where(m, s, low) ", "a = Where(m, nought, low) x = Add(s, a) "])
def test_rows_that_are_masked_everywhere_give_zero(terms: str, fill: str, guard: str) -> None:
    terms = f"low = Constant<value=float {{{fill}}}>() nought = Constant<value=float {{0.0}}>() " + terms
    drop = guard + DROP_LAST.replace("p0", "g0") if guard else DROP_LAST
    block = same(model(EXPANDED + BEHIND, drop, terms, "bool[B,1,1,T] m"), m=PADDING)
    if fill == "-1e9" and "x = Where" in terms:
        assert block.code in (None, "mask_value")
    else:
        assert (block.status, block.mask) == ("fused", "real_shift" if fill == "-1e9" else "atten_mask")


@pytest.mark.parametrize("value", [0.5, -np.inf, -3.4e38, np.nan])
@pytest.mark.parametrize("fill", ["-inf", "-3.4028234663852886e38"])
def test_a_sink_that_is_not_known_before_the_run(fill: str, value: float) -> None:
    """It may be as low as a mask: a row of nothing else gives what it gave."""
    terms = f"low = Constant<value=float {{{fill}}}>() x = Where(m, s, low) "
    proto = model(ROWS + "e = Expand(t, full) " + BEHIND, DROP_LAST, terms, "bool[B,1,1,T] m, float[1,4,1,1] t")
    block = same(proto, m=PADDING, t=np.full((1, 4, 1, 1), value, np.float32))
    assert block.status == "fused"


@pytest.mark.parametrize("guard", ["p = Where(m, p1, nought) ", "f = Cast<to=1>(m) p = Mul(p1, f) "])
@pytest.mark.parametrize("fill", ["-30.0", "-3.4028234663852886e38", "-inf"])
def test_a_sink_that_may_be_infinite_behind_a_guard(fill: str, guard: str) -> None:
    """A sink of +inf makes every row NaN, but for those without a key where the guard selects."""
    terms = f"low = Constant<value=float {{{fill}}}>() nought = Constant<value=float {{0.0}}>() x = Where(m, s, low) "
    given = "bool[B,1,1,T] m, float[1,4,1,1] t"
    guarded = DROP_LAST.replace("p = ", "p1 = ") + guard
    proto = model(ROWS + "e = Expand(t, full) " + BEHIND, guarded, terms, given)
    block = same(proto, m=PADDING, t=np.array([np.inf, 0.0, 1.0, -np.inf], np.float32).reshape(1, 4, 1, 1))
    assert block.code == "probability_term"
    assert block.culprit == "c" or fill == "-inf"


def test_grouped_heads() -> None:
    """One key head for each two query heads, in a dimension of their own."""
    sink = "t = Constant<value=float[1,2,2,1,1] {-0.5,1.5,0.0,3.0}>() four = Constant<value=int64[1] {4}>() "
    sink += (
        "sh = Shape(s) rows = Slice(sh, zero, four, zero) full = Concat<axis=0>(rows, one) e = Expand(t, full) "
        + BEHIND
    )
    body = NUMBERS + "kt = Transpose<perm=[0,1,2,4,3]>(k) s = MatMul(q, kt) " + sink.replace("X", "s")
    body += "p = Slice(p0, zero, last, four) " + PRODUCT_PV
    inputs = "float[B,2,2,S,8] q, float[B,2,1,T,8] k, float[B,2,1,T,8] v"
    block = same(parse(body, inputs=inputs, outputs="float[B,2,2,S,8] y"))
    assert (block.status, block.heads) == ("fused", (4, 2))


@pytest.mark.parametrize(("dims", "same_rows"), [((2, 4, 5, 1), True), ((1, 4, 5, 1), True), ((2, 4, 5, 1), False)])
def test_a_constant_sink_with_copies(dims: tuple[int, ...], same_rows: bool) -> None:
    """A simplifier expands the sink of fixed sizes. With one other number it is no number for each head."""
    numbers = np.broadcast_to(np.array([-0.5, 1.5, 0.0, 3.0], np.float32).reshape(1, 4, 1, 1), dims).copy()
    numbers[0, 2, 3] += 0.0 if same_rows else 1.0
    stored = ",".join(map(str, numbers.reshape(-1)))
    sink = f"e = Constant<value=float[{','.join(map(str, dims))}] {{{stored}}}>() "
    sink += "" if dims[0] == 2 else "full = Constant<value=int64[4] {2,4,5,1}>() e1 = Expand(e, full) "
    body = NUMBERS + PRODUCT_QK + sink + BEHIND.replace("X", "s").replace("e)", "e)" if dims[0] == 2 else "e1)")
    fixed = "float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,8] v"
    block = same(parse(body + DROP_LAST + PRODUCT_PV, inputs=fixed, outputs="float[2,4,5,8] y"))
    assert (block.status, block.code) == (("fused", None) if same_rows else ("declined", "shape"))


OTHER = "float[B,4,S,1] o"
REFUSED = {
    "the_wrong_column_dropped": (EXPANDED + BEHIND, "p = Slice(p0, one, end, three) ", "", "p"),
    "first_kept": (EXPANDED + FRONT, DROP_LAST, "", "p"),
    "another_axis": (
        EXPANDED + BEHIND,
        "q0 = Transpose<perm=[0,1,3,2]>(p0) q1 = Slice(q0, zero, last, three, one) p = Transpose<perm=[0,1,3,2]>(q1) ",
        "",
        "q1|c",
    ),
    "a_number_for_each_row": (BEHIND.replace("e)", "o)"), DROP_LAST, OTHER, "c"),
    "a_factor_behind": (
        EXPANDED + "two_ = Constant<value=float {2.0}>() c0 = Concat<axis=-1>(X, e) c = Mul(c0, two_) "
        "p0 = Softmax<axis=-1>(c) ",
        DROP_LAST,
        "",
        "c0",
    ),
    "two_sinks": (
        EXPANDED + "c0 = Concat<axis=-1>(X, e) c = Concat<axis=-1>(c0, e) p0 = Softmax<axis=-1>(c) ",
        "p1 = Slice(p0, zero, last, three, one) p = Slice(p1, zero, last, three, one) ",
        "",
        "c0",
    ),
    "reversed": (
        EXPANDED + BEHIND,
        "minus = Constant<value=int64[1] {-2}>() low = Constant<value=int64[1] {-9223372036854775807}>() "
        "p = Slice(p0, minus, low, three, last) ",
        "",
        "p",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_sink(name: str) -> None:
    sink, drop, more, culprit = REFUSED[name]
    proto = model(sink, drop, "", more)
    _, report = fused(proto)
    (block,) = report.blocks
    assert block.status == "declined", block
    assert block.culprit in culprit.split("|"), block


def test_ascend_wants_a_16_bit_query() -> None:
    assert same(model(EXPANDED + BEHIND, DROP_LAST), "ascend").code == "illegal_for_target"


@pytest.mark.parametrize("axis", [1, 2], ids=["heads", "rows"])
def test_a_row_or_head_that_is_left_out_again_is_no_sink(axis: int) -> None:
    """It takes part in no softmax of the others."""
    pads = [0] * 8
    pads[4 + axis] = 1
    body = f"pads = Constant<value=int64[8] {{{', '.join(map(str, pads))}}}>() c = Pad(X, pads) "
    body += "p0 = Softmax<axis=-1>(c) "
    block = same(model(body, DROP_LAST.replace("three", ("zero", "one", "two")[axis])))
    assert block.reason == "the scores are made longer along another axis than the softmax runs over"


def test_pads_without_a_dimension_are_an_ordinary_decline() -> None:
    """A damaged file may have them; no runtime takes them."""
    damaged = model(
        "pads = Constant<value=int64[8] {0,0,0,0,0,0,0,1}>() c = Pad(X, pads) p0 = Softmax<axis=-1>(c) ", DROP_LAST
    )
    (pads,) = (node for node in damaged.graph.node if node.output[0] == "pads")
    pads.attribute[0].t.CopyFrom(onnx.numpy_helper.from_array(np.array(1)))
    (block,) = fuse(ir.from_proto(damaged)).blocks
    assert block.status == "declined"
    assert block.reason


def test_a_sink_that_may_be_nan_beside_a_mask() -> None:
    """A row that is masked everywhere is NaN where the sink is. So the mask stays a bias; beside a guard by the mask
    itself, which makes the row 0, it is declined."""
    low = "low = Constant<value=float {-inf}>() nothing = Constant<value=float {0.0}>() "
    sink = low + ROWS + "t1 = Tanh(t0) e = Expand(t1, full) " + BEHIND
    given = {"m": PADDING, "t0": np.array([0.3, np.nan, -2.0, np.inf], np.float32).reshape(4, 1, 1)}
    terms = low.replace("low", "lo").replace("nothing", "no") + "x = Where(m, s, lo) "
    proto = model(sink, DROP_LAST, terms, "bool[B,1,1,T] m, float[4,1,1] t0")
    block = same(proto, **given)
    assert (block.status, block.mask) == ("fused", "real_shift"), block
    guarded = model(
        sink, DROP_LAST.replace("p =", "p1 =") + "p = Where(m, p1, nothing) ", terms, "bool[B,1,1,T] m, float[4,1,1] t0"
    )
    assert same(guarded, **given).code == "probability_term"
