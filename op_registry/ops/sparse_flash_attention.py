"""SparseFlashAttention: attention on the keys that a LightningIndexer selected.

Its constraints are SFA.1 to SFA.14. Their numbers and stages are those of the project's constraints
list, drawn from the operator's tiling and its document. The products are A2 and A3, and 950 with
the prototype of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, fixed_types
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import Shape, shape_of
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs
from fa_compiler.op_registry.sparse_sizes import KEY_LAYOUTS, PAGED, SparseSizes, checked_sizes

HALFS = "DT_FLOAT16, DT_BF16"

OPDEF_2025_12 = (
    REG_OP(
        "SparseFlashAttention",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/sparse_flash_attention/op_host/sparse_flash_attention_def.cpp; "
        "Ascend/torchair python/torchair/_ge_concrete_graph/ge_converter/custom/sparse_flash_attention.py",
        cann="8.5.0-beta.1",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("value", HALFS)
    .INPUT("sparse_indices", "DT_INT32")
    .OPTIONAL_INPUT("block_table", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_kv", "DT_INT32")
    .OPTIONAL_INPUT("query_rope", HALFS)
    .OPTIONAL_INPUT("key_rope", HALFS)
    .OUTPUT("attention_out", HALFS)
    .OUTPUT("softmax_max", "DT_FLOAT")
    .OUTPUT("softmax_sum", "DT_FLOAT")
    .REQUIRED_ATTR("scale_value", "Float")
    .ATTR("sparse_block_size", "Int", 1)
    .ATTR("layout_query", "String", "BSND")
    .ATTR("layout_kv", "String", "BSND")
    .ATTR("sparse_mode", "Int", 3)
    .ATTR("pre_tokens", "Int", 9223372036854775807)
    .ATTR("next_tokens", "Int", 9223372036854775807)
    .ATTR("attention_mode", "Int", 0, note="tiling accepts only 2: always write it")
    .ATTR("return_softmax_lse", "Bool", False)
)

PROTO_2026 = (
    OPDEF_2025_12.then(
        "proto_2026",
        source="hicann/ops-transformer@2784ddc6 "
        "attention/sparse_flash_attention/op_graph/sparse_flash_attention_proto.h; "
        "products: the operator definition of opdef_2025_12, and Ascend 950 as the constraints list says",
        cann="9.0",
        note="sinks is for Ascend 950 only; softmax_max and softmax_sum are required outputs in any case",
    )
    .OPTIONAL_INPUT("sinks", "DT_FLOAT")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=value=query_rope=key_rope=attention_out
        FLOAT16
        BF16
        """,
    )
    .PRODUCT(
        "ascend910_95 ascend950",
        note="combinations of types are not known; one half type, by SFA.1",
    )
)

rules = Rules(
    "SFA",
    typed=("query", "key", "value", "query_rope", "key_rope", "attention_out", "sparse_indices"),
)

_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_kv")


def _sizes(call: CheckedNode) -> SparseSizes | None:
    return sparse.sizes_of(call, "layout_query", "layout_kv")


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """query, key, value and the rope parts have one type."""
    names = ("query", "key", "value", "query_rope", "key_rope")
    yield from sparse.equal_halfs(call, names, ("attention_out",))


rules.shared(
    2,
    "layouts",
    partial(
        sparse.layouts,
        query="layout_query",
        key="layout_kv",
        rows=("query",),
        keys=("key", "value"),
    ),
)


@rules(3)
def heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """There is one key head. The number of query heads is 1 to 128 and a power of two (any number
    on 950)."""
    sizes = _sizes(call)
    if sizes is None:
        return
    yield from sparse.head_groups(call, sizes)
    yield from sparse.one_of(
        "query", "the head count", sizes.n1, range(1, 129) if call.on("950") else sparse.POWERS
    )


@rules(4)
def head_sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """D and Dv are 512. key and value differ in the head size only."""
    sizes = _sizes(call)
    if sizes is None:
        return
    yield from sparse.same_width(call, sizes)
    yield from sparse.shaped(call, "value", (*sizes.keys, sizes.n2, None), any_rank=True)
    value_width = shape_of(call["value"], len(sizes.keys) + 2)[-1]
    for name, width in (("query", sizes.d), ("value", value_width)):
        yield from sparse.one_of(name, "the head size", width, (512,))


rules.values(5, "attention_mode", (2,))


@rules(6)
def rope(call: CheckedNode) -> Iterator[Diagnostic]:
    """Both rope parts are given, or neither. Their head size is 64. Before the prototype of 2026
    both are needed."""
    sizes = _sizes(call)
    if sizes is not None:
        yield from sparse.rope(call, sizes, mandatory="sinks" not in call.spec.input_names)


