"""LightningIndexerGrad: the backward pass of the index scores.

The prototype spells attribute names in camelCase, and misspells the last one. The constraints are
LIG.1 to LIG.7, in the order of the project's list. The products are A2 and A3.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, fixed_types
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import differ
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs
from fa_compiler.op_registry.sparse_sizes import checked_sizes

HALFS = "DT_BF16, DT_FLOAT16"

OPDEF = (
    REG_OP(
        "LightningIndexerGrad",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        "attention/lightning_indexer_grad/op_host/lightning_indexer_grad_def.cpp",
        cann="8.5.0-beta.1",
        note="attribute names are camelCase and determinstic is misspelled in the registration",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("dy", HALFS)
    .INPUT("sparse_indices", "DT_INT32")
    .INPUT("weights", HALFS)
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT32")
    .OPTIONAL_INPUT("actual_seq_lengths_key", "DT_INT32")
    .OUTPUT("dq", HALFS)
    .OUTPUT("dk", HALFS)
    .OUTPUT("dweights", HALFS)
    .REQUIRED_ATTR("headNum", "Int")
    .ATTR("layout", "String", "BSND")
    .ATTR("sparseMode", "Int", 3)
    .ATTR("preTokens", "Int", 65536)
    .ATTR("nextTokens", "Int", 65536)
    .ATTR("determinstic", "Bool", False)
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=dy=weights=dq=dk=dweights
        BF16
        FLOAT16
        """,
    )
)

_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
MAX_B = 1024

rules = Rules(
    "LIG", typed=("query", "key", "dy", "weights", "dq", "dk", "dweights", "sparse_indices")
)


@rules(1)
def layout(call: CheckedNode) -> Iterator[Diagnostic]:
    """The layout is known, and types and ranks fit."""
    yield from sparse.equal_halfs(call, ("query", "key", "dy", "weights"), ("dq", "dk", "dweights"))
    yield from fixed_types(call, {"sparse_indices": "DT_INT32"})
    yield from sparse.layouts(call, "layout", "layout", ("query",), ("key",))


@rules(2)
def head_size(call: CheckedNode) -> Iterator[Diagnostic]:
    """D is 128."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    yield from sparse.same_width(call, sizes)
    yield from sparse.one_of("query", "the head size", sizes.d, (128,))


@rules(3)
def heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """There are 64 index heads, as headNum states, and one key head."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    yield from sparse.head_groups(call, sizes, index=True)
    if differ(call.attr("headNum"), sizes.n1):
        yield Diagnostic(
            "headNum",
            f"headNum is {call.attr('headNum')}, expected {sizes.n1}, the head count of query",
        )
    yield from sparse.shaped(call, "weights", (*sizes.queries, sizes.n1))
    yield from sparse.one_of("query", "the head count", sizes.n1, (64,))


@rules(4)
def selected(call: CheckedNode) -> Iterator[Diagnostic]:
    """Each list has 2048 entries. dy has one number for each entry; the document wrongly gives it
    the shape of query."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    yield from sparse.indices(call, sizes)
    count = sparse.selected_count(call)
    yield from sparse.shaped(call, "dy", (*sizes.queries, count))
    yield from sparse.one_of("sparse_indices", "the list length", count, (2048,))


@rules(5)
def key_length(call: CheckedNode) -> Iterator[Diagnostic]:
    """In BSND, S2 is at least K, and there are 1 to 1024 sequences."""
    sizes, count = sparse.sizes_of(call), sparse.selected_count(call)
    if sizes is None or call.attr("layout") != "BSND":
        return
    length = sizes.keys[1]
    if isinstance(length, int) and isinstance(count, int) and length < count:
        message = f"key has the sequence length {length}, expected at least {count}, the entries of each list"
        yield Diagnostic("key", message, extension=sparse.SIZES)
    yield from sparse.one_of("query", sparse.BATCH, sizes.queries[0], range(1, MAX_B + 1))


rules.values(6, "sparseMode", (0, 3))


@rules(7)
def lengths(call: CheckedNode) -> Iterator[Diagnostic]:
    """TND has cumulative lengths, BSND has none."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    if call.attr("layout") == "TND":
        yield from sparse.packed_lengths(call, sizes, _LENGTHS, most=MAX_B)
        return
    for name in _LENGTHS:
        if call[name] is not None:
            yield Diagnostic(
                name, f"{name} is given although layout is {call.attr('layout')}, expected none"
            )


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """Each gradient has the type and shape of its input."""
    checked_sizes(inputs, attrs["layout"], attrs["layout"], ("query",), ("key",))
    return {
        gradient: TensorInfo(inputs[name].dtype, inputs[name].shape)
        if name in inputs
        else TensorInfo("")
        for gradient, name in (("dq", "query"), ("dk", "key"), ("dweights", "weights"))
    }


OPERATOR = Operator(
    variants=(OPDEF.OP_END_FACTORY_REG(),),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(extensions=("EXT-SPARSE-FLOAT", "EXT-SPARSE-SIZES")),
)
