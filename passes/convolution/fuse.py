"""Causal convolutions of one graph: matched, and replaced by ShortConvolution."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, attempt, label
from fa_compiler.passes.answer.report import Block, Code
from fa_compiler.passes.convolution.emit import OP, Emitter
from fa_compiler.passes.convolution.match import Convolution, convolution
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import is_dead, nodes_of_type
from fa_compiler.passes.ir.surgery import restore_order
from fa_compiler.passes.values.facts import Facts


@dataclass(frozen=True)
class FoundConvolution:
    """A causal convolution: its node, with its block if it is fused, or why it is left."""

    node: ir.Node
    outcome: Block | Decline


def fuse_convolutions(graph: ir.Graph, facts: Facts, names: Names) -> list[FoundConvolution]:
    """Replace the causal convolutions of a graph, its subgraphs not included, on the target ort."""
    if facts.options.target != "ort" or not graph.outputs:
        return []
    found = []
    for node in [node for node in nodes_of_type(graph, "Conv") if not is_dead(node)]:
        match = attempt(partial(convolution, node, facts.info))
        if isinstance(match, Decline):
            found.append(FoundConvolution(node, match))
        elif match is not None:
            found.append(_fused(match, graph, facts, names))
    if any(isinstance(each.outcome, Block) for each in found):
        restore_order(graph)
    return found


def _fused(match: Convolution, graph: ir.Graph, facts: Facts, names: Names) -> FoundConvolution:
    """What became of a convolution."""
    anchor = label(match.node)
    with Trial(Builder(graph, names, facts.info)) as trial:
        made = attempt(Emitter(match, facts, trial.builder).emit)
        if isinstance(made, Decline):
            return FoundConvolution(match.node, made)
        node, pairs = made
        trial.replace(*pairs)
        if trial.keep() is None:
            reason = (
                "what this causal convolution reads is computed for it in the graph around its own"
            )
            return FoundConvolution(match.node, Decline(Code.SCOPE, reason, match.node))
    block = Block(id=0, kind="convolution", anchor=anchor, status="fused", op=OP, node=node.name)
    return FoundConvolution(node, block)
