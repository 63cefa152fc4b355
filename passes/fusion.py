"""The fusion over a whole model. The report has a block for each softmax, attention operator and
fused gradient. For Ascend it has a line for each norm and gated activation around them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, VERSION, extensions_used
from fa_compiler.op_registry.registry import newest, release
from fa_compiler.passes.answer.budget import limited, limited_attempt
from fa_compiler.passes.answer.decline import Decline, attempt, label
from fa_compiler.passes.answer.options import ATTENTION_SINCE, CLOSE_RANKS, NEWEST_OPSET, Options
from fa_compiler.passes.answer.report import (
    Around,
    Block,
    CacheLine,
    Code,
    Kind,
    Missed,
    MissedCode,
    Progress,
    Report,
    Status,
    is_followed,
    other_target,
)
from fa_compiler.passes.around import finish, fuse_around, fuse_positions
from fa_compiler.passes.attention_ops import (
    DIRECT,
    ConvertedOp,
    OpConverter,
    Replacing,
    convert,
    is_attention_op,
)
from fa_compiler.passes.attention_ops.prompt_positions import note_on_positions, unread_positions
from fa_compiler.passes.backward import PairDecline, fuse_pair
from fa_compiler.passes.convolution.fuse import fuse_convolutions
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.emit.raise_opset import raise_opset
from fa_compiler.passes.emit.survival import keep_dequantised, put_in_front
from fa_compiler.passes.in_place import possible_buffers, use_buffers
from fa_compiler.passes.ir.nodes import (
    any_op,
    certain,
    graph_opset,
    is_op,
    is_read,
    remember_versions,
    subgraphs,
)
from fa_compiler.passes.ir.surgery import replace_value, restore_order
from fa_compiler.passes.linear.fuse import fuse_linear
from fa_compiler.passes.linear.regions import LOOPS
from fa_compiler.passes.masks.lookups import doubtful_lookups
from fa_compiler.passes.matching.attention import Matcher
from fa_compiler.passes.matching.linear_attention import linear_attentions
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.matching.other_softmaxes import other_softmaxes
from fa_compiler.passes.matching.routes import ONLY, Route
from fa_compiler.passes.matching.softmax import SoftmaxAnchor, anchors
from fa_compiler.passes.prepare.chosen_addends import add_under_conditions
from fa_compiler.passes.prepare.differences import move_products
from fa_compiler.passes.prepare.functions import (
    inline_functions,
    resolve_casts,
    softmaxes_in_functions,
)
from fa_compiler.passes.prepare.joined_values import join_values
from fa_compiler.passes.prepare.key_parts import join_keys
from fa_compiler.passes.prepare.part_sums import add_to_whole
from fa_compiler.passes.prepare.preparation import prepare
from fa_compiler.passes.prepare.quantised_softmax import take_apart
from fa_compiler.passes.prepare.shared import Sharer, Sharing
from fa_compiler.passes.prepare.substitutions import Substitutions
from fa_compiler.passes.prepare.written_out import left_in_functions, write_out
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.passes.rewrite.rewriter import Fused, Rewriter
from fa_compiler.passes.sparse import fuse_gathered_keys, fuse_masked_selection
from fa_compiler.passes.values.declared import correct_shapes
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.overridable import replaceable_cause
from fa_compiler.passes.values.shapes import analyse

SHARED = (Code.SCORES_ARE_OUTPUT, Code.PROBABILITIES_ARE_OUTPUT)
"""The codes of an attention whose scores or probabilities something else reads. That may be another
attention (shared.py)."""
OUTCOMES: dict[Code, tuple[Kind, Status]] = {
    Code.ALREADY_FUSED: ("forward", "already_fused"),
    Code.NOT_ATTENTION: ("softmax_only", "not_attention"),
    Code.LINEAR: ("no_softmax", "linear_attention"),
}
"""The kind and status of blocks that are no declined attention with a softmax."""
CONTRIB = "com.microsoft"
"""The domain of ONNX Runtime's operators."""


