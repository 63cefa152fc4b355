"""The inputs of a case as files, the correct results, and the error of a result.

This file uses only NumPy, because the workers of other interpreters import it, too. A bfloat16 array holds the 16 bits
of each number (uint16), because NumPy does not have this type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.speed.cases import Case

Array = npt.NDArray[Any]

CACHE_LINE = 64
"""Bytes."""

CHECKED_ROWS = 512
"""The forward part is checked on this many random rows of each head, including the first and the last row."""

CHECKED_SCORES = 1 << 23
"""With many keys fewer rows are checked, so that their float64 scores stay below this number."""

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 4e-2}
"""The allowed error, relative to the largest value. The truth is computed from the rounded inputs, so the error comes
only from rounding inside the operator and of its result: 2^-24, 2^-11 and 2^-8 for one number. In a gradient several
such errors add up, and its parts cancel. A wrong mask or layout gives an error of more than 0.1."""

OUTPUTS = {"forward": ("out",), "decode": ("out",), "backward": ("dq", "dk", "dv"), "both": ("out", "dq", "dk", "dv")}


def to_bits(values: Array, dtype: str) -> Array:
    """float32 numbers in the stored form of `dtype`. The rounding to bfloat16 is to nearest, ties to even."""
    if dtype != "bfloat16":
        return values.astype(dtype)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bits(values: Array, dtype: str) -> Array:
    """The numbers of the stored form of `dtype` as float32."""
    if dtype != "bfloat16":
        return values.astype(np.float32)
    return (values.astype(np.uint32) << 16).view(np.float32)


def draw(case: Case) -> dict[str, Array]:
    """The inputs q, k, v, for gradients dy, and `valid` [batch, keys] (for pad) or `bias`."""
    rng = np.random.default_rng(7)
    row: tuple[int, ...] = (case.batch, case.rows, case.heads * case.size)
    key: tuple[int, ...] = (case.batch, case.keys, case.kv_heads * case.size)
    if case.kind == "decode":
        key = (case.batch, case.kv_heads, case.keys, case.size)
    shapes = {"q": row, "k": key, "v": key} | ({"dy": row} if case.gradient else {})
    data = {name: to_bits(rng.standard_normal(shape, np.float32), case.dtype) for name, shape in shapes.items()}
    if case.mask == "pad":
        data["valid"] = np.ones((case.batch, case.keys), bool)
        data["valid"][:, case.keys * 7 // 8 :] = False
    if case.mask == "bias":
        bias = rng.standard_normal((1, case.heads, case.rows, case.keys), np.float32)
        data["bias"] = to_bits(bias, case.dtype)
    return data


def visible(case: Case, rows: Array) -> Array | None:
    """The visible keys [rows, keys] of a structural mask; None if the case has none."""
    key, row = np.arange(case.keys), rows[:, None] + case.keys - case.rows
    if case.mask == "causal":
        return key <= row
    if case.mask == "window":
        return (key <= row) & (key > row - case.window)
    return None


def heads_first(array: Array, case: Case, heads: int) -> Array:
    """A query, key or value of the case as [batch, heads, rows or keys, size]."""
    if array.ndim == 4:
        return array
    return array.reshape(case.batch, array.shape[1], heads, case.size).transpose(0, 2, 1, 3)


def probabilities(case: Case, data: dict[str, Array], dtype: str = "float32") -> Array:
    """The probabilities [batch, heads, rows, keys] that a forward part saves for an unfused backward part."""
    q, k = (heads_first(from_bits(data[name], case.dtype), case, n).astype(dtype) for name, n in _operands(case)[:2])
    result = np.empty((case.batch, case.heads, case.rows, case.keys), dtype)
    for b in range(case.batch):
        for h in range(case.heads):
            result[b, h] = _softmax(case, data, q[b, h], k[b, h // (case.heads // case.kv_heads)], b, h, None)
    return result


def truth(case: Case, data: dict[str, Array]) -> tuple[Array, list[Array]]:
    """The checked rows, and the float64 values of each of `OUTPUTS` in these rows."""
    rows = np.arange(case.rows)
    checked = min(CHECKED_ROWS, CHECKED_SCORES // case.keys)
    if not case.gradient and case.rows > checked:
        inner = np.random.default_rng(1).choice(rows[1:-1], checked - 2, replace=False)
        rows = np.sort(np.concatenate([rows[[0, -1]], inner]))
    operands = {n: heads_first(from_bits(data[n], case.dtype), case, heads) for n, heads in _operands(case)}
    results = {name: np.zeros((case.batch, case.heads, len(rows), case.size)) for name in ("out", "dq")}
    results |= {name: np.zeros((case.batch, case.kv_heads, case.keys, case.size)) for name in ("dk", "dv")}
    for b in range(case.batch):
        for h in range(case.heads):
            g = h // (case.heads // case.kv_heads)
            q, k, v = (operands[n][b, at].astype(np.float64) for n, at in (("q", h), ("k", g), ("v", g)))
            p = _softmax(case, data, q[rows], k, b, h, rows)
            out = p @ v
            results["out"][b, h] = out
            if case.gradient:
                dy = operands["dy"][b, h].astype(np.float64)
                ds = p * (dy @ v.T - (dy * out).sum(-1, keepdims=True)) * case.size**-0.5
                results["dq"][b, h] = ds @ k
                results["dk"][b, g] += ds.T @ q
                results["dv"][b, g] += p.T @ dy
    return rows, [results[name].transpose(0, 2, 1, 3).reshape(case.batch, results[name].shape[2], -1)
                  for name in OUTPUTS[case.kind]]  # fmt: skip


def _operands(case: Case) -> list[tuple[str, int]]:
    names = [("q", case.heads), ("k", case.kv_heads), ("v", case.kv_heads)]
    return [*names, ("dy", case.heads)] if case.gradient else names


def _softmax(case: Case, data: dict[str, Array], q: Array, k: Array, b: int, h: int, rows: Array | None) -> Array:
    rows = np.arange(case.rows) if rows is None else rows
    scores = q @ k.T * case.size**-0.5
    if case.mask == "bias":
        scores += from_bits(data["bias"][0, h], case.dtype)[rows]
    left = data["valid"][b] if case.mask == "pad" else visible(case, rows)
    if left is not None:
        scores = np.where(left, scores, -np.inf)
    p: Array = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return p


def aligned(shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
    """A new array that begins on a cache line, like the tensors inside a model and unlike most arrays of NumPy.

    Its pages are allocated, so the memory of a result is not part of the growth of a call.
    """
    count = math.prod(shape) * dtype.itemsize
    memory = np.full(count + CACHE_LINE, 0, np.uint8)
    begin = -memory.ctypes.data % CACHE_LINE
    return memory[begin : begin + count].view(dtype).reshape(shape)


def write_inputs(case: Case, folder: Path) -> dict[str, Array]:
    """The inputs as files of the folder."""
    data = draw(case)
    for name, array in data.items():
        np.save(folder / f"{name}.npy", array)
    return data


def write(case: Case, folder: Path) -> None:
    """Inputs and truth as files of the folder."""
    rows, right = truth(case, write_inputs(case, folder))
    np.save(folder / "rows.npy", rows)
    for name, array in zip(OUTPUTS[case.kind], right, strict=True):
        np.save(folder / f"right_{name}.npy", array)


def read(folder: Path) -> dict[str, Array]:
    """The inputs that were written."""
    names = ("q", "k", "v", "dy", "valid", "bias")
    data = {}
    for name in names:
        if (folder / f"{name}.npy").exists():
            stored = np.load(folder / f"{name}.npy", mmap_mode="r")
            data[name] = aligned(stored.shape, stored.dtype)
            data[name][...] = stored
    return data


def error(case: Case, folder: Path, results: Sequence[Array]) -> float:
    """The largest difference of any result from the truth, relative to the largest value; NaN if one is NaN."""
    rows, worst = np.load(folder / "rows.npy"), 0.0
    for name, result in zip(OUTPUTS[case.kind], results, strict=True):
        right = np.load(folder / f"right_{name}.npy")
        if not case.gradient:
            result = result[:, rows]
        off = float(np.abs(result.reshape(right.shape) - right).max() / np.abs(right).max())
        worst = off if not off <= worst else worst
    return worst
