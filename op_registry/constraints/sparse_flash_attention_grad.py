"""The constraints SFAG.1 to SFAG.11 of SparseFlashAttentionGrad, for both orders of its inputs.

SFAG.12 of the project's list is the document's contradiction about determinism; no node can break it. The sources say
nothing of products that lack `sinks` of 2026, nor of lists other than 2048 since then.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Fault, Rules
from fa_compiler.op_registry.geometry import shape_of

rules = Rules("SFAG")

_HALFS = ("query", "key", "value", "d_out", "out", "query_rope", "key_rope")
_GRADIENTS = ("d_query", "d_key", "d_value", "d_query_rope", "d_key_rope")
_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_kv")

OWN_TYPES = (*_HALFS, *_GRADIENTS, "sparse_indices", "softmax_max", "softmax_sum", *_LENGTHS)
"""Tensors whose type a numbered rule looks after."""


@rules(1)
def types(call: CheckedNode) -> Iterator[Fault]:
    """One type for what is attended, FLOAT statistics, INT32 indices and lengths (the document says INT64)."""
    yield from sparse.equal_halfs(call, _HALFS, _GRADIENTS)
    fixed = {"sparse_indices": "DT_INT32", "softmax_max": "DT_FLOAT", "softmax_sum": "DT_FLOAT"}
    yield from sparse.fixed_types(call, fixed | dict.fromkeys(_LENGTHS, "DT_INT32"))


@rules(2)
def layout(call: CheckedNode) -> Iterator[Fault]:
    """The layout is known and ranks fit it."""
    yield from sparse.layouts(call, "layout", "layout", ("query", "d_out", "out"), ("key", "value"))


@rules(3)
def heads(call: CheckedNode) -> Iterator[Fault]:
    """One key head; 1 to 128 query heads, a power of two; a sink for each of them."""
    sizes = sparse.sizes_of(call)
    if sizes is not None:
        yield from sparse.head_groups(call, sizes)
        yield from sparse.shaped(call, "sinks", (sizes.n1,))
        yield from sparse.one_of("query", "the head count", sizes.n1, sparse.POWERS)


@rules(4)
def head_sizes(call: CheckedNode) -> Iterator[Fault]:
    """D is 512 everywhere, the rope parts 64 or absent; d_out and out are as the forward pass gives them."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    yield from sparse.same_width(call, sizes)
    yield from sparse.shaped(call, "value", (*sizes.keys, sizes.n2, None), any_rank=True)
    # Without value, it is key (the prototype of 2026).
    value_width = sizes.d if call["value"] is None else shape_of(call["value"], len(sizes.keys) + 2)[-1]
    for name in ("d_out", "out"):
        yield from sparse.shaped(call, name, (*sizes.queries, sizes.n1, value_width), any_rank=True)
    yield from sparse.one_of("query", "the head size", sizes.d, (512,))
    if call["value"] is not None:
        yield from sparse.one_of("value", "the head size", value_width, (512,))
    yield from sparse.rope(call, sizes, mandatory=False)


@rules(5)
def selected(call: CheckedNode) -> Iterator[Fault]:
    """2048 entries in each list of sparse_indices."""
    sizes = sparse.sizes_of(call)
    if sizes is not None:
        yield from sparse.indices(call, sizes, shared=True)
    yield from sparse.one_of("sparse_indices", "the list length", sparse.selected_count(call), (2048,))


@rules(6)
def block_size(call: CheckedNode) -> Iterator[Fault]:
    """sparse_block_size is 1, 8, 16, 32 or 64."""
    size = call.attr("sparse_block_size")
    if size not in (1, 8, 16, 32, 64):
        message = f"sparse_block_size is {size}, expected 1, 8, 16, 32 or 64"
        extension = sparse.SIZES if 0 < size <= sparse.INT32_MAX else None
        yield Fault("sparse_block_size", message, "document", extension=extension)


@rules(7)
def mode(call: CheckedNode) -> Iterator[Fault]:
    """sparse_mode is 0 or 3, without a window."""
    yield from sparse.sparse_mode(call, "sparse_mode", (0, 3))
    yield from sparse.windows(call, ("pre_tokens", "next_tokens"), sparse.INT32_MAX, "document")


@rules(8)
def lengths(call: CheckedNode) -> Iterator[Fault]:
    """TND has cumulative lengths; batch and length are in range."""
    sizes = sparse.sizes_of(call)
    if sizes is None:
        return
    if call.attr("layout") == "TND":
        yield from sparse.packed_lengths(call, sizes, _LENGTHS, most=sparse.MAX_B)
    yield from sparse.batch_and_length(sizes, call.attr("layout"))


@rules(9)
def statistics(call: CheckedNode) -> Iterator[Fault]:
    """softmax_max and softmax_sum have the shape of the forward pass."""
    yield from sparse.statistics(call)


@rules(10)
def gradients(call: CheckedNode) -> Iterator[Fault]:
    """Gradients of what is there only: of the rope parts, and since 2026 of value and sinks."""
    for name in ("query_rope", "key_rope", "value", "sinks"):
        output = f"d_{name}"
        if output not in call.spec.output_names:
            continue
        stated = call.outputs.get(output)
        if stated is not None and call[name] is None and stated.shape != (0,):
            yield Fault(output, f"{output} is given without {name}, expected none", "aclnn")


@rules(11)
def not_empty(call: CheckedNode) -> Iterator[Fault]:
    """query has heads of some size; no tokens are no fault: the operator returns at once."""
    sizes = sparse.sizes_of(call)
    if sizes is not None and 0 in (sizes.n1, sizes.d):
        yield Fault("query", "query has no heads or columns, expected at least one of each")
