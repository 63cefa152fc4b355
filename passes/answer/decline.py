"""The one way in which a matcher gives up: an exception with a code, a sentence and the culprit
node.

It is raised to the report (fusion.py). Who has another way to go on asks by `attempt`, which turns
the exception into a value, and who knows a better reason raises it by `reworded`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar, overload

import onnx_ir as ir

from fa_compiler.passes.answer.report import Code, Missed, MissedCode

T = TypeVar("T")
NEWER_OPSET = "export again with opset 11 or newer"
"""The hint where nodes that are made need operators of that opset."""
OTHER_SCALE = "give it a scale other than 0 that float32 holds"
POSITIVE_SCALE = "give it a positive scale; the weights of the query may have the sign"


@overload
def label(node: ir.Node) -> str: ...
@overload
def label(node: ir.Node | None) -> str | None: ...
def label(node: ir.Node | None) -> str | None:
    """The name by which a user knows a node: its own, or that of its first named output, or its
    type. None where there is no node."""
    if node is None:
        return None
    if node.name:
        return node.name
    return next((output.name for output in node.outputs if output.name), node.op_type)


class Decline(Exception):
    """Raised where a match or a rewrite cannot go on. It is an expected answer, not an error.

    The hint says what the user can change. By default it is the advice of the code; "" says that
    there is nothing.
    """

    def __init__(
        self, code: Code, reason: str, culprit: ir.Node | None = None, hint: str | None = None
    ) -> None:
        super().__init__(reason)
        self.code = code
        self.reason = reason
        self.culprit = culprit
        self.hint = code.advice if hint is None else hint or None

    def as_missed(self, code: MissedCode, node: ir.Node | None) -> Missed:
        """What an attention misses that is fused in another way, after this was raised.

        The culprit is `node` where the decline names none. The advice of a code is left out: it is
        about attention that is not fused.
        """
        hint = None if self.hint == self.code.advice else self.hint
        return Missed(code, self.reason, label(self.culprit or node), hint)


def first_reason(reasons: Mapping[str, bool]) -> str | None:
    """The first of these reasons that holds; None where none does."""
    return next((reason for reason, holds in reasons.items() if holds), None)


def attempt(action: Callable[[], T]) -> T | Decline:
    """What an action returns, or the Decline that it raises.

    The traceback is taken off: it would keep alive what the frames of all callers hold, such as a
    session.
    """
    try:
        return action()
    except Decline as decline:
        return decline.with_traceback(None)


def if_possible(action: Callable[[], T]) -> T | None:
    """What an action returns; None where it raises a Decline, whose reason does not matter."""
    result = attempt(action)
    return None if isinstance(result, Decline) else result


def first_possible(actions: Iterable[Callable[[], T]]) -> T:
    """What the first of some actions returns that does not raise a Decline. Raises that of the
    first action where all do. There is at least one."""
    refusal: Decline | None = None
    for result in map(attempt, actions):
        if not isinstance(result, Decline):
            return result
        refusal = refusal or result
    assert refusal is not None
    raise refusal


def reworded(action: Callable[[], T], words: Callable[[Decline], Decline]) -> T:
    """What an action returns. Where it raises a Decline, raises what `words` makes of it."""
    result = attempt(action)
    if isinstance(result, Decline):
        better = words(result)
        raise better from result
    return result
