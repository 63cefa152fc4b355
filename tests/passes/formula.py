"""The float64 formula of an attention, step by step beside the model, and how exactly a model can meet it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.passes.writer import Array

Scores = npt.NDArray[np.float64]
ROUNDING = {"float16": (2.0**-11, 2e-3), "bfloat16": (2.0**-8, 2e-2)}
"""Half an ulp of the type, and what the rest of the model rounds; float32 and float64 are as `DEFAULT`."""
DEFAULT = (2.0**-24, 1e-5)


@dataclass
class Formula:
    """Scores in float64, rounded as the model rounds where a term is added: that decides what a masked row gives.

    `magnitude` is the sum of the absolute values that made up each score: float32 knows a score to
    half an ulp of it.
    """

    scores: Scores
    magnitude: Scores
    kind: type[np.floating[Any]] = np.float32
    addend: Array = field(default_factory=lambda: np.zeros(1))
    """The last term added."""
    kept: Array = field(default_factory=lambda: np.ones(1, np.bool_))
    """What the last selection kept."""

    def multiply(self, factor: float) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.scores = (self.scores * factor).astype(self.kind).astype(np.float64)
        self.magnitude = self.magnitude * abs(factor)

    def add(self, term: Array) -> None:
        with np.errstate(over="ignore", invalid="ignore"):
            self.scores = (self.scores + term).astype(self.kind).astype(np.float64)
        # Masks are added in float32 whatever the model's type (see `_formula`).
        self.magnitude = self.magnitude + np.where(np.abs(term) < 1e3, np.abs(term), 0)
        self.addend = term

    def raise_to(self, floor: float) -> None:
        self.scores = np.maximum(self.scores, floor)

    def select(self, keep: Array, fill: float) -> None:
        self.scores = np.where(keep, self.scores, fill)
        self.kept = keep

    def probabilities(self, sink: Scores | None = None) -> Scores:
        """The softmax of what the steps made, beside a sink where there is one."""
        with np.errstate(invalid="ignore"):
            peak = self._peak() if sink is None else np.maximum(self._peak(), sink)
            exponential = np.exp(self.scores - peak)
            total = exponential.sum(axis=-1, keepdims=True)
            return exponential / (total if sink is None else total + np.exp(sink - peak))

    def tolerance(self, dtype: str) -> Scores:
        """Of each row, relative to the largest result.

        The float type knows a score to half an ulp of what made it up, and a probability is off by as much. Sums with
        masks are known to half an ulp of float32, unless they swallow the score: then it does not matter.
        """
        ulp, base = ROUNDING.get(dtype, DEFAULT)
        known = ulp * self.magnitude + 2.0**-24 * np.where(np.abs(self.scores) < 1e7, np.abs(self.scores), 0)
        peak = self._peak()
        near = self.scores > peak - 100
        off = 4 * np.where(near, known, 0).max(axis=-1, keepdims=True)
        # A number such as -1e9 leaves of a score what its rounding makes of it: chance, unless it swallows all of it.
        with np.errstate(all="ignore"):
            step = np.spacing(np.abs(peak).astype(np.float32)).astype(np.float64)
        blurred = (np.abs(peak) >= 1e7) & (self.magnitude.max(axis=-1, keepdims=True) > step / 8)
        return np.asarray(base + np.where(blurred, math.inf, off))

    def _peak(self) -> Scores:
        with np.errstate(invalid="ignore"):
            return np.asarray(self.scores.max(axis=-1, keepdims=True))
