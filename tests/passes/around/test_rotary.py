"""Rotary positions in every spelling of the grammar, with the near misses that stay as they are."""

from __future__ import annotations

import onnx
import pytest

from fa_compiler.op_registry import DOMAIN
from fa_compiler.passes.answer.report import Code
from tests.passes.around.running import assert_equal, fused, only_line, operators, others, parse

BOUNDS = "int64[1] zero = {0}, int64[1] four = {4}, int64[1] eight = {8}, int64[1] last = {-1}, int64[1] far = {1000}, "
BOUNDS += "int64[1] heads = {1}, int64[1] behind = {2}, int64[4] whole = {0,0,0,8}, "
BOUNDS += "int64[5] paired = {0,0,0,4,2}, int64[1] minus = {-2}"
HEADS_FIRST = "float[B,6,S,8] x, float[B,1,S,8] c, float[B,1,S,8] s"
TOKENS_FIRST = "float[B,S,6,8] x, float[B,S,1,8] c, float[B,S,1,8] s"
OUT = "float[B,6,S,8] y"
HALVES = "a = Slice(x, zero, four, last) b = Slice(x, four, far, last) "
ROTATED = HALVES + "n = Neg(b) r = Concat<axis=-1>(n, a) "
PAIRS = "a = Slice(x, zero, far, last, behind) b = Slice(x, heads, far, last, behind) "
STACK = "p = Unsqueeze(n, last) q = Unsqueeze(a, last) t = Concat<axis=-1>(p, q) r = Reshape(t, whole) "
NEIGHBOURS = PAIRS + "n = Neg(b) " + STACK
REAL = "n1 = Mul(a, c) n2 = Mul(b, s) n = Sub(n1, n2) "
IMAGINARY = "i1 = Mul(b, c) i2 = Mul(a, s) i = Add(i1, i2) "
JOINED = "y = Concat<axis=-1>(n, i)"
STACKED = "p = Unsqueeze(n, last) q = Unsqueeze(i, last) t = Concat<axis=4>(p, q) y = Reshape(t, whole)"
HALF_TABLES = HEADS_FIRST.replace("S,8] c", "S,4] c").replace("S,8] s", "S,4] s")
HALF_TABLES_BEHIND = TOKENS_FIRST.replace("1,8]", "1,4]")
BEHIND = "float[B,S,6,8] y"
END = "u = Mul(x, c) v = Mul(r, s) y = Add(u, v)"
SHAPED = STACK.replace("Reshape(t, whole)", "Reshape(t, l)").replace(
    "r =", "d = Shape(t) k = Slice(d, zero, minus) l = Concat<axis=0>(k, last) r ="
)
PARTS = "a = Slice(z, zero, heads, last) b = Slice(z, heads, behind, last) "
NUMBERS = "z = Reshape(x, paired) " + PARTS + REAL + IMAGINARY + "t = Concat<axis=-1>(n, i) y = Reshape(t, whole)"
PAIRED = HALF_TABLES.replace("1,S,4]", "1,S,4,1]")
PAIRED_BEHIND = HALF_TABLES_BEHIND.replace("S,1,4]", "S,1,4,1]")


def model(body: str, inputs: str = HEADS_FIRST, outputs: str = OUT, opset: int = 20, more: str = "") -> onnx.ModelProto:
    return parse(body, inputs, outputs, opset, BOUNDS + (f", {more}" if more else ""))


SPELLINGS = {
    "1, 3, 5, 7, 10 and 13": (ROTATED + END, HEADS_FIRST, OUT, ["Transpose"] * 4),
    "1, a split": (
        "a, b = Split<axis=-1, num_outputs=2>(x) n = Neg(b) r = Concat<axis=3>(n, a) " + END,
        HEADS_FIRST,
        OUT,
        ["Transpose"] * 4,
    ),
    "5, the other orders": (
        ROTATED + "u = Mul(c, x) v = Mul(s, r) y = Add(v, u)",
        HEADS_FIRST,
        OUT,
        ["Transpose"] * 4,
    ),
    "10, tables for all batches": (
        ROTATED + END,
        HEADS_FIRST.replace("float[B,1", "float[1,1"),
        OUT,
        ["Reshape", "Reshape", "Transpose", "Transpose"],
    ),
    "11": (ROTATED + END, TOKENS_FIRST, "float[B,S,6,8] y", []),
    "12": (
        "x = Transpose<perm=[0,2,1,3]>(z) " + ROTATED + END,
        HEADS_FIRST.replace("float[B,6,S,8] x", "float[B,S,6,8] z"),
        OUT,
        ["Transpose"] * 3,
    ),
    "12, tables that get their axis of heads": (
        "x = Transpose<perm=[0,2,1,3]>(z) c = Unsqueeze(c3, heads) s = Unsqueeze(s3, heads) " + ROTATED + END,
        "float[B,S,6,8] z, float[B,S,8] c3, float[B,S,8] s3",
        OUT,
        ["Transpose", "Unsqueeze", "Unsqueeze"],
    ),
}

