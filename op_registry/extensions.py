"""The extensions: what the CPU kernels take although Ascend does not. The table is complete.

A model for ONNX Runtime may use extensions. A model for an Ascend product may not, and `verify`
says which ones it uses. An extension is either a relaxed limit on a shape, size or type of an
operator, or an attribute whose name begins with `cpu_`. Everything else that breaks a constraint is
an error on every target.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fa_compiler.op_registry.spec import AttrSpec

EMPTY_ROWS = ("", "zero", "mean", "unmasked", "nan")
"""Values of cpu_empty_rows: the result of a query row whose keys are all masked. "" is the
operator's own rule, which gives 0, and "zero" says the same. "mean" gives the mean of value over
all keys, "unmasked" the softmax without the mask, "nan" NaN."""

MASKED_VALUES = ("", "zero")
"""Values of cpu_masked_values. With "", a masked key whose score is cpu_mask_value contributes its
value to the result, by its weight. With "zero", the key contributes nothing."""

MASKED_BIAS = ("", "added")
"""Values of cpu_masked_bias: whether the bias of a masked key is added to its score. With "added",
the score of a masked key is cpu_mask_value plus its bias. Every key then has a score, and no row is
empty."""

MASK_BATCH = ("", "repeated")
"""Values of cpu_mask_batch: whether the batch of a mask or bias may be a part of that of query, key
and value. With "repeated" its size W may divide B, and entry b of the batch reads entry b % W. So
the masks of the windows of an image serve each image, where the batch counts the windows of all
images."""

NAN_ROWS = ("", "zero", "infinite")
"""Values of cpu_nan_rows: the result of a row whose softmax is undefined, because a score is NaN or
+inf or all attended scores are -inf. "" gives NaN, as arithmetic does. "zero" gives probabilities
of 0. "infinite" gives them if all attended scores are -inf, and NaN otherwise. Probabilities of 0
give 0, or NaN where an attended value is NaN or infinite."""


@dataclass(frozen=True)
class Extension:
    """One extension. The operators that have it name its `id` in their files.

    `sentence` says what the operator takes, and `happens`, in the words of a report, what that
    means for a fused attention. If the extension is an attribute, `attr` is the attribute's name.
    The attribute takes one of `values`, or any finite number if `kind` is "Float". `default` is the
    value of an absent attribute. `widens` says that all float16 and bfloat16 tensors may be
    float32.
    """

    id: str
    sentence: str
    happens: str
    attr: str | None = None
    values: tuple[str, ...] = ()
    kind: str = "String"
    default: float | str = ""
    widens: bool = False

    @property
    def spec(self) -> AttrSpec | None:
        """The attribute as a prototype would declare it, or None if the extension is not an
        attribute."""
        if self.attr is None:
            return None
        return AttrSpec(self.attr, self.kind, False, self.default)


EXTENSIONS = (
    Extension(
        "EXT-MASK-BROADCAST",
        "atten_mask may have 1 in place of B, N1, S1 or S2 in any of its dimensions, in rank 2 ([S1,S2]) or 4",
        happens="the mask stays as small as the model has it, such as one row for all query rows",
    ),
    Extension(
        "EXT-BAND-MASK",
        "in sparse_mode 2, 3 and 4 atten_mask may have the shape [B|1,N1|1,1,S2|1] instead of [2048,2048]: it excludes "
        "keys in addition to those that the band excludes; the band is computed from the sizes",
        happens="the band is computed from the sizes, and no tensor has a number for each row and key; where there is "
        "padding, it stands beside the band",
    ),
    Extension(
        "EXT-SHIFT-BROADCAST",
        "the bias of pse_type 0 and 1 may have 1 in place of B, N1, S1 or S2 in any of its four dimensions",
        happens="the bias stays as small as the model has it, such as one row for all query rows",
    ),
    Extension(
        "EXT-SHIFT-FLOAT",
        "the bias of pse_type 0 and 1 may be float32 beside a float16 or bfloat16 query",
        happens="the bias is added in float32",
    ),
    Extension(
        "EXT-BAND-OUTSIDE",
        "the band that sparse_mode, pre_tockens and next_tockens make with the lengths may miss the scores in part or "
        "whole: rows that it leaves without a key are empty rows",
        happens="the band may leave query rows without a key",
    ),
    Extension(
        "EXT-EMPTY-SEQUENCES",
        "in TND a sequence may have queries and no keys, whose rows are 0, and a bias may stand beside sequences that "
        "have no queries or no keys",
        happens="a sequence may have queries and no keys, whose rows are 0",
    ),
    Extension(
        "EXT-GRAD-NO-KEYS",
        "key and value may have no heads: all gradients are 0 or empty then",
        happens="key and value have no heads, so that all gradients are 0 or empty",
    ),
    Extension(
        "EXT-GRAD-BIAS-MODES",
        "pse_shift of pse_type 0 and 1 may stand beside sparse_mode 7, and beside sparse_mode 8 with any lengths",
        happens="the bias stands beside a mask of packed sequences",
    ),
    Extension(
        "EXT-EMPTY-ROWS",
        "the attribute cpu_empty_rows says what a query row gives whose every key is masked",
        happens="a query row whose every key is masked gives what it gives in the model",
        attr="cpu_empty_rows",
        values=EMPTY_ROWS,
    ),
    Extension(
        "EXT-GRAD-EMPTY-ROWS",
        "the attribute cpu_empty_rows says which probabilities a query row had whose every key is masked: dv gets its "
        "share from them, and dq and dk get nothing from such a row",
        happens="a query row whose every key is masked adds to the gradients what it adds in the model",
        attr="cpu_empty_rows",
        values=tuple(value for value in EMPTY_ROWS if value != "unmasked"),
    ),
    Extension(
        "EXT-NAN-ROWS",
        "the attribute cpu_nan_rows gives probabilities of 0 instead of NaN to rows whose softmax is undefined, as the "
        "guard where(isnan(p), 0, p) does; an attended value that is NaN or infinite still makes NaN of them",
        happens="a query row whose softmax is undefined gives 0, as the guard of the model makes it",
        attr="cpu_nan_rows",
        values=NAN_ROWS,
    ),
    Extension(
        "EXT-MASK-VALUE",
        "the attribute cpu_mask_value is the score that a masked key has, instead of taking no part in the softmax; "
        "its value is not read where its weight is 0 beside the largest score; dq and dk get nothing from it",
        happens="a masked key has the score that the model gives it, and counts where no other score is larger",
        attr="cpu_mask_value",
        kind="Float",
        default=-math.inf,
    ),
    Extension(
        "EXT-MASKED-BIAS",
        "the attribute cpu_masked_bias adds the bias to the score that a masked key has by cpu_mask_value, "
        "as a bias that is added behind the mask does",
        happens="the bias is added to the score of a masked key, as in the model",
        attr="cpu_masked_bias",
        values=MASKED_BIAS,
    ),
    Extension(
        "EXT-MASKED-VALUES",
        "the attribute cpu_masked_values takes the values of masked keys for 0, where they have a score by "
        "cpu_mask_value, as the guard where(mask, p, 0) does",
        happens="the values of masked keys count as 0, as in the model",
        attr="cpu_masked_values",
        values=MASKED_VALUES,
    ),
    Extension(
        "EXT-MASK-BATCH",
        "the attribute cpu_mask_batch allows a batch size W of atten_mask and of the bias of pse_type 0 and 1 that "
        "divides B: entry b of the batch reads entry b % W",
        happens="the mask of a part of the batch, such as the windows of one image, serves all parts",
        attr="cpu_mask_batch",
        values=MASK_BATCH,
    ),
    Extension(
        "EXT-SOFTCAP",
        "the attribute cpu_softcap is a number c, not 0, that caps the scaled scores x before a bias is added and keys "
        "are masked: they become c * tanh(x / c)",
        happens="scores are capped by c * tanh(score / c), as in the model",
        attr="cpu_softcap",
        kind="Float",
        default=0.0,
    ),
    Extension(
        "EXT-SINK-FLOAT",
        "sink may stand beside a float32 query",
        happens="sinks stand beside float32 scores",
    ),
    Extension(
        "EXT-ROPE",
        "query_rope and key_rope may be used in every layout and with any sizes, not only in TND with 128 and 64",
        happens="the second product that is added to the scores has any layout and size",
    ),
    Extension(
        "EXT-GRAD-ROPE",
        "query_rope and key_rope may be used in every layout, with any types and sizes, without a mask, and beside a "
        "bias, dropout and the prefix mode",
        happens="the gradients of the second product that is added to the scores have any layout and size",
    ),
    Extension(
        "EXT-VALUE-WIDER",
        "the head size of value may exceed that of key, up to 768",
        happens="the heads of value are larger than those of key",
    ),
    Extension(
        "EXT-BATCH-BROADCAST",
        "query, key and value may each have batch 1 beside another batch of the others, except in TND: it is repeated",
        happens="query, key or value of one batch entry serve all entries, and are not repeated",
    ),
    Extension(
        "EXT-KEY-LENGTH",
        "outside TND actual_seq_kvlen may be one number, of the keys there are: key, value and key_rope may have room "
        "for more, each of its own; masks and biases are as wide as there are keys",
        happens="key and value have room for more tokens than there are, and only those that are there are read",
    ),
    Extension(
        "EXT-RANGE",
        "head count, batch and sequence length may exceed the documented ranges (N 256, B 2M, S 1M; decoding: B 65536)",
        happens="heads, batch or tokens are more than Ascend's documents allow",
    ),
    Extension(
        "EXT-DECODE-FLOAT",
        "query, key, value, pse_shift, antiquant_scale and antiquant_offset may be float32",
        happens="the attention is in float32, as in the model; on Ascend it would have 16 bits",
        widens=True,
    ),
    Extension(
        "EXT-DECODE-MASK-BYTES",
        "an atten_mask of bytes may hold any numbers: those that are not 0 mask",
        happens="each byte of the mask that is not 0 masks its key",
    ),
    Extension(
        "EXT-DECODE-PADDING",
        "kv_padding_size and actual_seq_lengths may ask for more rows than there are: the result of such a batch entry "
        "is 0, as it is where the device gets the numbers while it runs",
        happens="a batch entry that has fewer rows than its lengths ask for gives 0",
    ),
    Extension(
        "EXT-DECODE-INT8",
        "query, key and value may all be INT8, with dequant_scale1, quant_scale1 and dequant_scale2, as the prototype "
        "has it; the operator itself does not take it yet",
        happens="query, key and value are INT8, as the prototype of the operator has it",
    ),
    Extension(
        "EXT-PROMPT-FLOAT",
        "the tensors that are float16 or bfloat16 on Ascend may all be float32",
        happens="the attention is in float32, as in the model; on Ascend it would have 16 bits",
        widens=True,
    ),
    Extension(
        "EXT-PROMPT-SIZES",
        "head sizes may be any up to 768, that of value another than key's, that of a rope part any; head count, "
        "groups, batch, sequence length and the size of pages may exceed their ranges",
        happens="heads, head sizes, batch and tokens are the model's; Ascend takes a few of them",
    ),
    Extension(
        "EXT-PROMPT-MODES",
        "without a mask sparse_mode may be 1 to 4, and means nothing; a band may lie to one side of the diagonal "
        "beside quantised results, if each row has a key",
        happens="the mask mode stands where Ascend does not take it, and means the same",
    ),
    Extension(
        "EXT-PROMPT-PACKED",
        "packed layouts may have any types, head counts, modes and results, slopes, int8 keys that are not scaled by "
        "token, and pages or rope parts or neither",
        happens="packed sequences have types, heads or modes that Ascend takes for padded batches only",
    ),
    Extension(
        "EXT-PROMPT-STATISTICS",
        "softmax_lse may be asked for in every layout",
        happens="softmax_lse is a result of this layout, too",
    ),
    Extension(
        "EXT-SPARSE-FLOAT",
        "the tensors of the sparse family that are float16 or bfloat16 on Ascend may all be float32",
        happens="the attention is in float32, as in the model; on Ascend it would have 16 bits",
        widens=True,
    ),
    Extension(
        "EXT-SPARSE-SIZES",
        "head counts, head sizes (also another one for value, and any rope size or none), the number of "
        "selected blocks and their size (up to 2147483647), batch and sequence length may be any",
        happens="heads, head sizes and selected blocks are the model's; a product of Ascend takes a few sizes",
    ),
    Extension(
        "EXT-SPARSE-HEADS",
        "key and value may have any number of heads that divides the query's; sparse_indices has a list for each of "
        "them, or one for all",
        happens="key and value have the heads of the model; on Ascend they would have one",
    ),
    Extension(
        "EXT-INDEX-NAN",
        "the attribute cpu_nan_scores says where keys rank whose index score is NaN: last, or first, as in the TopK of "
        "ONNX Runtime",
        happens="a key whose index score is NaN ranks first, as in the model",
        attr="cpu_nan_scores",
        values=("", "first"),
    ),
    Extension(
        "EXT-SPARSE-EMPTY-ROWS",
        "the attribute cpu_empty_rows says what a query row gives for which no key is selected: zero, the mean of value"
        " over all keys of the sequence, or NaN; always zero in a sequence without keys",
        happens="a query row for which no key is selected gives what it gives in the model",
        attr="cpu_empty_rows",
        values=("", "zero", "mean", "nan"),
    ),
    Extension(
        "EXT-LOSS-FLOOR",
        "the attribute cpu_loss_floor is what smaller probabilities count as in the loss, instead of 1e-8; with 0 "
        "there is no floor, and a key whose target is 0 adds nothing",
        happens="smaller probabilities count in the loss as what the model has in their place",
        attr="cpu_loss_floor",
        kind="Float",
        default=1e-8,
    ),
)
