"""Lengths behind convolutions that a model also computes by integer divisions, which round toward zero."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.values.shapes import analyse
from tests.passes.values.test_shapes import Checked, parse

S = Dim.symbol("S")
MORE = (
    f"<float[8,2,9] w = {{{','.join(['0.5'] * 144)}}}, float[8,8,4] v = {{{','.join(['0.5'] * 256)}}}, "
    "int64 Four = {4}, int64 One = {1}, int64 Three = {3}, int64 Nine = {9}, int64 Sixteen = {16}, "
    "int64[2] Heads = {-1, 4}>"
)
LENGTH = "rows = Shape<start = 2, end = 3>(x) less = Sub(rows, Nine) q = Div(less, Four) length = Add(q, One) "
"""What torch's exporter computes of the length behind a convolution of 9 elements with a stride of 4."""


def test_a_length_from_a_division_is_the_length_behind_the_convolution() -> None:
    body = """
        c = Conv<strides = [4]>(x, w) t = Transpose<perm = [0, 2, 1]>(c)
        batch = Shape<start = 0, end = 1>(x) shape = Concat<axis = 0>(batch, length, Heads) y = Reshape(t, shape)
    """
    found = Checked(parse("float[B,2,S] x", LENGTH + body, more=MORE), [{"B": 2, "S": size} for size in range(14)])
    rows, shape = found.shape("t"), found.shape()
    assert rows is not None and shape == (*rows[:2], Dim(2), Dim(4)) and found.content("length") == (rows[1],)
    assert rows[1].is_at_least(1) and not Dim.floordiv(S - 9, 4).is_at_least(0) and found.runs == 5


@pytest.mark.parametrize(
    "body",
    [
        "c = Conv<strides = [4]>(x, w) y = Identity(length)",
        "c = Conv<strides = [4]>(x, w) d = Shape<start = 1, end = 2>(c) y = Add(length, d)",
        "y = If(b) <then_branch = yes () => (p) { p = Conv<strides = [4]>(x, w) }, "
        "else_branch = no () => (r) { r = Identity(x) }>",
    ],
    ids=["nothing reads it", "only its shape is read", "it is in a branch"],
)
def test_a_convolution_that_may_not_run_proves_nothing(body: str) -> None:
    model = ir.from_proto(parse("float[B,2,S] x, bool b", LENGTH + body, more=MORE))
    info = analyse(model)
    (length,) = (value for node in model.graph for value in node.outputs if value.name == "length")
    assert info.content(length) == (Dim.truncdiv(S - 9, 4) + 1,)


def test_the_length_behind_two_convolutions_is_one_quotient() -> None:
    body = """
        c = Conv<strides = [4], pads = [4, 4]>(x, w) y = Conv<strides = [4]>(c, v)
        rows = Shape<start = 2, end = 3>(x) more = Add(rows, Three) length = Div(more, Sixteen)
    """
    found = Checked(parse("float[B,2,S] x", body, more=MORE), [{"B": 2, "S": size} for size in (1, 13, 16, 28, 29)])
    shape = found.shape()
    assert shape is not None and found.content("length") == (shape[2],) and found.runs == 4


def test_each_convolution_tells_of_the_divisions_behind_the_next_one() -> None:
    """SegFormer has a Reshape to computed sizes before each of its convolutions."""
    body = """
        c = Conv<strides = [4]>(x, w) batch = Shape<start = 0, end = 1>(x) eight = Shape<start = 1, end = 2>(c)
        shape = Concat<axis = 0>(batch, eight, length) r = Reshape(c, shape) y = Conv<strides = [4]>(r, v)
        again = Sub(length, Four) quotient = Div(again, Four) behind = Add(quotient, One)
    """
    found = Checked(parse("float[B,2,S] x", LENGTH + body, more=MORE), [{"B": 2, "S": size} for size in (20, 21, 40)])
    shape = found.shape()
    assert shape is not None and found.content("behind") == (shape[2],) and found.runs == 2


FLOOR = """
    rows = Shape<start = 2, end = 3>(x) size = Squeeze(rows) sign = Sign(size) up = Equal(sign, One) other = Not(up)
    left = Mod(size, Four) uneven = Cast<to = 9>(left) both = And(other, uneven) less = Cast<to = 7>(both)
    q = Div(size, Four) floor = Sub(q, less)
"""
"""How torch's exporter divides a size by 4 and rounds it down: Div, less 1 where a number below 0 leaves a rest."""


@pytest.mark.parametrize("runs", [True, False])
def test_a_size_that_is_rounded_down_by_its_sign(runs: bool) -> None:
    """A convolution in front of the mask shows that the size is not 0, whose sign is 0."""
    body = "c = Conv<strides = [4]>(x, z) y = Identity(c)" if runs else "y = Identity(floor)"
    kernel = f"<float[8,2,4] z = {{{','.join(['0.5'] * 64)}}}, int64 Four = {{4}}, int64 One = {{1}}>"
    found = Checked(parse("float[B,2,S] x", FLOOR + body, more=kernel), [{"B": 2, "S": size} for size in range(14)])
    size = (found.shape("x") or ())[2]
    assert (found.content("floor") == Dim.floordiv(size, 4)) == runs
    assert found.runs == (10 if runs else 14)
    if runs:
        assert (found.shape("c") or ())[2] == Dim.floordiv(size, 4)
