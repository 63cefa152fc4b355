"""LightningIndexer: scores every key with the index heads and keeps the best ones.

Its constraints are LI.1 to LI.7. The products are A2 and A3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, fixed_types
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs
from fa_compiler.op_registry.sparse_sizes import PAGED, SparseSizes, checked_sizes

HALFS = "DT_BF16, DT_FLOAT16"
PRODUCTS = "ascend910b ascend910_93"
TYPES = """
    query=key=weights=sparse_values
    BF16
    FLOAT16
    """

OPDEF = (
    REG_OP(
        "LightningIndexer",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/lightning_indexer/op_host/lightning_indexer_def.cpp; "
        "Ascend/torchair python/torchair/_ge_concrete_graph/ge_converter/custom/lightning_indexer.py",
        cann="8.5.0-beta.1",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("weights", HALFS)
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_key", "DT_INT32")
    .OPTIONAL_INPUT("block_table", "DT_INT32")
    .OUTPUT("sparse_indices", "DT_INT32")
    .OUTPUT("sparse_values", HALFS)
    .ATTR("layout_query", "String", "BSND")
    .ATTR("layout_key", "String", "BSND")
    .ATTR("sparse_count", "Int", 2048)
    .ATTR("sparse_mode", "Int", 3)
    .ATTR("pre_tokens", "Int", 9223372036854775807)
    .ATTR("next_tokens", "Int", 9223372036854775807)
    .ATTR("return_values", "Bool", False)
    .PRODUCT(PRODUCTS, TYPES)
)

ASCEND950 = (
    OPDEF.then(
        "ascend950_spec",
        source="public CANN operator document (Ascend950 operator specification) LightningIndexer.md",
        note="FLOAT weights go with fp16 or bf16 queries, on Ascend950 only",
    )
    .INPUT("weights", f"{HALFS}, DT_FLOAT")
    .PRODUCT(PRODUCTS, TYPES)
)

_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")

rules = Rules("LI", typed=("query", "key", "weights", "sparse_values", *_LENGTHS))


def _sizes(call: CheckedNode) -> SparseSizes | None:
    return sparse.sizes_of(call, "layout_query", "layout_key")


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """query and key have one type. The weights have this type or, in the prototype of Ascend 950,
    FLOAT."""
    yield from sparse.equal_halfs(call, ("query", "key"), ("sparse_values",))
    yield from sparse.weights(call, "weights")


@rules(2)
def sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """There are 64 index heads of size 128, one key head, and one weight for each token and index
    head."""
    sizes = _sizes(call)
    if sizes is None:
        return
    yield from sparse.head_groups(call, sizes, index=True)
    yield from sparse.same_width(call, sizes)
    yield from sparse.shaped(call, "weights", (*sizes.queries, sizes.n1))
    yield from sparse.one_of("query", "the head count", sizes.n1, (64,))
    yield from sparse.one_of("query", "the head size", sizes.d, (128,))


rules.shared(
    3,
    "layouts",
    partial(sparse.layouts, query="layout_query", key="layout_key", rows=("query",), keys=("key",)),
)


@rules(4)
def count(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_count is 1 to 2048."""
    value = call.attr("sparse_count")
    if not 1 <= value <= 2048:
        message = f"sparse_count is {value}, expected 1 to 2048"
        yield Diagnostic(
            "sparse_count",
            message,
            extension=sparse.SIZES if 0 < value <= sparse.INT32_MAX else None,
        )


rules.shared(5, "mode", partial(sparse.mode, wanted=sparse.INT64_MAX, stage="tiling"))


@rules(6)
def values(call: CheckedNode) -> Iterator[Diagnostic]:
    """return_values is not set with PA_BSND."""
    if call.attr("return_values") and call.attr("layout_key") == PAGED:
        yield Diagnostic("return_values", f"return_values is set with {PAGED}, expected it unset")


@rules(7)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """The lengths are INT32, and cumulative in TND. block_table is given with PA_BSND only."""
    yield from fixed_types(call, dict.fromkeys(_LENGTHS, "DT_INT32"))
    sizes = _sizes(call)
    if sizes is None:
        return
    batch = sparse.batch_of(call, sizes, _LENGTHS[0])
    yield from sparse.paging(call, sizes, "layout_key", batch)
    yield from sparse.lengths(call, sizes, _LENGTHS, "layout_key", batch)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """sparse_indices has sparse_count entries for each query token. sparse_values has their scores,
    or is empty, [0], without return_values."""
    sizes = checked_sizes(inputs, attrs["layout_query"], attrs["layout_key"], ("query",), ("key",))
    selected = (*sizes.queries, sizes.n2, attrs["sparse_count"])
    return {
        "sparse_indices": TensorInfo("DT_INT32", selected),
        "sparse_values": TensorInfo(
            inputs["query"].dtype, selected if attrs["return_values"] else (0,)
        ),
    }


OPERATOR = Operator(
    variants=(OPDEF.OP_END_FACTORY_REG(), ASCEND950.OP_END_FACTORY_REG()),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(extensions=("EXT-SPARSE-FLOAT", "EXT-SPARSE-SIZES", "EXT-INDEX-NAN")),
)
