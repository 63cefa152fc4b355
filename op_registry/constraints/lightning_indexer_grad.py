"""The constraints LIG.1 to LIG.7 of LightningIndexerGrad, in the order of the project's list. Products: A2 and A3."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Fault, Rules
from fa_compiler.op_registry.geometry import differ

rules = Rules("LIG")

_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")
MAX_B = 1024

OWN_TYPES = ("query", "key", "dy", "weights", "dq", "dk", "dweights", "sparse_indices")
"""Tensors whose type a numbered rule looks after."""


@rules(1)
def layout(call: CheckedNode) -> Iterator[Fault]:
    """The layout is known, and types and ranks fit."""
    yield from sparse.equal_halfs(call, ("query", "key", "dy", "weights"), ("dq", "dk", "dweights"))
    yield from sparse.fixed_types(call, {"sparse_indices": "DT_INT32"})
    yield from sparse.layouts(call, "layout", "layout", ("query",), ("key",))


@rules(2)
def head_size(call: CheckedNode) -> Iterator[Fault]:
    """D is 128."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    yield from sparse.same_width(call, sizes)
    yield from sparse.one_of("query", "the head size", sizes.d, (128,))


@rules(3)
def heads(call: CheckedNode) -> Iterator[Fault]:
    """64 index heads, which headNum states, and one key head."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    yield from sparse.head_groups(call, sizes, index=True)
    if differ(call.attr("headNum"), sizes.n1):
        yield Fault("headNum", f"headNum is {call.attr('headNum')}, expected {sizes.n1}, the head count of query")
    yield from sparse.shaped(call, "weights", (*sizes.queries, sizes.n1))
    yield from sparse.one_of("query", "the head count", sizes.n1, (64,))


@rules(4)
def selected(call: CheckedNode) -> Iterator[Fault]:
    """2048 entries in each list; dy has one number for each entry, not the query's shape the document claims."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    yield from sparse.indices(call, sizes)
    count = sparse.selected_count(call)
    yield from sparse.shaped(call, "dy", (*sizes.queries, count))
    yield from sparse.one_of("sparse_indices", "the list length", count, (2048,))


@rules(5)
def key_length(call: CheckedNode) -> Iterator[Fault]:
    """S2 is not less than K; 1 to 1024 sequences."""
    sizes, count = sparse.sizes_of(call), sparse.selected_count(call)
    if sizes is None or call.attr("layout") != "BSND":
        return
    length = sizes.keys[1]
    if isinstance(length, int) and isinstance(count, int) and length < count:
        message = f"key has the sequence length {length}, expected at least {count}, the entries of each list"
        yield Fault("key", message, extension=sparse.SIZES)
    yield from sparse.one_of("query", sparse.BATCH, sizes.queries[0], range(1, MAX_B + 1))


@rules(6)
def mode(call: CheckedNode) -> Iterator[Fault]:
    """sparseMode is 0 or 3."""
    yield from sparse.sparse_mode(call, "sparseMode", (0, 3))


@rules(7)
def lengths(call: CheckedNode) -> Iterator[Fault]:
    """Cumulative lengths with TND, none otherwise."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    if call.attr("layout") == "TND":
        yield from sparse.packed_lengths(call, sizes, _LENGTHS, most=MAX_B)
        return
    for name in _LENGTHS:
        if call[name] is not None:
            yield Fault(name, f"{name} is given although layout is {call.attr('layout')}, expected none")
