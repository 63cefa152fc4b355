"""From a fused model to the model that all ranks run: finds the sequence, makes the new graph, and
reports."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, GRAPH_OP, collectives
from fa_compiler.op_registry.errors import suggestion
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import (
    all_nodes,
    is_op,
    name_of,
    operand_at,
    reached,
    remember_versions,
    text_attr,
    values_read,
)
from fa_compiler.passes.ops.movers import LAYOUT_OPS
from fa_compiler.passes.ops.parts import concat_of
from fa_compiler.passes.parallel import attention_rule, linear_rule, local_rules, move_rules
from fa_compiler.passes.parallel.caches import CacheSharder, Joined, PromptSharder, joined_caches
from fa_compiler.passes.parallel.methods import Choice, Handed, Machine, choose
from fa_compiler.passes.parallel.options import ParallelOptions
from fa_compiler.passes.parallel.places import ONE, Place, Refusal
from fa_compiler.passes.parallel.sharder import Sharder
from fa_compiler.passes.values.shapes import ShapeInfo, analyse

RULES = (attention_rule, linear_rule, local_rules, move_rules)
"""The modules that enter rules when they are imported."""

LINEAR = "FlashLinearAttention"
_DEPTH = 1_000_000
"""The depth of calls while a graph is made: a chain of nodes is as many calls deep as it is
long."""


@dataclass(frozen=True)
class ShardReport:
    """What became of a model.

    `inputs` and `outputs` give the dimension of the sequence, None for a tensor that is whole on
    every rank. `gathered` are the inputs of which every rank gets all tokens. `caches` gives for
    each input that is a cache the output that has it with the new tokens; it is empty for a model
    that does not decode. `length` is the number of tokens that the cost model took, and `batch`
    that of the sequences. `handed` are the layers of which the ranks hand on states or tokens.
    """

    ranks: int
    order: str
    length: int
    inputs: Mapping[str, int | None]
    outputs: Mapping[str, int | None]
    choices: tuple[Choice, ...]
    gathered: tuple[str, ...]
    caches: Mapping[str, str] = field(default_factory=dict)
    machine: Machine = field(default_factory=Machine)
    batch: int = 1
    handed: tuple[Handed, ...] = ()


def shard(model: ir.Model, options: ParallelOptions) -> tuple[ir.Model, ShardReport]:
    """The model of the ranks, and what became of it. The given model stays as it is, but for the
    names of sizes and, for a prompt, the number of cached tokens.

    Raises Refusal.
    """
    graph = model.graph
    remember_versions(model)
    _name_alike(graph, options.axes)
    sharder, axes, caches = _sharder(model, options)
    sharder.own_graphs, sharder.no_ring = bool(options.sizes), options.no_ring
    presents = {name_of(cache.past): _present(cache, sharder.info) for cache in caches}
    parts = {presents[name]: axis for name, axis in axes.items() if name in presents}
    with _deep_calls():
        outputs = [_output(sharder, value, parts) for value in graph.outputs]
    order = _order(sharder, caches)
    axes_of = {"inputs": {name: axes.get(name) for value in sharder.inputs if (name := value.name)}}
    axes_of["outputs"] = {
        name_of(value): axis for value, (_, axis) in zip(graph.outputs, outputs, strict=True)
    }
    result = _model(model, sharder, [value for value, _ in outputs])
    record: dict[str, Any] = {"ranks": options.ranks, "order": order, **axes_of}
    if caches:
        record["caches"] = presents
    elif sharder.length.const is not None:
        record["length"] = sharder.length.const
    result.metadata_props[collectives.METADATA_KEY] = json.dumps(record)
    return result, ShardReport(
        ranks=options.ranks,
        order=order,
        length=_tokens(sharder.length, axes, options),
        inputs=axes_of["inputs"],
        outputs=axes_of["outputs"],
        choices=tuple(sharder.choices),
        handed=tuple(sharder.handed),
        gathered=_gathered(result.graph),
        caches=presents,
        machine=options.machine,
        batch=options.batch,
    )


def _sharder(
    model: ir.Model, options: ParallelOptions
) -> tuple[Sharder, dict[str, int], list[Joined]]:
    """What makes the ranks' graph, the dimensions of the sequence of inputs, and the caches that
    are in parts. Raises Refusal."""
    graph, info = model.graph, analyse(model)
    chosen = partial(
        choose,
        wanted=options.method,
        ranks=options.ranks,
        batch=options.batch,
        machine=options.machine,
    )
    caches: list[Joined] = []
    if options.prompt or not options.axes:
        caches = joined_caches(graph, info)
    pasts = {name_of(cache.past): cache.axis for cache in caches}
    if caches and not options.prompt:
        return _cache_sharder(model, pasts, options, chosen)
    if options.prompt:
        _empty(graph, pasts)
        info = analyse(model)
    if not options.axes and (alike := _broadcast_inputs(graph, info)):
        _name_alike(graph, alike)
        info = analyse(model)
    length, axes = _sequence(graph, info, options.axes)
    chosen = partial(chosen, length=_tokens(length, axes, options))
    if not options.prompt:
        return Sharder(graph, info, length, axes, options.ranks, chosen), axes, []
    if length == ONE:
        raise Refusal(
            "the model takes one token at a time; export it with an open number of tokens", None
        )
    return PromptSharder(graph, info, length, axes, options.ranks, chosen, pasts), axes, []


def _cache_sharder(
    model: ir.Model, pasts: dict[str, int], options: ParallelOptions, chosen: partial[Choice]
) -> tuple[Sharder, dict[str, int], list[Joined]]:
    """What makes the graph of a decoder whose caches are in parts; `pasts` are their dimensions.
    Raises Refusal."""
    graph = model.graph
    _name_alike(graph, pasts)
    info = analyse(model)
    caches = [cache for cache in joined_caches(graph, info) if cache.past.name in pasts]
    if {cache.past.name for cache in caches} != set(pasts):
        raise Refusal("its caches have several lengths", None)
    sharder = CacheSharder(
        graph,
        info,
        caches,
        pasts,
        options.ranks,
        partial(chosen, length=_tokens(caches[0].length, pasts, options)),
        attention_rule.cached_attention,
    )
    return sharder, pasts, caches


def _empty(graph: ir.Graph, caches: Mapping[str, int]) -> None:
    """Let caches have no tokens, along the given dimensions. Raises Refusal where there are
    none."""
    if not caches:
        raise Refusal("no cache was found that a prompt could fill; leave out --prompt", None)
    for value in graph.inputs:
        axis = caches.get(name_of(value))
        if axis is None or value.shape is None:
            continue
        sizes = list(value.shape)
        if isinstance(sizes[axis], int) and sizes[axis]:
            fixed = f"to {sizes[axis]}; export it with a dynamic axis"
            raise Refusal(
                f"the model fixes the number of tokens of the cache {value.name!r} {fixed}", None
            )
        sizes[axis] = 0
        value.shape = ir.Shape(sizes)


def _present(cache: Joined, info: ShapeInfo) -> str:
    """The output that has a cache with the new tokens, in the same places. Raises Refusal.

    If past is joined in the places in which it is given, the output has those of the result, too.
    Otherwise operators move the elements back, and the output is the only one of the shape and type
    that past would have.
    """
    further = _copies if cache.direct else _rearranged
    reach = reached([cache.node.outputs[0]], partial(further, info=info))
    outputs = [
        value
        for value in reach
        if value.is_graph_output() and info.dtype(value) == info.dtype(cache.past)
    ]
    if cache.direct:
        outputs = outputs[:1]
    else:
        wanted = list(info.sizes(cache.past))
        wanted[cache.axis] = cache.length
        outputs = [value for value in outputs if info.shape(value) == tuple(wanted)]
    if len(outputs) != 1:
        what = "several outputs may have" if outputs else "no output has"
        raise Refusal(f"{what} the cache {cache.past.name!r} with its new tokens", cache.node)
    return name_of(outputs[0])


def _copies(value: ir.Value, info: ShapeInfo) -> Iterator[ir.Value]:
    """The values that have the same elements in the same places."""
    for node in value.consumers():
        if is_op(node, "Identity", "Cast") or _joins_one(node, info):
            yield node.outputs[0]


def _joins_one(node: ir.Node, info: ShapeInfo) -> bool:
    """Is it a Concat of which one operand has elements?"""
    joined = concat_of(node, info)
    return joined is not None and len(joined.with_elements(info)) == 1


def _rearranged(value: ir.Value, info: ShapeInfo) -> Iterator[ir.Value]:
    """What operators that move all elements of a value make of it, alone or beside others."""
    nodes = (node for node in value.consumers() if is_op(node, *LAYOUT_OPS, "Cast", "Concat"))
    return (output for node in nodes for output in node.outputs)


@contextmanager
def _deep_calls() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, _DEPTH))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


def _attentions(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if node.domain == DOMAIN and node.op_type == GRAPH_OP]


def _name_alike(graph: ir.Graph, axes: Mapping[str, int]) -> None:
    """Give the named dimensions of the inputs one name: they are one size. Raises Refusal."""
    inputs = {value.name: value for value in graph.inputs}
    first: ir.SymbolicDim | int | None = None
    for name, axis in axes.items():
        if name not in inputs:
            known = [str(other) for other in inputs]
            raise Refusal(f"there is no input {name!r}{suggestion(name, known)}", None)
        shape = inputs[name].shape
        if shape is None or not -len(shape) <= axis < len(shape):
            raise Refusal(f"the input {name!r} has no dimension {axis}", None)
        size = shape[axis]
        if isinstance(size, ir.SymbolicDim) and size.value is None:
            size = ir.SymbolicDim("sequence")
        if first is None:
            first = size
        if isinstance(first, int) != isinstance(size, int) or (
            isinstance(size, int) and size != first
        ):
            raise Refusal(
                f"dimension {axis} of {name!r} is {size}, and the sequence is {first}", None
            )
        sizes = list(shape)
        sizes[axis] = first
        inputs[name].shape = ir.Shape(sizes)


def _sequence(
    graph: ir.Graph, info: ShapeInfo, given: Mapping[str, int]
) -> tuple[Dim, dict[str, int]]:
    """The length of the sequence, and for each input that carries it the dimension. Raises
    Refusal."""
    shapes = {
        name_of(value): info.sizes(value) for value in graph.inputs if value.const_value is None
    }
    for name in given:
        if name not in shapes:
            raise Refusal(f"the input {name!r} has a default, which every rank has whole", None)
    lengths = [shapes[name][axis] for name, axis in given.items()] or [
        _named_length(graph, info, shapes)
    ]
    length = lengths[0]
    axes = {name: axis % len(shapes[name]) for name, axis in given.items()}
    # a number may be that of other dimensions, too; a name is not
    if not given or length.const is None:
        further = {name: shape.index(length) for name, shape in shapes.items() if length in shape}
        axes = {**axes, **further} | axes
    if not axes:
        raise Refusal(
            f"the attentions run over {length} tokens, which is the size of no dimension of an input; tokens that the "
            "model makes itself, such as the patches of an image, cannot be divided; if an input has the tokens, name "
            "their dimension by --sequence-axis INPUT:DIM",
            None,
        )
    return length, axes


def _named_length(graph: ir.Graph, info: ShapeInfo, shapes: Mapping[str, Sequence[Dim]]) -> Dim:
    """The length of the attentions, as the inputs name it if one of them has this length. Raises
    Refusal."""
    length = _length_of_attentions(graph, info)
    named = {size for size in chain(*shapes.values()) if size in length.broadcast_parts}
    return named.pop() if len(named) == 1 else length


def _tokens(length: Dim, axes: Mapping[str, int], options: ParallelOptions) -> int:
    """The number of tokens: of the model, of the sizes that are given, or the one that the user
    gives for the choice of methods."""
    if length.const is not None:
        return length.const
    return next(
        (options.sizes[name][axis] for name, axis in axes.items() if name in options.sizes),
        options.length,
    )


def _length_of_attentions(graph: ir.Graph, info: ShapeInfo) -> Dim:
    """The length of the queries of most attentions."""
    lengths = _lengths(graph, info)
    if not lengths:
        for node in all_nodes(graph):
            if node.domain == DOMAIN:
                what = "attention in a branch or loop"
                if node.graph is graph:
                    what = "this kind of attention"
                raise Refusal(f"{what} is not divided", node)
        raise Refusal(
            "no attention was fused, so it is not known which dimension is the sequence; name it by --sequence-axis",
            None,
        )
    return lengths.most_common(1)[0][0]


def _lengths(graph: ir.Graph, info: ShapeInfo) -> Counter[Dim]:
    """How many attentions have queries of each length; without an attention by a softmax, those by
    states."""
    axes = {
        node: SEQUENCE_AXIS.get(text_attr(node, "input_layout", "")) for node in _attentions(graph)
    }
    if not axes:
        axes = {node: 1 for node in graph if node.domain == DOMAIN and node.op_type == LINEAR}
    shapes = ((info.shape(operand_at(node, 0)), axis) for node, axis in axes.items())
    return Counter(shape[axis] for shape, axis in shapes if shape is not None and axis is not None)


def _broadcast_inputs(graph: ir.Graph, info: ShapeInfo) -> dict[str, int]:
    """The dimensions of inputs whose sizes are broadcast together to the length of the attentions.
    An exporter gave each a name of its own. A sharded model runs only with inputs of one length, so
    they may be taken for equal."""
    try:
        parts = _length_of_attentions(graph, info).broadcast_parts
    except Refusal:
        return {}
    if len(parts) < 2:
        return {}
    axes = {}
    for value in graph.inputs:
        dims = [dim for dim, size in enumerate(info.sizes(value)) if size in parts]
        if dims and value.name is not None:
            axes[value.name] = dims[0]
    return axes


def _output(
    sharder: Sharder, value: ir.Value, presents: Mapping[str, int]
) -> tuple[ir.Value, int | None]:
    """An output of the ranks' model, and the dimension in which each rank has its part.

    `presents` names the outputs of caches that are in parts, and their dimensions. With caches,
    other outputs are whole where that is possible.

    Where the length is a number, another dimension may have the same one: features, such as those
    of the gradient of a weight. An output is then whole if a rank can compute the whole.
    """
    maker, is_open = value.producer(), sharder.length.const is None
    if (axis := presents.get(name_of(value))) is not None:
        return sharder.local(value, Place(axis), maker), axis
    if presents:
        with suppress(Refusal):
            return sharder.whole(value, maker), None
    shape = sharder.shape(value, maker)
    dims = [dim for dim, size in enumerate(shape) if size == sharder.length]
    if dims and is_open:
        return sharder.local(value, Place(dims[0]), maker), dims[0]
    if is_open and any(
        size != ONE and size.exact_div(sharder.length) is not None for size in shape
    ):
        told = "is longer than the sequence, or has it merged with other dimensions"
        raise Refusal(f"the output {value.name!r} {told}", maker)
    try:
        return sharder.whole(value, maker), None
    except Refusal:
        if not dims:
            raise
    return _first_local(sharder, value, dims)


def _first_local(sharder: Sharder, value: ir.Value, dims: Sequence[int]) -> tuple[ir.Value, int]:
    """The rank's part of a value along the first of these dimensions along which it has one. Raises
    the Refusal of the first dimension where it has none."""
    refused: Refusal | None = None
    for dim in dims:
        try:
            return sharder.local(value, Place(dim), value.producer()), dim
        except Refusal as refusal:
            refused = refused or refusal
    assert refused is not None
    raise refused


def _gathered(graph: ir.Graph) -> tuple[str, ...]:
    """The values of which every rank gets all tokens."""
    gathers = (node for node in graph if node.op_type == collectives.ALL_GATHER)
    return tuple(name_of(operand_at(node, 0)) for node in gathers)


def _order(sharder: Sharder, caches: Sequence[Joined]) -> str:
    """Cyclic for caches; else zigzag if a causal attention is computed row by row, and contiguous
    if none is."""
    if caches:
        return collectives.CYCLIC
    if any(choice.causal for choice in sharder.choices if choice.method != collectives.ALL_TO_ALL):
        return collectives.ZIGZAG
    return collectives.CONTIGUOUS


def _model(model: ir.Model, sharder: Sharder, outputs: list[ir.Value]) -> ir.Model:
    """The model with the needed ones of the sharder's nodes."""
    for index, old in enumerate(model.graph.outputs):
        outputs[index] = _named_output(sharder, old, outputs[index], outputs[:index])
    nodes = _needed(sharder.nodes, outputs)
    read = set(chain(sharder.defaults.values(), *map(values_read, nodes)))
    graph = ir.Graph(
        [*sharder.inputs.values(), *sharder.defaults.values()],
        outputs,
        nodes=nodes,
        initializers=[value for value in sharder.initializers.values() if value in read],
        opset_imports={**model.graph.opset_imports, collectives.DOMAIN: collectives.VERSION},
        name=model.graph.name,
    )
    if all(node.domain != DOMAIN for node in nodes):
        graph.opset_imports.pop(DOMAIN, None)
    return ir.Model(
        graph,
        ir_version=model.ir_version,
        producer_name=model.producer_name,
        functions=list(model.functions.values()),
        metadata_props=dict(model.metadata_props),
    )


