"""PackedMultiHeadAttention and PackedAttention of com.microsoft: sequences end to end, without
padding.

    output [T, N * E] = PackedMultiHeadAttention(query, key, value, bias, token_offset,
    cumulative_sequence_length) output [T, N * E] = PackedAttention(input, weights, bias,
    token_offset, cumulative_sequence_length)

    1  query, key, value    [T, N * D], [T, N * D] and [T, N * E], or query alone as [T, N, 3, D]
    2  bias                 [N * D + N * D + N * E], which is added to them
    3  input, weights       their product has the columns of query, key and value side by side: as
                            many as qkv_hidden_sizes says, otherwise three equal parts
    4  attention_bias       [B or 1, N or 1, S, S], which is added to the scores of a padded batch
                            of S rows

cumulative_sequence_length [B + 1] begins with 0 and says where each sequence ends. Each token sees
those of its own sequence. They become FlashAttentionScore with the layout TND, on the target ort:
ONNX Runtime has no CPU kernel for them. mask_filter_value is for padding, which no token sees.

token_offset [B, S] says where the tokens stand in the padded batch: first those of the tokens, in
their order. Without attention_bias it changes no result. With one, the tokens are put there, and
FlashAttentionScore gets the layout BSND and a mask of the keys that are padding: so the bias is
read as it is, and nothing of its size is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.attention_ops.direct import Attributes, Direct, DirectConversion
from fa_compiler.passes.attention_ops.key_masks import RANGE_SINCE
from fa_compiler.passes.attention_ops.multi_head import part_of
from fa_compiler.passes.emit.build import INT64, Builder
from fa_compiler.passes.ir.nodes import input_of, int_attr
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.values.facts import Facts

OP = "FlashAttentionScore"
FLOAT, BOOL = ir.DataType.FLOAT, ir.DataType.BOOL


def convert_packed(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
    """Replace a packed attention by FlashAttentionScore, on the target ort. Raises Decline."""
    return _Conversion(node, facts, builder).converted()


@dataclass(frozen=True)
class _Operands:
    """query, key and value [T, N, D], and the sizes of their heads."""

    query: ir.Value
    key: ir.Value
    value: ir.Value
    size: int
    width: int


@dataclass(frozen=True)
class _Conversion(DirectConversion):
    def converted(self) -> Direct:
        """The FlashAttentionScore that takes the operator's place."""
        node = self.node
        if self.facts.options.target != "ort":
            raise self.decline("its sequences lie end to end, and where each begins is data")
        if self.builder.opset < RANGE_SINCE:
            raise self.decline(f"its sequences cannot be computed in opset {self.builder.opset}")
        if (unknown := unknown_part(node)) is not None:
            raise self.decline(f"it has {unknown}, and what it means is not known here")
        is_projected = node.op_type == "PackedAttention"
        ends, bias = (5, 6) if not is_projected else (4, 5)
        heads = int_attr(node, "num_heads", 0)
        if heads < 1:
            raise self.decline(f"num_heads is {heads}")
        operands = self._projected(heads) if is_projected else self._given(heads)
        scale = node.attributes.get("scale")
        attrs: Attributes = {
            "head_num": heads,
            "scale_value": float(
                np.float32(operands.size**-0.5 if scale is None else scale.as_float())
            ),
        }
        addend = input_of(node, bias)
        if addend is not None:
            return self._padded(operands, heads, attrs, ends - 1, addend)
        lengths = self._ends(ends)
        inputs = {
            "query": operands.query,
            "key": operands.key,
            "value": operands.value,
            "actual_seq_qlen": lengths,
            "actual_seq_kvlen": lengths,
        }
        made = self._made(inputs, attrs | {"input_layout": "TND"}, operands)
        shape = self.builder.ints([0, heads * operands.width])
        result = self.builder.reshape(made.outputs[-1], shape)
        return Direct(made, ((node.outputs[0], result),), "TND", (heads, heads), mask="packed")

    def _made(self, inputs: dict[str, ir.Value], attrs: Attributes, operands: _Operands) -> ir.Node:
        """A FlashAttentionScore in the graph, whose result has the type of query."""
        made = self.registered(OP, inputs, attrs, used=("attention_out",))
        self.builder.graph.append(made)
        if (dtype := self.facts.info.dtype(operands.query)) is not None:
            made.outputs[-1].dtype = dtype
        return made

    def _padded(
        self, operands: _Operands, heads: int, attrs: Attributes, offsets: int, addend: ir.Value
    ) -> Direct:
        """The FlashAttentionScore of a padded batch, to whose scores a bias is added."""  # (4)
        builder, info, given = self.builder, self.facts.info, input_of(self.node, offsets)
        shape = info.sizes(addend)
        if given is None or len(shape) != 4 or shape[1].const not in (1, heads):
            raise self.decline(
                f"its attention_bias is not one for each head, or one for all {heads}, of a padded batch"
            )
        batch, rows = (builder.length(given, axis) for axis in (0, 1))
        count = builder.mul(batch, rows)
        flat = builder.reshape(builder.cast(given, INT64), [-1])
        zero = builder.ints([0])
        places = builder.slice(flat, zero, builder.dimension(operands.query, 0), zero)
        pairs = builder.unsqueeze(places, (1,))

        def batched(part: ir.Value, size: int) -> ir.Value:
            dtype = info.dtype(part)
            nothing = builder.cast(
                builder.constant(np.zeros((1, 1, 1), np.float32), "number"), dtype or FLOAT
            )
            target = builder.concat([count, builder.ints([heads, size])], 0)
            put = builder.scatter_nd(builder.expand(nothing, target), pairs, part)
            wide = builder.concat([batch, rows, builder.ints([heads, size])], 0)
            return builder.reshape(put, wide)

        excluded = builder.expand(builder.constant(np.array([True]), "flag"), count)
        seen = builder.expand(builder.constant(np.array([False]), "flag"), builder.shape_of(places))
        mask = builder.scatter_nd(excluded, pairs, seen)
        form = builder.concat([batch, builder.ints([1, 1]), rows], 0)
        inputs = {
            "query": batched(operands.query, operands.size),
            "key": batched(operands.key, operands.size),
            "value": batched(operands.value, operands.width),
            "real_shift": addend,
            "atten_mask": builder.reshape(mask, form),
        }
        made = self._made(
            inputs, attrs | {"input_layout": "BSND", "pse_type": 0, "sparse_mode": 1}, operands
        )
        by_row = builder.reshape(made.outputs[-1], [-1, heads * operands.width])
        outputs = ((self.node.outputs[0], builder.gather(by_row, places, 0)),)
        return Direct(made, outputs, "BSND", (heads, heads), mask="atten_mask+real_shift")

    def _ends(self, index: int) -> ir.Value:
        """Where each sequence ends, as int64 [B]."""
        limits = input_of(self.node, index)
        if limits is None:
            raise self.decline("cumulative_sequence_length is missing")
        last = np.iinfo(np.int64).max
        ends = self.builder.slice(limits, [1], [last], [0])
        return self.builder.op("Cast", [ends], {"to": int(ir.DataType.INT64)})

    def _given(self, heads: int) -> _Operands:
        """The operands of PackedMultiHeadAttention."""
        query, key, value = (input_of(self.node, index) for index in range(3))
        if query is None or (key is None) != (value is None):
            raise self.decline("key and value are given together or not at all")
        if key is None or value is None:
            parts = self._unpacked(query, heads)  # (1)
            widths = [self._width(part) * heads for part in parts]
        else:
            parts = [query, key, value]
            widths = [self._width(part) for part in parts]
        bias = input_of(self.node, 3)
        if bias is not None:  # (2)
            parts = [
                self._sum(part, self._part(bias, start, start + width, 0), heads)
                for part, start, width in zip(
                    parts, np.cumsum([0, *widths[:2]]).tolist(), widths, strict=True
                )
            ]
        return self._of_heads(parts, widths, heads)

    def _projected(self, heads: int) -> _Operands:
        """The operands of PackedAttention: a product, cut into three."""
        given, weights, bias = (input_of(self.node, index) for index in range(3))
        if given is None or weights is None:
            raise self.decline("input or weights are missing")
        total = self._width(weights)
        sizes = self.node.attributes.get("qkv_hidden_sizes")
        widths = [total // 3] * 3 if sizes is None else list(sizes.as_ints())
        if sum(widths) != total or len(widths) != 3:
            raise self.decline("the widths of query, key and value are not those of the weights")
        joined = self.builder.matmul(given, weights)
        if bias is not None:
            joined = self.builder.add(joined, bias)
        starts = np.cumsum([0, *widths]).tolist()
        parts = [self._part(joined, start, end, 1) for start, end in pairwise(starts)]  # (3)
        return self._of_heads(parts, widths, heads)

    def _of_heads(self, parts: list[ir.Value], widths: list[int], heads: int) -> _Operands:
        """Operands of these widths as [T, N, D]."""
        if widths[0] != widths[1] or any(width % heads or not width for width in widths):
            raise self.decline(
                f"query, key and value have the widths {widths}, which are not those of {heads} heads"
            )
        sizes = [width // heads for width in widths]
        split = [
            self.builder.reshape(part, [0, heads, size])
            for part, size in zip(parts, sizes, strict=True)
        ]
        query, key, value = split
        return _Operands(query, key, value, sizes[0], sizes[2])

    def _unpacked(self, packed: ir.Value, heads: int) -> list[ir.Value]:
        """[T, N, 3, D] as query, key and value [T, N, D]."""
        shape = self.facts.info.sizes(packed)
        if len(shape) != 4 or shape[1].const != heads or shape[2].const != 3:
            raise self.decline("a query without key and value is not [T, num_heads, 3, head_size]")
        places = [self.builder.constant(np.array(number, np.int64)) for number in range(3)]
        return [self.builder.gather(packed, place, 2) for place in places]

    def _sum(self, part: ir.Value, bias: ir.Value, heads: int) -> ir.Value:
        """An operand with its bias, which lies as the operand does."""
        shape = self.facts.info.sizes(part)
        if len(shape) == 3:
            bias = self.builder.reshape(bias, [heads, -1])
        return self.builder.add(part, bias)

    def _part(self, value: ir.Value, start: int, end: int, axis: int) -> ir.Value:
        return part_of(OpConverter.of(self.node, self.facts, self.builder), value, start, end, axis)

    def _width(self, value: ir.Value) -> int:
        """The last size of a tensor."""
        shape = self.facts.info.shape(value)
        size = shape[-1].const if shape else None
        if size is None:
            raise self.decline(f"the width of {value.name!r} is not known before the model runs")
        return size