def fuse(
    model: ir.Model, options: Options | None = None, progress: Progress | None = None
) -> Report:
    """Fuse the attention of a model in place, and report what became of each softmax and attention
    operator.

    A model without attention stays as it is.
    """
    started = time.perf_counter()
    options = options or Options()
    dropped = inline_functions(model, options.target == "ort")
    given = graph_opset(model.graph)
    options, refusal = _with_raised_opset(model, options)
    graphs = remember_versions(model)
    info = analyse(model)
    names = Names.of(graphs)
    if given < graph_opset(model.graph):
        put_in_front([node for graph in graphs for node in graph], info, names)
    prepared = prepare(model, graphs, info, names)
    graphs, info = prepared.graphs, prepared.info
    resolve_casts(graphs, info)
    corrected = correct_shapes(graphs, info)
    run = _Run(
        Matcher(Facts.of(info, options)),
        names,
        progress or (lambda stage, done, total: None),
        softmaxes_in_functions(model),
        [*dropped],
        graph_opset(model.graph),
        refusal,
        prepared.made,
    )
    run.notes.extend((*_newer_cann(options), *_doubts(model.graph, run.facts)))
    blocks, around = run.fuse_all(graphs)
    if _is_any_fused(blocks, around):
        _import_operators(model, options)
        run.notes.extend(corrected)
    else:
        prepared.undo()
    written = run.write_out(model)
    caches: list[CacheLine] = []
    if options.in_place_caches:
        blocks, caches = run.use_buffers(model, blocks)
    return Report(
        list(_numbered(blocks)),
        target=options.target,
        seconds=time.perf_counter() - started,
        notes=run.notes,
        caches=caches,
        possible_buffers=run.possible_buffers(model, blocks),
        around=around,
        written_out=written,
    )


def _with_raised_opset(model: ir.Model, options: Options) -> tuple[Options, Decline | None]:
    """Raise the model to the opset that the target onnx needs. Returns the options with this opset,
    and why it could not be raised."""
    if options.target != "onnx":
        return options, None
    wanted = options.opset or ATTENTION_SINCE
    refusal = attempt(lambda: raise_opset(model, wanted))
    return replace(
        options, opset=min(max(graph_opset(model.graph), ATTENTION_SINCE), NEWEST_OPSET)
    ), refusal


def _doubts(graph: ir.Graph, facts: Facts) -> Iterator[str]:
    """Where the file is not what the model it was exported from means: a note for each kind."""
    if lookups := doubtful_lookups(graph, facts):
        yield lookups[0].note
    if nodes := unread_positions(graph, facts):
        yield note_on_positions(nodes)


def _newer_cann(options: Options) -> Iterator[str]:
    """A note on a CANN that is newer than all that the registry has."""
    asked, known = release(options.cann or ""), release(newest())
    if asked is not None and known is not None and asked > known:
        yield f"CANN {options.cann} is newer than all that are known here; written are the operators of {newest()}"


def _is_any_fused(blocks: Sequence[Block], around: Sequence[Around]) -> bool:
    """Was an attention fused, or something around it?"""
    return any(block.status == "fused" for block in blocks) or any(
        line.status == "fused" for line in around
    )


def _is_there(graph: ir.Graph, owners: Mapping[ir.Graph, ir.Node]) -> bool:
    """Is a graph the main one, or that of a node which has not been replaced?"""
    while (owner := owners.get(graph)) is not None:
        if owner.graph is None or isinstance(owner.graph, ir.Function):
            return False
        graph = owner.graph
    return True


def _import_operators(model: ir.Model, options: Options) -> None:
    """Import the domain of the fused operators."""
    if options.target != "onnx":
        domain, version = (CONTRIB, 1) if options.is_standard else (DOMAIN, VERSION)
        model.graph.opset_imports[domain] = version


@dataclass(frozen=True)
class _Found:
    """What is reported of a graph: the softmaxes that may be attention, other softmaxes and
    attention without one, with their declines, and what was substituted for the former."""

    anchors: dict[ir.Node, SoftmaxAnchor]
    declined: dict[ir.Node, Decline]
    substitutions: Substitutions
    linear: dict[ir.Node, Block]
    """The blocks of linear attentions and causal convolutions that are fused already, by their
    nodes."""


