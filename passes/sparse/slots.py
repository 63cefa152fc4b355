"""Reads a mask of the slots of a list as a mask of the keys that they hold.

    slot_mask = top > torch.arange(S)[:, None] + T - S              # the keys after the row, of S rows and T keys

    slots    := no mask | entry > row + keys - rows         keys after the row are excluded: causal
    entry    := the list itself, seen through layout operators and casts between integers

The comparison is a Greater, GreaterOrEqual, Less or LessOrEqual, with the entry on either side,
negated or not. For >= the bound is one more.

Any other mask, such as one that computes otherwise which slots are valid, says nothing about keys.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import is_op, operand_at, producer, sole
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.sparse.key_mask import KeyMask
from fa_compiler.passes.values.positions import Positions

FLIPPED = {
    "Greater": "Less",
    "Less": "Greater",
    "GreaterOrEqual": "LessOrEqual",
    "LessOrEqual": "GreaterOrEqual",
}
NEGATED = {
    "Greater": "LessOrEqual",
    "Less": "GreaterOrEqual",
    "GreaterOrEqual": "Less",
    "LessOrEqual": "Greater",
}
FIRST_AFTER = {"Greater": 0, "GreaterOrEqual": 1}
"""What is added to the last key of a row for the bound that the entries after it are compared
with."""
INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


def slot_key_mask(
    match: AttentionMatch, indices: View, tokens: Dim, viewer: Viewer
) -> KeyMask | None:
    """What the masks of an attention to gathered keys leave visible; None where they are no mask of
    keys.

    `indices` is the list, and `tokens` is the number of keys. The viewer works in a branch of the
    match's axes.
    """
    visible = KeyMask()
    for part in match.mask.masked:
        node, when = producer(part.view.base), part.when
        while is_op(node, "Not", "Identity"):
            when = when is not is_op(node, "Not")
            node = producer(node.inputs[0])
        if not is_op(node, *FLIPPED):
            return None
        if not _is_causal(node, when, part.view, match, indices, tokens, viewer):
            return None
        visible = visible & KeyMask(causal=True)
    return visible


def _is_causal(
    node: ir.Node,
    when: bool,
    mask: View,
    match: AttentionMatch,
    indices: View,
    tokens: Dim,
    viewer: Viewer,
) -> bool:
    """Is a comparison equal to `when` exactly at the entries after their row?"""
    result, space, info = node.outputs[0], viewer.space, viewer.info
    shape, dims = info.sizes(result), space.resolve_all(mask.base_dims)
    row = sole([place for place, dim in enumerate(dims) if dim == space.resolve(match.roles.q_seq)])
    if len(shape) != len(dims) or row is None:
        return False
    positions = Positions(info, shape)
    left, right = positions.operands(node, positions.identity_index)
    last = Affine.index(row, len(shape)) + Affine.number(
        tokens - space.size(match.roles.q_seq), len(shape)
    )
    for word, (entry, _), bound in (
        (node.op_type, left, right),
        (FLIPPED[node.op_type], right, left),
    ):
        if not when:
            word = NEGATED[word]
        number = positions.number(*bound)
        if entry is None or word not in FIRST_AFTER or info.shape(entry) != shape:
            continue
        if number == last + FIRST_AFTER[word] and _is_list(entry, mask, indices, viewer):
            return True
    return False


def _is_list(entry: ir.Value, mask: View, indices: View, viewer: Viewer) -> bool:
    """Is a value the list, slot by slot?"""
    info, resolve = viewer.info, viewer.space.resolve_all
    view = viewer.view_along(entry, mask.base_dims)
    while view is not None and view.base is not indices.base:
        cast = producer(view.base)
        source = operand_at(cast, 0)
        if not is_op(cast, "Cast") or not {info.dtype(source), info.dtype(view.base)} <= set(
            INTEGERS
        ):
            return False
        view = viewer.view_along(source, view.base_dims)
    return view is not None and resolve(view.base_dims) == resolve(indices.base_dims)
