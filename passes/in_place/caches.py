"""Caches that grow by a Concat: an input of the model holds the cached rows, and an output those
and new rows.

    present_key = torch.cat([past_key, key], dim=2)

    past      := an input of the model that is no initializer; one of its axes counts tokens, and
              its size is open
    present   := Concat(alias(past), new; axis of the tokens); one of the values alias(present) is a
              model output
    alias(x)  := x | Identity(alias(x)) | Concat(alias(x)) | Cast(alias(x); to its own type)

    accepted  any element type, rank and axis, so [B,N,S,D] as well as [B,S,N,D]; any number of new
              rows; operands of the Concat without rows, which add nothing (torch joins an empty
              first cache); other readers of past and present, of any kind: buffers.py serves them
    refused   a number of cached tokens that the model fixes, because constants in the model may
              depend on it; new rows in front, or on both sides; new rows that are another cache,
              whose buffer has more rows than the cache; a past that several Concats take, or that
              several graphs read; a present that is no output, or several outputs, which would need
              the buffer twice

The Concat may lie in a branch of an If, as in the merged decoders of optimum:

    present   := If(condition), an output of the model that no node reads; one branch gives
                 Concat(alias(past), new), and the other gives `first`, rows of its own. Only nodes
                 directly in the first branch read past

    refused   a `first` with another rank or known size than past has besides the tokens, or without
              rows; an If within another one; a Loop or a Scan

The cache of a cross attention stays as it is, because nothing is appended to it. Named and refused
are also caches whose rows are moved or written otherwise, in front of the Concat or behind it:

    rolling window   Slice or Split: the oldest rows are dropped
    beams            Gather, GatherND, GatherElements: the batch entries change their order
    a buffer         ScatterND, ScatterElements, TensorScatter write the new rows, also between two
                     Transposes
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline, reworded
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    any_op,
    certain,
    domain_of,
    holds_output,
    int_attr,
    is_op,
    makers_of,
    name_of,
    nodes_of_type,
    subgraphs,
    without_none,
)
from fa_compiler.passes.ir.signatures import SIGNATURES
from fa_compiler.passes.ops.elementwise import WRITERS
from fa_compiler.passes.ops.movers import PICKS
from fa_compiler.passes.ops.parts import Parts, concat_of
from fa_compiler.passes.values.shapes import ShapeInfo

OTHERWISE = {
    **dict.fromkeys(
        ("Slice", "Split"),
        "it is a rolling window: its oldest rows are dropped, and a buffer only takes new ones",
    ),
    **dict.fromkeys(
        PICKS,
        "its rows are gathered, as beams are: that copies it, whether it is a buffer or not",
    ),
    **dict.fromkeys(WRITERS, "it is a buffer already, in which its rows are written"),
}
"""What operators make of a cache otherwise than that it grows by a Concat."""
TURNED = "it is a buffer already, in which its rows are written, but between two Transposes, which copy all of it"
PAST_NAMES = ("past", "past_key", "past_value")
"""The inputs of attention operators to which they append, by the names of ir/signatures.py."""
NAMES = ("past", "cache")
"""An input whose name contains one of these is reported as a cache, whatever reads it."""


@dataclass(frozen=True)
class Choice:
    """An If with a branch that appends to a cache. `output` is its result, which is `first`, the
    output of this index of the graph `other`, in a run of the other branch."""

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

    `past_aliases` are `past` and the values equal to it. `present_aliases` are the result of the
    Concat and the values equal to it, among them `present`, the model's output. `sizes` is the
    shape of `past`.
    """

    past: ir.Value
    present: ir.Value
    concat: ir.Node
    new: ir.Value
    axis: int
    rows: Dim
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
        return tuple(makers_of((*self.past_aliases, *self.present_aliases)))


def candidates(graph: ir.Graph, info: ShapeInfo) -> Iterator[ir.Value]:
    """The inputs that may be caches: of rank 3 at least, and the first operand of a Concat, or
    named like a cache, or joined with something into an output of the model after or before their
    rows are moved."""
    for value in graph.inputs:
        shape = info.sizes(value)
        joined = any_op(_taking(value, info), "Concat")
        if len(shape) > 2 and (joined or _is_named(value) or _mover(value, info) is not None):
            yield value


def _is_named(value: ir.Value) -> bool:
    return any(word in name_of(value).lower() for word in NAMES)


def _taking(value: ir.Value, info: ShapeInfo) -> Iterator[ir.Node]:
    """The nodes whose first input is a value or an alias of it."""
    return (use.node for alias in aliases_of(value, info) for use in alias.uses() if use.idx == 0)


