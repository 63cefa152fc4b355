"""Keys and values gathered from a pool of blocks by a block table: the pages of IncreFlashAttention.

    cache  := layout(Gather(pool, table))           layout operators (views.py), DequantizeLinear from int8 in between
            | layout(Gather(tokens, slots))         token by token
    tokens := the pool with blocks and their tokens in one dimension
    slots  := layout(table * size + (0 .. size - 1))
    pool   := layout(any value), DequantizeLinear from int8 in between
    table  := layout(any integer tensor)

    accepted    a pool whose blocks hold the tokens of all key-value heads, arranged as (blocks, tokens, heads x size)
                or (blocks, heads, tokens, size), or so that a Reshape gives one of these; a table of one row for each
                batch entry, or of one row for all; the same table for both caches; keys in the order of the blocks, and
                within a block in the order of its tokens
    emitted     the pools as they are, and the table in int32, [batch, blocks of an entry]
    refused     pools that would have to be copied, tables that are not the same for key and value or run along heads,
                pools whose sizes may differ, blocks of unknown size

Sound because a Gather of whole blocks finds token t of the keys in block table[t // size], slot t % size, and the
operator reads it there, too. A Gather counts negative indices from the end; the operator does not, so the number of
blocks is added to them. In every run in which the Gather succeeds, all table entries then name existing blocks. They
fit int32, because no pool has 2^31 blocks. An index that is too large and that no key uses makes only the original
fail.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, Axis
from fa_compiler.passes.algebra.cases import as_integer
from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import INT64, LayoutEmitter
from fa_compiler.passes.ir.nodes import constant, int_attr, is_op
from fa_compiler.passes.layout.plan import COPY_COST, Move, cost, plan_moves
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.quantization import DequantizedInput, match_dequantize
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.positions import Positions

INDICES = (ir.DataType.INT32, ir.DataType.INT64)
FOLDED: tuple[str, ...] = ("BNSD", "BSND")
APART: tuple[str, ...] = ("BNSD",)
"""Layouts of the query beside pools of (blocks, tokens, heads x size) and of (blocks, heads, tokens, size).

