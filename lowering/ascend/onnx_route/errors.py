"""The errors of the ONNX route: a list of problems, each of which is one line that names the
node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from fa_compiler.lowering.ascend.convert import is_convertible
from fa_compiler.op_registry.errors import FaCompilerError
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.answer.report import first_of


class UnsupportedModel(FaCompilerError, ValueError):
    """ATC's ONNX parser cannot take the model. `problems` are the reasons, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class UnsupportedNode(Exception):
    """A node cannot be converted; the text gives the reason. It is caught once for each node."""


def or_air(node: ir.Node) -> str:
    """The end of an advice about a node: the route `air`, where GE has the operator; else
    nothing."""
    return ", or try --route air" if is_convertible(node.domain, node.op_type) else ""


def grouped(problems: Sequence[str]) -> list[str]:
    """The lines of problems, with one line for all nodes that have the same one."""
    nodes: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        head, _, reason = problem.partition("): ")
        node, _, operator = head.rpartition(" (")
        nodes.setdefault((operator, reason) if node and reason else ("", problem), []).append(node)
    return [
        f"{first_of(found)} ({operator}): {reason}" if operator else reason
        for (operator, reason), found in nodes.items()
    ]


def problem_at(node: ir.Node, reason: str) -> str:
    """The line of a problem: the node, its operator and the reason."""
    domain = f"{node.domain}." if node.domain else ""
    return f"{label(node)} ({domain}{node.op_type}): {reason}"
