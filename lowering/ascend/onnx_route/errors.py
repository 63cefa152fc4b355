"""The errors of the ONNX route: a list of problems, each of which is one line that names the node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from fa_compiler.op_registry.errors import FaCompilerError
from fa_compiler.passes.answer.decline import label


class UnsupportedModel(FaCompilerError, ValueError):
    """ATC's ONNX parser cannot take the model. `problems` are the reasons, one line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class UnsupportedNode(Exception):
    """A node cannot be converted; the text gives the reason. It is caught once for each node."""


def problem_at(node: ir.Node, reason: str) -> str:
    """The line of a problem: the node, its operator and the reason."""
    domain = f"{node.domain}." if node.domain else ""
    return f"{label(node)} ({domain}{node.op_type}): {reason}"
