"""The constraints KL.1 to KL.12 of SparseLightningIndexerGradKLLoss. Products: A2 and A3.

KL.13 and KL.14 of the project's list say that `deterministic` has no effect and that an empty query returns at once: no
node can break them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Fault, Rules, number
from fa_compiler.op_registry.geometry import differ, lengths, shape_of
from fa_compiler.op_registry.sparse_shapes import SparseSizes

rules = Rules("KL")

_HALFS = ("query", "key", "query_index", "key_index", "query_rope", "key_rope")
_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
_FIXED = {
    "sparse_indices": "DT_INT32",
    "softmax_max": "DT_FLOAT",
    "softmax_sum": "DT_FLOAT",
    **dict.fromkeys(_LENGTHS, "DT_INT64"),
}

OWN_TYPES = (*_HALFS, *_FIXED, "weight", "d_query_index", "d_key_index", "d_weight")
"""Tensors whose type a numbered rule looks after."""


def _index_sizes(call: CheckedNode) -> SparseSizes | None:
    return sparse.sizes_of(call, names=("query_index", "key_index"))


@rules(1)
def types(call: CheckedNode) -> Iterator[Fault]:
    """The tensors of attention and indexer have one type; the weights too, or FLOAT since 2026."""
    yield from sparse.equal_halfs(call, _HALFS, ("d_query_index", "d_key_index"))
    yield from sparse.weights(call, "weight", "d_weight")


@rules(2)
def fixed_types(call: CheckedNode) -> Iterator[Fault]:
    """Indices are INT32, statistics FLOAT, lengths INT64."""
    yield from sparse.fixed_types(call, _FIXED)


@rules(3)
def layout(call: CheckedNode) -> Iterator[Fault]:
    """The layout is known and ranks fit it."""
    yield from sparse.layouts(call, "layout", "layout", ("query", "query_index"), ("key", "key_index"))


@rules(4)
def heads(call: CheckedNode) -> Iterator[Fault]:
    """64 or 128 heads of attention (the document allows fewer, the tiling does not), a sink for each of them."""
    sizes = sparse.sizes_of(call)
    if sizes is not None:
        yield from sparse.sinks(call, sizes)
        yield from sparse.one_of("query", "the head count", sizes.n1, (64, 128))


@rules(5)
def index_heads(call: CheckedNode) -> Iterator[Fault]:
    """8, 16, 32 or 64 index heads, and a weight for each."""
    sizes = _index_sizes(call)
    if sizes is None:
        return
    yield from sparse.shaped(call, "weight", (*sizes.queries, sizes.n1))
    yield from sparse.one_of("query_index", "the head count", sizes.n1, (8, 16, 32, 64))


@rules(6)
def key_heads(call: CheckedNode) -> Iterator[Fault]:
    """One key head in attention and indexer."""
    for name, sizes in (("key", sparse.sizes_of(call)), ("key_index", _index_sizes(call))):
        if sizes is not None and isinstance(sizes.n2, int) and sizes.n2 != 1:
            yield Fault(name, f"{name} has the head count {sizes.n2}, expected 1")


@rules(7)
def head_sizes(call: CheckedNode) -> Iterator[Fault]:
    """D 512, 128 in the indexer, rope parts of 64, which are mandatory although optional in the prototype."""
    sizes, index = sparse.sizes_of(call), _index_sizes(call)
    if sizes is None or index is None:
        return
    yield from sparse.same_width(call, sizes)
    yield from sparse.same_width(call, index, "key_index", "query_index")
    for name, tokens, wanted in (("query_index", index.queries, sizes.queries), ("key_index", index.keys, sizes.keys)):
        if any(map(differ, tokens, wanted)):
            yield Fault(name, f"{name} has other tokens than {name.removesuffix('_index')}, expected the same")
    yield from sparse.one_of("query", "the head size", sizes.d, (512,))
    yield from sparse.one_of("query_index", "the head size", index.d, (128,))
    yield from sparse.rope(call, sizes, mandatory=True)


@rules(8)
def mode(call: CheckedNode) -> Iterator[Fault]:
    """sparse_mode is 3."""
    yield from sparse.sparse_mode(call, "sparse_mode", (3,))
    floor = call.attrs.get("cpu_loss_floor")
    if floor is not None and floor < 0 and math.isfinite(floor):
        yield Fault("cpu_loss_floor", f"cpu_loss_floor is {floor:g}, expected at least 0")


@rules(9)
def selected(call: CheckedNode) -> Iterator[Fault]:
    """2048 entries in each list; since 2026 a multiple of 1024, at most 8192."""
    sizes, count = sparse.sizes_of(call), sparse.selected_count(call)
    if sizes is not None:
        yield from sparse.indices(call, sizes)
    allowed = range(1024, 8193, 1024) if "sinks" in call.spec.input_names else (2048,)
    yield from sparse.one_of("sparse_indices", "the list length", count, allowed)


@rules(10)
def sequences(call: CheckedNode) -> Iterator[Fault]:
    """No sequence has more queries than keys; cumulative lengths end at the tokens exactly."""
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
            yield Fault("query", f"query has a sequence of {q} tokens beside {kv} keys, expected at most as many")
            return


@rules(11)
def statistics(call: CheckedNode) -> Iterator[Fault]:
    """softmax_max and softmax_sum have the shape of the forward pass."""
    yield from sparse.statistics(call)


@rules(12)
def ranges(call: CheckedNode) -> Iterator[Fault]:
    """1 to 256 sequences of at most 128 K tokens."""
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
                yield Fault(name, message, "document", extension=sparse.SIZES)
