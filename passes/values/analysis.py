"""The common part of the analyses of values: each finds one fact per value, remembers it and gives
up long chains."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import onnx_ir as ir

from fa_compiler.passes.answer.budget import spend
from fa_compiler.passes.values.shapes import ShapeInfo

T = TypeVar("T")

MAX_DEPTH = 64
"""Longer chains of operators are given up, because Python's stack is finite. Masks are not made by
such chains."""


@dataclass
class Analysis(ABC, Generic[T]):
    """Finds a fact about each value of a model from the facts about its producer's inputs."""

    info: ShapeInfo
    _known: dict[ir.Value, T | None] = field(default_factory=dict)
    _depth: int = 0

    def of(self, value: ir.Value | None) -> T | None:
        """The fact about a value; None when nothing is known."""
        if value is None:
            return None
        if value not in self._known:
            if self._depth >= MAX_DEPTH:
                return None
            spend(value.producer())
            self._depth += 1
            try:
                self._known[value] = self._compute(value)
            finally:
                self._depth -= 1
        return self._known[value]

    @abstractmethod
    def _compute(self, value: ir.Value) -> T | None:
        """The fact about a value that is not in `_known` yet."""
