"""Guards after the softmax: what puts zeros into probabilities, and what that means for the mask.

Safe softmaxes end with one of these; `p` is `scores.softmax(-1)`:

    p = torch.where(p.isnan(), 0, p)
    p = torch.where((scores == -inf).all(-1, keepdim=True), 0, p)
    p = torch.where(bias.amax(-1, keepdim=True) == -inf, 0, p)
    p = torch.where(mask, p, 0)

Grammar of a guarded value, p the probabilities, read by nothing else; the code cites the numbers of
the cases:

    guarded :=
      1     Where(IsNaN(p), 0, p)                          the NaN guard; either p may be Cast(p),
                                                           to any float type, which ONNX Runtime
                                                           writes into float16 models: a cast keeps
                                                           NaN and makes none
      2   | Where(keep, p, 0) | Where(drop, 0, p)          the score guard: tests whether a row has
                                                           a score other than -inf; torch's
                                                           decomposition of a safe softmax writes it
      3   | Where(ReduceMax(t, last axis, keepdims=1) == -inf, 0, p)      the bias guard: t the one
                                                           bias on the scores
      4   | Where(c, p, 0) | Where(c, 0, p)                the selection guard: c keeps a
                                                           probability exactly where the one mask
                                                           leaves a score
    keep :=
      5     any(Not(test))                                 any(x) := ReduceMax(x, last axis,
                                                           keepdims=1)
      6   | Not(drop)
      7   | Cast(keep)                                     from booleans to numbers, or back
    drop :=
      8     all(test)                                      all(x) := ReduceMin(x, last axis,
                                                           keepdims=1)
          | Not(keep) | Cast(drop)                         as 6 and 7
    test :=
      9     Equal(scores, -inf)                            scores the very input of the softmax, or
                                                           what it was before its own maximum was
                                                           subtracted

Casts (7) and negations (6) may also lie between the reduction and the test. They come in any number
and at any place, so a loop reads them; a pattern could not.

A guard turns rows without a defined softmax into zeros: the NaN guard all of them, the bias guard
those in which the bias is -inf throughout, the score guard those in which the scores are. The
selection guard zeroes rows that are masked everywhere; in other rows a masked probability is 0
already. So does a factor on the probabilities that is 0 and 1 like the one mask (`product_guard`).
The one mask is a selection or addend, the only selection among the terms, or the only term of both
kinds; the guard's condition is the mask's own, or one that positions.py reads as the same formula,
of the same shape and along the same axes.

Refused: a guard that tests something else, or along other axes. A new kind of guard is one class
here, and a row of `GUARDS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.formula import negation
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    axes_of,
    data_readers,
    first,
    holds_output,
    instances,
    int_attr,
    is_op,
    nodes_of_type,
    operand_at,
    operands,
    output_of,
    outputs_of,
    sole,
)
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.masks.row_guard import RowGuard
from fa_compiler.passes.masks.score_ops import Add, MaskTerm, Select, Term
from fa_compiler.passes.masks.structure import kept
from fa_compiler.passes.matching.factors import Factor
from fa_compiler.passes.ops.elementwise import bare
from fa_compiler.passes.ops.reduce import keeps_last_axis
from fa_compiler.passes.values.patterns import Bind, Match, Number, OneOf, Op, match
from fa_compiler.passes.values.shapes import ShapeInfo

MAX_STEPS = 12

P, OTHER, SCORES = Bind("probabilities"), Bind("other"), Bind("scores")
TESTED = OneOf((P, Op("Cast", P, name="tested")))
KEPT = OneOf((P, Op("Cast", P, name="kept")))
NAN_TEST = Op("Where", Op("IsNaN", TESTED, name="flag"), OTHER, KEPT)  # 1
BIAS_MAXIMUM = Op("ReduceMax", Bind("bias"), open_end=True, name="maximum")
BIAS_TEST = Op("Where", Op("Equal", BIAS_MAXIMUM, Number(-math.inf)), OTHER, P)  # 3
# 2 and 4
CHOICE = OneOf(
    tuple(Op("Where", Bind("condition"), *branches) for branches in ((P, OTHER), (OTHER, P)))
)
LESS_MAXIMUM = Op("Sub", SCORES, Bind("maximum"))
EXPONENTIALS = OneOf((Op("Softmax", SCORES), Op(("Softmax", "Exp"), LESS_MAXIMUM)))
SOFTMAX_OF_SCORES = OneOf((EXPONENTIALS, Op("Div", EXPONENTIALS, Bind("total"))))  # 9


@dataclass(frozen=True)
class GuardQuery:
    """The question whether probabilities are guarded: the output of the softmax, the probabilities
    at the place that was reached, and their readers. With `among` only these nodes count as
    readers."""

    softmax: ir.Value
    value: ir.Value
    readers: Sequence[ir.Node]
    viewer: Viewer
    among: Collection[ir.Node] | None

    def chosen(self) -> tuple[ir.Node, ir.Value, bool] | None:
        """The Where that alone reads the probabilities and puts 0 into them, its condition, and
        whether it keeps them where that is true."""
        where = sole(self.readers)
        choice = match(CHOICE, output_of(where), self.viewer.info, {P.name: self.value})
        if where is None or choice is None or not self.is_zero(choice["other"]):
            return None
        return where, choice["condition"], where.inputs[1] is self.value

    def is_zero(self, value: ir.Value) -> bool:
        """Is a tensor 0 throughout, and no larger than the probabilities?"""
        return self.viewer.uniform_value(value, self.value) == 0.0

    def nan_test(self) -> Match | None:
        """The NaN guard that a reader of the probabilities, or of what a reader casts them to,
        applies."""
        casts = list(nodes_of_type(self.readers, "Cast"))
        readers = [
            *self.readers,
            *(reader for node in casts for reader in data_readers(node.outputs[0])),
        ]
        where = next(nodes_of_type(readers, "Where"), None)
        return match(NAN_TEST, output_of(where), self.viewer.info, {P.name: self.value})

    def is_closed(self, nodes: Sequence[ir.Node]) -> bool:
        """Do only these nodes read the probabilities, and what these nodes make, but for the result
        of the last?"""
        inner = outputs_of(nodes[:-1])
        readers = [
            node
            for value in inner
            for node in data_readers(value)
            if self.among is None or node in self.among
        ]
        return {*self.readers, *readers} <= set(nodes) and not holds_output(inner)


@dataclass(frozen=True)
class MaskedScores:
    """What a guard is compared with: the terms of the scores, the axes of the keys, and the
    arrangement of every value between the two products."""

    terms: tuple[Term, ...]
    kv_seq: Axes
    viewer: Viewer
    seen: Mapping[ir.Value, Arrangement]


@dataclass(frozen=True)
class Guard:
    """A guard and the node that applies it. `tests` are nodes that compute its condition, and go
    with it."""

    where: ir.Node
    tests: tuple[ir.Node, ...] = ()

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        """The nodes that the probabilities go through, the last of them the one that applies the
        guard."""
        return (self.where,)

    def meaning(self, masked: MaskedScores) -> RowGuard:
        """What the guard means for the mask. Raises Decline."""
        raise NotImplementedError


@dataclass(frozen=True)
class NanGuard(Guard):
    """Case 1: a guard against NaN."""

    passed: tuple[ir.Node, ...] = ()

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return self.passed

    @staticmethod
    def read(asked: GuardQuery) -> Guard | None:
        """The guard, when exactly its own nodes read the probabilities."""
        guard = asked.nan_test()
        if guard is None or not asked.is_closed(guard.nodes) or not asked.is_zero(guard["other"]):
            return None
        casts = list(nodes_of_type(guard.nodes, "Cast"))
        types = [asked.viewer.info.dtype(cast.outputs[0]) for cast in casts]
        if not all(kind is not None and kind.is_floating_point() for kind in types):
            return None
        tested, kept = guard.get("tested"), guard.get("kept")
        tests = tuple(cast for cast in casts if cast.outputs[0] is tested is not kept)
        passed = tuple(node for node in guard.nodes if node not in tests)
        return NanGuard(guard.nodes[-1], tests, passed)

    def meaning(self, masked: MaskedScores) -> RowGuard:
        return RowGuard.NAN


@dataclass(frozen=True)
class ScoreGuard(Guard):
    """Case 2: exact, for the guard makes a row 0 exactly where all scores of the row are -inf."""

    @staticmethod
    def read(asked: GuardQuery) -> Guard | None:
        """The guard, with the nodes that test the scores."""
        if (chosen := asked.chosen()) is None:
            return None
        where, condition, keep = chosen
        tests = score_tests(condition, keep, asked.softmax, asked.viewer.info)
        return ScoreGuard(where, tests) if tests else None

    def meaning(self, masked: MaskedScores) -> RowGuard:
        dims, resolve = masked.seen.get(operand_at(self.tests[0], 0)), masked.viewer.space.resolve
        if not dims or resolve(dims[-1]) != resolve(masked.kv_seq):
            reason = "the guard tests the scores along another axis than the keys'"
            raise Decline(Code.PROBABILITY_TERM, reason, self.where)
        return RowGuard.SCORES


@dataclass(frozen=True)
class BiasGuard(Guard):
    """Case 3: `bias` is the tensor that is tested."""

    bias: ir.Value = ABSENT

    @staticmethod
    def read(asked: GuardQuery) -> Guard | None:
        """The guard, with what it tests."""
        if (chosen := asked.chosen()) is None:
            return None
        where = chosen[0]
        test = match(BIAS_TEST, where.outputs[0], asked.viewer.info, {P.name: asked.value})
        reduce = None if test is None else test["maximum"].producer()
        if (
            test is None
            or reduce is None
            or int_attr(reduce, "keepdims", 1) != 1
            or axes_of(reduce) != [-1]
        ):
            return None
        return BiasGuard(where, bias=test["bias"])

    def meaning(self, masked: MaskedScores) -> RowGuard:
        """The guard has to test the one bias there is, along the same axes."""
        term = sole(masked.terms)
        if isinstance(term, Add) and term.operand.value is self.bias and term.sign > 0:
            space = masked.viewer.space
            own, guarded = (
                space.resolve_all(term.operand.dims),
                space.resolve_all(masked.seen[self.where.outputs[0]]),
            )
            if own and _tests_rows(own, guarded, space.resolve(masked.kv_seq)):
                return RowGuard.BIAS
        reason = "the guard tests something other than the bias of the scores"
        raise Decline(Code.PROBABILITY_TERM, reason, self.where)


@dataclass(frozen=True)
class SelectionGuard(Guard):
    """Case 4: probabilities are kept where `condition` equals `keep`."""

    condition: ir.Value = ABSENT
    keep: bool = False

    @staticmethod
    def read(asked: GuardQuery) -> Guard | None:
        """Any Where that puts 0 into the probabilities; `meaning` then compares its condition with
        the mask."""
        if (chosen := asked.chosen()) is None:
            return None
        where, condition, keep = chosen
        return SelectionGuard(where, condition=condition, keep=keep)

    def meaning(self, masked: MaskedScores) -> RowGuard:
        """Zeros where the one mask masks."""
        mask, viewer = only_mask(masked.terms), masked.viewer
        if mask is not None:
            dims = viewer.alignment(self.condition, masked.seen[self.where.outputs[0]], self.where)
            if keeps_like(self.condition, self.keep, dims, mask, viewer):
                return RowGuard.SELECTION
        raise Decline(
            Code.PROBABILITY_TERM,
            "the probabilities are masked, but not like the scores",
            self.where,
        )


GUARDS: tuple[Callable[[GuardQuery], Guard | None], ...] = (
    NanGuard.read,
    ScoreGuard.read,
    BiasGuard.read,
    SelectionGuard.read,
)
"""The kinds of guards, tried in order."""


def _tests_rows(own: Arrangement, guarded: Arrangement, keys: Axes) -> bool:
    """Is a number for each row of a bias one for the same rows of the guarded probabilities?"""
    aligned = guarded[-len(own) :]
    rows = zip(own[:-1], aligned[:-1], strict=False)
    same_rows = len(own) == len(aligned) and all(
        not mine or mine == theirs for mine, theirs in rows
    )
    return same_rows and own[-1] in ((), keys)


def guard_after(asked: GuardQuery) -> Guard | None:
    """The guard that probabilities are read by, if any."""
    return first(read(asked) for read in GUARDS)


def score_tests(
    condition: ir.Value, keep: bool, softmax: ir.Value, info: ShapeInfo
) -> tuple[ir.Node, ...]:
    """The nodes that compute the condition of a score guard, first the comparison; none when it is
    no such guard.

    `keep` says whether the guard keeps a probability where the condition is true.
    """
    nodes: list[ir.Node] = []
    wanted, reduced = keep, False
    for node in _private_makers(condition):
        nodes.append(node)
        if is_op(node, "Not"):  # 6
            wanted = not wanted
        elif not reduced and _reduces_keys(node, wanted, info):  # 5 and 8
            reduced = True
        elif (
            is_op(node, "Equal") and reduced and not wanted and _of_scores(node, softmax, info)
        ):  # 9
            return tuple(reversed(nodes))
        elif not _keeps_truth(node, info):  # 7
            return ()
    return ()


def _private_makers(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that make a value, upwards along their first inputs, while nothing else reads what
    each of them makes."""
    for _ in range(MAX_STEPS):
        node = value.producer()
        if node is None or value.is_graph_output() or len(value.uses()) != 1:
            return
        yield node
        value = operand_at(node, 0)


