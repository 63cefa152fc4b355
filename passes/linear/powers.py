"""Constants that hold the powers of decays. Lightning attention in blocks has e^(-s (i - j)) for
row i and column j of a block, where s is the slope of a head.

    tables :=
      1     neighbours along one axis have the same ratio, which is e^-s or e^s: the slopes of a
            table
    powers of slopes :=
      2     each element is e^(-n s) for an integer n, with the slope s of its place
      3   | 0 where e^(-n s) is too small for float32, and n is known from the other heads
      4   | 0, which masks

In the proof a slope is an unknown, and the element is the power n of its e^-s. What is proven holds
for every slope, so also for that of the file. The float32 numbers of a file differ from the powers
by their rounding, which `_allowed` bounds; the operator computes the powers from the slopes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.linear.field import ORDER, hashed, power, reduced
from fa_compiler.passes.linear.tensors import Exponents, Tensor

FEWEST = 3
"""Fewer elements along an axis show no ratio."""
MOST_POWERS = 1 << 20
MOST_SLOPES = 1024
SMALLEST = 2.0**-100
"""Smaller numbers show no ratio: float32 is about to underflow, and has fewer bits."""
UNDERFLOW = 87.0
"""e^-87 is about the smallest float32 with all bits."""
POWER_SEED = 0x51095


@dataclass
class Powers:
    """The slopes of the tables that were met."""

    slopes: list[float] = field(default_factory=list)
    """Different ones. Their places are their names in the proof."""
    errors: list[float] = field(default_factory=list)
    """How exact they are known."""
    tables: dict[ir.Value, np.ndarray] = field(default_factory=dict)
    """The places in `slopes` by the axes of the tables. The value is a constant with the logarithms
    of the decays, one for each head, which is in no graph yet."""

    def meet(self, array: np.ndarray) -> None:
        """Enter the slopes of an array, where it is a table."""
        logs = _logarithms(array)
        if logs is None:
            return
        for axis in range(array.ndim):
            found = _slopes(logs, axis)
            if found is not None:
                self._enter(*found)
                return

    def _enter(self, slopes: np.ndarray, errors: np.ndarray) -> None:
        named = [
            self._place(*map(float, each)) for each in zip(slopes.flat, errors.flat, strict=True)
        ]
        places = np.array(named).reshape(slopes.shape)
        if len(self.slopes) <= MOST_SLOPES and not any(
            np.array_equal(places, each) for each in self.tables.values()
        ):
            self.tables[ir.Value(name="decay")] = places

    def _place(self, slope: float, error: float) -> int:
        """The place of a slope. Of two values for one slope, the more exact one counts."""
        for place, known in enumerate(self.slopes):
            if abs(slope - known) <= error + self.errors[place]:
                if error < self.errors[place]:
                    self.slopes[place], self.errors[place] = slope, error
                return place
        self.slopes.append(slope)
        self.errors.append(error)
        return len(self.slopes) - 1

    def read(self, array: np.ndarray, seed: int) -> np.ndarray | None:
        """An array of powers modulo PRIME; None where it holds no powers of the slopes of one
        table."""
        if not self.tables or (logs := _logarithms(array)) is None:
            return None
        for places in self.tables.values():
            exponents = _exponents(logs, places, np.array(self.slopes)[places])
            if exponents is not None:
                random = np.broadcast_to(self._random(places, seed), array.shape)
                numbers = power(reduced(random * np.maximum(exponents, 0), ORDER))
                return np.where(exponents < 0, 0, numbers)  # 4: what is masked
        return None

    def decays(self, seed: int) -> dict[ir.Value, Tensor]:
        """The constants of the tables as tensors whose exponents are those of the decays."""
        made = dict[ir.Value, Tensor]()
        for value, places in self.tables.items():
            flat = places.reshape(-1)
            logs = -np.array(self.slopes, dtype=np.float32)[flat]
            value.const_value = ir.tensor(logs)
            made[value] = Tensor(logs.shape, exact=logs, sums=Exponents(self._random(flat, seed)))
        return made

    def _random(self, places: np.ndarray, seed: int) -> np.ndarray:
        return hashed([places.astype(np.int64)], seed + POWER_SEED, ORDER)


def _logarithms(array: np.ndarray) -> np.ndarray | None:
    """The negated logarithms of numbers from 0 to 1, NaN for 0. None for other numbers, and where
    all are 0 or 1."""
    if array.dtype not in (np.float32, np.float64) or array.size < 2:
        return None
    if not ((array >= 0) & (array <= 1)).all() or np.isin(array, (0, 1)).all():
        return None
    wide = array.astype(np.float64)
    logs: np.ndarray = np.where(wide == 0, np.nan, -np.log(np.where(wide == 0, 1, wide)))
    return logs


def _allowed(logs: np.ndarray) -> np.ndarray:
    """How far the logarithm of a power may be from an integer times the slope: exporters compute
    the exponent and its exponential in float32, with a few roundings of 2^-24, of which the former
    counts as often as the exponent is large."""
    return 2.0**-21 * (1 + logs)


def _slopes(logs: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray] | None:
    """The slopes along an axis and their errors, 1 along the axes on which they do not depend; None
    where the array is no table there."""
    lines = np.moveaxis(logs, axis, -1)
    shown = np.where(lines < -np.log(SMALLEST), lines, np.nan)
    count, places = lines.shape[-1], np.arange(lines.shape[-1])
    known = ~np.isnan(shown)
    first, last = np.where(known, places, count).min(-1), np.where(known, places, -1).max(-1)
    span = np.maximum(last - first, 0)
    if count < FEWEST or span.max(initial=0) < FEWEST - 1:
        return None
    start, end = (
        np.take_along_axis(shown, np.clip(each, 0, count - 1)[..., None], -1)
        for each in (first, last)
    )
    step = (end - start) / np.maximum(span, 1)[..., None]
    wanted = start + (places - first[..., None]) * step
    if not (~known | (np.abs(shown - wanted) <= _allowed(shown))).all():
        return None
    is_line = span >= FEWEST - 1
    slopes = np.where(is_line, np.abs(step[..., 0]), 0)
    errors = np.where(is_line, _allowed(np.fmax(start, end)[..., 0]) / np.maximum(span, 1), np.inf)
    for other in range(slopes.ndim):
        slopes, errors = _without(slopes, errors, other)
    if not (slopes > errors).all():
        return None
    return np.expand_dims(slopes, axis), np.expand_dims(errors, axis)


def _without(slopes: np.ndarray, errors: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """The slopes and their errors without an axis along which they are the same: then the most
    exact ones."""
    best = np.expand_dims(errors.argmin(axis), axis)
    slope, error = (np.take_along_axis(each, best, axis) for each in (slopes, errors))
    if (np.abs(slopes - slope) <= errors + error).all():
        return slope, error
    return slopes, errors


def _exponents(logs: np.ndarray, places: np.ndarray, slopes: np.ndarray) -> np.ndarray | None:
    """The powers of the slopes that elements are, -1 where they are 0; None where they are no
    powers."""
    try:
        if np.broadcast_shapes(logs.shape, places.shape) != logs.shape:
            return None
    except ValueError:
        return None
    numbers = np.round(logs / slopes)  # 2: an integer
    if not (np.isnan(logs) | (np.abs(logs - numbers * slopes) <= _allowed(logs))).all():
        return None
    if np.fmax.reduce(numbers, None, initial=0) > MOST_POWERS:
        return None
    heads = tuple(axis - slopes.ndim for axis, size in enumerate(slopes.shape) if size > 1)
    low, high = (
        each.reduce(numbers, heads, keepdims=True) if heads else numbers
        for each in (np.fmin, np.fmax)
    )
    common = np.where(low == high, low, np.nan)
    vanished = np.isnan(numbers) & (common * slopes >= UNDERFLOW)  # 3: known from the other heads
    return np.where(vanished, common, np.where(np.isnan(numbers), -1, numbers)).astype(np.int64)
