"""Query and key that are rotated by the same tables, which one operator rotates, with near misses."""

from __future__ import annotations

import onnx
import pytest

from tests.passes.around.running import assert_equal, fused, operators, parse

BOUNDS = "int64[1] zero = {0}, int64[1] half = {32}, int64[1] far = {1000}, int64[1] last = {-1}"
SIZES = "float[B,S,4,64] x, float[B,S,2,64] z, float[B,S,1,64] c, float[B,S,1,64] s"
OUT = "float[B,S,4,64] y0, float[B,S,2,64] y1"
READ = "q = Neg(x) k = Neg(z) "
END = " y0 = Neg(q5) y1 = Neg(k5)"


def rotated(name: str, cos: str = "c", sin: str = "s") -> str:
    """The rotation of a value, whose results begin with its name."""
    return (
        f"{name}0 = Slice({name}, zero, half, last) {name}1 = Slice({name}, half, far, last) {name}2 = Neg({name}1) "
        f"{name}3 = Concat<axis=-1>({name}2, {name}0) {name}4 = Mul({name}, {cos}) {name}6 = Mul({name}3, {sin}) "
        f"{name}5 = Add({name}4, {name}6) "
    )


def model(body: str, inputs: str = SIZES, outputs: str = OUT) -> onnx.ModelProto:
    return parse(body, inputs, outputs, 20, BOUNDS)


BOTH = READ + rotated("q") + rotated("k") + END


@pytest.mark.parametrize("body", [BOTH, READ + rotated("k") + rotated("q") + END])
def test_a_pair(body: str) -> None:
    proto = model(body)
    result, report = fused(proto)
    assert operators(result) == ["ApplyRotaryPosEmb"]
    (line,) = report.around
    assert (line.op, line.replaced, line.added) == ("ApplyRotaryPosEmb", 14, 1)
    (node,) = (node for node in result.graph.node if node.op_type == "ApplyRotaryPosEmb")
    assert list(node.input)[:2] == ["q", "k"]
    assert_equal(proto, result)


def test_half_precision() -> None:
    proto = model(BOTH, SIZES.replace("float", "float16"), OUT.replace("float", "float16"))
    result, report = fused(proto)
    assert operators(result) == ["ApplyRotaryPosEmb"]
    assert report.around[0].rounded
    assert_equal(proto, result, odd=False)


def test_results_that_are_outputs() -> None:
    proto = model(READ + rotated("q") + rotated("k").replace("k5", "y1") + "y0 = Neg(q5)")
    result, _ = fused(proto)
    assert operators(result) == ["ApplyRotaryPosEmb"]
    assert [value.name for value in result.graph.output] == ["y0", "y1"]
    assert_equal(proto, result)


def test_layers_are_paired_apart() -> None:
    """The rotations of a second layer are computed from those of the first."""
    second = rotated("u") + rotated("v") + "y0 = Neg(u5) y1 = Neg(v5)"
    proto = model(READ + rotated("q") + rotated("k") + "u = Neg(q5) v = Neg(k5) " + second)
    result, _ = fused(proto)
    assert operators(result) == ["ApplyRotaryPosEmb"] * 2
    assert_equal(proto, result)


def test_a_rotation_alone_in_between() -> None:
    """A layer that reads the keys of another one rotates its queries only."""
    body = READ + rotated("q") + "u = Neg(q5) " + rotated("u") + "y0 = Neg(u5) " + rotated("k") + "y1 = Neg(k5)"
    proto = model(body)
    result, _ = fused(proto)
    assert sorted(operators(result)) == ["ApplyRotaryPosEmb", "RotaryPositionEmbedding"]
    assert_equal(proto, result)


OTHER_TABLES = SIZES + ", float[B,S,1,64] c2"
ONE_BATCH = SIZES.replace("float[B,S,1,64]", "float[1,S,1,64]")
APART = {
    "other tables": (READ + rotated("q") + rotated("k", "c2") + END, OTHER_TABLES, OUT),
    "the key is rotated from the rotated query": (
        "q = Neg(x) " + rotated("q") + "k = Neg(q5) " + rotated("k") + END,
        SIZES.replace("float[B,S,2,64] z, ", ""),
        OUT.replace("2,64", "4,64"),
    ),
    "what is rotated is read elsewhere": (BOTH + " y2 = Neg(q)", SIZES, OUT + ", float[B,S,4,64] y2"),
    "what is rotated is an input": (
        rotated("q") + rotated("k") + END,
        SIZES.replace(" x", " q").replace(" z", " k"),
        OUT,
    ),
    "tables of one batch": (BOTH, ONE_BATCH, OUT),
    "heads of other sizes": (BOTH.replace("half", "eight"), SIZES.replace("64]", "16]"), OUT.replace("64]", "16]")),
}


@pytest.mark.parametrize("miss", APART)
def test_what_stays_apart(miss: str) -> None:
    body, inputs, outputs = APART[miss]
    proto = parse(body, inputs, outputs, 20, BOUNDS + ", int64[1] eight = {8}")
    result, _ = fused(proto)
    assert operators(result) == ["RotaryPositionEmbedding"] * 2
    assert_equal(proto, result)


def test_other_products() -> None:
    proto = model(BOTH, ONE_BATCH)
    result, _ = fused(proto, soc_version="950")
    assert operators(result) == ["ApplyRotaryPosEmb"]
    assert_equal(proto, result)
    many = model(BOTH, SIZES.replace("4,64", "254,64"), OUT.replace("4,64", "254,64"))
    assert operators(fused(many)[0]) == ["RotaryPositionEmbedding"] * 2
    assert operators(fused(many, soc_version="950")[0]) == ["ApplyRotaryPosEmb"]
