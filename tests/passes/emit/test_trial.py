"""A trial leaves nothing behind that is not kept, and a kept change can be undone."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from fa_compiler.passes import Options, fuse
from fa_compiler.passes.answer.decline import Decline, attempt, first_possible, if_possible, reworded
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import remember_versions
from fa_compiler.passes.ir.surgery import ORDER, depends, restore_order
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.rewriter import Fused, Rewriter
from fa_compiler.passes.values.shapes import analyse
from tests.passes.conftest import state
from tests.passes.running import parse

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

BODY = "a = Relu(q) b = Exp(a) c = Neg(b) d = Mul(c, c) e = Abs(q) y = Add(d, e)"


def built(body: str = BODY) -> tuple[Builder, dict[str, ir.Value]]:
    model = ir.from_proto(parse(body))
    names = Names.of(remember_versions(model))
    values = {value.name or "": value for node in model.graph for value in node.outputs}
    return Builder(model.graph, names, analyse(model)), {**values, "q": model.graph.inputs[0]}


def text(graph: ir.Graph) -> bytes:
    return ir.to_proto(graph).SerializeToString(deterministic=True)


def make(builder: Builder, value: ir.Value) -> ir.Value:
    """One of everything that a builder makes."""
    builder.length(value, 0)
    builder.lone(ir.node("Relu", [value]))
    builder.alias(builder.op("Neg", [value]))
    ones = builder.constant(np.ones((1, 4, 1, 8), np.float32), "ones")
    return builder.op("Mul", [value, ones])


@pytest.mark.parametrize("replaces", [False, True])
def test_what_is_not_kept_is_undone(replaces: bool) -> None:
    builder, values = built()
    before = state(Trial(builder))
    with Trial(builder) as trial:
        made = make(builder, values["a"])
        if replaces:
            trial.replace((values["d"], made))
    assert state(Trial(builder)) == before and not trial.kept
    with Trial(builder) as trial:
        assert make(builder, values["a"]).name == made.name  # the names are given again
    assert state(Trial(builder)) == before


def test_an_error_undoes_the_trial() -> None:
    builder, values = built()
    before = state(Trial(builder))
    with pytest.raises(Decline), Trial(builder):
        make(builder, values["a"])
        raise Decline(Code.SHAPE, "refused")
    assert state(Trial(builder)) == before


def test_a_kept_change_is_undone_later() -> None:
    builder, values = built()
    graph, before = builder.graph, text(builder.graph)
    with Trial(builder) as trial:
        made = builder.op("Mul", [values["a"], builder.constant(np.array(2.0, np.float32))])
        trial.replace((values["d"], made))
        change = trial.keep()
    assert change is not None and trial.kept
    restore_order(graph)
    assert [node.op_type for node in graph] == ["Relu", "Abs", "Mul", "Add"]
    assert made.name == "d" and change.made >= {"fa_Mul", "fa_const"}
    change.undo()
    assert text(graph) == before


@pytest.mark.parametrize("order", ["known", "unknown"])
@pytest.mark.parametrize(("old", "read"), [("d", "a"), ("b", "e")])
def test_the_order_stays_right(order: str, old: str, read: str) -> None:
    """In the second case a reader stands in front of what it now depends on."""
    builder, values = built()
    graph = builder.graph
    if order == "known":
        assert not depends(values["a"], graph[-1])
    with Trial(builder) as trial:
        made = builder.op("Sigmoid", [values[read]])
        trial.replace((values[old], made))
        assert trial.keep() is not None
    assert (graph.meta[ORDER] == {}) == (old == "b")
    above = {
        node: {maker for value in node.inputs if value and (maker := value.producer())} for node in graph
    }  # by the definition
    for _ in graph:
        above = {node: makers.union(*(above[each] for each in makers)) for node, makers in above.items()}
    for node in graph:
        for other in graph:
            assert depends(node.outputs[0], other) == (other is node or other in above[node])


def test_nodes_of_a_branch_are_not_changed() -> None:
    branch = "z_ = Identity(a)"
    body = (
        "one = Constant<value=bool {1}>() a = Relu(q) "
        f"y = If(one) <then_branch = t () => (float[B,4,S,8] t_) {{ t_ = Neg(a) }}, "
        f"else_branch = f () => (float[B,4,S,8] z_) {{ {branch} }}>"
    )
    builder, _ = built(body)
    chosen = next(node for node in builder.graph if node.op_type == "If")
    inner = next(iter(chosen.attributes["then_branch"].as_graph()))
    before = state(Trial(builder))
    with Trial(builder) as trial:
        made = builder.op("Abs", [builder.graph.inputs[0]])
        trial.replace((chosen.outputs[0], made), nodes=[chosen, inner])
        assert trial.keep() is None
    assert state(Trial(builder)) == before


@pytest.mark.parametrize("constant", [True, False])
def test_what_a_refused_change_had_swept_is_back(constant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The axes of the sum, which only the replaced division needed, among it."""

    def refuse(self: Rewriter, match: AttentionMatch) -> Fused:
        raise Decline(Code.ILLEGAL, "refused for the test", match.node)

    body = (
        "kt = Transpose<perm=[0,1,3,2]>(k) s = MatMul(q, kt) p = Softmax<axis=-1>(s) "
        "c = Constant<value=float {0.25}>() o = Constant<value=float {1.0}>() f = Sub(o, c) "
        "pf = Mul(p, f) r = Softmax<axis=-1>(m) rc = Mul(r, c) "
        "x = Add(pf, rc) t = ReduceSum(x, last) w = Div(x, t) y = MatMul(w, v)"
    )
    last = "last = Constant<value=int64[1] {-1}>() "
    proto = parse(
        last + body if constant else body,
        "float[B,4,S,T] m",
        initializers="" if constant else "<int64[1] last = {-1}>",
    )
    monkeypatch.setattr(Rewriter, "emit", refuse)
    model = ir.from_proto(proto)
    report = fuse(model, Options("ort", assume=frozenset({"finite-scores"})))
    assert not report.count("fused")
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    assert ir.to_proto(model) == ir.to_proto(ir.from_proto(proto))


def refused(word: str) -> str:
    raise Decline(Code.SHAPE, word)


def test_alternatives() -> None:
    found = attempt(lambda: refused("one"))
    assert isinstance(found, Decline) and found.reason == "one"
    assert if_possible(lambda: refused("one")) is None and if_possible(lambda: 1) == 1
    assert first_possible([lambda: refused("one"), lambda: "two"]) == "two"
    with pytest.raises(Decline, match="one"):
        first_possible([lambda: refused("one"), lambda: refused("two")])
    with pytest.raises(Decline, match="better"):
        reworded(lambda: refused("one"), lambda decline: Decline(decline.code, "better"))
