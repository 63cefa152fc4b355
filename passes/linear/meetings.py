"""Numbers of a graph that meet a size which differs from run to run: where such a size passes one
of them, a graph may compute something else.

What every node read is noted at several points. An operand that is not the same at all of them
varies. The numbers that a varying operand meets, by number:

    1  elementwise operators on numbers that are known in every run: those of the operands that do
       not vary
    2  Slice: constant starts and ends along an axis that varies; the size of an axis, where starts
       or ends vary
    3  Gather and its kin, and ScatterElements and ScatterND: constant indices along an axis that
       varies; the sizes of the data, where the indices vary. An index beyond the end of an axis is
       an error
    4  Trilu and EyeLike: a constant diagonal of a matrix that varies, and its other size where only
       one varies
    5  Pad and Concat: what is put before or behind along an axis that varies, where its size does
       not
    6  Range and OneHot: the operands that do not vary
    7  Loop and Scan: a constant number of iterations. What such a loop counts does not vary: it is
       the same at all points
    8  the sizes of what enters a region: what their formulas add, and the numbers in their minima
       and quotients
    9  Slice and Split: a step, the number of parts and their sizes, along an axis that varies
   10  any other operator that has a rule in operators.py and is not in `NOTHING`: its attributes
       and the operands that do not vary. Of an operator that moves elements each of them may be a
       step, or a number of rows that are left out
   11  all of them: what the sizes of an axis that varies, and the integers of an operand that does,
       are multiples of. A Tile, a Concat of several copies and a Reshape multiply a length as a Mul
       does. So does Size
   12  Gather and Slice, of elements that vary on an axis that does not: the constant indices,
       starts and ends. A table of 100 rows whose first ones are written differs in row 50 from the
       51st on
   13  Add and Sub of positions and what varies: twice a length

Positions, such as a Range over the tokens and the distances of tokens, are tensors whose shape
varies. Not all lengths of them are computed. So the numbers that they meet tell where they change
only where they are sums, multiples, and quotients and remainders of one kind. The region is unclear
where positions are

   14  multiplied with what varies or divided by it, or added up
   15  divided after a product or another division, by a fraction, or by numbers of which none is a
       multiple of all others; added to what varies after a product, or twice
   16  large: integers that wrap at a later position, floats that become infinite there

Nothing longer than `MOST_ITERATIONS` is run of a loop. So a body that computes more than sums and
multiples of its iterations, reads a table at places that vary, or carries a number or a size that
is none of them, is unclear. So is one with a loop in it that runs more or less often than before,
or gives other integers. What a graph computes of a length outside of loops is computed at every
length, too (walk.py).

Where rows that vary are written into a table whose size does not, whatever reads the table meets
each of its rows.

The size of a table (2 and 3) is noted as such where its elements differ: a length that is not
looked at may read elements that were not read before.

Floats count only where a length that has become one is compared or rounded. A number below 1 counts
by its inverse. Of a tensor with many numbers the ends of runs of successive integers count, since a
length passes one by one what lies between them.
"""

from __future__ import annotations

import math
import operator
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import (
    chain,
    combinations,
    combinations_with_replacement,
    islice,
    permutations,
    product,
    zip_longest,
)
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Atom, Dim
from fa_compiler.passes.ir.nodes import (
    all_known,
    instances,
    int_attr,
    ints_attr,
    is_op,
    makers_of,
    nodes_of_type,
    reached,
    sole,
    without_none,
)
from fa_compiler.passes.linear.operators import EXACT, RULES
from fa_compiler.passes.linear.tensors import Tensor, exact
from fa_compiler.passes.ops.elementwise import COMPARISONS, FOUR_OPERATIONS
from fa_compiler.passes.ops.movers import ARRAY_MOVES, PICKS

ROUGH = (
    *COMPARISONS,
    "Min",
    "Max",
    "Clip",
    "Mod",
    "Sign",
    "Abs",
    "Floor",
    "Ceil",
    "Round",
    "Relu",
    "Cast",
)
"""Operators that may change with a float."""
ELEMENTWISE = (*ROUGH, *FOUR_OPERATIONS, "Pow", "Where", "Sum")
BENT = ("Sqrt", "Log", "Sin", "Cos", "Exp", "Pow")
SUMMING = ("ReduceSum", "CumSum", "MatMul")
"""Operators whose results grow with the square of a length, or faster, where their operands grow
with it."""
CUTTING = ("Div", "Mod", "Floor", "Ceil", "Round")
"""Operators that give the same for several positions."""
LOOPS = ("Loop", "Scan")
COMPUTING = (*ELEMENTWISE, *BENT, *SUMMING)
MERGING = ("Size", "Reshape", "Flatten")
"""Operators that multiply sizes. Their own integers meet no length: a Reshape to sizes that do not
fit is an error, and 0 and -1 always fit."""
SCATTERS = ("ScatterElements", "Scatter", "ScatterND")
NOTHING: Mapping[str, str] = {
    **dict.fromkeys(("Identity", "Neg", "Not", "Reciprocal"), "it has no other operand"),
    **dict.fromkeys(("Transpose", "Squeeze", "Unsqueeze"), "its integers are axes"),
    **dict.fromkeys(("Einsum", "Expand"), "it fails where two sizes differ and neither is 1"),
    "ConstantOfShape": "its operand is the shape of its result",
}
"""The operators with a rule in operators.py that are not noted, each with the reason why no length
meets a number in it. Their results have the sizes that the next operator meets (11)."""
NOTED = frozenset({*RULES, *EXACT, *LOOPS} - NOTHING.keys())
NARROW = 2
"""Numbers of so many bytes or fewer are cut or rounded where a length is large."""
WIDE = 8
"""Integers of fewer bytes wrap where positions are multiplied by more than a few."""
WHOLE = 2.0**-20
"""A float is an integer, or the inverse of one, up to so much of it."""
MOST_PLACES = 1 << 20
"""Positions that are larger at the lengths that are looked at may be too large for 32 bits at
others."""
SMALL = 64
"""Of tensors with more elements only the ends of runs are noted."""
MOST_ENDS = 256
"""A table with the ends of more runs is too much to be looked at."""
LEAST = 4
"""Smaller numbers are passed by the lengths that are looked at in any case."""
MOST_TERMS = 3
FEW = 5
ENDLESS = 1 << 31
"""What is not smaller stands for the end of an axis."""


