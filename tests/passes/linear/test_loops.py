"""Loops whose bodies compute something else from an iteration on: they are left, or refuse the lengths of which not all
iterations are run in the proof."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from tests.passes.running import assert_same, feeds_of, fused, parse, refused, run

INPUTS = "float[2,4,6] s0, float[T,2,4] q, float[T,2,4] k, float[T,2,6] v"
OUTPUTS = "float[T,2,6] y, float[2,4,6] s1"
TOLERANCE = 1e-4
"""float32 sums over up to 80 tokens, in another order, without a decay."""


@dataclass(frozen=True)
class Body:
    """A Loop over the tokens: the operand q is read at `place`, and the output is twice as large where `truth` holds.
    `counted` counts from `start` on."""

    nodes: str
    place: str = "i"
    truth: str = "on"
    start: int = 0
    right: int = 0
    """The number of tokens that the fused model takes; 0 where it is left."""

    def text(self) -> str:
        """The nodes of the model."""
        return (
            "n = Shape<start=0,end=1>(q) zero1 = Constant<value_ints=[0]>() trips = Squeeze(n, zero1) "
            f"start = Constant<value_int={self.start}>() "
            "s1, last, y = Loop(trips, , s0, start) <body = body (int64 i, bool go, float[2,4,6] s, int64 counted) => "
            "(bool on, float[2,4,6] sn, int64 next, float[2,6] o) { on = Identity(go) one = Constant<value_int=1>() "
            f"next = Add(counted, one) {self.nodes} a1 = Constant<value_ints=[1]>() a2 = Constant<value_ints=[2]>() "
            f"qi = Gather(q, {self.place}) ki = Gather(k, i) vi = Gather(v, i) kc = Unsqueeze(ki, a2) "
            "vr = Unsqueeze(vi, a1) u = MatMul(kc, vr) sn = Add(s, u) qr = Unsqueeze(qi, a1) o0 = MatMul(qr, sn) "
            f"o1 = Squeeze(o0, a1) o2 = Add(o1, o1) o = Where({self.truth}, o1, o2) }}>"
        )


def limit(number: int, comparison: str, value: str = "i") -> str:
    return f"e = Constant<value_int={number}>() b = {comparison}({value}, e) c = Not(b) "


def chain(count: int, number: int) -> str:
    """So many differences one after the other."""
    steps = "".join(f"x{place + 1} = Sub(x{place}, w) " for place in range(count))
    return f"w = Constant<value_int={number}>() x0 = Identity(i) {steps}"


BRANCH = (
    "e = Constant<value_int=2>() b = Greater(i, e) c = If(b) <then_branch = then () => (bool ct) { "
    f"{chain(5, 13)} z = Constant<value_int=0>() bt = Greater(x5, z) ct = Not(bt) }}, "
    "else_branch = other () => (bool ce) { ce = Identity(go) }> "
)
LEFT = {
    "the last places are one": Body("e = Constant<value_int=50>() p = Min(i, e) ", place="p"),
    "beyond a place": Body(limit(61, "Greater"), truth="c"),
    "a chain of ones": Body(chain(12, 1) + limit(0, "Greater", "x12"), truth="c"),
}
LIMITED = {
    "beyond the last iteration that is run": Body(limit(63, "Greater"), truth="c", right=64),
    "the last place that is run": Body("e = Constant<value_int=63>() p = Min(i, e) ", place="p", right=64),
    "a chain of one number": Body(chain(5, 13) + limit(0, "Greater", "x5"), truth="c", right=64),
    "a chain from the number of tokens": Body(
        chain(3, 25).replace("Identity(i)", "Identity(trips)") + limit(0, "Equal", "x3"), truth="c", right=64
    ),
    "a chain in a branch that some iterations take": Body(BRANCH, truth="c", right=64),
    "a number that counts from below 0 on": Body(limit(60, "Equal", "counted"), truth="c", start=-6, right=64),
    "a number that counts from far on": Body(limit(910, "Greater", "counted"), truth="c", start=840, right=67),
}
RIGHT = {
    "every place": Body(""),
    "the place before the next one": Body("j = Add(i, one) p = Sub(j, one) ", place="p"),
    "a number that counts with the places": Body("", place="counted"),
}


HEADS = "ax1 = Constant<value_ints=[1]>() ax2 = Constant<value_ints=[2]>() rows = Constant<value_ints=[0]>() "
HELD = {
    "the last tokens of a window": (
        "float[90,2,4,6] held",
        "more = Unsqueeze(u, rows) next = Concat<axis=0>(later, more) sn = ReduceSum<keepdims=0>(next, rows) ",
        "y = Squeeze(yr, ax1) ",
    ),
    "an output that comes again": (
        "float[90,2,6] held",
        "sn = Add(s, u) ",
        "y0 = Squeeze(yr, ax1) more = Unsqueeze(y0, rows) next = Concat<axis=0>(later, more) "
        "old = Slice(held, rows, ax1, rows) old1 = Squeeze(old, rows) y = Add(y0, old1) ",
    ),
}
"""What a Scan carries beside its state, and the nodes that make the state and the output. It begins with zeros."""


@pytest.mark.parametrize("name", HELD)
def test_what_is_held_back(name: str) -> None:
    """For 90 tokens nothing shows of it: the rows that are read are zeros."""
    held, state, output = HELD[name]
    shape = held[held.index("[") : held.index("]") + 1]
    body = (
        f"sh = Constant<value_ints={shape}>() first = ConstantOfShape<value=float[1]{{0}}>(sh) "
        "last, all, y = Scan<num_scan_inputs=3, body = body "
        f"(float[2,4,6] s, {held}, float[2,4] qi, float[2,4] ki, float[2,6] vi) => "
        f"(float[2,4,6] sn, float{shape} next, float[2,6] y) {{ {HEADS} end = Constant<value_ints=[1000]>() "
        "kc = Unsqueeze(ki, ax2) vr = Unsqueeze(vi, ax1) u = MatMul(kc, vr) later = Slice(held, ax1, end, rows) "
        f"{state} qr = Unsqueeze(qi, ax1) yr = MatMul(qr, sn) {output} }}>(s0, first, q, k, v)"
    )
    proto = parse(body, inputs=INPUTS, outputs="float[T,2,6] y", opset=18)
    assert not fused(proto)[1].count("fused")


ROWS = "float[B,3,2,4] q, float[B,3,2,4] k, float[B,3,2,6] v"
TOKEN = "kc = Unsqueeze(ki, ax2) vr = Unsqueeze(vi, ax1) u = MatMul(kc, vr) sn = Add(s, u) qr = Unsqueeze(qi, ax1) "
ADDED_LATER = (
    "end = Constant<value_ints=[1000]>() later = Slice(held, ax1, end, rows) more = Unsqueeze(y0, rows) "
    "next = Concat<axis=0>(later, more) old = Slice(held, rows, ax1, rows) old1 = Squeeze(old, rows) y = Add(y0, old1) "
)
OF_A_BATCH = {
    "what comes out of the sixth sequence on": (5, ADDED_LATER, 0),
    "what comes out of the eleventh sequence on": (10, ADDED_LATER, 0),
    "what never comes out": (5, "next = Identity(held) y = Identity(y0) ", 1),
}
"""How many outputs a Scan over the batch holds back, and what it does with them."""


@pytest.mark.parametrize("name", OF_A_BATCH)
def test_what_is_held_back_of_a_batch(name: str) -> None:
    """A Scan over the sequences of a batch, of which the proof looks at five at most, with a Scan over tokens in it."""
    count, nodes, fusions = OF_A_BATCH[name]
    held = f"float[{count},3,2,6]"
    body = (
        f"sh = Constant<value_ints=[{count},3,2,6]>() first = ConstantOfShape<value=float[1]{{0}}>(sh) "
        f"zs = Constant<value_ints=[2,4,6]>() s0 = ConstantOfShape<value=float[1]{{0}}>(zs) {HEADS} "
        f"last, y = Scan<num_scan_inputs=3, body = batch ({held} held, float[3,2,4] qb, float[3,2,4] kb, "
        f"float[3,2,6] vb) => ({held} next, float[3,2,6] y) {{ s1, y0 = Scan<num_scan_inputs=3, body = token "
        "(float[2,4,6] s, float[2,4] qi, float[2,4] ki, float[2,6] vi) => (float[2,4,6] sn, float[2,6] o) { "
        f"{TOKEN} o0 = MatMul(qr, sn) o = Squeeze(o0, ax1) }}>(s0, qb, kb, vb) {nodes} }}>(first, q, k, v)"
    )
    proto = parse(body, inputs=ROWS, outputs="float[B,3,2,6] y", opset=18)
    result, report = fused(proto)
    assert report.count("fused") == fusions
    feeds = feeds_of(proto, {"B": 12})
    for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
        assert_same(got, wanted, TOLERANCE)


def test_what_a_sequence_holds_back() -> None:
    """A hundred zeros stand in a sequence, and each token adds what stands at its place: its own output comes again a
    hundred tokens later."""
    zeros = "".join(
        f"q{place + 1} = Loop(fifty, , q{place}) <body = zeros{place} (int64 i, bool go, seq(float[2,6]) r{place}) => "
        f"(bool on, seq(float[2,6]) t{place}) {{ on = Identity(go) t{place} = SequenceInsert(r{place}, zero) }}> "
        for place in range(2)
    )
    body = (
        f"{HEADS} fifty = Constant<value_int=50>() zs = Constant<value_ints=[2,6]>() "
        f"zero = ConstantOfShape<value=float[1]{{0}}>(zs) q0 = SequenceEmpty<dtype=1>() {zeros} "
        "n = Shape<start=0,end=1>(q) trips = Squeeze(n, rows) s1, list, y = Loop(trips, , s0, q2) <body = body "
        "(int64 i, bool go, float[2,4,6] s, seq(float[2,6]) held) => "
        "(bool on, float[2,4,6] sn, seq(float[2,6]) next, float[2,6] o) { on = Identity(go) "
        f"qi = Gather(q, i) ki = Gather(k, i) vi = Gather(v, i) {TOKEN} o0 = MatMul(qr, sn) o1 = Squeeze(o0, ax1) "
        "next = SequenceInsert(held, o1) all = ConcatFromSequence<axis=0,new_axis=1>(held) old = Gather(all, i) "
        "o = Add(o1, old) }>"
    )
    proto = parse(body, inputs=INPUTS, outputs=OUTPUTS, opset=18)
    assert not fused(proto)[1].count("fused")


GO = "on = Identity(go) "
COUNT = "count = Constant<value_int=0>() "
CARRIED = {
    "numbers in a sequence": (
        f"{COUNT} pair = SequenceConstruct(count, count) ",
        "pair",
        "seq(int64) c",
        "seq(int64) cn",
        "both = ConcatFromSequence<axis=0,new_axis=1>(c) x = Gather(both, zero) other = Gather(both, one) "
        "next = Add(x, one) cn = SequenceConstruct(other, next) ",
    ),
    "truths in a sequence": (
        "true = Constant<value=bool {1}>() truths = SequenceConstruct("
        + ", ".join(["true"] * 80)
        + ") false = Constant<value=bool {0}>() ",
        "truths",
        "seq(bool) c",
        "seq(bool) cn",
        "all = ConcatFromSequence<axis=0,new_axis=1>(c) here = Gather(all, i) cn = SequenceInsert(c, false) "
        "x = Where(here, zero, far) ",
    ),
    "rows that grow every other time": (
        "row = Slice(k, rows, ax1, rows) ",
        "row, row",
        "float[X,2,4] c, float[Y,2,4] d",
        "float[V,2,4] cn, float[W,2,4] dn",
        "cn = Identity(d) new = Unsqueeze(ki, rows) dn = Concat<axis=0>(c, new) n = Shape<start=0,end=1>(c) "
        "x = Squeeze(n, rows) ",
    ),
    "a loop that counts the half of the iterations": (
        COUNT,
        "count",
        "int64 c",
        "int64 cn",
        "cn = Identity(c) b0 = Less(zero, i) x = Loop(, b0, zero) <body = half (int64 j, bool go2, int64 h) => "
        "(bool on2, int64 h1) { h1 = Add(h, one) h2 = Add(h1, h1) on2 = Less(h2, i) }> ",
    ),
}
"""What a Loop carries beside its state, and a number in its body: when it reaches 40, the state is doubled."""


@pytest.mark.parametrize("name", CARRIED)
def test_numbers_that_reach_another_one_late(name: str) -> None:
    first, states, inputs, outputs, nodes = CARRIED[name]
    lasts = ", ".join(f"last{place}" for place in range(states.count(",") + 1))
    body = (
        f"{HEADS} {first} zero = Constant<value_int=0>() one = Constant<value_int=1>() e = Constant<value_int=40>() "
        "far = Constant<value_int=50>() n0 = Shape<start=0,end=1>(q) trips = Squeeze(n0, rows) "
        f"s1, {lasts}, y = Loop(trips, , s0, {states}) <body = body (int64 i, bool go, float[2,4,6] s2, {inputs}) => "
        f"(bool on, float[2,4,6] sn, {outputs}, float[2,6] o) {{ {GO} qi = Gather(q, i) ki = Gather(k, i) "
        f"vi = Gather(v, i) {nodes} is_late = GreaterOrEqual(x, e) twice = Add(s2, s2) s = Where(is_late, twice, s2) "
        f"{TOKEN} o0 = MatMul(qr, sn) o = Squeeze(o0, ax1) }}>"
    )
    proto = parse(body, inputs=INPUTS, outputs=OUTPUTS, opset=18)
    assert not fused(proto)[1].count("fused")


TRUTH = (
    "is_late = Loop(times, , no) <body = late (int64 j, bool go, bool t) => (bool on, bool tn) { on = Identity(go) "
    "tn = Equal(j, one) }> "
)
HALF = (
    "start = Less(zero, n) x = Loop(, start, zero) <body = half (int64 j, bool go, int64 h) => (bool on, int64 h1) { "
    "h1 = Add(h, one) h2 = Add(h1, h1) on = Less(h2, n) }> "
)
BEFORE = {
    "a loop for each fifty tokens": (TRUTH, "is_late2 = Identity(is_late) "),
    "a loop that counts the half of the tokens": (HALF, "is_late2 = GreaterOrEqual(x, e) "),
}
"""A loop in front of the Scan over the tokens, and what the body of that one makes of its result."""


@pytest.mark.parametrize("name", BEFORE)
def test_a_loop_whose_result_a_body_reads(name: str) -> None:
    """The truth holds from a hundred tokens on, or from eighty."""
    nodes, read = BEFORE[name]
    body = (
        f"{HEADS} zero = Constant<value_int=0>() one = Constant<value_int=1>() e = Constant<value_int=40>() "
        "fifty = Constant<value_int=50>() no = Constant<value=bool {0}>() n0 = Shape<start=0,end=1>(q) "
        f"n = Squeeze(n0, rows) times = Div(n, fifty) {nodes} s1, y = Scan<num_scan_inputs=3, body = token "
        "(float[2,4,6] s2, float[2,4] qi, float[2,4] ki, float[2,6] vi) => (float[2,4,6] sn, float[2,6] o) { "
        f"{read} twice = Add(s2, s2) s = Where(is_late2, twice, s2) {TOKEN} o0 = MatMul(qr, sn) "
        "o = Squeeze(o0, ax1) }>(s0, q, k, v)"
    )
    proto = parse(body, inputs=INPUTS, outputs=OUTPUTS, opset=18)
    assert not fused(proto)[1].count("fused")


HOT = "hot = Equal(places, n) "
TABLES = {
    "at the number of tokens": (60, "p = Min(n, last) x = Gather(table, p) "),
    "a row": (
        60,
        "p = Min(n, last) p0 = Unsqueeze(p, rows) p1 = Add(p0, ax1) x0 = Slice(table, p0, p1, rows) "
        "x = Squeeze(x0, rows) ",
    ),
    "behind as many zeros": (
        60,
        "zeros = ConstantOfShape<value=int64[1]{0}>(n0) c = Concat<axis=0>(zeros, table) x = Gather(c, last) ",
    ),
    "a product with the hot place": (
        100,
        f"{HOT} one0 = Cast<to=7>(hot) marked = Mul(one0, table) x = ReduceSum<keepdims=0>(marked, rows) ",
    ),
    "both are true": (
        100,
        f"{HOT} t = Cast<to=9>(table) both = And(hot, t) marked = Cast<to=7>(both) "
        "x = ReduceSum<keepdims=0>(marked, rows) ",
    ),
    "what the hot place names": (
        100,
        f"{HOT} none = Sub(places, places) named = Where(hot, table, none) place = Constant<value_int=37>() "
        "x = Gather(named, place) ",
    ),
}
"""What a body reads of a table with a 1 at the place 37, and zeros."""


@pytest.mark.parametrize("name", TABLES)
def test_a_table_that_a_body_reads(name: str) -> None:
    """Where the element is 1, the state is doubled: for 37 tokens, or 22."""
    size, nodes = TABLES[name]
    table = ",".join(str(int(place == 37)) for place in range(size))
    body = (
        f"{HEADS} table = Constant<value_ints=[{table}]>() last = Constant<value_int={size - 1}>() "
        f"places = Constant<value_ints=[{','.join(map(str, range(size)))}]>() one = Constant<value_int=1>() "
        "s1, y = Scan<num_scan_inputs=3, body = token "
        "(float[2,4,6] s2, float[2,4] qi, float[2,4] ki, float[2,6] vi) => (float[2,4,6] sn, float[2,6] o) { "
        f"n0 = Shape<start=0,end=1>(q) n = Squeeze(n0, rows) {nodes} hit = Equal(x, one) twice = Add(s2, s2) "
        f"s = Where(hit, twice, s2) {TOKEN} o0 = MatMul(qr, sn) o = Squeeze(o0, ax1) }}>(s0, q, k, v)"
    )
    proto = parse(body, inputs=INPUTS, outputs=OUTPUTS, opset=18)
    assert not fused(proto)[1].count("fused")


def test_rows_that_grow() -> None:
    """A Loop whose rows have other sizes in each iteration fails for two tokens, in ONNX Runtime and in the proof."""
    text = RIGHT["every place"].text()
    more = "start0 = Constant<value_int=0>() r = Range(start0, next, one) more = Cast<to=1>(r) o = "
    text = text.replace("last, y = Loop", "last, y, z = Loop").replace("float[2,6] o)", "float[2,6] o, float[R] more)")
    proto = parse(text.replace(" o = ", f" {more}"), inputs=INPUTS, outputs=f"{OUTPUTS}, float[T,R] z", opset=18)
    assert not fused(proto)[1].count("fused")


@pytest.mark.parametrize("name", LEFT)
def test_left(name: str) -> None:
    assert not fused(parse(LEFT[name].text(), inputs=INPUTS, outputs=OUTPUTS, opset=18))[1].count("fused")


@pytest.mark.parametrize("name", LIMITED | RIGHT)
def test_a_length(name: str) -> None:
    """The fused model gives what the original gives, or refuses."""
    body = (LIMITED | RIGHT)[name]
    proto = parse(body.text(), inputs=INPUTS, outputs=OUTPUTS, opset=18)
    result, report = fused(proto)
    assert report.count("fused") == 1
    for tokens in (1, 7, 64, 80):
        feeds = feeds_of(proto, {"T": tokens})
        if body.right and tokens > body.right:
            with refused("right_for_1_to_"):
                run(result, feeds)
            assert f"1 to {body.right};" in report.notes[0]
            continue
        for got, wanted in zip(run(result, feeds), run(proto, feeds), strict=True):
            assert_same(got, wanted, TOLERANCE)
            assert np.isfinite(wanted).all()
