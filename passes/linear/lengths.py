"""For which numbers of tokens a region is right, where this number is open.

What is looked at, and what follows from it:

    1     lengths of 1 to 5 tokens, that at which the operands were found, the next one, and twice
          as many
    2     the numbers that a length meets in the graph (meetings.py): each may be a chunk's size, of
          which the first length, the middle and the last one are looked at, up to the first length
          of the second chunk beyond the one in which the operands were found
    3     the numbers again, and what is made of two or three of them: there a comparison, a Slice
          or the like may change what the graph computes. So may the lengths at which what is
          computed of a length turns (walk.py). Each is looked at with its neighbours (`AROUND`).
          Where there are any, `DISTANT` lengths are looked at, too: most changes last
    4     between two such lengths that are right, all are right: the operators of the region treat
          them alike, but for what passes one of the numbers
    5     where only the multiples of a number are right, and all of these that were looked at, all
          multiples are
    6     where the last ones are right, all longer ones are; of a number that is too large to be
          looked at, only those below it. Where it is the size of a table whose elements differ,
          nothing is known of the elements that were not read, and no length is claimed
    7     where two tokens fail, one token does, too: what it computes there comes of sizes of 1,
          which are broadcast

A length that is not right is refused by the fused model. That is what the user wants of a file that
fails at it, or in which the last tokens are 0, because a number of chunks was written into it. A
region that computes anything else there is no linear attention, though it is one at other lengths.

Cases 4 to 6 are no polynomial identities. They hold because the operators that are followed
(operators.py) do the same for every size, but where the size passes a number that it meets.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby, product

from fa_compiler.passes.linear.meetings import Numbers

SMALL = (1, 2, 3, 5)
DISTANT = (64, 101, 401, 1001)
"""The first one is the longest of which all iterations of a loop are run."""
AROUND = (-1, 0, 1, 2)
"""A place is one less than the number of tokens, and may be compared by > or by >=."""
MOST_PROBES = 300
BEYOND = 2
METADATA = "fa_compiler.lengths"
"""The key under which an operator has the lengths, as JSON, in its metadata."""


class Verdict(Enum):
    """What a region computes at a length."""

    RIGHT = "the linear attention"
    FAILS = "nothing, or 0 for the last tokens"
    OTHER = "something else"
    UNKNOWN = "too much to be looked at"


@dataclass(frozen=True)
class Lengths:
    """The numbers of tokens that are right: ranges of a first and a last one, None where a range
    has no end; or all multiples of a `step`."""

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
        return any(
            first <= length and (last is None or length <= last) for first, last in self.ranges
        )

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


def right_lengths(
    found: int, look: Callable[[int], Verdict], numbers: Callable[[], Numbers]
) -> Lengths | None:
    """The lengths that are right; None where they cannot be told, or where the region computes
    something else at one.

    `found` is the length at which the operands were found. `look` is called with lengths that rise,
    and `numbers` gives the numbers that the lengths met so far.
    """
    verdicts = dict[int, Verdict]()
    wanted = {*SMALL, found, found + 1, 2 * found}  # 1: without numbers
    met = Numbers()
    while todo := sorted(wanted - verdicts.keys()):
        if len(verdicts) + len(todo) > MOST_PROBES:
            return None
        if any(_is_other(length, look, verdicts) for length in todo):
            return None
        met = numbers()
        if met.is_unclear:
            return None
        neighbours = {edge + step for edge in met.edges for step in AROUND}  # 3: of each number
        wanted = _of_chunks(met.chunks, found) | neighbours | {*(DISTANT if neighbours else ())}
    unknown = [
        edge
        for edge in met.edges
        if Verdict.UNKNOWN in (verdicts.get(edge + step) for step in AROUND)
    ]
    tables = met.tables | {size * number for size, number in product(met.tables, met.divisors)}
    if not tables.isdisjoint(unknown):
        return None
    return _lengths(verdicts, found, met.chunks, min(unknown, default=None))


def _is_other(length: int, look: Callable[[int], Verdict], verdicts: dict[int, Verdict]) -> bool:
    """Does the region compute something else at this length? What it computes there is entered."""
    verdicts[length] = look(length)
    if length == 2 and verdicts[1] is Verdict.OTHER and verdicts[2] is Verdict.FAILS:
        verdicts[1] = Verdict.FAILS  # 7: of one token
    return length > 1 and Verdict.OTHER in (verdicts[1], verdicts[length])


def _of_chunks(sizes: Iterable[int], found: int) -> set[int]:
    """The lengths that are looked at of chunks of these sizes."""
    lengths = set[int]()
    for size in sizes:  # 2: those of each chunk
        last = found // size + BEYOND
        for chunk in range(last):
            first = chunk * size
            lengths.update((first + 1, first + size // 2, first + size))
        lengths.add(last * size + 1)
    return lengths


def _lengths(
    verdicts: Mapping[int, Verdict], found: int, sizes: Iterable[int], unknown: int | None
) -> Lengths | None:
    """The lengths that are right; `unknown` is the first number that was not passed."""
    lengths = sorted(
        length for length, verdict in verdicts.items() if verdict is not Verdict.UNKNOWN
    )
    right = {length for length in lengths if verdicts[length] is Verdict.RIGHT}
    for size in sizes:  # 5: multiples
        multiples = {length for length in lengths if length % size == 0}
        if right == multiples and len(multiples) > BEYOND:
            return Lengths(step=size) if unknown is None else None
    return _ranges(lengths, right, found, unknown)


def _ranges(
    lengths: Sequence[int], right: set[int], found: int, unknown: int | None
) -> Lengths | None:
    """The ranges of lengths that are right; None where none is."""
    # 4: nothing between them
    runs = [[*run] for is_right, run in groupby(lengths, right.__contains__) if is_right]
    if not runs:
        return None
    ranges: list[tuple[int, int | None]] = [(run[0], run[-1]) for run in runs]
    first, last = runs[-1][0], runs[-1][-1]
    if last == lengths[-1] and first <= found:  # 6: no end
        ranges[-1] = (first, None if unknown is None else max(unknown - BEYOND, last))
    return Lengths(tuple(ranges))
