"""Makes a deep model from an exported model of two layers: the second layer is repeated, node for node.

    deep = repeat(model, 32)
    place_weights(deep, Path("deep.bin"), times=100)

The layers are found by their residual additions, x + f(x). Each layer has two: one after attention and one after the
feed-forward part. The second layer consists of the nodes that the fourth addition needs and the second one does not.
The nodes that both layers share (the mask, the rotary tables, sizes) stay shared, as in an exported model. A copy gets
its own weights. No weight is used in a computation; external weights become holes in one file.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import onnx

PER_LAYER = 2
"""The number of residual additions in a layer."""

_PAGE = 1 << 12


def repeat(model: onnx.ModelProto, layers: int) -> onnx.ModelProto:
    """A model of `layers` layers (two or more), from a model of two layers.

    Raises:
        ValueError: the model does not have two layers with two residual additions each.
    """
    graph = model.graph
    needs = _Ancestors(graph.node)
    stream = needs.residual_stream()
    if len(stream) != 2 * PER_LAYER:
        raise ValueError(f"{graph.name}: {len(stream)} residual additions in a row instead of those of two layers")
    start, end = stream[PER_LAYER - 1], stream[-1]
    inside = needs.of(end) - needs.of(start)
    body = [node for index, node in enumerate(graph.node) if index in inside]
    own = _read(body) - _read(node for index, node in enumerate(graph.node) if index not in inside)
    weights = [tensor for tensor in graph.initializer if tensor.name in own]

    deep = onnx.ModelProto()
    deep.CopyFrom(model)
    del deep.graph.node[:]
    made = {name for node in body for name in node.output}
    described = [info for info in graph.value_info if info.name in made]
    deep.graph.node.extend(node for index, node in enumerate(graph.node) if index <= max(inside))
    last = end
    for layer in range(2, layers):
        new = {name: f"{name}.{layer}" for node in body for name in node.output if name}
        new |= {tensor.name: f"{tensor.name}.{layer}" for tensor in weights}
        new[start] = last
        for tensor in weights:
            copy = deep.graph.initializer.add()
            copy.CopyFrom(tensor)
            copy.name = new[tensor.name]
        deep.graph.node.extend(_renamed(node, new, f".{layer}") for node in body)
        for info in described:
            deep.graph.value_info.add().CopyFrom(info)
            deep.graph.value_info[-1].name = new[info.name]
        last = new[end]
    rest = (node for index, node in enumerate(graph.node) if index > max(inside))
    deep.graph.node.extend(_renamed(node, {end: last}, "") for node in rest)
    return deep


def place_weights(model: onnx.ModelProto, path: Path, times: int = 1) -> int:
    """Give every external tensor a position in the file `path`, and return the length of the file.

    The feed-forward parts become `times` as wide; no other size of the graph depends on their width.
    """
    external = [tensor for tensor in model.graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    width = _feed_forward_width(external)
    for info in model.graph.value_info:
        for size in info.type.tensor_type.shape.dim:
            if size.dim_value == width:
                size.dim_value *= times
    end = 0
    for tensor in external:
        dims = [dim * times if dim == width else dim for dim in tensor.dims]
        tensor.ClearField("dims")
        tensor.dims.extend(dims)
        length = math.prod(dims) * int(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize)
        tensor.ClearField("external_data")
        for key, value in (("location", path.name), ("offset", str(end)), ("length", str(length))):
            tensor.external_data.add(key=key, value=value)
        end += -(-length // _PAGE) * _PAGE
    with path.open("wb") as file:
        file.truncate(end)
    return end


def _feed_forward_width(weights: Iterable[onnx.TensorProto]) -> int:
    """The width of the feed-forward parts: each has three weights, [hidden, width] or [width, hidden]."""
    shapes = Counter(frozenset(tensor.dims) for tensor in weights if len(set(tensor.dims)) > 1)
    pair = next(shape for shape, count in shapes.items() if count == max(shapes.values()))
    hidden = frozenset.intersection(*shapes)
    (width,) = pair - hidden
    return width


class _Ancestors:
    """The nodes that each value depends on, by their positions."""

    def __init__(self, nodes: Iterable[onnx.NodeProto]) -> None:
        self._nodes = list(nodes)
        self._makers = {name: index for index, node in enumerate(self._nodes) for name in node.output if name}

    def of(self, value: str) -> set[int]:
        """The positions of the nodes that `value` depends on, including its producer."""
        found: set[int] = set()
        waiting = [value]
        while waiting:
            index = self._makers.get(waiting.pop())
            if index is not None and index not in found:
                found.add(index)
                waiting.extend(self._nodes[index].input)
        return found

    def residual_stream(self) -> list[str]:
        """The longest chain of values in which each is x + f(x) of the value x before."""
        rows: dict[str, list[str]] = {}
        for node in self._nodes:
            if node.op_type == "Add":
                for value, change in (node.input, reversed(node.input)):
                    maker = self._makers.get(value)
                    if maker is not None and maker in self.of(change):
                        rows[node.output[0]] = [*rows.get(self._uncast(value), []), node.output[0]]
        return max(rows.values(), key=len, default=[])

    def _uncast(self, value: str) -> str:
        maker = self._makers.get(value)
        node = None if maker is None else self._nodes[maker]
        return self._uncast(node.input[0]) if node is not None and node.op_type == "Cast" else value


def _read(nodes: Iterable[onnx.NodeProto]) -> set[str]:
    return {name for node in nodes for name in node.input}


def _renamed(node: onnx.NodeProto, names: dict[str, str], suffix: str) -> onnx.NodeProto:
    copy = onnx.NodeProto()
    copy.CopyFrom(node)
    copy.name += suffix
    for field in (copy.input, copy.output):
        for index, name in enumerate(field):
            field[index] = names.get(name, name)
    return copy
