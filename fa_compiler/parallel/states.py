"""How the ranks compute one SequenceStates or SequenceTails together.

**States.** The state behind some tokens is linear in the state in front of them:

    behind = M front + U

U is the state behind the tokens if the state in front is 0. M is a matrix of [Dk, Dk] with a
correction: the state behind the tokens if the one in front is the identity and the values are 0.
Without one it is the decay of all tokens, a factor for each head or each of its lines. The columns
of a state do not depend on each other, so one run gives both: zeros stand behind the values, and
the identity beside the zeros of the state.

    chunk        0          1                2                3
    from 0       U0, M0     U1, M1           U2, M2           U3, M3      each rank computes those of its chunks,
                                                                          and sends them to all others
    states       S0         S1 = M0 S0 + U0  S2 = M1 S1 + U1  ...         each rank computes all of them
    results      O0         O1               O2               O3          each rank computes its own, from S0 to S3

Of N ranks, one sends (N - 1) c B H (Dk Dv + m) numbers of float32, where it has c chunks (1 or 2).
With a correction m is Dk Dk, and else it is the number of the decays of a head. This does not grow
with the sequence. A rank computes its tokens twice, with a correction the first time on states that
are wider by Dk.

A state or a factor that is not finite, or an infinite product, says more than sums of parts do: 0
times infinity. All ranks then gather the tokens and compute them as one process does. They decide
alike, because all know the same numbers.

**Tails.** A result of a convolution of width K needs the K - 1 tokens in front of it. Each rank
sends the last ones of its chunks to all others: (N - 1) c B C (K - 1) numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry.collectives import STATE_OUTPUTS, Chunk
from fa_compiler.op_registry.ops.flash_linear_attention import CORRECTED
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.methods import own_chunks
from fa_compiler.parallel.parts import Parts, cut, gathered

LINEAR, CONVOLUTION = "FlashLinearAttention", "ShortConvolution"
TOKENS = 1
"""The dimension of the tokens in the operands of linear attention."""


def sequence_states(
    communicator: Communicator,
    parts: Parts,
    attrs: Mapping[str, Any],
    inputs: Mapping[str, Array],
    wanted: Sequence[str] = STATE_OUTPUTS,
) -> list[Array]:
    """The wanted outputs: those of the rank's own tokens, and the state behind the last one.

    `attrs` and `inputs` are those of the node, by name. Raises RankError, and KernelError if the
    kernel does not take the call.
    """
    past = inputs.get("past_state")
    tokens = {name: array for name, array in inputs.items() if name != "past_state"}
    chunks = own_chunks(parts, communicator.rank)
    pieces = [
        {name: cut(array, TOKENS, place.start, place.stop) for name, array in tokens.items()}
        for _, place in chunks
    ]
    with np.errstate(all="ignore"):  # NaN and infinities
        made = [_from_zero(attrs, piece) for piece in pieces]
        added = _by_chunk(communicator, parts, [each for each, _ in made])
        factors = _by_chunk(communicator, parts, [factor for _, factor in made])
        first = np.zeros(added[0].shape, np.float32) if past is None else past.astype(np.float32)
        states = _states(first, added, factors, attrs["update_rule"] in CORRECTED)
    if states is None:
        return _whole_states(communicator, parts, attrs, tokens, past, wanted)
    numbers = {chunk: number for number, chunk in enumerate(_sorted(parts))}
    results = [
        eager.run(
            LINEAR, {**piece, "past_state": states[numbers[chunk]]}, attrs, STATE_OUTPUTS[:1]
        )["output"]
        for (chunk, _), piece in zip(chunks, pieces, strict=True)
    ]
    state = states[-1].astype(inputs["query"].dtype if past is None else past.dtype)
    return [np.concatenate(results, TOKENS), state][: len(wanted)]


def sequence_tails(
    communicator: Communicator,
    parts: Parts,
    attrs: Mapping[str, Any],
    inputs: Mapping[str, Array],
    wanted: Sequence[str] = STATE_OUTPUTS,
) -> list[Array]:
    """The wanted outputs of a convolution: those of the rank's own tokens, and the last tokens of
    the sequence.

    Raises as `sequence_states` does.
    """
    axis = 1 if attrs["channels_last"] else 2
    own, weight, past = inputs["input"], inputs["weight"], inputs.get("past_state")
    kept = weight.shape[2] - 1
    if past is None:
        past = np.zeros((own.shape[0], weight.shape[0], kept), own.dtype)
    chunks = own_chunks(parts, communicator.rank)
    pieces = [cut(own, axis, place.start, place.stop) for _, place in chunks]
    tails = [
        np.moveaxis(piece, axis, 2)[..., max(0, piece.shape[axis] - kept) :] for piece in pieces
    ]
    every = _by_chunk(communicator, parts, tails, lambda chunk: min(kept, chunk[1] - chunk[0]))
    before, seen = {}, [past]
    for chunk, tail in zip(_sorted(parts), every, strict=True):
        before[chunk] = _last(seen, kept)
        seen = [before[chunk], tail]
    others = {name: inputs[name] for name in ("weight", "bias") if name in inputs}
    results = [
        eager.run(
            CONVOLUTION,
            {**others, "input": piece, "past_state": before[chunk]},
            attrs,
            STATE_OUTPUTS[:1],
        )["output"]
        for (chunk, _), piece in zip(chunks, pieces, strict=True)
    ]
    return [np.concatenate(results, axis), _last(seen, kept)][: len(wanted)]


def _last(pieces: Sequence[Array], kept: int) -> Array:
    """The last tokens of pieces that follow each other, each [B, C, tokens]."""
    joined = np.concatenate(pieces, 2)
    return np.ascontiguousarray(joined[..., joined.shape[2] - kept :])


def _from_zero(attrs: Mapping[str, Any], tokens: Mapping[str, Array]) -> tuple[Array, Array]:
    """U and M of a chunk, float32: [B, Hv, Dk, Dv], and [B, Hv, Dk, Dk] or factors [B, Hv, 1 or Dk,
    1]."""
    heads = int(attrs["kv_num_heads"])
    size, value = tokens["query"].shape[2] // int(attrs["q_num_heads"]), tokens["value"]
    batch, count, width = value.shape[0], value.shape[1], value.shape[2] // heads
    if attrs["update_rule"] not in CORRECTED:
        zeros = np.zeros((batch, heads, size, width), np.float32)
        return _behind(attrs, tokens, zeros), _decay(tokens.get("decay"), batch, heads)
    wide = np.zeros((batch, count, heads, width + size), value.dtype)
    wide[..., :width] = value.reshape(batch, count, heads, width)
    front = np.zeros((batch, heads, size, width + size), np.float32)
    front[..., width:] = np.eye(size, dtype=np.float32)
    behind = _behind(attrs, {**tokens, "value": wide.reshape(batch, count, -1)}, front)
    return np.ascontiguousarray(behind[..., :width]), np.ascontiguousarray(behind[..., width:])


def _behind(attrs: Mapping[str, Any], tokens: Mapping[str, Array], front: Array) -> Array:
    """The state behind tokens, [B, Hv, Dk, width]."""
    behind: Array = eager.run(LINEAR, {**tokens, "past_state": front}, attrs, STATE_OUTPUTS[1:])[
        "present_state"
    ]
    return behind


def _decay(decay: Array | None, batch: int, heads: int) -> Array:
    """The product of the decays of all tokens, [B, Hv, 1 or Dk, 1]; 1 without any."""
    if decay is None:
        return np.ones((batch, heads, 1, 1), np.float32)
    total = decay.astype(np.float64).sum(TOKENS)
    return np.asarray(np.exp(total), np.float32).reshape(batch, heads, -1, 1)


def _states(
    first: Array, added: Sequence[Array], factors: Sequence[Array], corrected: bool
) -> list[Array] | None:
    """The states in front of all chunks, and behind the last one; None where a number is not
    finite."""
    states = [first]
    for part, factor in zip(added, factors, strict=True):
        front = states[-1].astype(np.float64)
        kept = factor.astype(np.float64) @ front if corrected else factor * front
        states.append((kept + part).astype(np.float32))
    finite = all(bool(np.isfinite(array).all()) for array in (*states, *added, *factors))
    return states if finite else None


def _whole_states(
    communicator: Communicator,
    parts: Parts,
    attrs: Mapping[str, Any],
    tokens: Mapping[str, Array],
    past: Array | None,
    wanted: Sequence[str],
) -> list[Array]:
    """The outputs as one process computes them."""
    inputs = {name: gathered(communicator, parts, array, TOKENS) for name, array in tokens.items()}
    if past is not None:
        inputs["past_state"] = past
    made = eager.run(LINEAR, inputs, attrs, wanted)
    own = {"output": parts.own(made["output"], TOKENS, communicator.rank)}
    return [own.get(name, made[name]) for name in wanted]


def _sorted(parts: Parts) -> list[Chunk]:
    """The chunks of all ranks in the order of the sequence."""
    return sorted(chunk for rank in range(parts.ranks) for chunk in parts.chunks(rank))


def _by_chunk(
    communicator: Communicator,
    parts: Parts,
    own: Sequence[Array],
    count: Callable[[Chunk], int] | None = None,
) -> list[Array]:
    """What all ranks have for their chunks, in the order of the sequence. The arrays of all chunks
    have one shape; with `count` their last dimension is that of the chunk."""
    shape = own[0].shape
    chunks = [parts.chunks(rank) for rank in range(parts.ranks)]
    sizes = [
        [shape if count is None else (*shape[:-1], count(chunk)) for chunk in of_rank]
        for of_rank in chunks
    ]
    message = np.concatenate([array.reshape(-1) for array in own])
    lengths = [sum(math.prod(size) for size in of_rank) for of_rank in sizes]
    every = communicator.gather_all(message, [(length,) for length in lengths])
    found = {}
    for of_rank, received, shapes in zip(chunks, every, sizes, strict=True):
        ends = np.cumsum([math.prod(size) for size in shapes])[:-1]
        for chunk, array, size in zip(of_rank, np.split(received, ends), shapes, strict=True):
            found[chunk] = array.reshape(size)
    return [found[chunk] for chunk in sorted(found)]
