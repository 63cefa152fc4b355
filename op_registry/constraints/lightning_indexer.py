"""The constraints LI.1 to LI.7 of LightningIndexer. Products: A2 and A3."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Fault, Rules
from fa_compiler.op_registry.sparse_shapes import PAGED, SparseSizes

rules = Rules("LI")

_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_key")

OWN_TYPES = ("query", "key", "weights", "sparse_values", *_LENGTHS)
"""Tensors whose type a numbered rule looks after."""


def _sizes(call: CheckedNode) -> SparseSizes | None:
    return sparse.sizes_of(call, "layout_query", "layout_key")


@rules(1)
def types(call: CheckedNode) -> Iterator[Fault]:
    """query and key have one type; the weights too, or FLOAT on 950."""
    yield from sparse.equal_halfs(call, ("query", "key"), ("sparse_values",))
    yield from sparse.weights(call, "weights")


@rules(2)
def sizes(call: CheckedNode) -> Iterator[Fault]:
    """64 index heads of size 128, one key head, one weight for each token and index head."""
    sizes = _sizes(call)
    if sizes is None:
        return
    yield from sparse.head_groups(call, sizes, index=True)
    yield from sparse.same_width(call, sizes)
    yield from sparse.shaped(call, "weights", (*sizes.queries, sizes.n1))
    yield from sparse.one_of("query", "the head count", sizes.n1, (64,))
    yield from sparse.one_of("query", "the head size", sizes.d, (128,))


@rules(3)
def layouts(call: CheckedNode) -> Iterator[Fault]:
    """The layouts are known and fit, and so do the ranks."""
    yield from sparse.layouts(call, "layout_query", "layout_key", ("query",), ("key",))


@rules(4)
def count(call: CheckedNode) -> Iterator[Fault]:
    """sparse_count is 1 to 2048."""
    value = call.attr("sparse_count")
    if not 1 <= value <= 2048:
        message = f"sparse_count is {value}, expected 1 to 2048"
        yield Fault("sparse_count", message, extension=sparse.SIZES if 0 < value <= sparse.INT32_MAX else None)


@rules(5)
def mode(call: CheckedNode) -> Iterator[Fault]:
    """sparse_mode is 0 or 3, without a window."""
    yield from sparse.sparse_mode(call, "sparse_mode", (0, 3))
    yield from sparse.windows(call, ("pre_tokens", "next_tokens"), sparse.INT64_MAX, "tiling")


@rules(6)
def values(call: CheckedNode) -> Iterator[Fault]:
    """return_values does not go with PA_BSND."""
    if call.attr("return_values") and call.attr("layout_key") == PAGED:
        yield Fault("return_values", f"return_values is set with {PAGED}, expected it unset")


@rules(7)
def lengths(call: CheckedNode) -> Iterator[Fault]:
    """INT32 lengths, cumulative with TND; block_table with PA_BSND only."""
    yield from sparse.fixed_types(call, dict.fromkeys(_LENGTHS, "DT_INT32"))
    sizes = _sizes(call)
    if sizes is None:
        return
    batch = sparse.batch_of(call, sizes, _LENGTHS[0])
    yield from sparse.paging(call, sizes, "layout_key", batch)
    yield from sparse.lengths(call, sizes, _LENGTHS, "layout_key", batch)
