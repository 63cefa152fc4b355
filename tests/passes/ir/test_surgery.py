"""Removing what a fusion made superfluous, and only that."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.ir.nodes import all_graphs, nodes_after, reached
from fa_compiler.passes.ir.surgery import depends, replace_value, restore_order, sweep
from tests.passes.running import parse

OUTPUT = "float[B,4,S,8] y"


def graph(body: str, outputs: str = OUTPUT, more: str = "", initializers: str = "") -> ir.Graph:
    return ir.from_proto(parse(body, more, outputs=outputs, initializers=initializers)).graph


def node(graph_: ir.Graph, output: str) -> ir.Node:
    return next(each for each in graph_ for value in each.outputs if value.name == output)


def names(graph_: ir.Graph) -> list[str | None]:
    return [each.outputs[0].name for each in graph_]


def test_a_dead_chain_goes_with_its_initializers() -> None:
    found = graph(
        "a = Mul(q, c) b = Neg(a) d = Add(b, e) y = Relu(q)", initializers="<float c = {1.0}, float e = {2.0}>"
    )
    sweep(found, [node(found, "d")])
    assert names(found) == ["y"]
    assert not found.initializers


def test_what_others_read_stays() -> None:
    found = graph("a = Mul(q, c) b = Neg(a) y = Mul(a, c)", initializers="<float c = {1.0}>")
    sweep(found, [node(found, "b")])
    assert names(found) == ["a", "y"]
    assert list(found.initializers) == ["c"]


def test_what_a_branch_reads_stays() -> None:
    body = "a = Neg(q) b = Neg(a) y = If (c) <then_branch = g1 () => (float[B,4,S,8] t) { t = Relu(a) }, "
    found = graph(body + "else_branch = g2 () => (float[B,4,S,8] u) { u = Neg(q) }>", more="bool c")
    sweep(found, [node(found, "b")])
    assert names(found) == ["a", "y"]


def test_live_roots_stay() -> None:
    found = graph("a = Neg(q) y = Neg(a)")
    sweep(found, [node(found, "a"), node(found, "y")])
    assert names(found) == ["a", "y"]


def test_initializers_that_are_inputs_or_outputs_stay() -> None:
    found = graph(
        "a = Mul(q, c) b = Mul(a, d) y = Relu(q)",
        f"{OUTPUT}, float d",
        more="float c",
        initializers="<float c = {1.0}, float d = {2.0}>",
    )
    sweep(found, [node(found, "b")])
    assert names(found) == ["y"]
    assert sorted(found.initializers) == ["c", "d"]


def test_a_node_with_one_live_output_stays() -> None:
    found = graph("n = Constant<value=int64[1] {8}>() y, i = TopK(q, n) b = Neg(i)")
    sweep(found, [node(found, "b")])
    assert names(found) == ["n", "y"]


def test_a_value_takes_another_ones_place_and_name() -> None:
    found = graph("a = Neg(q) b = Relu(q) y = Neg(a)")
    old, new = node(found, "a").outputs[0], node(found, "b").outputs[0]
    replace_value(old, new)
    assert node(found, "y").inputs[0] is new
    assert new.name == "a"


def test_a_model_output_keeps_its_name_and_declaration() -> None:
    found = graph("b = Relu(q) y = Neg(q)")
    old, new = node(found, "y").outputs[0], node(found, "b").outputs[0]
    replace_value(old, new)
    assert found.outputs[0] is new
    assert new.name == "y"
    assert [str(size) for size in new.shape or ()] == ["B", "4", "S", "8"]


def test_a_cycle_is_found() -> None:
    found = graph("a = Neg(q) b = Neg(a) y = Neg(b)")
    restore_order(found)
    node(found, "a").replace_input_with(0, node(found, "b").outputs[0])
    with pytest.raises(RuntimeError, match="cycle: (a -> b -> a|b -> a -> b)"):
        restore_order(found)


def test_a_cycle_through_a_branch_is_found() -> None:
    found = graph(
        "a = Neg(q) d = If (c) <then_branch = t () => (float[B,4,S,8] u) { u = Relu(a) }, "
        "else_branch = e () => (float[B,4,S,8] w) { w = Abs(a) }> y = Neg(d)",
        more="bool c",
    )
    assert depends(node(found, "y").outputs[0], node(found, "a"))
    assert not depends(node(found, "a").outputs[0], node(found, "d"))
    node(found, "a").replace_input_with(0, node(found, "d").outputs[0])
    with pytest.raises(RuntimeError, match=r"cycle: .*\ba -> d\b"):
        restore_order(found)


def test_names_of_the_whole_model() -> None:
    body = "a = Neg(q) y = If (c) <then_branch = g1 () => (float[B,4,S,8] inner) { inner = Relu(a) }, "
    body += "else_branch = g2 () => (float[B,4,S,8] u) { w = Constant<value=float {1.0}>() u = Mul(q, w) }>"
    made = Names.of(all_graphs(ir.from_proto(parse(body, "bool c"))))
    assert {"q", "a", "y", "inner", "u", "w"} <= made.taken
    assert [made.new("inner"), made.new("inner"), made.new("free")] == ["inner_2", "inner_3", "free"]


def test_what_is_reached_comes_once_and_the_nearest_first() -> None:
    found = graph("a = Neg(q) b = Mul(a, a) d = Exp(a) e = Add(b, d) y = Relu(e)")
    order = [each.outputs[0].name for each in reached([node(found, "a")], nodes_after)]
    assert order == ["a", "b", "d", "e", "y"]
    assert list(reached([1], lambda number: [number, 2 * number], limit=4)) == [1, 2, 4]
    assert list(reached([3, 5, 3], lambda number: [])) == [3, 5]
