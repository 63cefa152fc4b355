"""What the table of accepted spellings in docs/recognised.md says, and what tests each word of it.

Every choice that the random composer has stands under the words that announce it to users; what it does not compose is
tested by the file that is named.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ANY = ("*",)
"""All choices there are for a field."""
Tested = Mapping[str, Mapping[str, tuple[Any, ...]] | str]
"""Words of a row: fields of Spelling or Mask with the values they stand for, or a test file."""

ACCEPTED: Mapping[str, Tested] = {
    "products": {
        "MatMul": {"product": ("matmul",), "values": ("matmul",)},
        "Gemm": {"product": ("gemm",)},
        "FusedMatMul": {"product": ("fused",)},
        "Einsum": {"product": ("einsum",), "values": ("einsum",)},
        "either operand order": {"transposed": (False, True), "values": ("flipped",)},
        "heads folded into the batch": {"product": ("folded",), "layout": ("BSD",)},
        "several batch dimensions": "values/test_shapes.py",
        "learned queries": "layout/test_missing_dimensions.py",
        "keys along several dimensions": "layout/test_key_axes.py",
        "heads, such as rows that are tied": "layout/test_depth_axes.py",
        "keys in parts": "prepare/test_key_parts.py",
    },
    "layout": {
        "Transpose, Reshape": {"key": ("0132", "0231", "rank3"), "layout": ("BSND", "SBH", "SD")},
        "constant or computed shapes": {"target": ("computed", "inferred", "constant"), "symbolic": (True, False)},
        "BSH, SBH, BSND and BNSD": {
            "layout": ("BNSD", "BSH"),
            "output": ("BNSD", "BSND", "BSH", "SBH"),
            "identity": (True, False),
        },
        "Split, Slice or Gather": {"packed": ("none", "split", "slice", "gather", "gather_first")},
        "before it is transposed": "prepare/test_early_cuts.py",
        "out of sequences": "prepare/test_identities.py",
        "operators that change nothing": "prepare/test_identities.py",
        "Concat of cached": {"cache": (True, False)},
    },
    "two products": {"a second product added to the scores": "matching/test_second_product.py"},
    "scale": {
        "query, key, both, or the scores": {
            "scale": ("none", "query", "key", "both", "transposed_key"),
            "factor": ANY,
        },
        "before or after the mask": {"scale": ("mul", "after_mask")},
        "Div": {"scale": ("div", "query_div", "root")},
        "alpha": {"scale": ("alpha",)},
        "computed from shapes": {"scale": ("computed", "computed_both")},
        "for each head, row or batch entry": "matching/test_factors.py",
        "a temperature of the run that is clamped": "matching/test_factors.py",
    },
    "soft caps": {
        "in any spelling": "matching/test_softcap.py",
        "with the gradient": "backward/test_rejects.py",
        "with caches": "in_place/test_growing_caches.py",
        "as `softcap` of Attention": "attention_ops/test_onnx.py",
        "and GroupQueryAttention": "attention_ops/test_group_cache.py",
    },
    "softmax": {
        "Softmax of every opset": {"softmax": ("op", "op_positive"), "opset": ANY},
        "its maximum subtracted": {"softmax": ("shifted", "decomposed")},
        "Reciprocal": {"softmax": ("reciprocal",)},
        "division behind the product with the values": "matching/test_division_behind_product.py",
        "LogSoftmax": {"softmax": ("logarithm",)},
        "ReduceLogSumExp": "matching/test_softmax.py",
        "or written out": {"softmax": ("logarithm_written_out",)},
        "powers of another base": "matching/test_softmax.py",
        "Dropout": {"dropout": (False, True)},
        "a ratio of 0": "prepare/test_identities.py",
    },
    "masks": {
        "Add, Sub and Where": {
            "form": ("select", "select_drop", "add_where", "add_mul", "chain"),
            "fill": ANY,
        },
        "in any number and order": "masks/test_masks.py",
        "Sum with the scores": "matching/test_spellings.py",
        "by arithmetic": {"form": ("mul_add",)},
        "`min(s, where(mask, inf, -inf))`": {"form": ("least",)},
        "`where(mask, s * b, f)`": "masks/test_selections.py",
        "`where(mask, s - c, s)`": "prepare/test_chosen_addends.py",
        "of more dimensions that are 1": "masks/test_enlarging_masks.py",
        "a floor": {"floor": (False, True)},
        "in float16 at -65504": "masks/test_half_floor.py",
        "constant, computed or model input": {"source": ("input", "int", "const", "const_empty")},
        "any shape that broadcasts": {"dims": ANY, "anonymous": (False, True)},
    },
    "structural masks": {
        "Trilu": {"source": ("trilu", "trilu_filled", "triu_not"), "form": ("add_triangle",)},
        "Range": {"source": ("range", "difference")},
        "CumSum": {"source": ("cumsum",)},
        "a constant cut to size": {"source": ("slice", "slice_lifted", "positions")},
        "parts that a Concat joins": "masks/test_structure.py",
        "causal": {"pattern": ("causal", "strict", "ahead", "future")},
        "to one side of the diagonal": "masks/test_structure.py",
        "cached keys": {"pattern": ("cached",)},
        "sliding windows, bands": {"pattern": ("window", "cached_window", "band")},
        "the bits of integers": "masks/test_structure.py",
        "the least of several integers": "prepare/test_minima.py",
        "padding beside": {"padding": ("", "and", "times", "gather"), "bound": (False, True)},
        "assigned to a slice or expanded to all rows": "masks/test_structure.py",
        "of heads that are folded into the batch": "masks/test_structure.py",
    },
    "packed sequences": {
        "counts of cumulative lengths reached": "masks/test_packing.py",
        "running sums": "masks/test_packing.py",
        "breaks in position_ids": "masks/test_packing.py",
    },
    "biases": {
        "any tensor added": {"form": ("bias",), "infinite": (False, True)},
        "relative positions, ALiBi": "matching/test_spellings.py",
        "a part of them that is written back": "prepare/test_part_sums.py",
    },
    "sinks": {
        "one more score": {"sink": (False, True)},
        "Pad": "matching/test_sinks.py",
        "softmax-plus-one": "matching/test_sink_totals.py",
        "sigmoid(logsumexp(scores) - sink)": "matching/test_sink_gates.py",
    },
    "sharing": {
        "scores read by several softmaxes": "prepare/test_shared.py",
        "probabilities read by several products": "prepare/test_shared.py",
        "the values are joined": "prepare/test_joined_values.py",
        "only a second layer adds to its own": "prepare/test_shared.py",
    },
    "differences": {
        "the difference of two attentions": "prepare/test_differences.py",
        "in the same way sums": "matching/test_sums_of_probabilities.py",
    },
    "heads": {
        "multi-query": {"gqa": ("none", "broadcast")},
        "grouped-query": {"gqa": ("grouped",)},
        "Expand": {"gqa": ("expand", "interleave")},
        "Tile": {"gqa": ("tile", "tile_apart")},
        "Concat": {"gqa": ("concat", "concat_apart")},
        "Gather": {"gqa": ("gather", "gather_turns")},
        "in any order": {"gqa_values": ANY},
        "no neighbours": "matching/test_spellings.py",
    },
    "types": {
        "float32, float16": {"dtype": ("float32", "float16")},
        "bfloat16": "matching/test_fusion_random.py",
        "casts to float32": {"upcast": (False, True)},
        "rounds to bfloat16": "masks/test_rounding.py",
    },
    "quantised models": {"the roundings of scores and probabilities go": "prepare/test_quantised_softmax.py"},
    "guards": {
        "isnan(p)": {"guard": ("none", "nan", "cast_nan")},
        "max(bias) == -inf": {"guard": ("bias",)},
        "any(scores != -inf)": {"guard": ("scores",)},
        "the mask's own condition": {"guard": ("selection", "product")},
    },
    "selected keys": {
        "ScatterElements": "sparse/test_selected.py",
        "gathered by a list": "sparse/test_gathered.py",
        "lists of blocks of keys": "sparse/test_selected_blocks.py",
        "lightning indexer": "sparse/test_indexer.py",
    },
    "ready-made": {
        "ai.onnx Attention": "attention_ops/test_onnx.py",
        "MultiHeadAttention": "attention_ops/test_contrib.py",
        "QAttention": "attention_ops/test_contrib.py",
        "GroupQueryAttention": "attention_ops/test_group_query.py",
        "FlexAttention": "attention_ops/test_flex.py",
        "NPUFlashAttention": "attention_ops/test_npu.py",
    },
    "training": {"its gradient": "backward/test_pairs.py"},
    "graphs": {"If, Loop and Scan": "ir/test_scopes.py", "model-local functions": "ir/test_scopes.py"},
}