IDLE = "z = Cast<to=1>(x) i = Cast<to=1>(z) " + ROTATED.replace("(x,", "(i,") + END.replace("Mul(x, c)", "Mul(z, c)")
SPELLINGS |= {
    "18": (IDLE, TOKENS_FIRST, BEHIND, []),
    "18 and 12": (
        "x = Transpose<perm=[0,2,1,3]>(t) " + IDLE,
        HEADS_FIRST.replace("float[B,6,S,8] x", "float[B,S,6,8] t"),
        OUT,
        ["Transpose"] * 3,
    ),
}

OTHER_MODES = {
    "2, 4 and 8": (NEIGHBOURS + END, TOKENS_FIRST, BEHIND, [], 1),
    "2, 4 and 8, heads first": (NEIGHBOURS + END, HEADS_FIRST, OUT, ["Transpose"] * 4, 1),
    "6 and 7": (HALVES + REAL + IMAGINARY + JOINED, HALF_TABLES_BEHIND, BEHIND, ["Concat"] * 2, 0),
    "6, the other orders": (
        HALVES
        + "n1 = Mul(c, a) n2 = Mul(s, b) n = Sub(n1, n2) i1 = Mul(s, a) i2 = Mul(c, b) i = Add(i1, i2) "
        + JOINED,
        HALF_TABLES_BEHIND,
        BEHIND,
        ["Concat"] * 2,
        0,
    ),
    "6, heads first": (
        HALVES + REAL + IMAGINARY + JOINED,
        HALF_TABLES,
        OUT,
        ["Concat"] * 2 + ["Transpose"] * 4,
        0,
    ),
    "4, a shape that is read of the pairs": (PAIRS + "n = Neg(b) " + SHAPED + END, TOKENS_FIRST, BEHIND, [], 1),
    "14, 15 and 8": (NUMBERS, PAIRED_BEHIND, BEHIND, ["Gather"] * 2 + ["Squeeze"] * 2, 1),
    "14, heads first": (NUMBERS, PAIRED, OUT, ["Gather"] * 2 + ["Squeeze"] * 2 + ["Transpose"] * 4, 1),
    "17": (
        NUMBERS.replace("z = Reshape(x, paired) ", ""),
        PAIRED_BEHIND.replace("6,8] x", "6,4,2] z"),
        BEHIND,
        ["Gather"] * 2 + ["Reshape"] + ["Squeeze"] * 2,
        1,
    ),
    "16": (
        HALVES + REAL + IMAGINARY + "y = Concat<axis=-1>(o, n, i)",
        HALF_TABLES_BEHIND + ", float[B,S,6,2] o",
        "float[B,S,6,10] y",
        ["Concat"] * 3,
        0,
    ),
    "16, in front of others": (
        PAIRS + REAL + IMAGINARY + "y = Concat<axis=3>(n, i, o, o)",
        HALF_TABLES + ", float[B,6,S,2] o",
        "float[B,6,S,12] y",
        ["Concat"] * 3 + ["Reshape"] * 2 + ["Transpose"] * 5,
        0,
    ),
    "6 and 8": (PAIRS + REAL + IMAGINARY + STACKED, HALF_TABLES_BEHIND, BEHIND, ["Gather"] * 2, 1),
    "6 and 9": (
        PAIRS + REAL + IMAGINARY + JOINED,
        HALF_TABLES_BEHIND,
        BEHIND,
        ["Concat", "Concat", "Reshape", "Reshape", "Transpose"],
        0,
    ),
    "6 and 9, heads first": (
        PAIRS + REAL + IMAGINARY + JOINED,
        HALF_TABLES,
        OUT,
        ["Concat", "Concat", "Reshape", "Reshape", *["Transpose"] * 5],
        0,
    ),
}