def _reduces_keys(node: ir.Node, keep: bool, info: ShapeInfo) -> bool:
    """Cases 5 and 8: does a node reduce the last axis in the way that its result needs? A maximum
    asks for any score that is kept, a minimum whether all are dropped."""
    return is_op(node, "ReduceMax" if keep else "ReduceMin") and keeps_last_axis(node, info)


def _keeps_truth(node: ir.Node, info: ShapeInfo) -> bool:
    """Case 7: is this a cast from booleans to numbers, or from numbers to booleans?"""
    kinds = info.dtype(operand_at(node, 0)), info.dtype(node.outputs[0])
    return is_op(node, "Cast") and None not in kinds and ir.DataType.BOOL in kinds


def _of_scores(equal: ir.Node, softmax: ir.Value, info: ShapeInfo) -> bool:
    """Case 9: is this Equal(scores, -inf)?"""
    scores, number = operands(equal)
    if info.scalar(number) != -math.inf:
        return False
    return match(SOFTMAX_OF_SCORES, softmax, info, {SCORES.name: scores}) is not None


def product_guard(
    factors: tuple[Factor, ...],
    terms: tuple[Term, ...],
    viewer: Viewer,
) -> Factor | None:
    """The factor on the probabilities that is 0 where the one mask masks, and 1 elsewhere."""
    mask = only_mask(terms)
    if mask is None:
        return None
    for factor in factors:
        if factor.view is None or factor.value is None or factor.divides:
            continue
        numbers = viewer.facts.sets.of(factor.value)
        is_choice = numbers is not None and numbers <= {0.0, 1.0}
        if is_choice and keeps_like(factor.value, True, factor.view.dims, mask, viewer):
            return factor
    return None


def only_mask(terms: tuple[Term, ...]) -> MaskTerm | None:
    """The mask that a guard is compared with: the only selection, or without selections the only
    addend; else None."""
    selects: list[MaskTerm] = instances(terms, Select)
    addends: list[MaskTerm] = instances(terms, Add)
    return sole(selects or addends)


def keeps_like(
    condition: ir.Value,
    keep: bool,
    dims: Arrangement,
    mask: MaskTerm,
    viewer: Viewer,
) -> bool:
    """Is a condition, which runs along these axes, `keep` exactly where the mask leaves a score as
    it is?"""
    if viewer.space.resolve_all(dims) != viewer.space.resolve_all(mask.operand.dims):
        return False
    if isinstance(mask, Select):
        own, turned = bare(mask.operand.value, viewer.info)
        other, turned_too = bare(condition, viewer.info)
        if own is other:
            return (mask.keep ^ turned) == (keep ^ turned_too)
    shape = viewer.info.shape(condition)
    if shape is None or shape != viewer.info.shape(mask.operand.value):
        return False
    positions = viewer.facts.positions(shape)
    truth = positions.truth(condition, positions.identity_index)
    if truth is None:
        return False
    return kept(mask, positions) == (truth if keep else negation(truth))
