"""Reads a mask of the slots of a list as a mask of the keys that they hold.

    slots    := no mask | entry > row + keys - rows         keys after the row are excluded: causal
    entry    := the list itself, seen through layout operators and casts between integers

The comparison is a Greater, GreaterOrEqual, Less or LessOrEqual, with the entry on either side, negated or not. For >=
the bound is one more.

Any other mask, such as one that computes otherwise which slots are valid, says nothing about keys.
"""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.passes.algebra.formula import Affine
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import is_op, producer
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.sparse.key_mask import KeyMask
from fa_compiler.passes.values.positions import Positions

FLIPPED = {"Greater": "Less", "Less": "Greater", "GreaterOrEqual": "LessOrEqual", "LessOrEqual": "GreaterOrEqual"}
NEGATED = {"Greater": "LessOrEqual", "Less": "GreaterOrEqual", "GreaterOrEqual": "Less", "LessOrEqual": "Greater"}
INTEGERS = (ir.DataType.INT32, ir.DataType.INT64)


def slot_key_mask(match: AttentionMatch, indices: View, tokens: Dim, viewer: Viewer) -> KeyMask | None:
    """What the masks of an attention to gathered keys leave visible; None where they are no mask of keys.

    `indices` is the list, and `tokens` is the number of keys. The viewer works in a branch of the match's axes.
    """
    found = KeyMask()
    for part in match.mask.masked:
        node, when = producer(part.view.base), part.when
        while is_op(node, "Not", "Identity"):
            assert node is not None and node.inputs[0] is not None
            when = when is not is_op(node, "Not")
            node = producer(node.inputs[0])
        if node is None or not is_op(node, *FLIPPED):
            return None
        if not _is_causal(node, when, part.view, match, indices, tokens, viewer):
            return None
        found = found & KeyMask(causal=True)
    return found


def _is_causal(
    node: ir.Node, when: bool, mask: View, match: AttentionMatch, indices: View, tokens: Dim, viewer: Viewer
) -> bool:
    """Is a comparison equal to `when` exactly at the entries after their row?"""
    result, space, info = node.outputs[0], viewer.space, viewer.info
    shape, dims = info.shape(result), space.resolve_all(mask.base_dims)
    rows = [place for place, dim in enumerate(dims) if dim == space.resolve(match.roles.q_seq)]
    if shape is None or len(shape) != len(dims) or len(rows) != 1:
        return False
    positions = Positions(info, shape)
    operands = positions.operands(node, positions.identity_index)
    for place in (0, 1):
        word = node.op_type if place == 0 else FLIPPED[node.op_type]
        word = word if when else NEGATED[word]
        entry, bound = operands[place][0], positions.number(*operands[1 - place])
        if entry is None or word not in ("Greater", "GreaterOrEqual") or info.shape(entry) != shape:
            continue
        first = tokens - space.size(match.roles.q_seq) + (1 if word == "GreaterOrEqual" else 0)
        if bound == Affine.index(rows[0], len(shape)) + Affine.number(first, len(shape)) and _is_list(
            entry, mask, indices, viewer
        ):
            return True
    return False


def _is_list(entry: ir.Value, mask: View, indices: View, viewer: Viewer) -> bool:
    """Is a value the list, slot by slot?"""
    info = viewer.info
    view = viewer.view_along(entry, mask.base_dims)
    while view is not None and view.base is not indices.base and is_op(maker := producer(view.base), "Cast"):
        assert maker is not None
        source = maker.inputs[0]
        exact = source is not None and {info.dtype(source), info.dtype(view.base)} <= set(INTEGERS)
        view = viewer.view_along(source, view.base_dims) if exact and source is not None else None
    if view is None or view.base is not indices.base:
        return False
    resolve = viewer.space.resolve_all
    return resolve(view.base_dims) == resolve(indices.base_dims)
