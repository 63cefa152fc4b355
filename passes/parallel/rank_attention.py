"""The SequenceAttention of one rank as FlashAttentionScore nodes and messages.

    gather        Two HcomAllGather bring key and value of all tokens. Each chunk of the rank's
                  queries attends to the keys that the band leaves it.
    all-to-all    HcomAllToAll of query, key and value bring all tokens of the rank's heads. After
                  one attention, another HcomAllToAll gives the rows back.
    ring          Key and value go around in one tensor, by HcomSend and HcomReceive. Each chunk of
                  queries attends to each chunk of keys that arrives, if the band leaves it one of
                  them, and RingAttentionUpdate joins the results by the maximum and sum of each
                  row.

All of them compute in the layout SBH, in which tokens come first. The band is

    no mask    where it excludes no key of the call
    mode 3     where it is a triangle that ends in the bottom right corner
    mode 4     any other band that leaves each row a key
    a tensor   if there is a mask, which then includes the band, or a row without a key: mode 0 with
               the tensor alone

In modes 3 and 4 the diagonals are counted from the bottom right corner, which is the pair of the
last row and the last key. For rows [r0, r1) and keys [c0, c1) of the sequence, j - i is c1 - r1
there. So `after` becomes after - (c1 - r1) and `pre` becomes pre + (c1 - r1).

A part of the keys may leave a row none. The device gives 0 for such a row, with the lowest number
as its maximum and the largest one as its sum. Keys with a bias of the lowest number have this
maximum, too, so the sum of a part without keys becomes 0: RingAttentionUpdate gives it no weight
beside any other part. Where the device does not have this rule (a mask that it does not look into,
without inner_precise 2), the row is a mean of masked values with the lowest number as its maximum:
it has no weight beside keys of larger scores. A bias may not be infinite, because a part whose
scores are all infinite has no maximum to join (attention_rule.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, GRAPH_OP, bind_inputs, get, place_inputs
from fa_compiler.op_registry.collectives import (
    ALL_TO_ALL,
    FORWARD_OUTPUTS,
    GATHER,
    Chunk,
    keys_in_band,
)
from fa_compiler.op_registry.constraints.training import compressed_mask
from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.passes.ir.nodes import attribute_values, certain, without_absent
from fa_compiler.passes.masks.magnitudes import FLOAT32_MAX
from fa_compiler.passes.parallel.places import Refusal
from fa_compiler.passes.parallel.rank_emitter import RankEmitter

JOIN = "RingAttentionUpdate"
OUT, MAXIMUM, SUM = FORWARD_OUTPUTS
LIMITS = ("pre_tockens", "next_tockens")


def sequence_attention(emit: RankEmitter, node: ir.Node) -> ir.Value:
    """attention_out of the rank's rows, in the layout of query. Raises Refusal."""
    attrs = attribute_values(node)
    bound = bind_inputs(get(GRAPH_OP), list(node.inputs), attrs)
    inputs = {name: value for name, value in bound.items() if isinstance(value, ir.Value)}
    if "query_rope" in inputs or "key_rope" in inputs:
        raise Refusal(
            "its rotated parts are separate inputs, which the ranks do not exchange", node
        )
    if min(attrs[name] for name in LIMITS) < 0:
        raise Refusal("its band leaves out the key of the row itself", node)
    layout, heads = str(attrs["input_layout"]), int(attrs["head_num"])
    query, key, value = (
        _tokens_first(emit, inputs[name], layout) for name in ("query", "key", "value")
    )
    size = emit.shape(query)[2] // heads
    own = ("input_layout", "head_num", "sparse_mode", *LIMITS)
    known = set(get(GRAPH_OP, emit.cann).attr_names).difference(own)
    call = _Attention(
        emit,
        {name: attr for name, attr in attrs.items() if name in known},
        heads,
        emit.shape(key)[2] // size,
        int(attrs["pre_tockens"]),
        int(attrs["next_tockens"]),
        inputs.get("atten_mask"),
        inputs.get("real_shift"),
        inputs.get("sink"),
    )
    method = {GATHER: _by_gather, ALL_TO_ALL: _by_all_to_all}.get(str(attrs["method"]), _by_ring)
    return _from_tokens_first(emit, method(call, query, key, value), layout, heads)


