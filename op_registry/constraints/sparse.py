"""Checks that the sparse operators share.

Ascend products take only a few sizes (D 512, rope 64, K 2048, some head counts, one key head). The
CPU kernels take any size, so a diagnostic about such a size carries the id of the extension.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from fa_compiler.op_registry.constraints import core
from fa_compiler.op_registry.constraints.core import (
    CheckedNode,
    both_or_none,
    number,
    shape_is,
    size_text,
    text,
)
from fa_compiler.op_registry.diagnostic import NULLPTR, Diagnostic, Stage
from fa_compiler.op_registry.geometry import Shape, differ, divide, shape_of
from fa_compiler.op_registry.node import Dim
from fa_compiler.op_registry.sparse_sizes import (
    KEY_LAYOUTS,
    PAGED,
    QUERY_LAYOUTS,
    SparseSizes,
    sparse_sizes,
)

FLOAT = "EXT-SPARSE-FLOAT"
SIZES = "EXT-SPARSE-SIZES"
HEADS = "EXT-SPARSE-HEADS"

HALFS = ("DT_FLOAT16", "DT_BF16")
POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
INT64_MAX = 2**63 - 1
INT32_MAX = 2**31 - 1

MAX_B, MAX_S = 256, 128 << 10


def equal_halfs(
    call: CheckedNode, names: tuple[str, ...], outputs: tuple[str, ...] = ()
) -> Iterator[Diagnostic]:
    """The named tensors have one type: float16 or bfloat16, or float32 on the CPU."""
    first = call.dtype(names[0])
    if first and first not in HALFS:
        extension = FLOAT if first == "DT_FLOAT" else None
        yield Diagnostic(
            names[0],
            f"{names[0]} is {first}, expected {' or '.join(HALFS)}",
            "aclnn",
            extension=extension,
        )
    stated = {name: call.dtype(name) for name in names[1:]}
    stated |= {name: call.outputs[name].dtype for name in outputs if name in call.outputs}
    for name, dtype in stated.items():
        if first and dtype and dtype != first:
            yield Diagnostic(name, f"{name} is {dtype}, expected {first} as {names[0]}", "aclnn")


def weights(call: CheckedNode, name: str, gradient: str = "") -> Iterator[Diagnostic]:
    """The weights of the index heads have the type of query, or FLOAT if the prototype allows it.
    The gradient of the weights has the type of the weights."""
    query, own = call.dtype("query"), call.dtype(name)
    wide = own == "DT_FLOAT" and "DT_FLOAT" in (call.spec.legal_types(name) or ())
    if query and own and own != query and not wide:
        yield Diagnostic(name, f"{name} is {own}, expected {query} as query", "aclnn")
    stated = call.outputs.get(gradient)
    if stated is not None and own and stated.dtype and stated.dtype != own:
        yield Diagnostic(
            gradient, f"{gradient} is {stated.dtype}, expected {own} as {name}", "aclnn"
        )


def layouts(
    call: CheckedNode, query: str, key: str, rows: tuple[str, ...], keys: tuple[str, ...]
) -> Iterator[Diagnostic]:
    """The attributes `query` and `key` name known layouts that fit each other. The inputs `rows`
    and `keys` have the ranks of these layouts. query and key have the same batch size."""
    for attribute, known, names in (
        (query, QUERY_LAYOUTS, rows),
        (key, _key_layouts(query, key), keys),
    ):
        layout = call.attr(attribute)
        if layout not in known:
            if attribute == query or query != key:
                message = f"{attribute} is {layout!r}, expected one of {', '.join(known)}"
                yield Diagnostic(attribute, message, "aclnn")
            continue
        for name in names:
            rank = call.rank(name)
            if rank is not None and rank != known[layout]:
                yield Diagnostic(
                    name, f"{name} has rank {rank}, expected {known[layout]} for {layout}", "aclnn"
                )
    ours, theirs = call.attr(query), call.attr(key)
    if ours in QUERY_LAYOUTS and theirs in QUERY_LAYOUTS and ours != theirs:
        yield Diagnostic(
            key, f"{key} is {theirs} beside {query} {ours}, expected the same or {PAGED}"
        )
    sizes = sizes_of(call, query, key)
    if sizes is not None and ours == theirs == "BSND" and differ(sizes.queries[0], sizes.keys[0]):
        yield Diagnostic(
            "key",
            f"key has the batch {sizes.keys[0]}, expected {size_text(sizes.queries[0])} as query",
        )


def _key_layouts(query: str, key: str) -> dict[str, int]:
    return dict(QUERY_LAYOUTS) if query == key else dict(KEY_LAYOUTS)


def sizes_of(
    call: CheckedNode,
    query: str = "layout",
    key: str = "layout",
    names: tuple[str, str] = ("query", "key"),
) -> SparseSizes | None:
    """The sizes of the call, or None if a layout is unknown."""
    return sparse_sizes(call.attr(query), call.attr(key), call[names[0]], call[names[1]])


def batch_of(call: CheckedNode, sizes: SparseSizes, lengths: str) -> Dim:
    """The number of sequences. If they are packed, it is the number of entries of the input
    `lengths`."""
    return sizes.queries[0] if len(sizes.queries) == 2 else shape_of(call[lengths], 1)[0]


def same_width(
    call: CheckedNode, sizes: SparseSizes, key: str = "key", query: str = "query"
) -> Iterator[Diagnostic]:
    """The key has the head size of the query."""
    width = shape_of(call[key], len(sizes.keys) + 2)[-1]
    if differ(width, sizes.d):
        yield Diagnostic(key, f"{key} has the head size {width}, expected {sizes.d} as {query}")


def shaped(
    call: CheckedNode, name: str, expected: Shape, any_rank: bool = False
) -> Iterator[Diagnostic]:
    """The tensor, if it is given, has the shape `expected`. With `any_rank`, a wrong rank is left
    to another rule."""
    if not any_rank or call.rank(name) == len(expected):
        yield from shape_is(name, call[name], expected)


BATCH = "the batch"


def one_of(
    name: str, what: str, size: Dim, allowed: Iterable[int], extension: str | None = SIZES
) -> Iterator[Diagnostic]:
    """The size, if it is known, is one of those allowed."""
    choice = tuple(allowed)
    if isinstance(size, int) and size not in choice:
        listed = ", ".join(map(str, choice))
        if isinstance(allowed, range):
            listed = f"{choice[0]} to {choice[-1]}" + (
                f" by {allowed.step}" if allowed.step > 1 else ""
            )
        # No kernel computes with a size below 1, so no extension allows it. Only a batch may be
        # empty.
        computed = size > 0 or what == BATCH
        yield Diagnostic(
            name,
            f"{name} has {what} {size}, expected {listed}",
            extension=extension if computed else None,
        )


def head_groups(call: CheckedNode, sizes: SparseSizes, index: bool = False) -> Iterator[Diagnostic]:
    """key has one head. The CPU kernels of attention, but not those of the indexer (`index`), take
    any number of key heads that divides the number of query heads."""
    if isinstance(sizes.n2, int) and sizes.n2 != 1:
        fits = sizes.n2 > 0 and not (
            isinstance(sizes.n1, int) and divide(sizes.n1, sizes.n2) is None
        )
        extension = HEADS if fits and not index else None
        yield Diagnostic(
            "key", f"key has the head count {sizes.n2}, expected 1", extension=extension
        )


def indices(call: CheckedNode, sizes: SparseSizes, shared: bool = False) -> Iterator[Diagnostic]:
    """sparse_indices has one list for each query token and key head. With `shared`, the CPU kernel
    also takes one list for all heads."""
    tensor = call["sparse_indices"]
    if tensor is None or tensor.shape is None:
        return
    expected = (*sizes.queries, sizes.n2, None)
    shape = tensor.shape
    if len(shape) != len(expected) or any(map(differ, shape, expected)):
        heads = len(shape) == len(expected) and shape[-2] == 1
        only_heads = heads and not any(map(differ, (*shape[:-2], None, None), expected))
        message = (
            f"sparse_indices has the shape {text(shape)}, expected {text((*expected[:-1], 'K'))}"
        )
        yield Diagnostic(
            "sparse_indices", message, extension=HEADS if shared and only_heads else None
        )


def selected_count(call: CheckedNode) -> Dim:
    """K, the length of each list of sparse_indices."""
    tensor = call["sparse_indices"]
    return tensor.shape[-1] if tensor is not None and tensor.shape else None


def mode(call: CheckedNode, wanted: int, stage: Stage) -> Iterator[Diagnostic]:
    """sparse_mode is 0 or 3. pre_tokens and next_tokens state a window that the operator does not
    use. Each must have its largest value, `wanted`."""
    yield from core.one_of(call, "sparse_mode", (0, 3))
    for name in ("pre_tokens", "next_tokens"):
        value = call.attr(name)
        if value != wanted:
            yield Diagnostic(name, f"{name} is {number(value)}, expected {number(wanted)}", stage)


def rope(call: CheckedNode, sizes: SparseSizes, mandatory: bool) -> Iterator[Diagnostic]:
    """Both rope parts are given, or neither. They have the shapes of query and key, with a head
    size of 64. With `mandatory`, the products need them."""
    names = ("query_rope", "key_rope")
    yield from both_or_none(call, names, "aclnn", NULLPTR)
    if mandatory and call["query_rope"] is None and call["key_rope"] is None:
        for name in names:
            message = f"{name} is absent, expected one: it is optional in the prototype only"
            yield Diagnostic(name, message, code=NULLPTR, extension=SIZES)
    widths: list[Dim] = []
    for name, front in (
        (names[0], (*sizes.queries, sizes.n1)),
        (names[1], (*sizes.keys, sizes.n2)),
    ):
        yield from shaped(call, name, (*front, None))
        tensor = call[name]
        widths.append(tensor.shape[-1] if tensor is not None and tensor.shape else None)
    if differ(*widths):
        yield Diagnostic(
            names[1],
            f"key_rope has the head size {widths[1]}, expected {size_text(widths[0])} as query_rope",
        )
    yield from one_of(names[0], "the head size", widths[0], (64,))


def sinks(call: CheckedNode, sizes: SparseSizes) -> Iterator[Diagnostic]:
    """sinks has one number for each head of query. Among the products only 950 takes it."""
    yield from shaped(call, "sinks", (sizes.n1,))
    if call["sinks"] is not None and call.product is not None and call.product.name != "950":
        yield Diagnostic(
            "sinks",
            f"sinks is given for {call.product.title}, expected none: only 950 has it",
            "document",
        )


def batch_and_length(sizes: SparseSizes, layout: str) -> Iterator[Diagnostic]:
    """In BSND, batch size and sequence length are in the documented ranges."""
    if layout != "BSND":
        return
    yield from one_of("query", BATCH, sizes.queries[0], range(1, MAX_B + 1))
    for name, length in (("query", sizes.queries[1]), ("key", sizes.keys[1])):
        if isinstance(length, int) and length > MAX_S:
            message = (
                f"{name} has the sequence length {number(length)}, expected 1 to {number(MAX_S)}"
            )
            yield Diagnostic(name, message, "document", extension=SIZES)


def statistics(call: CheckedNode) -> Iterator[Diagnostic]:
    """softmax_max and softmax_sum have the shape that the forward pass gives them."""
    sizes = sizes_of(call)
    if sizes is not None:
        for name in ("softmax_max", "softmax_sum"):
            yield from shaped(call, name, sizes.statistics)


def ends(call: CheckedNode, name: str, total: Dim, exact: bool) -> Iterator[Diagnostic]:
    """Cumulative lengths of packed sequences do not decrease. They end at the token count, or
    before it unless `exact` is set."""
    values = call.content(name)
    if values is None:
        return
    end = values[-1] if values else 0
    if any(b < a for a, b in pairwise((0, *values))):
        yield Diagnostic(
            name, f"{name} holds {values}, expected cumulative lengths, which do not decrease"
        )
    elif isinstance(total, int) and (end != total if exact else end > total):
        wanted = f"{total}" if exact else f"at most {total}"
        yield Diagnostic(name, f"{name} ends at {end}, expected {wanted}, the tokens of its tensor")


def packed_lengths(
    call: CheckedNode,
    sizes: SparseSizes,
    names: tuple[str, str],
    exact: bool = False,
    most: int | None = None,
) -> Iterator[Diagnostic]:
    """In TND, the cumulative lengths of query and key are given. Both have the same number of
    entries, at most `most`."""
    for name, total in zip(names, (sizes.queries[0], sizes.keys[0]), strict=True):
        if call[name] is None:
            yield Diagnostic(
                name, f"{name} is absent, expected cumulative lengths with TND", "aclnn", NULLPTR
            )
        elif call.rank(name) not in (1, None):
            yield Diagnostic(name, f"{name} has rank {call.rank(name)}, expected 1")
        else:
            yield from ends(call, name, total, exact)
    counts = [
        tensor.shape[0] if (tensor := call[name]) is not None and tensor.shape else None
        for name in names
    ]
    if differ(*counts):
        yield Diagnostic(
            names[1], f"{names[1]} has {counts[1]} entries, expected {counts[0]} as {names[0]}"
        )
    if most is not None:
        yield from one_of(names[0], BATCH, counts[0], range(1, most + 1))


def batch_lengths(call: CheckedNode, name: str, batch: Dim, most: Dim) -> Iterator[Diagnostic]:
    """Lengths that are not cumulative: there is one for each sequence of the batch, and none
    exceeds `most`."""
    tensor = call[name]
    if tensor is None:
        return
    yield from shaped(call, name, (batch,))
    values = call.content(name) or []
    for value in values:
        if value < 0 or (isinstance(most, int) and value > most):
            yield Diagnostic(
                name, f"{name} holds {values}, expected lengths from 0 to {size_text(most)}"
            )
            return


def lengths(
    call: CheckedNode, sizes: SparseSizes, names: tuple[str, str], key: str, batch: Dim
) -> Iterator[Diagnostic]:
    """The lengths of query and key are cumulative for TND. Otherwise there is one for each
    sequence.

    `key` is the attribute that states the layout of the keys, `batch` the number of sequences.
    """
    layout, key_layout = call.attr("layout_query"), call.attr(key)
    if layout == key_layout == "TND":
        yield from packed_lengths(call, sizes, names)
        return
    if layout == "TND":
        if call[names[0]] is None:
            yield Diagnostic(
                names[0],
                f"{names[0]} is absent, expected cumulative lengths with TND",
                "aclnn",
                NULLPTR,
            )
        elif call.rank(names[0]) not in (1, None):
            yield Diagnostic(names[0], f"{names[0]} has rank {call.rank(names[0])}, expected 1")
        yield from ends(call, names[0], sizes.queries[0], exact=False)
    elif layout == "BSND":
        yield from batch_lengths(call, names[0], sizes.queries[0], sizes.queries[1])
    if key_layout == PAGED and call[names[1]] is None:
        yield Diagnostic(
            names[1], f"{names[1]} is absent, expected lengths with {PAGED}", "aclnn", NULLPTR
        )
    most = sizes.keys[1] if key_layout in ("BSND", PAGED) else None
    if key_layout == PAGED:
        pages = shape_of(call["block_table"], 2)[1]
        most = pages * most if isinstance(pages, int) and isinstance(most, int) else None
    yield from batch_lengths(call, names[1], batch, most)


def _page_entries(call: CheckedNode, sizes: SparseSizes) -> Iterator[Diagnostic]:
    """The used entries of a constant block_table name existing pages."""
    table, (count, page) = call["block_table"], sizes.keys
    name = next(
        name
        for name in ("actual_seq_lengths_kv", "actual_seq_lengths_key")
        if name in call.spec.input_names
    )
    values = call.content(name)
    if table is None or table.value is None or table.value.ndim != 2 or values is None:
        return
    if not isinstance(count, int) or not isinstance(page, int) or page == 0:
        return
    for length, row in zip(values, table.value, strict=False):
        for used in row[: max(0, -(-length // page))]:
            if not 0 <= used < count:
                yield Diagnostic(
                    "block_table", f"block_table names page {used}, expected 0 to {count - 1}"
                )
                return


def paging(call: CheckedNode, sizes: SparseSizes, key: str, batch: Dim) -> Iterator[Diagnostic]:
    """block_table is given with PA_BSND and only then. Its blocks have a size that Ascend takes."""
    paged = call.attr(key) == PAGED
    table = call["block_table"]
    if not paged:
        if table is not None:
            yield Diagnostic(
                "block_table",
                f"block_table is given although {key} is {call.attr(key)}, expected none",
            )
        return
    if table is None:
        yield Diagnostic(
            "block_table", f"block_table is absent, expected one with {PAGED}", "aclnn", NULLPTR
        )
    elif table.shape is not None:
        yield from shaped(call, "block_table", (batch, None))
        yield from _page_entries(call, sizes)
    yield from one_of("key", "the block size", sizes.keys[1], range(16, 1025, 16))
