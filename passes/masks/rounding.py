"""The order of additions. The original adds the terms to the scores one by one; a bias is summed up before it is added.

Both round alike where each addend, up to its sign, is of one of these kinds:

    fine      rounds a score no more than it is rounded anyway: numbers up to 256, weights, results of products and
              activations
    huge      0, or so large that a score and a fine addend are lost in it (`huge` below)
    coarse    anything else: numbers such as -1e4 and -1e9, inputs of the model that may hold such numbers

    1 fine addends, in any number                        every sum has the same rounding errors as scores have
    2 one coarse addend and no other but huge ones       score + coarse is the same sum in both orders; beside a huge
      that it is proven to be lost in                    addend both are lost, whichever comes first
    3 huge addends of one sign, beside those of 1 or 2   they do not cancel, so every sum of them is huge; an addend
                                                         that holds huge and fine numbers counts as both
    4 one huge addend of unknown sign, beside fine ones  there is nothing that it could cancel with

A factor after the sums keeps their rounding where it is a power of 2. After a coarse addend only such factors are
accepted. A negative factor between two huge addends changes the sign of the first.

This holds for float32. ONNX Runtime computes 16-bit sums in float32, and so does the operator. Only two kinds of 16-bit
addends count as coarse there: addends beyond the range of float16, and addends in front of a factor that enlarges their
rounding errors. A sum after a coarse addend is declined where ONNX Runtime rounds it to 16 bits (`_is_rounded`).

Everything else is declined. A row that coarse numbers mask fully shows how its scores were rounded. Two huge numbers of
opposite signs swallow the scores one after the other, but their sum may leave the scores as they are.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.budget import spend
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import BINARY_MASKS, NO_EMPTY_ROWS, NO_EMPTY_ROWS_HINT
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    constant,
    inner_values,
    input_of,
    int_attr,
    is_op,
    is_weight,
    source_through,
)
from fa_compiler.passes.layout.contraction import contraction
from fa_compiler.passes.masks.magnitudes import FLOAT16_MAX, HUGE, LOST_SHARE, MAX_FINE
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.score_ops import Add, AlignedTensor, Floor, MaskTerm, Scale, Select, Term
from fa_compiler.passes.ops.movers import MOVES, element_source
from fa_compiler.passes.ops.numbers import LIMITS, overwrites
from fa_compiler.passes.values.facts import Facts

CANCELLED = 2.0**-24
"""The smallest share of a float32 number that a subtraction leaves, unless it leaves 0: the last bit."""
SMALLEST_REST = 2.0**-24
"""The smallest number other than 0 that 1 - x can be for a float32 x."""
BINARY_HINT = f"--assume {BINARY_MASKS} if every mask that is given to the model holds only 0 and 1"
ONE_SIGN_HINT = "let every mask lower the scores: put -inf in place of masked scores, or add a number below 0"
MAX_STEPS = 64
MAX_DEPTH = 32
WHOLE = ("Add", "Sub", "Mul", "Neg", "Abs", "Where", "Cast", "Concat", "Trilu")
ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Neg", "Abs", "Cast", "Where", "Concat", "CumSum", "Max", "Min")
"""Operators that may compute a number from integers that are inputs of the model. Integers that other operators compute
are positions and sizes."""
KEEP_SIGNS = ("Add", "Where", "Concat", "Cast", "Trilu", "Split", "Pad", "ScatterND", "ScatterElements", "Max", "Min")
"""Operators whose huge results have the sign of a huge operand."""
SCORING = ("Add", "Sub", "Mul", "Div", "Where")
"""Operators that scores go through after a term. Their kernels compute 16-bit types in float32."""
NORMALISING = (
    *("LayerNormalization", "RMSNormalization", "BatchNormalization", "GroupNormalization", "InstanceNormalization"),
    *("Conv", "ConvTranspose", "LSTM", "GRU", "RNN", "Exp", "Erf", "Gelu"),
)
"""Operators whose results are activations, like those of products."""


@dataclass(frozen=True)
class Huge:
    """Elements that are 0 or at least `least` in absolute value. `negative` and `positive` say which signs they may
    have."""

    least: float
    negative: bool
    positive: bool

    def turned(self) -> Huge:
        """The elements times -1."""
        return Huge(self.least, self.positive, self.negative)

    def or_else(self, other: Huge) -> Huge:
        """Elements each of which is of this kind or of the other."""
        least = min(self.least, other.least)
        return Huge(least, self.negative or other.negative, self.positive or other.positive)

    def plus(self, other: Huge) -> Huge:
        """The sums of elements of both kinds. Two elements of opposite signs may cancel, altogether or but for a last
        bit."""
        either = self.or_else(other)
        cancels = either.negative and either.positive
        return Huge(either.least * CANCELLED, True, True) if cancels else either


@dataclass(frozen=True)
class Parts:
    """The kinds of numbers in an addend besides fine ones. Nothing is known of the `huge` ones where it may hold
    `coarse` ones."""

    coarse: bool
    huge: Huge | None


COARSE = Parts(True, None)


def assumptions_for_reordering(terms: tuple[Term, ...], values: TermValues, assume: Collection[str]) -> tuple[str, ...]:
    """The fewest of the user's assumptions under which a bias of these terms rounds like the terms one by one.

    Raises Decline with `mask_value` where they are not enough.
    """
    for words in ((), (BINARY_MASKS,), (NO_EMPTY_ROWS,)):
        if set(words) <= set(assume) and reordering_decline(terms, values, words) is None:
            return words
    if (decline := reordering_decline(terms, values, assume)) is not None:
        raise decline
    return BINARY_MASKS, NO_EMPTY_ROWS


def reordering_decline(terms: tuple[Term, ...], values: TermValues, assume: Collection[str]) -> Decline | None:
    """A decline with `mask_value` where a bias of these terms may round differently from the terms one by one, else
    None.

    A selection counts as an addend of its fill. A floor counts as an addend of its number, to which the terms after it
    are added.
    """
    order = _Order(values.viewer.facts, BINARY_MASKS in assume)
    found = [(term, order.huge_term(term)) for term in terms if isinstance(term, Add | Select)]
    plain = {term: order.parts(term) for term, each in found if each is None and isinstance(term, Add)}
    found.extend((term, parts.huge) for term, parts in plain.items())
    turned = _turned(terms)
    huge = {
        term: each.turned() if term in turned else each
        for term, each in found
        if each is not None and math.isfinite(each.least)
    }
    if (culprit := _opposite(terms, huge, turned)) is not None:  # neither 3 nor 4
        reason = "numbers of both signs that swallow the scores may be added up"
        vouched = (*assume, BINARY_MASKS)
        again = None if BINARY_MASKS in assume else reordering_decline(terms, values, vouched)
        helps = BINARY_MASKS not in assume and (again is None or again.reason != reason)
        return Decline(Code.MASK_VALUE, reason, culprit.node, BINARY_HINT if helps else ONE_SIGN_HINT)
    return None if NO_EMPTY_ROWS in assume else _coarse_shows(terms, plain, huge, order, values)


def _opposite(terms: tuple[Term, ...], huge: Mapping[MaskTerm, Huge], turned: Collection[Term]) -> MaskTerm | None:
    """A term whose huge numbers may have another sign than those of another term or of a floor before it; None where
    there is none."""
    low = [term for term, each in huge.items() if each.negative]
    high = [term for term, each in huge.items() if each.positive]
    found = [other for one in low for other in high if one is not other]  # one alone is case 4, of one sign case 3
    for place, term in enumerate(terms):
        if isinstance(term, Floor) and abs(term.floor) >= HUGE:
            others = high if (term.floor < 0) ^ (term in turned) else low
            found.extend(other for other in others if terms.index(other) > place)
    return found[0] if found else None


def _coarse_shows(
    terms: tuple[Term, ...],
    plain: Mapping[Add[AlignedTensor], Parts],
    huge: Mapping[MaskTerm, Huge],
    order: _Order,
    values: TermValues,
) -> Decline | None:
    """A decline where the order of additions may show in rows that coarse addends mask fully, else None."""
    coarse = [term for term, parts in plain.items() if parts.coarse]
    for term in coarse:
        if not values.is_float32(term) and _is_rounded(term.node.outputs[0]):
            return _in_empty_rows("scores are rounded to 16 bits behind a mask or bias with large numbers", term)
    wide = [
        term
        for term in coarse
        if values.is_float32(term)
        or order.is_beyond_float16(term.operand.value)
        or any(abs(each.factor) > 1.0 for each in _factors_behind(terms, term))
    ]
    if not wide:
        return None
    first = wide[0]
    scaled = any(factor.rounds for factor in _factors_behind(terms, first))
    least = min((each.least for each in huge.values()), default=math.inf)
    lost = math.isinf(least) or order.largest(first.operand.value) < least * LOST_SHARE
    if scaled or len(plain) > 1 or not lost:
        reason = (
            "a mask or bias whose numbers may round the scores is combined with other terms, and a row that it masks "
            "everywhere shows which sum is rounded first"
        )
        return _in_empty_rows(reason, first)
    return None


def _factors_behind(terms: tuple[Term, ...], term: Term) -> list[Scale]:
    """The factors after a term, which multiply the scores and their rounding errors."""
    return [each for each in terms[terms.index(term) + 1 :] if isinstance(each, Scale)]


def _in_empty_rows(reason: str, term: Term) -> Decline:
    """The decline for a difference that shows only in fully masked rows."""
    hint = NO_EMPTY_ROWS_HINT
    return Decline(Code.MASK_VALUE, reason, term.node, hint)


def _turned(terms: tuple[Term, ...]) -> set[Term]:
    """The terms whose sign later factors change."""
    found: set[Term] = set()
    negative = False
    for term in reversed(terms):
        if isinstance(term, Scale):
            negative ^= term.factor < 0
        elif negative:
            found.add(term)
    return found


def _is_rounded(value: ir.Value) -> bool:
    """Does ONNX Runtime round a 16-bit sum to 16 bits on its way to the softmax?

    It adds in float32. It has 16-bit kernels only for Max, Min, Clip and the operators that move elements, a Cast to
    the same type included. A single moving operator between others is computed in float32. Two in a row are not, nor is
    a Concat whose first operand comes from a 16-bit kernel, such as an Expand that makes a sink.
    """
    pending = [(value, False)]  # a value, and whether a moving operator makes it
    seen: set[tuple[ir.Value, bool]] = set()
    while pending:
        current, moved = pending.pop()
        if (current, moved) in seen:
            continue
        seen.add((current, moved))
        for reader in current.consumers():
            if is_op(reader, *SCORING):
                pending.append((reader.outputs[0], False))
            copied = is_op(reader, "Cast") and int_attr(reader, "to", 0) in SIXTEEN_BITS
            if not copied and not is_op(reader, *MOVES, "Concat"):
                continue
            moves, first = not is_op(reader, "Identity"), reader.inputs[0]
            if moves and (moved or (first is not current and first is not None and _is_of_16_bits(first))):
                return True
            pending.append((reader.outputs[0], moved or moves))
    return False


def _is_of_16_bits(value: ir.Value) -> bool:
    """Does a 16-bit kernel make the value?"""
    return is_op(source_through(value, "Identity").producer(), *MOVES, *LIMITS, "Concat")


@dataclass(frozen=True)
class _Order:
    """Answers questions about how large addends are. If `binary`, masks that are inputs of the model hold only 0 and
    1."""

    facts: Facts
    binary: bool
    known: dict[ir.Value, Huge | None] = field(default_factory=dict)
    """What `huge` has answered."""

    def huge_term(self, term: MaskTerm) -> Huge | None:
        """The huge numbers of an addend, or of a selection's fill; None where it is not huge throughout."""
        if isinstance(term, Select):
            return Huge(abs(term.fill), term.fill < 0, term.fill > 0) if abs(term.fill) >= HUGE else None
        found = self.huge(term.operand.value)
        return found.turned() if found is not None and term.sign < 0 else found

    def huge(self, value: ir.Value | None, depth: int = 0) -> Huge | None:
        """The sizes of a tensor's elements where all of them are 0 or at least HUGE; else None.

        huge := numbers | moved huge | Neg(huge) | Where(c, huge, huge) | Concat of huge | Trilu(huge)
              | ScatterND or ScatterElements of huge into huge | huge + huge | huge - huge
              | Mul(x, number)     x is whole numbers, or 1 - y in float32, which is 0 or at least 2^-24
        """
        if value is None or depth > MAX_DEPTH:
            return None
        if value not in self.known:
            spend(value.producer())
            self.known[value] = self._huge(value, depth)
        return self.known[value]

    def _huge(self, value: ir.Value, depth: int) -> Huge | None:
        values = self.facts.sets.of(value)
        if values is not None:
            return _of_numbers(values)
        node = None if value.is_graph_input() else value.producer()
        if node is None:
            return None
        found: Huge | None = None
        if places := _passed_on(node):
            parts = [self.huge(node.inputs[place], depth + 1) for place in places]
            known = [part for part in parts if part is not None]
            found = functools.reduce(Huge.or_else, known) if len(known) == len(parts) else None
        elif is_op(node, "Neg"):
            inner = self.huge(node.inputs[0], depth + 1)
            found = None if inner is None else inner.turned()
        elif is_op(node, "Add", "Sub"):
            left, right = (self.huge(each, depth + 1) for each in node.inputs)
            if left is not None and right is not None:
                found = left.plus(right if node.op_type == "Add" else right.turned())
        elif is_op(node, "Mul"):
            found = self._product(node)
        return found if found is not None and found.least >= HUGE else None

    def _product(self, node: ir.Node) -> Huge | None:
        for factor, number in (node.inputs, tuple(reversed(node.inputs))):
            only = None if number is None else self.facts.sets.only(number)
            if factor is None or only is None or not HUGE <= abs(only) < math.inf:
                continue
            rest = self._rest(factor)
            if rest is not None or is_whole(factor, self.facts):
                least = abs(only) * (1.0 if rest is None else SMALLEST_REST)
                sign = only * rest if rest is not None and self.binary else math.nan
                return Huge(least, not sign > 0, not sign < 0)
        return None

    def _rest(self, value: ir.Value) -> int | None:
        """1 for 1 - x and -1 for x - 1, in integers or float32, moved or not; None for anything else."""
        node = element_source(value, "Cast").producer()
        if node is None or not is_op(node, "Sub"):
            return None
        dtype = self.facts.info.dtype(node.outputs[0])
        ones = [None if each is None else self.facts.sets.only(each) for each in node.inputs]
        if 1.0 not in ones or not (dtype == ir.DataType.FLOAT or _is_integer(dtype)):
            return None
        return 1 if ones[0] == 1.0 else -1

    def is_beyond_float16(self, value: ir.Value) -> bool:
        """Is a 16-bit value known to hold numbers that are too large for float16 before they are rounded?"""
        value = element_source(value)
        node, size = value.producer(), self.largest(value)
        if is_op(node, "Cast", "Mul") and node is not None:
            size = math.prod(self.largest(each) for each in node.inputs if each is not None)
        return FLOAT16_MAX < size < math.inf

    def parts(self, term: Add[AlignedTensor]) -> Parts:
        """The kinds of numbers in an addend that is not huge throughout.

        It is coarse if it holds coarse constants, or if it is made of an input of the model whose content is unknown.
        An addend whose sources are too many to follow counts as coarse.
        """
        pending = [(term.operand.value, True)]  # a value, and whether its huge numbers keep their signs
        seen: set[ir.Value] = set()
        found: Huge | None = None
        while pending:
            current, signed = pending.pop()
            if current in seen:
                continue
            seen.add(current)
            spend(current.producer())
            if len(seen) > MAX_STEPS:
                return COARSE
            if (huge := self.huge(current)) is not None:
                either = huge if signed else huge.or_else(huge.turned())
                found = either if found is None else found.or_else(either)
                continue
            if self.largest(current) <= MAX_FINE:
                continue
            if self.facts.sets.of(current) is not None or constant(current) is not None:
                return COARSE
            node, inner = current.producer(), inner_values(current)
            if inner is not None:
                if not inner:
                    return COARSE
                pending.extend((each, signed) for each in inner)
            elif node is None:
                if not is_weight(current) or current.is_graph_input():
                    return COARSE
            elif is_op(node, *MOVES):
                pending.extend((each, signed) for each in node.inputs[:1] if each is not None)
            elif contraction(node, self.facts.info) is None and not is_op(node, *NORMALISING):
                signed = signed and is_op(node, *KEEP_SIGNS)
                pending.extend((each, signed) for each in _combined(node) if self._may_be_large(each))
        return Parts(False, found.turned() if found is not None and term.sign < 0 else found)

    def _may_be_large(self, operand: ir.Value) -> bool:
        """May an operand hold large numbers? Booleans do not, nor do computed integers, which are positions and
        sizes."""
        dtype = self.facts.info.dtype(operand)
        computed = operand.producer() is not None and not is_op(operand.producer(), *MOVES, *ARITHMETIC)
        return dtype is None or not (dtype == ir.DataType.BOOL or (dtype.is_integer() and computed))

    def largest(self, value: ir.Value) -> float:
        """An upper bound of the absolute values of all elements that are not NaN; infinity where none is known."""
        return self.facts.largest(value)


