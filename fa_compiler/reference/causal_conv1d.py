"""What the causal convolutions of CANN share: their sequences, and the convolution of each channel.

    y[t] = sum over j < K of weight[j] padded[t + j]

`padded` is the K - 1 tokens before the first one and then the tokens of the sequence.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from fa_compiler.reference.call import Array, Floats, OpCall


def sequences(x: Array, limits: Array | None) -> list[slice]:
    """Where the sequences are among the rows of x as [tokens,dim]."""
    if x.ndim == 2:
        return [
            slice(int(first), int(end)) for first, end in pairwise(() if limits is None else limits)
        ]
    batch, length = x.shape[:2]
    return [slice(entry * length, (entry + 1) * length) for entry in range(batch)]


def convolved(padded: Floats, weight: Floats) -> Floats:
    """The convolution [tokens,dim] of [K-1+tokens,dim] with [K,dim]."""
    tokens = padded.shape[0] - (weight.shape[0] - 1)
    result = np.zeros((tokens, padded.shape[1]))
    for j, row in enumerate(weight):
        result += row * padded[j : j + tokens]
    return result


def line_of(call: OpCall, sequence: int, skipped: int) -> int | None:
    """The line of conv_states of a sequence, None if it is skipped. Without cache_indices it is
    that of its number."""
    lines = call.optional("cache_indices")
    if lines is None:
        return sequence
    line = int(lines[sequence])
    return None if line == skipped else line
