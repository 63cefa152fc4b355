"""DynamicSparseAttention of com.microsoft: attention to selected keys of a cache.

    1  past_key, past_value     [B, K, P, D]. Batch entry b has seqlens_k[b] + 1 keys in all, the
                                last of which are new: they are written behind the others.
                                present_key and present_value are the whole caches
    2  selected_indices         [B * S, entries], positions in the cache, of which selected_counts
                                [B * S] count. Keys of later tokens are left out, even if they are
                                selected
    3  position_ids             the positions of the rotation, where they are given
    4  head_sink                one more score in every row. With smooth_softmax it is 0

A row without a key gives 0, with a sink, too. The operands are those of cached_call.py. They become
SparseFlashAttention on the target ort. Each key head of each batch entry is a sequence there, so
that no cache is moved: past is written by one ScatterND, which copies it only if past and present
are bound to different memory.

Refused: local_plus_selected, whose rows see a window and an auxiliary cache in one softmax; caches
of another type; no past, in whose place the operator makes a cache of total_sequence_length rows; a
head_sink beside several key heads, whose sinks would differ between the sequences; output_bf16;
what only CUDA has: committed_length, validation_status.
"""

from __future__ import annotations

from functools import cached_property
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.decline import first_reason
from fa_compiler.passes.attention_ops.cache_rows import CacheRows
from fa_compiler.passes.attention_ops.cached_call import CachedCall, Sizes
from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.attention_ops.direct import Attributes, Direct
from fa_compiler.passes.attention_ops.key_masks import DimRef
from fa_compiler.passes.attention_ops.pages import refused_below_zero
from fa_compiler.passes.attention_ops.selected import selected_entries
from fa_compiler.passes.emit.build import INT64, Builder
from fa_compiler.passes.ir.nodes import int_attr, is_read, text_attr
from fa_compiler.passes.values.facts import Facts

OP = "SparseFlashAttention"
INT32 = ir.DataType.INT32
PASTS = ("past_key", "past_value")
OTHERS = ("auxiliary_key", "auxiliary_value", "committed_length", "key_scale", "value_scale")


