"""Softmaxes that are no anchors. They are left as they are, and the report names them, so that none
is passed over.

    e = scores.exp()
    output = (e @ v) / e.sum(-1, keepdim=True)

Grammar, read upwards from the node that is named; e is an exponential that belongs to no anchor:

    other :=
      1     QLinearSoftmax(scores, ...)                    com.microsoft, as ONNX Runtime's
                                                           quantiser writes it
                                                           (QuantFormat.QOperator)
          | BiasSoftmax(scores, bias)                      com.microsoft, as ONNX Runtime saves a
                                                           model that it has optimised for a GPU
      2   | Div(weights, total) | Mul(weights, inverse)    total and weights of the same
                                                           exponentials
      3   | LpNormalization(weights)                       p = 1
      4   | exp(Sub(x, logarithm)) | exp(Add(x, Neg(logarithm)))
      5   | e                                              summed up and multiplied by values, as in
                                                           a Loop that attends a part of the keys in
                                                           each turn
    inverse := layout of Reciprocal(total) | Div(c, total) | Pow(total, c) | Exp(Neg(logarithm))
    total :=
      6     row_wise(total, ...) | Exp(logarithm)
      7   | sum(weights)                                   any operator that adds up, a product with
                                                           ones, too
    logarithm :=
      8     row_wise(logarithm, ...) | Log(total) | ReduceLogSum(weights) | ReduceLogSumExp(x)
    weights :=
      9     e | element_wise(weights, ...)                 in 2 also products with values: the
                                                           division is late

It is not proven that these are softmaxes. In 2 to 5 exponentials meet their own sum, which is seen
in little else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeGuard

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    any_op,
    constant,
    distinct_consumers,
    first,
    inputs_of,
    int_attr,
    is_op,
    made_of,
    nodes_of_type,
    operand_at,
    operand_orders,
    operands,
    outputs_of,
    reached,
    readers_of,
    source_through,
)
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.activation_rounding import HINT as ROUNDING_ADVICE
from fa_compiler.passes.matching.exponentials import LESS
from fa_compiler.passes.matching.integer_steps import integer_steps
from fa_compiler.passes.matching.probability_path import reaches_product
from fa_compiler.passes.matching.row_reductions import SUMS
from fa_compiler.passes.matching.scores import QUANTISED_ADVICE
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.linear import PRODUCTS
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.patterns import match
from fa_compiler.passes.values.shapes import ShapeInfo

KEEPING = (*LAYOUT_OPS, "Cast", "Expand")
# 6 and 8
ROW_WISE = (
    *KEEPING,
    "Abs",
    "Add",
    "Sum",
    "Mul",
    "Div",
    "Max",
    "Clip",
    "Where",
    "Slice",
    "Split",
    "Gather",
)
ELEMENT_WISE = (*KEEPING, "Mul", "Where", "Max", "Clip", "Concat", "Neg", "Sub", "Dropout")  # 9
INVERSES = ("Reciprocal", "Div", "Pow", "Exp")
ADDING = (*SUMS, "ReduceMean", "CumSum", "GlobalAveragePool")  # 7
LOGARITHMS = ("Log", "ReduceLogSum", "ReduceLogSumExp")
BIASED = "BiasSoftmax adds a bias to the scores itself, and only ONNX Runtime's providers for GPUs have it"
BIASED_ADVICE = (
    "take the model as it was before ONNX Runtime optimised it, or write it as Add and Softmax"
)
READY_MADE = {"QLinearSoftmax": ("", False, None), "BiasSoftmax": (BIASED, False, BIASED_ADVICE)}
"""1: the operators of com.microsoft, and what is said of them: `spelling`, `weighs` and `advice` of
`OtherSoftmax`."""
LIMIT = 48
"""So many values are looked at in one search."""


@dataclass(frozen=True)
class OtherSoftmax:
    """A softmax that is no anchor: the node that the report names, and how it is written. `weighs`
    says whether a product with values is a part of it. `advice` is what the user can do, where that
    is not the code's advice."""

    node: ir.Node
    spelling: str = ""
    weighs: bool = False
    advice: str | None = None

    def decline(self, facts: Facts) -> Decline:
        """Why it is left as it is."""
        if not self.weighs and not reaches_product(
            self.node.outputs[0], Viewer(facts, AxisSpace())
        ):
            return Decline(
                Code.NOT_ATTENTION, "no product with values follows this softmax", self.node
            )
        if self.spelling:
            return Decline(Code.SPELLING, self.spelling, self.node, self.advice)
        reason = f"{self.node.op_type} computes on 8-bit numbers, which the operator does not take"
        helps = (
            DROP_ROUNDINGS not in facts.options.assume
            and integer_steps(self.node, facts.info) is not None
        )
        return Decline(
            Code.DTYPE, reason, self.node, ROUNDING_ADVICE if helps else QUANTISED_ADVICE
        )