@dataclass(frozen=True)
class _Run:
    """What the graphs of one model share."""

    matcher: Matcher
    names: Names
    progress: Progress
    softmaxes_of_function: Mapping[ir.OperatorIdentifier, tuple[str, ...]]
    """The names of the softmaxes that a call of a function runs."""
    notes: list[str]
    opset: int
    refusal: Decline | None
    """Why nothing of the model can be fused for the target."""
    prepared: frozenset[str]
    """The names of nodes that are not the model's own."""
    made: list[ir.Node] = field(default_factory=list)
    """The fused nodes of all graphs."""
    named: set[ir.Node] = field(default_factory=set)
    """The nodes of recurrences that are left, and reported as a whole."""

    @property
    def facts(self) -> Facts:
        """What is known of the model."""
        return self.matcher.facts

    def use_buffers(
        self, model: ir.Model, blocks: list[Block]
    ) -> tuple[list[Block], list[CacheLine]]:
        """Put caches in place. Returns the blocks, changed by that, and a line for each cache."""
        blocks, caches = use_buffers(model, self.facts.info, self.names, blocks)
        if not caches:
            self.notes.append(
                "no input is a cache that grows by a Concat, so that there is nothing to put in place"
            )
        return blocks, caches

    def possible_buffers(self, model: ir.Model, blocks: Sequence[Block]) -> list[str]:
        """The caches that could be in place, where the user did not ask for it."""
        options = self.facts.options
        asked = options.target != "ort" or options.in_place_caches
        if asked or not any(block.status == "fused" for block in blocks):
            return []
        return possible_buffers(model.graph, self.facts.info)

    def write_out(self, model: ir.Model) -> list[str]:
        """Write out operators without a kernel. Returns a sentence for each of them."""
        if self.facts.options.target != "ort" or self.opset > NEWEST_OPSET:
            return []
        written, left = write_out(remember_versions(model), self.facts.info, self.names)
        self.notes.extend((*written, *left, *left_in_functions(model.functions.values())))
        return written

    def turn_positions(self, graph: ir.Graph) -> list[Around]:
        """Fuse the rotary positions of one graph, in front of its attention."""
        return fuse_positions(graph, self.facts, self.names) if self._fuses_around(graph) else []

    def fuse_around(self, graph: ir.Graph) -> list[Around]:
        """Fuse the norms and gated activations of one graph, after its attention."""
        return fuse_around(graph, self.facts, self.names) if self._fuses_around(graph) else []

    def finish(self, graph: ir.Graph, lines: list[Around]) -> list[Around]:
        """Make less of what was fused in one graph. Returns its lines of the report, of which
        `lines` were known."""
        is_finished = self.facts.options.target == "ascend" and self._fuses_around(graph)
        return finish(graph, self.facts, self.names, lines) if is_finished else lines

    def _fuses_around(self, graph: ir.Graph) -> bool:
        may = self.refusal is None and self.opset <= NEWEST_OPSET
        return may and self.facts.options.fuses_around and bool(graph.outputs)

    def fuse_all(self, graphs: Sequence[ir.Graph]) -> tuple[list[Block], list[Around]]:
        """Fuse all graphs: their blocks, and the lines of what stands around them."""
        turned = {graph: self.turn_positions(graph) for graph in graphs}
        blocks = self.fuse_graphs(graphs)
        if self.facts.options.target != "ascend":
            keep_dequantised(self.made, self.facts.info, self.names)
        # An attention operator that holds rotary positions leaves them written out in front of its
        # replacement.
        later = {
            graph: [line for line in self.turn_positions(graph) if line.status == "fused"]
            for graph in graphs
        }
        lines = {
            graph: [*turned[graph], *later[graph], *self.fuse_around(graph)] for graph in graphs
        }
        around = [line for graph in graphs for line in lines[graph]]
        if _is_any_fused(blocks, around):
            around = [line for graph in graphs for line in self.finish(graph, lines[graph])]
        return blocks, around

    def fuse_graphs(self, graphs: Sequence[ir.Graph]) -> list[Block]:
        """Fuse all graphs. That of a loop which became a linear attention is none any more."""
        owners = {body: node for graph in graphs for node in graph for body in subgraphs(node)}
        blocks: list[Block] = []
        for graph in graphs:
            if _is_there(graph, owners):
                blocks.extend(self.fuse_graph(graph, owners.get(graph)))
        return blocks

    def fuse_graph(self, graph: ir.Graph, owner: ir.Node | None = None) -> list[Block]:
        """Fuse one graph, of the node `owner`, without its subgraphs. Returns a block for each
        softmax, attention operator and call of a function that holds one, in the order of the
        graph."""
        linear = self._fuse_convolutions(graph)
        if not is_op(owner, *LOOPS):
            linear |= self._fuse_linear(graph)
        listed, substitutions = self._change_before_matching(graph)
        found = _Found(
            {anchor.node: anchor for anchor in listed},
            dict(self._other_declines(graph, listed)),
            substitutions,
            linear,
        )
        reported = [node for node in graph if self._is_reported(node, found)]
        if (blocks := self._why_nothing_is_fused(graph, reported)) is not None:
            return blocks
        rewriter = Rewriter(Builder(graph, self.names, self.facts.info), self.facts)
        has_top_k = any_op(graph, "TopK")
        sharing = Sharing(listed, self.matcher)
        groups: dict[ir.Node, list[Block]] = {}
        fused_in_group: dict[ir.Node, Block] = {}
        retried: list[ir.Node] = []
        for index, node in enumerate(reported):
            self.progress("attention", index + 1, len(reported))
            if node in fused_in_group:
                groups[node] = [fused_in_group[node]]
                continue
            groups[node] = self._blocks(node, found, rewriter, has_top_k)
            if node in found.anchors and groups[node][0].code in SHARED:
                fused_in_group.update(
                    self._fuse_shared(sharing.group(found.anchors[node]), rewriter, has_top_k)
                )
                if node in fused_in_group:
                    groups[node] = [fused_in_group[node]]
                else:
                    retried.append(node)
        rewriter.finish()
        self.made.extend(rewriter.made)
        self._retry(graph, retried, groups, has_top_k)
        return [block for group in groups.values() for block in group]

    def _fuse_linear(self, graph: ir.Graph) -> dict[ir.Node, Block]:
        """Fuse the linear attentions of plain operators. Returns their nodes and blocks."""
        if self.opset > NEWEST_OPSET:
            return {}
        fused = fuse_linear(graph, self.facts, self.names, self.refusal)
        self.made.extend(each.node for each in fused if each.block.status == "fused")
        self.notes.extend(each.note for each in fused if each.note is not None)
        self.named.update(node for each in fused for node in each.members)
        return {each.node: each.block for each in fused}

    def _fuse_convolutions(self, graph: ir.Graph) -> dict[ir.Node, Block]:
        """Fuse the causal convolutions of plain operators. Returns their nodes and blocks."""
        if self.opset > NEWEST_OPSET or self.refusal is not None:
            return {}
        blocks: dict[ir.Node, Block] = {}
        for found in fuse_convolutions(graph, self.facts, self.names):
            if isinstance(found.outcome, Decline):
                declined = self._declined_block(label(found.node), found.outcome)
                blocks[found.node] = replace(declined, kind="convolution")
            else:
                self.made.append(found.node)
                blocks[found.node] = found.outcome
        return blocks

    def _is_reported(self, node: ir.Node, found: _Found) -> bool:
        known = any(node in each for each in (found.anchors, found.declined, found.linear))
        known = known or (node.domain, node.op_type) in DIRECT
        return known or is_attention_op(node) or node.op_identifier() in self.softmaxes_of_function

    def _blocks(
        self, node: ir.Node, found: _Found, rewriter: Rewriter, has_top_k: bool
    ) -> list[Block]:
        """The blocks of a softmax, an attention operator, or a call of a function that holds
        one."""
        if (anchor := found.anchors.get(node)) is not None:
            return self._fuse_anchor(anchor, rewriter, has_top_k, found.substitutions)
        if (linear := found.linear.get(node)) is not None:
            return [linear]
        if (direct := DIRECT.get((node.domain, node.op_type))) is not None:
            return [self._replace(node, rewriter, *direct)]
        if is_attention_op(node):
            return [self._convert(node, rewriter)]
        if (decline := found.declined.get(node)) is not None:
            return [self._declined_block(label(node), decline)]
        return [
            _in_function(node, name) for name in self.softmaxes_of_function[node.op_identifier()]
        ]

    def _retry(
        self,
        graph: ir.Graph,
        softmaxes: Sequence[ir.Node],
        groups: dict[ir.Node, list[Block]],
        has_top_k: bool,
    ) -> None:
        """Retry attentions whose other reader has been fused since. One pass may free the next, as
        in a chain of layers."""
        left = list(softmaxes)
        some = any(block.status == "fused" for group in groups.values() for block in group)
        while left and some:
            again = self._fuse_again(graph, left, has_top_k)
            groups.update(again)
            left = [node for node in left if node not in again]
            some = bool(again)

    def _change_before_matching(self, graph: ir.Graph) -> tuple[list[SoftmaxAnchor], Substitutions]:
        """Change what the ordinary matcher then can match. Returns the softmaxes, and what is taken
        back where an attention is not fused."""
        listed, all_made = list(anchors(graph, self.facts.info)), Substitutions()
        if not graph.outputs or self.opset > NEWEST_OPSET:
            return listed, all_made
        new_builder = partial(Builder, graph, self.names, self.facts.info)
        for step in (
            take_apart,
            move_products,
            add_to_whole,
            add_under_conditions,
            join_keys,
            join_values,
        ):
            substitutions = step(graph, listed, self.matcher, new_builder)
            all_made.update(substitutions)
            if substitutions.made:
                restore_order(graph)
            # it makes softmaxes, which the others may find
            if substitutions.made and step is take_apart:
                listed = list(anchors(graph, self.facts.info))
        return (list(anchors(graph, self.facts.info)) if all_made.made else listed), all_made

    def _why_nothing_is_fused(
        self, graph: ir.Graph, reported: Sequence[ir.Node]
    ) -> list[Block] | None:
        """The blocks of a graph in which nothing can be fused; None for other graphs."""
        if not graph.outputs:
            reason = "the graph has no outputs, so that nothing needs what this computes"
            return [
                _block_of(label(node), Decline(Code.NOT_ATTENTION, reason, node))
                for node in reported
            ]
        if self.opset > NEWEST_OPSET:
            reason = f"the model is of opset {self.opset}, and operators are known up to opset {NEWEST_OPSET}"
            return [
                self._declined_block(label(node), Decline(Code.OPSET, reason, node))
                for node in reported
            ]
        if self.refusal is not None:
            return [self._declined_block(label(node), self.refusal) for node in reported]
        return None

    def _fuse_again(
        self, graph: ir.Graph, softmaxes: list[ir.Node], has_top_k: bool
    ) -> dict[ir.Node, list[Block]]:
        """Fuse attentions whose scores or probabilities only a fused attention has read, such as
        the scores of the first of two layers when the second adds them to its own (RealFormer).
        Returns the blocks of those that are fused."""
        rewriter = Rewriter(Builder(graph, self.names, self.facts.info), self.facts)
        by_node = {anchor.node: anchor for anchor in anchors(graph, self.facts.info)}
        tried = {
            node: self._fuse_anchor(by_node[node], rewriter, has_top_k, Substitutions())
            for node in softmaxes
            if node in by_node
        }
        rewriter.finish()
        self.made.extend(rewriter.made)
        return {node: blocks for node, blocks in tried.items() if blocks[0].status == "fused"}

    def _other_declines(
        self, graph: ir.Graph, listed: Sequence[SoftmaxAnchor]
    ) -> Iterator[tuple[ir.Node, Decline]]:
        """What is named and left as it is: softmaxes that are no anchors, and attention without a
        softmax."""
        softmaxes = other_softmaxes(graph, listed, self.facts)
        yield from ((block.node, block.decline(self.facts)) for block in softmaxes)
        probabilities = {
            *(anchor.output for anchor in listed),
            *(block.node.outputs[0] for block in softmaxes),
        }
        linear = linear_attentions(graph, probabilities, self.facts)
        yield from (
            (block.node, block.decline()) for block in linear if block.node not in self.named
        )

    def _fuse_anchor(
        self,
        anchor: SoftmaxAnchor,
        rewriter: Rewriter,
        has_top_k: bool,
        substitutions: Substitutions,
    ) -> list[Block]:
        name = label(anchor.node)
        names = (name, *substitutions.twins(anchor))
        with limited(anchor.node) as budget:
            block = rewriter.attempt(lambda: self._fuse_one(name, anchor, rewriter, has_top_k))
            pair = (
                self._fuse_pair(anchor, rewriter, has_top_k, block)
                if isinstance(block, Decline)
                else []
            )
        if pair:
            return pair
        if isinstance(block, Decline):
            reason = budget.ended or substitutions.give_up(anchor, block)
            return [self._declined_block(softmax, reason) for softmax in names]
        assumed = tuple(sorted({*block.assumed, *substitutions.assumed(anchor)}))
        return [replace(block, anchor=softmax, assumed=assumed) for softmax in names]

    def _fuse_shared(
        self, group: list[Sharer], rewriter: Rewriter, has_top_k: bool
    ) -> dict[ir.Node, Block]:
        """Fuse each attention of a group that shares scores or probabilities. Returns one block for
        each softmax."""
        blocks: dict[ir.Node, Block] = {}
        for sharer in group:
            name = label(sharer.anchor.node)
            build = partial(self._fuse_one, name, sharer.anchor, rewriter, has_top_k, sharer.route)
            made = limited_attempt(sharer.anchor.node, partial(rewriter.attempt, build))
            block = self._declined_block(name, made) if isinstance(made, Decline) else made
            first = blocks.setdefault(sharer.anchor.node, block)
            if first is not block and block.status == "fused":
                self.notes.append(
                    f"{name}: its attention to another value is computed by itself, by {block.node}"
                )
            elif first is not block:
                blocks[sharer.anchor.node] = block
        return blocks

    def _fuse_one(
        self,
        name: str,
        anchor: SoftmaxAnchor,
        rewriter: Rewriter,
        has_top_k: bool,
        route: Route = ONLY,
    ) -> Block:
        """Fuse an attention and return its block. Raises Decline.

        The scores may be the sum of two products. Where the operator may take both (query_rope,
        key_rope), that is tried first: for ONNX Runtime, and on Ascend with lists of keys, which
        come from a graph that ranks keys. If it fails, or the operator takes one product only, the
        added product becomes a bias.
        """
        if self.facts.options.target == "ort" or has_top_k:
            joining = replace(self.matcher, joins_added_product=True)
            paths = joining.begin(anchor, route)
            dense = self.facts.options.target == "ort"
            joined = rewriter.attempt(
                lambda: self._fuse_match(name, joining.finish(paths), rewriter, dense)
            )
            if isinstance(joined, Decline) and paths.scores.added_product is None:
                raise joined
            if joined is not None and not isinstance(joined, Decline):
                return joined
        return certain(self._fuse_match(name, self.matcher.match(anchor, route), rewriter, True))

    def _fuse_match(
        self, name: str, match: AttentionMatch, rewriter: Rewriter, dense: bool
    ) -> Block | None:
        """Fuse an attention to selected keys, or, if it may be `dense`, any. Raises Decline."""
        missed: list[Missed] = []
        block = self._sparse(name, match, rewriter, missed)
        if block is not None or not dense:
            return block
        return self._fused_block(
            name, match, _without_repeated(rewriter.emit(match), missed), missed
        )

    def _sparse(
        self, name: str, match: AttentionMatch, rewriter: Rewriter, missed: list[Missed]
    ) -> Block | None:
        """Fuse an attention to listed or selected keys and return its block; None for other
        attentions, with a line in `missed` where the user could vouch for it."""
        if self.facts.options.is_standard:
            return None
        attended = fuse_gathered_keys(match, rewriter, missed)
        attended = attended or fuse_masked_selection(match, rewriter, missed)
        if attended is None:
            return None
        return self._ranked(self._fused_block(name, match, attended.fused), attended.indexer)

    def _ranked(self, block: Block, indexer: ir.Node | None) -> Block:
        """The block of an attention. If an indexer ranks the keys, the assumption on ranks is added
        to the block and a note to the report."""
        if indexer is None:
            return block
        self.notes.append(
            f"{indexer.name}: LightningIndexer ranks the keys that {block.node} attends"
        )
        return replace(block, assumed=(*block.assumed, CLOSE_RANKS))

    def _fuse_pair(
        self, anchor: SoftmaxAnchor, rewriter: Rewriter, has_top_k: bool, first_reason: Decline
    ) -> list[Block]:
        """Fuse an attention together with its gradient, after the attention alone was declined for
        `first_reason`.

        Returns both blocks; one declined block where the attempt gives a better reason than
        `first_reason`; else an empty list.
        """
        name = label(anchor.node)
        if anchor.late is not None:
            return []  # a gradient is found by the probabilities, which no value holds here
        if self.facts.options.is_standard:  # ONNX and ONNX Runtime have no operator for a gradient
            if first_reason.code != Code.TRAINING:
                return []
            return [self._declined_block(name, _no_gradient(first_reason))]
        if anchor.log_base != 1.0:
            return []  # the gradients of powers have a factor that backward/ does not know
        pair = rewriter.attempt(lambda: fuse_pair(anchor, self.matcher, rewriter, has_top_k))
        if pair is None:
            return []
        if isinstance(pair, PairDecline):
            reason = f"its gradient could not be fused, and would compute the softmax again: {pair.reason}"
            forward = self._declined_block(
                name, Decline(pair.code, reason, pair.culprit, pair.hint)
            )
            backward = self._declined_block(label(pair.gradient), pair)
            return [replace(forward, pair=1), replace(backward, kind="backward", pair=-1)]
        if isinstance(pair, Decline):
            nearer = (
                first_reason.code == Code.TRAINING
                or pair.code == Code.OVERFLOW
                or is_op(pair.culprit, "Dropout")
            )
            return [self._declined_block(name, pair)] if nearer else []
        forward = self._ranked(
            self._fused_block(name, pair.match.forward, pair.fused), pair.indexer
        )
        for loss in pair.losses:
            self.notes.append(
                f"{loss.name}: {loss.op_type} is the loss of an indexer, with its gradients"
            )
        backward = replace(
            forward,
            kind="backward",
            missed=(),
            anchor=label(pair.match.backward.node),
            op=pair.node.op_type,
            node=pair.node.name,
            extensions=extensions_used(node_view(pair.node, self.facts.info)),
            assumed=(*forward.assumed, *pair.match.backward.assumed),
        )
        return [replace(forward, pair=1), replace(backward, pair=-1)]

    def _convert(self, node: ir.Node, rewriter: Rewriter) -> Block:
        """Replace an attention operator by FlashAttentionScore and return its block."""
        name = label(node)

        def build() -> tuple[ConvertedOp, Fused]:
            converted = convert(OpConverter.of(node, self.facts, rewriter.builder))
            return converted, rewriter.emit(converted.match)

        made = limited_attempt(node, lambda: rewriter.attempt(build))
        if isinstance(made, Decline):
            return self._declined_block(name, made)
        converted, fused = made
        for old, new in converted.outputs:
            named = old.is_graph_output()
            replace_value(old, rewriter.builder.for_output(old, new), rename=named)
        return self._fused_block(name, converted.match, fused)

    def _replace(
        self, node: ir.Node, rewriter: Rewriter, kind: Kind, replacing: Replacing
    ) -> Block:
        """Replace a ready-made operator by one node and return its block."""
        name = label(node)
        build = partial(replacing, node, self.facts, rewriter.builder)
        made = limited_attempt(node, lambda: rewriter.attempt(build))
        if isinstance(made, Decline):
            return replace(self._declined_block(name, made), kind=kind)
        for old, new in made.outputs:
            if is_read(old):
                can_be_named = new.producer() is made.node and not new.is_graph_output()
                replace_value(old, new if can_be_named else rewriter.builder.for_output(old, new))
        rewriter.adopt(node, made.node)
        return Block(
            id=0,
            kind=kind,
            anchor=name,
            status="fused",
            op=made.node.op_type,
            node=made.node.name,
            layout=made.layout,
            mask=made.mask,
            rule=made.rule,
            heads=made.heads,
            assumed=made.assumed,
        )

    def _declined_block(self, name: str, decline: Decline) -> Block:
        if decline.culprit is not None and decline.culprit.name in self.prepared:
            decline = Decline(decline.code, decline.reason, None, decline.hint or "")
        block, cause = _block_of(name, decline), replaceable_cause(decline, self.facts.info)
        if cause is None:
            return (
                replace(block, hint=None)
                if is_followed(block.hint, self.facts.options.target)
                else block
            )
        hint = f"make {cause.name!r} a constant: it is an initializer and an input, too, so a caller may replace it"
        return replace(block, hint=hint)

    def _fused_block(
        self, name: str, match: AttentionMatch, fused: Fused, missed: Sequence[Missed] = ()
    ) -> Block:
        self.notes.extend(note for note in match.notes if note not in self.notes)
        return Block(
            id=0,
            kind="forward",
            anchor=name,
            status="fused",
            op=fused.node.op_type,
            node=fused.node.name,
            layout=fused.layout,
            mask=fused.mask_label,
            heads=fused.heads,
            scores=fused.scores,
            extensions=self._extensions(fused.node),
            assumed=fused.assumed,
            missed=(*missed, *fused.missed),
        )

    def _extensions(self, node: ir.Node) -> tuple[str, ...]:
        return extensions_used(node_view(node, self.facts.info)) if node.domain == DOMAIN else ()


