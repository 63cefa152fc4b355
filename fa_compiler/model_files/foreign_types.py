"""Types that onnx-ir cannot hold: maps and opaque types, alone or inside a sequence or an optional.

ONNX Runtime runs models with such inputs and outputs, and they have nothing to do with attention.
So the IR gets the model without these types, and the result gets them back, by the name of the
value.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import onnx

from fa_compiler.protos.subgraphs import Subgraphs, graphs_below

_NESTING = ("sequence_type", "optional_type")
_HELD = ("tensor_type", "sparse_tensor_type")


def foreign_types(below: Subgraphs) -> dict[str, onnx.TypeProto]:
    """The types of the model that onnx-ir cannot hold, by the name of their value."""
    return {
        info.name: info.type
        for info in _infos(below.model, below.of_graph)
        if _is_foreign(info.type)
    }


def without_types(model: onnx.ModelProto, types: Mapping[str, onnx.TypeProto]) -> onnx.ModelProto:
    """A copy of the model in which the values of these names have no type."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for info in _infos(copy, graphs_below(copy.graph)):
        if info.name in types:
            info.ClearField("type")
    return copy


def put_back(model: onnx.ModelProto, types: Mapping[str, onnx.TypeProto]) -> None:
    """Give the values of these names that have no type the types they had."""
    for info in _infos(model, graphs_below(model.graph)) if types else ():
        if info.name in types and info.type.WhichOneof("value") is None:
            info.type.CopyFrom(types[info.name])


def _infos(
    model: onnx.ModelProto, subgraphs: Iterable[onnx.GraphProto]
) -> Iterator[onnx.ValueInfoProto]:
    for graph in (model.graph, *subgraphs):
        yield from (*graph.input, *graph.output, *graph.value_info)
    for function in model.functions:
        yield from function.value_info


def _is_foreign(kind: onnx.TypeProto) -> bool:
    case = kind.WhichOneof("value")
    if case in _NESTING:
        return _is_foreign(getattr(kind, case).elem_type)
    return case is not None and case not in _HELD
