"""SparseFlashAttentionGrad: the backward pass of SparseFlashAttention.

Two official orders of its inputs exist. The default variant is that of 2025-12, which the operator
document follows. The reordered variant of 2026 is chosen by name.

The constraints are SFAG.1 to SFAG.11, for both orders. SFAG.12 of the project's list records that
the document contradicts itself about determinism; no node can break it. The sources do not say
which products lack `sinks` of 2026, nor whether the lists of the variant of 2026 may have a length
other than 2048.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, fixed_types
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import shape_of
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs
from fa_compiler.op_registry.sparse_sizes import checked_sizes

HALFS = "DT_BF16, DT_FLOAT16"

OPDEF_2025_12 = (
    REG_OP(
        "SparseFlashAttentionGrad",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/sparse_flash_attention_grad/op_host/sparse_flash_attention_grad_def.cpp; "
        "aclnn document aclnnSparseFlashAttentionGrad",
        cann="8.5.0-beta.1",
        note="the aclnn document gives sparse_indices as INT64 and its sample builds INT64 lengths; both are INT32",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("value", HALFS)
    .INPUT("sparse_indices", "DT_INT32")
    .INPUT("d_out", HALFS)
    .INPUT("out", HALFS)
    .INPUT("softmax_max", "DT_FLOAT")
    .INPUT("softmax_sum", "DT_FLOAT")
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_kv", "DT_INT32")
    .OPTIONAL_INPUT("query_rope", HALFS)
    .OPTIONAL_INPUT("key_rope", HALFS)
    .OUTPUT("d_query", HALFS)
    .OUTPUT("d_key", HALFS)
    .OUTPUT("d_value", HALFS)
    .OPTIONAL_OUTPUT("d_query_rope", HALFS)
    .OPTIONAL_OUTPUT("d_key_rope", HALFS)
    .REQUIRED_ATTR("scale_value", "Float")
    .REQUIRED_ATTR("sparse_block_size", "Int")
    .ATTR("layout", "String", "BSND")
    .ATTR("sparse_mode", "Int", 3)
    .ATTR("pre_tokens", "Int", 2147483647)
    .ATTR("next_tokens", "Int", 2147483647)
    .ATTR("deterministic", "Bool", False)
)

REORDERED_2026 = (
    OPDEF_2025_12.then(
        "opdef_2026_reordered",
        source="recursion-ascend/ops-transformer@a093e954 "
        "attention/sparse_flash_attention_grad/op_host/sparse_flash_attention_grad_def.cpp",
        note="on Ascend 950, too; value became optional (then V is key without its rope part, and d_key is the "
        "gradient of both) and moved back; positions differ",
    )
    .OPTIONAL_INPUT("sinks", "DT_FLOAT")
    .OPTIONAL_INPUT("value", HALFS)
    .INPUT_ORDER(
        "query key sparse_indices d_out out softmax_max softmax_sum sinks value actual_seq_lengths_query "
        "actual_seq_lengths_kv query_rope key_rope"
    )
    .OPTIONAL_OUTPUT("d_value", HALFS)
    .OPTIONAL_OUTPUT("d_sinks", "DT_FLOAT")
    .ATTR("sparse_block_size", "Int", 1)
)

PRODUCTS = "ascend910b ascend910_93"
TYPES = """
    query=key=value=d_out=out=query_rope=key_rope=d_query=d_key=d_value=d_query_rope=d_key_rope
    BF16
    FLOAT16
    """

_HALFS = ("query", "key", "value", "d_out", "out", "query_rope", "key_rope")
_GRADIENTS = ("d_query", "d_key", "d_value", "d_query_rope", "d_key_rope")
_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_kv")

rules = Rules(
    "SFAG", typed=(*_HALFS, *_GRADIENTS, "sparse_indices", "softmax_max", "softmax_sum", *_LENGTHS)
)


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """The attention tensors and their gradients have one type. The statistics are FLOAT. The
    indices and lengths are INT32 (the document says INT64)."""
    yield from sparse.equal_halfs(call, _HALFS, _GRADIENTS)
    fixed = {"sparse_indices": "DT_INT32", "softmax_max": "DT_FLOAT", "softmax_sum": "DT_FLOAT"}
    yield from fixed_types(call, fixed | dict.fromkeys(_LENGTHS, "DT_INT32"))


rules.shared(
    2,
    "layout",
    partial(
        sparse.layouts,
        query="layout",
        key="layout",
        rows=("query", "d_out", "out"),
        keys=("key", "value"),
    ),
)


@rules(3)
def heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """There is one key head. The number of query heads is a power of two from 1 to 128. sinks has
    one number for each of them."""
    sizes = sparse.sizes_of(call)
    if sizes is not None:
        yield from sparse.head_groups(call, sizes)
        yield from sparse.shaped(call, "sinks", (sizes.n1,))
        yield from sparse.one_of("query", "the head count", sizes.n1, sparse.POWERS)


@rules(4)
def head_sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """D and Dv are 512, and the rope parts have size 64 or are absent. d_out and out have the shape
    that the forward pass gives."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    yield from sparse.same_width(call, sizes)
    yield from sparse.shaped(call, "value", (*sizes.keys, sizes.n2, None), any_rank=True)
    # In the prototype of 2026 value may be absent. Then key is also the value.
    value_width = (
        sizes.d if call["value"] is None else shape_of(call["value"], len(sizes.keys) + 2)[-1]
    )
    for name in ("d_out", "out"):
        yield from sparse.shaped(call, name, (*sizes.queries, sizes.n1, value_width), any_rank=True)
    yield from sparse.one_of("query", "the head size", sizes.d, (512,))
    if call["value"] is not None:
        yield from sparse.one_of("value", "the head size", value_width, (512,))
    yield from sparse.rope(call, sizes, mandatory=False)


