"""Making nodes of the sparse family, and the sizes they have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, dtypes, full_attrs, get, infer, place_inputs, verify
from fa_compiler.passes.build import PREFIX, Builder
from fa_compiler.passes.node_view import node_view
from fa_compiler.passes.shape_rules.context import Shape
from fa_compiler.passes.symbolic import Dim


@dataclass(frozen=True)
class Sizes:
    """Of the FlashAttentionScore that is replaced."""

    layout: str
    batch: Dim
    heads: int
    rows: Dim
    kv_heads: int
    keys: Dim

    @property
    def sequence(self) -> int:
        """Where query and key have their length."""
        return 2 if self.layout == "BNSD" else 1

    @property
    def whole(self) -> Shape:
        """The shape of a mask of all rows and keys."""
        return (self.batch, self.rows, self.keys)


def domain_node(
    op_type: str, inputs: Mapping[str, ir.Value], attrs: Mapping[str, int | float | str], builder: Builder
) -> ir.Node | None:
    """A node whose first output alone is read; None where the registry forbids it."""
    spec = get(op_type)
    node = ir.Node(
        DOMAIN,
        op_type,
        place_inputs(spec, dict(inputs)),
        [ir.convenience.convert_attribute(name, entry) for name, entry in full_attrs(spec, attrs).items()],
        num_outputs=len(spec.outputs),
        name=builder.names.new(f"{PREFIX}_{op_type}"),
    )
    output = node.outputs[0]
    output.name = builder.names.new(f"{node.name}_{spec.outputs[0].name}")
    for unused in node.outputs[1:]:
        unused.name = ""
    view = node_view(node, builder.info)
    if any(violation.extension is None for violation in verify(view)):
        return None
    found = infer(op_type, view.inputs, view.attrs)[spec.outputs[0].name]
    query = builder.info.shape(inputs["query"])
    number = dtypes.to_onnx(found.dtype)
    if found.shape is None or query is None or number is None:
        return None
    # Both operators' results begin with the batch and rows of the query; the other sizes are numbers.
    sizes = [*query[:2], *(Dim(size) for size in found.shape[2:] if isinstance(size, int))]
    if len(sizes) != len(found.shape):
        return None
    builder.info.set(output, sizes, ir.DataType(number))
    output.dtype = ir.DataType(number)
    output.shape = ir.Shape([size.const for size in sizes])
    builder.graph.append(node)
    return node