@dataclass(frozen=True)
class Note:
    """One operand: its shape, its elements by a checksum, and whether they are known in every
    run."""

    shape: tuple[int, ...]
    checksum: int
    is_exact: bool
    is_float: bool
    is_narrow: bool = False
    numbers: tuple[float, ...] | None = field(default=None, compare=False)
    """All elements, where there are few of them; otherwise the ends of the runs. None where they
    are too many, or were not asked for."""
    is_uniform: bool = field(default=False, compare=False)
    """Are all elements equal?"""
    ends: tuple[float, float] = field(default=(0.0, 0.0), compare=False)
    """The least and the largest element that is finite."""
    size: int = field(default=8, compare=False)
    """The bytes of an element."""

    @property
    def is_table(self) -> bool:
        """Are the elements known, and do they differ?"""
        return self.is_exact and not self.is_uniform

    @property
    def holds_truths(self) -> bool:
        """Are all elements 0, 1 or -1?"""
        return self.numbers is not None and max(map(abs, self.numbers), default=0) <= 1


Row: TypeAlias = tuple[Note, ...]
NO_NOTE = Note((), 0, False, False, numbers=())
"""What stands in a row for an operand that is absent."""


def _note(tensor: Tensor | None, is_new: bool) -> Note:
    """A note of one operand. The numbers of a tensor of many elements are noted when its reader is
    new."""
    if tensor is None:
        return NO_NOTE
    array = tensor.exact
    if array is None:
        return Note(tensor.shape, 0, False, True)
    checksum = zlib.crc32(array.tobytes())
    is_float = array.dtype.kind not in "biu"
    is_narrow = array.dtype.itemsize <= NARROW and array.dtype.kind != "b"
    note = Note(
        tensor.shape,
        checksum,
        True,
        is_float,
        is_narrow,
        ends=_finite_ends(array),
        size=array.dtype.itemsize,
    )
    if array.size <= SMALL:
        numbers = tuple(array.reshape(-1).tolist())
        return replace(note, numbers=numbers, is_uniform=len(set(numbers)) <= 1)
    if not is_new:
        return note
    ends = _ends_of_runs(array)
    return replace(note, numbers=ends, is_uniform=sole(ends) is not None)


