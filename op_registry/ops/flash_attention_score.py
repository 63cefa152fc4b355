"""FlashAttentionScore: the training forward pass of attention.

Its constraints are FA.1 to FA.24. The numbers, codes and stages of FA.1 to FA.23 are those of the
project's constraints list, which is drawn from the aclnn documents, the aclnn host code and the
operator's tiling. FA.24 is about an attribute of the CPU kernel. The products are A2, A3 and 950.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa_compiler.op_registry.constraints import bands, training
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, size_text, text
from fa_compiler.op_registry.constraints.softcap import softcap
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import INVALID, Diagnostic
from fa_compiler.op_registry.geometry import BATCH_AXIS, LAYOUTS, STATISTICS, Geometry, Shape
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import Dim, TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs
from fa_compiler.op_registry.shapes import training_geometry, training_type

FLOATS = "DT_FLOAT16, DT_BF16, DT_FLOAT32"
FLOATS_OLD = "DT_FLOAT16, DT_FLOAT32, DT_BF16"
FLOATS_FP8 = "DT_FLOAT8_E5M2, DT_FLOAT8_E4M3FN, DT_FLOAT16, DT_BF16, DT_FLOAT32"

OLDEST = (
    REG_OP(
        "FlashAttentionScore",
        "experiment_ops_oldest",
        source="Ascend/torchair third_party/ascend/include/ops/op_proto/inc/experiment_ops.h:1585",
        note="atten_mask is a float tensor that is added, is_flash chooses the implementation",
    )
    .INPUT("query", FLOATS_OLD)
    .INPUT("key", FLOATS_OLD)
    .INPUT("value", FLOATS_OLD)
    .OPTIONAL_INPUT("real_shift", FLOATS_OLD)
    .OPTIONAL_INPUT("drop_mask", "DT_UINT1, DT_UINT8")
    .OPTIONAL_INPUT("padding_mask", FLOATS_OLD)
    .OPTIONAL_INPUT("atten_mask", FLOATS_OLD)
    .OUTPUT("softmax_max", "DT_FLOAT32")
    .OUTPUT("softmax_sum", "DT_FLOAT32")
    .OUTPUT("softmax_out", FLOATS_OLD)
    .OUTPUT("attention_out", FLOATS_OLD)
    .ATTR("scale_value", "Float", 1.0)
    .ATTR("keep_prob", "Float", 1.0)
    .ATTR("pre_tockens", "Int", 2147483647)
    .ATTR("next_tockens", "Int", 2147483647)
    .REQUIRED_ATTR("head_num", "Int")
    .REQUIRED_ATTR("is_flash", "Bool")
    .REQUIRED_ATTR("input_layout", "String")
)

RAW_OPS = (
    OLDEST.then(
        "torchair_raw_ops",
        source="Ascend/torchair python/torchair/_ge_concrete_graph/auto_generated_ge_raw_ops.py:18244",
        note="the source is Python and gives no types: they are those of seed_v2_cann8",
    )
    .DROP("is_flash")
    .INPUT("query", FLOATS)
    .INPUT("key", FLOATS)
    .INPUT("value", FLOATS)
    .OPTIONAL_INPUT("real_shift", FLOATS)
    .OPTIONAL_INPUT("drop_mask", "DT_UINT8")
    .OPTIONAL_INPUT("padding_mask", FLOATS)
    .OPTIONAL_INPUT("atten_mask", "DT_BOOL, DT_UINT8")
    .OPTIONAL_INPUT("prefix", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_qlen", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_kvlen", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("q_start_idx", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("kv_start_idx", "DT_INT64", value_depend="optional")
    .OUTPUT("softmax_out", FLOATS)
    .OUTPUT("attention_out", FLOATS)
    .ATTR("inner_precise", "Int", 1)
    .ATTR("sparse_mode", "Int", 0)
)

SEED_V2 = (
    RAW_OPS.then(
        "seed_v2_cann8", source="operator document FlashAttentionScoreV2, its REG_OP", cann="8.0"
    )
    .ATTR("inner_precise", "Int", 0)
    .ATTR("pse_type", "Int", 1)
)

OPDEF_2025_11 = (
    SEED_V2.then(
        "opdef_2025_11",
        source="hicann/ops-transformer attention/flash_attention_score/op_host/flash_attention_score_def.cpp",
        cann="8.5.0-alpha",
        note="the file registers no attributes and no header of that time is known: the new attributes and the "
        "types are those of the 2026 header",
    )
    .INPUT("query", FLOATS_FP8)
    .INPUT("key", FLOATS_FP8)
    .INPUT("value", FLOATS_FP8)
    .OPTIONAL_INPUT("d_scale_q", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_k", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_v", "DT_FLOAT32")
    .OPTIONAL_INPUT("query_rope", FLOATS_FP8)
    .OPTIONAL_INPUT("key_rope", FLOATS_FP8)
    .ATTR("seed", "Int", 0)
    .ATTR("offset", "Int", 0)
    .ATTR("out_dtype", "Int", 0)
    .ATTR("softmax_out_layout", "String", "")
)

OPDEF_2025_12 = OPDEF_2025_11.then(
    "opdef_2025_12",
    source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
    "attention/flash_attention_score/op_host/flash_attention_score_def.cpp",
    cann="8.5.0-beta.1",
).OPTIONAL_INPUT("sink", "DT_FLOAT32")

CONFLICT = (
    OPDEF_2025_11.then(
        "intermediate_proto_conflict",
        source="yuanfang-chen/ops-transformer@0f9bde41 "
        "attention/flash_attention_score/op_graph/flash_attention_score_proto.h",
        note="a header that put p_scale before the rope inputs: why inputs are bound by name, never by position",
    )
    .OPTIONAL_INPUT("p_scale", "DT_FLOAT32")
    .INPUT_ORDER(
        "query key value real_shift drop_mask padding_mask atten_mask prefix actual_seq_qlen actual_seq_kvlen "
        "q_start_idx kv_start_idx d_scale_q d_scale_k d_scale_v p_scale query_rope key_rope"
    )
)

PROTO_2026 = (
    OPDEF_2025_12.then(
        "proto_2026",
        source="recursion-ascend/ops-transformer@a093e954 "
        "attention/flash_attention_score/op_graph/flash_attention_score_proto.h; "
        "CANN operator document Ascendir_FlashAttentionScore.md; "
        "products: the operator definition of opdef_2025_12",
        cann="9.0",
    )
    .OPTIONAL_INPUT("p_scale", "DT_FLOAT32")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=value=padding_mask=softmax_out=attention_out  real_shift  atten_mask  query_rope=key_rope
        FLOAT16  FLOAT16  UINT8  FLOAT
        BF16     BF16     UINT8  FLOAT
        FLOAT16  FLOAT16  BOOL   FLOAT
        BF16     BF16     BOOL   FLOAT
        FLOAT16  FLOAT    UINT8  FLOAT
        BF16     FLOAT    UINT8  FLOAT
        FLOAT16  FLOAT    BOOL   FLOAT
        BF16     FLOAT    BOOL   FLOAT
        FLOAT    FLOAT    UINT8  FLOAT
        FLOAT    FLOAT    BOOL   FLOAT
        """,
        unchecked="query_rope key_rope",
        note="the rope inputs are registered as FLOAT here although the kernels take the type of query",
    )
    .PRODUCT(
        "ascend910_95",
        """
        query=key=value=query_rope=key_rope  real_shift  padding_mask=softmax_out=attention_out  atten_mask
        FLOAT16        FLOAT16  FLOAT16  UINT8
        BF16           BF16     BF16     UINT8
        FLOAT16        FLOAT16  FLOAT16  BOOL
        BF16           BF16     BF16     BOOL
        FLOAT16        FLOAT    FLOAT16  UINT8
        BF16           FLOAT    BF16     UINT8
        FLOAT16        FLOAT    FLOAT16  BOOL
        BF16           FLOAT    BF16     BOOL
        FLOAT          FLOAT    FLOAT    UINT8
        FLOAT          FLOAT    FLOAT    BOOL
        HIFLOAT8       FLOAT16  FLOAT16  UINT8
        HIFLOAT8       BF16     BF16     BOOL
        FLOAT8_E5M2    FLOAT16  FLOAT16  UINT8
        FLOAT8_E5M2    BF16     BF16     BOOL
        FLOAT8_E4M3FN  FLOAT16  FLOAT16  UINT8
        FLOAT8_E4M3FN  BF16     BF16     BOOL
        HIFLOAT8       FLOAT16  FLOAT16  BOOL
        HIFLOAT8       BF16     BF16     UINT8
        FLOAT8_E5M2    FLOAT16  FLOAT16  BOOL
        FLOAT8_E5M2    BF16     BF16     UINT8
        FLOAT8_E4M3FN  FLOAT16  FLOAT16  BOOL
        FLOAT8_E4M3FN  BF16     BF16     UINT8
        """,
        note="HIFLOAT8 is in the operator definition only, not in the header",
    )
)