def _without_repeated(fused: Fused, missed: Sequence[Missed]) -> Fused:
    """What is fused, without the line on a dense mask where another one says why the mask's list of
    keys is not read, and where that line has no advice."""
    if not any(line.code == MissedCode.NOT_SELECTED for line in missed):
        return fused
    kept = tuple(line for line in fused.missed if line.code != MissedCode.DENSE_MASK or line.hint)
    return replace(fused, missed=kept)


def _numbered(blocks: list[Block]) -> Iterator[Block]:
    """The blocks with their ids. `pair` was the distance to the other block and becomes its id."""
    for index, block in enumerate(blocks):
        yield replace(block, id=index, pair=None if block.pair is None else index + block.pair)


def _block_of(anchor: str, decline: Decline) -> Block:
    kind, status = OUTCOMES.get(decline.code, ("forward", "declined"))
    return Block(
        id=0,
        kind=kind,
        anchor=anchor,
        status=status,
        code=decline.code,
        reason=decline.reason,
        culprit=label(decline.culprit) or anchor,
        hint=decline.hint,
    )


def _no_gradient(first_reason: Decline) -> Decline:
    """The decline of an attention in whose probabilities a gradient seems to read, by a target that
    has no operator for it."""
    reason = (
        f"{first_reason.reason}, as a gradient does, and the target has no operator for the gradient "
        "of an attention"
    )
    takes = other_target(
        "ort", "takes an attention together with its gradient, and so does --target ascend"
    )
    return Decline(
        first_reason.code, reason, first_reason.culprit, f"{takes}; {Code.TRAINING.advice}"
    )


def _in_function(call: ir.Node, softmax: str) -> Block:
    reason = f"the function {call.domain}::{call.op_type} takes a graph, or the model's opset changes an operator in it"
    return _block_of(f"{label(call)}/{softmax}", Decline(Code.FUNCTION, reason, call))