def convert_dynamic_sparse(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
    """Replace a DynamicSparseAttention by SparseFlashAttention, on the target ort. Raises
    Decline."""
    return _Conversion(node, facts, builder).converted()


class _Conversion(CachedCall):
    rank: ClassVar[int] = 3

    def converted(self) -> Direct:
        """The SparseFlashAttention that takes the operator's place."""
        self._check()
        sizes, builder = self.sizes, self.builder
        query, key, value = self.operands()
        positions = self._flat(self._rotary_positions)
        query = self.placed(query, "q", sizes.heads, positions)
        key = self.placed(key, "k", sizes.kv_heads, positions)
        presents = [
            self._present(name, rows) for name, rows in zip(PASTS, (key, value), strict=True)
        ]
        attrs: Attributes = {
            "scale_value": self.scale_value(),
            "sparse_block_size": 1,
            "layout_query": "BSND",
            "layout_kv": "BSND",
            "sparse_mode": 0,
            "attention_mode": 2,
        }
        inputs = {
            "query": self._by_key_head(query),
            "key": self._of_sequences(presents[0]),
            "value": self._of_sequences(presents[1]),
            "sparse_indices": self._selected(),
            "actual_seq_lengths_kv": builder.cast(self._repeated(self._totals), INT32),
            "sinks": self._sinks(),
        }
        made = self.added(OP, inputs, attrs, 0)
        outputs = tuple(
            zip(self.node.outputs, (self._by_row(made.outputs[0]), *presents), strict=False)
        )
        return Direct(made, outputs, "BSND", (sizes.heads, sizes.kv_heads), mask="causal")

    def _check(self) -> None:
        """Decline what is not computed."""
        self.check_common()
        if None in map(self.input, PASTS):
            raise self.decline("it has no past, and its caches get the size total_sequence_length")
        mode = text_attr(self.node, "attention_mode", "selected_only")
        source, others = (
            text_attr(self.node, "selected_kv_source", "main"),
            list(filter(self.input, OTHERS)),
        )
        status = self.node.outputs[3:4]
        several = int_attr(self.node, "kv_num_heads", 0) != 1
        reason = first_reason(
            {
                f"in attention_mode {mode!r} its rows see a window beside the selected keys": mode
                != "selected_only",
                f"its keys are selected from {source!r}": source != "main",
                f"it has the input {others[0] if others else ''}": bool(others),
                "its caches are not of the type of query": {
                    self.dtype(self.required(name)) for name in PASTS
                }
                != {self.kind},
                "its is_causal is 0": not self.is_causal,
                "it gives bfloat16": int_attr(self.node, "output_bf16", 0) != 0,
                "its validation_status is read": any(map(is_read, status)),
                "it has a sink for each head, and several key heads": several
                and self.input("head_sink") is not None,
            }
        )
        if reason is not None:
            raise self.decline(reason)

    @cached_property
    def sizes(self) -> Sizes:
        """The heads and their sizes. Raises Decline where they are not known."""
        heads, kv_heads = (
            int_attr(self.node, "num_heads", 0),
            int_attr(self.node, "kv_num_heads", 0),
        )
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise self.decline(f"its num_heads is {heads} and its kv_num_heads {kv_heads}")
        size = self.width(self.required("past_key"), 4)
        for name in PASTS:
            shape = self.facts.info.sizes(self.required(name))
            if len(shape) != 4 or [shape[1].const, shape[3].const] != [kv_heads, size]:
                raise self.decline(f"its caches are not proven to have {kv_heads} heads of {size}")
        return Sizes(heads, kv_heads, size, size)

    # -- positions and lengths
    # -------------------------------------------------------------------------

    @cached_property
    def _batch(self) -> ir.Value:
        """The number of batch entries, int64 [1]."""
        return self.builder.length(self.required("query"), 0)

    @cached_property
    def _rows(self) -> ir.Value:
        """The number of tokens of a batch entry, int64 [1]."""
        return self.builder.length(self.required("query"), 1)

    @cached_property
    def _totals(self) -> ir.Value:
        """The number of keys of each batch entry, int64 [B]."""
        builder = self.builder
        return builder.add(builder.cast(self.required("seqlens_k"), INT64), builder.ints([1]))

    @cached_property
    def _before(self) -> ir.Value:
        """The number of earlier keys of each batch entry, int64 [B]. Where it is below 0, the run
        ends in an error."""
        return refused_below_zero(self.builder, self.builder.sub(self._totals, self._rows))

    @cached_property
    def _positions(self) -> ir.Value:
        """The position of each token in its cache, int64 [B, S]."""
        builder = self.builder
        return builder.add(builder.unsqueeze(self._before, (1,)), builder.range(self._rows))

    @property
    def _rotary_positions(self) -> ir.Value:
        return self.input("position_ids") or self._positions  # (3)

    def _flat(self, value: ir.Value) -> ir.Value:
        return self.builder.reshape(value, [-1])

    def _repeated(self, value: ir.Value) -> ir.Value:
        """One number for each batch entry as one for each of its key heads, int64 [B * K]."""
        target = self.builder.concat([self._batch, self.builder.ints([self.sizes.kv_heads])], 0)
        return self._flat(self.builder.expand(self.builder.unsqueeze(value, (1,)), target))

    # -- tensors
    # ---------------------------------------------------------------------------------------

    def _reshaped(self, value: ir.Value, parts: list[ir.Value | int]) -> ir.Value:
        sizes = [self.builder.ints([part]) if isinstance(part, int) else part for part in parts]
        return self.builder.reshape(value, self.builder.concat(sizes, 0))

    def _present(self, name: str, rows: ir.Value) -> ir.Value:
        """The cache with new rows [B * S, K, D]."""
        sizes, call = self.sizes, OpConverter.of(self.node, self.facts, self.builder)  # (1)
        by_row = self._reshaped(rows, [self._batch, self._rows, sizes.kv_heads, sizes.size])
        new = self.builder.transpose(by_row, (0, 2, 1, 3))
        writer = CacheRows(call, sizes.kv_heads, DimRef(self.required("query"), 0))
        return writer.updated(self.required(name), new, self._before, self._rows)

    def _of_sequences(self, cache: ir.Value) -> ir.Value:
        """A cache as [B * K, P, 1, D], where it lies."""
        return self._reshaped(
            cache, [-1, self.builder.length(self.required("past_key"), 2), 1, self.sizes.size]
        )

    def _by_key_head(self, query: ir.Value) -> ir.Value:
        """A query [B * S, N, D] as [B * K, S, N / K, D]."""
        sizes, group = self.sizes, self.sizes.heads // self.sizes.kv_heads
        apart = self._reshaped(query, [self._batch, self._rows, sizes.kv_heads, group, sizes.size])
        turned = self.builder.transpose(apart, (0, 2, 1, 3, 4))
        return self._reshaped(turned, [-1, self._rows, group, sizes.size])

    def _by_row(self, out: ir.Value) -> ir.Value:
        """A result [B * K, S, N / K, D] as [B, S, N * D]."""
        sizes, group = self.sizes, self.sizes.heads // self.sizes.kv_heads
        apart = self._reshaped(out, [self._batch, sizes.kv_heads, self._rows, group, sizes.size])
        turned = self.builder.transpose(apart, (0, 2, 1, 3, 4))
        return self._reshaped(turned, [self._batch, self._rows, sizes.heads * sizes.size])

    def _selected(self) -> ir.Value:
        """The selected positions of each token and key head, int32 [B * K, S, 1, entries]."""
        given, heads = self.required("selected_indices"), self.sizes.kv_heads
        # (2)
        entries = selected_entries(
            self, given, self.required("selected_counts"), self._flat(self._positions)
        )
        count = self.builder.dimension(given, 1)
        apart = self._reshaped(entries, [self._batch, 1, self._rows, count])
        target = self.builder.concat(
            [self._batch, self.builder.ints([heads]), self._rows, count], 0
        )
        every = self.builder.expand(apart, target)
        return self._reshaped(every, [-1, self._rows, 1, count])

    def _sinks(self) -> ir.Value | None:
        given, group = self.sink(), self.sizes.heads // self.sizes.kv_heads  # (4)
        if given is None and int_attr(self.node, "smooth_softmax", 0):
            return self.builder.constant(np.zeros(group, np.float32), "sink")
        return given
