"""PromptFlashAttention: attention of a whole prompt (prefill).

Its constraints are PFA.1 to PFA.11. PFA.1 to PFA.6 are those of the project's constraints list,
drawn from the operator's document and tiling. PFA.5 (empty tensors) and PFA.6 (torch on 950) refuse
nothing, so they have no rules. PFA.7 states the further limits of 310P. PFA.8 to PFA.11 are the
checks that it shares with FusedInferAttentionScore, which uses PromptFlashAttention for queries of
more than one row.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa_compiler.op_registry.constraints import prefill
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules
from fa_compiler.op_registry.cpu_kernel import ABSENT, ANY, OF_QUERY, CpuKernel, TypeRow, type_row
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs
from fa_compiler.op_registry.shapes import prompt_outputs

HALFS = "DT_FLOAT16, DT_BF16"
HALFS_INT8 = "DT_FLOAT16, DT_BF16, DT_INT8"
OLD = "DT_FLOAT16, DT_FLOAT32"
MISTYPED = 214748647
"""The default of pre_tokens in every header, a typing error for 2147483647."""

FIRST = (
    REG_OP(
        "PromptFlashAttention",
        "first_public",
        source="first public operator header of CANN",
        note="the source gives the name padding_mask only: all else is as in experiment_ops",
    )
    .INPUT("query", OLD)
    .INPUT("key", OLD)
    .INPUT("value", OLD)
    .OPTIONAL_INPUT("padding_mask", OLD)
    .OPTIONAL_INPUT("atten_mask", OLD)
    .OPTIONAL_INPUT("actual_seq_lengths", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_lengths_kv", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("deq_scale1", "DT_UINT64")
    .OPTIONAL_INPUT("quant_scale1", "DT_FLOAT32")
    .OPTIONAL_INPUT("deq_scale2", "DT_UINT64")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT32")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT32")
    .OUTPUT("attention_out", OLD)
    .REQUIRED_ATTR("num_heads", "Int")
    .ATTR("scale_value", "Float", 1.0)
    .ATTR("pre_tokens", "Int", MISTYPED)
    .ATTR("next_tokens", "Int", 0)
    .ATTR("input_layout", "String", "BSH")
    .ATTR("num_key_value_heads", "Int", 1)
    .ATTR("sparse_mode", "Int", 0)
    .ATTR("inner_precise", "Int", 1)
)

EXPERIMENT = (
    FIRST.then("experiment_ops", source="Ascend/torchair experiment_ops.h:1893")
    .DROP("padding_mask")
    .OPTIONAL_INPUT("pse_shift", OLD)
    .INPUT_ORDER(
        "query key value pse_shift atten_mask actual_seq_lengths actual_seq_lengths_kv deq_scale1 quant_scale1 "
        "deq_scale2 quant_scale2 quant_offset2"
    )
)

CURRENT = (
    EXPERIMENT.then(
        "opdef_2025_12",
        source="yuanfang-chen/ops-transformer@b1498789 "
        "attention/prompt_flash_attention/op_graph/prompt_flash_attention_proto.h; "
        "cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/prompt_flash_attention/op_host/prompt_flash_attention_def.cpp",
        cann="8.5.0-beta.1",
    )
    .INPUT("query", HALFS_INT8)
    .INPUT("key", HALFS_INT8)
    .INPUT("value", HALFS_INT8)
    .OPTIONAL_INPUT("pse_shift", HALFS)
    .OPTIONAL_INPUT("atten_mask", "DT_FLOAT16, DT_BOOL, DT_INT8, DT_UINT8")
    .OPTIONAL_INPUT("deq_scale1", "DT_UINT64, DT_FLOAT32")
    .OPTIONAL_INPUT("deq_scale2", "DT_UINT64, DT_FLOAT32")
    .OPTIONAL_INPUT("quant_scale2", "DT_FLOAT32, DT_BF16")
    .OPTIONAL_INPUT("quant_offset2", "DT_FLOAT32, DT_BF16")
    .OUTPUT("attention_out", "DT_FLOAT16, DT_INT8, DT_BF16")
    .ATTR(
        "pre_tokens",
        "Int",
        MISTYPED,
        note="a typing error for 2147483647 that every header registers",
    )
    .ATTR("num_key_value_heads", "Int", 0)
    .PRODUCT(
        "ascend910b ascend910_93 mc62cm12a ascend910_95",
        """
        query=key=value  pse_shift  atten_mask  deq_scale1=deq_scale2  quant_scale2=quant_offset2  attention_out
        FLOAT16  FLOAT16  FLOAT16  UINT64  FLOAT  FLOAT16
        FLOAT16  FLOAT16  BOOL     UINT64  FLOAT  INT8
        BF16     BF16     BOOL     UINT64  FLOAT  BF16
        INT8     FLOAT16  BOOL     UINT64  FLOAT  FLOAT16
        INT8     FLOAT16  BOOL     UINT64  FLOAT  INT8
        BF16     BF16     INT8     UINT64  FLOAT  BF16
        INT8     FLOAT16  INT8     UINT64  FLOAT  FLOAT16
        INT8     FLOAT16  INT8     UINT64  FLOAT  INT8
        BF16     BF16     UINT8    UINT64  FLOAT  BF16
        INT8     FLOAT16  UINT8    UINT64  FLOAT  FLOAT16
        INT8     FLOAT16  UINT8    UINT64  FLOAT  INT8
        FLOAT16  FLOAT16  BOOL     UINT64  FLOAT  FLOAT16
        FLOAT16  FLOAT16  INT8     UINT64  FLOAT  FLOAT16
        FLOAT16  FLOAT16  UINT8    UINT64  FLOAT  FLOAT16
        FLOAT16  FLOAT16  FLOAT16  FLOAT   FLOAT  FLOAT16
        FLOAT16  FLOAT16  BOOL     FLOAT   FLOAT  INT8
        BF16     BF16     BOOL     FLOAT   FLOAT  BF16
        INT8     FLOAT16  BOOL     FLOAT   FLOAT  FLOAT16
        INT8     FLOAT16  BOOL     FLOAT   FLOAT  INT8
        BF16     BF16     INT8     FLOAT   FLOAT  BF16
        INT8     FLOAT16  INT8     FLOAT   FLOAT  FLOAT16
        INT8     FLOAT16  INT8     FLOAT   FLOAT  INT8
        BF16     BF16     UINT8    FLOAT   FLOAT  BF16
        INT8     FLOAT16  UINT8    FLOAT   FLOAT  FLOAT16
        INT8     FLOAT16  UINT8    FLOAT   FLOAT  INT8
        FLOAT16  FLOAT16  BOOL     FLOAT   FLOAT  FLOAT16
        FLOAT16  FLOAT16  INT8     FLOAT   FLOAT  FLOAT16
        FLOAT16  FLOAT16  UINT8    FLOAT   FLOAT  FLOAT16
        BF16     BF16     BOOL     UINT64  FLOAT  INT8
        BF16     BF16     BOOL     UINT64  BF16   INT8
        FLOAT16  FLOAT16  INT8     UINT64  FLOAT  INT8
        FLOAT16  FLOAT16  UINT8    FLOAT   FLOAT  INT8
        """,
    )
    .PRODUCT(
        "ascend310p",
        """
        query=key=value=pse_shift=attention_out  atten_mask  deq_scale1=deq_scale2  quant_scale2=quant_offset2
        FLOAT16  BOOL  UINT64  FLOAT
        """,
    )
)

rules = Rules(
    "PFA",
    typed=(
        "query",
        "key",
        "value",
        "pse_shift",
        "atten_mask",
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
    ),
    drops_empty=True,
)

LAYOUTS = ("BSH", "BSND", "BNSD", "BNSD_BSND")

_INT8_CHAIN = ("deq_scale1", "quant_scale1", "deq_scale2")


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key and value have one type: float16, bfloat16 or INT8, and on 310P float16."""
    query = call.dtype("query")
    if query is None:
        return
    if query not in (*prefill.HALFS, "DT_INT8"):
        extension = "EXT-PROMPT-FLOAT" if query == "DT_FLOAT" else None
        message = f"query is {query}, expected DT_FLOAT16, DT_BF16 or DT_INT8"
        yield Diagnostic("query", message, "aclnn", extension=extension)
    elif call.on("310P") and query != "DT_FLOAT16":
        yield Diagnostic("query", f"query is {query}, expected DT_FLOAT16 on 310P", "aclnn")
    for name in ("key", "value"):
        dtype = call.dtype(name)
        if dtype and dtype != query:
            yield Diagnostic(name, f"{name} is {dtype}, expected {query} as query", "aclnn")