rules.shared(7, "mode", partial(sparse.mode, wanted=sparse.INT64_MAX, stage="tiling"))


@rules(8)
def block_size(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_block_size is a power of two up to 128 (1 on 950). It divides the size of a page."""
    size = call.attr("sparse_block_size")
    allowed = (1,) if call.on("950") else sparse.POWERS
    if size not in allowed:
        message = f"sparse_block_size is {size}, expected {', '.join(map(str, allowed))}"
        yield Diagnostic(
            "sparse_block_size",
            message,
            extension=sparse.SIZES if 0 < size <= sparse.INT32_MAX else None,
        )
    sizes = _sizes(call)
    page = sizes.keys[1] if sizes is not None and call.attr("layout_kv") == PAGED else None
    if isinstance(page, int) and size > 0 and page % size:
        message = f"sparse_block_size is {size}, expected a divisor of {page}, the size of a page"
        yield Diagnostic("sparse_block_size", message, extension=sparse.SIZES)


@rules(9)
def indices(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_indices is INT32 and has one list for each query token and key head."""
    yield from fixed_types(call, {"sparse_indices": "DT_INT32"})
    sizes = _sizes(call)
    if sizes is not None:
        yield from sparse.indices(call, sizes, shared=True)


@rules(10)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """TND needs cumulative lengths of query. TND and PA_BSND need lengths of the keys. There is one
    length for each sequence."""
    sizes = _sizes(call)
    if sizes is None:
        return
    batch = sparse.batch_of(call, sizes, _LENGTHS[0])
    yield from sparse.lengths(call, sizes, _LENGTHS, "layout_kv", batch)


@rules(11)
def block_table(call: CheckedNode) -> Iterator[Diagnostic]:
    """block_table is given with PA_BSND only and has one row for each sequence."""
    sizes = _sizes(call)
    if sizes is not None:
        batch = sparse.batch_of(call, sizes, _LENGTHS[0])
        yield from (
            fault
            for fault in sparse.paging(call, sizes, "layout_kv", batch)
            if fault.tensor != "key"
        )


@rules(12)
def page_size(call: CheckedNode) -> Iterator[Diagnostic]:
    """The number of keys in a page is a multiple of 16 and at most 1024."""
    sizes = _sizes(call)
    if sizes is not None:
        yield from (
            fault
            for fault in sparse.paging(call, sizes, "layout_kv", None)
            if fault.tensor == "key"
        )


@rules(13)
def statistics(call: CheckedNode) -> Iterator[Diagnostic]:
    """return_softmax_lse is not set with PA_BSND."""
    if call.attr("return_softmax_lse") and call.attr("layout_kv") == PAGED:
        yield Diagnostic(
            "return_softmax_lse", f"return_softmax_lse is set with {PAGED}, expected it unset"
        )


@rules(14)
def not_empty(call: CheckedNode) -> Iterator[Diagnostic]:
    """query is not empty. sinks has one number for each head, and among the products only 950 takes
    it."""
    sizes = _sizes(call)
    if sizes is None:
        return
    if 0 in (*sizes.queries, sizes.n1, sizes.d):
        yield Diagnostic(
            "query",
            "query is empty, expected at least one token, head and column",
            extension=sparse.SIZES,
        )
    yield from sparse.sinks(call, sizes)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """attention_out has the shape of query with the head size of value. The statistics are empty,
    [0], without return_softmax_lse."""
    query, layout = inputs["query"], attrs["layout_query"]
    sizes = checked_sizes(inputs, layout, attrs["layout_kv"], ("query",), ("key", "value"))
    width = shape_of(inputs["value"], KEY_LAYOUTS[attrs["layout_kv"]])[-1]
    out = None if query.shape is None else (*query.shape[:-1], width)
    statistics: Shape = sizes.statistics if attrs["return_softmax_lse"] else (0,)
    return {
        "attention_out": TensorInfo(query.dtype, out),
        "softmax_max": TensorInfo("DT_FLOAT", statistics),
        "softmax_sum": TensorInfo("DT_FLOAT", statistics),
    }


OPERATOR = Operator(
    variants=(OPDEF_2025_12.OP_END_FACTORY_REG(), PROTO_2026.OP_END_FACTORY_REG()),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(
        extensions=(
            "EXT-SPARSE-FLOAT",
            "EXT-SPARSE-SIZES",
            "EXT-SPARSE-HEADS",
            "EXT-SPARSE-EMPTY-ROWS",
        )
    ),
)
