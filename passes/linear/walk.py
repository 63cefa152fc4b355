"""A walk over all lengths: the numbers of a region that depend on nothing but a length, at each length in turn.

A length may go through any arithmetic before a comparison, an index or a factor meets it: quotients of quotients,
remainders of multiples, floats that are rounded or become infinite, integers that wrap, a table that is read at one
place. No formula tells where such a number changes. So the small numbers are computed at every length:

    1     the lengths from 1 to `WALKED`, and those around each power of 2 up to 2^`DOUBLED`
    2     a number is followed where its shape is the same at all lengths, and it has at most `SMALL` elements. What it
          is made of may have up to `LARGEST`, such as a Range over the tokens that is summed
    3     a length is like another one where all numbers differ from those at the length before by the same, and the
          numbers that have few values have the same one. The first length of each kind is one at which the region
          `turns`
    4     a small number that varies and cannot be followed makes the region unclear: what a Loop or an If gives, and
          what is made of too many elements. So do too many kinds, as of a square

Whether the region is right where it turns is for the points at these lengths to say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.ir.nodes import STANDARD, constant, is_op, subgraphs, without_none
from fa_compiler.passes.linear.meetings import SMALL
from fa_compiler.passes.linear.operators import EXACT, RULES, evaluated
from fa_compiler.passes.linear.tensors import FailedError, Tensor, UnknownError, exact
from fa_compiler.passes.values.shapes import ShapeInfo

WALKED = 1100
DOUBLED = 20
LARGEST = 4096
MOST_TURNS = 48
FEW_VALUES = 4
ROUNDING = 2.0**-20
"""A multiple of a length is rounded otherwise at each length, by so much of it."""


def lengths_walked() -> list[int]:
    """The lengths that are walked over."""
    around = {(1 << power) + step for power in range(1, DOUBLED + 1) for step in (-2, -1, 0, 1)}
    return sorted({*range(1, WALKED + 1), *(length for length in around if length > 0)})  # 1


@dataclass(frozen=True)
class Walk:
    """The numbers of these nodes, where the sizes of `names` are the length, and others what they are in `sizes`."""

    nodes: Sequence[ir.Node]
    info: ShapeInfo
    names: Collection[str]
    sizes: Mapping[str, int]
    unknown: Collection[ir.Value] = ()
    """Constants that may hold any numbers."""

    @cached_property
    def turns(self) -> set[int] | None:
        """The lengths at which the region may begin to compute something else; None where there are too many."""
        lengths = [length for length, known in self._rows.items() if known is not None]
        after = [place for place in range(1, len(lengths)) if lengths[place] - lengths[place - 1] == 1]
        failing = {length + 1 for length in lengths if self._rows.get(length + 1, {}) is None}
        columns = [column for value in self.followed for column in self._kinds(value, lengths, after)]
        if not columns or not after:
            return failing
        _, first = np.unique(np.stack(columns, 1), axis=0, return_index=True)  # 3: the first length of each kind
        if len(first) > MOST_TURNS:  # 4: too many kinds
            return None
        return failing | {lengths[after[place]] for place in map(int, first)}

    def _kinds(self, value: ir.Value, lengths: Sequence[int], after: Sequence[int]) -> Iterator[np.ndarray]:
        """What tells the lengths in `after` apart, each by a number: how a value differs from that before, and where it
        has few values, which one it is."""
        rows = np.stack([self._at(length)[value].reshape(-1) for length in lengths])
        if not rows.size:
            return
        numbers = rows.astype(np.int8) if rows.dtype.kind == "b" else rows
        if is_op(value.producer(), "Exp"):  # of decays: a 0 or an infinity tells, and otherwise the exponent
            numbers = (rows == 0).astype(np.int8) + 2 * np.isinf(rows)
        with np.errstate(all="ignore"):
            steps = numbers[after] - numbers[[place - 1 for place in after]]
            if steps.dtype.kind == "f":
                usual = np.median(steps, axis=0)
                is_usual = np.abs(steps - usual) <= ROUNDING * np.abs(numbers[after])
                steps = np.where(is_usual, usual, steps)
        yield _numbered(steps)
        own = _numbered(numbers)
        if own.max(initial=0) < FEW_VALUES:
            yield own[after]

    def _at(self, length: int) -> Mapping[ir.Value, np.ndarray]:
        return self._rows[length] or {}

    @cached_property
    def followed(self) -> frozenset[ir.Value]:
        """The values that are known at all lengths at which nothing fails."""  # 2
        rows = [known for known in self._rows.values() if known is not None]
        if not rows:
            return frozenset()
        common = set(rows[0]).intersection(*rows[1:])
        return frozenset(
            value for value in common if rows[0][value].size <= SMALL and len({row[value].shape for row in rows}) == 1
        )

    @cached_property
    def _rows(self) -> dict[int, dict[ir.Value, np.ndarray] | None]:
        """What is known at each length; None where a node fails."""
        step = _Step(self)
        return {length: step.known(length) for length in lengths_walked()}


@dataclass
class _Step:
    """Computes the numbers at lengths that rise. What is too large is not computed again."""

    walk: Walk
    nodes: list[ir.Node] = field(default_factory=list)
    constants: dict[ir.Value, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """The nodes that may have numbers."""
        known = {*RULES, *EXACT}
        self.nodes = [
            node
            for node in self.walk.nodes
            if node.op_type in known and node.domain in STANDARD and not subgraphs(node)
        ]

    def known(self, length: int) -> dict[ir.Value, np.ndarray] | None:
        """What is known at a length; None where a node fails."""
        sizes = {**self.walk.sizes, **dict.fromkeys(self.walk.names, length)}
        found, kept = dict[ir.Value, np.ndarray](), list[ir.Node]()
        try:
            for node in self.nodes:
                results = self._results(node, found, sizes)
                if results is None or max((result.size for result in results), default=0) > LARGEST:
                    continue
                kept.append(node)
                found.update(zip(node.outputs, results, strict=False))
        except FailedError:
            return None
        self.nodes = kept
        return found

    def _results(
        self, node: ir.Node, found: Mapping[ir.Value, np.ndarray], sizes: Mapping[str, int]
    ) -> list[np.ndarray] | None:
        """The results of a node; None where they are not known."""
        operands: list[Tensor | None] = []
        for value in node.inputs:
            operand = None if value is None else self._operand(node, value, found, sizes)
            if value is not None and operand is None:
                return None
            operands.append(operand)
        dtype = self.walk.info.dtype(node.inputs[0]) if node.inputs else None
        try:
            results = evaluated(node, operands, dtype, False)
        except UnknownError:
            return None
        exacts = [result.exact for result in results or ()]
        known = [array for array in exacts if array is not None]
        return known if known and len(known) == len(exacts) else None

    def _operand(
        self, node: ir.Node, value: ir.Value, found: Mapping[ir.Value, np.ndarray], sizes: Mapping[str, int]
    ) -> Tensor | None:
        if (array := found.get(value)) is not None:
            return exact(array)
        if is_op(node, "Shape", "Size"):
            dims = self.walk.info.shape(value)
            shape = None if dims is None else without_none([dim.evaluate(sizes) for dim in dims])
            return None if shape is None or dims is None or len(shape) < len(dims) else Tensor(tuple(shape))
        if value not in self.constants:
            array = None if value in self.walk.unknown else constant(value)
            self.constants[value] = None if array is None else exact(array)
        return self.constants[value]


def _numbered(rows: np.ndarray) -> np.ndarray:
    """A number for each row, the same for equal ones, bit by bit."""
    flat = np.ascontiguousarray(rows)
    as_bytes = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1]))).reshape(-1)
    _, numbers = np.unique(as_bytes, return_inverse=True)
    return np.asarray(numbers).reshape(-1)