rules.shared(2, "layout", partial(prefill.layout_and_ranks, layouts=LAYOUTS))
rules.shared(3, "mask", prefill.mask)


@rules(4)
def int8_results(call: CheckedNode) -> Iterator[Diagnostic]:
    """An INT8 result needs quant_scale2, and each of its rows has a key. An INT8 query needs its
    three scales."""
    out = call.outputs.get("attention_out")
    if out is not None and out.dtype == "DT_INT8" and call["quant_scale2"] is None:
        yield Diagnostic(
            "quant_scale2", "quant_scale2 is absent, expected with an INT8 attention_out"
        )
    if call.dtype("query") == "DT_INT8":
        for name in _INT8_CHAIN:
            if call[name] is None:
                yield Diagnostic(name, f"{name} is absent, expected with an INT8 query")
                break
    if call["quant_scale2"] is not None:
        yield from prefill.empty_rows(call)


@rules(7)
def on_310p(call: CheckedNode) -> Iterator[Diagnostic]:
    """310P takes sparse_mode 0 with a boolean mask. It takes no head groups, no bias and nothing
    quantised."""
    if not call.on("310P"):
        return
    for name, allowed in (
        ("sparse_mode", (0,)),
        ("pre_tokens", (UNLIMITED,)),
        ("next_tokens", (0, UNLIMITED)),
        ("num_key_value_heads", (0,)),
    ):
        value = call.attr(name)
        if value not in allowed:
            message = f"{name} is {value}, expected {' or '.join(map(str, allowed))} on 310P"
            if (name, value) == ("pre_tokens", MISTYPED):
                message += f"; the default of the prototype is a typing error, so give pre_tokens={UNLIMITED}"
            yield Diagnostic(name, message, "document")
    for name in ("pse_shift", *_INT8_CHAIN, "quant_scale2", "quant_offset2"):
        if call[name] is not None:
            yield Diagnostic(name, f"{name} is given, expected none on 310P", "document")
    if call.dtype("atten_mask") not in (None, "DT_BOOL"):
        yield Diagnostic(
            "atten_mask",
            f"atten_mask is {call.dtype('atten_mask')}, expected DT_BOOL on 310P",
            "document",
        )


