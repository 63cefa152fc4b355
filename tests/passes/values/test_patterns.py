"""The matcher for patterns of operators: what names stand for, in which order operands may come, what is covered."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from fa_compiler.passes.ir.nodes import is_op
from fa_compiler.passes.values.patterns import Bind, Number, OneOf, Op, Pattern, Through, is_closed, match, matches
from fa_compiler.passes.values.shapes import ShapeInfo, analyse

X, Y = Bind("x"), Bind("y")


def graph(body: str) -> tuple[ir.Graph, dict[str, ir.Value], ShapeInfo]:
    """A graph whose inputs are a and b, its values by name, and what is known of them."""
    model = ir.from_onnx_text(
        f'<ir_version: 9, opset_import: ["": 17]> g (float[2,3] a, float[2,3] b) => (float[2,3] out) {{ {body} }}'
    )
    values = {value.name: value for node in model.graph for value in node.outputs}
    values |= {value.name: value for value in model.graph.inputs}
    return model.graph, {name: value for name, value in values.items() if name}, analyse(model)


@pytest.mark.parametrize(
    ("pattern", "body", "expected"),
    [
        (Op("Sub", X, Y), "out = Sub(a, b)", {"x": "a", "y": "b"}),
        (Op("Sub", X, X), "out = Sub(a, b)", None),
        (Op("Sub", X, X), "out = Sub(a, a)", {"x": "a"}),
        (Op(("Add", "Sub"), X, Y), "out = Sub(a, b)", {"x": "a", "y": "b"}),
        (Op("Add", Op("Neg", X), Y), "n = Neg(a) out = Add(b, n)", {"x": "a", "y": "b"}),
        (Op("Sub", Op("Neg", X), Y), "n = Neg(a) out = Sub(b, n)", None),
        (Op("Add", X, Number(2.0)), "two = Constant<value=float {2}>() out = Add(two, a)", {"x": "a"}),
        (Op("Add", X, Number(3.0)), "two = Constant<value=float {2}>() out = Add(two, a)", None),
        (Op("Add", X, Number(1.0, 2.0)), "two = Constant<value=float {2}>() out = Add(two, a)", {"x": "a"}),
        (Op("Add", X, Number(2.5, 3.0)), "two = Constant<value=float {2}>() out = Add(two, a)", None),
        (Op("Sub", X, Number(0.0, 1.0)), "out = Sub(a, b)", None),
        (Op("ReduceMax", X, open_end=True), "out = ReduceMax<axes=[1]>(a)", {"x": "a"}),
        (Op("Concat", X, open_end=True), "out = Concat<axis=0>(a, b)", {"x": "a"}),
        (Op("Concat", X, Y, X, open_end=True), "out = Concat<axis=0>(a, b)", None),
        (Op("Add", X, Op("Neg", X, name="n")), "n = Neg(a) out = Add(n, a)", {"x": "a", "n": "n"}),
        (Op("Add", X, Op("Neg", X)), "n = Neg(b) out = Add(n, a)", None),
        (OneOf((Op("Neg", X), Op("Exp", Y))), "out = Exp(a)", {"y": "a"}),
        (Op("LeakyRelu", X, plain=True), "out = LeakyRelu<alpha=0.1>(a)", None),
        (Op("Max", X, Y), "out = Max(a)", None),
    ],
)
def test_what_names_stand_for(pattern: Pattern, body: str, expected: dict[str, str] | None) -> None:
    _, values, info = graph(body)
    found = match(pattern, values["out"], info)
    assert (None if found is None else {name: value.name for name, value in found.values.items()}) == expected


def test_a_name_that_is_given() -> None:
    _, values, info = graph("out = Sub(a, b)")
    assert match(Op("Sub", X, Y), values["out"], info, {"y": values["b"]}) is not None
    assert match(Op("Sub", X, Y), values["out"], info, {"y": values["a"]}) is None


def test_all_ways() -> None:
    _, values, info = graph("out = Add(a, b)")
    assert [each["x"].name for each in matches(Op("Add", X, Y), values["out"], info)] == ["a", "b"]


def test_operators_that_are_looked_through() -> None:
    _, values, info = graph("n = Neg(a) i = Identity(n) j = Identity(i) out = Exp(j)")
    passing = Through(lambda node: node.inputs[0] if is_op(node, "Identity") else None, Op("Neg", X))
    found = match(Op("Exp", passing), values["out"], info)
    assert found is not None
    assert [node.op_type for node in found.nodes] == ["Neg", "Identity", "Identity", "Exp"]


@pytest.mark.parametrize(("more", "closed"), [("", True), ("z = Exp(n)", False)])
def test_what_nobody_else_reads(more: str, closed: bool) -> None:
    _, values, info = graph(f"n = Neg(a) {more} out = Add(n, b)")
    found = match(Op("Add", Op("Neg", X), Y), values["out"], info)
    assert found is not None
    assert is_closed(found.nodes) is closed