rules = Rules(
    "FA",
    typed=(
        "query",
        "key",
        "value",
        "real_shift",
        "atten_mask",
        "drop_mask",
        "sink",
        "query_rope",
        "key_rope",
    ),
)


rules.shared(1, "types", partial(training.equal_types, names=("query", "key", "value")))
rules.shared(2, "layout", training.layout_and_ranks)
rules.shared(3, "heads", training.head_count)
rules.shared(4, "head_sizes", partial(training.head_sizes, wider="EXT-VALUE-WIDER"))
rules.shared(5, "head_groups", training.head_groups)
rules.shared(6, "sizes", partial(training.batch_and_sequence, prefix_batch=2 << 10))
rules.shared(7, "keep_prob", training.keep_probability)
rules.shared(8, "pse_type", partial(training.pse_type_known, shift="real_shift"))


@rules(9)
def shift_type(call: CheckedNode) -> Iterator[Diagnostic]:
    """real_shift has the type that pse_type requires. Slopes also have their shape, and are used
    only where they are allowed."""
    yield from training.bias_type(call, "real_shift")
    yield from training.inner_pse(call, "real_shift")


@rules(10)
def shift_shape(call: CheckedNode) -> Iterator[Diagnostic]:
    """In pse_type 0 and 1, real_shift has a shape that fits the scores."""
    if call.attr("pse_type") not in (0, 1):
        return
    if call.geometry.tnd:
        yield from training.packed_bias_shape(call, "real_shift", flat_rank_one=False)
    elif call.geometry.layout in LAYOUTS:
        yield from training.bias_shape(call, "real_shift", "EXT-SHIFT-BROADCAST", one_row=True)


