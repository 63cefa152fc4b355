"""Linear attentions of one graph: found, proven and replaced. What is not proven is left, for
matching/linear_attention.py to name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, attempt, label
from fa_compiler.passes.answer.options import ANY_LENGTH, FINITE_SCORES
from fa_compiler.passes.answer.report import Block, is_followed
from fa_compiler.passes.attention_ops.direct import rule_in_words
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import makers_of, subgraphs
from fa_compiler.passes.ir.surgery import restore_order
from fa_compiler.passes.linear.emit import Emitter
from fa_compiler.passes.linear.equal import proven
from fa_compiler.passes.linear.lengths import METADATA
from fa_compiler.passes.linear.proof import LinearMatch
from fa_compiler.passes.linear.regions import Region, regions
from fa_compiler.passes.matching.softmax import anchors
from fa_compiler.passes.values.facts import Facts


@dataclass(frozen=True)
class FusedLinear:
    """One linear attention that is fused, or named and left, and its block."""

    node: ir.Node
    block: Block
    note: str | None = None
    """For which lengths the file is right."""
    members: frozenset[ir.Node] = frozenset()
    """The nodes, which need no other name."""


def fuse_linear(
    graph: ir.Graph, facts: Facts, names: Names, refusal: Decline | None = None
) -> list[FusedLinear]:
    """Replace the linear attentions of a graph, its subgraphs not included; name them, where a
    refusal says that nothing of the model can be fused. A region that holds a softmax, or reads
    what one gives, is an attention with a softmax or its gradient."""
    if not graph.outputs:
        return []
    softmaxes = {node for anchor in anchors(graph, facts.info) for node in anchor.nodes}
    found = [region for region in regions(graph, facts.info) if not _has_softmax(region, softmaxes)]
    matches = proven(found, graph, facts.info)
    fused = [fused for match in matches if (fused := _fused(match, graph, facts, names, refusal))]
    if fused:
        restore_order(graph)
    return fused


def _has_softmax(region: Region, softmaxes: set[ir.Node]) -> bool:
    read = chain.from_iterable(node.inputs for node in region.nodes)
    return not softmaxes.isdisjoint((*region.nodes, *makers_of(read)))


def _fused(
    match: LinearMatch, graph: ir.Graph, facts: Facts, names: Names, refusal: Decline | None
) -> FusedLinear | None:
    is_any_length = ANY_LENGTH in facts.options.assume
    anchor = label(match.found.output.value.producer()) or ""
    if refusal is not None:
        return _left(match, refusal, facts)
    with Trial(Builder(graph, names, facts.info)) as trial:
        emitter = Emitter(match, trial.builder, is_any_length)
        made = attempt(lambda: emitter.emit(facts))
        if isinstance(made, Decline):
            return _left(match, made, facts)
        trial.replace(*((old, trial.builder.for_output(old, new)) for old, new in made.pairs))
        if trial.keep() is None:
            return None
    node = made.operator.node
    if not match.lengths.are_all:
        node.metadata_props[METADATA] = match.lengths.written()
    block = Block(
        id=0,
        kind="no_softmax",
        anchor=anchor,
        status="fused",
        op=node.op_type,
        node=node.name,
        layout=made.operator.layout,
        heads=made.call.heads,
        rule=rule_in_words(match.rule, match.decay_width, match.sizes.heads),
        assumed=(*made.operator.assumed, *_assumed(match, is_any_length)),
    )
    return FusedLinear(
        node, block, _lengths_in_words(anchor, match, is_any_length), _members(match)
    )


def _assumed(match: LinearMatch, is_any_length: bool) -> Iterator[str]:
    """What a match rests on beside what its operator does."""
    if match.chosen is not None:
        yield FINITE_SCORES
    if is_any_length and not match.lengths.are_all:
        yield ANY_LENGTH


def _members(match: LinearMatch) -> frozenset[ir.Node]:
    """The nodes of a region, and those in the bodies of its loops."""
    bodies = (
        node
        for member in match.region.nodes
        for graph in subgraphs(member)
        for node in graph.all_nodes()
    )
    return frozenset((*match.region.nodes, *bodies))


def _left(match: LinearMatch, decline: Decline, facts: Facts) -> FusedLinear | None:
    """A linear attention that the target cannot express; None where an input of the graph holds its
    output."""
    output = match.found.output.value.producer()
    if output is None:
        return None
    anchor = label(output)
    hint = None if is_followed(decline.hint, facts.options.target) else decline.hint
    block = Block(
        id=0,
        kind="no_softmax",
        anchor=anchor,
        status="declined",
        code=decline.code,
        reason=decline.reason,
        culprit=label(decline.culprit) or anchor,
        hint=hint,
    )
    return FusedLinear(output, block, members=_members(match))


def _lengths_in_words(anchor: str, match: LinearMatch, is_any_length: bool) -> str | None:
    """For which lengths the file is right; None where it is for all that it takes."""
    if match.lengths.are_all:
        return None
    refused = f"other numbers are refused; --assume {ANY_LENGTH} computes them"
    beyond = "other numbers are computed, too" if is_any_length else refused
    return f"{anchor}: as exported, this linear attention is right where the tokens are {match.lengths}; {beyond}"
