"""Operators for which ONNX Runtime has no CPU kernel, in plain operators.

    1  SwiGLU of com.microsoft      gate * sigmoid(activation_alpha * gate) * (up +
                                    activation_beta). With a limit above 0, gate is at most that,
                                    and up lies between it and its negative. Without up, gate holds
                                    both, side by side
    2  SwiGLU of ai.onnx            A * sigmoid(alpha * A) * B
    3  Swish of ai.onnx             X * sigmoid(alpha * X), which SwiGLU is defined by
    4  RMSNormRotary                the columns input_start to input_start + input_width of X are
                                    divided by the root of the mean of their squares and epsilon,
                                    and multiplied by scale; the first rotary_embedding_dim of them
                                    are rotated. position_ids has the position of each token, or
                                    that of the first one of each batch entry

They are computed in float32, and in float64 for 2 and 3 of that type, and rounded once: with
round_activation (1) also in front of the last product, and between norm and rotation (4) if input,
output and tables are all of bfloat16. prefill_numerics and use_fp32_arithmetic choose further
roundings to bfloat16, which are left out.

x * sigmoid(x) is written as x / (1 + exp(-x)): ONNX Runtime's Sigmoid is 0 below -18, and 2e-4 off
at -10.

This is done for the target ort, after everything else, because a Swish may belong to what is fused.
Functions are inlined before, because types are known only where they are called. What has parts
that are not known, or types and sizes that are not, stays as it is, and the report says why. So do
nodes of an opset below 13, and the indexers of selected keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline, attempt, label
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder, Names
from fa_compiler.passes.ir.nodes import (
    FLOATS,
    all_nodes,
    certain,
    domain_of,
    float_attr,
    input_of,
    int_attr,
    is_read,
)
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.ir.surgery import restore_order
from fa_compiler.passes.values.shapes import ShapeInfo

FLOAT, DOUBLE, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.BFLOAT16
Results = Sequence[ir.Value | None]
SINCE = 13
"""The first opset that has the operators, among them Cast and Split of bfloat16."""


def write_out(
    graphs: Iterable[ir.Graph], info: ShapeInfo, names: Names
) -> tuple[list[str], list[str]]:
    """Write out the operators of these graphs. Returns a sentence for each kind that was written
    out, and one for each node that stays."""
    written: dict[str, list[str]] = {}
    left: list[str] = []
    for graph in graphs:
        builder, changed = Builder(graph, names, info), False
        for node in list(graph):
            key = _key(node)
            if (reason := STAYING.get(key)) is not None:
                left.append(_stays(node, reason))
            writing = WRITINGS.get(key)
            if writing is None:
                continue
            place = builder.place
            results = attempt(partial(_results, node, writing, builder))
            if isinstance(results, Decline):
                builder.go_back(place)
                left.append(_stays(node, str(results)))
                continue
            for old, new in zip(node.outputs, results, strict=False):
                if new is not None and is_read(old):
                    builder.replace(old, new)
            graph.remove(node, safe=True)
            written.setdefault(node.op_type, []).append(label(node))
            changed = True
        if changed:
            restore_order(graph)
    return [_sentence(op_type, nodes) for op_type, nodes in written.items()], left


def left_in_functions(functions: Iterable[ir.Function]) -> list[str]:
    """A sentence for each node that stays in one of these functions, which were not inlined."""
    return [
        _stays(node, f"the function {function.name!r} cannot be inlined")
        for function in functions
        for node in all_nodes(function)
        if is_written_out(node)
    ]


def is_written_out(node: ir.Node) -> bool:
    """Is this an operator that is written out for the target ort, unless it has something that is
    not known?"""
    return _key(node) in WRITINGS


def _key(node: ir.Node) -> tuple[str, str]:
    return domain_of(node), node.op_type


def _stays(node: ir.Node, reason: str) -> str:
    return (
        f"{label(node)}: {node.op_type} stays, which ONNX Runtime has no CPU kernel for: {reason}"
    )


def _sentence(op_type: str, nodes: Sequence[str]) -> str:
    more = f" and {len(nodes) - 1} more" if len(nodes) > 1 else ""
    return f"{nodes[0]}{more}: {op_type} is written out in plain operators; ONNX Runtime has no CPU kernel for it"


def _results(node: ir.Node, writing: Writing, builder: Builder) -> Results:
    """What takes the places of the node's outputs. Raises Decline."""
    if (unknown := unknown_part(node)) is not None:
        raise _refused(node, f"it has {unknown}, and what it means is not known here")
    if builder.opset < SINCE:
        raise _refused(node, f"it cannot be written out in opset {builder.opset}")
    return writing(_Call(node, builder))


