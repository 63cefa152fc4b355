"""What an attention is computed from, as ONNX Runtime's optimiser reads it: nothing there may
change by what is fused.

A DequantizeLinear of the model may be safe only because of what is around it. Its quantisation is
not copied (dequantised.py) behind a Transpose, for example, that the optimiser can push through a
Concat and remove together with the one behind. A fused attention has no such Transpose, or one in
another place. So in what an attention is computed from, and in all of a model whose opset was
raised:

    1  operators that move what a DequantizeLinear gives are put in front of it, where a copy may go
       wrong

The optimiser also pushes a Transpose in front of a DequantizeLinear behind it, if one further on
makes up for it:

    Transpose -> DequantizeLinear    becomes    DequantizeLinear -> Transpose -> QuantizeLinear ->
       DequantizeLinear

The new QuantizeLinear gives uint8 if it has no zero point, up to opset 20 and in com.microsoft, and
there is none of int32. So in what an attention is computed from:

    2  a zero point that is absent is written down as the 0 that it is
    3  DequantizeLinear(x, scale) of int32, with a Transpose in front of it, becomes Mul(Cast(x),
       scale), which gives the same bits; so does one with a Transpose behind it that the optimiser
       may push up to it, through a Concat for example, unless x is a constant such as the bias of a
       product
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.emit.dequantised import COPIED_BEHIND, DOMAINS, dequantised
from fa_compiler.passes.ir.nodes import (
    all_ops,
    constant,
    constant_tensor,
    data_readers,
    input_of,
    inputs_of,
    int_attr,
    is_op,
    makers_of,
    operand_at,
    reached,
    values_read,
)
from fa_compiler.passes.ir.surgery import restore_order, sweep
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
    _change(nodes, info, names, _move_in_front)


def keep_dequantised(made: Iterable[ir.Node], info: ShapeInfo, names: Names) -> None:
    """1 to 3 for what these nodes are computed from."""
    needed = _needed_by(made)
    if not any(node.op_type == "DequantizeLinear" for node in needed):
        return
    _change(needed, info, names, _write_zero_point)
    _change(needed, info, names, _move_in_front)
    _change(_needed_by(made), info, names, _multiply)


def _needed_by(nodes: Iterable[ir.Node]) -> list[ir.Node]:
    """The nodes that these nodes are computed from, each behind those that it is computed from."""
    needed = set(reached(nodes, _makers))
    graphs = dict.fromkeys(node.graph for node in needed if node.graph is not None)
    return [node for graph in graphs for node in graph if node in needed]


def _makers(node: ir.Node) -> list[ir.Node]:
    return makers_of(values_read(node))


def _change(nodes: Iterable[ir.Node], info: ShapeInfo, names: Names, change: _Change) -> None:
    """Change these nodes, and remove what is superfluous then."""
    of_graph: dict[ir.Graph, list[ir.Node]] = {}
    for node in nodes:
        if isinstance(node.graph, ir.Graph):
            of_graph.setdefault(node.graph, []).append(node)
    for graph, own in of_graph.items():
        builder = Builder(graph, names, info)
        if changed := [node for node in own if change(node, builder)]:
            sweep(graph, [*changed, *builder.nodes])
            restore_order(graph)


def _move_in_front(node: ir.Node, builder: Builder) -> bool:
    """1. Where only QuantizeLinear reads the result, nothing is copied."""
    if not is_op(node, *COPIED_BEHIND):
        return False
    info, output = builder.info, node.outputs[0]
    source = dequantised(node.inputs[0], info)
    if source is None or info.dtype(source.integers) not in UNSAFE:
        return False
    if not output.is_graph_output() and all_ops(data_readers(output), "QuantizeLinear"):
        return False
    builder.replace(output, builder.again(node, node.inputs))
    return True


def _write_zero_point(node: ir.Node, builder: Builder) -> bool:
    """2. Blocks are of opset 21 and later, where the zero point may be absent."""
    info = builder.info
    typed = builder.opset >= TYPED_SINCE and node.domain != "com.microsoft"
    if not _dequantises(node) or input_of(node, 2) is not None or typed:
        return False
    dtype, shape = info.dtype(operand_at(node, 0)), info.shape(operand_at(node, 1))
    if dtype not in UNTYPED or shape is None or not all(size.is_const for size in shape):
        return False
    zero = np.zeros([size.const or 0 for size in shape], dtype.numpy())
    node.resize_inputs(3)
    node.replace_input_with(2, builder.constant(zero, "zero_point"))
    return False  # the node stays


def _multiply(node: ir.Node, builder: Builder) -> bool:
    """3."""
    info, output = builder.info, node.outputs[0]
    integers, scale = operand_at(node, 0), operand_at(node, 1)
    if (
        not _dequantises(node)
        or info.dtype(integers) != ir.DataType.INT32
        or not _has_zero_point_0(node)
    ):
        return False
    if int_attr(node, "block_size", 0) or {info.dtype(scale), info.dtype(output)} != {
        ir.DataType.FLOAT
    }:
        return False
    shape, scales = info.shape(integers), info.shape(scale)
    if shape is None or scales is None or len(scales) > 1:
        return False
    if not _has_transpose_near(integers, output):
        return False
    if scales and scales[0].const != 1:
        rank = len(shape)
        axis = int_attr(node, "axis", 1) % rank
        scale = builder.unsqueeze(scale, tuple(range(1, rank - axis)))
    real = builder.cast(integers, ir.DataType.FLOAT)
    builder.replace(output, builder.mul(real, scale))
    return True


def _has_transpose_near(integers: ir.Value, output: ir.Value) -> bool:
    """Is a Transpose in front of a DequantizeLinear that reads `integers`, or, unless these are
    constant, behind its output?"""
    near = list(reached([integers], lambda value: inputs_of(value.producer()), NEAR))
    if constant_tensor(integers) is None:
        near.extend(
            reached(
                [output],
                lambda value: [made for reader in value.consumers() for made in reader.outputs],
                NEAR,
            )
        )
    return any(is_op(value.producer(), "Transpose") for value in near)


def _has_zero_point_0(node: ir.Node) -> bool:
    """Is the zero point of a DequantizeLinear 0, by default or as a constant?"""
    if input_of(node, 2) is None:
        return True
    number = constant(operand_at(node, 2))
    return number is not None and not number.any()


def _dequantises(node: ir.Node) -> bool:
    """Is this a DequantizeLinear with a scale?"""
    scaled = input_of(node, 0) is not None and input_of(node, 1) is not None
    return node.op_type == "DequantizeLinear" and node.domain in DOMAINS and scaled
