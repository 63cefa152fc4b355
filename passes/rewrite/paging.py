"""Keys and values gathered from a pool of blocks by a block table: the pages of
IncreFlashAttention.

    key = key_pool[block_table].flatten(1, 2)       # pool [blocks, tokens, heads, size], table
                                                    [batch, blocks]
    slots = (block_table[..., None] * block_size + torch.arange(block_size)).flatten(1)
    key = key_pool.flatten(0, 1)[slots]             # token by token

    cache  := layout(Gather(pool, table))           layout operators (views.py), DequantizeLinear
                                                    from int8 in between
            | layout(Gather(tokens, slots))         token by token
    tokens := the pool with blocks and their tokens in one dimension
    slots  := layout(table * size + (0 .. size - 1))
    pool   := layout(any value), DequantizeLinear from int8 in between
    table  := layout(any integer tensor)

    accepted    a pool whose blocks hold the tokens of all key-value heads, arranged as (blocks,
                tokens, heads x size) or (blocks, heads, tokens, size), or so that a Reshape gives
                one of these; a table of one row for each batch entry, or of one row for all; the
                same table for both caches; keys in the order of the blocks, and within a block in
                the order of its tokens
    emitted     the pools as they are, and the table in int32, [batch, blocks of an entry]
    refused     pools that would have to be copied, tables that are not the same for key and value
                or run along heads, pools whose sizes may differ, blocks of unknown size

Sound because a Gather of whole blocks finds token t of the keys in block table[t // size], slot t %
size, and the operator reads it there, too. A Gather counts negative indices from the end; the
operator does not, so the number of blocks is added to them. In every run in which the Gather
succeeds, all table entries then name existing blocks. They fit int32, because no pool has 2^31
blocks. An index that is too large and that no key uses makes only the original fail.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain, takewhile

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.algebra.cases import as_integer
from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import INT64, LayoutEmitter
from fa_compiler.passes.ir.nodes import certain, constant, int_attr, is_op, operand_at, producer
from fa_compiler.passes.layout.plan import COPY_COST, Move, cost, plan_moves
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.matching.roles import Roles
from fa_compiler.passes.rewrite.entries import entry_dims
from fa_compiler.passes.rewrite.quantization import DequantizedInput, match_dequantize
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.positions import Positions

INDICES = (ir.DataType.INT32, ir.DataType.INT64)
FOLDED_HEADS: tuple[str, ...] = ("BNSD", "BSND")
SEPARATE_HEADS: tuple[str, ...] = ("BNSD",)
"""Layouts of the query beside pools of (blocks, tokens, heads x size) and of (blocks, heads,
tokens, size).