def _named_output(
    sharder: Sharder, old: ir.Value, new: ir.Value, earlier: Sequence[ir.Value]
) -> ir.Value:
    """An output of the ranks' graph under the name that the model has for it. An input, a constant
    and one of the `earlier` outputs keep their names, so the output is a copy of them. Raises
    Refusal."""
    if old in sharder.defaults:
        return new
    if old in sharder.inputs:
        if new is not sharder.inputs[old]:
            raise Refusal(
                f"the output {old.name!r} is an input, of which a rank has another part", None
            )
        return new
    if new in sharder.inputs.values() or new.const_value is not None or new in earlier:
        new = sharder.emit_copy(new)
    new.name = old.name
    new.shape = _declared(sharder, old)
    if new.dtype is None and old.dtype is not None:
        new.dtype = old.dtype
    return new


def _declared(sharder: Sharder, value: ir.Value) -> ir.Shape | None:
    """The shape of an output: known sizes, and names for the rest."""
    shape = sharder.info.shape(value)
    if shape is None:
        return None
    return ir.Shape(
        [None if size.const is None or size == sharder.length else size.const for size in shape]
    )


def _needed(nodes: list[ir.Node], outputs: list[ir.Value]) -> list[ir.Node]:
    """The nodes from which a path leads to an output, in their order."""
    wanted = set(outputs)
    kept: list[ir.Node] = []
    for node in reversed(nodes):
        if not wanted.isdisjoint(node.outputs):
            kept.append(node)
            wanted.update(values_read(node))
    return kept[::-1]