BSH is left out. The operator ignores a table without columns; beside a query in BSH it would then read the first kind
of pool as contiguous keys.
"""


@dataclass(frozen=True)
class CacheSource:
    """The tensor that keys or values are read from, and the moves that bring it to the form the operator takes.

    It is contiguous, or a pool whose first dimension counts blocks.
    """

    value: ir.Value
    dims: Arrangement
    plan: tuple[Move, ...]
    quantised: DequantizedInput | None


@dataclass(frozen=True)
class Pages:
    """Both pools, the table they share, and the layouts that the query may have beside them.

    `pages` are the axes that count the blocks of a batch entry, `blocks` is the number of blocks in a pool.
    """

    key: CacheSource
    value: CacheSource
    table: View
    pages: Axes
    block_size: int
    blocks: Dim
    layouts: tuple[str, ...]

    def block_table(self, match: AttentionMatch, pool: ir.Value, emitter: LayoutEmitter) -> ir.Value:
        """The table in int32, [batch, blocks of an entry], without negative indices."""
        builder, dims = emitter.builder, self.table.base_dims
        plan = plan_moves(dims, (match.roles.batch, self.pages))
        if plan is None:
            raise Decline(Code.SHAPE, f"the block table {self.table.base.name!r} is not one row for each batch entry")
        table, dtype = self.table.base, builder.info.dtype(self.table.base)
        content = constant(table)
        if content is None or content.size == 0 or content.min() < 0:
            known = self.blocks.const
            count = builder.dimension(pool, 0) if known is None else builder.ints([known])
            wrapped = builder.op("Add", [table, builder.cast(count, dtype or INT64)], dtype)
            zero = builder.cast(builder.ints([0]), dtype or INT64)
            negative = builder.op("Less", [table, zero], ir.DataType.BOOL)
            table = builder.op("Where", [negative, wrapped, table], dtype)
        return emitter.apply(builder.cast(table, ir.DataType.INT32), dims, plan)


@dataclass(frozen=True)
class _Gathered:
    """A cache that a Gather makes.

    `data` is the arrangement of the Gather's data and `indices` that of the table; `blocks` are the axes of the data
    that count blocks.
    """

    node: ir.Node
    data: Arrangement
    blocks: Axes
    table: ir.Value
    indices: Arrangement
    quantised: DequantizedInput | None


def find_pages(match: AttentionMatch, facts: Facts) -> tuple[AttentionMatch, Pages] | None:
    """The pages an attention reads, and the match with the axes that were split to find them.

    None where the keys are not gathered as blocks of tokens. Raises Decline where they are, but the operator cannot
    read these pages.
    """
    viewer = Viewer(facts, match.space.branch())
    found = [_gathered(view, match, viewer) for view in (match.key, match.value)]
    roles, space = viewer.space.settle(match.roles), viewer.space
    parts = [None if each is None else _tokens(each, roles.kv_seq, space.resolve_all(each.data)) for each in found]
    if found[0] is None or parts[0] is None:
        return None
    if found[1] is None or parts[1] is None:
        raise Decline(Code.SHAPE, "keys are gathered by a block table, and values are not", found[0].node)
    tables = [_table(each, viewer) for each in found if each is not None]
    same = tables[0].base is tables[1].base and parts[0] == parts[1]
    if not same or space.resolve_all(tables[0].base_dims) != space.resolve_all(tables[1].base_dims):
        raise Decline(Code.SHAPE, "keys and values are gathered by two block tables", found[1].node)
    pages, tokens = parts[0]
    size = space.size(tokens).const
    counts = [space.size(each.blocks) for each in found if each is not None]
    if size is None or counts[0] != counts[1]:
        reason = (
            "the size of a block is not known" if size is None else "the pools may have different numbers of blocks"
        )
        raise Decline(Code.SHAPE, reason, found[0].node)
    if plan_moves(space.resolve_all(tables[0].base_dims), space.resolve_all((roles.batch, pages))) is None:
        raise Decline(Code.SHAPE, "the block table is not one row for each batch entry", found[0].node)
    for layouts, folded in ((FOLDED, True), (APART, False)):
        pools = [
            _pool(each, tokens, roles.kv_heads, depth, folded, match, viewer)
            for each, depth in zip(found, (roles.head_dim, roles.value_head_dim), strict=True)
            if each is not None
        ]
        key, value = pools
        if key is not None and value is not None:
            paged = Pages(key, value, tables[0], pages, size, counts[0], layouts)
            return match.within(space).with_heads(), space.settle(paged)
    raise Decline(Code.SHAPE, "the blocks would have to be rearranged, all of them in each step", found[0].node)


def _gathered(view: View, match: AttentionMatch, viewer: Viewer) -> _Gathered | None:
    """The Gather after a cache, found through layout operators and a DequantizeLinear; None where there is none."""
    value, dims, quant = view.base, view.base_dims, None
    while not is_op(node := value.producer(), "Gather"):
        inner = match_dequantize(value, dims, match.dtype, viewer.info) if quant is None else None
        if inner is not None:
            value, quant = inner.value, inner
            continue
        moved = _through(value, dims, viewer)
        if moved is None:
            return None
        value, dims = moved
    assert node is not None
    data, table = node.inputs[0], node.inputs[1]
    own = None if data is None else viewer.info.shape(data)
    rank = None if table is None else viewer.info.shape(table)
    if own is None or not own or table is None or rank is None or len(dims) != len(own) - 1 + len(rank):
        return None
    axis = int_attr(node, "axis", 0) % len(own)
    indices, count, tokens = dims[axis : axis + len(rank)], own[axis], Axes()
    slots = _slots(table, indices, viewer)
    if slots is not None:
        table, indices, tokens = slots
        quotient = own[axis].exact_div(viewer.space.size(tokens))
        if quotient is None:
            return None
        count = quotient
    blocks = viewer.space.new(count)
    place = (*dims[:axis], blocks + tokens, *dims[axis + len(rank) :])
    return _Gathered(node, place, blocks, table, indices, quant)


def _slots(value: ir.Value, dims: Arrangement, viewer: Viewer) -> tuple[ir.Value, Arrangement, Axes] | None:
    """The table, its arrangement and the axes of a block's tokens, where indices are table * size + token.

    A table entry that counts from the end gives slots that count from the end, and in the same block. No other entry
    gives negative slots. An entry whose slots overflow is out of range for the operator.
    """
    while (moved := _through(value, dims, viewer)) is not None:
        value, dims = moved
    node, shape = value.producer(), viewer.info.shape(value)
    if node is None or not is_op(node, "Add") or not shape or shape[-1].const is None or not dims[-1]:
        return None
    positions, last = Positions(viewer.info, shape), len(shape) - 1
    operands = positions.operands(node, positions.identity_index)
    for (scaled, index), offset in (operands, operands[::-1]):
        maker = None if scaled is None else scaled.producer()
        factor = viewer.factor(maker) if maker is not None and is_op(maker, "Mul") else None
        if index is None or factor is None or factor[1] != shape[-1].const:
            continue
        table, own = factor[0], viewer.info.shape(factor[0])
        along = [next((k for k in range(last) if each == Affine.index(k, last + 1)), None) for each in index]
        fits = (
            own is not None
            and len(own) == len(index)
            and all(size == (1 if k is None else shape[k]) for size, k in zip(own, along, strict=True))
        )
        if fits and as_integer(positions.number(*offset)) == Affine.index(last, last + 1):
            return table, tuple(() if k is None else dims[k] for k in along), dims[-1]
    return None


def _through(value: ir.Value, dims: Arrangement, viewer: Viewer) -> tuple[ir.Value, Arrangement] | None:
    """The base of a value arranged as `dims`, and the base's arrangement; None where the value is its own base."""
    view = viewer.view(value, factors=False)
    if view is None or view.base is value or len(view.dims) != len(dims):
        return None
    if not all(viewer.space.unify(own, known) for own, known in zip(view.dims, dims, strict=True)):
        return None
    return view.base, view.base_dims


