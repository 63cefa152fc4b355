"""Builds the fused node that replaces an AttentionMatch.

The node is an IncreFlashAttention where decode.py allows it, a PromptFlashAttention for products
without a FlashAttentionScore (prompt.py), an operator of ONNX or ONNX Runtime for the targets
"onnx" and "contrib" (standard.py), and a FlashAttentionScore otherwise. The layout is chosen last,
by cost alone (layout_plan.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import get, verify
from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.answer.budget import building
from fa_compiler.passes.answer.decline import Decline, attempt, first_possible, reworded
from fa_compiler.passes.answer.options import DECODE, HALF_ATTENTION, Options
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.emit.build import PREFIX, Builder, LayoutEmitter
from fa_compiler.passes.emit.trial import Trial
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    certain,
    dead_nodes,
    name_of,
    producer,
    without_none,
)
from fa_compiler.passes.ir.surgery import (
    dead_readers,
    depends,
    replace_value,
    restore_order,
    superfluous,
    sweep,
)
from fa_compiler.passes.layout.plan import COPY_COST, LAYOUTS, PACKED, arrangement
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.missed import words_for_a_mask
from fa_compiler.passes.masks.narrow import narrowed
from fa_compiler.passes.masks.score_ops import tensors_of
from fa_compiler.passes.matching.dropout import drop_bits
from fa_compiler.passes.matching.factors import multiplied, scaled
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite import prompt
from fa_compiler.passes.rewrite.cure import cure
from fa_compiler.passes.rewrite.decode import IncreFlashMatcher
from fa_compiler.passes.rewrite.incre_call import IncreCall
from fa_compiler.passes.rewrite.layout_plan import (
    Destination,
    LayoutPlan,
    OutputCandidate,
    layout_plan,
    output_candidates,
)
from fa_compiler.passes.rewrite.mask_builder import MaskBuilder
from fa_compiler.passes.rewrite.missed import missed_by_operands
from fa_compiler.passes.rewrite.node_view import node_view, registry_node
from fa_compiler.passes.rewrite.origin import note_replaced, path_of
from fa_compiler.passes.rewrite.paging import Pages, find_pages
from fa_compiler.passes.rewrite.quantization import match_quantize
from fa_compiler.passes.rewrite.standard import StandardAttention, standard_attentions
from fa_compiler.passes.rewrite.standard_node import StandardBuilder
from fa_compiler.passes.values.facts import Facts

T = TypeVar("T")
OP = "FlashAttentionScore"
"""The operator that an attention becomes, unless decode.py or prompt.py choose another one."""


@dataclass(frozen=True)
class Fused:
    """What the report says of a fused attention."""

    node: ir.Node
    layout: str
    heads: tuple[int, int]
    scores: tuple[int, int]
    """The rows and keys of the scores of one head, 0 where a size is open."""
    mask: MaskPlan
    assumed: tuple[str, ...]
    missed: tuple[Missed, ...]
    mask_label: str
    """The report's word for the inputs that mask or bias the scores, such as
    "atten_mask+real_shift"."""


class Companion(Protocol):
    """Nodes that are emitted together with an attention because they read its results."""

    @property
    def views(self) -> tuple[View, ...]:
        """The views of the companion's own operands."""

    def adapted(self, match: AttentionMatch) -> AttentionMatch:
        """The match with roles that serve both the attention and the companion."""


class DenseCompanion(Companion, Protocol):
    """A companion of a FlashAttentionScore: its gradient (backward/dense_gradient.py)."""

    def cost(self, match: AttentionMatch, plan: LayoutPlan) -> int | None:
        """The companion's cost in one layout; None when it is impossible there."""

    def build(
        self,
        node: ir.Node,
        match: AttentionMatch,
        plan: LayoutPlan,
        inputs: Mapping[str, ir.Value | None],
        emitter: LayoutEmitter,
    ) -> Callable[[], None]:
        """Add the companion's nodes and return a function that puts their results in place. Raises
        Decline."""


