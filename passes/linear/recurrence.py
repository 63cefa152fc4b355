"""The recurrence that a linear attention computes, modulo a prime.

For each token, with the state S [Dk, Dv] of a head:

    S' = diag(e^decay) S
    S  = S' + k (f (v - S'^T k))^T        by the delta rule, where f is beta
    S  = S' + k (f v)^T                   without it
    S  = S' + k (f v)^T + p (r^T S')      with a correction of rank one, which may also read S
                                          instead of S'
    o  = c S^T q

A column of S only depends on the same column of v. So instead of all columns a random sum of them
is computed: if it is right, all of them are, up to the chance of 1 in 2^31.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from fa_compiler.passes.linear.field import hashed, reduced, times

COLUMNS = 0xC01


@dataclass(frozen=True)
class Tokens:
    """The operands modulo PRIME: query and key [B,T,H,Dk], value [B,T,H,Dv], state [B,H,Dk,Dv],
    decay (its power) [B,T,H,1 or Dk], factor [B,T,H]."""

    query: np.ndarray
    key: np.ndarray
    value: np.ndarray
    state: np.ndarray | None = None
    decay: np.ndarray | None = None
    factor: np.ndarray | None = None
    is_delta: bool = False
    write: np.ndarray | None = None
    read: np.ndarray | None = None
    """p and r, [B,T,H,Dk]."""
    reads_before_decay: bool = False


@dataclass(frozen=True)
class Outcome:
    """A random sum of the columns of the outputs [B,T,H] and of the last state [B,H,Dk]."""

    output: np.ndarray
    state: np.ndarray


def columns(array: np.ndarray) -> np.ndarray:
    """The random sum of the columns, which are the last axis."""
    return dot(array, _weights(array.shape[-1]))


@cache
def _weights(count: int) -> np.ndarray:
    """The factors of the random sum of so many columns."""
    return hashed([np.arange(count, dtype=np.int64)], COLUMNS)


def dot(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The sum of the products along the last axis."""
    return reduced(times(left, right).sum(axis=-1))


def recurrence(tokens: Tokens, length: int | None = None) -> Outcome:
    """The outcome for the first tokens, or all of them."""
    value = columns(tokens.value)
    batch, total, heads, size = tokens.key.shape
    state = (
        np.zeros((batch, heads, size), np.int64) if tokens.state is None else columns(tokens.state)
    )
    outputs = []
    for place in range(total if length is None else length):
        key, before = tokens.key[:, place], state
        if tokens.decay is not None:
            state = times(state, tokens.decay[:, place])
        written = value[:, place]
        if tokens.is_delta:
            written = reduced(written - dot(state, key))
        if tokens.factor is not None:
            written = times(written, tokens.factor[:, place])
        after = reduced(state + times(key, written[..., None]))
        if tokens.write is not None and tokens.read is not None:
            held = dot(before if tokens.reads_before_decay else state, tokens.read[:, place])
            after = reduced(after + times(tokens.write[:, place], held[..., None]))
        state = after
        outputs.append(dot(state, tokens.query[:, place]))
    return Outcome(np.stack(outputs, 1), state)