@rules(11)
def mask(call: CheckedNode) -> Iterator[Diagnostic]:
    """atten_mask has the type, shape and content that sparse_mode requires. cpu_masked_bias needs a
    mask and a bias, and excludes cpu_masked_values. cpu_mask_batch needs a layout with a batch."""
    yield from training.mask_shape(call, "EXT-MASK-BROADCAST")
    yield from training.masked_bias(call, "real_shift")
    yield from training.packed_mask_batch(call)
    if (
        call.attrs.get("cpu_masked_bias") == "added"
        and call.attrs.get("cpu_masked_values") == "zero"
    ):
        yield Diagnostic(
            "cpu_masked_values", "cpu_masked_values is 'zero' beside cpu_masked_bias, expected ''"
        )


rules.shared(12, "sparse_mode", training.sparse_mode_known)


@rules(13)
def band(call: CheckedNode) -> Iterator[Diagnostic]:
    """Outside TND, the band overlaps the scores. In TND, the sparse modes limit the lengths,
    pre_tockens and next_tockens."""
    yield from bands.packed_band(call) if call.geometry.tnd else bands.band(call)


rules.shared(14, "prefix", training.prefix_lengths)
rules.shared(15, "dropout", training.dropout)


@rules(16)
def sink(call: CheckedNode) -> Iterator[Diagnostic]:
    """sink is float32 and has one number for each head of query. query is float16 or bfloat16."""
    tensor = call["sink"]
    if tensor is None:
        return
    yield from training.sink_shape(call)
    if tensor.shape is not None and len(tensor.shape) != 1:
        yield Diagnostic(
            "sink", f"sink has the shape {text(tensor.shape)}, expected {text((call.geometry.n1,))}"
        )
    if call.attrs.get("cpu_empty_rows") not in (None, "", "zero"):
        found = f"cpu_empty_rows is {call.attr('cpu_empty_rows')!r} beside a sink"
        yield Diagnostic(
            "cpu_empty_rows", f"{found}, which no mask excludes, expected '' or 'zero'"
        )
    if call.dtype("query") == "DT_FLOAT":
        message = "query is DT_FLOAT beside a sink, expected DT_FLOAT16 or DT_BF16"
        yield Diagnostic("query", message, "document", extension="EXT-SINK-FLOAT")


@rules(17)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """TND has cumulative lengths. Outside TND an extension allows actual_seq_kvlen to state one
    number of keys."""
    yield from training.packed_lengths(call)
    yield from training.key_length(call)


@rules(18)
def rope(call: CheckedNode) -> Iterator[Diagnostic]:
    """Both rope inputs are given, or neither, and they are shaped as query and key. They are
    documented for TND with D 128 and Dr 64."""
    faults = list(training.rope(call, "document", INVALID))
    yield from faults
    if faults or call["query_rope"] is None:
        return
    g, rope_tensor = call.geometry, call["query_rope"]
    width = rope_tensor.shape[-1] if rope_tensor and rope_tensor.shape else None
    if (
        not g.tnd
        or (isinstance(g.d, int) and g.d != 128)
        or (isinstance(width, int) and width != 64)
    ):
        found = f"{g.layout} with head size {size_text(g.d)} and rope size {size_text(width)}"
        message = f"query_rope is used in {found}, expected TND with 128 and 64"
        yield Diagnostic("query_rope", message, "document", extension="EXT-ROPE")