def _mover(past: ir.Value, info: ShapeInfo) -> ir.Node | None:
    """The node of OTHERWISE between a cache and the output that it becomes, in front of a Concat or
    behind it. A cache that is named so needs no Concat."""
    for node in _taking(past, info):
        behind = [reader for output in node.outputs for reader in _taking(output, info)]
        giving = [reader for reader in behind if _gives_output(reader, info)]
        if is_op(node, "Concat") and (movers := [*nodes_of_type(giving, *OTHERWISE)]):
            return movers[0]
        if not is_op(node, *OTHERWISE):
            continue
        if any_op(giving, "Concat") or (_is_named(past) and _gives_output(node, info)):
            return node
    return None


def _turned_writer(past: ir.Value, info: ShapeInfo) -> ir.Node | None:
    """The node that writes rows into a transposed cache, whose result is transposed back to an
    output."""
    for turned in nodes_of_type(_taking(past, info), "Transpose"):
        for writer in nodes_of_type(_taking(turned.outputs[0], info), *WRITERS):
            back = nodes_of_type(_taking(writer.outputs[0], info), "Transpose")
            if any(_gives_output(node, info) for node in back):
                return writer
    return None


def _gives_output(node: ir.Node, info: ShapeInfo) -> bool:
    """Is a result of the node, or an alias of it, an output of the model?"""
    return any(holds_output(aliases_of(output, info)) for output in node.outputs)


def read_cache(past: ir.Value, info: ShapeInfo) -> GrowingCache:
    """The cache whose `past` is an input. Raises Decline where the input is no cache that grows by
    a Concat."""

    def words(decline: Decline) -> Decline:
        mover = _mover(past, info)
        if mover is not None:
            return Decline(Code.SHAPE, OTHERWISE[mover.op_type], mover)
        writer = _turned_writer(past, info)
        return decline if writer is None else Decline(Code.SHAPE, TURNED, writer)

    return reworded(lambda: _read(past, info), words)


def _read(past: ir.Value, info: ShapeInfo) -> GrowingCache:
    """The cache, whose Concat lies in the main graph or in a branch of an If. Raises Decline."""
    main = past.graph
    assert isinstance(main, ir.Graph)
    aliases = aliases_of(past, info)
    _check_given(past, aliases)
    readers = _readers(aliases)
    inner = [node for node in readers if node.graph is not main]
    if not inner:
        return _grown(past, main, info)
    branches = _if_of(inner[0], main)
    if branches is None or any(node.graph is not inner[0].graph for node in readers):
        raise Decline(Code.SCOPE, "it is read within a subgraph", inner[0])
    node, branch, other = branches
    cache = _grown(past, branch, info)
    return replace(cache, choice=_choice(cache, node, branch, other, info))


def _choice(
    cache: GrowingCache, node: ir.Node, branch: ir.Graph, other: ir.Graph, info: ShapeInfo
) -> Choice:
    """The If that chooses between a cache which grows in a branch and the first rows in the other
    one. Raises Decline."""
    places = [index for index, value in enumerate(branch.outputs) if value is cache.present]
    choice = Choice(node.outputs[places[0]], other, places[0])
    if len(places) != 1 or not choice.output.is_graph_output() or choice.output.uses():
        reason = "what it grows to is not one output of the model that no node reads"
        raise Decline(Code.SHAPE, reason, node)
    if not _can_be_first(info.sizes(choice.first), cache):
        reason = "the other branch of the If gives an output of other sizes"
        raise Decline(Code.SHAPE, reason, node)
    return choice


def _grown(past: ir.Value, graph: ir.Graph, info: ShapeInfo) -> GrowingCache:
    """The cache whose `past` only the nodes of one graph read. Raises Decline."""
    # every candidate has some
    past_aliases, sizes = aliases_of(past, info, graph), certain(info.shape(past))
    inner = [node for node in _readers(past_aliases) if node.graph is not graph]
    if inner:
        raise Decline(Code.SCOPE, "it is read within a subgraph", inner[0])
    _check_given(past, past_aliases)
    joined, new = _appended(past_aliases, info)
    concat, axis = joined.node, joined.axis
    if (fixed := sizes[axis].const) is not None:
        reason = f"the model fixes the number of cached tokens to {fixed}"
        raise Decline(Code.SHAPE, reason, concat, "export it with a dynamic axis")
    present_aliases = aliases_of(concat.outputs[0], info, graph)
    presents = [value for value in present_aliases if value.is_graph_output()]
    if not presents:
        raise Decline(Code.SHAPE, "what it grows to is no output of the model", concat)
    if len(presents) > 1:
        raise Decline(Code.SHAPE, "what it grows to is several outputs", concat)
    shape = info.shape(new)
    assert shape is not None  # an operand of a Concat of known rank
    return GrowingCache(
        past, presents[0], concat, new, axis, shape[axis], sizes, past_aliases, present_aliases
    )