def _passed_on(node: ir.Node) -> Sequence[int]:
    """The indices of the operands whose elements an operator passes on unchanged; empty where it computes new ones."""
    if is_op(node, *MOVES, "Trilu", "Split"):
        return (0,)
    if is_op(node, "Where"):
        return (1, 2)
    if is_op(node, "Concat"):
        return range(len(node.inputs))
    return (0, 2) if is_op(node, "ScatterND", "ScatterElements") and overwrites(node) else ()


def _of_numbers(values: frozenset[float]) -> Huge | None:
    others = [value for value in values if value != 0.0]
    least = min(map(abs, others), default=math.inf)
    return Huge(least, any(x < 0 for x in others), any(x > 0 for x in others)) if least >= HUGE else None


def _combined(node: ir.Node) -> list[ir.Value]:
    """The operands whose numbers an operator passes on or computes with."""
    if node.op_type in ("Cast", "Trilu", "Split"):
        operands = list(node.inputs[:1])
    elif node.op_type == "Where":
        operands = list(node.inputs[1:])
    elif node.op_type == "Pad":
        operands = [node.inputs[0], input_of(node, 2)]
    elif node.op_type in ("ScatterND", "ScatterElements"):
        operands = [node.inputs[0], node.inputs[2]]
    else:
        operands = list(node.inputs)
    return [operand for operand in operands if operand is not None]


def is_whole(value: ir.Value | None, facts: Facts) -> bool:
    """Is every element proven to be a whole number?"""
    pending, seen = [value], set[ir.Value]()
    while pending:
        current = pending.pop()
        if current is None or len(seen) > MAX_STEPS:
            return False
        if current in seen or _is_integer(facts.info.dtype(current)):
            continue
        seen.add(current)
        array = constant(current)
        if array is not None:
            if not bool((np.isfinite(array) & (array == np.round(array))).all()):
                return False
            continue
        node = current.producer()
        if node is None or not is_op(node, *MOVES, *WHOLE):
            return False
        operands = node.inputs[:1] if is_op(node, *MOVES, "Trilu", "Cast") else node.inputs
        pending.extend(operands[1:] if node.op_type == "Where" else operands)
    return True


def _is_integer(dtype: ir.DataType | None) -> bool:
    return dtype is not None and (dtype == ir.DataType.BOOL or dtype.is_integer())
