"""What a file says of the tensors that its nodes read, for the rules of `plugin_reads` that depend
on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import onnx
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.plugin_reads import BY_FACTS, InputFact
from fa_compiler.passes.ir.nodes import STANDARD, all_graphs, remember_versions
from fa_compiler.passes.values.shapes import analyse


def input_facts(
    model: onnx.ModelProto, graphs: Sequence[onnx.GraphProto]
) -> Mapping[str, InputFact]:
    """The facts of every tensor of the model, by name.

    Types and shapes are those that the file declares. If they are missing where a rule needs them,
    they are inferred. `graphs` are all graphs of the model.
    """
    made = {name for graph in graphs for node in graph.node for name in node.output}
    declared = {name: (dtype, rank) for graph in graphs for name, dtype, rank in _declared(graph)}
    facts = {
        name: InputFact(*declared.get(name, (None, None)), name in made)
        for name in (*declared, *made)
    }
    wanted = {
        node.input[0]
        for graph in graphs
        for node in graph.node
        if node.domain in STANDARD and node.op_type in BY_FACTS and node.input
    }
    if all(facts.get(name, InputFact()).rank is not None for name in wanted):
        return facts
    return facts | {
        name: InputFact(dtype, rank, name in made) for name, dtype, rank in _inferred(model)
    }


def _declared(graph: onnx.GraphProto) -> Iterator[tuple[str, int | None, int | None]]:
    for value in (*graph.value_info, *graph.output, *graph.input):
        if value.type.HasField("tensor_type"):
            kind = value.type.tensor_type
            yield (
                value.name,
                kind.elem_type or None,
                len(kind.shape.dim) if kind.HasField("shape") else None,
            )
    for tensor in graph.initializer:
        yield tensor.name, tensor.data_type, len(tensor.dims)


def _inferred(model: onnx.ModelProto) -> Iterator[tuple[str, int | None, int | None]]:
    """The facts by shape inference; none for a model that is not valid."""
    try:
        held = ir.from_proto(model)
        remember_versions(held)
        info = analyse(held)
        for graph in all_graphs(held):
            for value in (
                *graph.inputs,
                *graph.initializers.values(),
                *(out for node in graph for out in node.outputs),
            ):
                dtype, shape = info.dtype(value), info.shape(value)
                rank = None if shape is None else len(shape)
                if value.name:
                    yield value.name, None if dtype is None else int(dtype), rank
    except Exception:  # a damaged model fails anywhere in the reader or the inference; the check goes on without facts
        return