def modes(proto: onnx.ModelProto) -> list[int]:
    nodes = [node for node in proto.graph.node if node.domain == DOMAIN]
    return [entry.i for node in nodes for entry in node.attribute if entry.name == "mode"]


@pytest.mark.parametrize("spelling", OTHER_MODES)
def test_other_pairs_and_tables(spelling: str) -> None:
    body, inputs, outputs, left, mode = OTHER_MODES[spelling]
    proto = model(body, inputs, outputs)
    result, report = fused(proto)
    assert [line.status for line in report.around] == ["fused"]
    assert sorted(others(result)) == left
    assert modes(result) == [mode]
    assert_equal(proto, result)


def test_a_product_with_the_mode_that_sorts() -> None:
    body, inputs, outputs, *_ = OTHER_MODES["6 and 9"]
    proto = model(body, inputs, outputs)
    result, _ = fused(proto, soc_version="950")
    assert (modes(result), others(result)) == ([3], ["Concat", "Concat"])
    assert_equal(proto, result)


@pytest.mark.parametrize("opset", [13, 17])
@pytest.mark.parametrize("spelling", ["2, 4 and 8", "6 and 8", "6 and 9"])
def test_older_opsets_of_other_pairs(opset: int, spelling: str) -> None:
    body, inputs, outputs, *_ = OTHER_MODES[spelling]
    proto = model(body, inputs, outputs, opset)
    result, _ = fused(proto)
    assert operators(result) == ["RotaryPositionEmbedding"]
    assert_equal(proto, result)


CROSSED = {
    "the pairs in the other order": NEIGHBOURS.replace("Concat<axis=-1>(p, q)", "Concat<axis=-1>(q, p)") + END,
    "the other angle": NEIGHBOURS.replace("Neg(b)", "Neg(a)").replace("Unsqueeze(a", "Unsqueeze(b") + END,
    "halves joined as pairs": NEIGHBOURS.replace(PAIRS, HALVES) + END,
    "pairs joined as halves": PAIRS + "n = Neg(b) r = Concat<axis=-1>(n, a) " + END,
    "written out, halves joined as pairs": HALVES + REAL + IMAGINARY + STACKED,
    "written out, the other table": HALVES + REAL + IMAGINARY.replace("(b, c)", "(b, s)") + JOINED,
    "written out, a sum": HALVES + REAL.replace("Sub", "Add") + IMAGINARY + JOINED,
    "written out, a difference": HALVES + REAL + IMAGINARY.replace("Add", "Sub") + JOINED,
    "written out, the parts in the other order": HALVES + REAL + IMAGINARY + JOINED.replace("n, i", "i, n"),
    "written out, one part twice": HALVES + REAL + IMAGINARY.replace("Mul(b, c)", "Mul(a, c)") + JOINED,
}


CROSSED_NUMBERS = {
    "the conjugate": NUMBERS.replace("Sub(n1", "Add(n1"),
    "the parts in the other order": NUMBERS.replace("(n, i)", "(i, n)"),
    "another shape behind": NUMBERS.replace("Reshape(t, whole)", "Reshape(t, split)"),
    "pairs of another axis": NUMBERS.replace("paired", "turned")
    .replace("heads, last", "heads, four1")
    .replace("behind, last", "behind, four1"),
    "the parts of others between them": HALVES + REAL + IMAGINARY + "y = Concat<axis=-1>(n, o, i)",
    "joined along another axis": HALVES + REAL + IMAGINARY + "y = Concat<axis=2>(o, n, i)",
}


@pytest.mark.parametrize("what", CROSSED_NUMBERS)
def test_near_misses_of_complex_numbers_and_of_others_stay(what: str) -> None:
    inputs = (HALF_TABLES_BEHIND if "o," in CROSSED_NUMBERS[what] else PAIRED_BEHIND) + ", float[B,S,6,4] o"
    more = "int64[5] split = {0,0,0,2,4}, int64[5] turned = {0,0,0,2,4}, int64[1] four1 = {3}"
    output = "float[B,S,6,2,4] y" if "split" in CROSSED_NUMBERS[what] else "float[B,S,6,D] y"
    result, report = fused(model(CROSSED_NUMBERS[what], inputs, output, more=more))
    assert not [line for line in report.around if line.status == "fused"]
    assert operators(result) == []


def test_a_table_beside_complex_numbers_has_a_last_axis_of_1() -> None:
    result, _ = fused(model(NUMBERS, PAIRED_BEHIND.replace("4,1]", "4,2]"), "float[B,S,6,8] y"))
    assert operators(result) == []