def _refused(node: ir.Node, reason: str) -> Decline:
    return Decline(Code.READY_MADE, reason, node)


@dataclass(frozen=True)
class _Call:
    """A node, and what makes others in its graph."""

    node: ir.Node
    builder: Builder

    def required(self, index: int) -> ir.Value:
        """An input that has to be there."""
        value = input_of(self.node, index)
        if value is None:
            raise _refused(self.node, f"its input {index} is missing")
        return value

    def dtype(self, value: ir.Value, *more: ir.DataType) -> ir.DataType:
        """The type of a value: float32, one of 16 bits, or one of `more`."""
        dtype = self.builder.info.dtype(value)
        if dtype not in (*FLOATS, *more):
            raise _refused(
                self.node, f"the type of {value.name!r} is not known, or another one than it takes"
            )
        return dtype

    def size(self, value: ir.Value, rank: int | None = None) -> int:
        """The last size of a value, of this rank if one is given."""
        shape = self.builder.info.shape(value)
        size = shape[-1].const if shape and rank in (None, len(shape)) else None
        if size is None:
            raise _refused(
                self.node, f"the shape of {value.name!r} is not known before the model runs"
            )
        return size

    def number(self, number: float, dtype: ir.DataType) -> ir.Value:
        """A constant of this type."""
        return self.builder.constant(np.array(number, dtype.numpy()), "number")

    def op(self, op_type: str, *inputs: ir.Value) -> ir.Value:
        """An elementwise operator of values of one type."""
        return self.builder.op(op_type, inputs)

    def swish(self, value: ir.Value, alpha: float) -> ir.Value:
        """value * sigmoid(alpha * value), of float32 or float64."""
        dtype = self.dtype(value, DOUBLE)
        turned = self.op("Mul", value, self.number(-alpha, dtype))
        return self.op(
            "Div", value, self.op("Add", self.op("Exp", turned), self.number(1.0, dtype))
        )


