"""For which numbers of tokens a region is right, where this number is open.

What is looked at, and what follows from it:

    1     lengths of 1 to 5 tokens show a loop
    2     an integer that the graph compares a length with, or divides it by, is taken for a chunk's size. Of each
          chunk, up to two beyond the length at which the operands were found, the first length, the middle and the
          last one are looked at
    3     between two such lengths of one chunk that are right, all are right: the operators of the region treat them
          alike, but for the sizes of pads and slices, which both ends have shown
    4     where only the multiples of a chunk are right, and all of these that were looked at, all multiples are
    5     where the last two chunks are right, too, all longer ones are: only a number of chunks that is written into
          the graph could tell them apart, and none is that large

Cases 3 to 5 are no polynomial identities. They hold because the operators that are followed (operators.py) do the same
for every size, and read no number of the graph but those of case 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import constant, is_op, subgraphs
from fa_compiler.passes.linear.regions import Region

ARITHMETIC = ("Mod", "Div", "Min", "Max", "Sub", "Add", "Less", "Greater", "LessOrEqual", "GreaterOrEqual", "Equal")
SMALL = (1, 2, 3, 5)
MOST_PROBES = 64
SMALLEST_CHUNK = 4
BEYOND = 2
METADATA = "fa_compiler.lengths"
"""The key under which an operator has the lengths, as JSON, in its metadata."""


@dataclass(frozen=True)
class Lengths:
    """The numbers of tokens that are right: ranges of a first and a last one, None where a range has no end; or all
    multiples of a `step`."""

    ranges: tuple[tuple[int, int | None], ...] = ((1, None),)
    step: int = 1

    @property
    def are_all(self) -> bool:
        """Is every length right?"""
        return self.ranges == ((1, None),) and self.step == 1

    def __contains__(self, length: int) -> bool:
        """Is a length right?"""
        if self.step > 1:
            return length % self.step == 0
        return any(first <= length and (last is None or length <= last) for first, last in self.ranges)

    @property
    def longest(self) -> int:
        """The largest number that tells lengths apart."""
        return max(self.step, *(last or first for first, last in self.ranges))

    def written(self) -> str:
        """The lengths as JSON."""
        return json.dumps({"ranges": self.ranges, "step": self.step})

    @staticmethod
    def read(text: str) -> Lengths:
        """Lengths from JSON. Raises ValueError or KeyError for another text."""
        given = json.loads(text)
        return Lengths(tuple((first, last) for first, last in given["ranges"]), given["step"])

    def __str__(self) -> str:
        if self.step > 1:
            return f"multiples of {self.step}"
        return " and ".join(_in_words(first, last) for first, last in self.ranges)


def _in_words(first: int, last: int | None) -> str:
    if last is None:
        return f"{first} or more"
    return str(first) if first == last else f"{first} to {last}"


def chunk_sizes(region: Region) -> list[int]:
    """The integers that lengths are compared with or divided by."""
    found = set[int]()
    for node in _all(region.nodes):
        if not is_op(node, *ARITHMETIC):
            continue
        arrays = [constant(value, limit=1) for value in node.inputs]
        numbers = [abs(int(each.reshape(-1)[0])) for each in arrays if each is not None and each.dtype.kind in "iu"]
        if len(numbers) < len(arrays):
            found.update(numbers)
    return sorted(number for number in found if number >= SMALLEST_CHUNK)


def _all(nodes: Sequence[ir.Node]) -> Iterator[ir.Node]:
    for node in nodes:
        yield node
        for graph in subgraphs(node):
            yield from _all([*graph])


def probes(sizes: Sequence[int], found: int) -> list[int] | None:
    """The lengths that are looked at; None where they are too many. `found` is the one at which the operands were
    found."""
    lengths = {*SMALL, found}  # 1: small ones
    for size in sizes:  # 2: those of each chunk
        for chunk in range(found // size + BEYOND + 1):
            first = chunk * size
            lengths.update((first + 1, first + size // 2, first + size))
    return sorted(lengths) if len(lengths) <= MOST_PROBES else None


def right_lengths(sizes: Sequence[int], found: int, is_right: Callable[[int], bool]) -> Lengths | None:
    """The lengths that are right; None where they cannot be told."""
    lengths = probes(sizes, found)
    if lengths is None:
        return None
    right = {length for length in lengths if is_right(length)}
    for size in sizes:  # 4: multiples
        multiples = {length for length in lengths if length % size == 0}
        if right == multiples and len(multiples) > BEYOND:
            return Lengths(step=size)
    return _ranges(lengths, right, found)


def _ranges(lengths: Sequence[int], right: set[int], found: int) -> Lengths | None:
    """The ranges of lengths that are right; None where none is."""
    ranges: list[tuple[int, int | None]] = []
    before = 0
    for length in lengths:
        if length in right and before in right and ranges:  # 3: of one chunk
            ranges[-1] = (ranges[-1][0], length)
        elif length in right:
            ranges.append((length, length))
        before = length
    if ranges and lengths[-1] in right and ranges[-1][0] <= found:  # 5: no end
        ranges[-1] = (ranges[-1][0], None)
    return Lengths(tuple(ranges)) if ranges else None
