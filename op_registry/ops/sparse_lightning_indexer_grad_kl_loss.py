"""SparseLightningIndexerGradKLLoss: the KL loss of the index scores and its gradients.

Its constraints are KL.1 to KL.12. KL.13 and KL.14 of the project's list say that `deterministic`
has no effect and that an empty query returns at once; no node can break them. The products are A2
and A3.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Rules, fixed_types, number, one_of
from fa_compiler.op_registry.cpu_kernel import CpuKernel
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import differ, lengths, shape_of
from fa_compiler.op_registry.macros import REG_OP
from fa_compiler.op_registry.node import TensorInfo
from fa_compiler.op_registry.operator import Attrs, Inputs, Operator, Outputs
from fa_compiler.op_registry.sparse_sizes import SparseSizes, checked_sizes

HALFS = "DT_FLOAT16, DT_BF16"
PATH = "attention/sparse_lightning_indexer_grad_kl_loss"

OPDEF_2025_12 = (
    REG_OP(
        "SparseLightningIndexerGradKLLoss",
        "opdef_2025_12",
        source="cannmirror/ops-transformer 05c401f9 (2025-12-31) "
        f"{PATH}/op_host/sparse_lightning_indexer_grad_kl_loss_def.cpp; "
        "aclnn document aclnnSparseLightningIndexerGradKLLoss",
        cann="8.5.0-beta.1",
        note="the names are weight and d_weight, not weights and dWeights as the aclnn document writes",
    )
    .INPUT("query", HALFS)
    .INPUT("key", HALFS)
    .INPUT("query_index", HALFS)
    .INPUT("key_index", HALFS)
    .INPUT("weight", HALFS)
    .INPUT("sparse_indices", "DT_INT32")
    .INPUT("softmax_max", "DT_FLOAT")
    .INPUT("softmax_sum", "DT_FLOAT")
    .OPTIONAL_INPUT("query_rope", HALFS)
    .OPTIONAL_INPUT("key_rope", HALFS)
    .OPTIONAL_INPUT("actual_seq_lengths_query", "DT_INT64", value_depend="optional")
    .OPTIONAL_INPUT("actual_seq_lengths_key", "DT_INT64", value_depend="optional")
    .OUTPUT("d_query_index", HALFS)
    .OUTPUT("d_key_index", HALFS)
    .OUTPUT("d_weight", HALFS)
    .OUTPUT("loss", "DT_FLOAT")
    .REQUIRED_ATTR("scale_value", "Float")
    .ATTR("layout", "String", "TND")
    .ATTR("sparse_mode", "Int", 3)
    .ATTR("pre_tokens", "Int", 2147483647)
    .ATTR("next_tokens", "Int", 2147483647)
    .ATTR("deterministic", "Bool", False)
)

OPDEF_2026 = (
    OPDEF_2025_12.then(
        "opdef_2026",
        source="recursion-ascend/ops-transformer@a093e954 "
        f"{PATH}/op_host/sparse_lightning_indexer_grad_kl_loss_def.cpp; "
        "products: the operator definition of opdef_2025_12",
        cann="9.0",
        note="sinks is in the ascend950 block only; FLOAT weights go with fp16 or bf16 queries",
    )
    .INPUT("weight", f"{HALFS}, DT_FLOAT")
    .OPTIONAL_INPUT("sinks", "DT_FLOAT")
    .OUTPUT("d_weight", f"{HALFS}, DT_FLOAT")
    .ATTR("layout", "String", "BSND", note="TND in 2025-12: always write it")
    .PRODUCT(
        "ascend910b ascend910_93",
        """
        query=key=query_index=key_index=weight=query_rope=key_rope=d_query_index=d_key_index=d_weight
        FLOAT16
        BF16
        """,
    )
)

_HALFS = ("query", "key", "query_index", "key_index", "query_rope", "key_rope")
_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
_FIXED = {
    "sparse_indices": "DT_INT32",
    "softmax_max": "DT_FLOAT",
    "softmax_sum": "DT_FLOAT",
    **dict.fromkeys(_LENGTHS, "DT_INT64"),
}

rules = Rules("KL", typed=(*_HALFS, *_FIXED, "weight", "d_query_index", "d_key_index", "d_weight"))


def _index_sizes(call: CheckedNode) -> SparseSizes | None:
    return sparse.sizes_of(call, names=("query_index", "key_index"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Diagnostic]:
    """The tensors of attention and indexer have one type. The weights have this type or, since
    2026, FLOAT."""
    yield from sparse.equal_halfs(call, _HALFS, ("d_query_index", "d_key_index"))
    yield from sparse.weights(call, "weight", "d_weight")


rules.shared(2, "fixed_types", partial(fixed_types, types=_FIXED))
rules.shared(
    3,
    "layout",
    partial(
        sparse.layouts,
        query="layout",
        key="layout",
        rows=("query", "query_index"),
        keys=("key", "key_index"),
    ),
)


@rules(4)
def heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """Attention has 64 or 128 heads (the document allows fewer, the tiling does not). sinks has one
    number for each of them."""
    sizes = sparse.sizes_of(call)
    if sizes is not None:
        yield from sparse.sinks(call, sizes)
        yield from sparse.one_of("query", "the head count", sizes.n1, (64, 128))


@rules(5)
def index_heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """There are 8, 16, 32 or 64 index heads, and one weight for each."""
    sizes = _index_sizes(call)
    if sizes is None:
        return
    yield from sparse.shaped(call, "weight", (*sizes.queries, sizes.n1))
    yield from sparse.one_of("query_index", "the head count", sizes.n1, (8, 16, 32, 64))


@rules(6)
def key_heads(call: CheckedNode) -> Iterator[Diagnostic]:
    """Attention and indexer have one key head each."""
    for name, sizes in (("key", sparse.sizes_of(call)), ("key_index", _index_sizes(call))):
        if sizes is not None and isinstance(sizes.n2, int) and sizes.n2 != 1:
            yield Diagnostic(name, f"{name} has the head count {sizes.n2}, expected 1")


@rules(7)
def head_sizes(call: CheckedNode) -> Iterator[Diagnostic]:
    """D is 512 in attention and 128 in the indexer. The rope parts have size 64; they are
    mandatory, although the prototype declares them optional."""
    sizes, index = sparse.sizes_of(call), _index_sizes(call)
    if sizes is None or index is None:
        return
    yield from sparse.same_width(call, sizes)
    yield from sparse.same_width(call, index, "key_index", "query_index")
    for name, tokens, wanted in (
        ("query_index", index.queries, sizes.queries),
        ("key_index", index.keys, sizes.keys),
    ):
        if any(map(differ, tokens, wanted)):
            yield Diagnostic(
                name,
                f"{name} has other tokens than {name.removesuffix('_index')}, expected the same",
            )
    yield from sparse.one_of("query", "the head size", sizes.d, (512,))
    yield from sparse.one_of("query_index", "the head size", index.d, (128,))
    yield from sparse.rope(call, sizes, mandatory=True)


@rules(8)
def mode(call: CheckedNode) -> Iterator[Diagnostic]:
    """sparse_mode is 3, and cpu_loss_floor is not negative."""
    yield from one_of(call, "sparse_mode", (3,))
    floor = call.attr("cpu_loss_floor")
    if floor < 0:
        yield Diagnostic("cpu_loss_floor", f"cpu_loss_floor is {floor:g}, expected at least 0")


@rules(9)
def selected(call: CheckedNode) -> Iterator[Diagnostic]:
    """Each list has 2048 entries. Since 2026 the number is a multiple of 1024, at most 8192."""
    sizes, count = sparse.sizes_of(call), sparse.selected_count(call)
    if sizes is not None:
        yield from sparse.indices(call, sizes)
    allowed = range(1024, 8193, 1024) if "sinks" in call.spec.input_names else (2048,)
    yield from sparse.one_of("sparse_indices", "the list length", count, allowed)


@rules(10)
def sequences(call: CheckedNode) -> Iterator[Diagnostic]:
    """No sequence has more queries than keys. The cumulative lengths end exactly at the number of
    tokens."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    if call.attr("layout") == "TND":
        yield from sparse.packed_lengths(call, sizes, _LENGTHS, exact=True)
        q_lens, kv_lens = lengths(call[_LENGTHS[0]]), lengths(call[_LENGTHS[1]])
        pairs = list(zip(q_lens or (), kv_lens or (), strict=False))
    else:
        s1, s2 = sizes.queries[1], sizes.keys[1]
        pairs = [(s1, s2)] if isinstance(s1, int) and isinstance(s2, int) else []
    for q, kv in pairs:
        if q > kv:
            yield Diagnostic(
                "query",
                f"query has a sequence of {q} tokens beside {kv} keys, expected at most as many",
            )
            return