rules.shared(19, "starts", training.starts)


@rules(20)
def reserved(call: CheckedNode) -> Iterator[Diagnostic]:
    """padding_mask is reserved and must be absent."""
    if call["padding_mask"] is not None:
        yield Diagnostic("padding_mask", "padding_mask is given, expected none: it is reserved")


rules.values(21, "softmax_out_layout", ("", "same_as_input"))
rules.values(22, "out_dtype", (0, 1), wanted="0 (float16) or 1 (bfloat16)")


@rules(23)
def empty(call: CheckedNode) -> Iterator[Diagnostic]:
    """Tensors may be empty, but a packed sequence with queries also has keys."""
    g = call.geometry
    if g.tnd and g.q_lens and g.kv_lens:
        for index, (queries, keys) in enumerate(zip(g.q_lens, g.kv_lens, strict=True)):
            if queries and not keys:
                message = f"actual_seq_kvlen gives sequence {index} no key for {queries} queries, expected keys"
                yield Diagnostic(
                    "actual_seq_kvlen", message, "document", extension="EXT-EMPTY-SEQUENCES"
                )
                return


rules.shared(24, "softcap", partial(softcap, bias="real_shift"))


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """The statistics are float32, [B,N1,S1,8], or [T1,N1,8] in TND. attention_out has the shape of
    query with Dv in place of D. If some of query, key and value have batch 1, attention_out has the
    batch of the others. softmax_out is never computed; the operator declares it as [0,0,0,0]."""
    geometry = training_geometry(inputs, attrs, repeats=True)
    query = inputs["query"]
    statistics: Shape
    if geometry.tnd:
        statistics = (geometry.t1, geometry.n1, STATISTICS)
    else:
        statistics = (geometry.b, geometry.n1, geometry.s1, STATISTICS)
    out = query.shape
    if out is not None:
        axis = BATCH_AXIS.get(geometry.layout)
        front = (geometry.b if i == axis else size for i, size in enumerate(out[:-1]))
        out = (*front, _output_width(geometry, out[-1]))
    dtype = training_type(query, attrs)
    return {
        "softmax_max": TensorInfo("DT_FLOAT", statistics),
        "softmax_sum": TensorInfo("DT_FLOAT", statistics),
        "softmax_out": TensorInfo(dtype, (0, 0, 0, 0)),
        "attention_out": TensorInfo(dtype, out),
    }


def _output_width(geometry: Geometry, last: Dim) -> Dim:
    """The last dimension of attention_out, if that of query is `last`: Dv, or N1*Dv if the layout
    folds the heads into it."""
    if geometry.layout not in ("BSH", "SBH"):
        return geometry.dv
    if geometry.dv is not None and geometry.dv == geometry.d:
        return last
    if isinstance(geometry.dv, int) and isinstance(geometry.n1, int):
        return geometry.n1 * geometry.dv
    return None


OPERATOR = Operator(
    variants=(
        OLDEST.OP_END_FACTORY_REG(),
        RAW_OPS.OP_END_FACTORY_REG(),
        SEED_V2.OP_END_FACTORY_REG(),
        OPDEF_2025_11.OP_END_FACTORY_REG(),
        OPDEF_2025_12.OP_END_FACTORY_REG(),
        CONFLICT.OP_END_FACTORY_REG(),
        PROTO_2026.OP_END_FACTORY_REG(),
    ),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(
        extensions=(
            "EXT-MASK-BROADCAST",
            "EXT-BAND-MASK",
            "EXT-SHIFT-BROADCAST",
            "EXT-SHIFT-FLOAT",
            "EXT-BAND-OUTSIDE",
            "EXT-EMPTY-SEQUENCES",
            "EXT-EMPTY-ROWS",
            "EXT-NAN-ROWS",
            "EXT-MASK-VALUE",
            "EXT-SOFTCAP",
            "EXT-MASKED-BIAS",
            "EXT-MASKED-VALUES",
            "EXT-MASK-BATCH",
            "EXT-SINK-FLOAT",
            "EXT-ROPE",
            "EXT-VALUE-WIDER",
            "EXT-BATCH-BROADCAST",
            "EXT-KEY-LENGTH",
            "EXT-RANGE",
        ),
        required_output="attention_out",
    ),
)
