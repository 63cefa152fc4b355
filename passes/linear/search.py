"""The search for the operands of a linear attention at one random point: all that fit are tried, on
the first token first, and then on all of them. What it finds is a proof at this point; proof.py
repeats it at others.

Grammar of what is found, each value in any arrangement; the code cites the numbers of the cases:

    operands :=
      1     query, key         with as many heads as the value, or a divisor of them
      2   | value
      3   | state              or none, where the first state is 0
      4   | decay              its logarithm or its power, which is never negative, one for each
                               head or for each key dimension, or none
      8   | reset              a decay that is 0 or 1, beside the other one or alone (resets.py)
      5   | factor             beta, or a factor of the value where nothing is corrected, or none
      7   | write, read        of a correction of rank one (corrections.py), where nothing else fits
    scale :=
      6     a single number of the graph, one divided by it, or a product of two
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.linear.arrangement import arranged, has_order, orders
from fa_compiler.passes.linear.candidates import Operand, Sizes, cut, read, rows_of
from fa_compiler.passes.linear.corrections import Correction, Fit, Token
from fa_compiler.passes.linear.evaluation import Evaluation
from fa_compiler.passes.linear.field import PRIME, of_number, reduced, times
from fa_compiler.passes.linear.recurrence import Outcome, Tokens, columns, dot, recurrence
from fa_compiler.passes.linear.resets import Reset, Truth, read_reset
from fa_compiler.passes.linear.tensors import Tensor
from fa_compiler.passes.values.bounds import Bounds

MOST_WORK = 15_000_000
"""So many numbers are computed in one search: one to two seconds, where nothing fits. Files in
which the tokens are as many as the heads or as the dimensions of a head need most of them."""
FIRST_SHARE = 500_000
MOST_CORRECTED = 8_000_000
"""So many more are computed in the search for a correction of rank one, which comes last."""
CORRECTED_SHARE = 4_000_000
EACH = 2_000
"""What a trial costs beside the numbers."""
PASS = 10
"""So many numbers are read while one is computed."""
TOKEN = 200
"""What a token of a recurrence costs."""
FIRST_TOKENS = 4
CUTS = 3
MOST_RESETS = 8
MERGED = 3
"""An output of so many dimensions may have its heads merged with others."""
KEY_SIZES = 4
STATE_ORDERS = "bhkv"


@dataclass(frozen=True)
class State:
    """A value as a state. `order` names its axes: k are the dimensions of a key, v those of a
    value."""

    value: ir.Value
    order: str


@dataclass(frozen=True)
class Found:
    """The operands of a linear attention."""

    query: Operand
    key: Operand
    value: Operand
    state: State | None
    decay: Operand | None
    factor: Operand | None
    is_delta: bool
    scale: float
    residue: int
    """The scale modulo the prime."""
    output: Operand
    """The value that is replaced by the output."""
    correction: Correction | None = None
    reset: Reset | None = None


def tokens_of(found: Found, point: Evaluation, sizes: Sizes) -> Tokens | None:
    """The numbers of the operands; None where one does not fit the sizes."""
    try:
        return _Reader(point, sizes).tokens(found)
    except _UnfitError:
        return None


class _UnfitError(Exception):
    """An operand does not fit the sizes."""


def _fitting(numbers: np.ndarray | None) -> np.ndarray:
    """Numbers that fit. Raises _UnfitError where there are none."""
    if numbers is None:
        raise _UnfitError
    return numbers


@dataclass(frozen=True)
class _Reader:
    """Reads operands at one point, where they have these sizes. Its methods raise _UnfitError."""

    point: Evaluation
    sizes: Sizes

    def tokens(self, found: Found) -> Tokens:
        """The numbers of all operands."""
        query, key, value = map(self.heads, (found.query, found.key, found.value))
        state = if_known(
            lambda given: _fitting(read_state(given, self.point, self.sizes)), found.state
        )
        decay, factor = (if_known(self.rows, operand) for operand in (found.decay, found.factor))
        if found.reset is not None:
            decay = _decayed_twice(decay, _fitting(read_reset(found.reset, self.point, self.sizes)))
        tokens = Tokens(
            query, key, value, state, if_known(_for_dimensions, decay), factor, found.is_delta
        )
        return (
            tokens if found.correction is None else self._with_correction(tokens, found.correction)
        )

    def _with_correction(self, tokens: Tokens, correction: Correction) -> Tokens:
        """The numbers with those of a correction."""
        write, held = self.heads(correction.write), self.heads(correction.read)
        if correction.gate is not None:
            write = times(write, self.heads(correction.gate))
        signed = reduced(-write) if correction.is_subtracted else write
        return replace(
            tokens, write=signed, read=held, reads_before_decay=correction.reads_before_decay
        )

    def heads(self, operand: Operand) -> np.ndarray:
        """An operand of each head, as often as heads of the value share one of its own."""
        return _repeated(_fitting(read(operand, self.point, self.sizes)), self.sizes)

    def rows(self, operand: Operand) -> np.ndarray:
        """A decay or a factor of each token."""
        return _along(_fitting(read(operand, self.point, self.sizes)), self.sizes)


def _for_dimensions(decay: np.ndarray) -> np.ndarray:
    """A decay of each head, or of each key dimension, with an axis for these dimensions."""
    return decay if decay.ndim > 3 else decay[..., None]


def _decayed_twice(decay: np.ndarray | None, kept: np.ndarray) -> np.ndarray:
    """A decay, or none, times what a reset leaves of each state."""
    if decay is None:
        return kept
    return times(decay, kept if kept.ndim == decay.ndim else kept[..., None])


def read_state(state: State, point: Evaluation, sizes: Sizes) -> np.ndarray | None:
    """The numbers of a state, [B,H,Dk,Dv]."""
    numbers, own = point.tensor(state.value).numbers(), sizes.of_state
    if numbers is None or not has_order(numbers.shape, state.order, own):
        return None
    return arranged(numbers, state.order, own)


def _repeated(array: np.ndarray, sizes: Sizes) -> np.ndarray:
    """The heads repeated to those of the value, consecutive ones from one."""
    count = sizes.heads // array.shape[2]
    return array if count == 1 else np.repeat(array, count, 2)


def _along(array: np.ndarray, sizes: Sizes) -> np.ndarray:
    """The same along batch and tokens, where it lacks them."""
    tokens = sizes.tokens if array.shape[1] == 1 else array.shape[1]
    return np.broadcast_to(array, (sizes.batch, tokens, sizes.heads, *array.shape[3:]))


@dataclass
class Search:
    """The search at one point. `values` may be operands, each with the number of products between
    it and the region: queries and keys enter it as they are, values after at most one product."""

    point: Evaluation
    values: Mapping[ir.Value, int]
    work: int = 0
    may_be_corrected: bool = True
    """Is a correction of rank one searched?"""
    truths: Sequence[Truth] = ()
    """By one of these the states are reset, where there are any."""
    limit: int = 0
    left: list[tuple[Operand, Sizes]] = field(default_factory=list)
    """The outputs and sizes that were left at the limit."""
    known: dict[tuple[Operand, Sizes], _Choices | None] = field(default_factory=dict)
    """The choices of outputs and sizes."""

    def find(self, outputs: Iterable[ir.Value]) -> Iterator[tuple[Found, Sizes]]:
        """All that fits one of these outputs. Those whose heads are an axis come first: there is
        less to try. Heads of one value, channels with decays of their own, are tried last, and only
        where a tensor can hold these decays."""
        ordered = sorted(outputs, key=lambda value: len(self.point.tensor(value).shape) <= MERGED)
        trials = dict.fromkeys(
            (hypothesis, replace(sizes, key=key_size))
            for names, values in ((_NAMES, ordered), (_CHANNELS, ordered[::-1]))
            for output in values
            for hypothesis, sizes in self._hypotheses(output, names)
            for key_size in self._key_sizes(sizes)
            if sizes.value > 1 or self._has_decays(replace(sizes, key=key_size))
        )
        pending = list(trials)
        for share in (FIRST_SHARE, MOST_WORK):  # a little of each first, because most are wrong
            self.left = []
            for hypothesis, sizes in pending:
                if self.work > MOST_WORK:
                    break
                self.limit = min(MOST_WORK, self.work + share)
                yield from ((found, sizes) for found in self._of(hypothesis, sizes))
            pending = self.left
        last = self.work + MOST_CORRECTED
        for hypothesis, sizes in trials if self.may_be_corrected else ():
            self.limit = min(last, self.work + CORRECTED_SHARE)
            yield from ((found, sizes) for found in self._corrected(hypothesis, sizes))

    def _hypotheses(
        self, output: ir.Value, named: Mapping[int, Sequence[str]]
    ) -> Iterator[tuple[Operand, Sizes]]:
        """What the dimensions of an output can be."""
        tensor = self.point.tensor(output)
        if not tensor.is_varied:
            return
        shape = tensor.shape
        for names in named.get(len(shape), ()):
            sizes = {"b": 1, "t": 1, "h": 1, "e": 1}
            for letter, size in zip(names, shape, strict=True):
                sizes[letter] *= size
            wanted, possible = "".join(dict.fromkeys(names)), orders(shape, sizes)
            for order in [wanted] if wanted in possible else possible[:1]:
                batch, tokens, heads, value = sizes.values()
                yield Operand(output, order, heads), Sizes(batch, tokens, heads, value, value)

    def _key_sizes(self, sizes: Sizes) -> list[int]:
        lasts = [
            tensor.shape[-1]
            for value, steps in self.values.items()
            if not steps and len((tensor := self.point.tensor(value)).shape) > 2
        ]
        return list(dict.fromkeys([sizes.value, *(size for size in lasts if size > 1)]))[:KEY_SIZES]

    def _has_decays(self, sizes: Sizes) -> bool:
        """Is there a tensor that can hold the logarithm of a decay for each key dimension?"""
        count = sizes.batch * sizes.tokens * sizes.heads * sizes.key
        exponents = (value for value in self.values if value in self.point.exponents)
        return sizes.key > 1 and any(
            math.prod(self.point.tensor(value).shape) == count for value in exponents
        )

    def _operands(
        self, sizes: Sizes, letters: str, heads: Sequence[int], furthest: int = 0
    ) -> list[tuple[Operand, np.ndarray]]:
        """The values with these axes, each content once, by the value that stands first in the
        graph. Those that stand first come first. There are at most so many products between them
        and the region."""
        found = dict[bytes, tuple[Operand, np.ndarray]]()
        near = (value for value, steps in self.values.items() if steps <= furthest)
        wide = {"d": sizes.key, "e": sizes.value}[letters[-1]]
        for (value, shape), count in product(self._varied(near), heads):
            own = {"b": sizes.batch, "t": sizes.tokens, "h": count, letters[-1]: wide}
            for order in orders(shape, own):
                operand = Operand(value, order, count)
                array = self._read(operand, sizes)
                if array is not None:
                    self.work += array.size // PASS
                    found[array.tobytes()] = (operand, array)
        return list(found.values())[::-1]

    def _varied(self, values: Iterable[ir.Value]) -> list[tuple[ir.Value, tuple[int, ...]]]:
        """The values whose numbers differ from run to run, with their shapes."""
        tensors = [(value, self.point.tensor(value)) for value in values]
        return [(value, tensor.shape) for value, tensor in tensors if tensor.is_varied]

    def _narrow(self, sizes: Sizes, logarithmic: bool) -> list[tuple[Operand, np.ndarray]]:
        """The values with one number for each token and head; as decays also with one for each key
        dimension."""
        found = dict[bytes, tuple[Operand, np.ndarray]]()
        for value in self.values:
            if (
                logarithmic
                and value not in self.point.exponents
                and value not in self.point.powers.tables
            ):
                continue
            for operand in self._narrow_forms(value, sizes, logarithmic):
                shown = self._read(operand, sizes)
                if shown is not None and not (shown == 1).all():
                    array = _along(shown, sizes)
                    found[array.tobytes()] = (operand, array)
        return list(found.values())

    def _narrow_forms(self, value: ir.Value, sizes: Sizes, logarithmic: bool) -> Iterator[Operand]:
        tensor = self.point.tensor(value)
        shape, numbers = tensor.shape, tensor.numbers()
        if numbers is None or not self._may_decay(value, tensor, logarithmic):
            return
        along = (
            [(True, True)]
            if tensor.exact is None
            else [(True, True), (False, True), (False, False)]
        )
        for count in range(min(CUTS, len(shape))):
            if count and shape[-count] == 1:
                break
            plain = [Operand(value, "", sizes.heads, count, *has, logarithmic) for has in along]
            forms = [
                form
                for each in plain
                for form in _in_orders(each, shape[: len(shape) - count], sizes)
            ]
            if forms and count and self._cut(numbers, count) is None:
                break
            yield from forms

    def _cut(self, numbers: np.ndarray, count: int) -> np.ndarray | None:
        same = cut(numbers, count)
        if same is not None:  # the others mostly differ in the first place
            self.work += numbers.size // PASS
        return same

    def _read(self, operand: Operand, sizes: Sizes) -> np.ndarray | None:
        """The first two tokens and the last one. Of operands that differ in other tokens only, one
        is tried."""
        array = read(operand, self.point, sizes)
        if array is None:
            return None
        return _repeated(array[:, _shown(array.shape[1])], sizes)

    def _may_decay(self, value: ir.Value, tensor: Tensor, logarithmic: bool) -> bool:
        """Can a value be a decay? Of numbers that are the same in every run, those of tables are
        logarithms."""
        array = tensor.exact
        if array is None:
            return True
        if value in self.point.powers.tables:
            return logarithmic
        return not logarithmic and array.size > 1 and bool((array > 0).all() and (array <= 1).all())

    def _states(self, sizes: Sizes) -> list[tuple[State | None, np.ndarray | None]]:
        """None, which costs the least to try, and the values that can be the first state."""
        found = dict[bytes, tuple[State | None, np.ndarray | None]]()
        for value, shape in self._varied(self.values):
            for order in orders(shape, sizes.of_state):
                state = State(value, order)
                array = read_state(state, self.point, sizes)
                if array is not None and array.any():  # zeros are no state
                    found[array.tobytes()] = (state, array)
        return [(None, None), *[*found.values()][::-1]]

    def _of(self, output: Operand, sizes: Sizes) -> Iterator[Found]:
        """What fits an output of these sizes."""
        self.work += EACH * len(self.values)
        if (output, sizes) not in self.known:
            self.known[output, sizes] = self._choices(output, sizes)
        choices = self.known[output, sizes]
        if choices is None:
            return
        firsts = choices.firsts
        if self.work + firsts.size > self.limit:
            self.left.append((output, sizes))
            return
        self.work += firsts.size
        without_state = firsts.fitting(None, self.scales)
        states = self._states(sizes)
        # 3, 4 and 8: or none
        for (state, first), (decay, reset, power) in product(states, choices.decays):
            # what 0 decays by does not show, but for NaN and infinity
            if first is None and sizes.tokens == 1:
                continue
            fits = without_state
            if first is not None:
                self.work += firsts.size
                fits = firsts.fitting(_decayed(_few(columns(first)), power, 0), self.scales)
            if self.work > self.limit:
                self.left.append((output, sizes))
                return
            for found in choices.found(fits, self.scales, output):
                whole = replace(found, state=state, decay=decay, reset=reset)
                if self._checked(whole, choices.goal, sizes):
                    yield whole

    def _corrected(self, output: Operand, sizes: Sizes) -> Iterator[Found]:
        """What fits an output of these sizes with a correction of rank one."""  # 7
        choices = (
            self.known.get((output, sizes)) if sizes.value > 1 and self.work < self.limit else None
        )
        if choices is None:
            return
        own, starts = [*self._few_scales], self._starts(choices, sizes)
        # the product of a row with the first state is near
        reads = self._operands(sizes, "bthd", _key_heads(sizes), 1)
        for (state, start, place), (decay, reset, power) in product(starts, choices.decays):
            token = choices.token(place, start, power, [array for _, array in reads])
            self.work += EACH + token.work(len(own))
            if self.work > self.limit:
                return
            for fit in token.fitting(own):
                found = choices.with_correction(
                    fit, [operand for operand, _ in reads], self.scales, output
                )
                whole = replace(found, state=state, decay=decay, reset=reset)
                if self._checked(whole, choices.goal, sizes):
                    yield whole

    def _starts(
        self, choices: _Choices, sizes: Sizes
    ) -> list[tuple[State | None, np.ndarray, int]]:
        """The states of a few heads in front of a token that shows a correction, and the place of
        this token: the first states, and those that the first token writes where there is none."""
        found = [
            (state, _few(columns(first)), 0)
            for state, first in self._states(sizes)
            if first is not None
        ]
        if sizes.tokens > 1:
            fits = choices.firsts.fitting(None, self.scales)
            written = dict.fromkeys((fit.key, fit.factor, fit.value) for fit in fits)
            found += [(None, choices.firsts.written(*places), 1) for places in written]
        return found

    def _choices(self, output: Operand, sizes: Sizes) -> _Choices | None:
        """What the operands of an output of these sizes can be; None where some have no choice."""
        wanted = read(output, self.point, sizes)
        keys = self._operands(sizes, "bthd", _key_heads(sizes))  # 1: queries, too
        values = self._operands(sizes, "bthe", [sizes.heads], 1)  # 2: of all heads
        if wanted is None or len(keys) < 2 or not values:
            return None
        goal = columns(wanted)
        direct = self._narrow(sizes, False)
        factors: list[tuple[Operand | None, np.ndarray]] = [(None, np.ones_like(goal))]  # 5: none
        factors += [
            (each, array)
            for each, array in direct
            if array.ndim == 3 and each.has_tokens and each.has_batch
        ]
        powers = [(each, array) for each, array in direct if self._has_logarithm(each.value)]
        decays = [*self._narrow(sizes, True), *powers, (None, None)]
        return _Choices(goal, keys, values, factors, [*self._with_resets(decays, sizes)])

    def _with_resets(
        self, decays: Sequence[tuple[Operand | None, np.ndarray | None]], sizes: Sizes
    ) -> Iterator[tuple[Operand | None, Reset | None, np.ndarray | None]]:
        """Each decay, beside each reset where there are truth values."""
        if not self.truths:
            yield from ((decay, None, power) for decay, power in decays)
        for (reset, kept), (decay, power) in product(self._resets(sizes), decays):
            yield decay, reset, _decayed_twice(power, kept)

    def _resets(self, sizes: Sizes) -> list[tuple[Reset, np.ndarray]]:
        """What the truth values can leave of each state, each content once."""
        found = dict[bytes, tuple[Reset, np.ndarray]]()
        for truth, (has_batch, heads) in product(
            self.truths, ((True, 1), (True, sizes.heads), (False, 1))
        ):
            # of one token the state is another one
            if sizes.tokens == 1 or (tensor := truth.at(self.point)) is None:
                continue
            operand = Operand(truth.source, "", heads, has_batch=has_batch)
            for order, is_kept in product(
                orders(tensor.shape, rows_of(operand, sizes)), (False, True)
            ):
                reset = Reset(truth, replace(operand, order=order), is_kept, tensor.shape)
                kept = read_reset(reset, self.point, sizes)
                if kept is not None:
                    shown = kept[:, _shown(sizes.tokens)]
                    self.work += shown.size // PASS
                    found.setdefault(shown.tobytes(), (reset, shown))
        return [*found.values()][:MOST_RESETS]

    def _has_logarithm(self, value: ir.Value) -> bool:
        """Is no element negative in any run? The operator takes the logarithm of a decay."""
        interval = self.bounds.unless_nan(value)
        return interval is not None and interval[0] >= 0

    @cached_property
    def bounds(self) -> Bounds:
        """The intervals of values."""
        return Bounds(self.point.info)

    @cached_property
    def _few_scales(self) -> dict[int, float]:
        """Single numbers that can be the scale, by what they are modulo the prime."""
        residues = {number: of_number(number) for number in sorted(self.point.scalars)}
        found = {1: 1.0}
        for number, residue in residues.items():
            found.setdefault(residue, number)
        for number, residue in residues.items():
            found.setdefault(pow(residue, -1, PRIME), 1.0 / number)
        return found

    @cached_property
    def scales(self) -> dict[int, float]:
        """The numbers that can be the scale, by what they are modulo the prime."""
        numbers = sorted(self.point.scalars)
        residues = {number: of_number(number) for number in numbers}
        found = dict(self._few_scales)  # 6: the scale
        for one, other in product(numbers, numbers):
            if one <= other:
                found.setdefault(residues[one] * residues[other] % PRIME, one * other)
        return found

    def _checked(self, found: Found, goal: np.ndarray, sizes: Sizes) -> bool:
        """Does the recurrence give the output? Most that do not differ in the first tokens."""
        tokens = tokens_of(found, self.point, sizes)
        for length in (min(FIRST_TOKENS, sizes.tokens), sizes.tokens):
            self.work += length * TOKEN
            if (
                tokens is None
                or not (scaled(recurrence(tokens, length), found) == goal[:, :length]).all()
            ):
                return False
        return True


@dataclass(frozen=True)
class _Fit:
    """What fits the first token, by the places of the operands."""

    is_delta: bool
    query: int
    key: int
    factor: int
    value: int
    ratio: int
    """The scale."""


@dataclass(frozen=True)
class _Choices:
    """The values that can be each operand, with their numbers, and a random sum of the columns of
    the output."""

    goal: np.ndarray
    keys: Sequence[tuple[Operand, np.ndarray]]
    values: Sequence[tuple[Operand, np.ndarray]]
    factors: Sequence[tuple[Operand | None, np.ndarray]]
    decays: Sequence[tuple[Operand | None, Reset | None, np.ndarray | None]]

    @cached_property
    def firsts(self) -> _Firsts:
        """The first token of a few heads."""
        return self._at(0)

    @cached_property
    def seconds(self) -> _Firsts:
        """The second one, where there is one."""
        return self._at(1)

    def _at(self, place: int) -> _Firsts:
        return _Firsts(
            _few(self.goal[:, place]),
            np.stack([_few(array[:, place]) for _, array in self.keys]),
            np.stack([_few(columns(array[:, place])) for _, array in self.values]),
            np.stack([_few(array[:, place]) for _, array in self.factors]),
        )

    def token(
        self, place: int, before: np.ndarray, power: np.ndarray | None, reads: Sequence[np.ndarray]
    ) -> Token:
        """A token of a few heads, with the state before it, the powers of all decays, and rows that
        may read it."""
        first = self.seconds if place else self.firsts
        rows = np.stack([_few(array[:, place]) for array in reads])
        return Token(
            first.goal, first.keys, first.values, rows, before, _decayed(before, power, place)
        )

    def with_correction(
        self, fit: Fit, reads: Sequence[Operand], scales: Mapping[int, float], output: Operand
    ) -> Found:
        """The operands of what fits a token with a correction that one of `reads` reads."""
        query, key, value = (
            self.keys[fit.query][0],
            self.keys[fit.key][0],
            self.values[fit.value][0],
        )
        held, own = reads[fit.read], len(self.keys)
        write, gate = (
            (self.keys[fit.write][0], None) if fit.write < own else (held, reads[fit.write - own])
        )
        correction = Correction(write, gate, held, fit.is_subtracted, fit.reads_before_decay)
        return Found(
            query,
            key,
            value,
            None,
            None,
            None,
            False,
            scales[fit.ratio],
            fit.ratio,
            output,
            correction,
        )

    def found(
        self, fits: Sequence[_Fit], scales: Mapping[int, float], output: Operand
    ) -> Iterator[Found]:
        """The operands of what fits the first token."""
        for fit in fits:
            query, key, value = (
                self.keys[fit.query][0],
                self.keys[fit.key][0],
                self.values[fit.value][0],
            )
            factor = self.factors[fit.factor][0]
            yield Found(
                query,
                key,
                value,
                None,
                None,
                factor,
                fit.is_delta,
                scales[fit.ratio],
                fit.ratio,
                output,
            )


@dataclass(frozen=True)
class _Firsts:
    """The first token of a few heads: the output [B], and the keys and queries [l,B,D], values
    [n,B] and factors [m,B] that it may be made of."""

    goal: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    factors: np.ndarray

    @property
    def size(self) -> int:
        """The numbers that a trial computes, and its cost beside them."""
        return EACH + len(self.keys) ** 2 * len(self.values) * len(self.factors) * self.goal.size

    @cached_property
    def _attended(self) -> np.ndarray:
        """The product of each query and key, [l,l,1,1,B]."""
        return dot(self.keys[:, None], self.keys[None])[:, :, None, None]

    def written(self, key: int, factor: int, value: int) -> np.ndarray:
        """What these operands write into a state of 0, [B,D]."""
        return times(self.keys[key], times(self.factors[factor], self.values[value])[..., None])

    def fitting(self, start: np.ndarray | None, scales: Mapping[int, float]) -> list[_Fit]:
        """What makes the output a scale times what the recurrence gives, [query, key, factor,
        value, B]. Of outputs of one number everything does so by some number, and few by a
        scale."""
        factors, goal = self.factors[None, None, :, None], self.goal
        fits: list[_Fit] = []
        for is_delta in (False, True):
            written = self.values[None, None, None]
            if start is not None and is_delta:
                written = reduced(written - dot(self.keys, start)[None, :, None, None])
            elif is_delta:
                continue  # without a state the first token is the same
            got = times(times(factors, written), self._attended)
            if start is not None:
                got = reduced(got + dot(self.keys, start)[:, None, None, None])
            same = (times(got, goal[:1]) == times(got[..., :1], goal)).all(axis=-1) & (
                got[..., 0] != 0
            )
            places, known = np.argwhere(same), np.array([*scales], np.int64)
            are_scales = times(got[..., 0][same][:, None], known) == goal[0]
            are_fits = are_scales.any(axis=1) & (places[:, 0] != places[:, 1])
            ratios = known[are_scales[are_fits].argmax(axis=1)] if len(known) else known
            for (query, key, factor, value), ratio in zip(places[are_fits], ratios, strict=True):
                fits.append(
                    _Fit(is_delta, int(query), int(key), int(factor), int(value), int(ratio))
                )
        if start is None:
            fits += [replace(fit, is_delta=True) for fit in fits]
        return sorted(fits, key=lambda fit: fit.factor)


def _key_heads(sizes: Sizes) -> list[int]:
    """How many heads queries and keys may have. Channels share them."""
    most = sizes.heads if sizes.value > 1 else 1
    return [count for count in range(1, most + 1) if sizes.heads % count == 0]


def scaled(outcome: Outcome, found: Found) -> np.ndarray:
    """The output times the scale."""
    return times(outcome.output, np.int64(found.residue))


def _in_orders(operand: Operand, shape: Sequence[int], sizes: Sizes) -> Iterator[Operand]:
    """An operand of one number for each head, or also for each key dimension, in the orders that
    its shape allows."""
    own = rows_of(operand, sizes)
    found = orders(shape, own)
    if sizes.key > 1 and operand.cut == 0:
        found += orders(shape, own | {"d": sizes.key})
    yield from (replace(operand, order=order) for order in found)


def _shown(count: int) -> list[int]:
    """The first two of so many tokens and the last one."""
    return sorted({0, min(1, count - 1), count - 1})


def _few(array: np.ndarray) -> np.ndarray:
    """A few heads of an array [B,H,...], in one dimension: the first two and the last."""
    flat = array.reshape(-1, *array.shape[2:])
    return flat[sorted({0, min(1, len(flat) - 1), len(flat) - 1})]


def _decayed(state: np.ndarray, power: np.ndarray | None, place: int) -> np.ndarray:
    """The state of a few heads after the decay of a token: a number for each head, or for each key
    dimension."""
    if power is None:
        return state
    decay = _few(power[:, place])
    return times(state, decay if decay.ndim == state.ndim else decay[..., None])


_NAMES = {
    3: ("bhe", "the", "hte", "bte"),
    4: ("bthe", "bhte", "tbhe"),
    5: ("bhtte", "btthe"),
}
"""What the dimensions of an output of this rank can be."""
_CHANNELS = {3: ("bht", "bth")}
"""The same for heads of one value."""