rules.shared(11, "statistics", sparse.statistics)


@rules(12)
def ranges(call: CheckedNode) -> Iterator[Diagnostic]:
    """There are 1 to 256 sequences of at most 128 K tokens."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    yield from sparse.batch_and_length(sizes, call.attr("layout"))
    if call.attr("layout") == "TND":
        batch = shape_of(call[_LENGTHS[0]], 1)[0]
        yield from sparse.one_of(_LENGTHS[0], sparse.BATCH, batch, range(1, sparse.MAX_B + 1))
        for name in _LENGTHS:
            longest = max(lengths(call[name]) or (0,))
            if longest > sparse.MAX_S:
                message = f"{name} has a sequence of {number(longest)} tokens, expected at most {number(sparse.MAX_S)}"
                yield Diagnostic(name, message, "document", extension=sparse.SIZES)


def infer(inputs: Inputs, attrs: Attrs) -> Outputs:
    """Each gradient has the type and shape of its input. The loss is one number, [1]."""
    checked_sizes(
        inputs, attrs["layout"], attrs["layout"], ("query", "query_index"), ("key", "key_index")
    )
    found = {
        f"d_{name}": TensorInfo(inputs[name].dtype, inputs[name].shape)
        if name in inputs
        else TensorInfo("")
        for name in ("query_index", "key_index", "weight")
    }
    return {**found, "loss": TensorInfo("DT_FLOAT", (1,))}


OPERATOR = Operator(
    variants=(OPDEF_2025_12.OP_END_FACTORY_REG(), OPDEF_2026.OP_END_FACTORY_REG()),
    infer=infer,
    rules=rules,
    kernel=CpuKernel(extensions=("EXT-SPARSE-FLOAT", "EXT-SPARSE-SIZES", "EXT-LOSS-FLOOR")),
)
