"""What is checked of every decline of a test that asks for it."""

from __future__ import annotations

from types import TracebackType

import onnx_ir as ir
import pytest

from fa_compiler.passes import Options, Report, fuse
from fa_compiler.passes.emit.trial import Trial
from tests.passes import gradients, running


def state(trial: Trial) -> tuple[object, ...]:
    """All that a trial may change: the graph byte for byte, the names in use, and who reads each value."""
    graph = trial.graph
    values = [*graph.inputs, *graph.initializers.values(), *(output for node in graph for output in node.outputs)]
    readers = [(value, [(use.node, use.idx) for use in value.uses()]) for value in values]
    known = [(value, {(id(node), place) for node, place in uses}) for value, uses in readers]
    text = ir.to_proto(graph).SerializeToString(deterministic=True)
    return text, frozenset(trial.builder.names.taken), known, [len(each) for each in trial.lists]


@pytest.fixture
def declines_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is tried and not kept leaves the graph as it was, and so does a model in which nothing is fused."""
    enter, leave, before = Trial.__enter__, Trial.__exit__, list[tuple[object, ...]]()

    def entered(trial: Trial) -> Trial:
        before.append(state(trial))
        return enter(trial)

    def left(
        trial: Trial, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        leave(trial, kind, error, trace)
        was = before.pop()
        assert trial.kept or state(trial) == was

    def fused(model: ir.Model, options: Options | None = None) -> Report:
        text = ir.to_proto(model).SerializeToString(deterministic=True)
        report = fuse(model, options)
        if report.target != "onnx" and not report.count("fused"):  # for onnx, the opset is raised
            assert ir.to_proto(model).SerializeToString(deterministic=True) == text
        return report

    monkeypatch.setattr(Trial, "__enter__", entered)
    monkeypatch.setattr(Trial, "__exit__", left)
    monkeypatch.setattr(running, "fuse", fused)
    monkeypatch.setattr(gradients, "fuse", fused)