def _tokens_first(emit: RankEmitter, x: ir.Value, layout: str) -> ir.Value:
    """A tensor of query, key or value as [S, B, heads * size]."""
    if layout == "SBH":
        return x
    if layout == "BSH":
        return emit.transpose(x, (1, 0, 2))
    shape, tokens, heads = emit.shape(x), layout.index("S"), layout.index("N")
    moved = emit.transpose(x, (tokens, 0, heads, 3))
    return emit.reshape(moved, (shape[tokens], shape[0], shape[heads] * shape[3]))


def _from_tokens_first(emit: RankEmitter, x: ir.Value, layout: str, heads: int) -> ir.Value:
    """The inverse, for a tensor of this number of heads."""
    if layout == "SBH":
        return x
    if layout == "BSH":
        return emit.transpose(x, (1, 0, 2))
    tokens, batch, width = emit.shape(x)
    split = emit.reshape(x, (tokens, batch, heads, width // heads))
    return emit.transpose(split, ["SBND".index(letter) for letter in layout])


@dataclass(frozen=True)
class _Attention:
    """The attention of one rank: what its calls have in common.

    `pre` and `after` are the diagonals of the band, in positions of the sequence. The rows of
    `mask` and `bias` are those of the queries, or 1; their columns are the keys of the sequence,
    or 1.
    """

    emit: RankEmitter
    attrs: Mapping[str, Any]
    heads: int
    key_heads: int
    pre: int
    after: int
    mask: ir.Value | None
    bias: ir.Value | None
    sink: ir.Value | None

    def keys_of(self, rows: Chunk, keys: Chunk) -> Chunk | None:
        """The keys of a range that the band leaves these rows; None if there are none."""
        return keys_in_band(rows, keys, self.pre, self.after)

    def call(
        self,
        tensors: Sequence[ir.Value],
        rows: Chunk,
        keys: Chunk,
        first: int,
        wanted: Sequence[str] = (OUT,),
    ) -> dict[str, ir.Value]:
        """The wanted outputs of one FlashAttentionScore. `tensors` are query, key and value of
        these rows and keys of the sequence; `first` is the place of the first row among the rows of
        mask and bias."""
        spec = get(GRAPH_OP, self.emit.cann)
        mask, mode, pre, after = self._band(rows, keys, first)
        inputs = {
            **dict(zip(("query", "key", "value"), tensors, strict=True)),
            "atten_mask": mask,
            "sink": self.sink,
        }
        inputs["real_shift"] = self._rows_and_keys(self.bias, rows, keys, first)
        attrs = {**self.attrs, "head_num": self.heads, "input_layout": "SBH", "sparse_mode": mode}
        attrs |= {"pre_tockens": pre, "next_tockens": after}
        given = place_inputs(spec, without_absent(inputs))
        made = self.emit.node(GRAPH_OP, given, attrs, DOMAIN, len(spec.outputs))
        outputs = dict(zip(spec.output_names, made.outputs, strict=True))
        for name, output in outputs.items():
            if name not in wanted:
                output.name = ""
        return {name: outputs[name] for name in wanted}

    def _band(self, rows: Chunk, keys: Chunk, first: int) -> tuple[ir.Value | None, int, int, int]:
        """atten_mask, sparse_mode and the two diagonals: the table at the top."""
        lower = keys[0] < rows[1] - 1 - self.pre  # does this diagonal exclude a key?
        upper = keys[1] - 1 > rows[0] + self.after
        mask = self._rows_and_keys(self.mask, rows, keys, first)
        shift, pre, after = keys[1] - rows[1], UNLIMITED, UNLIMITED
        if lower:
            pre = self.pre + shift
        if upper:
            after = self.after - shift
        # has the first or last row no key?
        empty = rows[0] + self.after < keys[0] or rows[1] - 1 - self.pre >= keys[1]
        if mask is None and not lower and not upper:
            return None, 0, UNLIMITED, UNLIMITED
        if mask is None and not empty and min(pre, after) >= 0:
            mode = 3 if (pre, after) == (UNLIMITED, 0) else 4
            return self.emit.constant(compressed_mask(mode), "triangle"), mode, pre, after
        tensors: list[ir.Value] = []
        if mask is not None:
            tensors.append(self.emit.cast(mask, ir.DataType.BOOL))
        if lower:
            tensors += self._outside("Less", rows, keys, -self.pre)
        if upper:
            tensors += self._outside("Greater", rows, keys, self.after)
        return (
            reduce(lambda one, other: self.emit.or_(one, other), tensors),
            0,
            UNLIMITED,
            UNLIMITED,
        )

    def _outside(self, op_type: str, rows: Chunk, keys: Chunk, limit: int) -> list[ir.Value]:
        """The positions beyond a diagonal of the band, [rows, keys]."""
        places = self.emit.constant(np.arange(*keys, dtype=np.int64)[None, :], "keys")
        limits = self.emit.constant(np.arange(*rows, dtype=np.int64)[:, None] + limit, "rows")
        return [self.emit.op(op_type, [places, limits])]

    def _rows_and_keys(
        self, x: ir.Value | None, rows: Chunk, keys: Chunk, first: int
    ) -> ir.Value | None:
        """The part of a mask or bias for these rows and keys; None without one."""
        if x is None:
            return None
        rank = len(self.emit.shape(x))
        count = rows[1] - rows[0]
        if self.emit.shape(x)[-2] != 1:
            x = self.emit.cut(x, rank - 2, first, first + count)
        if self.emit.shape(x)[-1] != 1:
            return self.emit.cut(x, rank - 1, *keys)
        return self.emit.expand(x, (*self.emit.shape(x)[:-1], keys[1] - keys[0]))

    def of_heads(self, heads: Chunk, key_heads: int) -> _Attention:
        """The same for some of the heads."""
        own: dict[str, ir.Value | None] = {}
        for name, axis in (("mask", 1), ("bias", 1), ("sink", 0)):
            value = own[name] = getattr(self, name)
            if value is None:
                continue
            shape = self.emit.shape(value)
            if not (axis and len(shape) < 4) and shape[axis] != 1:
                own[name] = self.emit.cut(value, axis, *heads)
        attrs, emit = self.attrs, self.emit
        return _Attention(emit, attrs, heads[1] - heads[0], key_heads, self.pre, self.after, **own)

    def own_chunks(self) -> list[tuple[Chunk, int]]:
        """The chunks of the rank, each with the place of its first row among the rank's rows."""
        chunks = self.emit.rank.chunks
        return [(chunk, number * (chunk[1] - chunk[0])) for number, chunk in enumerate(chunks)]


def _by_gather(call: _Attention, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
    emit, length = call.emit, call.emit.rank.length
    whole = [emit.in_sequence(emit.gathered(part)) for part in (key, value)]
    results = []
    for rows, first in call.own_chunks():
        keys = certain(call.keys_of(rows, (0, length)))  # the band leaves each row its own key
        own = emit.cut(query, 0, first, first + rows[1] - rows[0])
        parts = [emit.cut(tensor, 0, *keys) for tensor in whole]
        results.append(call.call([own, *parts], rows, keys, first)[OUT])
    return emit.concat(results, 0)


def _by_all_to_all(call: _Attention, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
    emit, rank = call.emit, call.emit.rank
    own, group = call.heads // rank.ranks, call.heads // call.key_heads
    first_heads = [number * own // group for number in range(rank.ranks)]
    own_keys = max(1, own // group)
    queries = _to_heads(
        emit, query, call.heads, [number * own for number in range(rank.ranks)], own
    )
    others = [_to_heads(emit, part, call.key_heads, first_heads, own_keys) for part in (key, value)]
    whole = (0, rank.length)
    mine = call.of_heads((rank.number * own, rank.number * own + own), own_keys)
    out = emit.by_rank(mine.call([queries, *others], whole, whole, 0)[OUT])
    _, batch, width = emit.shape(out)
    blocks = emit.exchanged(emit.reshape(out, (rank.ranks, rank.count, batch, width)))
    joined = emit.transpose(blocks, (1, 2, 0, 3))
    return emit.reshape(joined, (rank.count, batch, rank.ranks * width))


def _to_heads(
    emit: RankEmitter, x: ir.Value, heads: int, starts: Sequence[int], count: int
) -> ir.Value:
    """All tokens of the rank's heads, [S, B, count * size], from its tokens of all heads. Rank r
    has `count` heads from `starts[r]` on; ranks may share them."""
    ranks = emit.rank.ranks
    tokens, batch, width = emit.shape(x)
    size = width // heads
    wanted = [start + number for start in starts for number in range(count)]
    if wanted != list(range(heads)):
        x = emit.gather(emit.reshape(x, (tokens, batch, heads, size)), wanted, 2)
    blocks = emit.transpose(emit.reshape(x, (tokens, batch, ranks, count * size)), (2, 0, 1, 3))
    received = emit.exchanged(blocks)
    return emit.in_sequence(emit.reshape(received, (ranks * tokens, batch, count * size)))


def _by_ring(call: _Attention, query: ir.Value, key: ir.Value, value: ir.Value) -> ir.Value:
    emit, rank = call.emit, call.emit.rank
    width = emit.shape(key)[2]
    held = emit.concat([key, value], 2)
    whole_width = emit.shape(held)[2]
    results: list[dict[str, ir.Value]] = [{} for _ in rank.chunks]
    for step in range(rank.ranks):
        following = held
        if step < rank.ranks - 1:
            following = emit.passed_on(held)
        parts = emit.cut(held, 2, 0, width), emit.cut(held, 2, width, whole_width)
        for place, columns in enumerate(rank.chunks_of((rank.number - step) % rank.ranks)):
            for number, (rows, first) in enumerate(call.own_chunks()):
                keys = call.keys_of(rows, columns)
                if keys is None:
                    continue
                start = place * (columns[1] - columns[0]) + keys[0] - columns[0]
                own = emit.cut(query, 0, first, first + rows[1] - rows[0])
                some = [emit.cut(part, 0, start, start + keys[1] - keys[0]) for part in parts]
                made = call.call([own, *some], rows, keys, first, (OUT, MAXIMUM, SUM))
                if results[number]:
                    made = _joined(emit, results[number], made)
                results[number] = made
        held = following
    return emit.concat([result[OUT] for result in results], 0)


def _joined(
    emit: RankEmitter, one: Mapping[str, ir.Value], other: Mapping[str, ir.Value]
) -> dict[str, ir.Value]:
    """Two partial results of the same rows as one.

    A part without a key gets the sum 0, except the second of two such parts: their result is such a
    part, too.
    """
    half, nothing = (
        emit.constant(np.array(number, np.float32)) for number in (FLOAT32_MAX / 2, 0.0)
    )
    # a sum is at most the number of keys
    has, also = (emit.less(part[SUM], half) for part in (one, other))
    counts = emit.or_(also, emit.not_(has))
    one = {**one, SUM: emit.where(has, one[SUM], nothing)}
    other = {**other, SUM: emit.where(counts, other[SUM], nothing)}
    inputs = [part[name] for part in (one, other) for name in (OUT, MAXIMUM, SUM)]
    attrs = {"input_layout": "SBH", "input_softmax_layout": ""}
    made = emit.node(JOIN, inputs, attrs, DOMAIN, len(get(JOIN).outputs))
    return dict(zip((OUT, MAXIMUM, SUM), made.outputs, strict=True))
