"""Soft caps of the scores, the softmax over the attended keys of a row, and the result of a row
that attends no key."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa_compiler.reference.call import Bools, Floats

FLT_MAX = float(np.finfo(np.float32).max)
FLT_MIN = float(np.finfo(np.float32).tiny)
"""The smallest normal number of float32: smaller weights are 0 in the operator."""


class Softmax(NamedTuple):
    """P [S1,S2], which is 0 for a key that is not read; the read keys [S1,S2]; max [S1] and sum
    [S1] of each row."""

    probabilities: Floats
    read: Bools
    max: Floats
    sum: Floats


def capped(scores: Floats, softcap: float) -> Floats:
    """c * tanh(scores / c) for a `softcap` c, the attribute cpu_softcap; the scores themselves if
    it is 0."""
    return scores if softcap == 0.0 else softcap * np.tanh(scores / softcap)


def softmax(
    scores: Floats,
    allowed: Bools,
    sink: float | None = None,
    empty_rows: str = "",
    nan_rows: str = "",
    mask_value: float | Floats = -np.inf,
    valueless: bool = False,
) -> Softmax:
    """Softmax of the scores [S1,S2] over the allowed keys. A sink takes part in max and sum, but
    has no value.

    An *empty* row attends no key. As in the operator, its max is -FLT_MAX and its sum FLT_MAX, or
    with a sink the sink and 1. Its probabilities depend on `empty_rows`, the extension attribute
    cpu_empty_rows:

        "", "zero"  0
        "mean"      uniform over all keys
        "unmasked"  the softmax over all keys
        "nan"       NaN

    Every other row is a plain IEEE softmax, which may be NaN. `nan_rows`, the attribute
    cpu_nan_rows, replaces rows of NaN by 0: with "zero" all of them, with "infinite" those whose
    attended scores are all -inf. The values of the attended keys are read there, too: a NaN among
    them stays a NaN.

    With a finite `mask_value`, the attribute cpu_mask_value, keys that are not allowed have that
    score, so no row is empty. They are read where their weight, relative to that of the largest
    score, is not 0 in float32. With the attribute cpu_masked_bias, `mask_value` is [S1,S2] and may
    be infinite: every key has a score of its own. With `valueless`, the attribute
    cpu_masked_values, these keys take part in the sum, but their values are not read.
    """
    attended = allowed
    scored = isinstance(mask_value, np.ndarray) or bool(np.isfinite(mask_value))
    if scored:
        scores, allowed = np.where(allowed, scores, mask_value), np.ones_like(allowed)
    probabilities, relative, row_max, row_sum = _plain(scores, allowed, sink)
    read = allowed
    undefined = np.isnan(row_sum)
    empty = np.logical_not(allowed.any(axis=1))
    row_max[empty] = -FLT_MAX if sink is None else sink
    row_sum[empty] = FLT_MAX if sink is None else 1.0
    probabilities[empty] = 0.0
    if nan_rows:
        silenced = undefined if nan_rows == "zero" else row_max == -np.inf
        probabilities[silenced] = 0.0
        relative[silenced] = 0.0
    if scored:
        read = attended | (relative >= FLT_MIN) | np.isnan(probabilities)
    if empty_rows not in ("", "zero"):
        read = read | empty[:, None]
        if empty_rows == "mean":
            probabilities[empty] = 1.0 / scores.shape[1]
        elif empty_rows == "nan":
            probabilities[empty] = np.nan
        else:
            probabilities[empty] = _plain(scores[empty], np.ones_like(allowed)[empty], None)[0]
    if valueless and scored:
        probabilities, read = np.where(attended, probabilities, 0.0), attended
    return Softmax(probabilities, read, row_max, row_sum)


def _plain(
    scores: Floats, allowed: Bools, sink: float | None
) -> tuple[Floats, Floats, Floats, Floats]:
    """The probabilities [S1,S2], the same relative to that of the largest score, and max [S1] and
    sum [S1]."""
    row_max = np.where(allowed, scores, -np.inf).max(axis=1)
    if sink is not None:
        row_max = np.maximum(row_max, sink)
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.where(allowed, np.exp(scores - row_max[:, None]), 0.0)
        row_sum = weights.sum(axis=1)
        if sink is not None:
            row_sum = row_sum + np.exp(sink - row_max)
        probabilities = np.where(allowed, weights / row_sum[:, None], 0.0)
    return probabilities, weights, row_max, row_sum


def weighted_sum(weights: Floats, vectors: Floats, read: Bools) -> Floats:
    """weights [A,B] @ vectors [B,D]. A vector that is not read need not be finite."""
    finite = np.isfinite(vectors).all(axis=1)
    with np.errstate(invalid="ignore"):
        out: Floats = weights[:, finite] @ vectors[finite]
        for index in np.flatnonzero(~finite):
            term = weights[:, index, None] * vectors[index]
            out += np.where(read[:, index, None], term, 0.0)
    return out
