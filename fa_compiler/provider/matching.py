"""What the provider's library asks in `GetCapability`: a graph of ONNX Runtime, and the fused graph
in its place."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import onnx
import onnx_ir as ir

from fa_compiler.errors import InputError
from fa_compiler.lowering.onnx_file import restore_graph_operators
from fa_compiler.op_registry import DOMAINS, VERSION
from fa_compiler.passes import Options, Report, ShapeInfo, analyse
from fa_compiler.passes.algebra.symbolic import Atom, Dim
from fa_compiler.passes.ir.nodes import all_nodes
from fa_compiler.pipeline.fusing import fuse_checked, name_of

NESTED_DOMAIN = "fa_compiler.nested"
"""The domain of the library's operators in the sessions that the provider makes
(lowering/ort/csrc/register.cc)."""

_SHAPE_OF_PRODUCT = re.compile(r"gemm_(in|out)put_shape(_token_\d+)?")


@dataclass(frozen=True)
class Replacement:
    """The fused graph in place of a session's graph.

    `model` is None if nothing was fused. `sizes` are the sizes of the outputs, as numbers that
    lowering/ort/csrc/provider/output_sizes.hpp reads. `read` are the weights whose values were
    looked at, by their places: whatever the others hold, the answer is the same.
    """

    report: Report
    model: bytes | None = None
    sizes: tuple[int, ...] = ()
    read: Mapping[int, memoryview] = field(default_factory=dict)


def replacement(
    content: bytes, addresses: Sequence[int], captures: bool, options: Options
) -> Replacement:
    """Fuse the graph of a session.

    Args:
        content: the graph as a serialised model. Its large weights are external data that are in no
            file.
        addresses: where these weights are in memory, in the order of the model. They stay there
            during the call, and as long as `read` of the result is used.
        captures: whether ONNX Runtime gives a claimed node also those inputs that only its
            subgraphs read.
        options: those of the fusion.

    Raises:
        InputError: the graph cannot be replaced as a whole.
    """
    proto = onnx.ModelProto.FromString(content)
    weights = _Weights(proto, addresses)
    model = ir.from_proto(proto)
    weights.to_memory(model.graph)
    used, captured = _inputs_read(model.graph)
    restore_graph_operators(model)
    report, info = fuse_checked(model, options)
    report.model = name_of(model)
    if not report.is_changed:
        return Replacement(report, read=weights.read)
    if not captures and captured:
        raise InputError(
            f"only a subgraph reads the input '{captured[0]}', which needs a newer ONNX Runtime"
        )
    sizes = tuple(_sizes(model.graph, info or analyse(model)))
    for value in [value for value in model.graph.inputs if value.name not in used]:
        model.graph.inputs.remove(value)
    _to_nested_domain(model)
    _rename_shapes(model.graph)
    weights.to_files(model.graph)
    fused = ir.to_proto(model).SerializeToString()
    return Replacement(report, fused, sizes, weights.read)


class _Weights:
    """The weights that stayed in the runtime's memory."""

    def __init__(self, proto: onnx.ModelProto, addresses: Sequence[int]) -> None:
        external = [
            each
            for each in proto.graph.initializer
            if each.data_location == onnx.TensorProto.EXTERNAL
        ]
        self.read: dict[int, memoryview] = {}
        """The bytes of the weights whose values were looked at, by their places."""
        self._weights = list(zip(external, addresses, strict=True))
        self._lazy: dict[str, ir.LazyTensor] = {}

    def to_memory(self, graph: ir.Graph) -> None:
        """Let the initialisers of a graph read from memory. A value is copied when somebody looks
        at it."""
        for place, (tensor, address) in enumerate(self._weights):
            lazy = ir.LazyTensor(
                partial(self._value, place, tensor, address),
                dtype=ir.DataType(tensor.data_type),
                shape=ir.Shape(tensor.dims),
                cache=True,
                name=tensor.name,
            )
            graph.initializers[tensor.name].const_value = self._lazy[tensor.name] = lazy

    def to_files(self, graph: ir.Graph) -> None:
        """Let them be what the library gives to ONNX Runtime: each alone in a file, which exists
        only in memory."""
        for tensor, _ in self._weights:
            value = graph.initializers.get(tensor.name)
            if value is not None and value.const_value is self._lazy[tensor.name]:
                value.const_value = ir.ExternalTensor(
                    _external(tensor)["location"],
                    0,
                    int(_external(tensor)["length"]),
                    ir.DataType(tensor.data_type),
                    shape=ir.Shape(tensor.dims),
                    name=tensor.name,
                )

    def _value(self, place: int, tensor: onnx.TensorProto, address: int) -> ir.TensorProtocol:
        length = int(_external(tensor)["length"])
        self.read[place] = memoryview((ctypes.c_ubyte * length).from_address(address))
        copy = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
        copy.raw_data = self.read[place].tobytes()
        return ir.serde.TensorProtoTensor(copy)


def _external(tensor: onnx.TensorProto) -> dict[str, str]:
    return {each.key: each.value for each in tensor.external_data}


def _inputs_read(graph: ir.Graph) -> tuple[set[str], list[str]]:
    """The names of the inputs that some node reads, and of those that only nodes of subgraphs
    read."""
    here = {value.name for node in graph for value in node.inputs if value is not None}
    anywhere = {
        value.name for node in all_nodes(graph) for value in node.inputs if value is not None
    }
    names = [value.name for value in graph.inputs if value.name in anywhere]
    return {name for name in names if name}, [name for name in names if name and name not in here]


def _rename_shapes(graph: ir.Graph) -> None:
    """Give the shapes that ONNX Runtime made for its products other names.

    The session inside makes such shapes, too, and numbers their names. Where it has first replaced
    one of these shapes by an equal constant, it takes the name for free, although the shape is
    still there, and then ends with an error.
    """
    for name in [name for name in graph.initializers if _SHAPE_OF_PRODUCT.fullmatch(name)]:
        value = graph.initializers.pop(name)
        value.name = f"fa_compiler.{name}"
        graph.register_initializer(value)


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
            numbers.extend(
                (
                    coefficient,
                    len(factors),
                    *(number for factor in factors for number in places[factor]),
                )
            )
    return numbers
