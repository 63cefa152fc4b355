"""What goes wrong on the ONNX route: a list of faults, each one line that names the node."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from fa_compiler.passes.decline import label


class UnfitModel(ValueError):
    """ATC's ONNX parser cannot take the model. `problems` are the reasons, a line each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class UnfitNode(Exception):
    """Raised by whatever cannot go on with a node; caught once for each node."""


def about(node: ir.Node, reason: str) -> str:
    """A problem's line."""
    domain = f"{node.domain}." if node.domain else ""
    return f"{label(node)} ({domain}{node.op_type}): {reason}"
