"""The plan for the caches of a fused model: which attention reads which cache, and which input
counts its tokens.

Caches share an input where their lengths are the same symbol, or where one attention reads them
together and the same number of rows is appended to both: the original fails where those lengths
differ. Other caches get an input each. Where no attention reads a cache in place, buffers gain
nothing, and there is no plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.in_place.caches import GrowingCache
from fa_compiler.passes.in_place.readers import cache_inputs

LENGTH = "cache_length"


@dataclass(frozen=True)
class Attention:
    """A fused attention, and those of its inputs that are caches it can read in place."""

    node: ir.Node
    inputs: dict[str, GrowingCache]


@dataclass(frozen=True)
class Plan:
    """The caches in the order of the graph, and the attention that reads them in place.

    `lengths` has the name of the input that counts the tokens of each cache, by its `past`.
    """

    caches: tuple[GrowingCache, ...]
    attention: tuple[Attention, ...]
    lengths: dict[ir.Value, str]


def make_plan(graph: ir.Graph, caches: Sequence[GrowingCache], names: Names) -> Plan | None:
    """The plan for these caches; None where no attention reads one of them in place."""
    attention = readers_in_place(graph, caches)
    if not attention:
        return None
    order = [cache for node in graph for cache in caches if cache.concat is node]
    return Plan(tuple(order), tuple(attention), _lengths(order, attention, names))


def readers_in_place(graph: ir.Graph, caches: Sequence[GrowingCache]) -> list[Attention]:
    """The fused attention of a graph that can read one of these caches in place."""
    owners = {value: cache for cache in caches for value in cache.present_aliases}
    axes = {value: cache.axis for value, cache in owners.items()}
    read = ((node, cache_inputs(node, axes)) for node in graph)
    return [
        Attention(node, {name: owners[value] for name, value in inputs.items()})
        for node, inputs in read
        if inputs
    ]


def _lengths(
    order: Sequence[GrowingCache], attention: Sequence[Attention], names: Names
) -> dict[ir.Value, str]:
    """The name of the input that counts the tokens of each cache, one for all caches of equal
    length."""
    groups = {cache.tokens: cache.tokens for cache in order}
    for reader in attention:
        for one, other in combinations(reader.inputs.values(), 2):
            if one.rows == other.rows:
                groups[_group(groups, other.tokens)] = _group(groups, one.tokens)
    inputs = {
        group: names.new(LENGTH)
        for group in dict.fromkeys(_group(groups, cache.tokens) for cache in order)
    }
    return {cache.past: inputs[_group(groups, cache.tokens)] for cache in order}


def _group(groups: dict[Dim, Dim], size: Dim) -> Dim:
    """The size that stands for all sizes that count as equal to `size`."""
    while groups[size] != size:
        size = groups[size]
    return size
