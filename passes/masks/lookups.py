"""Padding masks that a layer with a window looks up at other tokens than its keys.

    A layer with a sliding window may keep its last keys only (a rolling cache). The keys of a step
    are then those of the last tokens. The exporter of transformers 5 reads the padding mask,
    [batch, tokens], at its first positions:

    kept = (j > row - window) & attention_mask[:, None, None, :keys]             the model: attention_mask[..., -keys:]

    lookup := an And of conditions on the positions of one mask, of which no And alone reads the
              result, with
                1 an element of an input of the model, [batch, tokens], that is not 0: for key j its
                  element j
                2 as many keys as a cache has, an input of four axes, and as many more as the mask
                  has rows
    doubtful  a lookup with another number of tokens than there are keys, where
                3 there are more tokens than keys in every run, or
                4 a window excludes keys before the row, and no lookup without a window has the same
                  number of keys: a layer without a window needs the keys of all tokens

This is what the file computes, and fusing does not change it. What the model means cannot be read
from the file, so it is a remark and no reason to decline. Where all keys are kept, the first
positions are the right ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from fa_compiler.passes.algebra.formula import (
    Affine,
    AtLeastZero,
    BooleanTensor,
    Formula,
    Index,
    conjuncts,
)
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.budget import limited_attempt
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.ir.nodes import (
    all_ops,
    distinct_consumers,
    instances,
    is_op,
    is_weight,
    nodes_of_type,
)
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.positions import Positions


@dataclass(frozen=True)
class Lookup:
    """An input [batch, tokens] of which a mask over `keys` keys takes the first ones; `cache` holds
    the keys before the new ones, and `node` joins the lookup with the other conditions, of which
    one may be a `window`."""

    node: ir.Node
    mask: ir.Value
    tokens: Dim
    keys: Dim
    cache: ir.Value
    window: bool

    def is_doubtful(self, others: Sequence[Lookup]) -> bool:
        """May the keys be those of other tokens than the first ones, as far as the other lookups
        tell?"""
        if self._is_shorter:  # 3
            return True
        has_all = any(
            other.mask is self.mask and other.keys == self.keys and not other.window
            for other in others
        )
        return self.window and not has_all  # 4

    @property
    def _is_shorter(self) -> bool:
        """Are there fewer keys than tokens in every run?"""
        return (self.tokens - self.keys).is_at_least(1)

    @property
    def note(self) -> str:
        """What the report says of it."""
        advice = "Give it caches of all tokens, as DecodingSession does, or batches without padding"
        if self._is_shorter:
            advice = "Use batches without padding, or put the mask's last positions first, if no other layer reads it"
        return (
            f"{label(self.node)}: {self.mask.name!r} is read at its first {self.keys} of {self.tokens} positions, for "
            f"the {self.keys} keys that begin with the cache {self.cache.name!r}. Where this cache holds only the last "
            "tokens, as that of a layer with a window may, these are the positions of other tokens, and a batch entry "
            f"with padding gets other numbers than the exported model gives. Fusing does not change that. {advice}"
        )


def doubtful_lookups(graph: ir.Graph, facts: Facts) -> list[Lookup]:
    """The doubtful lookups of a graph."""
    caches = [value for value in graph.inputs if len(facts.info.sizes(value)) == 4]
    found: list[Lookup] = []
    for node in nodes_of_type(graph, "And") if caches else ():
        lookups = limited_attempt(node, partial(_lookups, node, facts, caches))
        found.extend([] if isinstance(lookups, Decline) else lookups)
    return [lookup for lookup in found if lookup.is_doubtful(found)]


def _lookups(node: ir.Node, facts: Facts, caches: Sequence[ir.Value]) -> list[Lookup]:
    """The lookups that a node joins with other conditions."""
    shape, readers = facts.info.sizes(node.outputs[0]), distinct_consumers(node.outputs[0])
    if len(shape) < 2 or (readers and all_ops(readers, "And")):
        return []
    cache = _cache(shape, facts, caches)
    if cache is None:
        return []
    positions, keys = facts.positions(shape), shape[-1]
    formula = positions.truth(node.outputs[0], positions.identity_index)
    conditions = [] if formula is None else conjuncts(formula)
    window = any(_is_window(condition, shape) for condition in conditions)
    read = _read_by_key(conditions, positions)
    return [
        Lookup(node, mask, tokens, keys, cache, window) for mask, tokens in read if tokens != keys
    ]


def _read_by_key(
    conditions: Sequence[Formula], positions: Positions
) -> Iterator[tuple[ir.Value, Dim]]:
    """The inputs [batch, tokens] of which a condition reads the element j for key j, each with its
    number of tokens."""
    key = Affine.index(positions.rank - 1, positions.rank)
    kept = (condition for condition in instances(conditions, BooleanTensor) if condition.when)
    for value, index in (_origin(condition, positions) for condition in kept):
        shape, is_given = (
            positions.shape(value) or (),
            value.is_graph_input() and not is_weight(value),
        )
        if is_given and len(shape) == 2 and index[1] == key and not any(index[0].steps[-2:]):  # 1
            yield value, shape[1]


def _origin(tensor: BooleanTensor, positions: Positions) -> tuple[ir.Value, Index]:
    """Where the element of a tensor at each position of a mask comes from, also in front of a
    Cast."""
    rank = positions.rank
    nothing = Affine.number(0, rank)
    index: Index = tuple(
        nothing if axis is None else Affine.index(axis, rank) for axis in tensor.axes
    )
    value: ir.Value = tensor.value
    while True:
        *_, (value, index) = positions.origins(value, index)
        node = value.producer()
        if not is_op(node, "Cast") or node.inputs[0] is None:
            return value, index
        value = node.inputs[0]


def _is_window(condition: Formula, shape: Shape) -> bool:
    """Does a condition exclude keys that lie too far before the row, in some run?"""
    if not isinstance(condition, AtLeastZero) or condition.affine.least(shape).is_at_least(0):
        return False
    *others, row, column = condition.affine.steps
    return column == 1 and row in (-1, 0) and not any(others)


def _cache(shape: Shape, facts: Facts, caches: Sequence[ir.Value]) -> ir.Value | None:
    """The first input with as many rows as a mask has keys before those of its own rows."""
    before = shape[-1] - shape[-2]  # 2
    return next((cache for cache in caches if facts.info.sizes(cache)[2] == before), None)