@pytest.mark.parametrize("what", CROSSED)
def test_crossed_pairs_stay(what: str) -> None:
    body = CROSSED[what]
    inputs = HALF_TABLES if what.startswith("written") else HEADS_FIRST
    result, _ = fused(model(body, inputs))
    assert operators(result) == []


def test_tables_of_half_the_width_need_its_double() -> None:
    inputs = HALF_TABLES.replace("S,4]", "S,1]")
    _, report = fused(model(HALVES + REAL + IMAGINARY + JOINED, inputs))
    assert only_line(report).code == Code.SHAPE


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_spellings(spelling: str) -> None:
    body, inputs, outputs, left = SPELLINGS[spelling]
    proto = model(body, inputs, outputs)
    result, report = fused(proto)
    line = only_line(report)
    assert (line.status, line.op, line.rounded) == ("fused", "RotaryPositionEmbedding", False)
    assert sorted(others(result)) == left
    assert_equal(proto, result)


@pytest.mark.parametrize("opset", [13, 14, 17])
def test_older_opsets_and_float16(opset: int) -> None:
    proto = model(ROTATED + END, TOKENS_FIRST.replace("float[", "float16["), "float16[B,S,6,8] y", opset)
    result, report = fused(proto)
    assert operators(result) == ["RotaryPositionEmbedding"]
    assert only_line(report).rounded
    assert_equal(proto, result)


def test_sixteen_bits_are_declined_where_numbers_may_be_infinite() -> None:
    """In float16 x * cos may overflow in the model and not in the operator."""
    narrow = model(ROTATED + END, TOKENS_FIRST.replace("float[", "float16["), "float16[B,S,6,8] y")
    assert only_line(fused(narrow, assume=["non-finite-scores"])[1]).code == Code.DTYPE
    proto = model(ROTATED + END, TOKENS_FIRST, BEHIND)
    result, report = fused(proto, assume=["non-finite-scores"])
    assert only_line(report).status == "fused"
    assert_equal(proto, result)


def test_query_and_key_share_their_tables() -> None:
    body = "".join(
        f"{n}x = Transpose<perm=[0,2,1,3]>({n}z) {n}a = Slice({n}x, zero, four, last) "
        f"{n}b = Slice({n}x, four, far, last) {n}n = Neg({n}b) {n}r = Concat<axis=-1>({n}n, {n}a) "
        f"{n}u = Mul({n}x, c) {n}v = Mul({n}r, s) {n} = Add({n}u, {n}v) "
        for n in ("q", "k")
    )
    inputs = "float[B,S,6,8] qz, float[B,S,2,8] kz, float[B,S,8] c3, float[B,S,8] s3"
    tables = "c = Unsqueeze(c3, heads) s = Unsqueeze(s3, heads) "
    proto = model(tables + body, inputs, "float[B,6,S,8] q, float[B,2,S,8] k")
    result, report = fused(proto)
    assert [line.op for line in report.around] == ["RotaryPositionEmbedding"] * 2
    assert sorted(others(result)) == ["Transpose", "Transpose", "Unsqueeze", "Unsqueeze"]
    assert_equal(proto, result)


def test_a_part_of_a_head_is_rotated() -> None:
    body = "x, w2 = Split<axis=-1>(z, parts) " + ROTATED + "u = Mul(x, c) v = Mul(r, s) t = Add(u, v) "
    body += "y = Concat<axis=-1>(t, w2)"
    inputs = "float[B,S,6,12] z, float[B,S,1,8] c, float[B,S,1,8] s"
    proto = model(body, inputs, "float[B,S,6,12] y", more="int64[2] parts = {8,4}")
    result, _ = fused(proto)
    assert operators(result) == ["RotaryPositionEmbedding"]
    assert_equal(proto, result)


SEQUENCE = (
    "l = SplitToSequence<axis=-1>(x, {}) a = SequenceAt(l, {}) b = SequenceAt(l, {}) n = Neg(b) "
    "r = Concat<axis=-1>(n, a) u = Mul(x, c) v = Mul(r, s) y = Add(u, v) w2 = Softmax<axis=-1>(x)"
)
PLACES = "int64 first = {0}, int64 second = {1}, int64[2] sizes = {4,4}, int64 size = {4}, int64[2] unequal = {3,5}"


