"""The proof that a region computes a linear attention, and for which lengths.

A region is evaluated at random points: sizes of one run, and random numbers modulo a prime for what
enters it (evaluation.py). At the first point the operands are searched for (search.py). At the
others the same operands have to give the same outputs. What is compared are polynomials, divided by
others, of the numbers that enter, and of the exponentials of decays; where two of them differ, they
are equal at a random point with a chance of their degree divided by 2^31. `POINTS` points are
looked at.

Where the number of tokens is open, lengths.py says which of them are looked at. Of a loop over the
tokens, or over the batch, not all iterations can be. So it is also looked at with random numbers in
the place of those that it carries into the first iteration. Where it gives the recurrence from this
state on, one iteration is one step of the recurrence, whatever was before it, and so are all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, count
from types import MappingProxyType
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.ir.nodes import (
    all_known,
    all_nodes,
    certain,
    first,
    inputs_of,
    is_op,
    makers_of,
    producer,
    reached,
    subgraphs,
    values_read,
    without_none,
)
from fa_compiler.passes.linear.arrangement import orders
from fa_compiler.passes.linear.candidates import (
    ARITHMETIC,
    MOVERS,
    Operand,
    Sizes,
    downstream,
    read,
    upstream,
)
from fa_compiler.passes.linear.evaluation import Evaluation, with_exponents
from fa_compiler.passes.linear.lengths import AROUND, SMALL, Lengths, Verdict, right_lengths
from fa_compiler.passes.linear.meetings import ENDLESS, LEAST, UNNOTED, Meetings, Numbers, names_of
from fa_compiler.passes.linear.powers import Powers
from fa_compiler.passes.linear.recurrence import Outcome, columns, recurrence
from fa_compiler.passes.linear.regions import Region
from fa_compiler.passes.linear.resets import Truth, truths_of
from fa_compiler.passes.linear.search import (
    MOST_WORK,
    Found,
    Search,
    State,
    read_state,
    scaled,
    tokens_of,
)
from fa_compiler.passes.linear.tensors import FailedError, TooLongError
from fa_compiler.passes.linear.walk import Walk
from fa_compiler.passes.values.shapes import ShapeInfo

K = TypeVar("K")
N = TypeVar("N")
T = TypeVar("T")

POINTS = 3
REFUSED = 10_000
"""What a candidate costs that is refused, in the unit of `Search.work`."""
BATCHES = (3, 2, 5, 1, 4)
"""The sizes of an open batch at the first points. At the others it is 2."""
APART = len(BATCHES)
"""The number of a point behind these."""
MOST_ELEMENTS = 1 << 22
"""Where the number of tokens is open, no length is looked at for which a tensor has more
elements."""
MOST_SEARCHES = 5
"""So many first lengths are searched. Files that are right for long sequences only fail at the
short ones."""
CORRECTED_SEARCHES = 2
"""At so many first lengths a correction of rank one is searched, too. Loops are right at every
length, but two sizes may be the same at one."""
GROWTH = 8
"""Lengths beyond the first one may make tensors so many times as large as there."""
AHEAD = 16
"""Where a tensor is expected to have so many times more elements than it may, the length is not
tried."""
PADDED = 64
"""A tensor that does not grow with short sequences may be padded to a chunk of so many tokens or
more."""
FIRST_LENGTHS = (3, 5, 11, 23, 37, 75, 101, 151, 128, 192, 256, 300, 600, 1200)


@dataclass(frozen=True)
class LinearMatch:
    """A region that computes a linear attention."""

    region: Region
    found: Found
    sizes: Sizes
    """At the first point. Batch and tokens may differ in other runs."""
    outputs: tuple[Operand, ...]
    """The values that hold the output."""
    states: tuple[State, ...]
    """The values that hold the last state."""
    shapes: dict[ir.Value, tuple[int, ...]]
    """The shapes of the operands and outputs at the first point."""
    is_open: Mapping[str, bool]
    """Do batch (b) and tokens (t) differ from run to run?"""
    chosen: ir.Value | None = None
    """What is chosen by truth values between the operands and the outputs; None where nothing
    is."""
    lengths: Lengths = field(default_factory=Lengths)
    """The numbers of tokens for which the region is right, of those that there are."""

    @property
    def has_decay(self) -> bool:
        """Do the states decay? One that is reset does."""
        return self.found.decay is not None or self.found.reset is not None

    @property
    def rule(self) -> str:
        """The update rule of the operator."""
        has_decay, correction = self.has_decay, self.found.correction
        if correction is not None:
            return "dplr" if correction.reads_before_decay else "general"
        if self.found.is_delta:
            return "gated_delta" if has_decay else "delta"
        return "gated" if has_decay else "linear"

    @property
    def decay_width(self) -> int | None:
        """How many numbers decay the states of a token; None without a decay."""
        if not self.has_decay:
            return None
        is_wide = self.found.decay is not None and "d" in self.found.decay.order
        return self.sizes.heads * (self.sizes.key if is_wide else 1)


@dataclass(frozen=True)
class InputSizes:
    """The names of the sizes of a graph's inputs: those of first axes, and those of others."""

    first: frozenset[str]
    others: frozenset[str]

    @staticmethod
    def of(graph: ir.Graph, info: ShapeInfo) -> InputSizes:
        """Those of a graph."""
        first, others = set[str](), set[str]()
        for value in graph.inputs:
            for axis, dim in enumerate(info.sizes(value)):
                (others if axis else first).update(names_of(dim))
        return InputSizes(frozenset(first), frozenset(others))


