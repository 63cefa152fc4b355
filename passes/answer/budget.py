"""The budget of the proofs about one attention. It is a number of steps, and not of seconds, so
that the same model gets the same answer on every machine.

Each proof is bounded by itself: it remembers what it was asked, or gives up after so many
operators. The budget is for all of them together. Whoever follows a graph calls `spend` once for
each node. Where the budget is used up, `spend` raises the Decline that says so, and raises it again
whatever is tried next, so that the attention is given up soon.

Nothing is raised outside of `limited`, and nothing while nodes are made (`building`), because a
graph that is half changed cannot be left alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, attempt
from fa_compiler.passes.answer.report import Code

T = TypeVar("T")
STEPS = 100_000
"""The steps for one attention. Attentions of real models take up to 1,100. All of it is about a
second."""


@dataclass
class Budget:
    """The steps of one attention. `node` is the one that the report names where no other is
    known."""

    node: ir.Node
    limit: int
    spent: int = 0
    builds: bool = False
    ended: Decline | None = None
    """What was raised when it was used up."""

    def spend(self, steps: int, culprit: ir.Node | None) -> None:
        """Count steps. Raises Decline where they are too many."""
        self.spent += steps
        if self.spent > self.limit and not self.builds:
            if self.ended is None:
                reason = f"proving that it may be fused takes more than {self.limit:,} steps, all that one is given"
                self.ended = Decline(Code.BUDGET, reason, culprit or self.node)
            raise self.ended


_CURRENT: ContextVar[Budget | None] = ContextVar("budget", default=None)


@contextmanager
def limited(node: ir.Node) -> Iterator[Budget]:
    """A new budget, for the attention that the node stands for."""
    budget = Budget(node, STEPS)
    token = _CURRENT.set(budget)
    try:
        yield budget
    finally:
        _CURRENT.reset(token)


def limited_attempt(node: ir.Node, action: Callable[[], T]) -> T | Decline:
    """What an action returns, or why it declines, with a new budget. Where that was used up, this
    is the reason, whatever the action made of it."""
    with limited(node) as budget:
        result = attempt(action)
    return budget.ended or result if isinstance(result, Decline) else result


@contextmanager
def building() -> Iterator[None]:
    """Nodes are made: steps count, but nothing is raised."""
    budget = _CURRENT.get()
    if budget is None or budget.builds:
        yield
        return
    budget.builds = True
    try:
        yield
    finally:
        budget.builds = False


def spend(culprit: ir.Node | None = None, steps: int = 1) -> None:
    """Count steps of the attention at hand, if there is one. Raises Decline where its budget is
    used up."""
    budget = _CURRENT.get()
    if budget is not None:
        budget.spend(steps, culprit)