BSH is left out. The operator ignores a table without columns; beside a query in BSH it would then
read the first kind of pool as contiguous keys.
"""


@dataclass(frozen=True)
class CacheSource:
    """The tensor that keys or values are read from, and the moves that bring it to the form the
    operator takes.

    It is contiguous, or a pool whose first dimension counts blocks.
    """

    value: ir.Value
    dims: Arrangement
    plan: tuple[Move, ...]
    quantised: DequantizedInput | None


@dataclass(frozen=True)
class Pages:
    """Both pools, the table they share, and the layouts that the query may have beside them.

    `pages` are the axes that count the blocks of a batch entry, `blocks` is the number of blocks in
    a pool.
    """

    key: CacheSource
    value: CacheSource
    table: View
    pages: Axes
    block_size: int
    blocks: Dim
    layouts: tuple[str, ...]

    def block_table(
        self, match: AttentionMatch, pool: ir.Value, emitter: LayoutEmitter
    ) -> ir.Value:
        """The table in int32, [batch, blocks of an entry], without negative indices."""
        builder, dims = emitter.builder, self.table.base_dims
        reason = f"the block table {self.table.base.name!r} is not one row for each batch entry"
        table, dtype = self.table.base, builder.info.dtype(self.table.base)
        content = constant(table)
        if content is None or content.size == 0 or content.min() < 0:
            known = self.blocks.const
            count = builder.dimension(pool, 0) if known is None else builder.ints([known])
            wrapped = builder.add(table, builder.cast(count, dtype or INT64))
            zero = builder.cast(builder.ints([0]), dtype or INT64)
            negative = builder.less(table, zero)
            table = builder.where(negative, wrapped, table)
        return emitter.arranged(
            builder.cast(table, ir.DataType.INT32), dims, (match.roles.batch, self.pages), reason
        )


@dataclass(frozen=True)
class _Slots:
    """The table that indices are computed from, and the axes of the tokens of a block; there are
    none where the table itself has the indices."""

    table: ir.Value
    dims: Arrangement
    tokens: Axes = ()


@dataclass(frozen=True)
class _Gathered:
    """A cache that a Gather makes.

    `data` is the arrangement of the Gather's data and `indices` that of the table; `blocks` are the
    axes of the data that count blocks.
    """

    node: ir.Node
    data: Arrangement
    blocks: Axes
    table: ir.Value
    indices: Arrangement
    quantised: DequantizedInput | None

    def key_columns(self, keys: Axes, space: AxisSpace) -> tuple[Axes, Axes] | None:
        """The axes of the keys that count the blocks of an entry, and those that count the tokens
        of a block; None where one is empty."""
        own = set(chain(*space.resolve_all(self.data)))
        pages = tuple(takewhile(lambda axis: axis not in own, keys))
        tokens = keys[len(pages) :]
        if not pages or not tokens or not own.issuperset(tokens):
            return None
        return pages, tokens


def find_pages(match: AttentionMatch, facts: Facts) -> tuple[AttentionMatch, Pages] | None:
    """The pages an attention reads, and the match with the axes that were split to find them.

    None where the keys are not gathered as blocks of tokens. Raises Decline where they are, but the
    operator cannot read these pages.
    """
    viewer = Viewer(facts, match.space.branch())
    key, value = _gathered(match.key, match, viewer), _gathered(match.value, match, viewer)
    roles, space = viewer.space.settle(match.roles), viewer.space
    if key is None or (columns := key.key_columns(roles.kv_seq, space)) is None:
        return None
    if value is None or (of_value := value.key_columns(roles.kv_seq, space)) is None:
        raise Decline(
            Code.SHAPE, "keys are gathered by a block table, and values are not", key.node
        )
    table = _shared_table(key, value, viewer)
    if table is None or columns != of_value:
        raise Decline(Code.SHAPE, "keys and values are gathered by two block tables", value.node)
    pages, tokens = columns
    size, blocks = space.size(tokens).const, space.size(key.blocks)
    if size is None:
        raise Decline(Code.SHAPE, "the size of a block is not known", key.node)
    if blocks != space.size(value.blocks):
        raise Decline(Code.SHAPE, "the pools may have different numbers of blocks", key.node)
    rows = space.resolve_all((roles.batch, pages))
    if plan_moves(space.resolve_all(table.base_dims), rows) is None:
        raise Decline(Code.SHAPE, "the block table is not one row for each batch entry", key.node)
    pools = _pools(key, value, tokens, roles, match, viewer)
    if pools is None:
        raise Decline(
            Code.SHAPE, "the blocks would have to be rearranged, all of them in each step", key.node
        )
    layouts, of_keys, of_values = pools
    paged = Pages(of_keys, of_values, table, pages, size, blocks, layouts)
    return match.within(space).with_heads(), space.settle(paged)


def _pools(
    key: _Gathered,
    value: _Gathered,
    tokens: Axes,
    roles: Roles,
    match: AttentionMatch,
    viewer: Viewer,
) -> tuple[tuple[str, ...], CacheSource, CacheSource] | None:
    """The pools in the first form in which both are read without a copy, behind the layouts that
    the query may have beside this form; None where both forms take a copy."""
    for layouts in (FOLDED_HEADS, SEPARATE_HEADS):
        key_form = _pool_form(layouts, key.blocks, tokens, roles.kv_heads, roles.head_dim)
        value_form = _pool_form(layouts, value.blocks, tokens, roles.kv_heads, roles.value_head_dim)
        keys, values = _pool(key, key_form, match, viewer), _pool(value, value_form, match, viewer)
        if keys is not None and values is not None:
            return layouts, keys, values
    return None


def _pool_form(
    layouts: tuple[str, ...], blocks: Axes, tokens: Axes, heads: Axes, depth: Axes
) -> Arrangement:
    """The arrangement that a pool has beside a query in these layouts."""
    if layouts is FOLDED_HEADS:
        return blocks, tokens, heads + depth
    return blocks, heads, tokens, depth


def _sources(source: CacheSource, match: AttentionMatch, viewer: Viewer) -> Iterator[CacheSource]:
    """The values that a cache is made of, the nearest first. Layout operators and one
    DequantizeLinear lie between them; the result of this DequantizeLinear is left out."""
    while True:
        if source.quantised is None:
            int8 = match_dequantize(source.value, source.dims, match.dtype, viewer.info)
            if int8 is not None:
                source = replace(source, value=int8.value, quantised=int8)
        yield source
        base = _base(source.value, source.dims, viewer)
        if base is None:
            return
        source = replace(source, value=base[0], dims=base[1])


def _gathered(view: View, match: AttentionMatch, viewer: Viewer) -> _Gathered | None:
    """The Gather after a cache, found through layout operators and a DequantizeLinear; None where
    there is none."""
    sources = _sources(CacheSource(view.base, view.base_dims, (), None), match, viewer)
    source = next((source for source in sources if is_op(source.value.producer(), "Gather")), None)
    if source is None:
        return None
    node = certain(source.value.producer())
    dims, table = source.dims, operand_at(node, 1)
    sizes, listed = viewer.info.shape(operand_at(node, 0)), viewer.info.shape(table)
    if not sizes or listed is None or len(dims) != len(sizes) - 1 + len(listed):
        return None
    axis = int_attr(node, "axis", 0) % len(sizes)
    end = axis + len(listed)
    slots = _slots(table, dims[axis:end], viewer) or _Slots(table, dims[axis:end])
    count = sizes[axis].exact_div(viewer.space.size(slots.tokens))
    if count is None:
        return None
    blocks = viewer.space.new(count)
    data = (*dims[:axis], blocks + slots.tokens, *dims[end:])
    return _Gathered(node, data, blocks, slots.table, slots.dims, source.quantised)


def _slots(value: ir.Value, dims: Arrangement, viewer: Viewer) -> _Slots | None:
    """The slots that are table * size + token; None where the indices are something else.

    A table entry that counts from the end gives slots that count from the end, and in the same
    block. No other entry gives negative slots. An entry whose slots overflow is out of range for
    the operator.
    """
    while (base := _base(value, dims, viewer)) is not None:
        value, dims = base
    node, shape = value.producer(), viewer.info.shape(value)
    if not is_op(node, "Add") or not shape or shape[-1].const is None or not dims[-1]:
        return None
    positions, last = Positions(viewer.info, shape), len(shape) - 1
    operands = positions.operands(node, positions.identity_index)
    for (scaled, index), offset in (operands, operands[::-1]):
        table = _multiplied_table(scaled, shape[-1].const, viewer)
        if index is None or table is None:
            continue
        own = entry_dims(viewer.info.shape(table), index, shape, dims[:-1])
        if own is not None and as_integer(positions.number(*offset)) == Affine.index(
            last, last + 1
        ):
            return _Slots(table, own, dims[-1])
    return None


def _multiplied_table(value: ir.Value | None, size: int, viewer: Viewer) -> ir.Value | None:
    """The table that a Mul multiplies by the size of a block; None for other values."""
    node = producer(value)
    factor = viewer.factor(node) if is_op(node, "Mul") else None
    if factor is None or factor[1] != size:
        return None
    return factor[0]


def _base(
    value: ir.Value, dims: Arrangement, viewer: Viewer
) -> tuple[ir.Value, Arrangement] | None:
    """The base of a value arranged as `dims`, and the base's arrangement; None where the value is
    its own base."""
    view = viewer.view(value, factors=False)
    if view is None or view.base is value or len(view.dims) != len(dims):
        return None
    if not all(viewer.space.unify(own, known) for own, known in zip(view.dims, dims, strict=True)):
        return None
    return view.base, view.base_dims


def _shared_table(key: _Gathered, value: _Gathered, viewer: Viewer) -> View | None:
    """The table that keys and values are gathered by; None where there are two."""
    table, other = _table(key, viewer), _table(value, viewer)
    resolved = viewer.space.resolve_all
    if table.base is not other.base or resolved(table.base_dims) != resolved(other.base_dims):
        return None
    return table


def _table(gathered: _Gathered, viewer: Viewer) -> View:
    """The table that the indices come from, without the layout operators and integer casts
    between."""
    value, dims = gathered.table, gathered.indices
    while True:
        base = _base(value, dims, viewer)
        if base is not None:
            value, dims = base
            continue
        cast = value.producer()
        source = operand_at(cast, 0)
        if (
            not is_op(cast, "Cast")
            or viewer.info.dtype(source) not in INDICES
            or viewer.info.dtype(value) != INT64
        ):
            return View(value, dims, dims)
        value = source


def _pool(
    gathered: _Gathered, form: Arrangement, match: AttentionMatch, viewer: Viewer
) -> CacheSource | None:
    """The pool of a cache, arranged as `form`; None where that takes a copy."""
    space = viewer.space
    start = CacheSource(operand_at(gathered.node, 0), gathered.data, (), gathered.quantised)
    for source in _sources(start, match, viewer):
        own, wanted = space.resolve_all(source.dims), space.resolve_all(form)
        if set(chain(*own)) != set(chain(*wanted)):
            continue
        plan = plan_moves(own, wanted)
        if plan is not None and cost(plan) < COPY_COST:
            return replace(source, dims=own, plan=tuple(plan))
    return None
