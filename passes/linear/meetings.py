"""Numbers of a graph that meet a size which differs from run to run: where such a size passes one of them, a graph may
compute something else.

What every node read is noted at several points. An operand that is not the same at all of them varies. The numbers that
a varying operand meets, by number:

    1  elementwise operators on numbers that are known in every run: those of the operands that do not vary
    2  Slice: constant starts and ends along an axis that varies; the size of an axis, where starts or ends vary
    3  Gather and its kin, and ScatterElements and ScatterND: constant indices along an axis that varies; the sizes of
       the data, where the indices vary. An index beyond the end of an axis is an error
    4  Trilu and EyeLike: a constant diagonal of a matrix that varies, and its other size where only one varies
    5  Pad and Concat: what is put before or behind along an axis that varies, where its size does not
    6  Range and OneHot: the operands that do not vary
    7  Loop and Scan: a constant number of iterations. What such a loop counts does not vary: it is the same at all
       points
    8  the sizes of what enters a region: what their formulas add, and the numbers in their minima and quotients
    9  Slice and Split: a step, the number of parts and their sizes, along an axis that varies
   10  any other operator that has a rule in operators.py and is not in `NOTHING`: its attributes and the operands that
       do not vary. Of an operator that moves elements each of them may be a step, or a number of rows that are left out
   11  all of them: what the sizes of an axis that varies, and the integers of an operand that does, are multiples of. A
       Tile, a Concat of several copies and a Reshape multiply a length as a Mul does. So does Size
   12  Gather and Slice, of elements that vary on an axis that does not: the constant indices, starts and ends. A table
       of 100 rows whose first ones are written differs in row 50 from the 51st on
   13  Add and Sub of positions and what varies: twice a length

Positions, such as a Range over the tokens and the distances of tokens, are tensors whose shape varies. Not all lengths
of them are computed. So the numbers that they meet tell where they change only where they are sums, multiples, and
quotients and remainders of one kind. The region is unclear where positions are

   14  multiplied with what varies or divided by it, or added up
   15  divided after a product or another division, by a fraction, or by numbers of which none is a multiple of all
       others; added to what varies after a product, or twice
   16  large: integers that wrap at a later position, floats that become infinite there

Nothing longer than `MOST_ITERATIONS` is run of a loop. So a body that computes more than sums and multiples of its
iterations, reads a table at places that vary, or carries a number or a size that is none of them, is unclear. So is one
with a loop in it that runs more or less often than before, or gives other integers. What a graph computes of a length
outside of loops is computed at every length, too (walk.py).

Where rows that vary are written into a table whose size does not, whatever reads the table meets each of its rows.

The size of a table (2 and 3) is noted as such where its elements differ: a length that is not looked at may read
elements that were not read before.

Floats count only where a length that has become one is compared or rounded. A number below 1 counts by its inverse.
Of a tensor with many numbers the ends of runs of successive integers count, since a length passes one by one what lies
between them.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, combinations_with_replacement, permutations, product
from typing import TypeAlias

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Atom, Dim
from fa_compiler.passes.ir.nodes import int_attr, is_op, producer, without_none
from fa_compiler.passes.linear.operators import EXACT, RULES
from fa_compiler.passes.linear.tensors import Tensor, exact
from fa_compiler.passes.ops.elementwise import COMPARISONS, FOUR_OPERATIONS
from fa_compiler.passes.ops.movers import ARRAY_MOVES, PICKS

ROUGH = (*COMPARISONS, "Min", "Max", "Clip", "Mod", "Sign", "Abs", "Floor", "Ceil", "Round", "Relu", "Cast")
"""Operators that may change with a float."""
ELEMENTWISE = (*ROUGH, *FOUR_OPERATIONS, "Pow", "Where", "Sum")
BENT = ("Sqrt", "Log", "Sin", "Cos", "Exp", "Pow")
SUMMING = ("ReduceSum", "CumSum", "MatMul")
"""Operators whose results grow with the square of a length, or faster, where their operands grow with it."""
CUTTING = ("Div", "Mod", "Floor", "Ceil", "Round")
"""Operators that give the same for several positions."""
LOOPS = ("Loop", "Scan")
COMPUTING = (*ELEMENTWISE, *BENT, *SUMMING)
MERGING = ("Size", "Reshape", "Flatten")
"""Operators that multiply sizes. Their own integers meet no length: a Reshape to sizes that do not fit is an error, and
0 and -1 always fit."""
SCATTERS = ("ScatterElements", "Scatter", "ScatterND")
NOTHING: Mapping[str, str] = {
    **dict.fromkeys(("Identity", "Neg", "Not", "Reciprocal"), "it has no other operand"),
    **dict.fromkeys(("Transpose", "Squeeze", "Unsqueeze"), "its integers are axes"),
    **dict.fromkeys(("Einsum", "Expand"), "it fails where two sizes differ and neither is 1"),
    "ConstantOfShape": "its operand is the shape of its result",
}
"""The operators with a rule in operators.py that are not noted, each with the reason why no length meets a number in
it. Their results have the sizes that the next operator meets (11)."""
NOTED = frozenset({*RULES, *EXACT, *LOOPS} - NOTHING.keys())
NARROW = 2
"""Numbers of so many bytes or fewer are cut or rounded where a length is large."""
WIDE = 8
"""Integers of fewer bytes wrap where positions are multiplied by more than a few."""
WHOLE = 2.0**-20
"""A float is an integer, or the inverse of one, up to so much of it."""
MOST_PLACES = 1 << 20
"""Positions that are larger at the lengths that are looked at may be too large for 32 bits at others."""
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
    """One operand: its shape, its elements by a checksum, and whether they are known in every run."""

    shape: tuple[int, ...]
    checksum: int
    is_exact: bool
    is_float: bool
    is_narrow: bool = False
    numbers: tuple[float, ...] | None = field(default=None, compare=False)
    """All elements, where there are few of them; otherwise the ends of the runs. None where they are too many, or were
    not asked for."""
    is_uniform: bool = field(default=False, compare=False)
    """Are all elements equal?"""
    ends: tuple[float, float] = field(default=(0.0, 0.0), compare=False)
    """The least and the largest element that is finite."""
    size: int = field(default=8, compare=False)
    """The bytes of an element."""


Row: TypeAlias = "tuple[Note | None, ...]"


def _note(tensor: Tensor | None, is_new: bool) -> Note | None:
    """A note of one operand. The numbers of a tensor of many elements are noted when its reader is new."""
    if tensor is None:
        return None
    array = tensor.exact
    if array is None:
        return Note(tensor.shape, 0, False, True)
    checksum = zlib.crc32(array.tobytes())
    is_float = array.dtype.kind not in "biu"
    is_narrow = array.dtype.itemsize <= NARROW and array.dtype.kind != "b"
    note = Note(tensor.shape, checksum, True, is_float, is_narrow, ends=_finite_ends(array), size=array.dtype.itemsize)
    if array.size <= SMALL:
        numbers = tuple(array.reshape(-1).tolist())
        return replace(note, numbers=numbers, is_uniform=len(set(numbers)) <= 1)
    if not is_new:
        return note
    ends = _ends_of_runs(array)
    return replace(note, numbers=ends, is_uniform=ends is not None and len(ends) == 1)


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
    """The numbers of a tensor, without those between their neighbours; None where they are too many."""
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
    """What positions are divided by. No walk over the lengths knows where their quotients meet a sum."""
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
    """Are positions added to what varies? Distances, and positions from both ends, may be compared together."""
    turns: set[int] = field(default_factory=set)
    """The lengths at which what is computed of a length turns (walk.py)."""
    is_unclear: bool = False
    """Is a root or logarithm of a length compared or rounded, or does a length meet too many numbers?"""

    @property
    def chunks(self) -> list[int]:
        """What may be the size of a chunk."""
        return sorted(number for number in self.compared | self.divisors if number >= LEAST)

    @property
    def edges(self) -> list[int]:
        """The sizes at which the graph may begin to compute something else: where two sums of multiples of a length and
        of numbers meet, one of which may be 0."""
        found = _sums(sorted(self.added | self.compared)) | self.divisors
        if self.has_places:  # each comparison may be one with >, which begins at the next token
            several = range(2, MOST_TERMS + (len(self.compared) <= FEW))
            groups = [each for times in several for each in combinations_with_replacement(self.compared, times)]
            found |= {sum(each) + more for each in groups for more in (0, len(each) - 1)}
        slopes, signs = {0, 1, *self.factors}, (-1, 1) if self.added else (-1,)  # n - 100 of n rows is 2 n - 100
        steps = {abs(one + sign * other) for one, other, sign in product(slopes, slopes, signs)} - {0}
        pairs = [*product(self.compared, self.divisors)]
        found |= {number * divisor for number, divisor in product([*found], self.divisors_of_places)}
        found |= {other // number for number, other in pairs} | self._multiples
        found |= {number // step for number, step in product(found, steps)}
        if self.has_squares:
            found |= self.factors
            found |= {round((times * number) ** (1 / root)) for number, root, times in product(found, (2, 3), (1, 2))}
        return sorted({*self.turns, *(number for number in found if LEAST <= number < ENDLESS)})

    @property
    def _multiples(self) -> set[int]:
        """The lengths at which a quotient of a length, or a quotient of another divisor of it, meets a number.

        A number may be subtracted in front of each quotient: ((n - a) / d - b) / e is c where n is (c e + b) d + a.
        """
        moves = [*product({0, *self.added, *self.cut}, (-1, 1))]

        def before(met: Iterable[int], divisor: int) -> set[int]:
            return {number * divisor + sign * other for number, (other, sign) in product(met, moves)}

        once = {divisor: before(self.compared, divisor) for divisor in self.divisors}
        twice = (before(once[last], first) for first, last in permutations(self.divisors, 2))
        sums = _sums(sorted(self.begun | self.compared)) if self.begun else set[int]()
        iterations = {number * divisor for number, divisor in product(sums, self.divisors)}
        return {abs(length) for length in chain(*once.values(), *twice, iterations)}

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
        if not 0 < size < ENDLESS or (size < 1 and 1 / size >= ENDLESS):
            return
        whole = math.ceil(size if size >= 1 else 1 / size)
        if whole == 1:
            return
        if op_type in ("Add", "Sub", "Sum"):
            self.added.add(whole)
        elif op_type in ("Pad", "Concat"):  # a row that is not the first one any more, and all that are cut afterwards
            self.added.add(whole)
            self.compared.add(whole)
        elif op_type in ("Div", "Mod") or (op_type == "Mul" and size < 1):
            self.divisors.add(whole)
        elif op_type in ("Mul", "Pow", "Tile"):
            self.factors.add(whole)
        else:
            self.compared.add(whole)
            if op_type == "Slice":
                self.cut.add(whole)


def _sums(numbers: Sequence[int]) -> set[int]:
    """The sums and differences of up to three of these numbers; of many numbers, of up to two."""
    found = [{0}] + [set[int]() for _ in range(MOST_TERMS if len(numbers) <= FEW else 2)]
    for number in numbers:
        for terms in range(len(found) - 1, 0, -1):
            found[terms] |= {abs(each + sign * number) for each in found[terms - 1] for sign in (-1, 1)}
    return set().union(*found)


@dataclass
class Meetings:
    """What the nodes of a region read at several points, and the sizes of what enters it."""

    points: list[dict[ir.Node, set[Row]]] = field(default_factory=list)
    sizes: set[Dim] = field(default_factory=set)
    readers: set[ir.Node] = field(default_factory=set)
    """The nodes of which something is noted."""
    bent: set[ir.Node] = field(default_factory=set)
    """The loops that carry a number or a size which is no multiple of the iteration, and those in bodies that run, or
    give integers, in another way than before."""
    given: dict[ir.Node, tuple[bytes, ...]] = field(default_factory=dict)
    """The integers that a loop in a body gave first."""
    made: dict[ir.Value, set[tuple[tuple[tuple[int, ...], ...], tuple[bytes, ...]]]] = field(default_factory=dict)
    """The shapes and the elements of what a region makes outside of bodies."""

    def begin(self) -> None:
        """Another point begins."""
        self.points.append({})

    def add(self, node: ir.Node, operands: Sequence[Tensor | None]) -> None:
        """Note what a node reads."""
        if node.op_type in NOTED:
            if is_op(node, *SCATTERS):
                operands = [operands[0], *_places(node, operands[1])]
            is_new = node not in self.readers
            self.points[-1].setdefault(node, set()).add(tuple(_note(operand, is_new) for operand in operands))
            self.readers.add(node)

    def make(self, value: ir.Value, tensors: Sequence[Tensor]) -> None:
        """Note what a node of a region makes, outside of bodies, that is read, known in every run and small."""
        arrays = without_none(tensor.exact for tensor in tensors)
        if value.uses() and len(arrays) == len(tensors) and sum(array.size for array in arrays) <= SMALL:
            shapes, numbers = (array.shape for array in arrays), (array.tobytes() for array in arrays)
            self.made.setdefault(value, set()).add((tuple(shapes), tuple(numbers)))

    def gives_same(self, node: ir.Node, tensors: Iterable[Tensor]) -> bool:
        """Are the integers among the results of a loop in a body, which are the same in every run, what they were?"""
        arrays = without_none(tensor.exact for tensor in tensors if tensor.is_known_integer)
        integers = tuple(array.tobytes() for array in arrays)
        return self.given.setdefault(node, integers) == integers

    def small(self) -> Iterator[ir.Value]:
        """What a region makes outside of bodies that is read, known in every run and small, and is not the same at all
        points, but has one shape."""
        for value, seen in self.made.items():
            if len(seen) > 1 and len({shapes for shapes, _ in seen}) == 1:
                yield value

    def hides(self, members: Collection[ir.Node]) -> bool:
        """Does a body of the members carry, or make of an iteration, what only a run of more iterations shows?"""
        return bool(self.bent) or any(met.is_hidden for met in self._met(lambda node: node not in members))

    def numbers(self, names: Collection[str] = ()) -> Numbers:
        """The numbers that meet a size which varies: one of these names, where some are given. A batch does not meet
        the number of iterations of a Loop over the tokens."""
        found = _read(self._met(lambda node: not (names and is_op(node, *LOOPS))))
        for size in self.sizes:
            if not size.is_const and (not names or any(name in names for name in names_of(size))):
                found.has_squares |= _has_square(size)
                found.add("Add", size.addend)
            _enter(size, found, names)
        return found

    def _met(self, counts: Callable[[ir.Node], bool]) -> list[_Met]:
        """What is noted of the nodes that count."""
        nodes = dict.fromkeys(node for point in self.points for node in point if counts(node))
        return [_Met(node, [point[node] for point in self.points if node in point]) for node in nodes]


def _read(met: Sequence[_Met]) -> Numbers:
    """The numbers that were met in these nodes."""
    counts_floats = any(each.is_rough for each in met)
    counted = [each for each in met if counts_floats or not each.has_floats]
    found = Numbers(has_squares=any(each.is_square for each in met))
    found.is_unclear = any(each.is_crowded(counts_floats) or each.is_written for each in met)
    found.is_unclear |= any(each.is_bent or each.is_narrow or each.is_tangled for each in counted)  # 14 and 16
    found.is_unclear |= _are_mixed(counted)
    for each in met:
        each.enter(found, counts_floats)
    return found


def _are_mixed(met: Sequence[_Met]) -> bool:
    """Are positions divided, or added to what varies, after a product or twice? Are they divided by several kinds of
    numbers?"""  # 15
    cut = {each.node: each for each in met if is_op(each.node, *CUTTING) and each.is_sequence(0)}
    products = [each.node for each in met if is_op(each.node, "Mul") and each.places]
    joined = [each.node for each in met if each.is_joined]
    quotients = [node for node in cut if is_op(node, "Div", "Mod")]
    pairs = ((joined, [*joined, *products]), (cut, cut), (quotients, products))
    return _are_kinds(cut.values()) or any(_is_behind(node, others) for nodes, others in pairs for node in nodes)


def _are_kinds(met: Iterable[_Met]) -> bool:
    """Is a divisor no multiple of another one, nor the other of it?"""
    divisors = {abs(number) for each in met for number in each.constant(1)} - {0}
    return any(number % other and other % number for number, other in combinations(divisors, 2))


def _is_fraction(number: float) -> bool:
    """Is neither a number nor its inverse an integer, up to rounding?"""
    sizes = (abs(number), 1 / abs(number)) if number else ()
    return bool(sizes) and all(abs(size - round(size)) > WHOLE * size for size in sizes if math.isfinite(size))


def _is_behind(node: ir.Node, others: Collection[ir.Node]) -> bool:
    """Does a node read what one of these nodes makes?"""
    found, pending = {node}, [node]
    while pending:
        makers = {*without_none(map(producer, pending.pop().inputs))} - found
        if not makers.isdisjoint(others):
            return True
        found |= makers
        pending.extend(makers)
    return False


def _differ(sizes: Sequence[int]) -> bool:
    return len({*sizes}) > 1


def _tells(sizes: Sequence[int], others: Sequence[int]) -> bool:
    """Is there one other size for each size? The batch and the tokens do not vary together, and neither tells the
    other."""
    return len({*zip(sizes, others, strict=True)}) == len({*sizes})


def _step(numbers: Iterable[int]) -> int:
    """The largest number of which all of these are multiples, apart from one and the same number; 0 for one number."""
    first, *others = {*numbers} or {0}
    return math.gcd(*(number - first for number in others))


def names_of(size: Dim) -> Iterator[str]:
    """The names of the sizes in a size that differ from run to run."""
    for atom in size.atoms:
        yield from _names_in(atom)


def _names_in(atom: Atom) -> Iterator[str]:
    if atom.args:
        for arg in atom.args:
            yield from names_of(arg)
    else:
        yield atom.name


def _has_square(size: Dim) -> bool:
    """Is a size multiplied with itself, or with what is computed from it?"""
    pairs = (pair for monomial, _ in size.terms for pair in combinations(monomial, 2))
    return any(not {*_names_in(one)}.isdisjoint(_names_in(other)) for one, other in pairs)


def _enter(size: Dim, found: Numbers, names: Collection[str]) -> None:
    """Enter the numbers in the minima and quotients of a size: of one of these names, where some are given."""  # 8
    for atom in size.atoms:
        for arg in (
            atom.args if not names or any(name in names for part in atom.args for name in names_of(part)) else ()
        ):
            found.add("Div" if arg.is_const and atom.op in ("floor", "trunc", "mod", "fmod") else "Less", arg.addend)
            _enter(arg, found, names)


@dataclass(frozen=True)
class _Met:
    """The rows of one node, at each point."""

    node: ir.Node
    points: Sequence[set[Row]]

    @property
    def is_rough(self) -> bool:
        """Is a float that varies compared or rounded?"""
        return is_op(self.node, *ROUGH) and any(
            self.varies(index) and self._all(index, lambda note: note.is_exact and note.is_float)
            for index in range(self.width)
        )

    def enter(self, found: Numbers, counts_floats: bool) -> None:
        """Enter the numbers that what varies meets."""
        own = Numbers()
        for number in self.numbers(counts_floats):
            own.add(self.node.op_type, number)
        found.include(own)
        if any(map(self.is_sequence, range(self.width))):
            found.divisors_of_places |= own.divisors
        found.divisors.update(self._parts())
        found.cut.update(self._of_unlisted_move())
        found.tables.update(self.tables())
        found.factors.update(step for step in self._multiples() if step > 1)
        if self.is_joined:
            found.factors.add(2)  # 13
            found.has_places = True

    @property
    def is_hidden(self) -> bool:
        """Is it more than a sum, or a multiple, of integers that vary? Are these large enough to wrap? Does it read a
        table at places that vary, or add up its elements?"""
        if self._is_looked_up or self._is_marked or (is_op(self.node, *SUMMING) and self._is_exact(True)):
            return True
        if not (is_op(self.node, *COMPUTING) and self._any_varies and self._is_exact(True)):
            return False
        given = [note for index in range(self.width) for note in self._given(index)]
        is_wrapped = self._is_large and is_op(self.node, *FOUR_OPERATIONS, "Cast")
        is_product = self.is_square or is_op(self.node, "Div", "Mod", *BENT, *SUMMING)
        return is_product or any(note.is_float for note in given) or is_wrapped

    @property
    def _is_looked_up(self) -> bool:
        """Does it read a part of known elements that differ, where the part or the number of elements varies?"""
        table = self._told(0)
        if not is_op(self.node, "Slice", "Split", "Pad", *PICKS) or table is None or not table.is_exact:
            return False
        varies = self.is_sequence(0) or any(self.varies(index) for index in range(1, self.width))
        return varies and not table.is_uniform

    @property
    def _is_marked(self) -> bool:
        """Do several known elements that vary mark those of a table?"""
        told = [(self.varies(index), self._told(index)) for index in range(self.width)]
        tables = [varies for varies, note in told if note is not None and note.is_exact and not note.is_uniform]
        return is_op(self.node, "Mul", "Where", "And", "Or", "Xor") and len(tables) > 1 and any(tables)

    def is_place(self, index: int) -> bool:
        """Is an operand one of positions? Its shape varies, its elements are known and differ, and are no truth
        values."""
        notes = self._given(index)
        if not self.is_sequence(index):
            return False
        least, most = min(note.ends[0] for note in notes), max(note.ends[1] for note in notes)
        return any(note.ends[0] < note.ends[1] for note in notes) and max(abs(least), abs(most)) > 1

    def is_sequence(self, index: int) -> bool:
        """Is an operand known, and does its shape vary?"""
        notes = self._given(index)
        return len({note.shape for note in notes}) > 1 and self._all(index, lambda note: note.is_exact)

    @property
    def places(self) -> list[int]:
        """The operands that are positions."""
        return [*filter(self.is_place, range(self.width))]

    @property
    def _varying(self) -> int:
        """How many operands vary."""
        return sum(map(self.varies, range(self.width)))

    @property
    def is_joined(self) -> bool:
        """Are positions added to, or subtracted from, what varies?"""
        return is_op(self.node, "Add", "Sub", "Sum") and self._varying > 1 and bool(self.places)

    @property
    def is_tangled(self) -> bool:
        """Are positions multiplied with what varies, or by a fraction, added up, or large?"""
        if not self.places or not is_op(self.node, *COMPUTING) or not self._is_exact(True):
            return False
        if is_op(self.node, "Mul", "Div", "Mod"):
            given = (*self.constant(0), *self.constant(1))
            return self._varying > 1 or any(map(_is_fraction, given)) or self._is_large  # 14 and 15
        return is_op(self.node, *SUMMING, "Pow") or (not self.has_floats and self._is_large)

    @property
    def _is_large(self) -> bool:
        """Are numbers so large that they wrap, or become infinite, at later positions?"""  # 16
        notes = [note for index in range(self.width) for note in self._given(index)]
        is_cut = is_op(self.node, "Cast") or (is_op(self.node, *FOUR_OPERATIONS) and notes[0].size < WIDE)
        limit = MOST_PLACES if is_cut and not self.has_floats else ENDLESS
        return any(abs(end) >= limit for note in notes for end in note.ends)

    @property
    def is_bent(self) -> bool:
        """Is it no polynomial of what is known and varies? Of a power it is the exponent."""
        index = 1 if is_op(self.node, "Pow") else 0
        return is_op(self.node, *BENT) and self._is_exact(True) and self.varies(index)

    @property
    def has_floats(self) -> bool:
        """Is the first operand one of floats?"""
        return self._all(0, lambda note: note.is_float)

    @property
    def is_narrow(self) -> bool:
        """Is an operand of few bits, whose numbers are others at other points, and are they no truth values?"""
        notes = [note for index in range(self.width) for note in self._given(index) if note.is_narrow]
        are_truths = all(note.numbers is not None and max(map(abs, note.numbers), default=0) <= 1 for note in notes)
        return self._any_varies and not are_truths

    @property
    def is_square(self) -> bool:
        """Do all factors vary, or the first operand of a power or a sum, and are they known? Do two sizes of an operand
        whose sizes are multiplied, of which one tells the other?"""
        if is_op(self.node, *MERGING):
            shapes = {note.shape for note in self._given(0)}
            return any(_tells(*pair) for pair in permutations(filter(_differ, zip(*shapes, strict=False)), 2))
        if not is_op(self.node, "Mul", "Pow", *SUMMING) or not self._is_exact(True):
            return False
        return all(map(self.varies, range(self.width if is_op(self.node, "Mul", "MatMul") else 1)))

    @property
    def width(self) -> int:
        """How many operands there are."""
        return max(len(row) for point in self.points for row in point)

    def notes(self, index: int) -> list[Note | None]:
        """An operand in all rows."""
        return [row[index] if index < len(row) else None for point in self.points for row in point]

    def varies(self, index: int) -> bool:
        """Is an operand not the same at all points?"""
        return len({frozenset(row[index] if index < len(row) else None for row in point) for point in self.points}) > 1

    def _given(self, index: int) -> list[Note]:
        return without_none(self.notes(index))

    @property
    def _any_varies(self) -> bool:
        return any(map(self.varies, range(self.width)))

    def _all(self, index: int, holds: Callable[[Note], bool]) -> bool:
        return all(note is not None and holds(note) for note in self.notes(index))

    def constant(self, index: int) -> tuple[float, ...]:
        """The numbers of an operand that does not vary; none where it does."""
        notes = {note: note.numbers or () for note in self._given(index) if note.numbers is not None}
        return () if self.varies(index) else tuple(number for numbers in notes.values() for number in numbers)

    def _told(self, index: int) -> Note | None:
        """A note of an operand, one with its numbers if there is one."""
        notes = self._given(index)
        return next((note for note in notes if note.numbers is not None), notes[0] if notes else None)

    def numbers(self, counts_floats: bool) -> Iterator[float]:
        """The numbers that what varies meets."""
        own = _NUMBERS.get(self.node.op_type)
        if own is not None:
            yield from own(self)  # 2 to 5, 7, 9 and 12
        elif (not is_op(self.node, *COMPUTING) or self._is_exact(counts_floats)) and self._any_varies:
            yield from (number for index in range(self.width) for number in self.constant(index))  # 1, 6 and 10
            if not is_op(self.node, *COMPUTING):
                yield from (number for number in self._attributes() if abs(number) >= LEAST)

    def _attributes(self) -> Iterator[int]:
        for attr in self.node.attributes.values():
            if attr.type in (ir.AttributeType.INT, ir.AttributeType.INTS):
                yield from (attr.as_int(),) if attr.type == ir.AttributeType.INT else attr.as_ints()

    def is_crowded(self, counts_floats: bool) -> bool:
        """Does what varies meet a table of too many numbers, element by element?"""
        if not (is_op(self.node, *ELEMENTWISE) and self._is_exact(counts_floats) and self._any_varies):
            return False
        told = [self._told(index) for index in range(self.width) if not self.varies(index)]
        return any(note is not None and note.numbers is None for note in told)

    @property
    def is_written(self) -> bool:
        """Are rows that vary written into a table whose size does not?"""
        return is_op(self.node, *SCATTERS) and any(
            self.varies(index) and not self._axis_varies(axis) for index, axis in self._written_axes
        )

    @property
    def _written_axes(self) -> Iterable[tuple[int, int]]:
        """The places that a scatter writes, by the number of the note, and the axis that they are on."""
        first = int_attr(self.node, "axis", 0)
        return ((index, first + index - 1) for index in range(1, self.width))

    def _of_scatter(self) -> Iterator[float]:  # 3
        for index, axis in self._written_axes:
            if self._axis_varies(axis):
                yield from self.constant(index)

    def _multiples(self) -> Iterator[int]:  # 11
        """What the sizes and integers that vary are multiples of, but for a number that is added to all of them."""
        for index in filter(self.varies, range(self.width)):
            notes = self._given(index)
            shapes = {note.shape for note in notes}
            whole = {int(number) for note in notes if not note.is_float for number in note.numbers or ()}
            yield from map(_step, (*zip(*shapes, strict=False), whole))
            if is_op(self.node, "Size"):
                yield _step([math.prod(shape) for shape in shapes])

    def tables(self) -> Iterator[int]:
        """The sizes of a table whose elements differ, where the part of it that is read varies."""
        table = self._told(0)
        if not is_op(self.node, "Slice", *PICKS) or table is None or not table.is_exact or table.is_uniform:
            return
        if not self.varies(0) and any(self.varies(index) for index in range(1, self.width)):
            yield from table.shape

    def _parts(self) -> Iterator[int]:
        """The steps of a Slice and the number of parts of a Split along an axis that varies, or what may be."""  # 9
        yield from self._of_unlisted_move()
        if is_op(self.node, "Slice") and any(map(self._axis_varies, map(int, self._sliced_axes()))):
            yield from (abs(int(step)) for step in self.constant(4) if abs(step) > 1)
        if is_op(self.node, "Split") and self._axis_varies(int_attr(self.node, "axis", 0)):
            yield len(self.node.outputs)

    def _of_unlisted_move(self) -> Iterator[int]:  # 10
        """The integers of an operator that moves elements and has no row in `_NUMBERS`."""
        if is_op(self.node, *ARRAY_MOVES) and self.node.op_type not in _NUMBERS and self._any_varies:
            given = (number for index in range(self.width) for number in self.constant(index))
            yield from (abs(int(number)) for number in chain(given, self._attributes()) if 1 < abs(number) < ENDLESS)

    def _of_split(self) -> Iterator[float]:  # 9
        if self._axis_varies(int_attr(self.node, "axis", 0)):
            given = self.node.attributes.get("split")
            yield from self.constant(1) if given is None else given.as_ints()

    def _of_tile(self) -> Iterator[float]:  # 10
        for axis, times in enumerate(self.constant(1)):
            if self._axis_varies(axis):
                yield times

    def _of_diagonal(self) -> Iterator[float]:
        sizes = [self._sizes(axis) for axis in (-1, -2)]
        if any(len(found) > 1 for found in sizes):
            yield from (int_attr(self.node, "k", 0),) if is_op(self.node, "EyeLike") else self.constant(1)
            yield from (size for found in sizes if len(found) == 1 for size in found)

    def _is_exact(self, counts_floats: bool) -> bool:
        """Are all operands known, and integers, or floats that count?"""
        given = [index for index in range(self.width) if self.notes(index)[0] is not None]
        return all(self._all(i, lambda note: note.is_exact and (counts_floats or not note.is_float)) for i in given)

    def _axis_varies(self, axis: int) -> bool:
        return len(self._sizes(axis)) > 1

    def _sizes(self, axis: int, index: int = 0) -> set[int]:
        """The sizes of an axis of an operand, the first one if not told."""
        shapes = [note.shape for note in self.notes(index) if note is not None]
        return {shape[axis] for shape in shapes if -len(shape) <= axis < len(shape)}

    def _of_slice(self) -> Iterator[float]:  # 2
        for place, axis in enumerate(self._sliced_axes()):
            for bounds in self._bounds(place):
                if self._axis_varies(axis) and len(bounds) == 1:
                    yield from bounds
                if len(bounds) > 1 and not self._axis_varies(axis):
                    yield from self._sizes(axis)
                if len(bounds) == 1 and self._elements_vary:
                    yield from self._within(bounds, axis)

    @property
    def _elements_vary(self) -> bool:
        """Are the elements of the first operand known, and not the same at all points?"""
        return self.varies(0) and self._all(0, lambda note: note.is_exact)

    def _within(self, places: Iterable[float], axis: int) -> Iterator[float]:  # 12
        """The places inside of an axis that does not vary, without those that are passed in any case."""
        for size in self._sizes(axis) if not self._axis_varies(axis) else ():
            yield from (place for place in places if LEAST <= abs(place) < size)

    def _sliced_axes(self) -> Sequence[int]:
        """The axes that a Slice cuts."""
        given = self.node.attributes.get("axes")
        if given is not None:
            return list(given.as_ints())
        return [int(number) for number in self.constant(3)] or range(self._count)

    @property
    def _count(self) -> int:
        """How many axes a Slice without a list of them cuts."""
        return max((len(row) for rows in self._ends() for row in rows), default=0)

    def _bounds(self, place: int) -> list[set[float]]:
        """The starts and the ends at one place in all rows."""
        return [{row[place] for row in rows if place < len(row)} for rows in self._ends()]

    def _ends(self) -> list[list[tuple[float, ...]]]:
        """The starts and the ends in all rows."""
        names = ("starts", "ends")
        if names[0] in self.node.attributes:
            return [[tuple(self.node.attributes[name].as_ints())] for name in names]
        notes = (self.notes(1), self.notes(2))
        return [[note.numbers for note in each if note is not None and note.numbers] for each in notes]

    def _of_gather(self) -> Iterator[float]:  # 3
        table, indices = self._told(0), self._told(1)
        if table is None or indices is None:
            return
        axes = range(indices.shape[-1]) if is_op(self.node, "GatherND") else (int_attr(self.node, "axis", 0),)
        for axis in axes:
            if self._axis_varies(axis):
                yield from self.constant(1)
            elif self.varies(1):
                yield from self._sizes(axis)
            elif self._elements_vary:
                yield from self._within(self.constant(1), axis)

    def _of_concat(self) -> Iterator[float]:  # 5
        axis = int_attr(self.node, "axis", 0)
        sizes = [self._sizes(axis, index) for index in range(self.width)]
        if any(len(found) > 1 for found in sizes):
            yield from (size for found in sizes if len(found) == 1 for size in found)

    def _of_pad(self) -> Iterator[float]:  # 5
        listed_pads = self.node.attributes.get("pads")
        pads = self.constant(1) if listed_pads is None else tuple(listed_pads.as_ints())
        rank = len(pads) // 2
        listed = self.constant(3) or range(rank)
        for place, axis in enumerate(listed):
            if place < rank and self._axis_varies(int(axis)):
                yield from (pads[place], pads[place + rank])


_NUMBERS: Mapping[str, Callable[[_Met], Iterable[float]]] = {
    **dict.fromkeys(LOOPS, lambda met: met.constant(0)),
    **dict.fromkeys(MERGING, lambda _: ()),
    **dict.fromkeys(PICKS, _Met._of_gather),
    **dict.fromkeys(("Trilu", "EyeLike"), _Met._of_diagonal),
    **dict.fromkeys(SCATTERS, _Met._of_scatter),
    "Slice": _Met._of_slice,
    "Split": _Met._of_split,
    "Tile": _Met._of_tile,
    "Pad": _Met._of_pad,
    "Concat": _Met._of_concat,
}
