"""What the provider's library asks in `GetCapability`: a graph of ONNX Runtime, and the fused graph in its place."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from fa_compiler.errors import InputError
from fa_compiler.lowering.onnx_file import restore_graph_operators
from fa_compiler.op_registry import DOMAINS, VERSION
from fa_compiler.passes import Options, Report, ShapeInfo, analyse
from fa_compiler.passes.nodes import all_nodes
from fa_compiler.passes.values.symbolic import Atom, Dim
from fa_compiler.pipeline import fuse_checked

NESTED_DOMAIN = "fa_compiler.nested"
"""The domain of the library's operators in the sessions that the provider makes (lowering/ort/csrc/register.cc)."""


@dataclass(frozen=True)
class Replacement:
    """The fused graph in place of a session's graph.

    `model` is None if nothing was fused. `sizes` are the sizes of the outputs, as numbers that
    lowering/ort/csrc/provider/output_sizes.hpp reads.
    """

    report: Report
    model: bytes | None = None
    sizes: tuple[int, ...] = ()


def replacement(content: bytes, captures: bool) -> Replacement:
    """Fuse the graph of a session.

    Args:
        content: the graph as a serialised model. The offset of its external data is an address in this process.
        captures: whether ONNX Runtime gives a claimed node also those inputs that only its subgraphs read.

    Raises:
        InputError: the graph cannot be replaced as a whole.
    """
    proto = onnx.ModelProto.FromString(content)
    weights = _weights(proto)
    model = ir.from_proto(proto)
    for name, tensor in weights.items():
        model.graph.initializers[name].const_value = _in_memory(tensor)
    used, captured = _inputs_read(model.graph)
    restore_graph_operators(model)
    report, info = fuse_checked(model, Options())
    report.model = model.graph.name or "model"
    if not report.count("fused"):
        return Replacement(report)
    if not captures and captured:
        raise InputError(f"only a subgraph reads the input '{captured[0]}', which needs a newer ONNX Runtime")
    for value in model.graph.outputs:
        if value.dtype == ir.DataType.STRING:
            raise InputError(f"the output '{value.name}' is a tensor of strings")
    sizes = tuple(_sizes(model.graph, info or analyse(model)))
    for value in [value for value in model.graph.inputs if value.name not in used]:
        model.graph.inputs.remove(value)
    _to_nested_domain(model)
    for name, tensor in weights.items():
        if name in model.graph.initializers:
            model.graph.initializers[name].const_value = _in_file(tensor)
    return Replacement(report, ir.to_proto(model).SerializeToString(), sizes)


def _weights(proto: onnx.ModelProto) -> dict[str, onnx.TensorProto]:
    """The weights that stayed in the runtime's memory, by name."""
    return {
        tensor.name: tensor for tensor in proto.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL
    }


def _external(tensor: onnx.TensorProto) -> dict[str, str]:
    return {entry.key: entry.value for entry in tensor.external_data}


def _in_memory(tensor: onnx.TensorProto) -> ir.LazyTensor:
    """The tensor, whose content is copied when somebody looks at it."""
    entries = _external(tensor)
    address, length = int(entries["offset"]), int(entries["length"])

    def read() -> ir.TensorProtocol:
        copy = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        copy.raw_data = ctypes.string_at(address, length)
        return ir.serde.TensorProtoTensor(copy)

    return ir.LazyTensor(
        read, dtype=ir.DataType(tensor.data_type), shape=ir.Shape(tensor.dims), cache=True, name=tensor.name
    )


def _in_file(tensor: onnx.TensorProto) -> ir.ExternalTensor:
    """The tensor as the library gives it to ONNX Runtime: alone in a file, which exists only in memory."""
    entries = _external(tensor)
    return ir.ExternalTensor(
        entries["location"],
        0,
        int(entries["length"]),
        ir.DataType(tensor.data_type),
        shape=ir.Shape(tensor.dims),
        name=tensor.name,
    )


def _inputs_read(graph: ir.Graph) -> tuple[set[str], list[str]]:
    """The names of the inputs that some node reads, and of those that only nodes of subgraphs read."""
    here = {value.name for node in graph for value in node.inputs if value is not None}
    anywhere = {value.name for node in all_nodes(graph) for value in node.inputs if value is not None}
    names = [value.name for value in graph.inputs if value.name in anywhere]
    return {name for name in names if name}, [name for name in names if name and name not in here]


def _to_nested_domain(model: ir.Model) -> None:
    imports = model.graph.opset_imports
    for domain in DOMAINS:
        imports.pop(domain, None)
    imports[NESTED_DOMAIN] = VERSION
    for node in all_nodes(model.graph):
        if node.domain in DOMAINS:
            node.domain = NESTED_DOMAIN


def _sizes(graph: ir.Graph, info: ShapeInfo) -> Iterator[int]:
    """The numbers of output_sizes.hpp."""
    places: dict[Atom, tuple[int, int]] = {}
    equal: list[tuple[int, int]] = []
    for index, value in enumerate(graph.inputs):
        for axis, dim in enumerate(info.shape(value) or ()):
            if (atom := dim.single_atom) is None:
                continue
            if atom in places:
                equal.extend((places[atom], (index, axis)))
            else:
                places[atom] = index, axis
    yield len(equal) // 2
    for place in equal:
        yield from place
    for value in graph.outputs:
        yield from _size(info.shape(value), places)


def _size(shape: tuple[Dim, ...] | None, places: dict[Atom, tuple[int, int]]) -> list[int]:
    if shape is None:
        return [-1]
    numbers = [len(shape)]
    for dim in shape:
        numbers.append(len(dim.terms))
        for factors, coefficient in dim.terms:
            if any(factor not in places for factor in factors):
                return [-1]
            numbers.extend((coefficient, len(factors), *(number for factor in factors for number in places[factor])))
    return numbers
