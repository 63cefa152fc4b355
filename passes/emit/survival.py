"""What an attention is computed from, as ONNX Runtime's optimiser reads it: nothing there may change by what is fused.

A DequantizeLinear of the model may be safe only because of what is around it. Its quantisation is not copied
(dequantised.py) behind a Transpose, for example, that the optimiser can push through a Concat and remove together with
the one behind. A fused attention has no such Transpose, or one in another place. So in what an attention is computed
from, and in all of a model whose opset was raised:

    1  operators that move what a DequantizeLinear gives are put in front of it, where a copy may go wrong

The optimiser also pushes a Transpose in front of a DequantizeLinear behind it, if one further on makes up for it:

    Transpose -> DequantizeLinear    becomes    DequantizeLinear -> Transpose -> QuantizeLinear -> DequantizeLinear

The new QuantizeLinear gives uint8 if it has no zero point, up to opset 20 and in com.microsoft, and there is none of
int32. So in what an attention is computed from:

    2  a zero point that is absent is written down as the 0 that it is
    3  DequantizeLinear(x, scale) of int32, with a Transpose in front of it, becomes Mul(Cast(x), scale), which gives
       the same bits; so does one with a Transpose behind it that the optimiser may push up to it, through a Concat for
       example, unless x is a constant such as the bias of a product
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.emit.dequantised import COPIED_BEHIND, DOMAINS, dequantised
from fa_compiler.passes.ir.nodes import (
    constant,
    constant_tensor,
    data_readers,
    input_of,
    int_attr,
    is_op,
    producer,
    reached,
    values_read,
)
from fa_compiler.passes.ir.surgery import replace_value, restore_order, sweep
from fa_compiler.passes.values.shapes import ShapeInfo

UNSAFE = (ir.DataType.INT8, ir.DataType.INT32)
"""The integers whose quantisation ONNX Runtime may copy wrongly behind an operator (1)."""
TYPED_SINCE = 21
"""From this opset on QuantizeLinear says its type where it has no zero point (2)."""
UNTYPED = (ir.DataType.INT8, ir.DataType.INT16, ir.DataType.UINT16)
"""The integers that a QuantizeLinear gives only with a zero point, or with a type (2)."""
NEAR = 64
"""A Transpose around a DequantizeLinear is looked for among so many nodes (3)."""
_Change = Callable[[ir.Node, Builder], bool]
"""Changes a node of a graph, and says whether it did."""


def put_in_front(nodes: Iterable[ir.Node], info: ShapeInfo, names: Names) -> None:
    """1 for these nodes, which are in the order of their graphs."""
    _change(nodes, info, names, _moved)


def settle(made: Iterable[ir.Node], info: ShapeInfo, names: Names) -> None:
    """1 to 3 for what these nodes are computed from."""
    needed = _needed_by(made)
    if not any(node.op_type == "DequantizeLinear" for node in needed):
        return
    _change(needed, info, names, _pointed)
    _change(needed, info, names, _moved)
    _change(_needed_by(made), info, names, _multiplied)


def _needed_by(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """The nodes that these nodes are computed from, each behind those that it is computed from."""
    found = set(reached(nodes, _makers))
    graphs = dict.fromkeys(node.graph for node in found if node.graph is not None)
    return [node for graph in graphs for node in graph if node in found]


def _makers(node: ir.Node) -> list[ir.Node]:
    return [maker for value in values_read(node) if (maker := producer(value)) is not None]


def _change(nodes: Iterable[ir.Node], info: ShapeInfo, names: Names, change: _Change) -> None:
    of_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in nodes:
        if isinstance(node.graph, ir.Graph):
            of_graph.setdefault(node.graph, []).append(node)
    for graph, given in of_graph.items():
        builder = Builder(graph, names, info)
        if changed := [node for node in given if change(node, builder)]:
            sweep(graph, [*changed, *builder.nodes])
            restore_order(graph)


def _moved(node: ir.Node, builder: Builder) -> bool:
    """1. Where only QuantizeLinear reads the result, nothing is copied."""
    if not is_op(node, *COPIED_BEHIND):
        return False
    info, output = builder.info, node.outputs[0]
    found = dequantised(node.inputs[0], info)
    if found is None or info.dtype(found.integers) not in UNSAFE:
        return False
    if not output.is_graph_output() and all(is_op(reader, "QuantizeLinear") for reader in data_readers(output)):
        return False
    attributes = {name: attr.value for name, attr in node.attributes.items()}
    _replace(output, builder.op(node.op_type, node.inputs, info.dtype(output), attributes), builder)
    return True


def _pointed(node: ir.Node, builder: Builder) -> bool:
    """2. Blocks are of opset 21 and later, where the zero point may be absent."""
    integers, scale = _dequantises(node), input_of(node, 1)
    typed = builder.opset >= TYPED_SINCE and node.domain != "com.microsoft"
    if integers is None or scale is None or input_of(node, 2) is not None or typed:
        return False
    dtype, shape = builder.info.dtype(integers), builder.info.shape(scale)
    sizes = None if shape is None else [size.const for size in shape]
    if dtype not in UNTYPED or sizes is None or None in sizes:
        return False
    zero = np.zeros([size for size in sizes if size is not None], dtype.numpy())
    node.resize_inputs(3)
    node.replace_input_with(2, builder.constant(zero, "zero_point"))
    return False  # the node stays


def _multiplied(node: ir.Node, builder: Builder) -> bool:
    """3."""
    integers, scale, point, info = _dequantises(node), input_of(node, 1), input_of(node, 2), builder.info
    if integers is None or scale is None or info.dtype(integers) != ir.DataType.INT32:
        return False
    shapes, output = (info.shape(integers), info.shape(scale)), node.outputs[0]
    is_zero = point is None or ((number := constant(point)) is not None and not number.any())
    known = (
        shapes[0] is not None and shapes[1] is not None and len(shapes[1]) < 2 and not int_attr(node, "block_size", 0)
    )
    if not is_zero or not known or info.dtype(scale) != ir.DataType.FLOAT or info.dtype(output) != ir.DataType.FLOAT:
        return False
    if not _has_transpose_near(integers, output):
        return False
    rank, vector = len(shapes[0] or ()), len(shapes[1] or ()) == 1 and (shapes[1] or ())[0].const != 1
    axis = int_attr(node, "axis", 1) % rank if vector else 0
    factor = builder.units("Unsqueeze", scale, tuple(range(1, rank - axis))) if vector else scale
    real = builder.cast(integers, ir.DataType.FLOAT)
    _replace(output, builder.op("Mul", [real, factor], ir.DataType.FLOAT), builder)
    return True


def _has_transpose_near(integers: ir.Value, output: ir.Value) -> bool:
    """Is a Transpose in front of a DequantizeLinear that reads `integers`, or, unless these are constant, behind its
    output?"""
    near = list(reached([integers], lambda value: [] if (maker := value.producer()) is None else _given(maker), NEAR))
    if constant_tensor(integers) is None:
        near.extend(
            reached([output], lambda value: [made for reader in value.consumers() for made in reader.outputs], NEAR)
        )
    return any(is_op(value.producer(), "Transpose") for value in near)


def _dequantises(node: ir.Node) -> ir.Value | None:
    """The integers that a DequantizeLinear reads; None for other nodes."""
    return input_of(node, 0) if node.op_type == "DequantizeLinear" and node.domain in DOMAINS else None


def _given(node: ir.Node) -> list[ir.Value]:
    return [value for value in node.inputs if value is not None]


def _replace(output: ir.Value, new: ir.Value, builder: Builder) -> None:
    named = output.is_graph_output()
    replace_value(output, builder.alias(new) if named else new, rename=named)
