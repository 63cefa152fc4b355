"""The one way a matcher gives up: an exception with a code, a sentence and the culprit node."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.report import Code


def label(node: ir.Node | None) -> str | None:
    """The name a user knows a node by: its own, or its first named output's."""
    if node is None:
        return None
    if node.name:
        return node.name
    return next((output.name for output in node.outputs if output.name), node.op_type)


class Decline(Exception):
    """Raised by any helper that cannot go on; caught once per anchor. Not an error: an expected answer.

    The hint says what to change; without one it is what the code advises, and "" says that there is nothing.
    """

    def __init__(self, code: Code, reason: str, culprit: ir.Node | None = None, hint: str | None = None) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.culprit = culprit
        self.hint = code.advice if hint is None else hint or None
