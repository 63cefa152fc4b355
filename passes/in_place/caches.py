"""Caches that grow by a Concat: an input of the model holds the cached rows, and an output those and new rows.

    past      := an input of the model that is no initializer; one of its axes counts tokens, and its size is open
    present   := Concat(alias(past), new; axis of the tokens); one of the values alias(present) is a model output
    alias(x)  := x | Identity(alias(x)) | Concat(alias(x)) | Cast(alias(x); to its own type)

    accepted  any element type, rank and axis, so [B,N,S,D] as well as [B,S,N,D]; any number of new rows; operands of
              the Concat without rows, which add nothing (torch joins an empty first cache); other readers of past and
              present, of any kind: buffers.py serves them
    refused   a number of cached tokens that the model fixes, because constants in the model may depend on it; new rows
              in front, or on both sides; a past that several Concats take, or that several graphs read; a present
              that is no output, or several outputs, which would need the buffer twice

The Concat may lie in a branch of an If, as in the merged decoders of optimum:

    present   := If(condition), an output of the model that no node reads; one branch gives Concat(alias(past), new),
                 and the other gives `first`, rows of its own. Only nodes directly in the first branch read past

    refused   a `first` with another rank or known size than past has besides the tokens, or without rows; an If within
              another one; a Loop or a Scan

The cache of a cross attention stays as it is, because nothing is appended to it. Named and refused are also caches
whose rows are moved or written otherwise, in front of the Concat or behind it:

    rolling window   Slice or Split: the oldest rows are dropped
    beams            Gather, GatherND, GatherElements: the batch entries change their order
    a buffer         ScatterND, ScatterElements, TensorScatter write the new rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline, reworded
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import int_attr, is_op, subgraphs
from fa_compiler.passes.values.shapes import ShapeInfo

MOVES = {
    **dict.fromkeys(
        ("Slice", "Split"), "it is a rolling window: its oldest rows are dropped, and a buffer only takes new ones"
    ),
    **dict.fromkeys(
        ("Gather", "GatherND", "GatherElements"),
        "its rows are gathered, as beams are: that copies it, whether it is a buffer or not",
    ),
    **dict.fromkeys(
        ("ScatterND", "ScatterElements", "TensorScatter"), "it is a buffer already, in which its rows are written"
    ),
}
"""What operators make of a cache otherwise than that it grows by a Concat."""
NAMES = ("past", "cache")
"""An input whose name contains one of these is reported as a cache, whatever reads it."""


@dataclass(frozen=True)
class Choice:
    """An If with a branch that appends to a cache. `output` is its result, which is `first`, the output of this index
    of the graph `other`, in a run of the other branch."""

    output: ir.Value
    other: ir.Graph
    index: int

    @property
    def first(self) -> ir.Value:
        """What the other branch gives."""
        return self.other.outputs[self.index]


@dataclass(frozen=True)
class GrowingCache:
    """One cache.

    `past_aliases` are `past` and the values equal to it. `present_aliases` are the result of the Concat and the values
    equal to it, among them `present`, the model's output. `sizes` is the shape of `past`.
    """

    past: ir.Value
    present: ir.Value
    concat: ir.Node
    new: ir.Value
    axis: int
    sizes: tuple[Dim, ...]
    past_aliases: tuple[ir.Value, ...]
    present_aliases: tuple[ir.Value, ...]
    choice: Choice | None = None
    """The If in a branch of which the Concat lies; None for a Concat in the main graph."""

    @property
    def graph(self) -> ir.Graph:
        """The graph with the Concat."""
        assert isinstance(self.concat.graph, ir.Graph)
        return self.concat.graph

    @property
    def output(self) -> ir.Value:
        """The output of the model."""
        return self.present if self.choice is None else self.choice.output

    @property
    def tokens(self) -> Dim:
        """The number of cached tokens."""
        return self.sizes[self.axis]

    @property
    def aliases(self) -> tuple[ir.Node, ...]:
        """The nodes that the buffer makes superfluous."""
        makers = [value.producer() for value in (*self.past_aliases, *self.present_aliases)]
        return tuple(maker for maker in makers if maker is not None)


def candidates(graph: ir.Graph, info: ShapeInfo) -> Iterator[ir.Value]:
    """The inputs that may be caches: of rank 3 at least, and the first operand of a Concat, or named like a cache, or
    joined with something into an output of the model after or before their rows are moved."""
    for value in graph.inputs:
        shape = info.shape(value)
        joined = any(is_op(node, "Concat") for node in _taking(value, info))
        if shape is not None and len(shape) > 2 and (joined or _is_named(value) or _mover(value, info) is not None):
            yield value


def _is_named(value: ir.Value) -> bool:
    return any(word in (value.name or "").lower() for word in NAMES)


def _taking(value: ir.Value, info: ShapeInfo) -> Iterator[ir.Node]:
    """The nodes whose first input is a value or an alias of it."""
    return (use.node for each in aliases_of(value, info) for use in each.uses() if use.idx == 0)


def _mover(past: ir.Value, info: ShapeInfo) -> ir.Node | None:
    """The node of MOVES between a cache and the output that it becomes, in front of a Concat or behind it. A cache that
    is named so needs no Concat."""
    for node in _taking(past, info):
        behind = [each for output in node.outputs for each in _taking(output, info)]
        if is_op(node, "Concat"):
            moved = (each for each in behind if is_op(each, *MOVES) and _gives_output(each, info))
            if (found := next(moved, None)) is not None:
                return found
        if is_op(node, *MOVES):
            joined = any(is_op(each, "Concat") and _gives_output(each, info) for each in behind)
            if joined or (_is_named(past) and _gives_output(node, info)):
                return node
    return None


def _gives_output(node: ir.Node, info: ShapeInfo) -> bool:
    """Is a result of the node, or an alias of it, an output of the model?"""
    return any(each.is_graph_output() for output in node.outputs for each in aliases_of(output, info))


def read_cache(past: ir.Value, info: ShapeInfo) -> GrowingCache:
    """The cache whose `past` is an input. Raises Decline where the input is no cache that grows by a Concat."""

    def words(decline: Decline) -> Decline:
        mover = _mover(past, info)
        return decline if mover is None else Decline(Code.SHAPE, MOVES[mover.op_type], mover)

    return reworded(lambda: _read(past, info), words)


def _read(past: ir.Value, info: ShapeInfo) -> GrowingCache:
    main = past.graph
    assert isinstance(main, ir.Graph)
    aliases = aliases_of(past, info)
    _check_given(past, aliases)
    readers = [node for value in aliases for node in value.consumers()]
    inner = next((node for node in readers if node.graph is not main), None)
    if inner is None:
        return _grown(past, main, info)
    found = _if_of(inner, main)
    if found is None or any(node.graph is not inner.graph for node in readers):
        raise Decline(Code.SCOPE, "it is read within a subgraph", inner)
    choice, branch, other = found
    cache = _grown(past, branch, info)
    places = [index for index, value in enumerate(branch.outputs) if value is cache.present]
    output = choice.outputs[places[0]]
    if len(places) != 1 or not output.is_graph_output() or output.uses():
        reason = "what it grows to is not one output of the model that no node reads"
        raise Decline(Code.SHAPE, reason, choice)
    found_choice = Choice(output, other, places[0])
    shape = info.shape(found_choice.first)
    if shape is None or not _can_be_first(shape, cache):
        reason = "the other branch of the If gives an output of other sizes"
        raise Decline(Code.SHAPE, reason, choice)
    return replace(cache, choice=found_choice)


def _grown(past: ir.Value, graph: ir.Graph, info: ShapeInfo) -> GrowingCache:
    """The cache whose `past` only the nodes of one graph read."""
    past_aliases, sizes = aliases_of(past, info, graph), info.shape(past)
    assert sizes is not None  # every candidate has some
    readers = [node for value in past_aliases for node in value.consumers()]
    if (inner := next((node for node in readers if node.graph is not graph), None)) is not None:
        raise Decline(Code.SCOPE, "it is read within a subgraph", inner)
    _check_given(past, past_aliases)
    concats = [node for node in readers if is_op(node, "Concat") and len(_parts(node, info)) > 1]
    if len(concats) != 1:
        reason = "several Concats take it" if concats else "nothing is appended to it"
        raise Decline(Code.SHAPE, reason, concats[1] if concats else None)
    concat = concats[0]
    first, *others = _parts(concat, info)
    if (
        len(others) != 1
        or not any(first is value for value in past_aliases)
        or any(others[0] is value for value in past_aliases)
    ):
        raise Decline(Code.SHAPE, "what is joined with it is not one tensor of new rows behind it", concat)
    axis = int_attr(concat, "axis", 0) % len(sizes)
    if (fixed := sizes[axis].const) is not None:
        reason = f"the model fixes the number of cached tokens to {fixed}"
        raise Decline(Code.SHAPE, reason, concat, "export it with a dynamic axis")
    present_aliases = aliases_of(concat.outputs[0], info, graph)
    presents = [value for value in present_aliases if value.is_graph_output()]
    if len(presents) != 1:
        reason = "what it grows to is several outputs" if presents else "what it grows to is no output of the model"
        raise Decline(Code.SHAPE, reason, concat)
    return GrowingCache(past, presents[0], concat, others[0], axis, sizes, past_aliases, present_aliases)


def _check_given(past: ir.Value, aliases: Sequence[ir.Value]) -> None:
    """Decline a past that is a constant by default, or that leaves the graph unchanged."""
    if past.is_initializer() or any(value.is_graph_output() for value in aliases):
        raise Decline(Code.SHAPE, "it has a default value, or is an output as it is")


def _if_of(node: ir.Node, main: ir.Graph) -> tuple[ir.Node, ir.Graph, ir.Graph] | None:
    """The If of the main graph in a branch of which a node lies, this branch, and the other one."""
    ifs = (each for each in main if is_op(each, "If"))
    choice = next((each for each in ifs if any(graph is node.graph for graph in subgraphs(each))), None)
    if choice is None:
        return None
    branches = [choice.attributes[name].as_graph() for name in ("then_branch", "else_branch")]
    branch, other = branches if branches[0] is node.graph else branches[::-1]
    return choice, branch, other


def _can_be_first(shape: Sequence[Dim], cache: GrowingCache) -> bool:
    """May a tensor of this shape be the first rows of a buffer for the cache?"""
    if len(shape) != len(cache.sizes) or any(size.const == 0 for size in shape):
        return False
    pairs = [pair for axis, pair in enumerate(zip(shape, cache.sizes, strict=True)) if axis != cache.axis]
    return all(own == size or own.const is None or size.const is None for own, size in pairs)


def aliases_of(value: ir.Value, info: ShapeInfo, graph: ir.Graph | None = None) -> tuple[ir.Value, ...]:
    """The value, and the values of its own or the given graph that are equal to it because only such nodes lie between
    (see above)."""
    found, home = [value], value.graph if graph is None else graph
    for each in found:
        for node in each.consumers():
            if node.graph is home and _passes_on(node, each, info):
                found.append(node.outputs[0])
    return tuple(found)


def _passes_on(node: ir.Node, value: ir.Value, info: ShapeInfo) -> bool:
    if is_op(node, "Concat"):
        parts = _parts(node, info)
        return len(parts) == 1 and parts[0] is value
    if is_op(node, "Cast"):
        return info.dtype(value) == int_attr(node, "to", -1)
    return is_op(node, "Identity")


def _parts(concat: ir.Node, info: ShapeInfo) -> list[ir.Value]:
    """The operands of a Concat that may have elements."""
    found = []
    for value in concat.inputs:
        shape = None if value is None else info.shape(value)
        if value is not None and (not shape or shape[int_attr(concat, "axis", 0) % len(shape)].const != 0):
            found.append(value)
    return found
