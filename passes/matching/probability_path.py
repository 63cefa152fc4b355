"""From a softmax down to the product with the values.

    p = scores.softmax(-1).to(v.dtype)
    p = torch.where(p.isnan(), 0, p)
    p = p * head_mask
    output = p @ v

Grammar, from the softmax's output downwards, every value read by nothing else:

      1 probabilities := softmax
      2     | layout(probabilities)                        what views.py looks through
      3     | Cast(probabilities)                          to any type, as long as the product takes
                                                           them in the narrowest of the types they
                                                           had
      4     | guarded(probabilities)                       see guards.py; one guard in all
      5     | Where(never true, x, probabilities)          see infinity_tests.py
      6     | Mul(probabilities, t) | Div(probabilities, t)          see factors.py; t also the 0
                                                           and 1 of the one mask on the scores,
                                                           instead of a guard, see guards.py
      7     | probabilities masked and divided by their sum          see renormalised.py
      8     | Add(probabilities, t)                        t all 0, of no larger size: what is left
                                                           of a Where that tf2onnx writes as p * b +
                                                           0 * (1 - b)
      9     | Slice(probabilities) | Split(probabilities)  only the column of a sink dropped, see
                                                           sinks.py
     10     | Slice(probabilities) | Pad(probabilities)    as large as they are, forwards: it leaves
                                                           out nothing; a Pad of no width
            | Expand(probabilities) | Tile(probabilities)  as large as they are, as torch's matmul
                                                           is decomposed
     11     | Where(c, x, probabilities), c all false | Where(c, probabilities, x), c all true, of
                                                           no larger size: a guard whose test ONNX
                                                           Runtime has computed from constants
     12     | rounded(probabilities)                       see activation_rounding.py; only if the
                                                           user says so
     13 output := product(probabilities, value) | product(value, probabilities), summed over the
               softmax's axis, or over all the dimensions that this axis was taken apart into

The casts are sound because the operator rounds its result to the type of the values in any case,
and rounding the probabilities first only adds an error of that type's precision. A guard is
recorded, and the mask's plan has to honour it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import onnx_ir as ir

from fa_compiler.passes.answer.budget import spend
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.options import DROP_ROUNDINGS
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    FLOATS,
    SIXTEEN_BITS,
    any_op,
    axes_of,
    data_readers,
    distinct_consumers,
    int_attr,
    is_op,
    nodes_of_type,
    only_reader,
    operands,
    others_of,
    outputs_of,
    readers_of,
    sole,
    source_through,
)
from fa_compiler.passes.layout.contraction import Contraction, unknown_rank
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.activation_rounding import rounding_ends, rounding_starts
from fa_compiler.passes.matching.factors import operand
from fa_compiler.passes.matching.guards import Guard, GuardQuery, guard_after
from fa_compiler.passes.matching.infinity_tests import InfinityTests
from fa_compiler.passes.matching.renormalised import Renormalised, renormalised
from fa_compiler.passes.matching.scores import (
    PARTS_ADVICE,
    QUANTISED,
    QUANTISED_PRODUCTS,
    QUANTISING,
    mixing,
    product_at,
    quantised_advice,
)
from fa_compiler.passes.ops.cuts import slice_bounds
from fa_compiler.passes.ops.elementwise import FOUR_OPERATIONS, drops_nothing
from fa_compiler.passes.ops.linear import PRODUCTS
from fa_compiler.passes.ops.movers import LAYOUT_OPS, MOVES
from fa_compiler.passes.ops.moves import keeps_everything
from fa_compiler.passes.ops.parts import split_of

DROPOUT_ADVICE = "export for inference (model.eval()), or with a drop mask that the graph computes from random numbers"
RENORMALISED_ADVICE = (
    "mask the scores instead: where(mask, scores, -inf) before the softmax gives the same"
)
NAN_GUARD_ADVICE = (
    "where a guard against NaN is meant, write it in this way: 0 first, then the probabilities "
    "themselves"
)
DIFFERENCE_ADVICE = "multiply the values by each softmax, and subtract the results"
MULTIPLYING = (*PRODUCTS, "FusedMatMul", *QUANTISED_PRODUCTS)
NORMALISATIONS = ("BatchNormalization", "InstanceNormalization", "LayerNormalization")


@dataclass(frozen=True)
class ProbabilityPath:
    """The nodes between the softmax and the product, in order; `side` is the operand that they
    feed.

    `tests` are the removed infinity tests (infinity_tests.py). `divided` says how the probabilities
    are masked and divided again (renormalised.py). `tail` are nodes after the product that belong
    to the attention: a sink gate or a late division.
    """

    product: Contraction
    side: int
    nodes: tuple[ir.Node, ...]
    guard: Guard | None
    tests: tuple[ir.Node, ...] = ()
    tail: tuple[ir.Node, ...] = ()
    divided: Renormalised | None = None

    @property
    def all_tests(self) -> tuple[ir.Node, ...]:
        """The removed infinity tests, and the nodes that compute the condition of the guard."""
        return self.tests if self.guard is None else (*self.tests, *self.guard.tests)

    @property
    def in_front_of_guard(self) -> tuple[ir.Node, ...]:
        """The nodes whose results the guard reads."""
        return () if self.guard is None else self.nodes[: self.nodes.index(self.guard.where)]

    @property
    def value(self) -> ir.Value:
        """The other operand of the product."""
        return self.product.operands[1 - self.side]


def find_values(
    softmax_output: ir.Value, viewer: Viewer, among: Collection[ir.Node] | None = None
) -> ProbabilityPath:
    """Follow the grammar above; declines name the node that broke it. With `among` only these nodes
    count as readers; the caller has to account for all others (routes.py)."""
    walk = _Walk(viewer, among, softmax_output)
    while (product := walk.take()) is None:
        spend(walk.current.producer())
    return walk.path(product)


@dataclass
class _Walk:
    """Probabilities on their way to the product: `current` is the value that was reached."""

    viewer: Viewer
    among: Collection[ir.Node] | None
    current: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)
    guard: Guard | None = None
    divided: Renormalised | None = None
    scaled: bool = False
    """Has a factor been passed?"""

    def __post_init__(self) -> None:
        self.softmax_output = self.current
        self.infinity = InfinityTests(self.viewer)

    def take(self) -> Contraction | None:
        """Go one step on, or find the product that the probabilities have reached. Raises
        Decline."""
        consumers = self._consumers()
        if self._take_division(consumers) or self._take_guard(consumers):
            return None
        node = sole(consumers)
        if node is None:
            raise _read_elsewhere(self.current, consumers, self.viewer)
        if (product := product_at(node, self.viewer.info)) is not None:
            return product
        self._check_passes(node)
        self.scaled |= operand(node, self.current) is not None
        self.nodes.append(node)
        self.current = carried_output(node)
        return None

    def path(self, product: Contraction) -> ProbabilityPath:
        """Case 13: the path to this product. Raises Decline."""
        if product.operands[0] is product.operands[1]:
            raise Decline(
                Code.NO_VALUE_MATMUL, "the probabilities are multiplied by themselves", product.node
            )
        made = [self.softmax_output, *outputs_of(self.nodes)]
        _check_types(made, self.current, self.viewer)  # 3
        if (stray := self.infinity.stray(self.nodes)) is not None:
            reason = f"what {label(stray)} finds out about the probabilities is read outside of the attention, too"
            raise Decline(Code.PROBABILITIES_ARE_OUTPUT, reason, stray)
        side = product.operands.index(self.current)
        tests = tuple(self.infinity.nodes)
        return ProbabilityPath(
            product, side, tuple(self.nodes), self.guard, tests, divided=self.divided
        )

    def _consumers(self) -> list[ir.Node]:
        """Who reads the elements, without the tests of 5. In 16 bits a factor may have made an
        infinity of a probability."""
        if not (self.scaled and self.viewer.info.dtype(self.current) in SIXTEEN_BITS):
            self.infinity.ask(self.current)
        readers = [
            node for node in data_readers(self.current) if self.among is None or node in self.among
        ]
        if self.current.is_graph_output():
            reason = f"the probabilities are the model output {self.current.name!r}"
            raise Decline(Code.PROBABILITIES_ARE_OUTPUT, reason, self.current.producer())
        return [node for node in readers if node not in self.infinity.nodes]

    def _take_division(self, consumers: list[ir.Node]) -> bool:
        """Case 7: probabilities masked and divided by their sum."""
        if len(consumers) != 1 or self.divided is not None or self.guard is not None:
            return False
        self.divided = renormalised(self.current, consumers[0], self.viewer.info)
        if self.divided is None:
            return False
        self.nodes.extend(self.divided.nodes)
        self.current = self.divided.output
        return True

    def _take_guard(self, consumers: list[ir.Node]) -> bool:
        """Case 4: a guard."""
        reader = sole(consumers)
        if reader is not None and (
            self.infinity.selects(reader, self.current)
            or always_selects(reader, self.current, self.viewer)
        ):
            return False
        guard = guard_after(
            GuardQuery(self.softmax_output, self.current, consumers, self.viewer, self.among)
        )
        if guard is None:
            return False
        if self.guard is not None or self.divided is not None:
            raise Decline(Code.PROBABILITY_TERM, "the probabilities are guarded twice", guard.where)
        self.guard = guard
        self.nodes.extend(guard.nodes)
        self.current = guard.where.outputs[0]
        return True

    def _check_passes(self, node: ir.Node) -> None:
        """Cases 2, 3, 5, 6 and 8 to 12: decline a node that is none of them."""
        if (unknown := unknown_rank(node, self.viewer.info)) is not None:
            raise Decline(Code.RANK, f"the rank of {unknown!r} is unknown", node)
        if _passes_on(node, self.current, self.viewer) or operand(node, self.current) is not None:
            return
        if is_op(node, "Dropout"):
            reason = "an active Dropout draws its mask while it runs, and the operator takes one that is known before"
            raise Decline(Code.PROBABILITY_TERM, reason, node, DROPOUT_ADVICE)
        if is_op(node, "Conv"):
            raise Decline(
                Code.PROBABILITY_TERM, mixing("probabilities", node, self.viewer), node, ""
            )
        if is_op(node, "Sub") and any(map(_is_of_softmax, node.inputs)):
            reason = "differential attention: two softmaxes are subtracted before their product with the values"
            raise Decline(Code.PROBABILITY_TERM, reason, node, DIFFERENCE_ADVICE)
        if not self.infinity.selects(node, self.current):
            reason = f"{node.op_type} on the probabilities has no counterpart in the operator"
            raise Decline(Code.PROBABILITY_TERM, reason, node, quantised_advice(node))


def _passes_on(node: ir.Node, current: ir.Value, viewer: Viewer) -> bool:
    """Cases 2, 3 and 8 to 12: does a node keep the probabilities apart from layout, type and
    size?"""
    if adds_nothing(node, current, viewer) or always_selects(node, current, viewer):
        return True
    if keeps_everything(node, viewer.info) and node.inputs[0] is current:
        return True
    if node.inputs[0] is not current:
        return False
    if DROP_ROUNDINGS in viewer.facts.options.assume and (
        rounding_starts(node) or rounding_ends(node)
    ):
        return True
    if is_op(node, "Cast"):
        return viewer.info.dtype(node.outputs[0]) in (*FLOATS, ir.DataType.DOUBLE)
    return is_op(node, *LAYOUT_OPS, "Slice", "Split") or drops_nothing(node)


def adds_nothing(node: ir.Node, current: ir.Value, viewer: Viewer) -> bool:
    """Case 8: is 0 added to a value, and its size kept?"""
    if not is_op(node, "Add") or viewer.info.shape(node.outputs[0]) != viewer.info.shape(current):
        return False
    other = sole(others_of(node, current))
    return other is not None and viewer.facts.sets.only(other) == 0.0


def always_selects(node: ir.Node, current: ir.Value, viewer: Viewer) -> bool:
    """Case 11: does a Where give a value in every run, and keep its size?"""
    if not is_op(node, "Where") or viewer.info.shape(node.outputs[0]) != viewer.info.shape(current):
        return False
    condition, chosen, other = operands(node)
    taken = viewer.facts.sets.only(condition)
    if taken is None:
        return False
    return current is (chosen if taken else other)


def carried_output(node: ir.Node) -> ir.Value:
    """The output that holds the probabilities: of a Split the first part that is read."""
    if not is_op(node, "Split"):
        return node.outputs[0]
    return next((output for output in node.outputs if data_readers(output)), node.outputs[0])


def _check_types(values: list[ir.Value], operand: ir.Value, viewer: Viewer) -> None:
    """The product has to take the probabilities in the narrowest type they had: any other was
    rounded on the way."""
    types = {viewer.info.dtype(value) for value in values} & set(SIXTEEN_BITS)
    if types and types != {viewer.info.dtype(operand)}:
        raise Decline(
            Code.CAST, "the probabilities are rounded to 16 bits on the way", operand.producer()
        )


def _is_of_softmax(value: ir.Value | None) -> bool:
    return is_op(
        source_through(value or ABSENT, *MOVES, "Mul", "Div", "Cast").producer(), "Softmax"
    )


def _cuts_keys(node: ir.Node, value: ir.Value, viewer: Viewer) -> bool:
    """Does a node take a part of the last axis?"""
    split, rank = split_of(node, viewer.info), len(viewer.info.sizes(value))
    if split is not None:
        return split.is_last
    cut = slice_bounds(node, viewer.info, rank) if is_op(node, "Slice") else None
    return cut is not None and {axis for axis, _, _ in cut} == {rank - 1}


def _read_elsewhere(value: ir.Value, consumers: list[ir.Node], viewer: Viewer) -> Decline:
    """Why probabilities that no node reads, or several, are not followed further."""
    maker = value.producer()
    if not consumers:
        return Decline(Code.NOT_ATTENTION, "nothing reads the softmax", maker)
    if _are_divided_by_sums(consumers):
        hint = RENORMALISED_ADVICE if is_op(maker, "Mul", "Where") else None
        return Decline(
            Code.PROBABILITY_TERM, "the probabilities are divided by sums of them", maker, hint
        )
    if (guard := _other_nan_guard(consumers)) is not None:
        reason = f"{label(guard)} chooses by IsNaN of the probabilities p, but is not the guard Where(IsNaN(p), 0, p)"
        return Decline(Code.PROBABILITY_TERM, reason, guard, NAN_GUARD_ADVICE)
    if all(_cuts_keys(node, value, viewer) for node in consumers):
        reason = "keys in parts: the probabilities are cut into parts, each of which has values of its own"
        return Decline(Code.PROBABILITY_TERM, reason, consumers[-1], PARTS_ADVICE)
    others = ", ".join(str(label(node)) for node in consumers[:4])
    return Decline(
        Code.PROBABILITIES_ARE_OUTPUT,
        f"the probabilities are read by {len(consumers)} nodes ({others})",
        consumers[-1],
    )


def _are_divided_by_sums(consumers: list[ir.Node]) -> bool:
    """Do the readers of probabilities sum them up, and divide?"""
    sums = list(nodes_of_type(consumers, "ReduceSum"))
    following = readers_of(outputs_of(sums))
    return bool(sums) and any_op((*consumers, *following), "Div")


def _other_nan_guard(consumers: list[ir.Node]) -> ir.Node | None:
    """A Where that reads the probabilities and chooses by IsNaN of them, which is not the guard of
    the grammar."""
    test = next(nodes_of_type(consumers, "IsNaN"), None)
    if test is None:
        return None
    chooser = only_reader(test.outputs[0])
    if is_op(chooser, "Not"):
        chooser = only_reader(chooser.outputs[0])
    return chooser if is_op(chooser, "Where") and chooser in consumers else None


def _takes_heads(node: ir.Node, value: ir.Value) -> bool:
    """Is this a mean or sum over axis 1, the heads, or a Gather along any axis but the first?"""
    if node.inputs[0] is not value:
        return False
    if is_op(node, "Gather"):
        return int_attr(node, "axis", 0) > 0
    return is_op(node, "ReduceMean", "ReduceSum") and axes_of(node) == [1]


def reaches_product(softmax_output: ir.Value, viewer: Viewer, limit: int = 64) -> bool:
    """Does any product read this softmax, through the operators that models put between the two:
    elementwise ones, layout, casts, padding, quantisation, a mean over heads?

    Used only to tell attention that is declined from a softmax that is none (a router, a
    classifier).
    """
    pending, seen = [softmax_output], set[int]()
    while pending and len(seen) < limit:
        value = pending.pop()
        for node in distinct_consumers(value):
            if id(node) in seen:
                continue
            seen.add(id(node))
            if node.op_type in MULTIPLYING:
                return True
            if _may_lead_on(node, value, viewer):
                pending.extend(node.outputs)
    return False


def _may_lead_on(node: ir.Node, value: ir.Value, viewer: Viewer) -> bool:
    """May a node stand between a softmax and its product with values, whatever it does?"""
    if is_op(node, *LAYOUT_OPS, "Cast", "Dropout", "Slice", "Expand", "Pad") or _takes_heads(
        node, value
    ):
        return True
    if node.op_type in (*QUANTISING, *QUANTISED):
        return True
    alike = viewer.info.shape(node.outputs[0]) == viewer.info.shape(value)
    return alike and is_op(node, "Where", *FOUR_OPERATIONS, "Conv", "Trilu", *NORMALISATIONS)
