"""Graphs that are a linear attention for some numbers of tokens, or of sequences, and compute something else for
others: they are left, or refuse the others."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from fa_compiler.passes.linear.lengths import Lengths, Verdict, right_lengths
from fa_compiler.passes.linear.meetings import Numbers
from tests.passes.running import assert_same, fused, parse, run

TOLERANCE = 1e-4
"""float32 sums over up to 501 tokens, in another order, without a decay."""
INPUTS = "float[1,2,4,6] s0, float[1,2,T,4] q, float[1,2,T,4] k, float[1,2,T,6] v"
TABLE_INPUTS = ", float[500] table500, float[30000] table30000, float[200] table200, float[97] table97"
OUTPUTS = "float[1,2,U,6] y, float[1,2,4,6] s1"
BEFORE = (
    "ax2 = Constant<value_ints=[2]>() ax3 = Constant<value_ints=[3]>() zero1 = Constant<value_ints=[0]>() "
    "one1 = Constant<value_ints=[1]>() end = Constant<value_ints=[100000]>() zero = Constant<value_int=0>() "
    "one = Constant<value_int=1>() h = Constant<value_int=100>() hs = Constant<value_ints=[100]>() "
    "two = Constant<value_float=2.0>() onef = Constant<value_float=1.0>() all = Shape(q) "
    "t = Slice(all, ax2, ax3, zero1) ts = Squeeze(t, zero1) tf = Cast<to=1>(ts) r = Range(zero, ts, one) "
    "rc = Unsqueeze(r, one1) kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) m0 = Trilu<upper=0>(s, zero) "
)
ATTENTION = "y0 = MatMul(m, v) y1 = MatMul(q, s0) o = Add(y0, y1) u = MatMul(kt, v) s1 = Add(s0, u) o2 = Mul(o, two) "
LATER = "y = Where(c, o, o2) "
GROWN = "f = Add(more, onef) y = Mul(o, f) "
ONES = "w = ConstantOfShape<value=float[1]{1}>(t) "
FIRST_ROWS = "b = Slice(x, zero1, t, zero1) more = Unsqueeze(b, one1) " + GROWN
CUT = "n = Shape<start=2,end=3>(a) df = Sub(t, n) z = Constant<value_ints=[0,0,0,0,0,0]>() "
PADDED = CUT + "p = Concat<axis=0>(z, df, zero1) y = Pad(a, p) "
TABLE = (
    "row = Constant<value_ints=[37]>() w = ConstantOfShape<value=float[1]{0}>(hs) "
    "w1 = ConstantOfShape<value=float[1]{1}>(t) "
)
PAD = "d = Sub(hs, t) p = Concat<axis=0>(zero1, d) x = Pad(w1, p) "
SEVEN_ROWS = "w = Constant<value_ints=[7]>() g = Concat<axis=0>(w, t) a0 = Expand(onef, g) "
SQUARE = "w = Concat<axis=0>(t, t) a0 = Expand(onef, w) "
FLAT = "w1 = Constant<value_ints=[-1]>() a = Reshape(a0, w1) "
SIZE = "n = Shape(a) x = Squeeze(n, zero1) "
IS = "e = Constant<value_int={}>() ne = Equal(x, e) c = Not(ne) " + LATER
NEGATIVE = "ne = Less(x, zero) c = Not(ne) " + LATER
QUOTIENTS = "w = Constant<value_int=8>() w9 = Constant<value_int=9>() a = Div(ts, w) "
SIXTY_FOURTHS = (
    "w64 = Constant<value_int=64>() w = Constant<value_int=30>() w7 = Constant<value_int=7>() "
    "w57 = Constant<value_int=57>() a = Div(rc, w64) "
)
THREE_MOD_97 = "w = Constant<value_int=3>() w97 = Constant<value_int=97>() a = Mul(t, w) i = Mod(a, w97) "
IS_1001, IS_40000 = IS.format(1001), IS.format(40_000)
OTHERS = {
    "the end of a Slice": "a = Slice(o, zero1, hs, ax2) b = Slice(o2, hs, end, ax2) y = Concat<axis=2>(a, b) ",
    "an end from behind": "g = Neg(hs) a = Slice(o2, zero1, g, ax2) b = Slice(o, g, end, ax2) "
    "y = Concat<axis=2>(a, b) ",
    "a place": "i = Add(hs, one1) a = Slice(o, hs, i, ax2) b = ReduceSum(a, ax2) y = Add(o, b) ",
    "a comparison": "c = Less(rc, h) " + LATER,
    "a computed number": "w = Constant<value_int=50>() w2 = Add(w, w) c = Less(rc, w2) " + LATER,
    "a float": "w = Cast<to=1>(h) rf = Cast<to=1>(rc) c = Less(rf, w) " + LATER,
    "a scaled float": "w = Constant<value_float=0.01>() rf = Cast<to=1>(rc) x = Mul(rf, w) c = Less(x, onef) " + LATER,
    "a number of chunks": "w = Constant<value_int=4>() d = Div(rc, h) c = Less(d, w) " + LATER,
    "one length": "w = Constant<value_int=77>() e = Constant<value_int=30>() x = Add(ts, e) ne = Equal(x, w) "
    "c = Not(ne) " + LATER,
    "a product": "w = Constant<value_int=7>() x = Mul(rc, w) e = Constant<value_int=1000>() c = Less(x, e) " + LATER,
    "a square": "x = Mul(rc, rc) w = Constant<value_int=10000>() c = Less(x, w) " + LATER,
    "the size of a head": "vs = Shape<start=3,end=4>(v) w = Mul(vs, vs) c = Less(rc, w) " + LATER,
    "a Range": "x = Max(ts, h) e = Range(h, x, one) n = Shape(e) more = Cast<to=1>(n) " + GROWN,
    "a minimum": "x = Min(ts, h) e = Sub(ts, x) more = Cast<to=1>(e) " + GROWN,
    "a rounded length": "w = Constant<value_float=0.01>() x = Mul(tf, w) more = Floor(x) " + GROWN,
    "a root": "w = Constant<value_float=10.0>() rf = Cast<to=1>(rc) x = Sqrt(rf) c = Less(x, w) " + LATER,
    "a quotient": "w = Constant<value_float=1000.0>() e = Constant<value_float=10.0>() x = Div(w, tf) c = Less(e, x) "
    + LATER,
    "a truth value": "d = Div(ts, h) nc = Cast<to=9>(d) c = Not(nc) " + LATER,
    "a remainder": "i = Mod(r, h) y = Gather<axis=2>(o, i) ",
    "a least index": "i = Min(r, h) y = Gather<axis=2>(o, i) ",
    "a column": "e = Constant<value_int=128>() p = Constant<value_floats=[1.0,2.0]>() x = OneHot<axis=-1>(r, e, p) "
    "w = Gather<axis=1>(x, h) f = Unsqueeze(w, one1) y = Mul(o, f) ",
    "a diagonal": "tt = Concat<axis=0>(t, t) x = Expand(onef, tt) g = Neg(h) b = Trilu<upper=0>(x, g) "
    "more = ReduceSum(b, one1) " + GROWN,
    "a window": "y = Identity(o) ",
    "pads in front": ONES + "p = Concat<axis=0>(hs, zero1) x = Pad(w, p) " + FIRST_ROWS,
    "rows in front": ONES + "e = ConstantOfShape<value=float[1]{0}>(hs) x = Concat<axis=0>(e, w) " + FIRST_ROWS,
    "the diagonal of EyeLike": "tt = Concat<axis=0>(t, t) x = Expand(onef, tt) b = EyeLike<k=-100,dtype=1>(x) "
    "more = ReduceSum(b, one1) " + GROWN,
    "a table of one number": "e = Constant<value_ints=[128]>() w = Expand(h, e) b = Less(rc, w) g = Not(b) "
    "x = Cast<to=1>(g) more = ReduceSum(x, one1) " + GROWN,
    "rows of a table": "g = Gather(table500, r) more = Unsqueeze(g, one1) " + GROWN,
    "rows of a long table": "g = Gather(table30000, r) more = Unsqueeze(g, one1) " + GROWN,
    "the first rows of a long table": "g = Slice(table30000, zero1, t, zero1) more = Unsqueeze(g, one1) " + GROWN,
    "a column that is none": "e = Constant<value_int=90>() p = Constant<value_floats=[0.0,1.0]>() "
    "x = OneHot<axis=-1>(r, e, p) w = ReduceSum(x, one1) more = Sub(onef, w) " + GROWN,
    "a power": "w = Constant<value_float=0.5>() d = Div(rc, h) x = Pow(w, d) y = Mul(o, x) ",
    "a row of all": "tt = Concat<axis=0>(t, one1) x = Expand(onef, tt) w = Flatten<axis=-1>(x) "
    "a = Slice(w, hs, end, zero1) n = Shape<start=0,end=1>(a) more = Cast<to=1>(n) " + GROWN,
    "a difference as a truth value": "d = Sub(ts, h) c = Cast<to=9>(d) " + LATER,
    "a difference that is cut at 0": "d = Sub(ts, h) e = Max(d, zero) more = Cast<to=1>(e) " + GROWN,
    "a difference without its sign": "d = Sub(ts, h) e = Abs(d) x = Add(d, e) more = Cast<to=1>(x) " + GROWN,
    "a chain of differences": "w = Constant<value_int=40>() e = Constant<value_int=20>() a = Sub(ts, h) b = Sub(a, w) "
    "d = Sub(b, e) x = Max(d, zero) more = Cast<to=1>(x) " + GROWN,
    "a start that becomes positive": "d = Sub(t, hs) a = Slice(r, d, end, zero1) b = ReduceSum(a, zero1) "
    "x = ReduceSum(r, zero1) e = Sub(x, b) w = Add(e, zero1) more = Cast<to=1>(w) " + GROWN,
    "two multiples of the length": "w = Constant<value_int=3>() a = Mul(ts, w) b = Add(ts, h) c = Less(a, b) " + LATER,
    "a square and a multiple": "a = Mul(ts, h) b = Mul(ts, ts) c = Less(b, a) " + LATER,
    "a sum of all places": "w = Constant<value_int=5000>() a = ReduceSum<keepdims=0>(r, zero1) c = Less(a, w) " + LATER,
    "a power of 2 that is too large": "w = Constant<value_int=2>() x = Pow(w, ts) c = Greater(x, zero) " + LATER,
    "an exponential that is infinite": "x = Exp(tf) w = Constant<value_float=3e38>() c = Less(x, w) " + LATER,
    "a length in 8 bits": "w = Cast<to=3>(ts) x = Cast<to=7>(w) d = Sub(ts, x) more = Cast<to=1>(d) " + GROWN,
    "two quotients": "w = Constant<value_int=8>() e = Constant<value_int=9>() a = Div(ts, w) b = Div(a, e) "
    "c = Less(b, one) " + LATER,
    "a matrix of 100 columns": "tt = Concat<axis=0>(t, hs) x = Expand(onef, tt) b = EyeLike<dtype=1>(x) "
    "w = ReduceSum(b, one1) more = Sub(onef, w) " + GROWN,
    "rows put into a table": TABLE + "x = ScatterND(w, rc, w1) more = Gather(x, row) " + GROWN,
    "elements put into a table": TABLE + "x = ScatterElements(w, r, w1) more = Gather(x, row) " + GROWN,
    "two rows of a padded table": TABLE + PAD + "e = Add(row, one1) a = Gather(x, row) b = Gather(x, e) "
    "more = Sub(a, b) " + GROWN,
    "slices of a padded table": TABLE + PAD + "e = Add(row, one1) e1 = Add(e, one1) a = Slice(x, row, e) "
    "b = Slice(x, e, e1) more = Sub(a, b) " + GROWN,
    "a multiple that is one number": "w = Constant<value_int=7>() x = Mul(ts, w) " + IS_1001,
    "a multiple of a multiple": "w = Constant<value_int=7>() w1 = Constant<value_int=11>() x1 = Mul(ts, w) "
    "x = Mul(x1, w1) " + IS_1001,
    "multiples in a Range": "w = Constant<value_int=7>() w1 = Constant<value_int=7007>() x1 = Range(zero, w1, w) "
    "x = Gather(x1, ts) " + IS_1001,
    "the size of a Tile": "w = Constant<value_ints=[7]>() a = Tile(r, w) " + SIZE + IS_1001,
    "the size of seven copies": "a = Concat<axis=0>(r, r, r, r, r, r, r) " + SIZE + IS_1001,
    "two sizes that are merged": SEVEN_ROWS + FLAT + SIZE + IS_1001,
    "a number of elements": SEVEN_ROWS + "x = Size(a0) " + IS_1001,
    "a square number of elements": SQUARE + "x = Size(a0) " + IS_40000,
    "the size of a square that is flat": SQUARE + FLAT + SIZE + IS_40000,
    "what a scan counts": "w = Constant<value_ints=[50]>() x = ConstantOfShape<value=int64[1]{1}>(w) "
    "n = Scan<num_scan_inputs=1, body = counted (int64 b, int64 x0) => (int64 b2) { e = Less(b, ts) g = Cast<to=7>(e) "
    "b2 = Add(b, g) }>(zero, x) d = Sub(ts, n) more = Cast<to=1>(d) " + GROWN,
    "a quotient of a quotient, at a few lengths": QUOTIENTS + "x = Div(a, w9) " + IS.format(3),
    "a quotient of a quotient, for each row": QUOTIENTS.replace("ts", "rc") + "x = Div(a, w9) "
    "e = Constant<value_int=30>() c = Less(x, e) " + LATER,
    "a quotient of a quotient by the same number, for each row": "w = Constant<value_int=40>() a = Div(rc, w) "
    "b = Div(a, w) c = Less(b, one) " + LATER,
    "a quotient of a multiple of a quotient": "w = Constant<value_int=7>() w3 = Constant<value_int=3>() "
    "w5 = Constant<value_int=5>() w2 = Constant<value_int=2>() a = Mul(ts, w) b = Div(a, w3) d = Mul(b, w5) "
    "x = Div(d, w2) " + IS.format(582),
    "a remainder of a multiple": THREE_MOD_97 + "x = Squeeze(i, zero1) " + IS.format(41),
    "a place that is a remainder": THREE_MOD_97 + "g = Gather(table97, i) more = Squeeze(g, zero1) " + GROWN,
    "two remainders": QUOTIENTS + "a1 = Mod(ts, w) b1 = Mod(ts, w9) x1 = Constant<value_int=3>() x2 = Equal(a1, x1) "
    "x3 = Equal(b1, w) x4 = And(x2, x3) c = Not(x4) " + LATER,
    "a fourth power": "a = Mul(ts, ts) x = Mul(a, a) " + IS.format(71**4),
    "a sum of squares": "a = Mul(r, r) x = ReduceSum<keepdims=0>(a, zero1) " + IS.format(70 * 71 * 141 // 6),
    "a sum of sums": "a = CumSum(r, zero) x1 = CumSum(a, zero) w = Constant<value_ints=[-1]>() "
    "x2 = Slice(x1, w, end, zero1) x = Squeeze(x2, zero1) " + IS.format(69 * 70 * 71 // 6),
    "a multiple that wraps": f"w = Constant<value_int={1 << 60}>() x = Mul(ts, w) " + NEGATIVE,
    "a sum that wraps": f"w = Constant<value_int={(1 << 63) - 51}>() x = Add(ts, w) " + NEGATIVE,
    "a multiple that wraps in 32 bits": f"w = Constant<value_int={1 << 26}>() a = Mul(ts, w) b = Cast<to=6>(a) "
    "x = Cast<to=7>(b) " + NEGATIVE,
    "a large multiple": f"w = Constant<value_int={1 << 40}>() x = Mul(ts, w) " + IS.format(77 << 40),
    "a rounded float": "w = Constant<value_float=1073741824.0>() a = Add(tf, w) more = Sub(a, w) " + GROWN,
    "a power that becomes infinite": "w = Constant<value_float=0.5>() w0 = Constant<value_float=0.0>() a = Pow(w, tf) "
    "b = Reciprocal(a) more = Mul(b, w0) " + GROWN,
    "one place of a table": "g = Gather(table200, t) more = Squeeze(g, zero1) " + GROWN,
    "one row of a table": "e = Add(t, one1) g = Slice(table200, t, e, zero1) more = Squeeze(g, zero1) " + GROWN,
    "a window of a table": "e = Add(t, t) g = Slice(table200, t, e, zero1) "
    "more = ReduceSum<keepdims=0>(g, zero1) " + GROWN,
    "the column of a table": "e = Constant<value_int=200>() p = Constant<value_floats=[0.0,1.0]>() "
    "x = OneHot<axis=-1>(t, e, p) w = Mul(x, table200) more = ReduceSum<keepdims=0>(w) " + GROWN,
    "a table where a length is its place": "e = Constant<value_int=200>() p = Range(zero, e, one) x = Equal(ts, p) "
    "w0 = Constant<value_float=0.0>() w = Where(x, table200, w0) more = ReduceSum<keepdims=0>(w, zero1) " + GROWN,
    "every seventh of every fifth": "w7 = Constant<value_ints=[7]>() w5 = Constant<value_ints=[5]>() "
    "a0 = Slice(r, zero1, end, zero1, w7) a = Slice(a0, zero1, end, zero1, w5) " + SIZE + IS.format(7),
    "a loop that counts by doubling": "x = Loop(ts, , one) <body = doubled (int64 b, bool b1, int64 b2) => "
    "(bool b3, int64 b4) { b3 = Identity(b1) b4 = Add(b2, b2) }> " + NEGATIVE,
    "a loop that counts by sums": "x, x1 = Loop(ts, , zero, one) <body = doubled (int64 b, bool b1, int64 b2, int64 g) "
    "=> (bool b3, int64 b4, int64 b5) { b3 = Identity(b1) b4 = Identity(g) b5 = Add(b2, g) }> " + IS.format(10946),
}
TABLES = {"table500": (500, 300, 500), "table30000": (30_000, 25_000, 30_000), "table200": (200, 77, 78)}
TABLES |= {"table97": (97, 41, 42)}
"""Tables of 0, and of 1 between two rows."""
REFUSED = {
    "cut": "x = Min(t, hs) a = Slice(o, zero1, x, ax2) " + PADDED,
    "cut at a number": "a = Slice(o, zero1, hs, ax2) " + PADDED,
    "a table": "w = ConstantOfShape<value=float[1]{1}>(hs) b = Slice(w, zero1, t, zero1) n = Shape(b) df = Sub(t, n) "
    "p = Concat<axis=0>(zero1, df) x = Pad(b, p) f = Unsqueeze(x, one1) y = Mul(o, f) ",
}


def model(after: str, window: bool = False) -> onnx.ModelProto:
    mask = "w99 = Constant<value_int=-99>() m = Trilu<upper=1>(m0, w99) " if window else "m = Identity(m0) "
    proto = parse(BEFORE + mask + ATTENTION + after, inputs=INPUTS + TABLE_INPUTS, outputs=OUTPUTS, opset=18)
    for name, (rows, first, last) in TABLES.items():
        (given,) = [each for each in proto.graph.input if each.name == name]
        proto.graph.input.remove(given)
        places = np.arange(rows)
        table = ((places >= first) & (places < last)).astype(np.float32)
        if name in after:
            proto.graph.initializer.append(onnx.numpy_helper.from_array(table, name))
    return proto


def feeds(tokens: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(tokens)
    shapes = {"q": (tokens, 4), "k": (tokens, 4), "v": (tokens, 6), "s0": (4, 6)}
    return {name: rng.standard_normal((1, 2, *shape)).astype(np.float32) for name, shape in shapes.items()}


def same_at(proto: onnx.ModelProto, result: onnx.ModelProto, tokens: int) -> None:
    for got, wanted in zip(run(result, feeds(tokens)), run(proto, feeds(tokens)), strict=True):
        assert_same(got, wanted, TOLERANCE)


def test_what_is_right_everywhere() -> None:
    proto = model("y = Identity(o) ")
    result, report = fused(proto)
    assert report.count("fused") == 1 and not report.notes
    for tokens in (1, 100, 101, 501):
        same_at(proto, result, tokens)


DISTANCES = "r0 = Unsqueeze(r, zero1) r1 = Unsqueeze(r, one1) ds = Sub(r1, r0) "
CUBED = "rr = Mul(r, r) x = Mul(rr, r) "
POSITIONS = {
    "remainders by several numbers": "w11 = Constant<value_int=11>() w13 = Constant<value_int=13>() "
    "w17 = Constant<value_int=17>() a = Mod(r, w11) b = Mod(r, w13) d = Mod(r, w17) c11 = Constant<value_int=4>() "
    "c13 = Constant<value_int=5>() c17 = Constant<value_int=4>() ca = Equal(a, c11) cb = Equal(b, c13) "
    "cd = Equal(d, c17) cab = And(ca, cb) c = And(cab, cd) ",
    "a product that wraps": "w = Constant<value=int32 {2097152}>() n = Constant<value=int32 {0}>() r3 = Cast<to=6>(r) "
    "x = Mul(r3, w) c = Less(x, n) ",
    "large multiples": "w = Constant<value_int=10000000000>() e = Constant<value_int=15000000000000>() x = Mul(r, w) "
    "c = Greater(x, e) ",
    "a cube": CUBED + "e = Constant<value_int=4000000000>() c = Greater(x, e) ",
    "a quotient of a quotient": "w = Constant<value_int=40>() a = Div(r, w) b = Div(a, w) c = Greater(b, zero) ",
    "a remainder of a multiple": "w = Constant<value_int=7919>() e = Constant<value_int=5003>() a = Mul(r, w) "
    "b = Mod(a, e) x = Constant<value_int=1378>() c = Equal(b, x) ",
    "floats that become infinite": "w = Constant<value_float=3e35>() rf = Cast<to=1>(r) x = Mul(rf, w) d = Sub(x, x) "
    "e = Equal(d, d) c = Not(e) ",
    "a sum of remainders": "w = Constant<value_int=7>() e = Constant<value_int=4000>() a = Mod(r, w) "
    "x = CumSum(a, zero) c = Greater(x, e) ",
    "a product of two": DISTANCES + "e = Constant<value_int=1562501>() x = Mul(r0, r1) c = Equal(x, e) ",
    "a sum of two": DISTANCES + "e = Constant<value_int=2900>() x = Add(r0, r1) c = Greater(x, e) ",
    "multiples of a sum": DISTANCES + "e = Constant<value_int=11000>() a = Add(r0, r1) b = Add(a, a) x = Add(b, b) "
    "c = Greater(x, e) ",
    "a fraction": "w = Constant<value_float=1.0007>() rf = Cast<to=1>(r) x = Mul(rf, w) a = Floor(x) e = Equal(a, rf) "
    "c = Not(e) ",
    "both ends": "e = Constant<value_int=700>() a = Sub(ts, r) x = Min(a, r) c = Greater(x, e) ",
    "a distance and a place": DISTANCES + "e = Constant<value_int=700>() ca = Greater(ds, e) cb = Greater(r0, e) "
    "c = And(ca, cb) ",
    "a product with a number of chunks": "w = Constant<value_int=300>() e = Constant<value_int=5000>() "
    "a = Div(ts, w) x = Mul(a, r) c = Greater(x, e) ",
    "rows of a table": "w = Constant<value_int=64>() a = Div(r, w) x = Gather(chunks, a) c = Greater(x, onef) ",
}


@pytest.mark.parametrize("name", POSITIONS)
def test_something_else_at_a_position(name: str) -> None:
    """At positions that are not looked at: nothing is fused, or their lengths are refused."""
    body = BEFORE + POSITIONS[name] + "s2 = Add(s, s) s3 = Where(c, s2, s) m = Trilu<upper=0>(s3) y = MatMul(m, v) "
    inputs, table = "float[1,2,T,4] q, float[1,2,T,4] k, float[1,2,T,6] v", np.where(np.arange(60) == 24, 2, 1)
    proto = parse(body, inputs=inputs + ", float[60] chunks", outputs="float[1,2,U,6] y", opset=18)
    del proto.graph.input[-1]
    proto.graph.initializer.append(onnx.numpy_helper.from_array(table.astype(np.float32), "chunks"))
    result, report = fused(proto)
    if report.count("fused"):
        rng, shapes = np.random.default_rng(5), {"q": (1, 2, 1700, 4), "k": (1, 2, 1700, 4), "v": (1, 2, 1700, 6)}
        given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        with pytest.raises(Exception, match="out of bounds|out of data bounds"):
            run(result, given)


@pytest.mark.parametrize("name", OTHERS)
def test_something_else_at_a_length(name: str) -> None:
    _, report = fused(model(OTHERS[name], name == "a window"))
    assert not report.count("fused")


@pytest.mark.parametrize("name", REFUSED)
def test_zeros_beyond_a_length(name: str) -> None:
    """That is how a file with a fixed number of chunks ends. The numbers that it should have given are unknown."""
    proto = model(REFUSED[name])
    result, report = fused(proto)
    assert any("1 to 100; other numbers are refused" in note for note in report.notes)
    for tokens in (1, 64, 100):
        same_at(proto, result, tokens)
    with pytest.raises(Exception, match="out of bounds|out of data bounds"):
        run(result, feeds(101))


def test_a_number_beyond_what_is_looked_at() -> None:
    """Where a table ends that is too long to be tried, nothing is claimed of longer sequences."""
    table = (
        "e = Constant<value_ints=[30000]>() w = ConstantOfShape<value=float[1]{1}>(e) b = Slice(w, zero1, t, zero1) "
    )
    proto = model(table + "f = Unsqueeze(b, one1) y = Mul(o, f) ")
    result, report = fused(proto)
    assert any("1 to 29998; other numbers are refused" in note for note in report.notes)
    same_at(proto, result, 300)


FAR = {
    "a quotient of a quotient": (QUOTIENTS + "x = Div(a, w9) " + IS.format(30), 2159),
    "a quotient without a remainder": (
        "w = Constant<value_int=3607>() a = Mod(ts, w) w7 = Constant<value_int=7>() x = Div(a, w7) " + IS.format(400),
        2799,
    ),
    "every twentieth row, without the first 300": (
        "w = Constant<value_ints=[300]>() w20 = Constant<value_ints=[20]>() w60 = Constant<value_ints=[60]>() "
        f"e = Constant<value_ints=[{(1 << 63) - 1}]>() a = Slice(o, w, e, ax2, w20) b = Slice(a, w60, e, ax2) "
        "f = ReduceSum(b, ax2) y = Add(o, f) ",
        1499,
    ),
    "a quotient less a number, for each row": (SIXTY_FOURTHS + "b = Sub(a, w) c = Less(b, w7) " + LATER, 1471),
    "a quotient and a number, for each row": (SIXTY_FOURTHS + "b = Add(a, w) c = Less(b, w57) " + LATER, 1727),
}


@pytest.mark.parametrize("name", FAR)
def test_a_length_too_long_to_be_tried(name: str) -> None:
    """Another length is claimed only below the one at which a number turns."""
    body, before = FAR[name]
    result, report = fused(model(body))
    assert any(f"1 to {before - 1}; other numbers are refused" in note for note in report.notes)
    with pytest.raises(Exception, match="out of bounds|out of data bounds"):
        run(result, feeds(before + 1))


def test_a_quotient_by_what_may_be_zero() -> None:
    """x n / n is NaN where n is 0, and no x."""
    proto = model("w = Relu(q) n = Slice(w, zero1, one1, ax3) a = Mul(o, n) y = Div(a, n) ")
    given, result = feeds(9), fused(proto)[0]
    assert (given["q"][..., 0] < 0).any()
    for got, wanted in zip(run(result, given), run(proto, given), strict=True):
        assert_same(got, wanted, TOLERANCE)


def test_a_number_that_meets_the_batch() -> None:
    """The first eight sequences only."""
    body = (
        "n = Constant<value_ints=[8]>() end = Constant<value_ints=[100000]>() zero = Constant<value_ints=[0]>() "
        "ax2 = Constant<value_ints=[2]>() ax3 = Constant<value_ints=[3]>() two = Constant<value_float=2.0>() "
        "kw = Unsqueeze(k, ax3) vw = Unsqueeze(v, ax2) u = Mul(kw, vw) s1 = Add(s0, u) qw = Unsqueeze(q, ax2) "
        "ow = MatMul(qw, s1) o = Squeeze(ow, ax2) o2 = Mul(o, two) a = Slice(o, zero, n, zero) "
        "b = Slice(o2, n, end, zero) y = Concat<axis=0>(a, b) "
    )
    inputs = "float[B,2,4,6] s0, float[B,2,4] q, float[B,2,4] k, float[B,2,6] v"
    proto = parse(body, inputs=inputs, outputs="float[C,2,6] y, float[B,2,4,6] s1", opset=18)
    assert not fused(proto)[1].count("fused")


NINE = "".join(f"r{place + 1} = Sub(r{place}, one) " for place in range(9))
ROWS = "x1 = Not(x) ax123 = Constant<value_ints=[1,2,3]>() c = Unsqueeze(x1, ax123) "
BATCHES = {
    "beyond the fifth row": "rb = Range(zero, w, one) w4 = Constant<value_int=4>() x = Greater(rb, w4) " + ROWS,
    "rows behind a chain of ones": f"r0 = Range(zero, w, one) {NINE} x = Greater(r9, zero) " + ROWS,
    "one": "x = Equal(w, one) c = Not(x) ",
    "a remainder of 1": "w3 = Constant<value_int=3>() a = Mod(w, w3) x = Equal(a, one) c = Not(x) ",
    "two differences": "w3 = Constant<value_int=3>() a = Sub(w, w3) b = Sub(a, w3) x = Equal(b, one) c = Not(x) ",
    "a multiple that wraps": f"w60 = Constant<value_int={1 << 60}>() a = Mul(w, w60) x = Less(a, zero) c = Not(x) ",
}


@pytest.mark.parametrize("name", BATCHES)
def test_something_else_for_a_batch(name: str) -> None:
    size = "bs = Slice(all, zero1, one1, zero1) w = Squeeze(bs, zero1) "
    body = BEFORE + "m = Identity(m0) " + ATTENTION + size + BATCHES[name] + LATER
    inputs, outputs = (text.replace("[1,2,", "[B,2,") for text in (INPUTS, OUTPUTS))
    assert not fused(parse(body, inputs=inputs, outputs=outputs, opset=18))[1].count("fused")


def test_rows_behind_a_chain_of_differences() -> None:
    """With so many heads 1,001 tokens are too many to be looked at. Of 498 tokens one row differs."""
    chain = "".join(f"r{place + 1} = Sub(r{place}, w7) " for place in range(71))
    rows = f"w7 = Constant<value_int=7>() r0 = Identity(rc) {chain} x = Greater(r71, zero) c = Not(x) "
    body = BEFORE + "m = Identity(m0) " + ATTENTION + rows + LATER
    inputs, outputs = (text.replace("[1,2,", "[1,8,") for text in (INPUTS, OUTPUTS))
    assert not fused(parse(body, inputs=inputs, outputs=outputs, opset=18))[1].count("fused")


ITERATIONS = {
    "a quotient of a quotient": "a = Div(i, w8) b = Div(a, w9) ne = Equal(b, one) y0 = Where(ne, o2, o) "
    "g2 = Identity(g) ",
    "a number that is doubled": "ne = Less(g, zero) y0 = Where(ne, o2, o) a = Add(g, g) g2 = Add(a, one) ",
}


@pytest.mark.parametrize("name", ITERATIONS)
def test_something_else_in_an_iteration(name: str) -> None:
    """More iterations than are evaluated."""
    before = (
        "zero = Constant<value_int=0>() one = Constant<value_int=1>() w8 = Constant<value_int=8>() "
        "w9 = Constant<value_int=9>() two = Constant<value_float=2.0>() ax2 = Constant<value_ints=[2]>() "
        "one1 = Constant<value_ints=[1]>() all = Shape<end=1>(q) t = Squeeze(all) "
    )
    loop = (
        "s1, last, ys = Loop(t, , s0, zero) <body = token (int64 i, bool on, float[1,2,4,6] s, int64 g) => "
        "(bool on2, float[1,2,4,6] s2, int64 g2, float[1,2,6] y0) { on2 = Identity(on) qi = Gather(q, i) "
        "ki = Gather(k, i) vi = Gather(v, i) kw = Unsqueeze(ki, ax2) vw = Unsqueeze(vi, one1) u = Mul(kw, vw) "
        "s2 = Add(s, u) qw = Unsqueeze(qi, one1) ow = MatMul(qw, s2) o = Squeeze(ow, ax2) o2 = Mul(o, two) "
        f"{ITERATIONS[name]} }}> "
        "y = Squeeze(ys, one1) "
    )
    inputs = "float[1,2,4,6] s0, float[T,2,4] q, float[T,2,4] k, float[T,2,6] v"
    proto = parse(before + loop, inputs=inputs, outputs="float[U,2,6] y, float[1,2,4,6] s1", opset=18)
    assert not fused(proto)[1].count("fused")


CHUNKS = {
    "a chain of differences": "w = Constant<value_int=11>() "
    + "".join(f"i{place + 1} = Sub({'i' if not place else f'i{place}'}, w) " for place in range(6))
    + "e = Equal(i6, zero) ",
    "two pieces": "w = Constant<value_int=50>() w16 = Constant<value_int=16>() a = Greater(i, w) b = Sub(i, w) "
    "d = Where(a, b, zero) e = Equal(d, w16) ",
    "a product that wraps": "w = Constant<value=int32 {33554432}>() n3 = Constant<value=int32 {0}>() "
    "j = Cast<to=6>(i) a = Mul(j, w) e = Less(a, n3) ",
}


@pytest.mark.parametrize("name", CHUNKS)
def test_something_else_in_a_chunk(name: str) -> None:
    """A loop over chunks of eight tokens: few of 536 tokens are in the 67th iteration."""
    names = "qkv"
    before = (
        "zero = Constant<value_int=0>() zero1 = Constant<value_ints=[0]>() eight = Constant<value_ints=[8]>() "
        "all = Shape<end=1>(q) a7 = Mod(all, eight) a8 = Sub(eight, a7) a9 = Mod(a8, eight) "
        "z3 = Constant<value_ints=[0,0,0]>() z2 = Constant<value_ints=[0,0]>() pads = Concat<axis=0>(z3, a9, z2) "
        "wq = Constant<value_ints=[-1,8,2,4]>() wk = Identity(wq) wv = Constant<value_ints=[-1,8,2,6]>() "
        + "".join(f"{each}p = Pad({each}, pads) {each}c = Reshape({each}p, w{each}) " for each in names)
        + "n = Shape<end=1>(qc) t = Squeeze(n) "
    )
    loop = (
        "s1, yc = Loop(t, , s0) <body = chunk (int64 i, bool on, float[2,4,6] s) => "
        "(bool on2, float[2,4,6] s2, float[8,2,6] y0) { on2 = Identity(on) qi = Gather(qc, i) ki = Gather(kc, i) "
        f"vi = Gather(vc, i) {CHUNKS[name]} keeps = Not(e) kf = Cast<to=1>(keeps) x = Mul(s, kf) "
        "qt = Transpose<perm=[1,0,2]>(qi) kt = Transpose<perm=[1,2,0]>(ki) vt = Transpose<perm=[1,0,2]>(vi) "
        "m0 = MatMul(qt, kt) m = Trilu<upper=0>(m0) o0 = MatMul(m, vt) o1 = MatMul(qt, x) o = Add(o0, o1) "
        "u = MatMul(kt, vt) s2 = Add(x, u) y0 = Transpose<perm=[1,0,2]>(o) }> "
        "wy = Constant<value_ints=[-1,2,6]>() yf = Reshape(yc, wy) y = Slice(yf, zero1, all, zero1) "
    )
    inputs = "float[2,4,6] s0, float[T,2,4] q, float[T,2,4] k, float[T,2,6] v"
    proto = parse(before + loop, inputs=inputs, outputs="float[U,2,6] y, float[2,4,6] s1", opset=18)
    result, report = fused(proto)
    if report.count("fused"):
        rng = np.random.default_rng(5)
        shapes = {"s0": (2, 4, 6), "q": (536, 2, 4), "k": (536, 2, 4), "v": (536, 2, 6)}
        with pytest.raises(Exception, match="out of bounds|out of data bounds"):
            run(result, {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()})


MORE = {
    "few columns": "x = Constant<value_ints=[100]>() c = Less(n, x) y = Where(c, o, o2) ",
    "fewer columns than tokens": "x = Constant<value_ints=[20]>() e = Add(t, x) c = Less(n, e) y = Where(c, o, o2) ",
    "fewer columns, and 0": "c = Less(rc, n) z = Sub(o2, o2) y = Where(c, o, z) ",
}


@pytest.mark.parametrize("name", MORE)
def test_two_sizes_that_differ(name: str) -> None:
    """What holds where all open sizes are the same holds for no others."""
    body = BEFORE + "m = Identity(m0) " + ATTENTION + "n = Shape(more) " + MORE[name]
    proto = parse(body, inputs=INPUTS + ", float[M] more", outputs=OUTPUTS, opset=18)
    assert not fused(proto)[1].count("fused")


def looked(right: set[int], numbers: Numbers, unknown: int = 10**9, found: int = 5) -> Lengths | None:
    def look(length: int) -> Verdict:
        return Verdict.UNKNOWN if length >= unknown else Verdict.RIGHT if length in right else Verdict.FAILS

    return right_lengths(found, look, lambda: numbers)


def test_the_ends_of_ranges() -> None:
    every = {*range(1, 1000)}
    assert looked(every, Numbers()) == Lengths()
    assert looked(every, Numbers(compared={100}), 50) == Lengths(((1, 98),))
    assert looked({*range(65, 129)}, Numbers(divisors={64}, compared={128})) == Lengths(((65, 128),))
    assert looked({*range(8, 1000, 8)}, Numbers(divisors={8}), found=8) == Lengths(step=8)
    assert looked(every, Numbers(compared={*range(10, 900, 5)})) is None