@dataclass(frozen=True)
class Prover:
    """Proves one region."""

    region: Region
    info: ShapeInfo
    inputs: InputSizes
    """Of the graph of the region."""
    powers: Powers = field(default_factory=Powers)
    work: list[int] = field(default_factory=lambda: [0, 0])
    """What the searches at all points have cost: those without resets, and those with them."""
    unknown: frozenset[ir.Value] = frozenset()
    """Constants that may hold any numbers."""
    batch: Sequence[str] = ()
    """The names of sizes that differ from run to run and are the batch."""
    tokens: Sequence[str] = ()
    """Those that are not."""

    def prove(self) -> LinearMatch | None:
        """The linear attention that the region computes; None where it is none."""
        provers = (
            replace(self, batch=batch, tokens=tokens, work=[0, 0])
            for batch, tokens in self.open_sizes()
        )
        return first(prover._proven() for prover in provers)

    def _proven(self) -> LinearMatch | None:
        """The linear attention, where the open sizes are these."""
        lengths: Sequence[int] = FIRST_LENGTHS if self.tokens else (0,)
        if self._entering.isdisjoint(self.tokens):  # no size of what is read depends on them
            lengths = lengths[:1]
        looked_at = set[tuple[tuple[int, ...], ...]]()
        for length in lengths:
            try:
                point = self._point(length, 0, MOST_ELEMENTS if self.tokens else 0)
                shapes = tuple(point.shape(value) for value in (*self._downstream, *self._upstream))
                if shapes in looked_at:
                    continue
                if len(looked_at) == MOST_SEARCHES:
                    return None
                looked_at.add(shapes)
                match = self._at(point, len(looked_at) <= CORRECTED_SEARCHES)
            except TooLongError:
                return None
            except FailedError:
                continue
            if match is not None:
                return self._confirmed(match, length)
            if self.work[0] > MOST_WORK:  # nothing more is searched
                return None
        return None

    @cached_property
    def _exponents(self) -> set[ir.Value]:
        return with_exponents(self.region.nodes)

    def open_sizes(self) -> list[tuple[list[str], list[str]]]:
        """What the sizes that differ from run to run may be, by their names: the batch, and the
        others."""
        named = self._named(value for node in self.region.nodes for value in node.inputs)
        given = self.inputs.first | self.inputs.others
        batch, every = self.inputs.first - self.inputs.others, given | named
        choices = [batch]
        if named & given <= batch:
            choices.append(frozenset())  # the first axis may be that of the tokens
        return [(sorted(choice), sorted(every - choice)) for choice in choices]

    @cached_property
    def _entering(self) -> set[str]:
        """The names in the sizes of the graph's inputs, and of what the region reads."""
        read = (
            value for node in self.region.nodes for value in node.inputs if not self._makes(value)
        )
        return set(self.inputs.first | self.inputs.others) | self._named(read)

    def _makes(self, value: ir.Value | None) -> bool:
        """Does a node of the region make a value?"""
        return (maker := producer(value)) is not None and maker in self.region.members

    def _named(self, values: Iterable[ir.Value | None]) -> set[str]:
        """The names in the sizes of these values."""
        dims = {dim for value in dict.fromkeys(values) for dim in self.info.sizes(value)}
        return {name for dim in dims for name in names_of(dim)}

    def _point(
        self,
        length: int,
        number: int,
        most: int = 0,
        meetings: Meetings = UNNOTED,
        apart: Mapping[str, int] = MappingProxyType({}),
        freed: frozenset[ir.Node] = frozenset(),
    ) -> Evaluation:
        """The region at one point: names in `apart` have sizes of their own, and the loops in
        `freed` carry random numbers."""
        sizes = (
            dict.fromkeys(self.batch, batch_of(number))
            | dict.fromkeys(self.tokens, length)
            | {**apart}
        )
        seed, tables = 0x1A2B3C + 0x9E37 * number, len(self.powers.tables)
        point = Evaluation(self.info, sizes, seed, self._exponents, self.powers, most, self.unknown)
        point.meetings, point.freed = meetings, freed
        point.known.update(self.powers.decays(seed))
        sources = [truth.source for truth in self._truths]
        point.run(self.region.nodes, [*self._upstream, *self._downstream, *sources])
        if len(self.powers.tables) == tables:
            return point
        # what was read before its table was met
        return self._point(length, number, most, meetings, apart, freed)

    @cached_property
    def _upstream(self) -> dict[ir.Value, int]:
        return upstream(self.region, self.info)

    @cached_property
    def _truths(self) -> list[Truth]:
        return truths_of(self.region, self.info)

    @cached_property
    def _downstream(self) -> list[ir.Value]:
        return downstream(self.region)

    def _at(self, point: Evaluation, may_be_corrected: bool) -> LinearMatch | None:
        """What is found at one point; with a correction of rank one only if it may have one. States
        that are reset come last."""
        match = self._with_truths(point, may_be_corrected, ())
        if match is None and self._truths:
            return self._with_truths(point, may_be_corrected, self._truths)
        return match

    def _with_truths(
        self, point: Evaluation, may_be_corrected: bool, truths: Sequence[Truth]
    ) -> LinearMatch | None:
        """What is found at one point, where the states are reset by one of these truth values, if
        there are any."""
        values = {
            value: steps for value, steps in self._upstream.items() if _is_tensor(value, point)
        }
        values |= dict.fromkeys(self.powers.tables, 1)
        results = [value for value in self._downstream if _is_tensor(value, point)]
        search = Search(point, values, self.work[bool(truths)], may_be_corrected, truths)
        for found, sizes in search.find(results):
            match = self._match(found, sizes, point)
            if match is not None and (truths or match.chosen is None):
                return match
            search.work += REFUSED
        self.work[bool(truths)] = search.work
        return None

    def _match(self, found: Found, sizes: Sizes, point: Evaluation) -> LinearMatch | None:
        """What was found, with the outputs and states that it explains; None where an exit is left,
        or where an open batch is not the one of this point."""
        outcome = certain(_outcome(found, point, sizes))  # the search has computed it
        covered = self._covered(found, point, sizes, outcome)
        if covered is None:
            return None
        outputs, states = covered
        correction = () if found.correction is None else found.correction.operands
        single = (found.query, found.key, found.value, found.state, found.decay, found.factor)
        operands: list[Operand | State] = without_none((*single, *correction, *outputs, *states))
        shapes = {operand.value: point.shape(operand.value) for operand in operands}
        is_open = {
            "b": self._differs(found.output.value, self.batch, self.tokens),
            "t": self._differs(found.output.value, self.tokens, self.batch),
        }
        if is_open["b"] and sizes.batch != BATCHES[0]:
            return None
        results = [*(output.value for output in outputs), *(state.value for state in states)]
        given = {*shapes} - {*results}
        if found.reset is not None:
            given.add(found.reset.truth.source)
        chosen = self._chosen(results, given, point)
        return LinearMatch(self.region, found, sizes, outputs, states, shapes, is_open, chosen)

    def _chosen(
        self, results: Iterable[ir.Value], operands: Collection[ir.Value], point: Evaluation
    ) -> ir.Value | None:
        """What is chosen by truth values between the operands and the results; None where nothing
        is."""

        def sources(value: ir.Value) -> list[ir.Value]:
            return (
                []
                if value in operands or not self._makes(value)
                else values_read(certain(value.producer()))
            )

        if not point.choices:
            return None
        makers = makers_of(value for value in reached(results, sources) if value not in operands)
        inner = (
            node for maker in makers for graph in subgraphs(maker) for node in all_nodes(graph)
        )
        return next((node.outputs[0] for node in (*makers, *inner) if node in point.choices), None)

    def _differs(self, value: ir.Value, names: Sequence[str], others: Sequence[str]) -> bool:
        """Does the number of elements differ with the sizes of these names, as far as that is
        known?"""
        dims = self.info.shape(value)
        if dims is None or not names or not all(dim.is_known for dim in dims):
            return bool(names)
        named = (dict.fromkeys(others, 5) | dict.fromkeys(names, size) for size in (7, 1003))
        few, many = ([dim.evaluate(sizes) for dim in dims] for sizes in named)
        return few != many or None in few

    def _covered(
        self, found: Found, point: Evaluation, sizes: Sizes, outcome: Outcome
    ) -> tuple[tuple[Operand, ...], tuple[State, ...]] | None:
        """The values that hold the output and the last state, from which all exits can be computed
        without the region's products; None where an exit cannot."""
        explained = _Explained(point, sizes, scaled(outcome, found), outcome.state)
        pending, seen = [*self.region.exits], set[ir.Value]()
        while pending:
            value = pending.pop()
            if value in seen or not self.region.depth(value):
                continue
            seen.add(value)
            if explained.includes(value):
                continue
            node = value.producer()
            if not is_op(node, *MOVERS, *ARITHMETIC, "Add", "Sub", "Where", "Concat"):
                return None
            pending.extend(inputs_of(node))
        return tuple(explained.outputs), tuple(explained.states)

    def _confirmed(self, match: LinearMatch, length: int) -> LinearMatch | None:
        """The match after it was proven at other points; with its lengths, where the number of
        tokens is open."""
        looks, is_open = _Looks(self, match), match.is_open["b"]
        if not all(
            looks.verdict(length, number) is Verdict.RIGHT
            for number in range(1, APART if is_open else POINTS)
        ):
            return None
        if is_open and not self._is_even(
            looks, self.batch, dict.fromkeys(self.tokens, length), BATCHES
        ):
            return None
        if not all(
            self._holds_apart(name, match, length, looks.names) for name in sorted(looks.names)
        ):
            return None
        if not match.is_open["t"]:
            return match if looks.holds_from_any_state(length) else None
        walk = Walk(
            self.region.nodes,
            self.info,
            self.tokens,
            dict.fromkeys(self.batch, batch_of(APART)),
            self.unknown,
        )
        lengths = right_lengths(length, looks.next, lambda: self._numbers(looks, walk))
        if lengths is None or not looks.holds_from_any_state(length):
            return None
        return replace(match, lengths=lengths)

    def _numbers(self, looks: _Looks, walk: Walk, names: Sequence[str] = ()) -> Numbers:
        """The numbers that sizes meet at some points, and where what is computed of them turns.
        They are unclear where a small number is not followed."""
        found, hides = looks.meetings.numbers(names), looks.meetings.hides(self.region.members)
        turns = walk.turns if walk.followed >= {*looks.meetings.small()} else None
        known = all_known((looks.firsts, turns))
        if known is None or hides:
            return replace(found, is_unclear=True)
        firsts, turned = known
        return replace(
            found, turns=turned, added=found.added | firsts, begun=firsts if looks.begun else set()
        )

    def _is_even(
        self,
        looks: _Looks,
        names: Sequence[str],
        sizes: Mapping[str, int],
        looked_at: Collection[int],
    ) -> bool:
        """Is nothing computed of sizes of these names, the others being as they are in `sizes`,
        that turns beyond the sizes that were looked at, and do they meet no number?"""
        found = self._numbers(
            looks, Walk(self.region.nodes, self.info, names, sizes, self.unknown), names
        )
        return not found.is_unclear and {
            edge + step for edge in found.edges for step in AROUND
        } <= {0, *looked_at}

    def _holds_apart(self, name: str, match: LinearMatch, length: int, names: Set[str]) -> bool:
        """Is the region right where one size differs from those that were the same at all points,
        the batch or the tokens? Then it fails, or the size has no effect and meets no number.
        `names` are those that have one at all."""
        group, letter = (self.batch, "b") if name in self.batch else (self.tokens, "t")
        if match.is_open[letter] and names.isdisjoint({*group} - {name}):
            return True
        looks, own = _Looks(self, match), batch_of(APART) if letter == "b" else length
        sizes = {*SMALL, LEAST, own - 1, own, own + 1, 2 * own} - {0}
        verdicts = {size: looks.verdict(length, APART, {name: size}) for size in sizes}
        if Verdict.OTHER in verdicts.values():
            return False
        is_free = any(verdict is Verdict.RIGHT for size, verdict in verdicts.items() if size != own)
        is_own = name in self._named([match.found.output.value])
        others = dict.fromkeys(self.batch, batch_of(APART)) | dict.fromkeys(self.tokens, length)
        is_even = is_own or not is_free or self._is_even(looks, [name], others, sizes)
        return is_even and (not is_free or looks.holds_from_any_state(length))


