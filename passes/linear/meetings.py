"""Numbers of a graph that meet a size which differs from run to run: where such a size passes one of them, a graph may
compute something else.

What every node read is noted at several points. An operand that is not the same at all of them varies. The numbers that
a varying operand meets, by number:

    1  elementwise operators on numbers that are known in every run: those of the operands that do not vary
    2  Slice: constant starts and ends along an axis that varies; the size of an axis, where starts or ends vary
    3  Gather and its kin: constant indices along an axis that varies. An index beyond the end of an axis is an error
    4  Trilu: a constant diagonal of a matrix that varies
    5  Pad: constant pads along an axis that varies
    6  Range and OneHot: the operands that do not vary
    7  Loop: a constant number of iterations
    8  the sizes of what enters a region: the numbers in the minima and quotients of their formulas

Floats count only where a length that has become one is compared or rounded. A number below 1 counts by its inverse.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import int_attr, is_op
from fa_compiler.passes.linear.tensors import Tensor

ROUGH = (
    *("Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal", "Min", "Max", "Clip", "Mod", "Sign", "Abs"),
    *("Floor", "Ceil", "Round", "Relu", "Cast"),
)
"""Operators that may change with a float."""
ELEMENTWISE = (*ROUGH, "Add", "Sub", "Mul", "Div", "Pow", "Where", "Sum")
BENT = ("Sqrt", "Log")
GATHERS = ("Gather", "GatherElements", "GatherND")
SMALL = 64
"""Of tensors with more elements only the shape is noted."""
LEAST = 4
"""Smaller numbers are passed by the lengths that are looked at in any case."""
ENDLESS = 1 << 31
"""What is not smaller stands for the end of an axis."""


@dataclass(frozen=True)
class Note:
    """One operand: its shape, its numbers where there are few, and whether they are known in every run."""

    shape: tuple[int, ...]
    numbers: tuple[float, ...] | None
    is_exact: bool
    is_float: bool


Row: TypeAlias = "tuple[Note | None, ...]"


def _note(tensor: Tensor | None) -> Note | None:
    if tensor is None:
        return None
    array = tensor.exact
    if array is None:
        return Note(tensor.shape, None, False, True)
    numbers = tuple(array.reshape(-1).tolist()) if array.size <= SMALL else None
    return Note(tensor.shape, numbers, True, array.dtype.kind == "f")


@dataclass
class Numbers:
    """The numbers by what is done with them."""

    compared: set[int] = field(default_factory=set)
    """What a size is compared with, cut at or repeated for."""
    divisors: set[int] = field(default_factory=set)
    """What it is divided by; those of remainders, too."""
    added: set[int] = field(default_factory=set)
    factors: set[int] = field(default_factory=set)
    has_squares: bool = False
    """Is what varies multiplied with what varies?"""
    is_unclear: bool = False
    """Is a root or logarithm of a length compared or rounded?"""

    @property
    def chunks(self) -> list[int]:
        """What may be the size of a chunk."""
        return sorted(number for number in self.compared | self.divisors if number >= LEAST)

    @property
    def edges(self) -> list[int]:
        """The sizes at which the graph may begin to compute something else."""
        found = self.compared | self.divisors
        for number in self.compared:
            found |= {number + other for other in self.added} | {abs(number - other) for other in self.added}
            found |= {number * other for other in self.divisors} | {number // other for other in self.factors}
            found |= {other // number for other in self.divisors}
        if self.has_squares:
            found |= {math.isqrt(number) for number in found}
        return sorted(number for number in found if LEAST <= number < ENDLESS)

    def add(self, op_type: str, number: float) -> None:
        """Enter a number that an operator met."""
        size = abs(number)
        if not 0 < size < ENDLESS or (size < 1 and 1 / size >= ENDLESS):
            return
        whole = math.ceil(size if size >= 1 else 1 / size)
        if whole == 1:
            return
        if op_type in ("Add", "Sub", "Sum", "Pad"):
            self.added.add(whole)
        elif op_type in ("Div", "Mod") or (op_type == "Mul" and size < 1):
            self.divisors.add(whole)
        elif op_type in ("Mul", "Pow"):
            self.factors.add(whole)
        else:
            self.compared.add(whole)


@dataclass
class Meetings:
    """What the nodes of a region read at several points, and the sizes of what enters it."""

    points: list[dict[ir.Node, set[Row]]] = field(default_factory=list)
    sizes: set[Dim] = field(default_factory=set)

    def begin(self) -> None:
        """Another point begins."""
        self.points.append({})

    def add(self, node: ir.Node, operands: Sequence[Tensor | None]) -> None:
        """Note what a node reads."""
        if is_op(node, *ELEMENTWISE, *GATHERS, *BENT, "Slice", "Trilu", "Pad", "Range", "OneHot", "Loop"):
            self.points[-1].setdefault(node, set()).add(tuple(map(_note, operands)))

    def numbers(self, names: Collection[str] = ()) -> Numbers:
        """The numbers that meet a size which varies: one of these names, where some are given. A batch does not meet
        the number of iterations of a Loop over the tokens."""
        nodes = dict.fromkeys(node for point in self.points for node in point)
        met = [_Met(node, [point[node] for point in self.points if node in point]) for node in nodes]
        counts_floats = any(each.is_rough for each in met)
        found = Numbers(has_squares=any(each.is_square for each in met))
        found.is_unclear = counts_floats and any(each.is_bent for each in met)
        for each in met:
            for number in each.numbers(counts_floats) if not (names and is_op(each.node, "Loop")) else ():
                found.add(each.node.op_type, number)
        for size in self.sizes:
            _enter(size, found, names)
        return found


def names_of(size: Dim) -> Iterator[str]:
    """The names of the sizes in a size that differ from run to run."""
    for atom in size.atoms:
        if atom.args:
            for arg in atom.args:
                yield from names_of(arg)
        else:
            yield atom.name


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

    @property
    def is_bent(self) -> bool:
        """Is it a root or a logarithm of what is known and varies?"""
        return is_op(self.node, *BENT) and self._is_exact(True) and self.varies(0)

    @property
    def is_square(self) -> bool:
        """Do all factors vary, or the first operand of a power, and are they known?"""
        count = 1 if is_op(self.node, "Pow") else self.width
        return is_op(self.node, "Mul", "Pow") and self._is_exact(True) and all(map(self.varies, range(count)))

    @property
    def width(self) -> int:
        """How many operands there are."""
        return max(len(row) for point in self.points for row in point)

    def notes(self, index: int) -> list[Note | None]:
        """An operand in all rows."""
        return [row[index] if index < len(row) else None for point in self.points for row in point]

    def varies(self, index: int) -> bool:
        """Is an operand not the same in all rows, or too large to be compared?"""
        notes = set(self.notes(index))
        return len(notes) > 1 or any(note is not None and note.is_exact and note.numbers is None for note in notes)

    @property
    def _any_varies(self) -> bool:
        return any(map(self.varies, range(self.width)))

    def _all(self, index: int, holds: Callable[[Note], bool]) -> bool:
        return all(note is not None and holds(note) for note in self.notes(index))

    def constant(self, index: int) -> tuple[float, ...]:
        """The numbers of an operand that does not vary; none where it does."""
        notes = self.notes(index)
        first = notes[0] if notes else None
        return () if first is None or self.varies(index) else first.numbers or ()

    def numbers(self, counts_floats: bool) -> Iterator[float]:
        """The numbers that what varies meets."""
        node = self.node
        if is_op(node, "Loop"):
            yield from self.constant(0)  # 7
        elif is_op(node, "Slice"):
            yield from self._of_slice()  # 2
        elif is_op(node, *GATHERS):
            yield from self._of_gather()  # 3
        elif is_op(node, "Trilu"):
            yield from self.constant(1) if self._axis_varies(-1) or self._axis_varies(-2) else ()  # 4
        elif is_op(node, "Pad"):
            yield from self._of_pad()  # 5
        elif (is_op(node, "Range", "OneHot") or self._is_exact(counts_floats)) and self._any_varies:
            yield from (number for index in range(self.width) for number in self.constant(index))  # 1 and 6

    def _is_exact(self, counts_floats: bool) -> bool:
        """Are all operands known, and integers, or floats that count?"""
        given = [index for index in range(self.width) if self.notes(index)[0] is not None]
        return all(self._all(i, lambda note: note.is_exact and (counts_floats or not note.is_float)) for i in given)

    def _axis_varies(self, axis: int) -> bool:
        return len(self._sizes(axis)) > 1

    def _sizes(self, axis: int) -> set[int]:
        """The sizes of an axis of the first operand."""
        shapes = [note.shape for note in self.notes(0) if note is not None]
        return {shape[axis] for shape in shapes if -len(shape) <= axis < len(shape)}

    def _of_slice(self) -> Iterator[float]:
        for place, axis in enumerate(self._sliced_axes()):
            for bounds in self._bounds(place):
                if self._axis_varies(axis) and len(bounds) == 1:
                    yield from bounds
                if len(bounds) > 1 and not self._axis_varies(axis):
                    yield from self._sizes(axis)

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

    def _of_gather(self) -> Iterator[float]:
        axis = int_attr(self.node, "axis", 0)
        if self._axis_varies(axis):
            yield from self.constant(1)

    def _of_pad(self) -> Iterator[float]:
        pads = self.constant(1)
        rank = len(pads) // 2
        listed = self.constant(3) or range(rank)
        for place, axis in enumerate(listed):
            if place < rank and self._axis_varies(int(axis)):
                yield from (pads[place], pads[place + rank])
