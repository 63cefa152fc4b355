"""How the ranks compute one SequenceAttention together, and its gradient.

    gather        Every rank gathers the keys and values of all tokens, and attends with its own
                  queries.
    all-to-all    Every rank gets the queries, keys and values of all tokens for some of the heads,
                  attends, and gives the rows back to the ranks that they belong to.
    ring          Keys and values travel from rank to rank. A rank attends to the keys at hand while
                  the next keys arrive, and joins the result with its earlier ones
                  (RingAttentionUpdate).

What a ring cannot compute exactly as one process does, it computes by gathering: scores that are
NaN or infinite make the statistics of a row undefined, and values that are NaN or infinite count in
one part, where their weight is 0 beside the keys of another one. All ranks agree on this after each
ring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, TypeAlias

import numpy as np

from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry import geometry
from fa_compiler.op_registry.collectives import (
    ALL_TO_ALL,
    FORWARD_OUTPUTS,
    GATHER,
    RING,
    STATISTICS,
    Chunk,
)
from fa_compiler.parallel.attend import (
    LARGEST,
    Call,
    from_tokens_first,
    sizes_of,
    tokens_first,
    without_key,
)
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.parts import Parts, gathered

Tensors = Sequence[Array]
Method: TypeAlias = Callable[
    [Communicator, Parts, Call, Tensors, Tensors, Sequence[str]], list[Array]
]
"""The wanted outputs of a rank's rows: attention_out [S, B, heads * size], and statistics [B,
heads, S, 8]."""


def sequence_attention(
    communicator: Communicator,
    parts: Parts,
    attrs: Mapping[str, Any],
    inputs: Mapping[str, Array],
    wanted: Sequence[str] = FORWARD_OUTPUTS[:1],
) -> list[Array]:
    """The wanted outputs for the rank's own rows, attention_out in the layout of query.

    `attrs` and `inputs` are those of the node, by name (op_registry/collectives.py). Raises
    RankError, and KernelError if the kernel does not take the call.
    """
    call, layout = _call(attrs, inputs)
    query = [
        tokens_first(inputs[name], layout) for name in ("query", "query_rope") if name in inputs
    ]
    keys = [
        tokens_first(inputs[name], layout)
        for name in ("key", "value", "key_rope")
        if name in inputs
    ]
    out, *statistics = METHODS[str(attrs["method"])](communicator, parts, call, query, keys, wanted)
    return [from_tokens_first(out, layout, call.heads), *statistics]


def _call(attrs: Mapping[str, Any], inputs: Mapping[str, Array]) -> tuple[Call, str]:
    """What the calls of one attention or of one gradient have in common, and the layout."""
    layout, heads = str(attrs["input_layout"]), int(attrs["head_num"])
    call = Call(
        attrs={name: value for name, value in attrs.items() if name != "method"},
        heads=heads,
        key_heads=int(sizes_of(attrs, inputs).n2 or 0),
        pre=int(attrs["pre_tockens"]),
        after=int(attrs["next_tockens"]),
        mask=inputs.get("atten_mask"),
        bias=inputs.get("real_shift", inputs.get("pse_shift")),
        sink=inputs.get("sink"),
    )
    return call, layout


def sequence_gradient(
    communicator: Communicator, parts: Parts, attrs: Mapping[str, Any], inputs: Mapping[str, Array]
) -> list[Array]:
    """dq, dk and dv of the rank's own tokens, in the layouts of query, key and value.

    The statistics are those of all keys, so the gradients that some rows and some keys give are
    parts of a sum. The ranks add up dk and dv in float32. Raises as `sequence_attention` does.
    """
    call, layout = _call(attrs, inputs)
    rows = {name: tokens_first(inputs[name], layout) for name in ("query", "dy", "attention_in")}
    statistics = {name: inputs[name] for name in STATISTICS}
    keys = {name: tokens_first(inputs[name], layout) for name in ("key", "value")}
    by = _ring_gradient if attrs["method"] == RING else _gathered_gradient
    with np.errstate(all="ignore"):  # NaN and infinities in sums
        made = by(communicator, parts, _Gradient(call, rows, statistics), keys)
    heads = {"dq": call.heads, "dk": call.key_heads, "dv": call.key_heads}
    dtype = inputs["query"].dtype
    return [
        from_tokens_first(made[name].astype(dtype, copy=False), layout, count)
        for name, count in heads.items()
    ]


@dataclass(frozen=True)
class _Gradient:
    """The rows of a rank for a gradient: query, dy and attention_in [S, B, heads * size], and the
    statistics."""

    call: Call
    rows: Mapping[str, Array]
    statistics: Mapping[str, Array]

    def of(
        self, chunk: Chunk, place: slice, keys: Mapping[str, Array], columns: Chunk
    ) -> dict[str, Array]:
        """dq, dk and dv of a chunk of rows, at this place among the rank's rows, and of these
        keys."""
        tensors = {name: array[place] for name, array in self.rows.items()}
        tensors |= {
            name: np.ascontiguousarray(array[:, :, place])
            for name, array in self.statistics.items()
        }
        return self.call.run_gradient({**tensors, **keys}, chunk, columns, place.start)


def _gathered_gradient(
    communicator: Communicator, parts: Parts, own: _Gradient, keys: Mapping[str, Array]
) -> dict[str, Array]:
    """Every rank gathers the keys and values of all tokens, and computes what its rows give to all
    dk and dv. It sends the owners of the tokens what is theirs. All add in the order of the
    ranks."""
    whole = {name: gathered(communicator, parts, array, 0) for name, array in keys.items()}
    totals = {f"d{name[0]}": np.zeros(array.shape, np.float32) for name, array in whole.items()}
    results = []
    for rows, place in own_chunks(parts, communicator.rank):
        columns = own.call.keys_with_gradients(rows, (0, parts.length)) or (0, parts.length)
        found = own.of(
            rows, place, {name: array[slice(*columns)] for name, array in whole.items()}, columns
        )
        results.append(found["dq"])
        for name, total in totals.items():
            total[slice(*columns)] += found[name]
    made = {"dq": np.concatenate(results)}
    for name, total in totals.items():
        sends = [parts.own(total, 0, rank) for rank in range(communicator.size)]
        received = communicator.exchange(
            sends, [sends[communicator.rank].shape] * communicator.size
        )
        made[name] = np.asarray(np.sum(received, 0, dtype=np.float32))
    return made


def _ring_gradient(
    communicator: Communicator, parts: Parts, own: _Gradient, keys: Mapping[str, Array]
) -> dict[str, Array]:
    """Keys and values travel from rank to rank, and what was added up for them travels with them,
    until they are back at their owner. The next keys arrive while a rank computes."""
    rank, size = communicator.rank, communicator.size
    chunks = own_chunks(parts, rank)
    dq = np.zeros(own.rows["query"].shape, np.float32)
    held = list(keys.values())
    totals = [np.zeros(array.shape, np.float32) for array in held]
    for step in range(size):
        owner = (rank - step) % size
        count = parts.count((owner - 1) % size)
        shapes = [(count, *array.shape[1:]) for array in held]
        pending = None if step == size - 1 else communicator.pass_on(held, shapes)
        for columns, there in own_chunks(parts, owner):
            for rows, place in chunks:
                if own.call.keys_with_gradients(rows, columns) is None:
                    continue
                found = own.of(
                    rows,
                    place,
                    dict(zip(keys, (array[there] for array in held), strict=True)),
                    columns,
                )
                dq[place] += found["dq"]
                for total, name in zip(totals, ("dk", "dv"), strict=True):
                    total[there] += found[name]
        if pending is not None:
            held = pending.wait()
        if size > 1:
            totals = communicator.pass_on(totals, shapes).wait()
    return {"dq": dq, "dk": totals[0], "dv": totals[1]}


def own_chunks(parts: Parts, rank: int) -> list[tuple[Chunk, slice]]:
    """The chunks of a rank that have tokens, each with its place among the rank's tokens."""
    every = parts.chunks(rank)
    ends = accumulate((stop - start for start, stop in every), initial=0)
    return [
        (chunk, slice(*place))
        for chunk, place in zip(every, pairwise(ends), strict=True)
        if chunk[0] < chunk[1]
    ]


