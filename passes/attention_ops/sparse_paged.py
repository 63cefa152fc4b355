"""SparsePagedAttention of com.microsoft: attention to selected keys, which lie in the pages of a
cache.

    1  selected_indices     [T, entries], positions in the token's sequence, of which
                            selected_counts [T] count
    2  is_causal            keys of later tokens are left out, even if they are selected
    3  head_sink            one more score in every row

A row without a key gives 0. The operands are those of cached_call.py, the caches those of
paged_call.py. They become SparseFlashAttention with the layouts TND and PA_BSND, on the target ort:
it reads the keys in the pages where they lie. A run in which some key of a sequence with tokens
lies in no page ends in an error.

Refused: attention_mode other than selected_only, whose rows see a window beside the selected keys;
keys that are selected from an auxiliary cache; a window, a soft cap or int8 caches, which
SparseFlashAttention does not have.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.answer.decline import first_reason
from fa_compiler.passes.attention_ops.direct import Attributes, Direct
from fa_compiler.passes.attention_ops.paged_call import CACHES, PagedCall
from fa_compiler.passes.attention_ops.pages import Rows
from fa_compiler.passes.attention_ops.selected import selected_entries
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import text_attr
from fa_compiler.passes.values.facts import Facts

OP = "SparseFlashAttention"
INT32 = ir.DataType.INT32
AUXILIARY = ("auxiliary_key", "auxiliary_value", "auxiliary_lengths")


def convert_sparse_paged(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
    """Replace a SparsePagedAttention by SparseFlashAttention, on the target ort. Raises Decline."""
    return _Conversion(node, facts, builder).converted()


class _Conversion(PagedCall):
    def converted(self) -> Direct:
        """The SparseFlashAttention that takes the operator's place."""
        self._check_selection()
        given, builder, sizes = self.prepared(), self.builder, self.sizes
        attrs: Attributes = {
            "scale_value": self.scale_value(),
            "sparse_block_size": 1,
            "layout_query": "TND",
            "layout_kv": "PA_BSND",
            "sparse_mode": 0,
            "attention_mode": 2,
        }
        lengths = builder.where(self._has_tokens(), self._lengths(), builder.ints([0]))
        inputs = {
            "query": given.query,
            "key": given.caches[0],
            "value": given.caches[1],
            "sparse_indices": self._selected(given.tokens),
            "block_table": self.pages.table,
            "actual_seq_lengths_query": builder.cast(given.tokens.ends, INT32),
            "actual_seq_lengths_kv": builder.cast(lengths, INT32),
            "sinks": self.sink(),  # (3)
        }
        made = self.added(OP, inputs, attrs, 0)
        outputs = self.outputs(made.outputs[0], given.caches)
        label = "packed+causal" if self.is_causal else "packed"
        return Direct(made, outputs, "TND", (sizes.heads, sizes.kv_heads), mask=label)

    def _check_selection(self) -> None:
        """Decline a selection that SparseFlashAttention does not compute."""
        mode = text_attr(self.node, "attention_mode", "selected_only")
        source = text_attr(self.node, "selected_kv_source", "main")
        quantised = [name for name in CACHES if self.dtype(self.required(name)) == ir.DataType.INT8]
        reason = first_reason(
            {
                f"in attention_mode {mode!r} its rows see a window beside the selected keys": mode
                != "selected_only",
                f"its keys are selected from {source!r}": source != "main",
                "it has an auxiliary cache": any(
                    self.input(name) is not None for name in AUXILIARY
                ),
                "it has a window beside the selected keys": self.window != -1,
                f"its {' and '.join(quantised)} are int8, which {OP} does not read": bool(
                    quantised
                ),
                f"it has a soft cap, which {OP} does not have": self.softcap() != 0.0,
            }
        )
        if reason is not None:
            raise self.decline(reason)

    def _has_tokens(self) -> ir.Value:
        """Which sequences have tokens, booleans [B]."""
        return self.builder.greater(self.sequences.ends, self.sequences.begins)

    def _lengths(self) -> ir.Value:
        """The number of keys of each sequence, int64 [B]."""
        new = self.builder.sub(self.sequences.ends, self.sequences.begins)
        return self.builder.add(self.sequences.past, new)

    def _selected(self, tokens: Rows) -> ir.Value:
        """The selected positions of each token, int32 [T, 1, entries]."""
        own = tokens.positions if self.is_causal else None  # (2)
        given, counts = self.required("selected_indices"), self.required("selected_counts")
        return self.builder.unsqueeze(selected_entries(self, given, counts, own), (1,))  # (1)
