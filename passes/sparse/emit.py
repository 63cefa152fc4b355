"""Makes the nodes of the sparse operators, and tells the sizes of their outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import dtypes, get, infer, verify
from fa_compiler.op_registry.errors import RegistryError
from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.rewrite.node_view import node_view, registry_node

STATISTICS = ("softmax_max", "softmax_sum")


@dataclass(frozen=True)
class Sizes:
    """B, S1 and S2 of a query [B,S1,N1,D] and a key [B,S2,N2,D]."""

    batch: Dim
    q_seq: Dim
    kv_seq: Dim

    @property
    def mask_shape(self) -> Shape:
        """The shape of a mask of all rows and keys."""
        return (self.batch, self.q_seq, self.kv_seq)


def domain_node(
    op_type: str,
    inputs: Mapping[str, ir.Value],
    attrs: Mapping[str, int | float | str],
    builder: Builder,
    options: Options,
    wanted: Collection[str] = (),
) -> ir.Node | None:
    """A new node, added to the graph; only its `wanted` outputs are named, by default the first.

    None where the target forbids it.
    """
    try:
        spec = get(op_type, options.cann)
    except RegistryError:
        return None
    node = registry_node(spec, inputs, attrs, builder)
    wanted = wanted or {spec.outputs[0].name}
    for output, declared in zip(node.outputs, spec.outputs, strict=True):
        output.name = ""
        if declared.name in wanted:
            output.name = builder.names.new(f"{node.name}_{declared.name}")
    view = node_view(node, builder.info)
    product = options.platform
    faults = verify(view, product, options.cann)
    if any(product != "ort" or fault.extension is None for fault in faults):
        return None
    inferred = infer(op_type, view.inputs, view.attrs)
    for output, declared in zip(node.outputs, spec.outputs, strict=True):
        if not output.name:
            continue
        number = dtypes.to_onnx(inferred[declared.name].dtype)
        sizes = _sizes(declared.name, inferred[declared.name].shape, inputs, builder)
        if sizes is None or number is None:
            return None
        builder.info.set(output, sizes, ir.DataType(number))
        output.dtype = ir.DataType(number)
        output.shape = ir.Shape(consts(sizes))
    builder.graph.append(node)
    return node


def _sizes(
    name: str, shape: Sequence[object] | None, inputs: Mapping[str, ir.Value], builder: Builder
) -> list[Dim] | None:
    """The sizes of the output `name`; None where they are not known.

    A gradient has the sizes of its input, and the loss is one number. Other outputs begin with the
    batch and the rows of the query; statistics have the key heads between these two. Further sizes
    are constants.
    """
    if (own := inputs.get(name.removeprefix("d_"))) is not None and name.startswith("d_"):
        return list(builder.info.sizes(own)) or None
    if name == "loss":
        return [Dim(1)]
    query = builder.info.shape(inputs["query"])
    if shape is None or query is None:
        return None
    rows = 2 if name in STATISTICS else 1
    known: dict[int, Dim] = {
        place: Dim(size) for place, size in enumerate(shape) if isinstance(size, int)
    }
    known |= {0: query[0], rows: query[1]}
    places = range(len(shape))
    if not known.keys() >= set(places):
        return None
    return [known[place] for place in places]


@dataclass(frozen=True)
class EmptyRowPolicy:
    """What rows without a key give (`empty`, as cpu_empty_rows), and whether rows with an undefined
    softmax give 0."""

    empty: str
    nan_is_zero: bool


def attention(
    inputs: Mapping[str, ir.Value],
    scale: float,
    mode: int,
    rows: EmptyRowPolicy,
    builder: Builder,
    options: Options,
    block: int = 1,
    statistics: bool = False,
) -> tuple[ir.Node, ir.Value] | None:
    """A SparseFlashAttention in BSND and its result; None where the target forbids it.

    With `statistics` it also computes softmax_max and softmax_sum, for a gradient. On Ascend a row
    without a key gives 0, and the statistics cannot be computed in a graph. softmax_sum is NaN in
    rows where a score is NaN or +inf, or where all scores are -inf: these are the rows for which a
    guard against NaN probabilities gives 0.
    """
    attrs: dict[str, int | float | str] = {
        "scale_value": float(np.float32(scale)),
        "sparse_mode": mode,
        "attention_mode": 2,
    }
    if block != 1:
        attrs["sparse_block_size"] = block
    if options.target == "ascend" and (rows.empty not in ("", "zero") or rows.nan_is_zero):
        return None
    if rows.empty and options.target == "ort":
        attrs["cpu_empty_rows"] = rows.empty
    wanted = ["attention_out"]
    if rows.nan_is_zero or statistics:
        attrs["return_softmax_lse"] = 1
        wanted.extend(STATISTICS)
    node = domain_node("SparseFlashAttention", inputs, attrs, builder, options, wanted)
    if node is None:
        return None
    if not rows.nan_is_zero:
        return node, node.outputs[0]
    out, total = node.outputs[0], node.outputs[2]
    dtype, shape = builder.info.dtype(out), builder.info.shape(out)
    assert dtype is not None and shape is not None and shape[2].const is not None
    total = builder.transpose(total, (0, 2, 1, 3))
    total = builder.reshape(total, [0, 0, shape[2].const, 1])
    undefined = builder.op("IsNaN", [total])
    zero = builder.constant(np.array(0, dtype.numpy()), "number")
    return node, builder.where(undefined, zero, out)