@dataclass
class _Looks:
    """Looks at a match at other points, and notes what meets sizes there."""

    prover: Prover
    match: LinearMatch
    meetings: Meetings = field(default_factory=Meetings)
    count: Iterator[int] = field(default_factory=lambda: count(APART))
    too_long: float = math.inf
    """The first length at which a point takes too long, as all longer ones do."""
    elements: dict[int, Mapping[ir.Node, int]] = field(default_factory=dict)
    """The number of elements of the largest tensor that each node made, by the length."""
    names: set[str] = field(default_factory=set)
    """The names of sizes on which something depended."""
    ends: dict[ir.Value, set[tuple[int, tuple[int, ...], int, int]]] = field(default_factory=dict)
    """The lengths, and the shapes and the ends of tensors of integers there."""
    counts: dict[ir.Node, set[int]] = field(default_factory=dict)
    """The numbers of iterations of loops."""
    right: set[int] = field(default_factory=set)
    """The lengths that were right."""
    begun: dict[ir.Value, set[tuple[int, frozenset[int]]]] = field(default_factory=dict)
    """The integers that differ from iteration to iteration of a loop: the first ones, each with the
    length."""
    lasting: dict[ir.Value, set[tuple[int, frozenset[int]]]] = field(default_factory=dict)
    """Those that are the same in all iterations."""

    @property
    def firsts(self) -> set[int] | None:
        """What the integers of loops begin with or are throughout, and what tensors whose shape
        varies begin and end with, but for the length; None where a loop begins with something else
        at each length."""
        begun = all_known(map(_without_length, self.begun.values()))
        if begun is None:
            return None
        more = without_none(map(_without_length, self._more_firsts))
        return {number for number in chain(*begun, *more) if 0 < number < ENDLESS}

    @property
    def _more_firsts(self) -> Iterator[set[tuple[int, frozenset[int]]]]:
        """The integers, each with the length, that last in loops and vary, and the ends of
        tensors."""
        yield from (seen for seen in self.lasting.values() if len({own for _, own in seen}) > 1)
        for ends in self.ends.values():
            if len({shape for _, shape, _, _ in ends}) > 1:
                yield {(length, frozenset([first])) for length, _, first, _ in ends}
                yield {(length, frozenset([last])) for length, _, _, last in ends}

    @property
    def _loops(self) -> frozenset[ir.Node]:
        """The loops whose number of iterations differs from run to run."""
        return frozenset(node for node, counts in self.counts.items() if len(counts) > 1)

    def holds_from_any_state(self, found: int) -> bool:
        """Is the region right where its loops begin with random numbers? Then each iteration does
        its part whatever was before it, and so do all that are not looked at. Otherwise a loop may
        hold something back for many iterations, such as the last 100 tokens of a window. It is
        looked at where the operands were found, and at the most iterations. These have to be more
        than `LEAST`, so that smaller numbers that an iteration meets are passed."""
        if any(max(self.counts[node]) <= LEAST for node in self._loops):
            return False
        longest = max(self.right, default=found)
        return not self._loops or all(map(self._holds_from_any_state, sorted({found, longest})))

    def _holds_from_any_state(self, length: int) -> bool:
        number = next(self.count)
        try:
            point = self.prover._point(length, number, self.most, freed=self._loops)
        except FailedError:
            return False
        sizes = self._sizes_at(point, number)
        if sizes is None:
            return False
        begun = chain.from_iterable(_as_states(value, point, sizes) for value in point.states)
        founds = (
            replace(self.match.found, state=state) for state in (self.match.found.state, *begun)
        )
        matches = (replace(self.match, found=found) for found in founds)
        return any(_agrees(match, point, sizes, False) is Verdict.RIGHT for match in matches)

    def _sizes_at(self, point: Evaluation, number: int) -> Sizes | None:
        """The sizes at a point: the tokens are what is left beside the others. None where nothing
        fits."""
        first = self.match.sizes
        batch = batch_of(number) if self.match.is_open["b"] else first.batch
        count = math.prod(point.tensor(self.match.found.output.value).shape)
        each = batch * first.heads * first.value
        return (
            replace(first, batch=batch, tokens=count // each)
            if each and count and count % each == 0
            else None
        )

    def next(self, length: int) -> Verdict:
        """What the region computes at the next length."""
        if length >= self.too_long or self._expected(length) > AHEAD * self.most:
            return Verdict.UNKNOWN
        verdict = self.verdict(length, next(self.count))
        self.right.update([length] if verdict is Verdict.RIGHT else [])
        return verdict

    @property
    def most(self) -> int:
        """The most elements of a tensor; 0 where that does not matter."""
        if not self.match.is_open["t"]:
            return 0
        first = next(iter(self.elements.values()), {})
        return max(MOST_ELEMENTS, GROWTH * max(first.values(), default=0))

    def _expected(self, length: int) -> float:
        """The elements of the largest tensor that are expected at a length, as they have grown
        between the two longest lengths so far: by a power of the tokens, up to the square."""
        longest = sorted(self.elements)[-2:]
        if not longest or length <= longest[-1]:
            return 0
        last, before = self.elements[longest[-1]], self.elements[longest[0]]
        factor = length / longest[-1]

        def expected(node: ir.Node, count: int) -> float:
            earlier = before.get(node, count)
            if len(longest) == 1 or earlier <= 0:
                return count * factor**2
            if earlier == count:
                return count * math.ceil(length / PADDED)
            power = math.log(count / earlier) / math.log(longest[-1] / longest[0]) if count else 0.0
            return float(count * factor ** min(power, 2.0))

        return max((expected(node, count) for node, count in last.items()), default=0)

    def verdict(
        self, length: int, number: int, apart: Mapping[str, int] = MappingProxyType({})
    ) -> Verdict:
        """What the region computes at another point, where names in `apart` have sizes of their
        own."""
        match = self.match
        self.meetings.begin()
        try:
            point = self.prover._point(length, number, self.most, self.meetings, apart)
            self.elements[length] = point.elements
            self.names |= point.names
            _enter(self.counts, point.counts, lambda iterations: iterations)
            _enter(self.ends, point.ends, lambda ends: (length, *ends))
            _enter(self.begun, point.firsts, lambda firsts: (length, firsts))
            _enter(self.lasting, point.lasting, lambda number: (length, frozenset([number])))
            sizes = self._sizes_at(point, number)
            if sizes is None or not (match.is_open["t"] or sizes.tokens == match.sizes.tokens):
                return Verdict.FAILS
            return _agrees(match, point, sizes, not apart)
        except TooLongError:
            self.too_long = min(length, self.too_long)
            return Verdict.UNKNOWN
        except FailedError:
            return Verdict.FAILS


def _enter(known: dict[K, set[N]], found: Mapping[K, T], note: Callable[[T], N]) -> None:
    """Enter what was found at a point: of each key a note of it."""
    for key, item in found.items():
        known.setdefault(key, set()).add(note(item))


def _without_length(seen: Collection[tuple[int, frozenset[int]]]) -> set[int] | None:
    """The sizes of numbers that are the same at all lengths, or differ from the length by the same;
    None for others."""
    forms = (
        {frozenset(each - part * length for each in own) for length, own in seen} for part in (0, 1)
    )
    form = next((form for form in forms if len(form) == 1), None)
    return None if form is None else {abs(each) for own in form for each in own}


def batch_of(number: int) -> int:
    """The size of an open batch at a point."""
    return BATCHES[number] if number < len(BATCHES) else 2


def _agrees(match: LinearMatch, point: Evaluation, sizes: Sizes, may_end: bool) -> Verdict:
    """Do all outputs and states of a match hold what the recurrence gives? An output whose last
    token is 0 was computed for fewer tokens, where it may end."""
    outcome = _outcome(match.found, point, sizes)
    if outcome is None:
        return Verdict.FAILS
    goal, verdict = scaled(outcome, match.found), Verdict.RIGHT
    for output in match.outputs:
        array = read(output, point, sizes)
        if array is None:
            return Verdict.FAILS
        if not (columns(array) == goal).all():
            verdict = (
                Verdict.FAILS if may_end and not columns(array)[:, -1].any() else Verdict.OTHER
            )
    for state in match.states:
        array = read_state(state, point, sizes)
        if array is None:
            return Verdict.FAILS
        if not (columns(array) == outcome.state).all() and verdict is Verdict.RIGHT:
            verdict = Verdict.OTHER
    return verdict


def _outcome(found: Found, point: Evaluation, sizes: Sizes) -> Outcome | None:
    tokens = tokens_of(found, point, sizes)
    return if_known(recurrence, tokens)


def _is_tensor(value: ir.Value, point: Evaluation) -> bool:
    try:
        return point.tensor(value).numbers() is not None
    except FailedError:
        return False


def _as_outputs(value: ir.Value, point: Evaluation, sizes: Sizes) -> list[Operand]:
    """A value as an output, in all orders that its axes may have."""
    own = {"b": sizes.batch, "t": sizes.tokens, "h": sizes.heads, "e": sizes.value}
    return [Operand(value, order, sizes.heads) for order in orders(point.shape(value), own)]


def _as_states(value: ir.Value, point: Evaluation, sizes: Sizes) -> list[State]:
    """A value as a state, in all orders that its axes may have."""
    return [State(value, order) for order in orders(point.shape(value), sizes.of_state)]


@dataclass(frozen=True)
class _Explained:
    """What the outcome of a recurrence explains at a point: the values that hold it."""

    point: Evaluation
    sizes: Sizes
    goal: np.ndarray
    state: np.ndarray
    outputs: list[Operand] = field(default_factory=list)
    states: list[State] = field(default_factory=list)

    def includes(self, value: ir.Value) -> bool:
        """Does a value hold the output or the last state? It is entered then."""
        if not _is_tensor(value, self.point):
            return False
        outputs = self._holding(_as_outputs(value, self.point, self.sizes), read, self.goal)
        states = (
            []
            if outputs
            else self._holding(_as_states(value, self.point, self.sizes), read_state, self.state)
        )
        self.outputs.extend(outputs)
        self.states.extend(states)
        return bool(outputs or states)

    def _holding(
        self,
        candidates: Iterable[T],
        read: Callable[[T, Evaluation, Sizes], np.ndarray | None],
        wanted: np.ndarray,
    ) -> list[T]:
        """The first candidate that holds the wanted columns."""
        for candidate in candidates:
            array = read(candidate, self.point, self.sizes)
            if array is not None and (columns(array) == wanted).all():
                return [candidate]
        return []
