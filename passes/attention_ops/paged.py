"""PagedAttention of com.microsoft: packed sequences whose keys and values lie in the pages of a
cache.

    output, key_cache_out, value_cache_out = PagedAttention(query, key, value, key_cache,
        value_cache, cumulative_sequence_length, past_seqlens, block_table, cos_cache, sin_cache,
        slot_mapping, head_sink, q_norm_weight, k_norm_weight, k_scale, v_scale, attention_metadata)

    1  keys                 those of the positions 0 to past_seqlens + i, read by block_table; with
                            is_causal 0 those of the later tokens, too
    2  local_window_size    w keys at most, the token's own one included; where the attention is not
                            causal, it leaves out only those before
    3  head_sink            one more score in every row, as softcap that of FlashAttentionScore

The operands are those of cached_call.py, the caches those of paged_call.py. They become
FlashAttentionScore with the layout TND, on the target ort: ONNX Runtime has no CPU kernel for them.
A Gather reads the keys that some row attends, without those before the window (pages.py). Sequences
of one token are left to IncreFlashAttention where it takes them (single_tokens.py): it reads the
pages where they lie. A run in which a key that a row attends lies in no page ends in an error.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.op_registry.constraints.training import compressed_mask
from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.passes.attention_ops import single_tokens
from fa_compiler.passes.attention_ops.direct import Attributes, Direct
from fa_compiler.passes.attention_ops.paged_call import CACHES, INT8, PagedCall, Prepared
from fa_compiler.passes.attention_ops.pages import Rows
from fa_compiler.passes.attention_ops.single_tokens import SingleTokens, takes_pages
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import certain
from fa_compiler.passes.values.facts import Facts

OP = "FlashAttentionScore"


def convert_paged(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
    """Replace a PagedAttention by FlashAttentionScore, on the target ort. Raises Decline."""
    return _Conversion(node, facts, builder).converted()


class _Conversion(PagedCall):
    def converted(self) -> Direct:
        """The FlashAttentionScore that takes the operator's place."""
        given = self.prepared()
        single = self._single_tokens()
        keys = self.sequences.keys(self.window, 1 if single is None else 2)  # (1)
        made = self._attention(given, keys)
        out = made.outputs[-1]
        if single is not None:
            out = self._with_single(out, single, given)
        outputs = self.outputs(out, given.caches)
        return Direct(
            made, outputs, "TND", (self.sizes.heads, self.sizes.kv_heads), mask=self._mask_label
        )

    @property
    def _mask_label(self) -> str:
        if self.window > 0:
            return "packed+band"
        return "packed+causal" if self.is_causal else "packed"

    def _attention(self, given: Prepared, keys: Rows) -> ir.Node:
        """The FlashAttentionScore, whose result is the last of its outputs."""
        attrs: Attributes = {"head_num": self.sizes.heads, "input_layout": "TND", **self._scaling()}
        mask: ir.Value | None = None
        if self.window > 0:  # (2)
            after = 0 if self.is_causal else UNLIMITED
            attrs |= {"sparse_mode": 4, "pre_tockens": self.window - 1, "next_tockens": after}
        elif self.is_causal:
            attrs["sparse_mode"] = 3
        if "sparse_mode" in attrs:
            mask = self.builder.constant(compressed_mask(3), "triangle")
        key, value = self.read(given.caches, self.pages.slots(keys))
        inputs = {
            "query": given.query,
            "key": key,
            "value": value,
            "atten_mask": mask,
            "actual_seq_qlen": given.tokens.ends,
            "actual_seq_kvlen": keys.ends,
            "sink": self.sink(),  # (3)
        }
        return self.added(OP, inputs, attrs, -1)

    def _scaling(self) -> Attributes:
        """The attributes for the scale and the soft cap."""
        return {"scale_value": self.scale_value(), "cpu_softcap": self.softcap()}

    def _single_tokens(self) -> SingleTokens | None:
        """The sequences of one token; None where IncreFlashAttention does not take them."""
        sizes, caches = self.sizes, filter(None, map(self.input, CACHES))
        if not takes_pages(sizes.heads, sizes.kv_heads, sizes.size, self._block_size):
            return None
        if self.input("head_sink") is not None or self.is_latent or INT8 in map(self.dtype, caches):
            return None
        return SingleTokens.of(self.sequences, self.pages, self.window)

    @property
    def _block_size(self) -> int | None:
        """The number of tokens in a block; None where it may differ between runs."""
        shape = self.facts.info.shape(self.required("key_cache"))
        return None if shape is None else shape[1].const

    def _with_single(self, out: ir.Value, single: SingleTokens, given: Prepared) -> ir.Value:
        """The result of FlashAttentionScore with the rows of the sequences of one token."""
        block_size = certain(self._block_size)
        attrs: Attributes = {
            "num_heads": self.sizes.heads,
            "num_key_value_heads": self.sizes.kv_heads,
            "input_layout": "BSND",
            "block_size": block_size,
            **self._scaling(),
        }
        made = self.added(single_tokens.OP, single.inputs(given.query, given.caches), attrs, 0)
        return single.joined(out, made.outputs[0])