def other_softmaxes(
    graph: ir.Graph, anchors: Sequence[SoftmaxAnchor], facts: Facts
) -> list[OtherSoftmax]:
    """The softmaxes of a graph that are none of its anchors."""
    contrib = [node for node in graph if node.domain == "com.microsoft"]
    ready = [
        OtherSoftmax(node, *READY_MADE[kind])
        for kind in READY_MADE
        for node in contrib
        if node.op_type == kind
    ]  # 1
    anchored = chain.from_iterable(anchor.nodes for anchor in anchors)
    free = {node for node in graph if _is_exponential(node, facts.info)}.difference(anchored)
    return [*ready, *_Search(facts, free).of_exponentials(graph)]


def _is_exponential(node: ir.Node | None, info: ShapeInfo) -> TypeGuard[ir.Node]:
    """Is this Exp, or Pow of one number above 0 to a tensor?"""
    if not is_op(node, "Pow"):
        return is_op(node, "Exp")
    base, exponent = operands(node)
    number = info.scalar(base)
    return number is not None and number > 0.0 and constant(exponent) is None


@dataclass(frozen=True)
class _Search:
    """The search for the cases 2 to 5 in one graph. `free` are the exponentials that belong to no
    softmax so far. They are told by their exponents, for a graph may compute one several times."""

    facts: Facts
    free: set[ir.Node]

    def of_exponentials(self, graph: ir.Graph) -> Iterator[OtherSoftmax]:
        """Cases 2 to 5: the softmaxes of the free exponentials."""
        for node in graph if self.free else ():
            if (softmax := self.softmax_at(node)) is not None:
                yield softmax
        yield from self.in_parts()

    def softmax_at(self, node: ir.Node) -> OtherSoftmax | None:
        """Cases 2 to 4: the softmax whose result a node gives. Its exponentials are no longer
        free."""
        if is_op(node, "Div", "Mul"):
            return first(self._quotient(node, *quotient) for quotient in _quotients(node))  # 2
        if is_op(node, "LpNormalization"):
            # 3
            if int_attr(node, "p", 2) == 1 and self._claim(self._exponents(operand_at(node, 0))):
                return OtherSoftmax(node, "LpNormalization divides exponentials by their sum")
        elif (
            node in self.free
            and (less := match(LESS, node.inputs[-1], self.facts.info)) is not None
        ):
            exponents = self._in_logarithm(less["less"])
            if exponents and self._claim({*exponents, less["x"], node.inputs[-1]}):  # 4
                spelling = (
                    f"{node.op_type} is taken of scores less the logarithm of a sum of exponentials"
                )
                return OtherSoftmax(node, spelling)
        return None

    def _quotient(self, node: ir.Node, weights: ir.Value, total: ir.Value) -> OtherSoftmax | None:
        """Case 2: the softmax of weights that a node divides by this total."""
        summed = self._exponents_in_total(total)
        plain = summed & self._exponents(weights)
        if not self._claim(plain or summed & self._exponents(weights, PRODUCTS)):
            return None
        return OtherSoftmax(
            node, f"{node.op_type} divides exponentials by their sum", weighs=not plain
        )

    def in_parts(self) -> Iterator[OtherSoftmax]:
        """Case 5: the free exponentials that are summed up and multiplied by values, both as they
        are."""
        for node in [node for node in self.free if self._is_part(node)]:
            if self._claim({node.inputs[-1]}):
                yield OtherSoftmax(
                    node, "exponentials are summed up and multiplied by values, part by part", True
                )

    def _is_part(self, node: ir.Node) -> bool:
        kept = reached(node.outputs, lambda value: _kept_values(distinct_consumers(value)), LIMIT)
        readers = list(readers_of(kept))
        return any_op(readers, *SUMS) and any_op(readers, *PRODUCTS)

    def _claim(self, exponents: Collection[ir.Value | None]) -> bool:
        taken = {node for node in self.free if node.inputs[-1] in exponents}
        self.free.difference_update(taken)
        return bool(taken)

    def _exponents_in_total(self, total: ir.Value) -> set[ir.Value]:
        """Cases 6 to 8: the exponents of the exponentials whose sum a total or a logarithm is made
        of."""
        exponents: set[ir.Value] = set()
        for value in _upward(total, (*ROW_WISE, *LOGARITHMS[:1], "Exp", "Neg")):
            node = value.producer()
            if is_op(node, "ReduceLogSumExp"):
                exponents.update(inputs_of(node)[:1])
            elif node is not None:
                exponentials = self._exponentials(self._what_is_added(node))
                exponents.update(operands(exponential)[-1] for exponential in exponentials)
        return exponents

    def _in_logarithm(self, logarithm: ir.Value) -> set[ir.Value]:
        """Case 8: the exponents of the exponentials whose sum's logarithm it is made of."""
        logarithms = [
            value for value in _upward(logarithm, ROW_WISE) if is_op(value.producer(), *LOGARITHMS)
        ]
        return {exponent for value in logarithms for exponent in self._exponents_in_total(value)}

    def _what_is_added(self, node: ir.Node) -> ir.Value:
        """Case 7: what a node adds up; ABSENT for other nodes."""
        if is_op(node, *ADDING, "ReduceLogSum") or (
            is_op(node, "Einsum") and len(node.inputs) == 1
        ):
            return operand_at(node, 0)
        orders = operand_orders(node, "MatMul", "Einsum")
        return next(
            (weights for weights, ones in orders if self.facts.sets.only(ones) == 1.0), ABSENT
        )

    def _exponents(self, weights: ir.Value, more: Sequence[str] = ()) -> set[ir.Value]:
        """Case 9: the exponents of the free exponentials that weights are made of."""
        return {operands(node)[-1] for node in self._exponentials(weights, more) & self.free}

    def _exponentials(self, weights: ir.Value, more: Sequence[str] = ()) -> set[ir.Node]:
        through = (*ELEMENT_WISE, *more, "Add") if more else ELEMENT_WISE
        makers = (value.producer() for value in _upward(weights, through))
        return {node for node in makers if _is_exponential(node, self.facts.info)}


def _upward(value: ir.Value, through: Sequence[str]) -> Iterator[ir.Value]:
    """The values that a value is made of by these operators, it first."""
    return made_of([value], through, LIMIT)


def _kept_values(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    return outputs_of(nodes_of_type(nodes, *KEEPING))


def _quotients(node: ir.Node) -> Iterator[tuple[ir.Value, ir.Value]]:
    """Case 2: what a Div or Mul may divide, and by what."""
    left, right = operands(node)
    if is_op(node, "Div"):
        yield left, right
    for weights, inverse in operand_orders(node, "Mul"):
        maker = source_through(inverse, *KEEPING).producer()
        if is_op(maker, *INVERSES):
            yield weights, operand_at(maker, 1 if is_op(maker, "Div") else 0)
