"""Rotary positions, taken out of an attention operator and applied in front of it.

For ONNX Runtime they become com.microsoft RotaryEmbedding, which runs the same kernel. Ascend does
not have this operator, so that for Ascend they are written out in plain operators.

The position of row i in batch entry b is

    before[b] + i               without position_ids; `before` is 0 in a prompt (group_cache.py)
    position_ids[b, i]          with position_ids, after a past
    position_ids[0, 0] + i      with position_ids, in a prompt, where ONNX Runtime reads only the
                                first number

The width of the cosine and sine tables says how many elements of each head are rotated.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.attention_ops.group_cache import RunSizes
from fa_compiler.passes.emit.rotary import rotate_heads
from fa_compiler.passes.ir.nodes import int_attr

COS, SIN, POSITIONS = 7, 8, 9
DOMAIN = "com.microsoft"


@dataclass(frozen=True)
class Rotary:
    """Rotates queries and keys [B, S, N * D] by their positions, int64 [B, S]."""

    call: OpConverter
    positions: ir.Value

    @staticmethod
    def of(call: OpConverter, sizes: RunSizes) -> Rotary:
        """The rotation by the positions of one run."""
        builder, given = call.builder, call.input(POSITIONS)
        offsets = builder.range(sizes.rows)
        starts = builder.unsqueeze(sizes.before, (1,))
        counted = builder.add(starts, builder.unsqueeze(offsets, (0,)))
        if given is None:
            return Rotary(call, counted)
        first = builder.slice(given, (0, 0), (1, 1), (0, 1))
        from_first = builder.add(first, counted)
        return Rotary(call, builder.where(sizes.prompt, from_first, given))

    def turned(self, value: ir.Value, heads: int) -> ir.Value:
        """The rotated queries or keys. Raises Decline."""
        call = self.call
        cos, sin = call.required_input(COS), call.required_input(SIN)
        width, half = call.size(value, -1), call.size(cos, -1)
        if width is None or half is None:
            raise call.decline(
                Code.SHAPE, "how much of each head is turned is not known before the model runs"
            )
        interleaved = int_attr(call.node, "rotary_interleaved", 0)
        if call.options.target != "ort":
            return self._written_out(value, heads, width // heads, 2 * half, interleaved == 1)
        attrs = {"interleaved": interleaved}
        if 2 * half * heads != width:
            attrs |= {"num_heads": heads, "rotary_embedding_dim": 2 * half}
        inputs = [value, self.positions, cos, sin]
        return call.builder.op(
            "RotaryEmbedding", inputs, attrs, dtype=call.info.dtype(value), domain=DOMAIN
        )

    def _written_out(
        self, value: ir.Value, heads: int, size: int, part: int, interleaved: bool
    ) -> ir.Value:
        builder = self.call.builder
        cos, sin = (
            builder.unsqueeze(builder.gather(table, self.positions, 0), (2,))
            for table in (self.call.required_input(COS), self.call.required_input(SIN))
        )
        by_head = builder.reshape(value, [0, 0, heads, size])
        result = rotate_heads(builder, by_head, cos, sin, size, part, interleaved)
        return builder.reshape(result, [0, 0, heads * size])
