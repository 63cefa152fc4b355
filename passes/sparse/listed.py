"""Attention to gathered keys: SparseFlashAttention on what they were gathered from, with the list.

    accepted    an attention whose keys and values are both gathered (gathers.py) from as many tokens by one list
                [.., K]; masks of its slots that every head shares, as a boolean; factors on query and result
    emitted     SparseFlashAttention in BSND; a slot that is masked gets a place beyond all tokens
    left        (the attention is then fused on the gathered keys)
                a bias on the slots, a sink, dropout, masked slots with a score of their own; a mask whose empty rows
                give the mean of what was gathered, which has no name in the operator: `--assume no-empty-rows`; a list
                that may have more entries than there are tokens, of which the operator would leave some out; Ascend

What the axes of the query are follows from who has them:

    source  list
    yes     yes     batch; a head of keys where the matcher has it as a head
    yes     no      a head of keys
    no      yes     a row
    no      no      a head of a group

Sound because gathering and multiplying is what the operator does: slot by slot, an entry that is listed twice counting
twice in both. Entries below 0 count from the end in ONNX and end the list in the operator: they are made positive
unless they come from a TopK.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.axes import Arrangement, Axes
from fa_compiler.passes.build import Mover
from fa_compiler.passes.decline import Decline, label
from fa_compiler.passes.emit import Emitter, Fused
from fa_compiler.passes.factors import multiplied
from fa_compiler.passes.layout_plan import Place, best_landing, cheapest_source, landing_places
from fa_compiler.passes.mask_builder import MaskBuilder
from fa_compiler.passes.match import AttentionMatch, Roles
from fa_compiler.passes.nodes import int_attr
from fa_compiler.passes.options import NO_EMPTY_ROWS
from fa_compiler.passes.report import Code
from fa_compiler.passes.sparse.emit import Rows, attention
from fa_compiler.passes.sparse.entries import BEYOND
from fa_compiler.passes.sparse.gathers import Gathered, gathered
from fa_compiler.passes.views import View, Viewer

INT32 = ir.DataType.INT32
EMPTY_ROWS = ("", "zero", "nan")


@dataclass(frozen=True)
class Listed:
    """A match with the roles of the sparse operator: its columns are the slots, `tokens` what they are gathered from;
    with `wraps` entries may be negative."""

    match: AttentionMatch
    key: View
    value: View
    tokens: Axes
    indices: View
    wraps: bool

    @property
    def lists(self) -> Arrangement:
        """sparse_indices [B,S1,N2 or 1,K]."""
        roles, space = self.match.roles, self.match.space
        own = {axis for dim in self.indices.base_dims for axis in space.resolve(dim)}
        heads = roles.kv_heads if own.intersection(roles.kv_heads) else ()
        return roles.batch, roles.rows, heads, roles.columns


def emit_listed(match: AttentionMatch, emitter: Emitter, notes: list[str]) -> Fused | None:
    """Put a SparseFlashAttention in the place of an attention to gathered keys; None where it is none. `notes` is told
    what the user could vouch for."""
    if emitter.options.target != "ort" or not _is_plain(match):
        return None
    places = landing_places(match, emitter.builder)
    listed = _listed(match.refined(), Viewer(emitter.builder.info, match.space))
    if listed is None:
        return None
    if match.mask.empty_rows not in EMPTY_ROWS:
        reason = "stays on gathered keys, for a row whose slots are all masked gives the mean of what they hold"
        notes.append(f"{label(match.node)}: {reason}; --assume {NO_EMPTY_ROWS} if there is no such row")
        return None
    try:
        return _emit(listed, places, emitter)
    except Decline:
        return None


def _is_plain(match: AttentionMatch) -> bool:
    """Does the attention use nothing that the sparse operator does not have?"""
    mask = match.mask
    if match.sink is not None or match.dropout is not None or mask.packed is not None or mask.mode is not None:
        return False
    return not mask.shifts and mask.value is None and mask.nan_rows in ("", "zero")


def _listed(match: AttentionMatch, viewer: Viewer) -> Listed | None:
    space = match.space
    key, value = (gathered(view.base, space.resolve_all(view.base_dims), viewer) for view in (match.key, match.value))
    if key is None or value is None or space.size(key.tokens) != space.size(value.tokens):
        return None
    same = key.indices.base is value.indices.base and (key.top is None) == (value.top is None)
    if not same or not space.unify(key.tokens, value.tokens):
        return None
    match = match.refined()
    columns, tokens = match.roles.columns, space.resolve(key.tokens)
    own = [
        tuple(axis for dim in space.resolve_all(view.base_dims) for axis in dim)
        for view in (key.source, value.source, key.indices, value.indices)
    ]
    if own[2] != own[3] or not _fits(key, columns, match):
        return None
    of_key, of_value = (tuple(axis for axis in axes if axis not in tokens) for axes in own[:2])
    roles = _roles(match, of_key, of_value, tuple(axis for axis in own[2] if axis not in columns))
    if roles is None:
        return None
    found = replace(match, roles=roles)
    return Listed(found, key.source, value.source, tokens, key.indices, wraps=key.top is None)


def _fits(key: Gathered, columns: Axes, match: AttentionMatch) -> bool:
    """Is no list longer than there are tokens? A TopK lists no key twice."""
    space = match.space
    if key.top is not None:
        axis = int_attr(key.top, "axis", -1)
        return space.resolve(key.indices.base_dims[axis]) == columns
    count, tokens = space.size(columns).const, space.size(key.tokens).const
    return count is not None and tokens is not None and count <= tokens


def _roles(match: AttentionMatch, key: Axes, value: Axes, listed: Axes) -> Roles | None:
    """The roles of the query's axes, by the table above. `key` and `value` are the axes of the sources but the tokens,
    `listed` those of the list but its slots."""
    roles, space = match.roles, match.space
    outer = (*roles.batch, *roles.heads, *roles.rows)
    shared = tuple(axis for axis in key if axis not in roles.depth)
    whole = {*shared, *roles.depth}, {*shared, *roles.value_depth}
    if (set(key), set(value)) != whole or not {*shared, *listed} <= set(outer):
        return None
    kv_heads = tuple(axis for axis in shared if axis not in listed or axis in roles.heads)
    heads = kv_heads + tuple(axis for axis in outer if axis not in shared and axis not in listed)
    if space.size(heads).const is None:
        return None
    return replace(
        roles,
        batch=tuple(axis for axis in shared if axis not in kv_heads),
        heads=heads,
        kv_heads=kv_heads,
        rows=tuple(axis for axis in listed if axis not in shared),
    )


def _emit(listed: Listed, places: list[Place], emitter: Emitter) -> Fused | None:
    match, builder = listed.match, emitter.builder
    roles, space = match.roles, match.space
    views = (match.query, listed.key, listed.value, listed.indices)
    mover = Mover(builder, space, [(stop, space.resolve_all(dims)) for view in views for stop, dims in view.stops])
    wanted = (
        (roles.batch, roles.rows, roles.heads, roles.depth),
        (roles.batch, listed.tokens, roles.kv_heads, roles.depth),
        (roles.batch, listed.tokens, roles.kv_heads, roles.value_depth),
    )
    query, key, value = (_moved(view, dims, match.dtype, mover) for view, dims in zip(views[:3], wanted, strict=True))
    query = multiplied(query, wanted[0], match.query_factors, builder, mover)
    inputs = {"query": query, "key": key, "value": value, "sparse_indices": _entries(listed, key, emitter, mover)}
    rows = Rows(match.mask.empty_rows, match.mask.nan_rows == "zero")
    output = (roles.batch, roles.rows, roles.heads, roles.value_depth)
    landing = best_landing(output, [(place, space.resolve_all(dims), saved) for place, dims, saved in places])
    made = attention(inputs, match.scale, 0, rows, builder)
    if landing is None or made is None:
        return None
    node, result = made
    result = emitter.result(match, result, output, landing, mover)
    emitter.substitute(emitter.substitutes(match, mover))
    emitter.land(landing, result)
    emitter.made.append(node)
    heads, kv_heads = (space.size(axes).const or 1 for axes in (roles.heads, roles.kv_heads))
    return Fused(node, "BSND", (heads, kv_heads), match.mask, match.mask.assumed, (), match.mask.word)


def _moved(view: View, dims: Arrangement, dtype: ir.DataType | None, mover: Mover) -> ir.Value:
    """What is viewed in another arrangement, and type if one is given."""
    source = cheapest_source(view, dims, mover.space)
    if source is None:
        raise Decline(Code.SHAPE, f"{view.base.name!r} could not be arranged for the operator")
    value = source.value if dtype is None else mover.builder.cast(source.value, dtype)
    return mover.apply(value, source.dims, source.plan)


def _entries(listed: Listed, key: ir.Value, emitter: Emitter, mover: Mover) -> ir.Value:
    """sparse_indices: the list, masked slots beyond all tokens."""
    match, builder, lists = listed.match, emitter.builder, listed.lists
    indices = _moved(listed.indices, lists, None, mover)
    if listed.wraps:
        dtype = builder.info.dtype(indices)
        assert dtype is not None
        tokens = (builder.info.shape(key) or ())[1].const
        assert tokens is not None
        zero, length = (builder.constant(np.array(number, dtype.numpy()), "number") for number in (0, tokens))
        negative = builder.op("Less", [indices, zero], ir.DataType.BOOL)
        indices = builder.op("Where", [negative, builder.op("Add", [indices, length], dtype), indices], dtype)
    indices = builder.cast(indices, INT32)
    # Of the heads a mask may know those that have lists of their own.
    grid = replace(match, roles=replace(match.roles, heads=lists[2]))
    masked = MaskBuilder(grid, builder, mover, emitter.options, []).atten_mask()
    if masked is None:
        return indices
    masked = builder.op("Transpose", [masked], ir.DataType.BOOL, {"perm": (0, 2, 1, 3)})
    beyond = builder.constant(np.array(BEYOND, np.int32), "beyond")
    return builder.op("Where", [masked, beyond, indices], INT32)