@pytest.mark.parametrize(
    ("places", "rotated"),
    [
        (("size", "first", "second"), True),
        (("sizes", "first", "second"), True),
        (("sizes", "second", "first"), False),
        (("unequal", "first", "second"), False),
    ],
)
def test_halves_out_of_a_sequence(places: tuple[str, ...], rotated: bool) -> None:
    """Splits are made of sequences (prepare/identities.py) where a model has a softmax, which may be attention."""
    proto = model(SEQUENCE.format(*places), TOKENS_FIRST, f"{BEHIND}, {BEHIND[:-1]}w2", more=PLACES)
    result, _ = fused(proto)
    assert operators(result) == ["RotaryPositionEmbedding"] * rotated
    assert_equal(proto, result)


def test_a_transposed_tensor_that_is_read_elsewhere_stays() -> None:
    inputs = HEADS_FIRST.replace("float[B,6,S,8] x", "float[B,S,6,8] z")
    body = "x = Transpose<perm=[0,2,1,3]>(z) " + ROTATED + END + " w2 = Neg(x)"
    proto = model(body, inputs, f"{OUT}, float[B,6,S,8] w2")
    result, _ = fused(proto)
    assert operators(result) == ["RotaryPositionEmbedding"]
    assert others(result).count("Transpose") == 5
    assert_equal(proto, result)


DECLINED = {
    "sizes of two names": (ROTATED + END, HEADS_FIRST.replace("float[B,1", "float[A,1"), Code.SHAPE),
    "a table for each head": (ROTATED + END, HEADS_FIRST.replace("1,S,8", "6,S,8"), Code.SHAPE),
    "tables of one token": (ROTATED + END, HEADS_FIRST.replace("1,S,8] c", "1,1,8] c"), Code.SHAPE),
    "tables of rank 2": (ROTATED + END, "float[B,6,S,8] x, float[S,8] c, float[S,8] s", Code.SHAPE),
    "float64": (ROTATED + END, HEADS_FIRST.replace("float", "double"), Code.DTYPE),
}


@pytest.mark.parametrize("what", DECLINED)
def test_what_is_declined(what: str) -> None:
    body, inputs, code = DECLINED[what]
    outputs = OUT.replace("float", "double") if what == "float64" else OUT
    result, report = fused(model(body, inputs, outputs))
    line = only_line(report)
    assert (line.status, line.code) == ("declined", code), line
    assert line.culprit
    assert operators(result) == []


def test_an_idle_cast_that_is_read_elsewhere_stays() -> None:
    proto = model(IDLE, TOKENS_FIRST, f"{BEHIND}, float[B,S,6,8] z")
    result, _ = fused(proto)
    assert (operators(result), others(result)) == (["RotaryPositionEmbedding"], ["Cast"])
    assert_equal(proto, result)


def test_what_is_read_inside_is_declined() -> None:
    _, report = fused(model(ROTATED + END, outputs=f"{OUT}, float[B,6,S,4] n"))
    assert only_line(report).code == Code.READ_INSIDE


@pytest.mark.parametrize(
    "body",
    [
        ROTATED.replace("(n, a)", "(a, n)") + END,  # the halves in the other order
        ROTATED.replace("Neg(b)", "Neg(a)").replace("(n, a)", "(n, b)") + END,  # the other angle
        ROTATED + "u = Mul(x, c) v = Mul(r, s) y = Sub(u, v)",
        ROTATED + "u = Mul(a2, c) v = Mul(r, s) y = Add(u, v) a2 = Abs(x)",
        ROTATED.replace("four, far", "two, far") + END.replace("r, s", "r2, s") + " r2 = Slice(r, zero, eight, last)",
    ],
)
def test_near_misses_stay(body: str) -> None:
    if "a2" in body:
        body = "a2 = Abs(x) " + body.replace(" a2 = Abs(x)", "")
    if "r2" in body:
        body = (
            body.replace(END.replace("r, s", "r2, s"), "").replace(" r2 =", "r2 =") + " " + END.replace("r, s", "r2, s")
        )
    result, report = fused(model(body, more="int64[1] two = {2}"))
    assert not [line for line in report.around if line.status == "fused"]
    assert operators(result) == []


def test_products_and_releases() -> None:
    proto = model(ROTATED + END)
    assert only_line(fused(proto, soc_version="310P")[1]).code == Code.ILLEGAL
    assert only_line(fused(proto, cann="8.5.0")[1]).status == "fused"
    assert only_line(fused(proto, cann="8.0")[1]).code == Code.ILLEGAL