def _appended(past_aliases: Sequence[ir.Value], info: ShapeInfo) -> tuple[Parts, ir.Value]:
    """The Concat that takes a past, and the new rows behind it there. Raises Decline."""
    joins = without_none(concat_of(node, info) for node in _readers(past_aliases))
    concats = [joined for joined in joins if len(joined.with_elements(info)) > 1]
    if not concats:
        raise _not_appended(past_aliases)
    if len(concats) > 1:
        raise Decline(Code.SHAPE, "several Concats take it", concats[1].node)
    first, *others = concats[0].with_elements(info)
    if len(others) != 1 or first not in past_aliases or others[0] in past_aliases:
        raise Decline(
            Code.SHAPE,
            "what is joined with it is not one tensor of new rows behind it",
            concats[0].node,
        )
    return concats[0], others[0]


def with_rows_of_its_own(cache: GrowingCache, caches: Sequence[GrowingCache]) -> GrowingCache:
    """The cache. Raises Decline where its new rows are one of these caches."""
    if any(cache.new in other.present_aliases for other in caches):
        raise Decline(Code.SHAPE, "what is joined with it is another cache", cache.concat)
    return cache


def _readers(aliases: Iterable[ir.Value]) -> list[ir.Node]:
    """The nodes that read these values."""
    return [node for value in aliases for node in value.consumers()]


def _not_appended(past_aliases: Sequence[ir.Value]) -> Decline:
    """Why no Concat appends to a past."""
    for value in past_aliases:
        for operator in value.consumers():
            if _takes_past(operator, value):
                return Decline(
                    Code.SHAPE, f"{operator.op_type} appends to it, and is not fused", operator
                )
    return Decline(Code.SHAPE, "nothing is appended to it")


def _takes_past(node: ir.Node, value: ir.Value) -> bool:
    """Is this an attention operator that joins its new rows with the value by itself?"""
    known = SIGNATURES.get((domain_of(node), node.op_type))
    names = () if known is None else known.inputs
    return any(
        taken is value and name in PAST_NAMES
        for name, taken in zip(names, node.inputs, strict=False)
    )


def _check_given(past: ir.Value, aliases: Sequence[ir.Value]) -> None:
    """Decline a past that is a constant by default, or that leaves the graph unchanged."""
    if past.is_initializer():
        raise Decline(Code.SHAPE, "the model has a default value for it")
    if holds_output(aliases):
        raise Decline(Code.SHAPE, "the model also gives it back as it came, without new rows")


def _if_of(node: ir.Node, main: ir.Graph) -> tuple[ir.Node, ir.Graph, ir.Graph] | None:
    """The If of the main graph in a branch of which a node lies, this branch, and the other one."""
    for choice in main:
        if not is_op(choice, "If") or node.graph not in subgraphs(choice):
            continue
        branch, other = (
            choice.attributes[name].as_graph() for name in ("then_branch", "else_branch")
        )
        if branch is not node.graph:
            branch, other = other, branch
        return choice, branch, other
    return None


def _can_be_first(shape: Sequence[Dim], cache: GrowingCache) -> bool:
    """May a tensor of this shape be the first rows of a buffer for the cache?"""
    if len(shape) != len(cache.sizes) or any(size.const == 0 for size in shape):
        return False
    pairs = [
        pair for axis, pair in enumerate(zip(shape, cache.sizes, strict=True)) if axis != cache.axis
    ]
    return all(own == size or own.const is None or size.const is None for own, size in pairs)


def aliases_of(
    value: ir.Value, info: ShapeInfo, graph: ir.Graph | None = None
) -> tuple[ir.Value, ...]:
    """The value, and the values of its own or the given graph that are equal to it because only
    such nodes lie between (see above)."""
    aliases, home = [value], value.graph if graph is None else graph
    for alias in aliases:
        for node in alias.consumers():
            if node.graph is home and _passes_on(node, alias, info):
                aliases.append(node.outputs[0])
    return tuple(aliases)


def _passes_on(node: ir.Node, value: ir.Value, info: ShapeInfo) -> bool:
    """Does a node give what a value holds?"""
    if (joined := concat_of(node, info)) is not None:
        return joined.with_elements(info) == [value]
    if is_op(node, "Cast"):
        return info.dtype(value) == int_attr(node, "to", -1)
    return is_op(node, "Identity")