@rules(5)
def selected(call: CheckedNode) -> Iterator[Diagnostic]:
    """Each list of sparse_indices has 2048 entries."""
    sizes = sparse.sizes_of(call)
    if sizes is not None:
        yield from sparse.indices(call, sizes, shared=True)
    yield from sparse.one_of(
        "sparse_indices", "the list length", sparse.selected_count(call), (2048,)
    )


@rules(6)
def block_size(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_block_size is 1, 8, 16, 32 or 64."""
    size = call.attr("sparse_block_size")
    if size not in (1, 8, 16, 32, 64):
        message = f"sparse_block_size is {size}, expected 1, 8, 16, 32 or 64"
        extension = sparse.SIZES if 0 < size <= sparse.INT32_MAX else None
        yield Diagnostic("sparse_block_size", message, "document", extension=extension)


rules.shared(7, "mode", partial(sparse.mode, wanted=sparse.INT32_MAX, stage="document"))


@rules(8)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """TND has cumulative lengths. Batch size and sequence length are in range."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    if call.attr("layout") == "TND":
        yield from sparse.packed_lengths(call, sizes, _LENGTHS, most=sparse.MAX_B)
    yield from sparse.batch_and_length(sizes, call.attr("layout"))


rules.shared(9, "statistics", sparse.statistics)


@rules(10)
def gradients(call: CheckedNode) -> Iterator[Diagnostic]:
    """An optional gradient is given only if its input is given: this holds for the rope parts, and
    since 2026 for value and sinks."""
    for name in ("query_rope", "key_rope", "value", "sinks"):
        output = f"d_{name}"
        if output not in call.spec.output_names:
            continue
        stated = call.outputs.get(output)
        if stated is not None and call[name] is None and stated.shape != (0,):
            yield Diagnostic(output, f"{output} is given without {name}, expected none", "aclnn")


@rules(11)
def not_empty(call: CheckedNode) -> Iterator[Diagnostic]:
    """query has heads and columns. It may have no tokens, because the operator then returns at
    once."""
    sizes = sparse.sizes_of(call)
    if sizes is not None and 0 in (sizes.n1, sizes.d):
        yield Diagnostic("query", "query has no heads or columns, expected at least one of each")


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """Each gradient has the shape of its input. The gradient of an absent input is empty, [0]."""
    checked_sizes(inputs, attrs["layout"], attrs["layout"], ("query",), ("key", "value"))
    names = {
        "d_query": "query",
        "d_key": "key",
        "d_value": "value",
        "d_query_rope": "query_rope",
        "d_key_rope": "key_rope",
    }
    dtype = inputs["query"].dtype
    found = {
        name: TensorInfo(dtype, inputs[of].shape if of in inputs else (0,))
        for name, of in names.items()
    }
    if "sinks" in inputs:
        found["d_sinks"] = TensorInfo("DT_FLOAT", inputs["sinks"].shape)
    return found


OPERATOR = Operator(
    variants=(
        REORDERED_2026.PRODUCT(PRODUCTS, TYPES)
        .PRODUCT(
            "ascend910_95 ascend950",
            note="combinations of types are not known; one half type, by SFAG.1",
        )
        .OP_END_FACTORY_REG(),
        OPDEF_2025_12.PRODUCT(PRODUCTS, TYPES).OP_END_FACTORY_REG(),
    ),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(
        extensions=("EXT-SPARSE-FLOAT", "EXT-SPARSE-SIZES", "EXT-SPARSE-HEADS"),
        reordered=("opdef_2026_reordered",),
    ),
)
