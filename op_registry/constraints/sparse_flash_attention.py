"""The constraints SFA.1 to SFA.14 of SparseFlashAttention.

Numbers and stages: the project's constraints list, drawn from the operator's tiling and its document. Products: A2, A3;
950 with the prototype of 2026.
"""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints import sparse
from fa_compiler.op_registry.constraints.core import CheckedNode, Fault, Rules
from fa_compiler.op_registry.geometry import shape_of
from fa_compiler.op_registry.sparse_shapes import PAGED, SparseSizes

rules = Rules("SFA")

OWN_TYPES = ("query", "key", "value", "query_rope", "key_rope", "attention_out", "sparse_indices")
"""Tensors whose type a numbered rule looks after."""

_LENGTHS = ("actual_seq_lengths_query", "actual_seq_lengths_kv")


def _sizes(call: CheckedNode) -> SparseSizes | None:
    return sparse.sizes_of(call, "layout_query", "layout_kv")


@rules(1)
def types(call: CheckedNode) -> Iterator[Fault]:
    """query, key, value and the rope parts have one type."""
    names = ("query", "key", "value", "query_rope", "key_rope")
    yield from sparse.equal_halfs(call, names, ("attention_out",))


@rules(2)
def layouts(call: CheckedNode) -> Iterator[Fault]:
    """The layouts are known and fit, and so do the ranks."""
    yield from sparse.layouts(call, "layout_query", "layout_kv", ("query",), ("key", "value"))


@rules(3)
def heads(call: CheckedNode) -> Iterator[Fault]:
    """One key head; 1 to 128 query heads, a power of two (any on 950)."""
    sizes = _sizes(call)
    if sizes is None:
        return
    yield from sparse.head_groups(call, sizes)
    any_count = call.product is not None and call.product.name == "950"
    yield from sparse.one_of("query", "the head count", sizes.n1, range(1, 129) if any_count else sparse.POWERS)


@rules(4)
def head_sizes(call: CheckedNode) -> Iterator[Fault]:
    """D is Dv is 512; key and value are alike but for the head size."""
    sizes = _sizes(call)
    if sizes is None:
        return
    yield from sparse.same_width(call, sizes)
    yield from sparse.shaped(call, "value", (*sizes.keys, sizes.n2, None), any_rank=True)
    value_width = shape_of(call["value"], len(sizes.keys) + 2)[-1]
    for name, width in (("query", sizes.d), ("value", value_width)):
        yield from sparse.one_of(name, "the head size", width, (512,))


@rules(5)
def attention_mode(call: CheckedNode) -> Iterator[Fault]:
    """attention_mode is 2, although its default is another."""
    value = call.attr("attention_mode")
    if value != 2:
        yield Fault("attention_mode", f"attention_mode is {value}, expected 2")


@rules(6)
def rope(call: CheckedNode) -> Iterator[Fault]:
    """Both rope parts or none, of size 64; before the prototype of 2026 both are needed."""
    sizes = _sizes(call)
    if sizes is not None:
        yield from sparse.rope(call, sizes, mandatory="sinks" not in call.spec.input_names)


@rules(7)
def mode(call: CheckedNode) -> Iterator[Fault]:
    """sparse_mode is 0 or 3, without a window."""
    yield from sparse.sparse_mode(call, "sparse_mode", (0, 3))
    yield from sparse.windows(call, ("pre_tokens", "next_tokens"), sparse.INT64_MAX, "tiling")


@rules(8)
def block_size(call: CheckedNode) -> Iterator[Fault]:
    """sparse_block_size is a power of two up to 128 (1 on 950) and divides the size of a page."""
    size = call.attr("sparse_block_size")
    only_one = call.product is not None and call.product.name == "950"
    allowed = (1,) if only_one else sparse.POWERS
    if size not in allowed:
        message = f"sparse_block_size is {size}, expected {', '.join(map(str, allowed))}"
        yield Fault("sparse_block_size", message, extension=sparse.SIZES if 0 < size <= sparse.INT32_MAX else None)
    sizes = _sizes(call)
    page = sizes.keys[1] if sizes is not None and call.attr("layout_kv") == PAGED else None
    if isinstance(page, int) and size > 0 and page % size:
        message = f"sparse_block_size is {size}, expected a divisor of {page}, the size of a page"
        yield Fault("sparse_block_size", message, extension=sparse.SIZES)


@rules(9)
def indices(call: CheckedNode) -> Iterator[Fault]:
    """sparse_indices is INT32, one list for each query token."""
    yield from sparse.fixed_types(call, {"sparse_indices": "DT_INT32"})
    sizes = _sizes(call)
    if sizes is not None:
        yield from sparse.indices(call, sizes, shared=True)


@rules(10)
def lengths(call: CheckedNode) -> Iterator[Fault]:
    """TND has cumulative lengths of the query, TND and PA_BSND lengths of the keys; one for each sequence."""
    sizes = _sizes(call)
    if sizes is None:
        return
    batch = sparse.batch_of(call, sizes, _LENGTHS[0])
    yield from sparse.lengths(call, sizes, _LENGTHS, "layout_kv", batch)


@rules(11)
def block_table(call: CheckedNode) -> Iterator[Fault]:
    """block_table goes with PA_BSND, one row for each sequence."""
    sizes = _sizes(call)
    if sizes is not None:
        batch = sparse.batch_of(call, sizes, _LENGTHS[0])
        yield from (fault for fault in sparse.paging(call, sizes, "layout_kv", batch) if fault.tensor != "key")


@rules(12)
def page_size(call: CheckedNode) -> Iterator[Fault]:
    """A page holds a multiple of 16 keys, at most 1024."""
    sizes = _sizes(call)
    if sizes is not None:
        yield from (fault for fault in sparse.paging(call, sizes, "layout_kv", None) if fault.tensor == "key")


@rules(13)
def statistics(call: CheckedNode) -> Iterator[Fault]:
    """return_softmax_lse does not go with PA_BSND."""
    if call.attr("return_softmax_lse") and call.attr("layout_kv") == PAGED:
        yield Fault("return_softmax_lse", f"return_softmax_lse is set with {PAGED}, expected it unset")


@rules(14)
def not_empty(call: CheckedNode) -> Iterator[Fault]:
    """query holds something; sinks are one for each head, on 950."""
    sizes = _sizes(call)
    if sizes is None:
        return
    if 0 in (*sizes.queries, sizes.n1, sizes.d):
        yield Fault("query", "query is empty, expected at least one token, head and column", extension=sparse.SIZES)
    yield from sparse.sinks(call, sizes)
