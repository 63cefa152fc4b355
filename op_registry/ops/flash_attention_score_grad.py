"""FlashAttentionScoreGrad: the backward pass of FlashAttentionScore.

Its constraints are FAG.1 to FAG.20. FAG.19 says that the result is deterministic only if the
runtime is told so; no node can break it, so it has no rule. FAG.20 is about an attribute of the CPU
kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa_compiler.op_registry.constraints import bands, training
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, shape_is, text
from fa_compiler.op_registry.constraints.softcap import softcap
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import INVALID, NULLPTR, Diagnostic
from fa_compiler.op_registry.geometry import LAYOUTS, STATISTICS, Shape, differ, exceeds, product
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs
from fa_compiler.op_registry.shapes import training_geometry, training_type

FLOATS = "DT_FLOAT16, DT_BF16, DT_FLOAT32"
FLOATS_OLD = "DT_FLOAT16, DT_FLOAT32, DT_BF16"
FLOATS_FP8 = "DT_FLOAT8_E5M2, DT_FLOAT8_E4M3FN, DT_FLOAT16, DT_BF16, DT_FLOAT32"

OLDEST = (
    REG_OP(
        "FlashAttentionScoreGrad",
        "experiment_ops_oldest",
        source="Ascend/torchair third_party/ascend/include/ops/op_proto/inc/experiment_ops.h:1644",
    )
    .INPUT("query", FLOATS_OLD)
    .INPUT("key", FLOATS_OLD)
    .INPUT("value", FLOATS_OLD)
    .INPUT("dy", FLOATS_OLD)
    .OPTIONAL_INPUT("pse_shift", FLOATS_OLD)
    .OPTIONAL_INPUT("drop_mask", "DT_UINT8")
    .OPTIONAL_INPUT("padding_mask", FLOATS_OLD)
    .OPTIONAL_INPUT("atten_mask", FLOATS_OLD)
    .OPTIONAL_INPUT("softmax_max", "DT_FLOAT32")
    .OPTIONAL_INPUT("softmax_sum", "DT_FLOAT32")
    .OPTIONAL_INPUT("softmax_in", FLOATS_OLD)
    .OPTIONAL_INPUT("attention_in", FLOATS_OLD)
    .OUTPUT("dq", FLOATS_OLD)
    .OUTPUT("dk", FLOATS_OLD)
    .OUTPUT("dv", FLOATS_OLD)
    .OUTPUT("dpse", FLOATS_OLD)
    .ATTR("scale_value", "Float", 1.0)
    .ATTR("keep_prob", "Float", 1.0)
    .ATTR("pre_tockens", "Int", 65536)
    .ATTR("next_tockens", "Int", 65536)
    .REQUIRED_ATTR("head_num", "Int")
    .REQUIRED_ATTR("input_layout", "String")
)

RAW_OPS = (
    OLDEST.then(
        "torchair_raw_ops",
        source="Ascend/torchair python/torchair/_ge_concrete_graph/auto_generated_ge_raw_ops.py:18394",
        note="the source is Python and gives no types: they are those of cann_8x_header",
    )
    .INPUT("query", FLOATS)
    .INPUT("key", FLOATS)
    .INPUT("value", FLOATS)
    .INPUT("dy", FLOATS)
    .OPTIONAL_INPUT("pse_shift", FLOATS)
    .OPTIONAL_INPUT("padding_mask", FLOATS)
    .OPTIONAL_INPUT("atten_mask", "DT_BOOL, DT_UINT8")
    .OPTIONAL_INPUT("softmax_in", FLOATS)
    .OPTIONAL_INPUT("attention_in", FLOATS)
    .OPTIONAL_INPUT("prefix", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_qlen", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_kvlen", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("q_start_idx", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("kv_start_idx", "DT_INT64", value_depend="optional")
    .OUTPUT("dq", FLOATS)
    .OUTPUT("dk", FLOATS)
    .OUTPUT("dv", FLOATS)
    .OUTPUT("dpse", FLOATS)
    .ATTR("inner_precise", "Int", 1)
    .ATTR("sparse_mode", "Int", 0)
)

CANN_8X = (
    RAW_OPS.then("cann_8x_header", source="built-in operator header of CANN 8.x", cann="8.0")
    .ATTR("pre_tockens", "Int", 2147483647)
    .ATTR("next_tockens", "Int", 2147483647)
    .ATTR("inner_precise", "Int", 0)
    .ATTR("pse_type", "Int", 1)
)

OPDEF_2025_11 = (
    CANN_8X.then(
        "opdef_2025_11",
        source="hicann/ops-transformer attention/flash_attention_score_grad/op_host/flash_attention_score_grad_def.cpp",
        cann="8.5.0-alpha",
        note="the types are those of the 2026 header",
    )
    .INPUT("query", FLOATS_FP8)
    .INPUT("key", FLOATS_FP8)
    .INPUT("value", FLOATS_FP8)
    .INPUT("dy", FLOATS_FP8)
    .OPTIONAL_INPUT("attention_in", FLOATS_FP8)
    .OPTIONAL_INPUT("d_scale_q", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_k", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_v", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_dy", "DT_FLOAT32")
    .OPTIONAL_INPUT("d_scale_o", "DT_FLOAT32")
    .OPTIONAL_INPUT("query_rope", FLOATS_FP8)
    .OPTIONAL_INPUT("key_rope", FLOATS_FP8)
    .OUTPUT("dq_rope", FLOATS)
    .OUTPUT("dk_rope", FLOATS)
    .ATTR("seed", "Int", 0)
    .ATTR("offset", "Int", 0)
    .ATTR("out_dtype", "Int", 0)
    .ATTR("softmax_in_layout", "String", "")
)

OPDEF_2025_12 = (
    OPDEF_2025_11.then(
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/flash_attention_score_grad/op_host/flash_attention_score_grad_def.cpp",
        cann="8.5.0-beta.1",
        note="dq_rope, dk_rope and dsink are required outputs in the default block, optional on 910b and 910_93",
    )
    .OPTIONAL_INPUT("sink", "DT_FLOAT32")
    .OUTPUT("dsink", "DT_FLOAT32")
    .ATTR("seed", "Int", 2)
)

PROTO_2026 = (
    OPDEF_2025_12.then(
        "proto_2026",
        source="yuanfang-chen/ops-transformer@82a2f876 "
        "attention/flash_attention_score_grad/op_graph/flash_attention_score_grad_proto.h; "
        "CANN operator document Ascendir_FlashAttentionScoreGrad.md; "
        "products: the operator definition of opdef_2025_12",
        cann="9.0",
        note="backs aclnnFlashAttentionScoreGrad V1 to V3 and aclnnFlashAttentionUnpaddingScoreGrad V1 to V5",
    )
    .OPTIONAL_INPUT("ds_scale", "DT_FLOAT32")
    .OPTIONAL_INPUT("p_scale", "DT_FLOAT32")
    .ATTR("seed", "Int", 0, note="the operator definition of 2025-12 says 2, every header 0")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=value=dy=padding_mask=softmax_in=attention_in=query_rope=key_rope=dq=dk=dv=dpse=dq_rope=dk_rope \
        pse_shift  atten_mask
        FLOAT16  FLOAT16  UINT8
        BF16     BF16     UINT8
        FLOAT16  FLOAT16  BOOL
        BF16     BF16     BOOL
        FLOAT16  FLOAT    UINT8
        BF16     FLOAT    UINT8
        FLOAT16  FLOAT    BOOL
        BF16     FLOAT    BOOL
        FLOAT    FLOAT    BOOL
        """,
        note="float32 with a UINT8 atten_mask is not registered here",
    )
    .PRODUCT(
        "ascend910_95",
        """
        query=key=value=dy=query_rope=key_rope  pse_shift \
        padding_mask=softmax_in=attention_in=dq=dk=dv=dpse=dq_rope=dk_rope  atten_mask
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
    )
)

rules = Rules(
    "FAG",
    typed=(
        *(
            "query",
            "key",
            "value",
            "dy",
            "pse_shift",
            "atten_mask",
            "drop_mask",
            "attention_in",
            "sink",
        ),
        *("query_rope", "key_rope"),
    ),
)


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key, value and dy have one type, and so has the bias of pse_type 0 and 1."""
    yield from training.equal_types(call, ("query", "key", "value", "dy"))
    yield from training.bias_type(call, "pse_shift")


rules.shared(2, "layout", training.layout_and_ranks)
rules.shared(3, "heads", training.head_count)


@rules(4)
def ranks(call: CheckedNode) -> Iterator[Diagnostic]:
    """The tensors shaped like query have rank 3 or more. sink and dsink have rank 1."""
    shapes = {name: call[name] for name in ("dy", "attention_in")} | {
        name: call.outputs.get(name) for name in ("dq", "dk", "dv")
    }
    for name, tensor in shapes.items():
        if tensor is not None and tensor.shape is not None and len(tensor.shape) < 3:
            yield Diagnostic(
                name, f"{name} has rank {len(tensor.shape)}, expected 3 or more", "aclnn"
            )
    for name, tensor in (
        ("sink", call["sink"]),
        ("dsink", _meaningful_output(call, "dsink", "sink")),
    ):
        if tensor is not None and tensor.shape is not None and len(tensor.shape) != 1:
            yield Diagnostic(name, f"{name} has rank {len(tensor.shape)}, expected 1", "aclnn")


@rules(5)
def head_sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """query and key have the same D. It is at least Dv, at most 768 and not 0."""
    yield from training.head_sizes(call, "EXT-VALUE-WIDER")
    if call.geometry.d == 0:
        yield Diagnostic("query", "query has the head size 0, expected 1 to 768", "aclnn")


@rules(6)
def sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """N1 is a multiple of N2. query, key and value have one batch size. key and value differ in D
    only."""
    yield from training.head_groups(call)
    if call.geometry.n2 == 0:
        yield Diagnostic("key", "key has 0 heads, expected 1 or more", extension="EXT-GRAD-NO-KEYS")
    yield from training.batch_and_sequence(call, prefix_batch=1 << 10)


@rules(7)
def dropout(call: CheckedNode) -> Iterator[Diagnostic]:
    """keep_prob is a probability. drop_mask has a bit for each score, and is given if keep_prob is
    below 1."""
    yield from training.keep_probability(call)
    yield from training.dropout(call)


@rules(8)
def masking(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_mode is one of the modes of the layout. The mask, the band and the bias fit it.
    cpu_masked_bias needs a mask and a bias."""
    unknown = list(training.sparse_mode_known(call))
    yield from unknown
    if unknown:
        return
    yield from training.mask_shape(call, "EXT-MASK-BROADCAST")
    yield from training.masked_bias(call, "pse_shift")
    if call["atten_mask"] is None:
        return
    mode, g = call.attr("sparse_mode"), call.geometry
    if mode == 6 and call["query_rope"] is not None:
        message = "sparse_mode is 6 beside rope inputs, expected another"
        yield Diagnostic("sparse_mode", message, "aclnn", extension="EXT-GRAD-ROPE")
    if not g.tnd:
        yield from bands.band(call)
        return
    yield from bands.packed_band(call)
    pre, nxt = call.attr("pre_tockens"), call.attr("next_tockens")
    if mode in (0, 4, 7, 8) and pre + nxt <= 0:
        message = (
            f"pre_tockens {pre} and next_tockens {nxt} add up to {pre + nxt}, expected more than 0"
        )
        yield Diagnostic(
            "pre_tockens", f"{message} in sparse_mode {mode} of TND", extension="EXT-BAND-OUTSIDE"
        )
    if mode == 7 and call["pse_shift"] is not None:
        message = "pse_shift is given, expected none in sparse_mode 7"
        yield Diagnostic("pse_shift", message, extension="EXT-GRAD-BIAS-MODES")
    if (
        mode == 8
        and call["pse_shift"] is not None
        and g.q_lens
        and g.kv_lens
        and g.q_lens[1:] != g.kv_lens[1:]
    ):
        message = "pse_shift is given although lengths of query and key differ, expected equal ones in sparse_mode 8"
        yield Diagnostic("pse_shift", message, extension="EXT-GRAD-BIAS-MODES")


@rules(9)
def pse(call: CheckedNode) -> Iterator[Diagnostic]:
    """pse_type is known and fits pse_shift. Slopes have their type and shape, and the start indices
    fit 32 bits."""
    yield from training.pse_type_known(call, "pse_shift")
    yield from training.starts(call)
    yield from training.inner_pse(call, "pse_shift")


@rules(10)
def rope(call: CheckedNode) -> Iterator[Diagnostic]:
    """Both rope inputs are given, or neither, and they are shaped as query and key. The products
    require bfloat16, TND, a mask, no bias, no dropout and a D that is a multiple of 128."""
    faults = list(training.rope(call, "aclnn", NULLPTR))
    yield from faults
    if faults or call["query_rope"] is None:
        return
    for name, message, code in _device_rope(call):
        yield Diagnostic(name, message, "aclnn", code, extension="EXT-GRAD-ROPE")


def _device_rope(call: CheckedNode) -> Iterator[tuple[str, str, int]]:
    """The further limits of the products on a gradient with rope inputs. The CPU kernel has none of
    these limits."""
    g = call.geometry
    if call["atten_mask"] is None:
        yield "atten_mask", "atten_mask is absent beside rope inputs, expected one", NULLPTR
    for name in ("query", "key", "value", "query_rope", "key_rope"):
        dtype = call.dtype(name)
        if dtype not in (None, "DT_BF16"):
            yield name, f"{name} is {dtype} with rope inputs, expected DT_BF16", INVALID
    for name in ("pse_shift", "drop_mask"):
        if call[name] is not None:
            yield name, f"{name} is given beside rope inputs, expected none", INVALID
    if call.attr("keep_prob") != 1.0:
        yield (
            "keep_prob",
            f"keep_prob is {call.attr('keep_prob')} beside rope inputs, expected 1",
            INVALID,
        )
    if not g.tnd:
        yield (
            "input_layout",
            f"input_layout is {g.layout} beside rope inputs, expected TND",
            INVALID,
        )
    elif isinstance(g.d, int):
        yield from _device_rope_sizes(call, g.d)


def _device_rope_sizes(call: CheckedNode, d: int) -> Iterator[tuple[str, str, int]]:
    """In TND with rope inputs, D is a multiple of 128, and the rope part is no wider."""
    if d % 128:
        yield (
            "query",
            f"query has the head size {d} beside rope inputs, expected a multiple of 128",
            INVALID,
        )
    *_, width = call.shape("query_rope") or (None,)
    if exceeds(width, d):
        yield (
            "query_rope",
            f"query_rope has the size {width}, expected at most {d}, that of query",
            INVALID,
        )


@rules(11)
def statistics(call: CheckedNode) -> Iterator[Diagnostic]:
    """softmax_max and softmax_sum are given, in the layout that softmax_in_layout states."""
    g = call.geometry
    expected: Shape
    if not g.tnd:
        expected = (g.b, g.n1, g.s1, STATISTICS)
    elif call.attr("softmax_in_layout") == "same_as_input":
        expected = (g.n1, g.t1, STATISTICS)
    else:
        expected = (g.t1, g.n1, STATISTICS)
    for name in ("softmax_max", "softmax_sum"):
        tensor = call[name]
        if tensor is None:
            yield Diagnostic(name, f"{name} is absent, expected the one of the forward pass")
        elif g.layout in LAYOUTS:
            yield from shape_is(name, tensor, expected)


rules.values(12, "softmax_in_layout", ("", "same_as_input"), "aclnn")


@rules(13)
def forward_result(call: CheckedNode) -> Iterator[Diagnostic]:
    """attention_in is given and has the type and shape of dy. dy has the shape of query with Dv in
    place of D."""
    tensor, dy = call["attention_in"], call["dy"]
    if dy is not None:
        yield from _result_gradient(call, dy)
    if tensor is None:
        yield Diagnostic(
            "attention_in", "attention_in is absent, expected attention_out of the forward pass"
        )
        return
    if dy is None:
        return
    if tensor.dtype and dy.dtype and tensor.dtype != dy.dtype:
        yield Diagnostic(
            "attention_in", f"attention_in is {tensor.dtype}, expected {dy.dtype} as dy"
        )
    if (
        tensor.shape is not None
        and dy.shape is not None
        and len(dy.shape) >= 3 <= len(tensor.shape)
    ):
        yield from shape_is("attention_in", tensor, dy.shape)


def _result_gradient(call: CheckedNode, dy: TensorInfo) -> Iterator[Diagnostic]:
    """dy has the shape of query with Dv in place of D, as far as both have the rank of the
    layout."""
    g, query = call.geometry, call.shape("query")
    rank = LAYOUTS.get(g.layout)
    if rank is None or query is None or dy.shape is None or not len(dy.shape) == len(query) == rank:
        return
    width = product(g.n1, g.dv) if g.folded else g.dv
    yield from shape_is("dy", dy, (*query[:-1], width))


@rules(14)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """TND has cumulative lengths, and other layouts have none. A bias requires that no sequence is
    empty."""
    yield from training.packed_lengths(call)
    yield from training.key_length(call)
    g = call.geometry
    if call["pse_shift"] is not None and g.q_lens and g.kv_lens and 0 in (*g.q_lens, *g.kv_lens):
        message = "pse_shift is given although a sequence is empty, expected none"
        yield Diagnostic("pse_shift", message, "document", extension="EXT-EMPTY-SEQUENCES")


@rules(15)
def sink(call: CheckedNode) -> Iterator[Diagnostic]:
    """sink and dsink are float32 and have one number for each head."""
    yield from training.sink_shape(call)
    gradient = _meaningful_output(call, "dsink", "sink")
    if gradient is None:
        return
    if gradient.dtype and gradient.dtype != "DT_FLOAT":
        yield Diagnostic("dsink", f"dsink is {gradient.dtype}, expected DT_FLOAT")
    if gradient.shape is not None and len(gradient.shape) == 1:
        yield from shape_is("dsink", gradient, (call.geometry.n1,))


@rules(16)
def reserved(call: CheckedNode) -> Iterator[Diagnostic]:
    """padding_mask and softmax_in are reserved and must be absent. dpse has the shape of pse_shift,
    or is empty."""
    for name in ("padding_mask", "softmax_in"):
        if call[name] is not None:
            yield Diagnostic(name, f"{name} is given, expected none: it is reserved")
    gradient, shift = call.outputs.get("dpse"), call["pse_shift"]
    if gradient is not None and gradient.shape is not None and _is_not_empty(gradient.shape):
        if shift is None:
            yield Diagnostic(
                "dpse", f"dpse has the shape {text(gradient.shape)}, expected [0] without pse_shift"
            )
        elif shift.shape is not None:
            yield from shape_is("dpse", gradient, shift.shape)


# Only sparse_mode 5 and 6 read prefix. In other modes a prefix is legal: the sample of
# aclnnFlashAttentionUnpaddingScoreGradV5 gives one in mode 0.
rules.shared(17, "prefix", training.prefix_lengths)


@rules(18)
def bias_shape(call: CheckedNode) -> Iterator[Diagnostic]:
    """In pse_type 0 and 1, pse_shift has a shape that fits the scores, or is compressed ALiBi where
    that is legal."""
    if call.attr("pse_type") not in (0, 1):
        return
    g = call.geometry
    if g.tnd:
        # FAG.14 reports a bias with empty sequences.
        for fault in training.packed_bias_shape(call, "pse_shift", flat_rank_one=True):
            if fault.extension != "EXT-EMPTY-SEQUENCES":
                yield fault
    elif g.layout in LAYOUTS:
        yield from training.bias_shape(call, "pse_shift", "EXT-SHIFT-BROADCAST", one_row=False)


rules.shared(20, "softcap", partial(softcap, bias="pse_shift"))


def _is_not_empty(shape: Shape) -> bool:
    """Whether a shape is certainly not [0], the shape of the gradient of an absent input."""
    return len(shape) != 1 or differ(shape[0], 0)


def _meaningful_output(call: CheckedNode, output: str, source: str) -> TensorInfo | None:
    """The stated output if its input `source` is given, otherwise None. Without that input the
    output has no meaning."""
    return call.outputs.get(output) if call[source] is not None else None


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """Each gradient has the shape of its input. The gradient of an absent input is empty, [0]."""
    training_geometry(inputs, attrs)
    dtype = training_type(inputs["query"], attrs)

    def gradient(name: str, dtype: str) -> TensorInfo:
        return TensorInfo(dtype, inputs[name].shape if name in inputs else (0,))

    return {
        "dq": gradient("query", dtype),
        "dk": gradient("key", dtype),
        "dv": gradient("value", dtype),
        "dpse": gradient("pse_shift", dtype),
        "dq_rope": gradient("query_rope", dtype),
        "dk_rope": gradient("key_rope", dtype),
        "dsink": gradient("sink", "DT_FLOAT"),
    }


OPERATOR = Operator(
    variants=(
        OLDEST.OP_END_FACTORY_REG(),
        RAW_OPS.OP_END_FACTORY_REG(),
        CANN_8X.OP_END_FACTORY_REG(),
        OPDEF_2025_11.OP_END_FACTORY_REG(),
        OPDEF_2025_12.OP_END_FACTORY_REG(),
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
            "EXT-GRAD-NO-KEYS",
            "EXT-GRAD-BIAS-MODES",
            "EXT-GRAD-EMPTY-ROWS",
            "EXT-NAN-ROWS",
            "EXT-MASK-VALUE",
            "EXT-MASKED-BIAS",
            "EXT-SOFTCAP",
            "EXT-GRAD-ROPE",
            "EXT-VALUE-WIDER",
            "EXT-RANGE",
        ),
    ),
)