def _finite_ends(array: np.ndarray) -> tuple[float, float]:
    """The least and the largest element that is finite; 0 where there is none."""
    if array.dtype.kind == "b" or not array.size:
        return 0.0, float(array.any())
    finite = array if array.dtype.kind in "iu" else array[np.isfinite(array)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def _places(node: ir.Node, indices: Tensor | None) -> list[Tensor]:
    """The places that a scatter writes, without repetition: those along each axis."""
    if indices is None or indices.exact is None:
        return []
    columns = np.moveaxis(indices.exact, -1, 0) if is_op(node, "ScatterND") else [indices.exact]
    return [exact(np.unique(column)) for column in columns]


def _ends_of_runs(array: np.ndarray) -> tuple[float, ...] | None:
    """The numbers of a tensor, without those between their neighbours; None where they are too
    many."""
    found = np.unique(array.astype(np.float64))
    inside = np.zeros(found.size, bool)
    inside[1:-1] = (np.diff(found)[:-1] == 1) & (np.diff(found)[1:] == 1)
    ends = found[~inside]
    return tuple(ends.tolist()) if ends.size <= MOST_ENDS else None


@dataclass
class Numbers:
    """The numbers by what is done with them."""

    compared: set[int] = field(default_factory=set)
    """What a size is compared with, cut at or repeated for."""
    divisors: set[int] = field(default_factory=set)
    """What it is divided by; those of remainders, too."""
    divisors_of_places: set[int] = field(default_factory=set)
    """What positions are divided by. No walk over the lengths knows where their quotients meet a
    sum."""
    added: set[int] = field(default_factory=set)
    cut: set[int] = field(default_factory=set)
    """How many rows a Slice may leave out; they are among what is compared."""
    begun: set[int] = field(default_factory=set)
    """What the integers of loops begin with. An iteration may stand for several tokens."""
    factors: set[int] = field(default_factory=set)
    tables: set[int] = field(default_factory=set)
    """The sizes of tables whose elements differ; they are among what is compared."""
    has_squares: bool = False
    """Is what varies multiplied with what varies?"""
    has_places: bool = False
    """Are positions added to what varies? Distances, and positions from both ends, may be compared
    together."""
    turns: set[int] = field(default_factory=set)
    """The lengths at which what is computed of a length turns (walk.py)."""
    is_unclear: bool = False
    """Is a root or logarithm of a length compared or rounded, or does a length meet too many
    numbers?"""

    @property
    def chunks(self) -> list[int]:
        """What may be the size of a chunk."""
        return sorted(number for number in self.compared | self.divisors if number >= LEAST)

    @property
    def edges(self) -> list[int]:
        """The sizes at which the graph may begin to compute something else: where two sums of
        multiples of a length and of numbers meet, one of which may be 0."""
        found = _sums(sorted(self.added | self.compared)) | self.divisors | self._compared_together
        found |= _products(found, self.divisors_of_places)
        found |= _quotients(self.divisors, self.compared) | self._multiples
        found |= _quotients(found, self._slopes)
        if self.has_squares:
            found |= self.factors
            found |= {
                round((times * number) ** (1 / root))
                for number, root, times in product(found, (2, 3), (1, 2))
            }
        return sorted({*self.turns, *(number for number in found if LEAST <= number < ENDLESS)})

    @property
    def _compared_together(self) -> set[int]:
        """The sums of numbers that positions are compared with together. Each comparison may be one
        with >, which begins at the next token."""
        if not self.has_places:
            return set()
        several = range(2, MOST_TERMS + (len(self.compared) <= FEW))
        groups = chain.from_iterable(
            combinations_with_replacement(self.compared, times) for times in several
        )
        return {sum(group) + more for group in groups for more in (0, len(group) - 1)}

    @property
    def _slopes(self) -> set[int]:
        """By what a difference of two multiples of a length grows with the length: n - 100 of n
        rows is 2 n - 100."""
        multiples, signs = {0, 1, *self.factors}, (-1, 1) if self.added else (-1,)
        return {
            abs(one + sign * other) for one, other, sign in product(multiples, multiples, signs)
        } - {0}

    @property
    def _multiples(self) -> set[int]:
        """The lengths at which a quotient of a length, or a quotient of another divisor of it,
        meets a number.

        A number may be subtracted in front of each quotient: ((n - a) / d - b) / e is c where n is
        (c e + b) d + a.
        """
        moves = [*product({0, *self.added, *self.cut}, (-1, 1))]

        def before(met: Iterable[int], divisor: int) -> set[int]:
            return {
                number * divisor + sign * other for number, (other, sign) in product(met, moves)
            }

        once = {divisor: before(self.compared, divisor) for divisor in self.divisors}
        twice = (before(once[last], first) for first, last in permutations(self.divisors, 2))
        sums = _sums(sorted(self.begun | self.compared)) if self.begun else set[int]()
        return {*map(abs, chain(*once.values(), *twice, _products(sums, self.divisors)))}

    def include(self, other: Numbers) -> None:
        """Enter what was entered there."""
        for mine, given in zip(self._entered, other._entered, strict=True):
            mine |= given

    @property
    def _entered(self) -> tuple[set[int], ...]:
        return self.compared, self.divisors, self.added, self.cut, self.factors

    def add(self, op_type: str, number: float) -> None:
        """Enter a number that an operator met."""
        size = abs(number)
        is_fraction = 0 < size < 1
        times = 1 / size if is_fraction else size
        if 1 < times < ENDLESS:
            done = "Div" if is_fraction and op_type == "Mul" else op_type
            for numbers in _ENTERED.get(done, _compared)(self):
                numbers.add(math.ceil(times))


def _compared(numbers: Numbers) -> tuple[set[int], ...]:
    return (numbers.compared,)


_ENTERED: Mapping[str, Callable[[Numbers], tuple[set[int], ...]]] = {
    **dict.fromkeys(("Add", "Sub", "Sum"), lambda numbers: (numbers.added,)),
    # A row that is not the first one any more, and all that are cut afterwards.
    **dict.fromkeys(("Pad", "Concat"), lambda numbers: (numbers.added, numbers.compared)),
    **dict.fromkeys(("Div", "Mod"), lambda numbers: (numbers.divisors,)),
    **dict.fromkeys(("Mul", "Pow", "Tile"), lambda numbers: (numbers.factors,)),
    "Slice": lambda numbers: (numbers.compared, numbers.cut),
}
"""Where a number is entered that an operator met; the others compare."""


def _products(numbers: Iterable[int], others: Iterable[int]) -> set[int]:
    return {number * other for number, other in product(numbers, others)}


def _quotients(numbers: Iterable[int], divisors: Iterable[int]) -> set[int]:
    return {number // divisor for number, divisor in product(numbers, divisors)}


def _sums(numbers: Sequence[int]) -> set[int]:
    """The sums and differences of up to three of these numbers; of many numbers, of up to two."""
    found = [{0}] + [set[int]() for _ in range(MOST_TERMS if len(numbers) <= FEW else 2)]
    for number in numbers:
        for terms in range(len(found) - 1, 0, -1):
            found[terms] |= {
                abs(each + sign * number) for each in found[terms - 1] for sign in (-1, 1)
            }
    return set().union(*found)


@dataclass(eq=False)
class Meetings:
    """What the nodes of a region read at several points, and the sizes of what enters it."""

    count: int = 0
    """How many points have begun."""
    rows: dict[ir.Node, dict[int, set[Row]]] = field(default_factory=dict)
    """What each node read at each point, by its number."""
    sizes: set[Dim] = field(default_factory=set)
    bent: set[ir.Node] = field(default_factory=set)
    """The loops that carry a number or a size which is no multiple of the iteration, and those in
    bodies that run, or give integers, in another way than before."""
    given: dict[ir.Node, tuple[bytes, ...]] = field(default_factory=dict)
    """The integers that a loop in a body gave first."""
    made: dict[ir.Value, set[tuple[tuple[tuple[int, ...], ...], tuple[bytes, ...]]]] = field(
        default_factory=dict
    )
    """The shapes and the elements of what a region makes outside of bodies."""

    def begin(self) -> None:
        """Another point begins."""
        self.count += 1

    def add(self, node: ir.Node, operands: Sequence[Tensor | None]) -> None:
        """Note what a node reads."""
        if node.op_type in NOTED:
            if is_op(node, *SCATTERS):
                operands = [operands[0], *_places(node, operands[1])]
            is_new = node not in self.rows
            row = tuple(_note(operand, is_new) for operand in operands)
            self.rows.setdefault(node, {}).setdefault(self.count, set()).add(row)

    def ask(self, size: Dim) -> None:
        """Note a size that was asked for."""
        self.sizes.add(size)

    def bend(self, node: ir.Node) -> None:
        """Note a loop that is bent."""
        self.bent.add(node)

    def make(self, value: ir.Value, tensors: Sequence[Tensor]) -> None:
        """Note what a node of a region makes, outside of bodies, that is read, known in every run
        and small."""
        arrays = all_known(tensor.exact for tensor in tensors)
        if value.uses() and arrays is not None and sum(array.size for array in arrays) <= SMALL:
            shapes, numbers = (
                (array.shape for array in arrays),
                (array.tobytes() for array in arrays),
            )
            self.made.setdefault(value, set()).add((tuple(shapes), tuple(numbers)))

    def gives_same(self, node: ir.Node, tensors: Iterable[Tensor]) -> bool:
        """Are the integers among the results of a loop in a body, which are the same in every run,
        what they were?"""
        arrays = without_none(tensor.exact for tensor in tensors if tensor.is_known_integer)
        integers = tuple(array.tobytes() for array in arrays)
        return self.given.setdefault(node, integers) == integers

    def small(self) -> Iterator[ir.Value]:
        """What a region makes outside of bodies that is read, known in every run and small, and is
        not the same at all points, but has one shape."""
        for value, seen in self.made.items():
            if len(seen) > 1 and len({shapes for shapes, _ in seen}) == 1:
                yield value

    def hides(self, members: Collection[ir.Node]) -> bool:
        """Does a body of the members carry, or make of an iteration, what only a run of more
        iterations shows?"""
        return bool(self.bent) or any(
            met.is_hidden for met in self._met(lambda node: node not in members)
        )

    def numbers(self, names: Collection[str] = ()) -> Numbers:
        """The numbers that meet a size which varies: one of these names, where some are given. A
        batch does not meet the number of iterations of a Loop over the tokens."""
        found = _read(self._met(lambda node: not (names and is_op(node, *LOOPS))))
        for size in self.sizes:
            if not size.is_const and _are_met([size], names):
                found.has_squares |= _has_square(size)
                found.add("Add", size.addend)
            _enter(size, found, names)
        return found

    def _met(self, counts: Callable[[ir.Node], bool]) -> list[_Met]:
        """What is noted of the nodes that count."""
        return [
            _met(node, [*points.values()]) for node, points in self.rows.items() if counts(node)
        ]


class Unnoted(Meetings):
    """What stands for meetings that nobody asks for: nothing is noted."""

    def add(self, node: ir.Node, operands: Sequence[Tensor | None]) -> None:
        """Nothing is noted of what a node reads."""

    def ask(self, size: Dim) -> None:
        """Nothing is noted of a size."""

    def bend(self, node: ir.Node) -> None:
        """Nothing is noted of a loop."""

    def make(self, value: ir.Value, tensors: Sequence[Tensor]) -> None:
        """Nothing is noted of what a node makes."""

    def gives_same(self, node: ir.Node, tensors: Iterable[Tensor]) -> bool:
        """Nobody asks."""
        return True


UNNOTED = Unnoted()


def _read(met: Sequence[_Met]) -> Numbers:
    """The numbers that were met in these nodes."""
    computed = instances(met, _ByElement)
    counts_floats = any(each.is_rough for each in computed)
    is_mixed = _are_mixed([each for each in computed if each.is_counted(counts_floats)])
    is_unclear = is_mixed or any(each.is_unclear(counts_floats) for each in met)
    found = Numbers(has_squares=any(each.is_square for each in met), is_unclear=is_unclear)
    for each in met:
        each.enter(found, counts_floats)
    return found


def _are_mixed(met: Sequence[_ByElement]) -> bool:
    """Are positions divided, or added to what varies, after a product or twice? Are they divided by
    several kinds of numbers?"""  # 15
    cut = {
        each.node: each
        for each in met
        if is_op(each.node, *CUTTING) and each.operand(0).is_sequence
    }
    products = [*nodes_of_type((each.node for each in met if each.has_places), "Mul")]
    joined = [each.node for each in met if each.is_joined]
    quotients = [*nodes_of_type(cut, "Div", "Mod")]
    pairs = ((joined, [*joined, *products]), (cut, cut), (quotients, products))
    return _are_kinds(cut.values()) or any(
        _is_behind(node, others) for nodes, others in pairs for node in nodes
    )


def _are_kinds(met: Iterable[_Met]) -> bool:
    """Is a divisor no multiple of another one, nor the other of it?"""
    divisors = {*map(abs, chain.from_iterable(each.operand(1).constants for each in met))} - {0}
    return any(number % other and other % number for number, other in combinations(divisors, 2))


def _is_fraction(number: float) -> bool:
    """Is neither a number nor its inverse an integer, up to rounding?"""
    sizes = (abs(number), 1 / abs(number)) if number else ()
    return bool(sizes) and all(
        abs(size - round(size)) > WHOLE * size for size in sizes if math.isfinite(size)
    )


def _is_behind(node: ir.Node, others: Collection[ir.Node]) -> bool:
    """Does a node read what one of these nodes makes?"""
    behind = reached([node], lambda reader: makers_of(reader.inputs))
    return any(maker in others for maker in islice(behind, 1, None))


def _differ(sizes: Iterable[float]) -> bool:
    return len({*sizes}) > 1


def _beside_varying(sizes: Iterable[set[int]]) -> Iterator[int]:
    """The sizes that do not vary, where another one does."""
    known = [*sizes]
    fixed = [found for found in known if len(found) == 1]
    return chain.from_iterable(fixed if any(map(_differ, known)) else ())


def _tells(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Is there one other size for each size? The batch and the tokens do not vary together, and
    neither tells the other."""
    return len({*zip(sizes, others, strict=True)}) == len({*sizes})


def _step(numbers: Iterable[int]) -> int:
    """The largest number of which all of these are multiples, apart from one and the same number; 0
    for one number."""
    first, *others = {*numbers} or {0}
    return math.gcd(*(number - first for number in others))


def names_of(size: Dim) -> Iterator[str]:
    """The names of the sizes in a size that differ from run to run."""
    return chain.from_iterable(map(_names_in, size.atoms))


def _names_in(atom: Atom) -> Iterator[str]:
    return chain.from_iterable(map(names_of, atom.args)) if atom.args else iter((atom.name,))


def _has_square(size: Dim) -> bool:
    """Is a size multiplied with itself, or with what is computed from it?"""
    pairs = (pair for monomial, _ in size.terms for pair in combinations(monomial, 2))
    return any(not {*_names_in(one)}.isdisjoint(_names_in(other)) for one, other in pairs)


def _enter(size: Dim, found: Numbers, names: Collection[str]) -> None:
    """Enter the numbers in the minima and quotients of a size: of one of these names, where some
    are given."""  # 8
    for atom in size.atoms:
        if not _are_met(atom.args, names):
            continue
        divides = atom.op in ("floor", "trunc", "mod", "fmod")
        for arg in atom.args:
            found.add("Div" if divides and arg.is_const else "Less", arg.addend)
            _enter(arg, found, names)


def _are_met(sizes: Iterable[Dim], names: Collection[str]) -> bool:
    """Is one of these names in one of the sizes? Where no names are given, all sizes count."""
    return not names or any(name in names for size in sizes for name in names_of(size))


@dataclass(frozen=True)
class _Operand:
    """What is noted of one operand of a node: of each point its notes in all rows, `NO_NOTE` in a
    row without it."""

    points: Sequence[Sequence[Note]] = ()

    @cached_property
    def varies(self) -> bool:
        """Is it not the same at all points?"""
        return len({frozenset(notes) for notes in self.points}) > 1

    @cached_property
    def _rows(self) -> list[Note]:
        return list(chain.from_iterable(self.points))

    @cached_property
    def notes(self) -> list[Note]:
        """Its notes, without the rows that do not have it."""
        return [note for note in self._rows if note is not NO_NOTE]

    @property
    def is_given_first(self) -> bool:
        """Does the first row have it?"""
        return self._rows[0] is not NO_NOTE

    @cached_property
    def is_exact(self) -> bool:
        """Do all rows have it, with known elements?"""
        return all(note.is_exact for note in self._rows)

    @cached_property
    def is_float(self) -> bool:
        """Do all rows have it, with floats?"""
        return all(note.is_float for note in self._rows)

    @cached_property
    def has_floats(self) -> bool:
        """Does a row have floats for it?"""
        return any(note.is_float for note in self.notes)

    @cached_property
    def shapes(self) -> set[tuple[int, ...]]:
        """The shapes that it has in the rows."""
        return {note.shape for note in self.notes}

    @property
    def is_sequence(self) -> bool:
        """Is it known, and does its shape vary?"""
        return len(self.shapes) > 1 and self.is_exact

    @property
    def is_place(self) -> bool:
        """Is it one of positions? Its shape varies, its elements are known and differ, and are no
        truth values."""
        if not self.is_sequence:
            return False
        starts, ends = zip(*(note.ends for note in self.notes), strict=True)
        return any(map(operator.lt, starts, ends)) and max(abs(min(starts)), abs(max(ends))) > 1

    @cached_property
    def constants(self) -> tuple[float, ...]:
        """Its numbers where it does not vary; none where it does."""
        numbers = {note: note.numbers for note in self.notes if note.numbers is not None}
        return () if self.varies else tuple(chain.from_iterable(numbers.values()))

    @cached_property
    def told(self) -> Note:
        """A note of it, one with its numbers if there is one; `NO_NOTE` where there is none."""
        with_numbers = (note for note in self.notes if note.numbers is not None)
        return next(chain(with_numbers, self.notes), NO_NOTE)

    def sizes(self, axis: int) -> set[int]:
        """The sizes of an axis; none in a shape without it."""
        return {shape[axis] for shape in self.shapes if -len(shape) <= axis < len(shape)}

    @property
    def axis_sizes(self) -> Iterable[tuple[int, ...]]:
        """The sizes of each axis, in one order of the shapes."""
        return zip(*self.shapes, strict=False)


NO_OPERAND = _Operand(((NO_NOTE,),))


@dataclass(frozen=True)
class _Met:
    """The rows of one node, at each point. What follows holds for operators without a row in
    `_KINDS`."""  # 6 and 10

    node: ir.Node
    points: Sequence[set[Row]]

    @cached_property
    def operands(self) -> list[_Operand]:
        """Its operands, as many as the longest row has."""
        columns = [[*zip_longest(*point, fillvalue=NO_NOTE)] for point in self.points]
        return [*map(_Operand, zip_longest(*columns, fillvalue=(NO_NOTE,)))]

    def operand(self, index: int) -> _Operand:
        """One of its operands; `NO_OPERAND` beyond the last one."""
        return self.operands[index] if index < len(self.operands) else NO_OPERAND

    @cached_property
    def varying(self) -> list[_Operand]:
        """The operands that are not the same at all points."""
        return [operand for operand in self.operands if operand.varies]

    @cached_property
    def has_places(self) -> bool:
        """Is an operand one of positions?"""
        return any(operand.is_place for operand in self.operands)

    def enter(self, found: Numbers, counts_floats: bool) -> None:
        """Enter the numbers that what varies meets."""
        own = Numbers()
        for number in self.numbers(counts_floats):
            own.add(self.node.op_type, number)
        found.include(own)
        if any(operand.is_sequence for operand in self.operands):
            found.divisors_of_places |= own.divisors
        found.divisors.update(self.steps())
        found.tables.update(self.tables())
        found.factors.update(step for step in self.multiples() if step > 1)

    @property
    def is_hidden(self) -> bool:
        """Is it more than a sum, or a multiple, of integers that vary? Are these large enough to
        wrap? Does it read a table at places that vary, or add up its elements?"""
        return self._is_marked

    @property
    def _is_marked(self) -> bool:
        """Do several known elements that vary mark those of a table?"""
        if not is_op(self.node, "Mul", "Where", "And", "Or", "Xor"):
            return False
        tables = [operand for operand in self.operands if operand.told.is_table]
        return len(tables) > 1 and any(table.varies for table in tables)

    @property
    def is_square(self) -> bool:
        """Is what varies multiplied with what varies?"""
        return False

    def is_counted(self, counts_floats: bool) -> bool:
        """Are the numbers that it reads integers, or floats that count?"""
        return counts_floats or not self.operand(0).is_float

    def is_unclear(self, counts_floats: bool) -> bool:
        """May it turn at a length that its numbers do not tell?"""  # 16
        return self.is_counted(counts_floats) and self._is_narrow

    @property
    def _is_narrow(self) -> bool:
        """Is an operand of few bits, whose numbers are others at other points, and are they no
        truth values?"""
        return bool(self.varying) and not all(
            note.holds_truths for note in self._notes if note.is_narrow
        )

    @property
    def _notes(self) -> Iterator[Note]:
        """The notes of all operands."""
        return chain.from_iterable(operand.notes for operand in self.operands)

    def numbers(self, counts_floats: bool) -> Iterable[float]:
        """The numbers that what varies meets."""
        attributes = (number for number in self._attributes() if abs(number) >= LEAST)
        return chain(self._constants(), attributes) if self.varying else ()

    def _constants(self) -> Iterator[float]:
        """The numbers of all operands that do not vary."""
        return chain.from_iterable(operand.constants for operand in self.operands)

    def _attributes(self) -> Iterator[int]:
        """The integers among its attributes."""
        for attr in self.node.attributes.values():
            if attr.type == ir.AttributeType.INT:
                yield attr.as_int()
            elif attr.type == ir.AttributeType.INTS:
                yield from attr.as_ints()

    def multiples(self) -> Iterator[int]:  # 11
        """What the sizes and integers that vary are multiples of, but for a number that is added to
        all of them."""
        for operand in self.varying:
            integers = chain.from_iterable(
                note.numbers or () for note in operand.notes if not note.is_float
            )
            yield from map(_step, (*operand.axis_sizes, map(int, integers)))

    def steps(self) -> Iterable[int]:
        """The steps and the numbers of parts along an axis that varies."""
        return ()

    def tables(self) -> Iterable[int]:
        """The sizes of a table, where the part of it that is read varies."""
        return ()

    @property
    def _axis(self) -> int:
        """The axis that the attribute names."""
        return int_attr(self.node, "axis", 0)

    def _axis_varies(self, axis: int) -> bool:
        return _differ(self._sizes(axis))

    def _sizes(self, axis: int) -> set[int]:
        """The sizes of an axis of the first operand."""
        return self.operand(0).sizes(axis)


class _Move(_Met):
    """An operator that moves elements, of which nobody has said which of its integers
    count."""  # 10

    def enter(self, found: Numbers, counts_floats: bool) -> None:
        super().enter(found, counts_floats)
        found.cut.update(self.steps())

    def steps(self) -> Iterable[int]:
        """All integers: each may be a step, or a number of rows that are left out."""
        given = chain(self._constants(), self._attributes()) if self.varying else ()
        return (abs(int(number)) for number in given if 1 < abs(number) < ENDLESS)


class _Computed(_Met):
    """A computation."""

    def numbers(self, counts_floats: bool) -> Iterable[float]:  # 1
        """The numbers that what varies meets."""
        return self._constants() if self.varying and self._is_exact(counts_floats) else ()

    def _is_exact(self, counts_floats: bool) -> bool:
        """Are all operands known, and integers, or floats that count?"""
        given = [operand for operand in self.operands if operand.is_given_first]
        return all(
            operand.is_exact and (counts_floats or not operand.has_floats) for operand in given
        )

    @property
    def is_hidden(self) -> bool:
        """Are numbers added up?"""
        return self._is_exact(True)

    def is_unclear(self, counts_floats: bool) -> bool:
        """May it turn at a length that its numbers do not tell?"""
        return super().is_unclear(counts_floats) or (
            self.is_counted(counts_floats) and self.is_tangled
        )

    @property
    def is_tangled(self) -> bool:
        """Are positions added up?"""  # 14
        return self.has_places and self._is_exact(True)

    @property
    def is_square(self) -> bool:
        """Do all factors vary, or the first operand of a power or a sum, and are they known?"""
        factors = self.operands if is_op(self.node, "Mul", "MatMul") else self.operands[:1]
        return self._is_exact(True) and all(factor.varies for factor in factors)


class _ByElement(_Computed):
    """A computation of each element by itself."""

    def enter(self, found: Numbers, counts_floats: bool) -> None:
        super().enter(found, counts_floats)
        if self.is_joined:
            found.factors.add(2)  # 13
            found.has_places = True

    @property
    def is_rough(self) -> bool:
        """Is a float that varies compared or rounded?"""
        return is_op(self.node, *ROUGH) and any(
            operand.is_exact and operand.is_float for operand in self.varying
        )

    @property
    def is_joined(self) -> bool:
        """Are positions added to, or subtracted from, what varies?"""
        return is_op(self.node, "Add", "Sub", "Sum") and len(self.varying) > 1 and self.has_places

    @property
    def is_hidden(self) -> bool:
        """Is it more than a sum, or a multiple, of integers that vary? Are these large enough to
        wrap?"""
        if self._is_marked or not (self.varying and self._is_exact(True)):
            return self._is_marked
        is_wrapped = self._is_large and is_op(self.node, *FOUR_OPERATIONS, "Cast")
        has_floats = any(operand.has_floats for operand in self.operands)
        return has_floats or is_wrapped or self.is_square or is_op(self.node, "Div", "Mod", *BENT)

    @property
    def is_tangled(self) -> bool:
        """Are positions multiplied with what varies, or by a fraction, or large?"""
        if not super().is_tangled:
            return False
        if is_op(self.node, "Mul", "Div", "Mod"):  # 14 and 15
            given = (*self.operand(0).constants, *self.operand(1).constants)
            return len(self.varying) > 1 or any(map(_is_fraction, given)) or self._is_large
        return is_op(self.node, "Pow") or (not self.operand(0).is_float and self._is_large)

    @property
    def _is_large(self) -> bool:
        """Are numbers so large that they wrap, or become infinite, at later positions?"""  # 16
        notes = list(self._notes)
        is_cut = is_op(self.node, "Cast") or (
            is_op(self.node, *FOUR_OPERATIONS) and notes[0].size < WIDE
        )
        limit = MOST_PLACES if is_cut and not self.operand(0).is_float else ENDLESS
        return any(max(map(abs, note.ends)) >= limit for note in notes)

    def is_unclear(self, counts_floats: bool) -> bool:
        """May it turn at a length that its numbers do not tell?"""
        is_bent = self.is_counted(counts_floats) and self._is_bent
        return super().is_unclear(counts_floats) or is_bent or self._is_crowded(counts_floats)

    @property
    def _is_bent(self) -> bool:
        """Is it no polynomial of what is known and varies? Of a power it is the exponent."""
        index = 1 if is_op(self.node, "Pow") else 0
        return is_op(self.node, *BENT) and self._is_exact(True) and self.operand(index).varies

    def _is_crowded(self, counts_floats: bool) -> bool:
        """Does what varies meet a table of too many numbers, element by element?"""
        has_table = any(
            operand.told.numbers is None for operand in self.operands if not operand.varies
        )
        return bool(self.varying) and has_table and self._is_exact(counts_floats)

    @property
    def is_square(self) -> bool:
        """Do all factors vary, or the first operand of a power, and are they known?"""
        return is_op(self.node, "Mul", "Pow") and super().is_square


class _Merged(_Met):
    """An operator that multiplies sizes."""

    def numbers(self, counts_floats: bool) -> Iterable[float]:
        """None."""
        return ()

    @property
    def is_square(self) -> bool:
        """Do two sizes vary that are multiplied, of which one tells the other?"""
        return any(
            _tells(*pair) for pair in permutations(filter(_differ, self.operand(0).axis_sizes), 2)
        )


class _Size(_Merged):
    """The number of elements."""

    def multiples(self) -> Iterator[int]:  # 11
        """What the sizes and their products are multiples of."""
        products = (map(math.prod, operand.shapes) for operand in self.varying)
        return chain(super().multiples(), map(_step, products))


class _Loop(_Met):
    """A Loop or a Scan."""  # 7

    def numbers(self, counts_floats: bool) -> Iterable[float]:
        """A constant number of iterations."""
        return self.operand(0).constants


class _Scatter(_Met):
    """An operator that writes rows into a table."""

    def is_unclear(self, counts_floats: bool) -> bool:
        """Are rows that vary written into a table whose size does not?"""
        written = (axis for axis, places in self._written_axes if places.varies)
        return super().is_unclear(counts_floats) or not all(map(self._axis_varies, written))

    @property
    def _written_axes(self) -> Iterable[tuple[int, _Operand]]:
        """The axes along which a scatter writes, and the places on each."""
        return enumerate(self.operands[1:], self._axis)

    def numbers(self, counts_floats: bool) -> Iterable[float]:  # 3
        """Constant indices along the axes that vary."""
        return chain.from_iterable(
            places.constants for axis, places in self._written_axes if self._axis_varies(axis)
        )


class _Tile(_Met):
    """A Tile."""  # 10

    def numbers(self, counts_floats: bool) -> Iterable[float]:
        """How often it repeats the axes that vary."""
        return (
            times for axis, times in enumerate(self.operand(1).constants) if self._axis_varies(axis)
        )


class _Concat(_Met):
    """A Concat."""  # 5

    def numbers(self, counts_floats: bool) -> Iterable[float]:
        """The sizes that do not vary beside one that does."""
        return _beside_varying(operand.sizes(self._axis) for operand in self.operands)


class _Diagonal(_Met):
    """A Trilu."""  # 4

    def numbers(self, counts_floats: bool) -> Iterable[float]:
        """The diagonal of a matrix that varies, and its other size where only one varies."""
        sizes = [self._sizes(axis) for axis in (-1, -2)]
        return chain(self._offset(), _beside_varying(sizes)) if any(map(_differ, sizes)) else ()

    def _offset(self) -> Iterable[float]:
        return self.operand(1).constants


class _Eye(_Diagonal):
    """An EyeLike."""

    def _offset(self) -> Iterable[float]:
        return (int_attr(self.node, "k", 0),)


class _Part(_Met):
    """An operator that reads a part of its first operand, or puts something around it."""

    @property
    def is_hidden(self) -> bool:
        """Does it read a part of a table, where the part or the number of elements varies?"""
        table = self.operand(0)
        return table.told.is_table and (table.is_sequence or self._part_varies)

    @property
    def _part_varies(self) -> bool:
        """Does an operand vary that says which part of the first one is read?"""
        return any(operand.varies for operand in self.operands[1:])


class _Pad(_Part):
    """A Pad."""  # 5

    def numbers(self, counts_floats: bool) -> Iterator[float]:
        """What is put before or behind along an axis that varies."""
        pads = (*ints_attr(self.node, "pads", ()), *self.operand(1).constants)
        rank = len(pads) // 2
        axes = self.operand(3).constants or range(rank)
        for axis, *ends in zip(axes, pads[:rank], pads[rank:], strict=False):
            if self._axis_varies(int(axis)):
                yield from ends


class _Split(_Part):
    """A Split."""  # 9

    def numbers(self, counts_floats: bool) -> Iterable[float]:
        """The sizes of the parts along an axis that varies."""
        sizes = (*ints_attr(self.node, "split", ()), *self.operand(1).constants)
        return sizes if self._axis_varies(self._axis) else ()

    def steps(self) -> Iterable[int]:
        """The number of parts along an axis that varies."""
        return [len(self.node.outputs)] if self._axis_varies(self._axis) else ()


class _Lookup(_Part):
    """An operator that reads a table at some places."""

    def tables(self) -> Iterable[int]:
        """The sizes of a table, where the part of it that is read varies."""
        table = self.operand(0)
        is_read_elsewhere = table.told.is_table and self._part_varies and not table.varies
        return table.told.shape if is_read_elsewhere else ()

    def _passed(self, places: Iterable[float], axis: int) -> Iterable[float]:  # 12
        """The places inside of an axis that does not vary, of elements that do, without those that
        are passed in any case."""
        data = self.operand(0)
        is_met = data.varies and data.is_exact and not self._axis_varies(axis)
        size = max(self._sizes(axis), default=0) if is_met else 0
        return (place for place in places if LEAST <= abs(place) < size)


class _Slice(_Lookup):
    """A Slice."""

    def numbers(self, counts_floats: bool) -> Iterator[float]:
        """What its starts and ends meet, or are."""
        for place, axis in enumerate(self._axes()):
            for bounds in self._bounds(place):
                yield from self._of_bounds(bounds, axis)

    def _of_bounds(self, bounds: set[float], axis: int) -> Iterator[float]:
        """The numbers that the starts, or the ends, on one axis are for a Slice."""
        if _differ(bounds) and not self._axis_varies(axis):  # 2: the size of an axis
            yield from self._sizes(axis)
        if len(bounds) == 1 and self._axis_varies(axis):  # 2: a constant end
            yield from bounds
        if len(bounds) == 1:  # 12
            yield from self._passed(bounds, axis)

    def steps(self) -> Iterable[int]:  # 9
        """The steps along an axis that varies."""
        steps = self.operand(4).constants if any(map(self._axis_varies, self._axes())) else ()
        return (abs(int(step)) for step in steps if abs(step) > 1)

    def _axes(self) -> Sequence[int]:
        """The axes that it cuts."""
        given = (*ints_attr(self.node, "axes", ()), *map(int, self.operand(3).constants))
        return given or range(self._count)

    @property
    def _count(self) -> int:
        """How many axes it cuts without a list of them."""
        return max(map(len, chain.from_iterable(self._ends())), default=0)

    def _bounds(self, place: int) -> list[set[float]]:
        """The starts and the ends at one place in all rows."""
        return [{row[place] for row in rows if place < len(row)} for rows in self._ends()]

    def _ends(self) -> list[list[tuple[float, ...]]]:
        """The starts and the ends in all rows."""
        names = ("starts", "ends")
        if names[0] in self.node.attributes:
            return [[tuple(self.node.attributes[name].as_ints())] for name in names]
        operands = (self.operand(1), self.operand(2))
        return [[note.numbers for note in operand.notes if note.numbers] for operand in operands]


class _Gather(_Lookup):
    """A Gather or a GatherElements."""

    def numbers(self, counts_floats: bool) -> Iterator[float]:
        """What its indices meet, or are."""
        indices = self.operand(1)
        for axis in self._axes(indices):
            if self._axis_varies(axis):  # 3: constant indices
                yield from indices.constants
            elif indices.varies:  # 3: the sizes of the data
                yield from self._sizes(axis)
            else:
                yield from self._passed(indices.constants, axis)

    def _axes(self, indices: _Operand) -> Iterable[int]:
        """The axes that it looks up."""
        return (self._axis,)


class _GatherNd(_Gather):
    """A GatherND."""

    def _axes(self, indices: _Operand) -> Iterator[int]:
        for count in indices.told.shape[-1:]:
            yield from range(count)


_KINDS: Mapping[str, type[_Met]] = {
    **dict.fromkeys((*ELEMENTWISE, *BENT), _ByElement),
    **dict.fromkeys(SUMMING, _Computed),
    **dict.fromkeys(LOOPS, _Loop),
    **dict.fromkeys(MERGING, _Merged),
    **dict.fromkeys(PICKS, _Gather),
    **dict.fromkeys(SCATTERS, _Scatter),
    "Size": _Size,
    "GatherND": _GatherNd,
    "Trilu": _Diagonal,
    "EyeLike": _Eye,
    "Slice": _Slice,
    "Split": _Split,
    "Tile": _Tile,
    "Pad": _Pad,
    "Concat": _Concat,
}


def _met(node: ir.Node, points: Sequence[set[Row]]) -> _Met:
    """The rows of a node, at each point."""
    others = _Move if node.op_type in ARRAY_MOVES else _Met
    return _KINDS.get(node.op_type, others)(node, points)