@dataclass(frozen=True)
class _Form:
    """What an attention is to become. Where nothing is set, it is the best operator that the target
    has."""

    companion: DenseCompanion | None = None
    """What is to be emitted beside it."""
    pages: Pages | None = None
    """The pages of a cache, which the operator must read in place."""
    standard: StandardAttention | None = None
    """The operator of ONNX or ONNX Runtime."""


@dataclass(frozen=True)
class _Made:
    """The operator of an attention, in the graph, but with nothing that reads it."""

    node: ir.Node
    plan: LayoutPlan
    inputs: Mapping[str, ir.Value | None]
    """By their names in the FlashAttentionScore."""
    out: ir.Value
    mask_label: str
    vouched: tuple[str, ...] = ()
    presents: tuple[tuple[ir.Value, ir.Value], ...] = ()
    """The result of each Concat of a past that the operator gives, too, and its own output."""


@dataclass(frozen=True)
class Rewriter:
    """Builds fused nodes in one graph."""

    builder: Builder
    facts: Facts
    replaced: list[ir.Node] = field(default_factory=list)
    made: list[ir.Node] = field(default_factory=list)
    _starts: dict[ir.Node, tuple[int, int, int]] = field(default_factory=dict)
    """For each softmax the numbers of replaced and fused nodes, and the builder's place, before its
    attention."""

    @property
    def options(self) -> Options:
        """What the user asked for."""
        return self.facts.options

    def attempt(self, build: Callable[[], T]) -> T | Decline:
        """What is built, or the Decline that this raises. The graph is changed only by what is
        neither that nor None."""
        with Trial(self.builder, (self.made, self.replaced)) as trial:
            result = attempt(build)
            if result is not None and not isinstance(result, Decline):
                trial.keep()
        return result

    def built(self, build: Callable[[], T]) -> T:
        """What is built; None or a Decline that is raised leave the graph as it was."""
        result = self.attempt(build)
        if isinstance(result, Decline):
            raise result
        return result

    def if_possible(self, build: Callable[[], T]) -> T | None:
        """What is built; None, with the graph as it was, where this raises a Decline."""
        result = self.attempt(build)
        return None if isinstance(result, Decline) else result

    def first_possible(self, builds: Sequence[Callable[[], T]]) -> T:
        """What is built by the first that can be. Raises the Decline of the first one where none
        can."""
        return first_possible(partial(self.built, build) for build in builds)

    @building()
    def emit(self, match: AttentionMatch, companion: DenseCompanion | None = None) -> Fused:
        """Add the fused node, and the companion if there is one, and replace the matched results by
        theirs.

        A Decline is raised before any use of a value is changed.
        """
        self.begin(match)
        if match.mask.fallback is None:
            return self._emit(match, companion)
        fused = self.attempt(lambda: self._emit(match, companion))
        if not isinstance(fused, Decline):
            return fused
        code = MissedCode.DENSE_MASK
        if match.mask.packed is not None:
            code = MissedCode.NOT_PACKED
        mask = replace(match.mask.fallback, missed=(fused.as_missed(code, match.node),))
        return self._emit(replace(match, mask=mask), companion)

    def _emit(self, match: AttentionMatch, companion: DenseCompanion | None) -> Fused:
        match, candidates = output_candidates(match, self.facts)
        if self.options.is_standard:
            return self._emit_standard(match, candidates)
        missed: list[Missed] = []
        if companion is not None:
            match = companion.adapted(match)
        elif not self.options.parser_plugins:
            paged = self.attempt(lambda: self._emit_paged(match, candidates, missed))
            if isinstance(paged, Decline):
                missed.append(paged.as_missed(MissedCode.GATHERED_PAGES, match.node))
            elif paged is not None:
                return paged
        return self._emit_with_fallback(match, candidates, _Form(companion), missed)

    def _emit_paged(
        self, match: AttentionMatch, candidates: Sequence[OutputCandidate], missed: Sequence[Missed]
    ) -> Fused | None:
        """Emit with the pages of its caches; None where it has none. Raises Decline where they
        cannot be read in place."""
        with_pages = find_pages(match, self.facts)
        if with_pages is None:
            return None
        paged, pages = with_pages
        return self._emit_with_candidates(
            paged, paged.space.settle(candidates), _Form(pages=pages), missed
        )

    def _emit_standard(self, match: AttentionMatch, candidates: Sequence[OutputCandidate]) -> Fused:
        """Emit as the first operator of ONNX or ONNX Runtime that takes the attention. Raises
        Decline."""
        forms = standard_attentions(match, self.builder, self.options)
        emits = [
            partial(self._emit_with_fallback, form.match, candidates, _Form(standard=form), [])
            for form in forms
        ]
        return self.first_possible(emits)

    def _emit_with_fallback(
        self,
        match: AttentionMatch,
        candidates: Sequence[OutputCandidate],
        form: _Form,
        missed: Sequence[Missed],
    ) -> Fused:
        """Emit with the cheapest place that works. Raises Decline.

        A later place may need sizes that cannot be computed. The product's own output needs the
        fewest.
        """
        for some in (candidates, [candidate for candidate in candidates if not candidate.shapes]):
            fused = self.if_possible(partial(self._emit_with_candidates, match, some, form, missed))
            if fused is not None:
                return fused
        return self._emit_with_candidates(match, candidates[:1], form, missed)

    def _emit_with_candidates(
        self,
        match: AttentionMatch,
        candidates: Sequence[OutputCandidate],
        form: _Form,
        known: Sequence[Missed],
    ) -> Fused:
        """Emit with the cheapest of these places. Raises Decline, also where pages cannot be read
        in place."""
        companion = form.companion
        match, plan = self._best_order(match, candidates, form)
        views = list(match.views)
        if companion is not None:
            views += companion.views
        emitter = LayoutEmitter(
            self.builder, match.space, [stop for view in views for stop in view.equivalent_values]
        )
        operands = self._operands(match, plan, emitter)
        missed = [*known, *self._missed_by_operands(match, plan, form.standard)]
        substitutes = self.substitutes(match, plan.destination, emitter)
        made = self._operator(match, plan, form, operands, emitter, missed)
        result = self.result(match, made.out, made.plan.output, made.plan.destination, emitter)
        place_beside = None
        if companion is not None:
            place_beside = companion.build(made.node, match, made.plan, made.inputs, emitter)
        self.substitute(substitutes)
        self.replace_destination(made.plan.destination, result)
        for whole, present in made.presents:
            self._replace_concat(whole, present)
        if place_beside is not None:
            place_beside()
        self.trace(match)
        heads = self._size(match, match.roles.heads), self._size(match, match.roles.kv_heads)
        scores = (
            match.space.size(match.roles.q_seq).const or 0,
            match.space.size(match.roles.kv_seq).const or 0,
        )
        assumed = tuple(dict.fromkeys((*match.mask.assumed, *made.vouched)))
        return Fused(
            made.node,
            made.plan.name,
            heads,
            scores,
            match.mask,
            assumed,
            tuple(missed),
            made.mask_label,
        )

    def _operands(
        self, match: AttentionMatch, plan: LayoutPlan, emitter: LayoutEmitter
    ) -> dict[str, ir.Value | None]:
        """Query, key and value, with their rotated parts if these are operands of their own, in the
        plan's layout."""
        builder = self.builder
        query, key, value, *ropes = (
            emitter.apply(builder.cast(source.value, match.dtype), source.dims, source.plan)
            for source in plan.operands
        )
        query = multiplied(query, plan.query, match.query_factors, builder, emitter)
        operands: dict[str, ir.Value | None] = {"query": query, "key": key, "value": value}
        if match.rope is not None:
            operands["query_rope"], operands["key_rope"] = (
                scaled(ropes[0], match.rope.ratio, builder),
                ropes[1],
            )
        return operands

    def _missed_by_operands(
        self, match: AttentionMatch, plan: LayoutPlan, standard: StandardAttention | None
    ) -> list[Missed]:
        behind = standard is not None and bool(standard.grown)
        missed = missed_by_operands(match, plan, self.builder.info, self.options, behind)
        if standard is None:
            return list(missed)
        told_by_standard = (MissedCode.WIDE, MissedCode.REPEATED_HEADS)
        return [*(part for part in missed if part.code not in told_by_standard), *standard.missed]

    def _operator(
        self,
        match: AttentionMatch,
        plan: LayoutPlan,
        form: _Form,
        operands: Mapping[str, ir.Value | None],
        emitter: LayoutEmitter,
        missed: list[Missed],
    ) -> _Made:
        """Add the operator that computes the attention: that of the form, or the best that the
        target has. Raises Decline."""
        companion, standard = form.companion, form.standard
        if companion is None and standard is None and not self.options.parser_plugins:
            made = self._incre_flash(match, plan, operands, emitter, missed, form.pages)
            if made is not None:
                return made
        missed.extend(match.mask.missed)
        repeats = self.options.target == "ort" and companion is None
        masks = MaskBuilder(match, self.builder, emitter, self.options, missed, repeats)
        inputs = {**operands, **self._other_inputs(match, masks, emitter)}
        if standard is not None:
            return self._standard(match, plan, standard, inputs, emitter, missed)
        node = self._flash_attention(match, plan, inputs, masks.attrs, companion)
        self.check(node, match)
        vouched: tuple[str, ...] = ()
        if node.op_type == prompt.OP and match.dtype not in SIXTEEN_BITS:
            vouched = (HALF_ATTENTION,)
        return _Made(node, plan, inputs, node.outputs[-1], match.mask.mask_label, vouched)

    def _standard(
        self,
        match: AttentionMatch,
        plan: LayoutPlan,
        standard: StandardAttention,
        inputs: Mapping[str, ir.Value | None],
        emitter: LayoutEmitter,
        missed: list[Missed],
    ) -> _Made:
        """Add the operator of ONNX or ONNX Runtime, and the guard of its rows. Raises Decline."""
        made = StandardBuilder(standard, plan, inputs, emitter, self.facts, missed)
        node, vouched = made.node()
        self._add(node)
        out = made.guarded(node)
        return _Made(
            node, plan, inputs, out, match.mask.mask_label, vouched, tuple(made.presents(node))
        )

    def _flash_attention(
        self,
        match: AttentionMatch,
        plan: LayoutPlan,
        inputs: Mapping[str, ir.Value | None],
        mask_attrs: Mapping[str, str],
        companion: DenseCompanion | None,
    ) -> ir.Node:
        """The FlashAttentionScore of these inputs, or the PromptFlashAttention in its place. Raises
        Decline."""
        if match.mask.packed is not None:
            if match.rope is not None:
                raise Decline(
                    Code.SHAPE,
                    "packed sequences whose scores are a sum of two products",
                    match.node,
                )
            self._check_tokens(match, tuple(inputs[name] for name in ("query", "key", "value")))
        node = self._node(match, plan, inputs, mask_attrs, statistics=companion is not None)
        if prompt.is_wanted(self.options):
            return self._as_prompt_flash(node, match, companion)
        return node

    def _check_tokens(self, match: AttentionMatch, operands: tuple[ir.Value | None, ...]) -> None:
        """Decline packed operands that are not proven to have the same number of tokens in every
        run.

        The packed layout does not repeat an operand whose batch is 1.
        """
        counts = [self.builder.info.shape(operand) for operand in without_none(operands)]
        if None in counts or len({shape[0] for shape in without_none(counts)}) > 1:
            reason = "query, key and value are not proven to have as many tokens in every run"
            raise Decline(Code.SHAPE, reason, match.node)

    def begin(self, match: AttentionMatch) -> None:
        """Start an attention: new nodes get its path in their names, and `trace` counts from
        here."""
        ends = (match.node, match.output.producer())
        self.builder.path = path_of(without_none(ends))
        self._starts[match.node] = len(self.replaced), len(self.made), self.builder.mark

    def trace(self, match: AttentionMatch) -> None:
        """Note in the fused nodes made since `begin` which nodes they replace: those that nothing
        else needs."""
        replaced, made, others = self._starts[match.node]
        new = dict.fromkeys((*self.made[made:], *self.builder.nodes_since(others)))
        gone = [node for node in superfluous([*new, *self.replaced[replaced:]]) if node not in new]
        for node in self.made[made:]:
            note_replaced(node, gone)

    def adopt(self, old: ir.Node, made: ir.Node) -> None:
        """Count a node that was made elsewhere as fused, in the place of one that is
        superfluous."""
        note_replaced(made, [old])
        self.replaced.append(old)
        self.made.append(made)

    def finish(self) -> None:
        """Remove the nodes that fusion made superfluous, with the dead nodes that read them, and
        restore a topological order."""
        if not self.made and not self.builder.nodes:
            return
        graph = self.builder.graph
        roots = [*self.replaced, *self.made, *self.builder.nodes]
        sweep(graph, [*roots, *dead_readers(roots, dead_nodes(graph))])
        self.builder.drop_unused_constants()
        restore_order(graph)

    def _size(self, match: AttentionMatch, axes: Axes) -> int:
        return certain(match.space.size(axes).const)

    def _best_order(
        self,
        match: AttentionMatch,
        candidates: Sequence[OutputCandidate],
        form: _Form,
    ) -> tuple[AttentionMatch, LayoutPlan]:
        """The match with its heads in the better order, and the layout.

        Where heads that share a key are no neighbours, query and result are copied into an order in
        which they are, rather than key and value repeated, unless that takes one copy more. As many
        copies are no more work for a prompt, and much less for a step behind a cache.
        """
        plan = self._best_layout(match, candidates, form)
        if form.companion is not None or form.standard is not None:
            return match, plan
        turned = match.with_neighbours()
        if turned is match:
            return match, plan
        other = self._best_layout(turned, candidates, form)
        if other.cost >= plan.cost + COPY_COST:
            return match, plan
        return turned, other

    def _best_layout(
        self, match: AttentionMatch, candidates: Sequence[OutputCandidate], form: _Form
    ) -> LayoutPlan:
        """The cheapest layout. Raises Decline where the operands can be brought into none."""
        plans = (
            layout_plan(match, name, candidates, self.builder.info, of_key)
            for name, of_key in self._layouts(match, form)
        )
        costs: list[tuple[int, LayoutPlan]] = []
        for plan in plans:
            if plan is None:
                continue
            plan = replace(plan, paged=form.pages is not None)
            more = 0 if form.companion is None else form.companion.cost(match, plan)
            if more is not None:
                costs.append((plan.cost + more, plan))
        if not costs:
            raise Decline(
                Code.SHAPE, "the operands could not be arranged into any layout", match.node
            )
        return min(costs, key=lambda pair: pair[0])[1]

    def _layouts(self, match: AttentionMatch, form: _Form) -> Sequence[tuple[str, str]]:
        """The layouts that the operator of a form takes: that of query and result, and that of key
        and value."""
        if form.standard is not None:
            return form.standard.layouts
        names: Sequence[str] = tuple(LAYOUTS)
        if form.pages is not None:
            names = form.pages.layouts
        elif match.mask.packed is not None:
            names = (PACKED,)
        if form.pages is None and prompt.is_wanted(self.options):
            names = [name for name in names if name in prompt.LAYOUTS]
        return [(name, name) for name in names]

    def _node(
        self,
        match: AttentionMatch,
        plan: LayoutPlan,
        inputs: Mapping[str, ir.Value | None],
        mask_attrs: Mapping[str, str],
        statistics: bool,
    ) -> ir.Node:
        spec = get(OP, self.options.cann)
        attrs: dict[str, int | float | str] = {
            "scale_value": float(np.float32(match.scale)),
            "head_num": self._size(match, match.roles.heads),
            "input_layout": plan.name,
        }
        if inputs.get("real_shift") is not None:
            # Type 0 adds the bias after the scale. The default, type 1, scales the bias, too.
            if all(attr.name != "pse_type" for attr in spec.attrs):
                raise Decline(
                    Code.ILLEGAL,
                    f"the prototype of CANN {self.options.cann} has no pse_type",
                    match.node,
                )
            attrs["pse_type"] = 0
        if match.mask.mode is not None:
            attrs.update(match.mask.mode.attrs)
        if match.dropout is not None:
            attrs["keep_prob"] = match.dropout.keep
        if match.softcap != 0.0:
            attrs["cpu_softcap"] = float(np.float32(match.softcap))
        attrs.update({**self._row_attrs(match), **mask_attrs})
        node = registry_node(spec, inputs, attrs, self.builder)
        for declared, output in zip(spec.outputs, node.outputs, strict=True):
            output.name = self._output_name(name_of(node), declared.name, statistics)
            output.dtype = ir.DataType.FLOAT
        node.outputs[2].dtype = node.outputs[3].dtype = match.dtype
        self._declare_shapes(match, plan, node)
        self._add(node)
        return node

    def _as_prompt_flash(
        self, node: ir.Node, match: AttentionMatch, companion: DenseCompanion | None
    ) -> ir.Node:
        """The PromptFlashAttention that replaces a FlashAttentionScore which the product does not
        have."""
        if companion is not None:
            reason = f"{self.options.soc_version} has no operator for a gradient"
            hint = "A2, A3 and 950 have one: give one of their SoC versions with --soc-version"
            raise Decline(Code.ILLEGAL, reason, match.node, hint)

        def build() -> ir.Node:
            call = prompt.as_prompt(node, self.builder.info)
            words: tuple[str, ...] = ()
            if match.derivation is not None and (masking := match.derivation.masking) is not None:
                words = words_for_a_mask(masking.planner, masking.terms, masking.guard)
            return prompt.build(
                call, match.node, node.outputs[-1], self.builder, self.options, words
            )

        made = reworded(
            build, lambda decline: Decline(decline.code, decline.reason, match.node, decline.hint)
        )
        self.made.append(made)
        return made

    def _other_inputs(
        self, match: AttentionMatch, masks: MaskBuilder, emitter: LayoutEmitter
    ) -> dict[str, ir.Value | None]:
        """The inputs of a FlashAttentionScore beside query, key and value."""
        inputs: dict[str, ir.Value | None] = {
            "real_shift": masks.real_shift(),
            "atten_mask": masks.atten_mask(),
        }
        inputs["prefix"] = masks.prefix()
        if match.mask.packed is not None:
            inputs["actual_seq_qlen"] = inputs["actual_seq_kvlen"] = masks.sequence_ends()
        inputs["sink"] = self._sink(match, emitter)
        if match.dropout is not None:
            roles = match.roles
            groups = roles.batch, roles.heads, roles.q_seq, roles.kv_seq
            inputs["drop_mask"] = drop_bits(match.dropout, groups, self.builder, emitter)
        return inputs

    def _incre_flash(
        self,
        match: AttentionMatch,
        plan: LayoutPlan,
        operands: Mapping[str, ir.Value | None],
        emitter: LayoutEmitter,
        missed: list[Missed],
        pages: Pages | None,
    ) -> _Made | None:
        """Add the IncreFlashAttention that runs the attention; None where the target cannot run it
        as one.

        With `pages` a Decline is raised instead.
        """
        roles = match.roles
        key, value = (
            arrangement(plan.name, roles.batch, roles.kv_heads, roles.kv_seq, depth)
            for depth in (roles.head_dim, roles.value_head_dim)
        )

        own_missed: list[Missed] = []

        def masks(mask: MaskPlan) -> MaskBuilder:
            return MaskBuilder(
                replace(match, mask=mask), self.builder, emitter, self.options, own_missed
            )

        def build() -> tuple[IncreCall, LayoutPlan, ir.Node]:
            matcher = IncreFlashMatcher(
                match,
                plan.name,
                (key, value),
                operands,
                self.builder,
                emitter,
                self.options,
                masks,
                pages,
            )
            call, plan_with_output = self._with_quantized_output(
                matcher.incre_call(), match, plan, own_missed
            )
            node = call.node(match, plan_with_output.output, self.builder, self.options)
            self.check(node, match)
            return call, plan_with_output, node

        built = self.attempt(build)
        if isinstance(built, Decline):
            if pages is not None:
                raise built
            single = match.space.size(roles.q_seq).const == 1 or DECODE in self.options.assume
            if self.options.target == "ascend" and single:
                missed.append(built.as_missed(MissedCode.NOT_INCRE, match.node))
            return None
        call, plan_with_output, node = built
        missed.extend(own_missed)
        self._add(node)
        out = call.result(node.outputs[-1], self.builder)
        return _Made(node, plan_with_output, operands, out, call.mask_label, call.assumed)

    def _add(self, node: ir.Node) -> None:
        """Add a fused operator to the graph."""
        self.builder.graph.append(node)
        self.made.append(node)

    def _with_quantized_output(
        self, call: IncreCall, match: AttentionMatch, plan: LayoutPlan, missed: list[Missed]
    ) -> tuple[IncreCall, LayoutPlan]:
        """The call with the QuantizeLinear after the attention fused, and the plan with its output
        as the destination.

        Both are unchanged where no QuantizeLinear can be fused.
        """
        quantised = attempt(
            lambda: match_quantize(plan.destination.value, self.options, self.builder.info)
        )
        if isinstance(quantised, Decline):
            missed.append(quantised.as_missed(MissedCode.QUANTIZED_OUTPUT, match.node))
            return call, plan
        if quantised is None or match.output_factors or call.undefined is not None:
            return call, plan
        scale = self.builder.constant(np.array([quantised.scale], dtype=np.float32), "quant_scale")
        destination = replace(plan.destination, value=quantised.node.outputs[0])
        return replace(call, inputs={**call.inputs, "quant_scale2": scale}), replace(
            plan, destination=destination
        )

    def _sink(self, match: AttentionMatch, emitter: LayoutEmitter) -> ir.Value | None:
        """The sink as one float32 number for each head; None where there is no sink."""
        sink, heads = match.sink, match.roles.heads
        if sink is None:
            return None
        if all(declared.name != "sink" for declared in get(OP, self.options.cann).inputs):
            raise Decline(
                Code.ILLEGAL, f"the prototype of CANN {self.options.cann} has no sink", match.node
            )
        if sink.view is None:
            numbers = np.full(self._size(match, heads), sink.number, dtype=np.float32)
            return self.builder.constant(numbers, "sink")
        value, dims = sink.view.base, sink.view.base_dims
        varying = sink.varies_along(self.builder.info)
        for axis, dim in enumerate(dims):
            if dim != varying[axis]:
                value, dims = (
                    narrowed(value, axis, self.builder),
                    (*dims[:axis], (), *dims[axis + 1 :]),
                )
        value = self.builder.cast(value, ir.DataType.FLOAT)
        return emitter.arranged(
            value, dims, (heads,), "the sink is not one number for each head", match.node
        )

    def check(self, node: ir.Node, match: AttentionMatch) -> None:
        """Decline a node that the registry forbids for the target. For ONNX Runtime its extensions
        are allowed."""
        target = self.options.platform
        view = node_view(node, self.builder.info)
        for violation in verify(view, target, self.options.cann):
            if target != "ort" or violation.extension is None:
                hint = cure(view, target, self.options.cann, violation)
                raise Decline(Code.ILLEGAL, f"{target}: {violation}", match.node, hint)

    def _output_name(self, node: str, output: str, statistics: bool) -> str:
        """The name of an output; empty where it is not used and the target need not compute it.

        With `statistics` a gradient uses softmax_max and softmax_sum.
        """
        used = output == "attention_out" or (
            statistics and output in ("softmax_max", "softmax_sum")
        )
        if used or self.options.target == "ascend":
            return self.builder.names.new(f"{node}_{output}")
        return ""

    def _row_attrs(self, match: AttentionMatch) -> dict[str, int | float | str]:
        """The attributes that say what masked keys weigh, and what rows without a key give."""
        mask = match.mask
        if self.options.target == "ascend":
            # inner_precise 2 asks the device to give 0 for a fully masked row.
            return {"inner_precise": 2} if mask.empty_rows == "zero" else {}
        score = -math.inf if mask.masked_score is None else mask.masked_score
        rows: tuple[tuple[str, float | str, bool], ...] = (
            ("cpu_empty_rows", mask.empty_rows, mask.empty_rows != ""),
            ("cpu_nan_rows", mask.nan_rows, mask.nan_rows != ""),
            ("cpu_mask_value", score, math.isfinite(score)),
            ("cpu_masked_bias", "added", mask.adds_bias_to_masked and bool(mask.bias)),
            ("cpu_masked_values", "zero", mask.drops_masked_values),
        )
        return {name: value for name, value, told in rows if told}

    def _declare_shapes(self, match: AttentionMatch, plan: LayoutPlan, node: ir.Node) -> None:
        """Declare the shapes of all outputs, for tools that do not have the operator's schema to
        infer them."""
        roles, space = match.roles, match.space
        groups = [roles.batch, roles.heads, roles.q_seq]
        if plan.name == PACKED:
            groups = [roles.batch + roles.q_seq, roles.heads]
        stats = [*(space.size(axes) for axes in groups), Dim(8)]
        shapes = (stats, stats, [Dim(0)] * 4, [space.size(dim) for dim in plan.output])
        for output, shape in zip(node.outputs, shapes, strict=True):
            if output.name:
                self.builder.info.set(output, shape, output.dtype)
                output.shape = ir.Shape(consts(shape))

    def substitutes(
        self, match: AttentionMatch, destination: Destination, emitter: LayoutEmitter
    ) -> list[tuple[ir.Node, ir.Value]]:
        """The nodes that read only the shape of an inner value or of one before the destination,
        each with its result computed without that value."""
        views = [part.view for part in match.mask.masked]
        views += [operand.view for operand in tensors_of(match.mask.bias)]
        terms = [view.base for view in views]
        shapes = []
        for reader, dims in (*match.shapes, *destination.shapes):
            read = reader.inputs[0]
            maker = certain(producer(read))
            # A mask that was expanded to the scores' shape is computed from that shape, so it
            # cannot tell the shape.
            parts = [term for term in terms if not depends(term, maker)]
            shapes.append((reader, emitter.shape_vector(dims, reader, parts)))
        return shapes

    def substitute(self, substitutes: list[tuple[ir.Node, ir.Value]]) -> None:
        """Replace the result of each node by the value beside it."""
        for reader, value in substitutes:
            self.builder.replace(reader.outputs[0], value)
            self.replaced.append(reader)

    def result(
        self,
        match: AttentionMatch,
        value: ir.Value,
        dims: Arrangement,
        destination: Destination,
        emitter: LayoutEmitter,
    ) -> ir.Value:
        """The operator's result, arranged as `dims`, brought to the arrangement and type of the
        destination."""
        value = multiplied(value, dims, match.output_factors, self.builder, emitter)
        value = emitter.apply(value, dims, destination.plan)
        wanted = self.builder.info.dtype(destination.value)
        if wanted is None:
            return value
        return self.builder.cast(value, wanted)

    def _replace_concat(self, whole: ir.Value, present: ir.Value) -> None:
        """Let the operator give what a Concat gives. Another attention that was matched before may
        still read it."""
        maker = certain(whole.producer())
        replace_value(whole, present)
        whole.name = self.builder.names.new(f"{PREFIX}_{present.name}")
        self.replaced.append(maker)

    def replace_destination(self, destination: Destination, result: ir.Value) -> None:
        """Replace the destination's value by a result."""
        maker = certain(destination.value.producer())
        self.replaced.append(maker)
        replace_value(destination.value, result)