rules.shared(8, "heads", prefill.heads)


@rules(9)
def sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """The sizes fit together and are in their ranges."""
    yield from prefill.same_sizes(call)
    yield from prefill.ranges(call)


rules.shared(10, "bias", prefill.bias)


@rules(11)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """actual_seq_lengths and actual_seq_lengths_kv have one value, or one for each batch entry."""
    for name in ("actual_seq_lengths", "actual_seq_lengths_kv"):
        yield from prefill.lengths(call, name)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """attention_out has the layout of the results, with Dv in place of D."""
    return {"attention_out": prompt_outputs(inputs, attrs)["attention_out"]}


def _type_rows() -> tuple[TypeRow, ...]:
    """Results are int8 if quant_scale2 is given, otherwise they have the type of query (float16 for
    int8)."""
    others = (ANY,) * (prefill.QUANT_SCALE2_PLACE - 1)
    return tuple(
        type_row((query, *others, scale, ANY), 12, out if scale == ABSENT else "int8")
        for scale in (ABSENT, ANY)
        for query, out in OF_QUERY.items()
    )


OPERATOR = Operator(
    variants=(
        FIRST.OP_END_FACTORY_REG(),
        EXPERIMENT.OP_END_FACTORY_REG(),
        CURRENT.OP_END_FACTORY_REG(),
    ),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(
        extensions=("EXT-PROMPT-FLOAT", "EXT-PROMPT-SIZES", "EXT-PROMPT-MODES"),
        required_output="attention_out",
        type_rows=_type_rows,
    ),
)