def _tokens(found: _Gathered, columns: Axes, data: Arrangement) -> tuple[Axes, Axes] | None:
    """The axes of `columns` that count blocks, and those that count tokens in a block; None where one is empty."""
    owned: set[Axis] = {axis for dim in data for axis in dim}
    count = next((index for index, axis in enumerate(columns) if axis in owned), len(columns))
    pages, tokens = columns[:count], columns[count:]
    return (pages, tokens) if pages and tokens and owned.issuperset(tokens) else None


def _table(found: _Gathered, viewer: Viewer) -> View:
    """The table that the indices come from, without the layout operators and integer casts between."""
    value, dims = found.table, found.indices
    while True:
        moved = _through(value, dims, viewer)
        if moved is not None:
            value, dims = moved
            continue
        node = value.producer()
        source = node.inputs[0] if is_op(node, "Cast") and node is not None else None
        if source is None or viewer.info.dtype(source) not in INDICES or viewer.info.dtype(value) != INT64:
            return View(value, dims, dims)
        value = source


def _pool(
    found: _Gathered,
    tokens: Axes,
    heads: Axes,
    depth: Axes,
    folded: bool,
    match: AttentionMatch,
    viewer: Viewer,
) -> CacheSource | None:
    """The pool of a cache in one of the two forms; None where that takes a copy.

    The form is (blocks, tokens, heads x size) if `folded`, else (blocks, heads, tokens, size).
    """
    data, space = found.node.inputs[0], viewer.space
    assert data is not None
    value, dims, quant = data, found.data, found.quantised
    while True:
        form = space.resolve_all(
            (found.blocks, tokens, heads + depth) if folded else (found.blocks, heads, tokens, depth)
        )
        own = space.resolve_all(dims)
        same = {axis for dim in own for axis in dim} == {axis for dim in form for axis in dim}
        plan = plan_moves(own, form) if same else None
        inner = match_dequantize(value, dims, match.dtype, viewer.info) if quant is None else None
        if inner is not None:
            value, quant = inner.value, inner
            continue
        if plan is not None and cost(plan) < COPY_COST:
            return CacheSource(value, own, tuple(plan), quant)
        moved = _through(value, dims, viewer)
        if moved is None:
            return None
        value, dims = moved
