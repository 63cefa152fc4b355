"""The graph of one rank, with constants for its number, positions and sizes, from the graph that
all ranks share.

    operator             becomes
    -------------------  ---------------------------------------------------------------------------------------------
    SequencePart         three constants
    AllGather            HcomAllGather along the first axis, and the chunks in the order of the sequence
    AllReduce            HcomAllReduce, or HcomAllGather and a reduction for types that HcomAllReduce does not take
    TokenExtremes        ReduceMax or ReduceMin of the rank's tokens, and the same over the ranks. Elements are taken to
                         be numbers: a graph cannot gather the parts where one is NaN
    SelectTokens         Each rank takes a token for each index, at the place where the owner has it. HcomAllGather
                         brings these candidates together, and Gather keeps those of the owners
    SequenceAttention    rank_attention.py

The messages (op_registry/hcom.py) are in the same order in the graphs of all ranks: in that of the
operators above, and within one of them in that of its steps. They have to be run in this order,
because ranks wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, VERSION, collectives
from fa_compiler.passes.emit.build import Names
from fa_compiler.passes.ir.nodes import certain, constant, name_of, remember_versions
from fa_compiler.passes.parallel.places import Refusal
from fa_compiler.passes.parallel.rank_attention import sequence_attention
from fa_compiler.passes.parallel.rank_emitter import INT64, Rank, RankEmitter
from fa_compiler.passes.parallel.shard import ShardReport
from fa_compiler.passes.values.shapes import ShapeInfo

NO_TRAINING = "a training graph has no form for single ranks; shard writes one for ranks of MPI"


def length_of(report: ShardReport, sizes: Mapping[str, Sequence[int]]) -> int:
    """The number of tokens in inputs of these sizes.

    Raises Refusal if the inputs have sequences of several lengths, or if there are no equal chunks
    of so many tokens.
    """
    lengths = {name: sizes[name][axis] for name, axis in report.inputs.items() if axis is not None}
    if len(set(lengths.values())) != 1:
        told = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise Refusal(
            f"the inputs need sequences of one length, and {told or 'there is none'}", None
        )
    length, count = (
        next(iter(lengths.values())),
        collectives.chunk_count(report.order, report.ranks),
    )
    if rest := length % count:
        possible = " or ".join(
            str(other) for other in (length - rest, length - rest + count) if other
        )
        raise Refusal(
            f"{length} tokens cannot be cut into {count} equal chunks, which {report.ranks} ranks need; {possible} can",
            None,
        )
    return length


def rank_graph(
    model: ir.Model,
    report: ShardReport,
    rank: Rank,
    sizes: Mapping[str, Sequence[int]],
    cann: str | None = None,
) -> ir.Model:
    """The model of one rank, from that of all ranks, which stays as it is. `sizes` are those of the
    inputs, with the whole sequence. `cann` is the CANN version whose prototypes the operators have;
    None is the newest. Raises Refusal."""
    made = model.clone()
    graph = made.graph
    graph.name = f"{graph.name or 'model'}_rank_{rank.number}"
    for value in graph.inputs:
        axis = report.inputs.get(name_of(value))
        if value.name is not None and value.name in sizes:  # a weight may be an input, too
            shape = list(sizes[value.name])
            if axis is not None:
                shape[axis] = rank.count
            value.shape = ir.Shape(shape)
    graph.opset_imports[DOMAIN] = VERSION
    graphs = remember_versions(made)
    info = ShapeInfo(made.functions, graph, overridable=True)
    emit = RankEmitter(graph, Names.of(graphs), info, rank, cann)
    for node in list(graph):
        if node.domain == collectives.DOMAIN:
            emit.place = node
            _replace(emit, node, _results(emit, node))
    del graph.opset_imports[collectives.DOMAIN]
    made.metadata_props.pop(collectives.METADATA_KEY, None)
    return made


def _results(emit: RankEmitter, node: ir.Node) -> list[ir.Value]:
    """The outputs of an operator, for this rank."""
    rank = emit.rank
    if node.op_type == collectives.SEQUENCE_PART:
        own = rank.positions(rank.number)
        return [emit.constant(own, "positions"), emit.ints([rank.length]), emit.ints([len(own)])]
    if node.op_type in (collectives.SEQUENCE_STATES, collectives.SEQUENCE_TAILS):
        raise Refusal("what the ranks hand on for it has no form for the graph of one rank", node)
    if node.op_type == collectives.SEQUENCE_GRADIENT or len(node.outputs) > 1:
        raise Refusal(NO_TRAINING, node)
    if node.op_type == collectives.SEQUENCE_ATTENTION:
        return [sequence_attention(emit, node)]
    part = certain(node.inputs[0])
    if node.op_type == collectives.ALL_REDUCE:
        return [emit.reduced(part, "sum")]
    axis = node.attributes["axis"].as_int()
    if node.op_type == collectives.TOKEN_EXTREMES:
        inner, reduction = (
            node.attributes["inner"].as_int(),
            node.attributes["reduction"].as_string(),
        )
        return [_extremes(emit, part, axis, inner, reduction)]
    if node.op_type == collectives.SELECT_TOKENS:
        indices = certain(node.inputs[1])
        return [_selected(emit, part, indices, axis)]
    whole = emit.in_sequence(emit.gathered(emit.first(part, axis)))
    return [emit.back(whole, axis)]


def _extremes(emit: RankEmitter, part: ir.Value, axis: int, inner: int, reduction: str) -> ir.Value:
    """The largest or smallest token of all ranks, in place of the tokens along an axis."""
    shape = emit.shape(part)
    others = shape[axis] // emit.rank.count
    pair = (others, emit.rank.count) if inner else (emit.rank.count, others)
    split = emit.reshape(part, (*shape[:axis], *pair, *shape[axis + 1 :]))
    return emit.reduced(emit.over(reduction, split, axis + inner), reduction)


def _selected(emit: RankEmitter, part: ir.Value, indices: ir.Value, axis: int) -> ir.Value:
    """Gather(whole, indices, axis), where the rank has `part` of the whole."""
    shape, wanted = emit.shape(part), emit.shape(indices)
    owner, place = _owners(emit, indices)
    count = int(np.prod(wanted, dtype=np.int64))
    mine = emit.first(emit.gather(part, emit.reshape(place, (count,)), axis), axis)
    every = emit.gathered(mine)
    first = emit.mul(emit.reshape(owner, (count,)), emit.ints([count]))
    numbers = emit.add(first, emit.ints(range(count)))
    picked = emit.back(emit.gather(every, numbers, 0), axis)
    return emit.reshape(picked, (*shape[:axis], *wanted, *shape[axis + 1 :]))


def _owners(emit: RankEmitter, indices: ir.Value) -> tuple[ir.Value, ir.Value]:
    """For each index of a token the rank that has it, and its place among the tokens of this rank,
    int64."""
    rank = emit.rank
    owner, place = collectives.owners([rank.positions(number) for number in range(rank.ranks)])
    known = constant(indices)
    if known is not None:
        if known.size and not (-rank.length <= known.min() and known.max() < rank.length):
            told = f"the sequence of {rank.length} tokens does not have"
            raise Refusal(f"it picks a token that {told}", emit.place)
        return emit.constant(owner[known]), emit.constant(place[known])
    numbers = emit.cast(indices, INT64)
    negative = emit.less(numbers, emit.constant(np.array(0, np.int64)))
    numbers = emit.where(
        negative, emit.add(numbers, emit.constant(np.array(rank.length, np.int64))), numbers
    )
    return emit.gather(emit.constant(owner), numbers, 0), emit.gather(
        emit.constant(place), numbers, 0
    )


def _replace(emit: RankEmitter, node: ir.Node, results: list[ir.Value]) -> None:
    """Put new values in the place of a node's outputs. An output of the model keeps its name, so an
    Identity makes it where the new value has another one that stays."""
    for old, new in zip(node.outputs, results, strict=True):
        if old.is_graph_output():
            name, old.name = old.name, None
            new = (
                new
                if new.producer() is not None and not new.is_graph_output()
                else emit.op("Identity", [new])
            )
            new.name, new.shape = name, old.shape
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    emit.graph.remove(node, safe=True)
