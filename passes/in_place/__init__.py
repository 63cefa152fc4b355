"""Caches that grow by a Concat become buffers that are written in place, where the user asks for
it.

`use_buffers` does so for a fused model, and `possible_buffers` only names these caches. caches.py
finds the caches, and readers.py says which attention can read a buffer. plan.py joins the two.
buffers.py changes the graph, and says why the result stays the same.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial

import onnx_ir as ir

from fa_compiler.op_registry import extensions_used
from fa_compiler.passes.answer.decline import Decline, attempt, label
from fa_compiler.passes.answer.report import Block, CacheLine, Code
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.in_place.buffers import CAPACITY, BufferRewrite
from fa_compiler.passes.in_place.caches import (
    GrowingCache,
    candidates,
    read_cache,
    with_rows_of_its_own,
)
from fa_compiler.passes.in_place.plan import Plan, make_plan, readers_in_place
from fa_compiler.passes.ir.nodes import graph_opset, name_of
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.passes.values.shapes import ShapeInfo

METADATA = "fa_compiler.caches"
"""The entry of a changed model's metadata that names its buffers: a JSON list of objects with
`past`, `present`, the `axis` of the tokens, and `length`, the input that counts them."""
MIN_OPSET = 11
"""The first opset with both ScatterND and Range."""


def use_buffers(
    model: ir.Model, info: ShapeInfo, names: Names, blocks: list[Block]
) -> tuple[list[Block], list[CacheLine]]:
    """Turn the caches of a fused model into buffers.

    Returns the blocks, with the extensions that their nodes now use, and a line for each cache.
    """
    graph = model.graph
    found, lines = _caches(graph, info)
    sizes = {str(size) for value in graph.inputs for size in value.shape or ()}
    capacity = Names(sizes).new(CAPACITY)
    for home in _homes(found):
        caches = [cache for cache in found if cache.graph is home]
        plan = make_plan(home, caches, names)
        if plan is None:
            reason = "no fused attention reads it as it is, so that its rows would be copied all the same"
            lines |= {cache.past: replace(lines[cache.past], reason=reason) for cache in caches}
            continue
        for cache in plan.caches:
            name, length = cache.output.name, plan.lengths[cache.past]
            lines[cache.past] = replace(
                lines[cache.past], present=name, axis=cache.axis, length=length
            )
        rewrite = BufferRewrite(Builder(home, names, info), plan, graph, capacity)
        rewrite.make()
        for past, nodes in rewrite.copied.items():
            lines[past] = replace(lines[past], copied=tuple(nodes))
        blocks = _with_extensions(blocks, plan, info)
    _write_metadata(model, [line for line in lines.values() if line.present is not None])
    return blocks, list(lines.values())


def possible_buffers(graph: ir.Graph, info: ShapeInfo) -> list[str]:
    """The names of the inputs that `use_buffers` would turn into buffers. The fused model stays as
    it is."""
    found, _ = _caches(graph, info)
    read = {
        home: readers_in_place(home, [each for each in found if each.graph is home])
        for home in _homes(found)
    }
    return [name_of(cache.past) for cache in found if read[cache.graph]]


def _homes(caches: list[GrowingCache]) -> list[ir.Graph]:
    """The graphs in which the caches grow."""
    return [*dict.fromkeys(cache.graph for cache in caches)]


def _caches(
    graph: ir.Graph, info: ShapeInfo
) -> tuple[list[GrowingCache], dict[ir.Value, CacheLine]]:
    """The caches that may become buffers, and a line for each input that looks like a cache."""
    read = {past: attempt(partial(_cache, past, graph, info)) for past in candidates(graph, info)}
    grown = [cache for cache in read.values() if isinstance(cache, GrowingCache)]
    caches: list[GrowingCache] = []
    lines: dict[ir.Value, CacheLine] = {}
    for past, found in read.items():
        cache = (
            found
            if isinstance(found, Decline)
            else attempt(partial(with_rows_of_its_own, found, grown))
        )
        lines[past] = CacheLine(name_of(past))
        if isinstance(cache, Decline):
            lines[past] = replace(lines[past], reason=cache.reason, culprit=label(cache.culprit))
        else:
            caches.append(cache)
    return caches, lines


def _write_metadata(model: ir.Model, buffers: list[CacheLine]) -> None:
    if buffers:
        keys = ("past", "present", "axis", "length")
        model.metadata_props[METADATA] = json.dumps(
            [{key: getattr(line, key) for key in keys} for line in buffers]
        )


def _with_extensions(blocks: list[Block], plan: Plan, info: ShapeInfo) -> list[Block]:
    changed = {
        attention.node.name: extensions_used(node_view(attention.node, info))
        for attention in plan.attention
    }
    return [
        replace(block, extensions=changed.get(block.node, block.extensions)) for block in blocks
    ]


def _cache(past: ir.Value, graph: ir.Graph, info: ShapeInfo) -> GrowingCache:
    """The cache of an input. Raises Decline."""
    if graph_opset(graph) < MIN_OPSET:
        raise Decline(Code.OPSET, f"ScatterND and Range are there from opset {MIN_OPSET} on")
    return read_cache(past, info)
