"""A small matcher for patterns of operators, read upwards from a value.

    Bind(name)              any value; where the name occurs again, the same one
    Number(x)               a constant that holds the number x throughout
    Number(low, high)       a constant that holds one number between these two throughout
    Op(types, operands)     the first output of an operator of one of the types, whose operands
                            follow these patterns: in any order where the operator is commutative,
                            and as many of them, or more if `open_end`
    Through(pass, pattern)  a value from which `pass` leads upwards, input by input, to one that
                            follows the pattern
    OneOf(patterns)         what follows one of them

A value may follow a pattern in several ways; `matches` yields all of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import is_op
from fa_compiler.passes.ops.elementwise import COMMUTATIVE
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class Bind:
    """Any value, bound to a name."""

    name: str


@dataclass(frozen=True)
class Number:
    """A constant of one number: of `least`, or of one up to `most`."""

    least: float
    most: float | None = None

    def holds(self, number: float | None) -> bool:
        """Is this such a number? None stands for a tensor that is no constant of one number."""
        most = self.least if self.most is None else self.most
        return number is not None and self.least <= number <= most


@dataclass(frozen=True, init=False)
class Op:
    """An operator of one of these types on these operands. If `plain`, it has no attributes; if
    `open_end`, it may have further operands, such as the axes of a reduction; with a `name` its
    output is bound as well."""

    op_types: tuple[str, ...]
    operands: tuple[Pattern, ...]
    plain: bool
    open_end: bool
    name: str

    def __init__(
        self,
        op_types: str | tuple[str, ...],
        *operands: Pattern,
        plain: bool = False,
        open_end: bool = False,
        name: str = "",
    ) -> None:
        values = {
            "op_types": (op_types,) if isinstance(op_types, str) else op_types,
            "operands": operands,
            "plain": plain,
            "open_end": open_end,
            "name": name,
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)


@dataclass(frozen=True)
class Through:
    """A pattern reached upwards through operators that pass on one of their inputs. `passed` gives
    that input, or None for other operators."""

    passed: Callable[[ir.Node], ir.Value | None]
    pattern: Pattern


@dataclass(frozen=True)
class OneOf:
    """Any of several patterns, tried in order."""

    patterns: tuple[Pattern, ...]


Pattern = Bind | Number | Op | Through | OneOf


@dataclass(frozen=True)
class Match:
    """The values that the names of a pattern stand for, and the nodes that it covers, each once, in
    order of computation."""

    values: Mapping[str, ir.Value]
    nodes: tuple[ir.Node, ...] = ()

    def __getitem__(self, name: str) -> ir.Value:
        return self.values[name]

    def get(self, name: str) -> ir.Value | None:
        """The value that a name stands for; None where the alternative that matched does not have
        the name."""
        return self.values.get(name)

    def bound(self, name: str, value: ir.Value) -> Match | None:
        """The match in which a name stands for a value; None where the name stands for another
        value already."""
        if name not in self.values:
            return replace(self, values={**self.values, name: value})
        if self.values[name] is not value:
            return None
        return self

    def covering(self, node: ir.Node) -> Match:
        """The match that covers one more node."""
        if node in self.nodes:
            return self
        return replace(self, nodes=(*self.nodes, node))


def matches(
    pattern: Pattern,
    value: ir.Value | None,
    info: ShapeInfo,
    given: Mapping[str, ir.Value] | None = None,
) -> Iterator[Match]:
    """All ways in which a value follows a pattern. Some names may stand for given values."""
    return _matches(pattern, value, info, Match(given or {}))


def match(
    pattern: Pattern,
    value: ir.Value | None,
    info: ShapeInfo,
    given: Mapping[str, ir.Value] | None = None,
) -> Match | None:
    """The first way in which a value follows a pattern; None where there is none."""
    return next(matches(pattern, value, info, given), None)


def is_closed(nodes: Sequence[ir.Node]) -> bool:
    """Are the outputs of these nodes, except for those of the last node, read only by these
    nodes?"""
    inner = [output for node in nodes[:-1] for output in node.outputs]
    read_elsewhere = any(reader not in nodes for output in inner for reader, _ in output.uses())
    return not read_elsewhere and not any(output.is_graph_output() for output in inner)


def _matches(
    pattern: Pattern, value: ir.Value | None, info: ShapeInfo, known: Match
) -> Iterator[Match]:
    if value is None:
        return
    match pattern:
        case Bind(name):
            bound = known.bound(name, value)
            if bound is not None:
                yield bound
        case Number():
            if pattern.holds(info.scalar(value)):
                yield known
        case OneOf(patterns):
            for alternative in patterns:
                yield from _matches(alternative, value, info, known)
        case Through(passed, inner):
            yield from _through(passed, inner, value, info, known)
        case Op():
            yield from _of_operator(pattern, value, info, known)


def _through(
    passed: Callable[[ir.Node], ir.Value | None],
    inner: Pattern,
    value: ir.Value,
    info: ShapeInfo,
    known: Match,
) -> Iterator[Match]:
    """The matches of the pattern above the longest chain of operators that pass on an input."""
    nodes: list[ir.Node] = []
    while (node := value.producer()) is not None and (source := passed(node)) is not None:
        nodes.insert(0, node)
        value = source
    for above in _matches(inner, value, info, known):
        yield functools.reduce(Match.covering, nodes, above)


def _of_operator(pattern: Op, value: ir.Value, info: ShapeInfo, known: Match) -> Iterator[Match]:
    node = value.producer()
    if not is_op(node, *pattern.op_types) or node.outputs[0] is not value:
        return
    count = len(pattern.operands)
    if len(node.inputs) < count or (len(node.inputs) > count and not pattern.open_end):
        return
    if pattern.plain and node.attributes:
        return
    bound = known.bound(pattern.name, value) if pattern.name else known
    if bound is None:
        return
    orders = [node.inputs]
    if node.op_type in COMMUTATIVE and len(node.inputs) == 2:
        orders.append(node.inputs[::-1])
    for operands in orders:
        for matched in _in_order(pattern.operands, operands, info, bound):
            yield matched.covering(node)


def _in_order(
    patterns: Sequence[Pattern], operands: Sequence[ir.Value | None], info: ShapeInfo, known: Match
) -> Iterator[Match]:
    if not patterns:
        yield known
        return
    for first in _matches(patterns[0], operands[0], info, known):
        yield from _in_order(patterns[1:], operands[1:], info, first)
