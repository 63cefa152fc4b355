"""The operators of a sharded model: those with which a rank knows its part of the sequence and
talks to the others.

A sharded model is one file for all ranks. The sequence of `length` tokens is cut into chunks, and
each rank has one chunk or, in the zigzag order, two. The other tensors of the graph are either
whole, equal on all ranks, or hold the rank's own tokens only.

    operator           inputs                        outputs
    -----------------  ----------------------------  --------------------------------------------------------------
    SequencePart       (length)                      int64 [L], [1] and [1]: the positions of the rank's tokens, the
                                                     number of all tokens, and the number L of its own
    AllGather          part                          the parts of all ranks along `axis`, in the order of the sequence
    AllReduce          part                          the sum over the ranks of each element
    TokenExtremes      part                          the largest or smallest (`reduction`, max or min) of each element
                                                     over all tokens, or the parts of all ranks where one has a NaN
    SelectTokens       part, indices                 Gather(whole, indices, axis) from the parts of all ranks
    SequenceAttention  those of FlashAttentionScore  attention_out of the rank's own queries to the keys of all ranks;
                                                     also softmax_max and softmax_sum, if a gradient reads them
    SequenceGradient   those of its gradient         dq, dk and dv of the rank's own tokens
    CacheAttention     those of FlashAttentionScore  attention_out, whole, of whole queries to the keys of all ranks
    SequenceStates     those of FlashLinearAttention the output of the rank's own tokens, and present_state, whole
    SequenceTails      those of ShortConvolution     the output of the rank's own tokens, and present_state, whole

TokenExtremes has the `reduction` max or min. Its dimension `axis` has the tokens alone, in front of
others (`inner` 0) or behind them (`inner` 1), and has the others alone in the result. So ReduceMax
of the result along this dimension is ReduceMax of the whole tensor. What it gives where an element
is NaN depends on all elements, in ONNX Runtime: the result then is the whole tensor.

What they make of the parts' numbers, so that the result is that of one process:

    operator           NaN, infinities              integers and 16 bits        parts without a token or key
    -----------------  ---------------------------  --------------------------  ------------------------------------
    AllGather,         travel as they are           travel as they are          a rank has a token at least; of caches
    SelectTokens                                                                none
    AllReduce          as a sum has them            integers wrap around; the   0, which a sum does not notice
                                                    rules add 16 bits in 32
    TokenExtremes      NaN: the whole tensor        exact                       there are none
    SequenceAttention  ring: all ranks gather       ring: rounded once a part   no weight beside a part with keys: its
                       where a part of a row has                                sum tells it, since its maximum may be
                       one; else as they are                                    that of keys, too
    CacheAttention     all ranks gather             rounded once a part         the same; if no rank has a key and the
                                                                                row is not 0, all ranks gather
    SequenceGradient   as sums have them            added in float32            rows without a key reach all keys
    SequenceStates     all ranks gather             states are float32 between  there are none
                                                    the ranks
    SequenceTails      travel as they are           travel as they are          there are none

SequenceAttention has the attributes of FlashAttentionScore and `method`, SequenceGradient those of
FlashAttentionScoreGrad and the `method` of its attention, which is gather or ring. query, key,
value, dy and attention_in hold the rank's own tokens, and the statistics its own rows. sparse_mode
is 0, and pre_tockens and next_tockens limit the keys even if there is no atten_mask: row i attends
key j if -pre_tockens <= j - i <= next_tockens, where i and j are positions in the whole sequence. A
bias or mask has the keys of the whole sequence as columns. Its rows are the rank's own, or with the
method all-to-all those of the whole sequence; a size of 1 is repeated.

SequenceStates and SequenceTails have the attributes of their operators. The states and the weights
are whole, and everything else holds the rank's own tokens.

A model that decodes with caches has another sequence: that of the keys. Its first tokens are the
past, whose keys the caches hold; the new tokens follow. A SequencePart without an input is that of
the past. With an input, int64 [1], it is that of `length` tokens, the new ones included, and has a
fourth output: which of the new tokens are the rank's own, int64 places that count from the first
new one. CacheAttention has the attributes of FlashAttentionScore. key, value and key_rope hold the
rank's own tokens, and everything else is whole. Its sparse_mode is 0, where row i has the position
i, or 4, where the last row has the position of the last key. Its band applies as that of
SequenceAttention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from fa_compiler.op_registry.geometry import UNLIMITED

DOMAIN = "fa_compiler.parallel"
VERSION = 1
METADATA_KEY = "fa_compiler.parallel"
"""The key of the metadata of a sharded model: JSON with the number of ranks, the order, the axes of
the sequence, and its length where the model fixes it."""

SEQUENCE_PART = "SequencePart"
ALL_GATHER = "AllGather"
ALL_REDUCE = "AllReduce"
TOKEN_EXTREMES = "TokenExtremes"
SELECT_TOKENS = "SelectTokens"
SEQUENCE_ATTENTION = "SequenceAttention"
CACHE_ATTENTION = "CacheAttention"
SEQUENCE_GRADIENT = "SequenceGradient"
SEQUENCE_STATES = "SequenceStates"
SEQUENCE_TAILS = "SequenceTails"
SPECS = {
    SEQUENCE_ATTENTION: "FlashAttentionScore",
    CACHE_ATTENTION: "FlashAttentionScore",
    SEQUENCE_GRADIENT: "FlashAttentionScoreGrad",
    SEQUENCE_STATES: "FlashLinearAttention",
    SEQUENCE_TAILS: "ShortConvolution",
}
"""The operator whose inputs and attributes each of these has."""
STATE_OUTPUTS = ("output", "present_state")
"""The outputs of SequenceStates and SequenceTails. The second one is there if it is read."""
STATISTICS = ("softmax_max", "softmax_sum")
FORWARD_OUTPUTS = ("attention_out", *STATISTICS)
"""The outputs of SequenceAttention. The last two are there if a gradient reads them."""
GRADIENT_OUTPUTS = ("dq", "dk", "dv")
"""The outputs of SequenceGradient."""

GATHER, ALL_TO_ALL, RING = "gather", "all-to-all", "ring"
METHODS = (GATHER, ALL_TO_ALL, RING)
"""How SequenceAttention brings queries and keys together: every rank gathers all keys and values;
every rank gets all tokens of some heads; or keys and values travel from rank to rank."""

MERGE = "merge"
"""The method of CacheAttention: every rank attends to the keys that it has, and the results are
merged."""

CONTIGUOUS, ZIGZAG = "contiguous", "zigzag"
ORDERS = (CONTIGUOUS, ZIGZAG)
"""Which chunks a rank has. Contiguous: of as many chunks as there are ranks, its own. Zigzag: of
twice as many, the one of its number and the one of its number from the end, so that all ranks have
the same work below a causal mask."""

CYCLIC = "cyclic"
"""The order of caches: the rank r of N has the positions r, r + N, r + 2 N and so on. A token that
is appended changes no other one's place, and the parts of the ranks differ by at most one token."""

