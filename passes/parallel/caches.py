"""Caches of which each rank holds a part: finds them in a model that decodes, and makes the ranks'
graph.

    key = torch.cat([past_key, key], dim=2)
    out = attention(query, repeat_kv(key), repeat_kv(value))

    past        := an input, at least of rank 3, that is no initializer
    joined      := Concat(moved(past), new ..; along the tokens); operands without elements do not
                count
                 | a GatherND of rows of such a Concat (entry_lengths.py)
    moved(x)    := x, or what operators that move or cast the elements make of it; a Concat of one
                operand moves it
    attention   := FlashAttentionScore with a key, value or key_rope of the length of `joined`, and
                   a query of another length

What is found so only proposes two lengths: that of the past, and that of the keys, which are the
past and the new tokens behind it. Whether the ranks' graph can be made is for the rules to say. Its
values have the forms of sharder.py, where the sequence is that of the keys:

    local(joined)       the rank's part of the past, and behind it those of the new tokens that are
                        the rank's own
    whole(attention)    a CacheAttention, of whole queries and local keys (attention_rule.py)
    whole(past)         refused: a rank has no room for a whole cache
    whole(another)      as it is in the given graph: every rank computes the new tokens

A value between the input and the Concat has the length of the past. `_Past` makes its local form by
the same rules.

For a prompt the caches are empty. Then the sequence is that of the queries, as in a model without
caches (PromptSharder).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, GRAPH_OP, get
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import certain, inputs_of, int_attr, is_op, text_attr, without_none
from fa_compiler.passes.ir.nodes import operands as operands_of
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.ops.parts import Parts, concat_of
from fa_compiler.passes.parallel.entry_lengths import GatheredRows, gathered_rows
from fa_compiler.passes.parallel.places import Place, Refusal
from fa_compiler.passes.parallel.sharder import INT64, Choose, Sharder, WholeRule
from fa_compiler.passes.values.shapes import ShapeInfo

KEYS = ("key", "value", "key_rope")
"""The inputs of an attention that have a row for each key."""

MakeAttention: TypeAlias = Callable[["CacheSharder", ir.Node, int], ir.Value]


@dataclass(frozen=True)
class Joined:
    """New tokens behind those of a cache.

    `past` is the input and `axis` its dimension of the tokens, whose size is `before`. `node` gives
    both, `length` tokens: a Concat with the operands `new`, or a GatherND of `count` rows. `direct`
    says that the elements of `past` are joined in the places in which they are given.
    """

    past: ir.Value
    axis: int
    node: ir.Node
    new: tuple[ir.Value, ...]
    before: Dim
    length: Dim
    direct: bool
    count: ir.Value | None = None


def joined_caches(graph: ir.Graph, info: ShapeInfo) -> list[Joined]:
    """The caches that the grammar above describes, in the order of the nodes."""
    lengths = set(_key_lengths(graph, info))
    if not lengths:
        return []
    joined = (_joined(node, info) for node in graph if is_op(node, "Concat", "GatherND"))
    return [cache for cache in joined if cache is not None and cache.length in lengths]


def _key_lengths(graph: ir.Graph, info: ShapeInfo) -> Iterator[Dim]:
    """The numbers of keys of the attentions that have another number of queries."""
    names = get("FlashAttentionScore").input_names
    for node in graph:
        axis = SEQUENCE_AXIS.get(text_attr(node, "input_layout", ""))
        if node.domain != DOMAIN or node.op_type != GRAPH_OP or axis is None:
            continue
        shapes = (
            (name, info.sizes(value)) for name, value in zip(names, operands_of(node), strict=False)
        )
        sizes = {name: shape[axis] for name, shape in shapes if len(shape) > axis}
        yield from (
            sizes[name] for name in KEYS if name in sizes and sizes[name] != sizes.get("query")
        )


def _joined(node: ir.Node, info: ShapeInfo) -> Joined | None:
    """The cache whose past a node joins with new tokens, in one piece or row by row; None where it
    does not."""
    if (joined := concat_of(node, info)) is not None:
        return _concatenated(joined, info)
    gather, shape = gathered_rows(node, info), info.shape(node.outputs[0])
    if gather is None or shape is None or (cache := _concatenated(gather.rows, info)) is None:
        return None
    return replace(cache, node=node, length=shape[gather.axis], count=gather.count)


def _concatenated(joined: Parts, info: ShapeInfo) -> Joined | None:
    """The cache whose past a Concat joins with what lies behind it; None where it joins other
    tensors."""
    axis, parts, length = joined.axis, joined.with_elements(info), joined.size(joined.whole, info)
    if len(parts) < 2 or length is None or (before := info.shape(parts[0])) is None:
        return None
    past, direct = _source(parts[0], info)
    sizes = info.sizes(past)
    if not past.is_graph_input() or past.const_value is not None or len(sizes) < 3:
        return None
    places = [dim for dim, size in enumerate(sizes) if size == before[axis]]
    if not places:
        return None
    # The axis itself where it is one of them, else the first.
    place = min(places, key=lambda dim: dim != axis)
    return Joined(past, place, joined.node, tuple(parts[1:]), before[axis], length, direct)


def _source(value: ir.Value, info: ShapeInfo) -> tuple[ir.Value, bool]:
    """What operators that move or cast elements make a value of, and whether they leave the
    elements in their places. A Concat of one operand is one of them."""
    direct = True
    while (node := value.producer()) is not None:
        if (joined := concat_of(node, info)) is not None:
            parts = joined.with_elements(info)
        elif is_op(node, *MOVES, "Cast", "Split"):
            parts = inputs_of(node)[:1]
            direct = direct and is_op(node, "Identity", "Cast")
        else:
            break
        if len(parts) != 1:
            break
        value = parts[0]
    return value, direct


class _OfAnyLength(Sharder):
    """A sharder whose sequence may have one token, or none."""

    def scale_of_sizes(self, length: ir.Value) -> tuple[ir.Value, ir.Value]:
        """With one token, a size of 1 is that of the sequence, or of an operand that is repeated
        for it: both have no token where the rank has none."""
        one = self.ints([1])
        divisor = self.larger(length, one)
        limit = self.smaller(divisor, self.ints([2]))
        return divisor, self.sub(limit, one)

    def joined(self, joined: Parts, place: Place) -> ir.Value:
        """The local form of a Concat along the sequence."""
        parts = joined.with_elements(self.info)
        if len(parts) != 1:
            return self.appended(joined.node, place, parts)
        return self.local(parts[0], place, joined.node)

    def appended(self, node: ir.Node, place: Place, parts: list[ir.Value]) -> ir.Value:
        """The local form of several operands of a Concat along the sequence. Raises Refusal."""
        raise Refusal("it joins tokens with those of a cache twice", node)

    def settled_size(self, size: Dim) -> Dim:
        """A sequence of one token may itself be broadcast, so such a size stays open."""
        return size


class CacheSharder(_OfAnyLength):
    """The new graph of a model that decodes.

    Args:
        graph, info, axes, ranks, choose: as in Sharder; `axes` names the caches.
        caches: what was found of them; the first one tells the lengths.
        attention: makes the whole form of a result of an attention from local keys.
    """

    def __init__(
        self,
        graph: ir.Graph,
        info: ShapeInfo,
        caches: list[Joined],
        axes: Mapping[str, int],
        ranks: int,
        choose: Choose,
        attention: MakeAttention,
    ) -> None:
        self.first = caches[0]
        super().__init__(graph, info, self.first.length, axes, ranks, choose)
        self._attention = attention
        self._keys_part: tuple[ir.Value, ir.Value, ir.Value, ir.Value] | None = None
        self.past = _Past(self)

    def size(self, size: Dim) -> ir.Value | None:
        """A size as int64 [1]. That of the past is the one of all ranks together."""
        if size.const is None and size == self.first.before:
            return self.past.part[1]
        if size.const is None and size == self.length:
            return self._composed(size) or self._counted_length()
        return super().size(size)

    def _counted_length(self) -> ir.Value:
        """The number of keys where it is no sum of known sizes."""
        node, total = self.first.node, self.past.part[1]
        if self.first.count is not None:
            return self.cast(self.reshape(self.whole(self.first.count, node), [1]), INT64)
        for value in self.first.new:
            place = int_attr(node, "axis", 0) % len(self.shape(value, node))
            total = self.add(total, self.dimension(self.whole(value, node), place))
        return total

    @property
    def part(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The positions of the rank's keys, the number of all keys and the number of the rank's
        own."""
        return self._part_of_keys()[:3]

    def _part_of_keys(self) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
        """`part`, and the places of the rank's own among the new tokens."""
        if self._keys_part is None:
            total = certain(self.size(self.length))
            node = self.part_node([total], ("positions", "length", "count", "appended"))
            self.nodes.append(node)
            self._keys_part = (node.outputs[0], node.outputs[1], node.outputs[2], node.outputs[3])
        return self._keys_part

    def appended(self, node: ir.Node, place: Place, parts: list[ir.Value]) -> ir.Value:
        """The rank's part of the past and of the new tokens behind it."""
        length, before = (
            self.shape(value, node)[place.dim] for value in (node.outputs[0], parts[0])
        )
        if length != self.length or before != self.first.before or not place.alone:
            raise Refusal(
                "it joins other tokens than those of a cache and new ones behind them", node
            )
        own = self.past.local(parts[0], place, node)
        new = self.concat([self.whole(value, node) for value in parts[1:]], place.dim)
        appended = self.gather(new, self._part_of_keys()[3], place.dim)
        return self.concat([own, appended], place.dim)

    def _gathered_rows(self, node: ir.Node, gather: GatheredRows) -> ir.Value:
        """The rank's part of rows of the past, each in its place, and of others that all ranks
        have."""
        rows, axis = gather.rows.node, gather.axis
        first, *others = gather.rows.with_elements(self.info)
        if (
            self.shape(node.outputs[0], node)[axis] != self.length
            or self.shape(first, rows)[axis] != self.first.before
        ):
            raise Refusal("it gathers rows of another length than those of the caches", node)
        own = self.past.local(first, Place(axis), rows)
        _, before, held = self.past.part
        data = self.concat([own, *(self.whole(other, rows) for other in others)], axis)
        entries = [self.local(entry, Place(axis), node) for entry in gather.entries]
        source, ranks = entries[axis], self.number(self.ranks)
        kept = self.less(source, before)
        behind = self.add(self.sub(source, before), held)
        entries[axis] = self.where(kept, self.div(source, ranks), behind)
        return self.op("GatherND", [data, self.concat(entries, -1)])

    def collapsing_rule(self, node: ir.Node) -> WholeRule | None:
        """Attention alone makes something whole of keys."""
        if node.domain != DOMAIN or node.op_type != GRAPH_OP:
            return None
        return lambda _, attention, output: self._attention(self, attention, output)

    def own_form(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """The local form of a value that is as long as the keys or the past, and the whole form of
        any other."""
        shape = self.shape(value, node)
        if self.first.before in shape and self.first.before.const is None:
            return self.past.local(value, Place(shape.index(self.first.before)), node)
        return super().own_form(value, node)

    def _check_light(self, value: ir.Value, node: ir.Node) -> None:
        """Every rank computes all new tokens."""

    def _clone_whole(self, value: ir.Value, node: ir.Node) -> ir.Value:
        """A refusal names the node that reads the cache."""
        try:
            return super()._clone_whole(value, node)
        except Refusal as refusal:
            raise Refusal(refusal.reason, refusal.node or node) from None

    def _whole_leaf(self, value: ir.Value) -> ir.Value:
        if value.name in self.axes:
            raise Refusal(f"each rank would need all tokens of the cache {value.name!r}", None)
        return super()._whole_leaf(value)

    def _make_local(self, value: ir.Value, place: Place, reader: ir.Node | None) -> ir.Value:
        if value.name in self.axes and value in self.inputs:
            raise Refusal(
                f"the cache {value.name!r} is read where its tokens and the new ones are expected",
                reader,
            )
        node = value.producer()
        if (
            node is not None
            and (gather := gathered_rows(node, self.info)) is not None
            and place == Place(gather.axis)
        ):
            return self._gathered_rows(node, gather)
        return super()._make_local(value, place, reader)


class PromptSharder(Sharder):
    """The new graph of a model with caches for a prompt: the caches are empty, and no inputs any
    more.

    Args:
        graph, info, length, axes, ranks, choose: as in Sharder. In `graph`, the caches have no
            tokens.
        caches: the names of the inputs.
    """

    def __init__(
        self,
        graph: ir.Graph,
        info: ShapeInfo,
        length: Dim,
        axes: Mapping[str, int],
        ranks: int,
        choose: Choose,
        caches: Iterable[str],
    ) -> None:
        super().__init__(graph, info, length, axes, ranks, choose)
        self._caches = frozenset(caches)
        self.inputs = {
            value: own for value, own in self.inputs.items() if value.name not in self._caches
        }

    def joined(self, joined: Parts, place: Place) -> ir.Value:
        """The new tokens, which are joined with none."""
        parts = joined.with_elements(self.info)
        if len(parts) != 1:
            return super().joined(joined, place)
        return self.local(parts[0], place, joined.node)

    def _whole_leaf(self, value: ir.Value) -> ir.Value:
        if value.name not in self._caches:
            return super()._whole_leaf(value)
        sizes = [self.size(size) for size in self.shape(value, None)]
        known = without_none(sizes)
        if value.dtype is None or len(known) < len(sizes):
            raise Refusal(f"the sizes of the empty cache {value.name!r} are unknown", None)
        zero = self.constant(np.zeros((), value.dtype.numpy()))
        return self.expand(zero, self.concat(known, 0))


class _Past(_OfAnyLength):
    """The local forms of values that have the length of the past. Everything else is that of the
    owner."""

    def __init__(self, owner: CacheSharder) -> None:
        vars(self).update(vars(owner))
        self.length = owner.first.before
        self._owner = owner
        self._locals, self._refusals, self._part = {}, {}, None

    def size(self, size: Dim) -> ir.Value | None:
        return self._owner.size(size)

    def _whole(self, value: ir.Value) -> ir.Value:
        return self._owner._whole(value)
