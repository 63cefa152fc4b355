"""The softmax over the attended keys of a row, and what a row gives that attends none."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa_compiler.reference.call import Bools, Floats

FLT_MAX = float(np.finfo(np.float32).max)


class Softmax(NamedTuple):
    """P [S1,S2] (0 where a key is not read), the keys that are read [S1,S2], and max and sum per row [S1]."""

    probabilities: Floats
    read: Bools
    max: Floats
    sum: Floats


def softmax(
    scores: Floats,
    allowed: Bools,
    sink: float | None = None,
    empty_rows: str = "",
    nan_rows: str = "",
    mask_value: float | Floats = -np.inf,
    valueless: bool = False,
) -> Softmax:
    """Softmax of [S1,S2] scores over the allowed keys; a sink takes part in max and sum, but has no value.

    An *empty* row attends no key. Its max is -FLT_MAX and its sum FLT_MAX, or with a sink (sink, 1), as the
    operator writes them. Its probabilities follow `empty_rows`, the extension attribute cpu_empty_rows:

        "", "zero"  0
        "mean"      uniform over all keys
        "unmasked"  the softmax over all keys
        "nan"       NaN

    Every other row is a plain IEEE softmax, NaN where that is undefined. `nan_rows`, the attribute cpu_nan_rows, makes
    such rows 0: with "zero" all of them, with "infinite" those whose attended scores are all -inf.

    With a finite `mask_value`, the attribute cpu_mask_value, keys that are not allowed have that score and are read:
    no row is empty. It is [S1,S2] where the attribute cpu_masked_bias gives every key a score of its own, finite or
    not. If `valueless`, the attribute cpu_masked_values, they take part in the sum, but are not read.
    """
    attended = allowed
    scored = isinstance(mask_value, np.ndarray) or bool(np.isfinite(mask_value))
    if scored:
        scores, allowed = np.where(allowed, scores, mask_value), np.ones_like(allowed)
    probabilities, row_max, row_sum = _plain(scores, allowed, sink)
    read = allowed
    undefined = np.isnan(row_sum)
    empty = np.logical_not(allowed.any(axis=1))
    row_max[empty] = -FLT_MAX if sink is None else sink
    row_sum[empty] = FLT_MAX if sink is None else 1.0
    probabilities[empty] = 0.0
    if nan_rows:
        probabilities[undefined if nan_rows == "zero" else row_max == -np.inf] = 0.0
    if empty_rows not in ("", "zero"):
        read = allowed | empty[:, None]
        if empty_rows == "mean":
            probabilities[empty] = 1.0 / scores.shape[1]
        elif empty_rows == "nan":
            probabilities[empty] = np.nan
        else:
            probabilities[empty] = _plain(scores[empty], np.ones_like(allowed)[empty], None)[0]
    if valueless and scored:
        probabilities, read = np.where(attended, probabilities, 0.0), attended
    return Softmax(probabilities, read, row_max, row_sum)


def _plain(scores: Floats, allowed: Bools, sink: float | None) -> tuple[Floats, Floats, Floats]:
    row_max = np.where(allowed, scores, -np.inf).max(axis=1)
    if sink is not None:
        row_max = np.maximum(row_max, sink)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.where(allowed, np.exp(scores - row_max[:, None]), 0.0)
        row_sum = weights.sum(axis=1)
        if sink is not None:
            row_sum = row_sum + np.exp(sink - row_max)
        probabilities = np.where(allowed, weights / row_sum[:, None], 0.0)
    return probabilities, row_max, row_sum


def weighted_sum(weights: Floats, vectors: Floats, read: Bools) -> Floats:
    """weights [A,B] @ vectors [B,D], where a vector that is not read need not be finite."""
    finite = np.isfinite(vectors).all(axis=1)
    with np.errstate(invalid="ignore"):
        out: Floats = weights[:, finite] @ vectors[finite]
        for index in np.flatnonzero(~finite):
            term = weights[:, index, None] * vectors[index]
            out += np.where(read[:, index, None], term, 0.0)
    return out
