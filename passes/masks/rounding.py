"""The order of additions. The original adds the terms to the scores one by one; a bias is summed up
before it is added.

    scores = (query @ key.T + position_bias) + mask               # the model
    scores = query @ key.T + (position_bias + mask)               # the operator with a bias

Both round alike where each addend, up to its sign, is of one of these kinds:

    fine      rounds a score no more than it is rounded anyway: numbers up to 256, weights, results
              of products and activations
    huge      0, or so large that a score and a fine addend are lost in it (`huge` below)
    coarse    anything else: numbers such as -1e4 and -1e9, inputs of the model that may hold such
              numbers, products with constants above 256, shares of huge numbers

    1 fine addends, in any number                        every sum has the same rounding errors as
                                                         scores have
    2 one coarse addend and no other but huge ones       score + coarse is the same sum in both
                                                         orders; beside a huge
      that it is proven to be lost in                    addend both are lost, whichever comes first
    3 huge addends of one sign, beside those of 1 or 2   they do not cancel, so every sum of them is
                                                         huge; an addend that holds huge and fine
                                                         numbers counts as both
    4 one huge addend of unknown sign, beside fine ones  there is nothing that it could cancel with

A factor after the sums keeps their rounding where it is a power of 2. After a coarse addend only
such factors are accepted. A negative factor between two huge addends changes the sign of the first.

This holds for float32. ONNX Runtime computes 16-bit sums in float32, and so does the operator. Only
two kinds of 16-bit addends count as coarse there: addends beyond the range of float16, and addends
in front of a factor that enlarges their rounding errors. A sum after a coarse addend is declined
where ONNX Runtime rounds it to 16 bits (sixteen_bits.py).

Everything else is declined. A row that coarse numbers mask fully shows how its scores were rounded.
Two huge numbers of opposite signs swallow the scores one after the other, but their sum may leave
the scores as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.budget import spend
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import BINARY_MASKS, NO_EMPTY_ROWS, NO_EMPTY_ROWS_HINT
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    constant,
    inner_values,
    input_of,
    inputs_of,
    instances,
    is_op,
    is_weight,
    operand_orders,
    text_attr,
    without_none,
)
from fa_compiler.passes.layout.contraction import contraction
from fa_compiler.passes.masks.magnitudes import FLOAT16_MAX, HUGE, LOST_SHARE, MAX_FINE
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.score_ops import (
    Add,
    AlignedTensor,
    Floor,
    MaskTerm,
    Scale,
    Select,
    Term,
)
from fa_compiler.passes.masks.sixteen_bits import is_rounded_on_the_way
from fa_compiler.passes.ops.movers import MOVES, element_source
from fa_compiler.passes.ops.numbers import CHOICES, COMPUTING, KEEP_WHOLE, PASSING, passed_on
from fa_compiler.passes.values.facts import Facts

CANCELLED = 2.0**-24
"""The smallest share of a float32 number that a subtraction leaves, unless it leaves 0: the last
bit."""
SMALLEST_REST = 2.0**-24
"""The smallest number other than 0 that 1 - x can be for a float32 x."""
BINARY_HINT = f"--assume {BINARY_MASKS} if every mask that is given to the model holds only 0 and 1"
ONE_SIGN_HINT = (
    "let every mask lower the scores: put -inf in place of masked scores, or add a number below 0"
)
MAX_STEPS = 64
MAX_DEPTH = 32
KEEP_SIGNS = (*PASSING, "Add", "Cast", "Pad", "Max", "Min")
"""Operators whose huge results have the sign of a huge operand. A Scatter may multiply instead."""
NORMALISING = (
    *(
        "LayerNormalization",
        "RMSNormalization",
        "BatchNormalization",
        "GroupNormalization",
        "InstanceNormalization",
    ),
    *("Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "Exp", "Erf", "Gelu"),
)
"""Operators whose results are activations, like those of products."""


@dataclass(frozen=True)
class Huge:
    """Elements that are 0 or at least `least` in absolute value. `negative` and `positive` say
    which signs they may have."""

    least: float
    negative: bool
    positive: bool

    @property
    def is_huge(self) -> bool:
        """Are all elements 0 or so large that scores are lost in them?"""
        return self.least >= HUGE

    def times(self, sign: float) -> Huge:
        """The elements times a number of this sign."""
        return self.turned() if sign < 0 else self

    def turned(self) -> Huge:
        """The elements times -1."""
        return Huge(self.least, self.positive, self.negative)

    def of_any_sign(self) -> Huge:
        """The elements, negated or not."""
        return self.or_else(self.turned())

    def or_else(self, other: Huge) -> Huge:
        """Elements of either kind."""
        least = min(self.least, other.least)
        return Huge(least, self.negative or other.negative, self.positive or other.positive)

    def plus(self, other: Huge) -> Huge:
        """The sums of elements of both kinds. Two elements of opposite signs may cancel, altogether
        or but for a last bit."""
        either = self.or_else(other)
        cancels = either.negative and either.positive
        return Huge(either.least * CANCELLED, True, True) if cancels else either


ANY_SIZE = Huge(0.0, True, True)
"""Elements that may be of any size."""
ZEROS = Huge(math.inf, False, False)
"""Elements that are all 0."""


@dataclass(frozen=True)
class Parts:
    """The kinds of numbers in an addend besides fine ones: coarse ones and huge ones. The huge ones
    are ZEROS where there are none, and where the addend may hold coarse ones, for then nothing is
    known of them."""

    coarse: bool
    huge: Huge


COARSE = Parts(True, ZEROS)


def assumptions_for_reordering(
    terms: tuple[Term, ...], values: TermValues, assume: Collection[str]
) -> tuple[str, ...]:
    """The fewest of the user's assumptions under which a bias of these terms rounds like the terms
    one by one.

    Raises Decline with `mask_value` where they are not enough.
    """
    for words in ((), (BINARY_MASKS,), (NO_EMPTY_ROWS,)):
        if set(words) <= set(assume) and reordering_decline(terms, values, words) is None:
            return words
    if (decline := reordering_decline(terms, values, assume)) is not None:
        raise decline
    return BINARY_MASKS, NO_EMPTY_ROWS


def reordering_decline(
    terms: tuple[Term, ...], values: TermValues, assume: Collection[str]
) -> Decline | None:
    """A decline with `mask_value` where a bias of these terms may round differently from the terms
    one by one, else None.

    A selection counts as an addend of its fill. A floor counts as an addend of its number, to which
    the terms after it are added.
    """
    kinds = _Kinds(terms, values, _Sizes(values.viewer.facts, BINARY_MASKS in assume))
    culprit = next(kinds.opposite_signs(), None)
    if culprit is not None:  # neither 3 nor 4
        reason = "numbers of both signs that swallow the scores may be added up"
        vouched = (*assume, BINARY_MASKS)
        again = None if BINARY_MASKS in assume else reordering_decline(terms, values, vouched)
        helps = BINARY_MASKS not in assume and (again is None or again.reason != reason)
        return Decline(
            Code.MASK_VALUE, reason, culprit.node, BINARY_HINT if helps else ONE_SIGN_HINT
        )
    if NO_EMPTY_ROWS in assume:
        return None
    return kinds.shown_by_empty_rows()


@dataclass(frozen=True)
class _Kinds:
    """The terms of one attention, and the kinds of numbers that they add or put in."""

    terms: tuple[Term, ...]
    values: TermValues
    sizes: _Sizes

    @cached_property
    def throughout(self) -> dict[MaskTerm, Huge]:
        """The numbers of each addend and selection, as far as they are huge throughout."""
        return {
            term: self.sizes.huge_term(term)
            for term in self.terms
            if isinstance(term, Add | Select)
        }

    @cached_property
    def plain(self) -> dict[Add[AlignedTensor], Parts]:
        """The kinds of numbers in the addends that are not huge throughout."""
        adds = (
            term
            for term, numbers in self.throughout.items()
            if isinstance(term, Add) and not numbers.is_huge
        )
        return {term: self.sizes.parts(term) for term in adds}

    @cached_property
    def turned(self) -> set[Term]:
        """The terms whose sign later factors change."""
        turned: set[Term] = set()
        negative = False
        for term in reversed(self.terms):
            if isinstance(term, Scale):
                negative ^= term.factor < 0
            elif negative:
                turned.add(term)
        return turned

    @cached_property
    def huge(self) -> dict[MaskTerm, Huge]:
        """The finite huge numbers of the terms that have some, with their signs after later
        factors."""
        mixed: dict[MaskTerm, Huge] = {term: parts.huge for term, parts in self.plain.items()}
        return {
            term: numbers.turned() if term in self.turned else numbers
            for term, numbers in {**self.throughout, **mixed}.items()
            if HUGE <= numbers.least < math.inf
        }

    def opposite_signs(self) -> Iterator[MaskTerm]:
        """The terms whose huge numbers may have another sign than those of another term, or of a
        floor before them."""
        low = [term for term, numbers in self.huge.items() if numbers.negative]
        high = [term for term, numbers in self.huge.items() if numbers.positive]
        for lowering in low:
            # one alone is case 4, of one sign case 3
            yield from (term for term in high if term is not lowering)
        for place, floor in enumerate(self.terms):
            if isinstance(floor, Floor) and abs(floor.floor) >= HUGE:
                opposite = high if (floor.floor < 0) ^ (floor in self.turned) else low
                yield from (term for term in opposite if self.terms.index(term) > place)

    def shown_by_empty_rows(self) -> Decline | None:
        """A decline where the order of additions may show in rows that coarse addends mask fully,
        else None."""
        coarse = [term for term, parts in self.plain.items() if parts.coarse]
        for term in coarse:
            if not self.values.is_float32(term) and is_rounded_on_the_way(term.node.outputs[0]):
                return _in_empty_rows(
                    "scores are rounded to 16 bits behind a mask or bias with large numbers", term
                )
        first = next(filter(self._rounds_coarsely, coarse), None)
        if first is None or self._is_one_sum(first):
            return None
        reason = (
            "a mask or bias whose numbers may round the scores is combined with other terms, and a row that it masks "
            "everywhere shows which sum is rounded first"
        )
        return _in_empty_rows(reason, first)

    def _rounds_coarsely(self, term: Add[AlignedTensor]) -> bool:
        """Does a coarse addend round scores more coarsely than their type, or a factor enlarge its
        rounding errors?"""
        if self.values.is_float32(term) or self.sizes.is_beyond_float16(term.operand.value):
            return True
        return any(abs(factor.factor) > 1.0 for factor in _factors_behind(self.terms, term))

    def _is_one_sum(self, term: Add[AlignedTensor]) -> bool:
        """Case 2: is score + term the same sum in both orders?"""
        if len(self.plain) > 1 or any(
            factor.rounds for factor in _factors_behind(self.terms, term)
        ):
            return False
        least = min((numbers.least for numbers in self.huge.values()), default=math.inf)
        return math.isinf(least) or self.sizes.largest(term.operand.value) < least * LOST_SHARE


def _factors_behind(terms: tuple[Term, ...], term: Term) -> list[Scale]:
    """The factors after a term, which multiply the scores and their rounding errors."""
    return instances(terms[terms.index(term) + 1 :], Scale)


def _in_empty_rows(reason: str, term: Term) -> Decline:
    """The decline for a difference that shows only in fully masked rows."""
    hint = NO_EMPTY_ROWS_HINT
    return Decline(Code.MASK_VALUE, reason, term.node, hint)


@dataclass(frozen=True)
class _Sizes:
    """Answers questions about how large addends are. If `binary`, masks that are inputs of the
    model hold only 0 and 1."""

    facts: Facts
    binary: bool
    known: dict[ir.Value, Huge] = field(default_factory=dict)
    """What `huge` has answered."""

    def huge_term(self, term: MaskTerm) -> Huge:
        """The numbers of an addend, or of a selection's fill; of ANY_SIZE where they are not huge
        throughout."""
        if isinstance(term, Select):
            return _of_numbers((term.fill,))
        return self.huge(term.operand.value).times(term.sign)

    def huge(self, value: ir.Value | None, depth: int = 0) -> Huge:
        """The sizes of a tensor's elements where all of them are 0 or at least HUGE; else ANY_SIZE.

        huge := numbers | moved huge | Neg(huge) | Where(c, huge, huge) | Concat of huge
              | Trilu(huge)
              | ScatterND or ScatterElements of huge into huge | huge + huge | huge - huge
              | Mul(x, number)     x is whole numbers, or 1 - y in float32, which is 0 or at least
                                   2^-24
        """
        if value is None or depth > MAX_DEPTH:
            return ANY_SIZE
        if value not in self.known:
            spend(value.producer())
            sizes = self._huge(value, depth)
            self.known[value] = sizes if sizes.is_huge else ANY_SIZE
        return self.known[value]

    def _huge(self, value: ir.Value, depth: int) -> Huge:
        numbers, node = self.facts.sets.of(value), value.producer()
        if numbers is not None:
            return _of_numbers(numbers)
        if node is None:
            return ANY_SIZE
        if operands := passed_on(node):
            return functools.reduce(
                Huge.or_else, (self.huge(operand, depth + 1) for operand in operands)
            )
        if is_op(node, "Mul"):
            return self._product(node)
        if not is_op(node, "Neg", "Add", "Sub"):
            return ANY_SIZE
        first, *second = (self.huge(operand, depth + 1) for operand in node.inputs)
        match node.op_type:
            case "Neg":
                return first.turned()
            case "Add":
                return first.plus(*second)
            case _:
                return first.plus(second[0].turned())

    def _product(self, node: ir.Node) -> Huge:
        for factor, number in operand_orders(node, "Mul"):
            only = self.facts.sets.only(number) or 0.0
            if not HUGE <= abs(only) < math.inf:
                continue
            rest = self._rest(factor)
            if rest and self.binary:
                return Huge(abs(only) * SMALLEST_REST, only * rest < 0, only * rest > 0)
            if rest or is_whole(factor, self.facts):
                return Huge(abs(only) * (SMALLEST_REST if rest else 1.0), True, True)
        return ANY_SIZE

    def _rest(self, value: ir.Value) -> int:
        """1 for 1 - x and -1 for x - 1, in integers or float32, moved or not; 0 for anything
        else."""
        node = element_source(value, "Cast").producer()
        if not is_op(node, "Sub"):
            return 0
        dtype = self.facts.info.dtype(node.outputs[0])
        ones = [self.facts.sets.only(operand) for operand in node.inputs]
        if 1.0 not in ones or not (dtype == ir.DataType.FLOAT or _is_integer(dtype)):
            return 0
        return 1 if ones[0] == 1.0 else -1

    def is_beyond_float16(self, value: ir.Value) -> bool:
        """Is a 16-bit value known to hold numbers that are too large for float16 before they are
        rounded?"""
        value = element_source(value)
        node, size = value.producer(), self.largest(value)
        if is_op(node, "Cast", "Mul"):
            size = math.prod(self.largest(operand) for operand in inputs_of(node))
        return FLOAT16_MAX < size < math.inf

    def parts(self, term: Add[AlignedTensor]) -> Parts:
        """The kinds of numbers in an addend that is not huge throughout.

        It is coarse if it holds coarse constants, or if it is made of an input of the model whose
        content is unknown, or if numbers of any size are enlarged. An addend whose sources are too
        many to follow counts as coarse.
        """
        # a value, whether its huge numbers keep their signs, and what constants multiply it by
        pending = [(term.operand.value, True, 1.0)]
        seen: dict[tuple[ir.Value, bool], float] = {}
        total = ZEROS
        while pending:
            current, signed, factor = pending.pop()
            if factor <= seen.get((current, signed), 0.0):
                continue
            seen[current, signed] = factor
            spend(current.producer())
            if len(seen) > MAX_STEPS:
                return COARSE
            huge = self.huge(current)
            if huge.is_huge:
                total = total.or_else(huge if signed else huge.of_any_sign())
            elif self.largest(current) * factor > MAX_FINE:
                factor *= self._enlarges(current)
                if self._is_coarse(current) or factor > MAX_FINE:
                    return COARSE
                keeps_signs = signed and _keeps_signs(current)
                sources = self._sources_of_large(current)
                pending.extend((source, keeps_signs, factor) for source in sources)
        return Parts(False, total.times(term.sign))

    def _is_coarse(self, value: ir.Value) -> bool:
        """Are the large numbers of a value, which is not huge, its own: constants, inputs of the
        model, results of a loop?"""
        if (
            self.facts.sets.of(value) is not None
            or constant(value) is not None
            or inner_values(value) == []
        ):
            return True
        return value.producer() is None and (not is_weight(value) or value.is_graph_input())

    def _enlarges(self, value: ir.Value) -> float:
        """What known numbers multiply those by that a value is computed from, where that is more
        than 1. A share of a huge number, which is not huge throughout, is of any size."""
        node = value.producer()
        if is_op(node, "Div"):
            divisors = self.facts.sets.of(input_of(node, 1)) or frozenset((1.0,))
            least = min(map(abs, divisors)) or math.inf
            return max(1.0, self._known(input_of(node, 0)) / least)
        if is_op(node, "Mul"):
            return math.prod(map(self._known, inputs_of(node)))
        if contraction(node, self.facts.info) is None:
            return 1.0
        operands = (operand for operand in inputs_of(node) if constant(operand) is None)
        return math.prod(map(self._known, operands))

    def _known(self, operand: ir.Value | None) -> float:
        """The largest of the numbers that an operand is known to hold, and at least 1."""
        numbers = self.facts.sets.of(operand)
        if numbers is not None:
            return max(1.0, *map(abs, numbers))
        huge = self.huge(operand)
        return HUGE if huge.is_huge and huge != ZEROS else 1.0

    def _sources_of_large(self, value: ir.Value) -> Sequence[ir.Value]:
        """The values that large numbers of a value come from; empty for weights and activations,
        which are fine."""
        node, branches = value.producer(), inner_values(value)
        if node is None or branches is not None:
            return branches or ()
        if is_op(node, *MOVES):
            return without_none(node.inputs[:1])
        if contraction(node, self.facts.info) is not None or is_op(node, *NORMALISING):
            return ()
        return [operand for operand in _combined(node) if self._may_be_large(operand)]

    def _may_be_large(self, operand: ir.Value) -> bool:
        """May an operand hold large numbers? Booleans do not. Arithmetic may compute them of
        integers that are inputs of the model; integers that other operators compute are positions
        and sizes."""
        dtype = self.facts.info.dtype(operand)
        computed = operand.producer() is not None and not is_op(operand.producer(), *COMPUTING)
        return not (dtype == ir.DataType.BOOL or (_is_integer(dtype) and computed))

    def largest(self, value: ir.Value) -> float:
        """An upper bound of the absolute values of all elements that are not NaN; infinity where
        none is known."""
        return self.facts.largest(value)


def _keeps_signs(value: ir.Value) -> bool:
    """Have huge numbers of a value the signs of those that it is made of?"""
    node = value.producer()
    if is_op(node, *KEEP_SIGNS):
        return text_attr(node, "reduction", "none") != "mul"
    return bool(inner_values(value))


def _of_numbers(numbers: Collection[float]) -> Huge:
    others = [number for number in numbers if number != 0.0]
    least = min(map(abs, others), default=math.inf)
    return (
        Huge(least, any(x < 0 for x in others), any(x > 0 for x in others))
        if least >= HUGE
        else ANY_SIZE
    )


COMBINED = {**CHOICES, "Cast": (0,), "Pad": (0, 2)}
"""The operands whose numbers an operator computes with, where these are not all of them."""


def _combined(node: ir.Node) -> list[ir.Value]:
    """The operands whose numbers an operator passes on or computes with."""
    places = COMBINED.get(node.op_type, range(len(node.inputs)))
    operands = (input_of(node, place) for place in places)
    return passed_on(node) or without_none(operands)


def is_whole(value: ir.Value, facts: Facts) -> bool:
    """Is every element proven to be a whole number?"""
    pending, seen = [value], set[ir.Value]()
    while pending:
        current = pending.pop()
        if len(seen) > MAX_STEPS:
            return False
        if current in seen or _is_integer(facts.info.dtype(current)):
            continue
        seen.add(current)
        array, node = constant(current), current.producer()
        if array is None and is_op(node, *KEEP_WHOLE):
            pending.extend(_combined(node))
        elif array is None or not (np.isfinite(array) & (array == np.round(array))).all():
            return False
    return True


def _is_integer(dtype: ir.DataType | None) -> bool:
    return dtype is not None and (dtype == ir.DataType.BOOL or dtype.is_integer())
