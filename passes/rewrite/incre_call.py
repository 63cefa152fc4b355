"""The contents of an IncreFlashAttention, and the node that is built from them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.algebra.symbolic import consts
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.node_view import prototype, registry_node

OP = "IncreFlashAttention"


@dataclass(frozen=True)
class IncreCall:
    """The inputs and attributes of an IncreFlashAttention.

    `assumed` is what the user vouched for, `mask_label` the report's word for what masks, bounds or
    biases the keys.
    """

    inputs: dict[str, ir.Value | None]
    attrs: dict[str, int | float | str]
    assumed: tuple[str, ...]
    mask_label: str
    undefined: ir.Value | None = None
    """The lengths, where a batch entry of length 0 has to give NaN instead of the operator's 0."""

    def result(self, out: ir.Value, builder: Builder) -> ir.Value:
        """The operator's result `out`, with NaN for entries without keys where the model gave
        NaN."""
        rank, dtype = len(builder.info.sizes(out)), builder.info.dtype(out)
        if self.undefined is None or dtype is None:
            return out
        empty = builder.equal(self.undefined, builder.ints([0]))
        nothing = builder.constant(np.array(np.nan, dtype=dtype.numpy()), "number")
        return builder.where(builder.unsqueeze(empty, range(1, rank)), nothing, out)

    def node(
        self, match: AttentionMatch, output: Arrangement, builder: Builder, options: Options
    ) -> ir.Node:
        """The node, not yet in the graph; its result is arranged as `output`."""
        spec, space = prototype(OP, options, match.node), match.space
        heads = {"num_heads": match.roles.heads, "num_key_value_heads": match.roles.kv_heads}
        attrs = {**self.attrs, "scale_value": float(np.float32(match.scale))}
        if match.softcap != 0.0:
            attrs["cpu_softcap"] = float(np.float32(match.softcap))
        attrs |= {name: space.size(axes).const or 1 for name, axes in heads.items()}
        node = registry_node(spec, self.inputs, attrs, builder)
        out, shape = node.outputs[0], [space.size(dim) for dim in output]
        out.name = builder.names.new(f"{node.name}_attention_out")
        out.dtype = match.dtype if self.inputs.get("quant_scale2") is None else ir.DataType.INT8
        out.shape = ir.Shape(consts(shape))
        builder.info.set(out, shape, out.dtype)
        return node