def by_gather(
    communicator: Communicator,
    parts: Parts,
    call: Call,
    query: Tensors,
    keys: Tensors,
    wanted: Sequence[str],
) -> list[Array]:
    """The method gather."""
    whole = [gathered(communicator, parts, tensor, 0) for tensor in keys]
    results = []
    for rows, place in own_chunks(parts, communicator.rank):
        columns = call.keys_of(rows, (0, parts.length)) or (0, parts.length)
        own, some = (
            [tensor[place] for tensor in query],
            [tensor[slice(*columns)] for tensor in whole],
        )
        results.append(call.run(own, some, rows, columns, place.start, wanted))
    return [_joined_rows(results, name) for name in wanted]


def _joined_rows(results: Sequence[Mapping[str, Array]], name: str) -> Array:
    """An output of the rank's chunks as one. attention_out is [S, B, heads * size], the statistics
    are [B, N, S, 8]."""
    parts = [result[name] for result in results]
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts, 0 if name == "attention_out" else 2)


def by_all_to_all(
    communicator: Communicator,
    parts: Parts,
    call: Call,
    query: Tensors,
    keys: Tensors,
    wanted: Sequence[str],
) -> list[Array]:
    """The method all-to-all, which gives no statistics. Mask and bias have the rows of the whole
    sequence."""
    assert tuple(wanted) == FORWARD_OUTPUTS[:1]  # attention_rule.py
    own = call.heads // communicator.size
    group = call.heads // call.key_heads
    heads = [slice(rank * own, (rank + 1) * own) for rank in range(communicator.size)]
    key_heads = [
        slice(own_heads.start // group, (own_heads.stop - 1) // group + 1) for own_heads in heads
    ]
    queries = [_to_heads(communicator, parts, tensor, call.heads, heads) for tensor in query]
    others = [_to_heads(communicator, parts, tensor, call.key_heads, key_heads) for tensor in keys]
    whole = (0, parts.length)
    mine = call.of_heads(heads[communicator.rank], key_heads[communicator.rank])
    out = mine.run(queries, others, whole, whole)["attention_out"]
    rows = [parts.own(out, 0, rank) for rank in range(communicator.size)]
    shape = (parts.count(communicator.rank), *out.shape[1:])
    return [np.concatenate(communicator.exchange(rows, [shape] * communicator.size), axis=-1)]


def _to_heads(
    communicator: Communicator, parts: Parts, own: Array, heads: int, wanted: Sequence[slice]
) -> Array:
    """All tokens of the rank's heads, from the rank's tokens of all heads."""
    split = own.reshape(*own.shape[:2], heads, -1)
    sends = [np.ascontiguousarray(split[:, :, own_heads]) for own_heads in wanted]
    received = communicator.exchange(sends, parts.shapes(sends[communicator.rank], 0))
    return parts.joined(received, 0).reshape(parts.length, own.shape[1], -1)


def by_ring(
    communicator: Communicator,
    parts: Parts,
    call: Call,
    query: Tensors,
    keys: Tensors,
    wanted: Sequence[str],
) -> list[Array]:
    """The method ring. The keys at hand are on their way to the next rank while this rank attends
    to them."""
    rank, size = communicator.rank, communicator.size
    chunks = own_chunks(parts, rank)
    rings = [
        _Rows(call, [tensor[place] for tensor in query], rows, place.start)
        for rows, place in chunks
    ]
    held = list(keys)
    total = np.zeros(keys[1].shape[1:], np.float64)
    needs_mean = call.attrs.get("cpu_empty_rows") == "mean"
    for step in range(size):
        owner = (rank - step) % size
        last = step == size - 1
        before = (owner - 1) % size
        shapes = [(parts.count(before), *tensor.shape[1:]) for tensor in held]
        pending = None if last else communicator.pass_on(held, shapes)
        if needs_mean:
            total += held[1].sum(0, dtype=np.float64)
        _attend_to(held, own_chunks(parts, owner), rings)
        if pending is not None:
            held = pending.wait()
    undefined = b"\1" if any(ring.undefined for ring in rings) else b"\0"
    if b"\1" in communicator.share(undefined):
        return by_gather(communicator, parts, call, query, keys, wanted)
    mean = total / parts.length
    results = [{"attention_out": ring.result(mean), **ring.statistics} for ring in rings]
    return [_joined_rows(results, name) for name in wanted]


def _attend_to(
    keys: Tensors, chunks: Sequence[tuple[Chunk, slice]], rings: Sequence[_Rows]
) -> None:
    """All rows attend to the keys of one rank."""
    for ring in rings:
        for columns, place in chunks:
            ring.attend([tensor[place] for tensor in keys], columns)


class _Rows:
    """The result of some rows while keys arrive: attention_out with the statistics of its
    softmax."""

    def __init__(self, call: Call, query: Tensors, rows: Chunk, first: int) -> None:
        attrs = {name: value for name, value in call.attrs.items() if name != "cpu_nan_rows"}
        self._call = replace(call, attrs={**attrs, "cpu_empty_rows": "zero"})
        self._empty = str(call.attrs.get("cpu_empty_rows", ""))
        self._query, self._rows, self._first = query, rows, first
        self._found: dict[str, Array] | None = None
        self.undefined = False

    def attend(self, keys: Tensors, columns: Chunk) -> None:
        """Attend to some keys, and join the result with what was found before."""
        if self._call.keys_of(self._rows, columns) is None:
            return
        found = self._call.run(self._query, keys, self._rows, columns, self._first, FORWARD_OUTPUTS)
        self.undefined |= not all(np.isfinite(array).all() for array in found.values())
        self._found = found if self._found is None else _joined(self._found, found)

    @property
    def statistics(self) -> dict[str, Array]:
        """softmax_max and softmax_sum of all keys."""
        if self._found is not None:
            return {name: self._found[name] for name in STATISTICS}
        tokens, batch = self._query[0].shape[:2]
        shape = (batch, self._call.heads, tokens, geometry.STATISTICS)
        return {"softmax_max": np.full(shape, -LARGEST), "softmax_sum": np.full(shape, LARGEST)}

    def result(self, mean: Array) -> Array:
        """attention_out. `mean` is the mean of value over all keys, [B, key heads * size]."""
        tokens, batch = self._query[0].shape[:2]
        width = mean.shape[1] // self._call.key_heads
        if self._found is None:
            out = np.zeros((tokens, batch, self._call.heads * width), self._query[0].dtype)
            empty = np.ones((batch, self._call.heads, tokens), np.bool_)
        else:
            out = self._found["attention_out"]
            empty = without_key(self._found["softmax_sum"][..., 0])
        if self._empty in ("", "zero") or not empty.any():
            return out
        group = self._call.heads // self._call.key_heads
        # Keys of one batch entry serve all entries of the query.
        means = np.repeat(mean.reshape(len(mean), self._call.key_heads, width), group, axis=1)
        value = means if self._empty == "mean" else np.full_like(means, np.nan)
        split = out.reshape(tokens, batch, self._call.heads, width)
        filled = np.where(empty.transpose(2, 0, 1)[..., None], value[None].astype(out.dtype), split)
        return filled.reshape(out.shape)


def _joined(one: dict[str, Array], other: dict[str, Array]) -> dict[str, Array]:
    """Two partial results of the same rows as one.

    A part without a key has no weight beside the other one, even if the largest score there is the
    lowest number. So its sum becomes 0, except that of the second of two parts without keys: their
    result is such a part, too.
    """
    empty, also = (without_key(part["softmax_sum"]) for part in (one, other))
    one = {**one, "softmax_sum": np.where(empty, np.float32(0), one["softmax_sum"])}
    other = {**other, "softmax_sum": np.where(also & ~empty, np.float32(0), other["softmax_sum"])}
    inputs = {
        f"{part}_{new}": found[old]
        for part, found in (("prev", one), ("cur", other))
        for old, new in (
            ("attention_out", "attn_out"),
            ("softmax_max", "softmax_max"),
            ("softmax_sum", "softmax_sum"),
        )
    }
    joined = eager.run("RingAttentionUpdate", inputs, {"input_layout": "SBH"})
    return {"attention_out": joined["attn_out"], **{name: joined[name] for name in STATISTICS}}


METHODS: Mapping[str, Method] = {GATHER: by_gather, ALL_TO_ALL: by_all_to_all, RING: by_ring}