def _clamped_swiglu(call: _Call) -> Results:
    gate, up, node = call.required(0), input_of(call.node, 1), call.node  # 1
    dtype, builder = call.dtype(gate), call.builder
    if up is None:
        width = call.size(gate)
        if width % 2:
            raise _refused(node, f"{gate.name!r} has {width} columns, which are no two halves")
        shape = certain(builder.info.shape(gate))
        gate, up = builder.split(gate, len(shape) - 1, [width // 2, width // 2])
    gate, up = (builder.cast(value, FLOAT) for value in (gate, up))
    limit = float_attr(node, "limit", 0.0)
    if limit > 0.0:
        most, least = (call.number(number, FLOAT) for number in (limit, -limit))
        gate, up = call.op("Min", gate, most), call.op("Clip", up, least, most)
    if (beta := float_attr(node, "activation_beta", 0.0)) != 0.0:
        up = call.op("Add", up, call.number(beta, FLOAT))
    activated = call.swish(gate, float_attr(node, "activation_alpha", 1.0))
    if int_attr(node, "round_activation", 0):
        activated = builder.cast(builder.cast(activated, dtype), FLOAT)
    return [builder.cast(call.op("Mul", activated, up), dtype)]


def _swiglu(call: _Call) -> Results:
    gate, up = call.required(0), call.required(1)  # 2
    dtype = call.dtype(gate, DOUBLE)
    kind = DOUBLE if dtype == DOUBLE else FLOAT
    gate, up = (call.builder.cast(value, kind) for value in (gate, up))
    return [
        call.builder.cast(
            call.op("Mul", call.swish(gate, float_attr(call.node, "alpha", 1.0)), up), dtype
        )
    ]


def _swish(call: _Call) -> Results:
    value = call.required(0)  # 3
    dtype = call.dtype(value, DOUBLE)
    wide = call.builder.cast(value, DOUBLE if dtype == DOUBLE else FLOAT)
    return [call.builder.cast(call.swish(wide, float_attr(call.node, "alpha", 1.0)), dtype)]


def _rms_norm_rotary(call: _Call) -> Results:
    x, scale, positions, *tables = map(call.required, range(5))  # 4
    builder, node = call.builder, call.node
    types = [call.dtype(value) for value in (x, *tables)]
    kind = ir.DataType.FLOAT16 if int_attr(node, "output_fp16", 0) else BFLOAT16
    stride, start = call.size(x, 4), int_attr(node, "input_start", 0)
    width, turned = (
        int_attr(node, "input_width", 0) or stride,
        int_attr(node, "rotary_embedding_dim", 0),
    )
    heads = builder.info.sizes(x)[2].const
    if heads is None or not (
        0 <= start <= start + width <= stride and 0 < turned <= width and turned % 2 == 0
    ):
        raise _refused(
            node,
            f"{turned} of the {width} columns from {start} on do not lie in [B, S, heads, {stride}]",
        )
    if (start, width) != (0, stride):
        x = builder.slice(x, [start], [start + width], [3])
    wide = builder.cast(x, FLOAT)
    least = call.number(float_attr(node, "epsilon", 1e-6), FLOAT)
    mean = builder.reduce("ReduceMean", call.op("Mul", wide, wide), [-1])
    normed = call.op(
        "Mul", call.op("Div", wide, call.op("Sqrt", call.op("Add", mean, least))), scale
    )
    if {kind, *types} == {BFLOAT16}:
        normed = builder.cast(builder.cast(normed, BFLOAT16), FLOAT)
    result = builder.cast(
        _rotated(call, normed, _positions(call, x, positions), tables, (heads, width, turned)), kind
    )
    if int_attr(node, "flatten_batch", 0):
        result = builder.reshape(result, [1, -1, heads * width])
    return [result, normed]


def _rotated(
    call: _Call,
    rows: ir.Value,
    positions: ir.Value,
    tables: Sequence[ir.Value],
    sizes: tuple[int, int, int],
) -> ir.Value:
    """Rows [B, S, heads, width] of float32 with their first columns rotated, as [B, S, heads *
    width]."""
    builder, (heads, width, turned) = call.builder, sizes
    # Each token is a batch entry of its own: the operator refuses more rows of one entry than its
    # tables have.
    tokens = builder.reshape(rows, [-1, 1, heads * width])
    places = builder.reshape(positions, [-1, 1])
    attrs = {"num_heads": heads, "rotary_embedding_dim": turned} if turned < width else {}
    inputs = [tokens, places, *(builder.cast(table, FLOAT) for table in tables)]
    result = builder.op("RotaryEmbedding", inputs, attrs, dtype=FLOAT, domain="com.microsoft")
    shape = [*(builder.dimension(rows, axis) for axis in (0, 1)), builder.ints([heads * width])]
    return builder.reshape(result, builder.concat(shape, 0))


def _positions(call: _Call, x: ir.Value, positions: ir.Value) -> ir.Value:
    """The position of each token, int64 [B, S]."""
    builder, node = call.builder, call.node
    given, shape = builder.info.shape(positions), builder.info.shape(x)
    if given is None or shape is None:
        raise _refused(node, f"the shape of {positions.name!r} is not known before the model runs")
    if len(given) == 2:
        return positions
    if int_attr(node, "flatten_batch", 0) and shape[0].const != 1:
        raise _refused(
            node,
            "it has one position for several batch entries, which are one sequence in its result",
        )
    counted = builder.add(positions, builder.range(builder.dimension(x, 1)))
    target = builder.concat([builder.dimension(x, axis) for axis in (0, 1)], 0)
    return builder.expand(builder.unsqueeze(counted, (0,)), target)


Writing = Callable[[_Call], Results]
WRITINGS: dict[tuple[str, str], Writing] = {
    ("com.microsoft", "SwiGLU"): _clamped_swiglu,
    ("com.microsoft", "RMSNormRotary"): _rms_norm_rotary,
    ("", "SwiGLU"): _swiglu,
    ("", "Swish"): _swish,
}
POOLED = "it ranks blocks of pooled keys, and what it has pooled is in states of its own"
STAYING = {
    ("com.microsoft", name): POOLED
    for name in (
        "SparseAttentionIndexer",
        "PackedSparseAttentionIndexer",
        "PackedSparseAttentionIndexerMerge",
    )
}
"""Why operators in front of attention stay."""
