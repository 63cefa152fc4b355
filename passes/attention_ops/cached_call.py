"""The operands of PagedAttention, SparsePagedAttention and DynamicSparseAttention of com.microsoft.

1  query, key, value    [T, N * D] and twice [T, K * D], or all three side by side in query; [B, S,
                        ...] in DynamicSparseAttention
2  norms                query and key are divided by the root of the mean of their squares and
                        qk_norm_epsilon, for each head, and multiplied by the weights
3  do_rotary            query and key are rotated, from the element rotary_offset of each head on
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.attention_ops.direct import Attributes, DirectConversion
from fa_compiler.passes.ir.nodes import FLOATS, input_of, int_attr, text_attr, without_none
from fa_compiler.passes.ir.signatures import CONTRIB, SIGNATURES, unknown_part

FLOAT = ir.DataType.FLOAT
SEPARATE, LATENT = "SEPARATE", "LATENT"
SINCE = 13
"""The first opset that has the operators, among them Cast and ScatterND of bfloat16."""


@dataclass(frozen=True)
class Sizes:
    """Query heads, key heads, the size of a head, and that of the values."""

    heads: int
    kv_heads: int
    size: int
    width: int


@dataclass(frozen=True)
class CachedCall(DirectConversion):
    """The conversion of an operator that norms, rotates and stores its operands: what its inputs
    and attributes say."""

    rank: ClassVar[int] = 2
    """The rank of query, key and value."""

    # -- what the inputs and attributes say
    # ------------------------------------------------------------

    @property
    def window(self) -> int:
        """The number of keys that a row sees at most; -1 where there is no window."""
        return int_attr(self.node, "local_window_size", -1)

    @property
    def is_causal(self) -> bool:
        """Does a row see the keys of no later token?"""
        return int_attr(self.node, "is_causal", 1) != 0

    @property
    def layout(self) -> str:
        """The layout of the caches."""
        return text_attr(self.node, "kv_cache_layout", SEPARATE)

    @property
    def is_latent(self) -> bool:
        """Is there one cache, of keys that hold the values, too?"""
        return self.layout == LATENT

    def input(self, name: str) -> ir.Value | None:
        """An input by its name in the schema."""
        return input_of(self.node, SIGNATURES[CONTRIB, self.node.op_type].inputs.index(name))

    def required(self, name: str) -> ir.Value:
        """An input that has to be there. Raises Decline."""
        value = self.input(name)
        if value is None:
            raise self.decline(f"its {name} is missing")
        return value

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The type of a value."""
        return self.facts.info.dtype(value)

    @property
    def kind(self) -> ir.DataType:
        """The type of query. Raises Decline."""
        kind = self.dtype(self.required("query"))
        if kind not in FLOATS:
            raise self.decline("its query is not float32, float16 or bfloat16")
        return kind

    def width(self, value: ir.Value, rank: int) -> int:
        """The last size of a tensor of this rank. Raises Decline where it is not known."""
        shape = self.facts.info.shape(value)
        size = shape[-1].const if shape and len(shape) == rank else None
        if not size:
            raise self.decline(f"the width of {value.name!r} is not known before the model runs")
        return size

    def check_common(self) -> None:
        """Decline other targets, old opsets, parts that are not known, and numbers that mean
        nothing."""
        if self.facts.options.target != "ort":
            raise self.decline(
                "its caches are written in place, which the target has no operator for"
            )
        if self.builder.opset < SINCE:
            raise self.decline(f"its operands cannot be computed in opset {self.builder.opset}")
        if (unknown := unknown_part(self.node)) is not None:
            raise self.decline(f"it has {unknown}, and what it means is not known here")
        scale = self.node.attributes.get("scale")
        if scale is not None and scale.as_float() == 0.0:
            raise self.decline("its scale is 0")
        if (self.input("q_norm_weight") is None) != (self.input("k_norm_weight") is None):
            raise self.decline("one of its norms has no weight")

    @property
    def sizes(self) -> Sizes:
        """The heads and their sizes. Raises Decline where they are not known."""
        raise NotImplementedError

    # -- query, key and value
    # --------------------------------------------------------------------------

    def operands(self) -> list[ir.Value]:
        """Query, key and value, [T, heads, size]; without values in a LATENT cache."""
        sizes, query = self.sizes, self.required("query")
        counts = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        parts = [query, self.input("key"), self.input("value")]
        if parts[1:] == [None, None] and not self.is_latent:  # (1)
            if self.width(query, self.rank) != sum(counts) * sizes.size:
                raise self.decline(
                    f"query, key and value together are not {sum(counts)} heads of {sizes.size}"
                )
            parts = [
                *self.builder.split(query, self.rank - 1, [count * sizes.size for count in counts])
            ]
        elif self.is_latent:
            parts.pop()
        if None in parts:
            raise self.decline("key or value is missing")
        given = without_none(parts)
        return [self._of_heads(part, count) for part, count in zip(given, counts, strict=False)]

    def _of_heads(self, part: ir.Value, heads: int) -> ir.Value:
        if self.width(part, self.rank) != heads * self.sizes.size:
            raise self.decline(f"{part.name!r} is not {heads} heads of {self.sizes.size}")
        return self.split_heads(part, heads)

    def split_heads(self, part: ir.Value, heads: int) -> ir.Value:
        """Query, key or value as [T, heads, size]."""
        return self.builder.reshape(part, [-1, heads, self.sizes.size])

    def placed(self, part: ir.Value, letter: str, heads: int, positions: ir.Value) -> ir.Value:
        """Query or key [T, heads, size] after its norm, and its rotation by the positions of the
        tokens, int64 [T]."""
        weight = self.input(f"{letter}_norm_weight")
        if weight is not None:
            part = self._normed(part, weight)
        if int_attr(self.node, "do_rotary", 0):
            part = self._rotated(part, heads, positions)
        return part

    def _normed(self, part: ir.Value, weight: ir.Value) -> ir.Value:
        """Query or key after its norm, which is computed in float32."""
        builder, epsilon = self.builder, self.node.attributes.get("qk_norm_epsilon")  # (2)
        least = builder.constant(
            np.array(1e-6 if epsilon is None else epsilon.as_float(), np.float32), "epsilon"
        )
        wide = builder.cast(part, FLOAT)
        mean = builder.reduce("ReduceMean", builder.mul(wide, wide), [-1])
        root = builder.sqrt(builder.add(mean, least))
        scaled = builder.mul(builder.div(wide, root), builder.cast(weight, FLOAT))
        return builder.cast(scaled, self.kind)

    def _rotated(self, part: ir.Value, heads: int, positions: ir.Value) -> ir.Value:
        """Query or key after the rotation, which ONNX Runtime does not compute in bfloat16."""
        builder, size, kind = self.builder, self.sizes.size, FLOAT
        if self.kind == ir.DataType.FLOAT16:
            kind = ir.DataType.FLOAT16
        cos, sin = self.required("cos_cache"), self.required("sin_cache")
        turned, offset = 2 * self.width(cos, 2), int_attr(self.node, "rotary_offset", 0)
        if offset < 0 or offset + turned > size:
            raise self.decline(f"a head of {size} has no {turned} elements from {offset} on")
        before, rest = [], part
        if offset:  # (3)
            first, rest = builder.split(part, 2, [offset, size - offset])
            before = [first]
        attrs = {"interleaved": int_attr(self.node, "rotary_interleaved", 0)}
        if offset + turned < size:
            attrs |= {"num_heads": heads, "rotary_embedding_dim": turned}
        # Each token is a batch entry of its own: the operator refuses more rows of one entry than
        # its tables have.
        rows = builder.reshape(rest, [-1, 1, heads * (size - offset)])
        inputs = [builder.cast(rows, kind), builder.unsqueeze(positions, (1,))]
        inputs += [builder.cast(table, kind) for table in (cos, sin)]
        result = builder.cast(
            builder.op("RotaryEmbedding", inputs, attrs, dtype=kind, domain=CONTRIB), self.kind
        )
        back = builder.reshape(result, [-1, heads, size - offset])
        return builder.concat([*before, back], 2)

    # -- the attention
    # ---------------------------------------------------------------------------------

    def scale_value(self) -> float:
        """What the scores are multiplied by."""
        given = self.node.attributes.get("scale")
        return float(np.float32(self.sizes.size**-0.5 if given is None else given.as_float()))

    def softcap(self) -> float:
        """c of c * tanh(scores / c); 0 where the scores are not capped. Raises Decline."""
        return float(np.float32(OpConverter.of(self.node, self.facts, self.builder).softcap()))

    def sink(self) -> ir.Value | None:
        """One more score in every row of a head, float32 [N]."""
        sink = self.input("head_sink")
        return None if sink is None else self.builder.cast(sink, FLOAT)

    def added(
        self, op_type: str, inputs: dict[str, ir.Value | None], attrs: Attributes, place: int
    ) -> ir.Node:
        """A node of the registry in the graph. Its output in this place has the type of query.
        Raises Decline."""
        made = self.registered(op_type, inputs, attrs, used=("attention_out",) if place else None)
        self.builder.graph.append(made)
        made.outputs[place].dtype = self.kind
        return made