Chunk = tuple[int, int]
"""The positions of a chunk: the first one, and the one after the last."""


def chunk_count(order: str, ranks: int) -> int:
    """The number of chunks of a sequence."""
    return ranks if order == CONTIGUOUS else 2 * ranks


def chunk_numbers(order: str, ranks: int, rank: int) -> tuple[int, ...]:
    """The numbers of the chunks that one rank has."""
    return (rank,) if order == CONTIGUOUS else (rank, 2 * ranks - 1 - rank)


def chunks(order: str, ranks: int, rank: int, length: int) -> tuple[Chunk, ...]:
    """The chunks of one rank. The sizes of all chunks of a sequence differ by at most one."""
    count = chunk_count(order, ranks)
    ends = [length * number // count for number in range(count + 1)]
    every = list(pairwise(ends))
    return tuple(every[number] for number in chunk_numbers(order, ranks, rank))


def positions(own: Sequence[Chunk]) -> np.ndarray:
    """The positions of the tokens of some chunks, int64."""
    return np.concatenate([np.arange(start, stop, dtype=np.int64) for start, stop in own])


def owners(of_ranks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The owner of every position of a sequence, and the place of the position among the owner's
    tokens, int64.

    `of_ranks` are the positions of each rank's tokens.
    """
    length = sum(map(len, of_ranks))
    owner, place = np.empty(length, np.int64), np.empty(length, np.int64)
    for rank, own in enumerate(of_ranks):
        owner[own], place[own] = rank, np.arange(len(own))
    return owner, place


def keys_in_band(rows: Chunk, keys: Chunk, pre: int, after: int) -> Chunk | None:
    """The keys of a range that a band with these diagonals leaves some row of another range; None
    if there are none."""
    start = keys[0] if pre >= UNLIMITED else max(keys[0], rows[0] - pre)
    stop = keys[1] if after >= UNLIMITED else min(keys[1], rows[1] + after)
    return (start, stop) if start < stop else None


def shortest(order: str, ranks: int) -> int:
    """The length of the shortest sequence of which every chunk has a token. It is 2 at least: a
    dimension of 1 would be broadcast."""
    return max(2, chunk_count(order, ranks))
