"""Which axis plays which role: what tells query from key, and heads from batch.

The key is the operand of the first product that alone has the axes the softmax runs over. The value
is the operand of the product with the values that is not the probabilities. Heads and batch are the
axes that both products walk together; which of them count heads is free to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Axes, AxisSpace, KnownAxes, flat_axes
from fa_compiler.passes.algebra.symbolic import product
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code, other_target
from fa_compiler.passes.ir.nodes import certain, elsewhere
from fa_compiler.passes.layout.operands import Operands
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.score_ops import Term, tensors_of
from fa_compiler.passes.matching.attention_paths import AttentionPaths
from fa_compiler.passes.matching.sinks import FoundSink
from fa_compiler.passes.matching.weights import holds_weights

MAX_HEAD_SIZE = 768


def check_head_size(size: int, what: str, node: ir.Node, options: Options) -> None:
    """Decline a head size over the limit of the Ascend operators and of the CPU kernels. The
    operators of ONNX and ONNX Runtime have no such limit; a runtime may have one
    (op_registry/runtimes.py)."""
    if size <= MAX_HEAD_SIZE or options.is_standard:
        return
    hint = other_target(
        "contrib", "or `fa-compiler optimize --target onnx` has operators without this limit"
    )
    if options.target != "ort":
        hint = ""
    raise Decline(Code.HEAD_SIZE_OVER_768, f"the {what} is {size}", node, hint)


@dataclass(frozen=True)
class Roles:
    """The axes of one attention by what they mean; each may be empty (size 1) or several axes in
    order.

    `q_seq` counts the rows of the scores, `kv_seq` their columns.
    """

    batch: Axes
    heads: Axes
    kv_heads: Axes
    q_seq: Axes
    kv_seq: Axes
    head_dim: Axes
    value_head_dim: Axes

    @staticmethod
    def of(
        paths: AttentionPaths,
        key: KeySide,
        row: str | None,
        pv: Operands,
        found_sink: FoundSink | None,
    ) -> Roles:
        """The roles in an attention whose product with the values is `pv`. Raises Decline."""
        space, qk, after = paths.viewer.space, paths.qk, paths.after
        resolve, product = space.resolve, qk.product
        own = {row, *qk.own_labels(key.side, key.kv_seq, space)}
        shared = [resolve(qk.out_dim(label)) for label in product.out if label not in own]
        q_seq = key.q_seq(qk, row, space)
        sink_heads = _sink_heads(found_sink, paths)
        batch, heads = batch_and_heads(shared, sink_heads)
        if found_sink is not None and not set(sink_heads) <= set(heads):
            raise Decline(
                Code.SHAPE, "the sink is not one number for each head", found_sink.step.node
            )
        head_dim = flat_axes(resolve(qk.dims[0][label]) for label in product.summed)
        value_head_dim = flat_axes(map(resolve, pv.own_dims(1 - after.side)))
        if set(flat_axes(space.resolve_all(pv.out))) != {*batch, *heads, *q_seq, *value_head_dim}:
            raise Decline(
                Code.SHAPE, "the output's axes are not those of query and value", after.product.node
            )
        axes = flat_axes((batch, heads, q_seq, resolve(key.kv_seq), head_dim, value_head_dim))
        if len(set(axes)) != len(axes):
            raise Decline(Code.SHAPE, "one axis would have to play two roles", product.node)
        keys, values = certain(qk.views[key.side]), certain(pv.views[1 - after.side])
        kv_heads = shared_heads(keys, values, heads, space)
        return Roles(batch, heads, kv_heads, q_seq, resolve(key.kv_seq), head_dim, value_head_dim)

    def check_sizes(self, paths: AttentionPaths) -> None:
        """Decline sizes that have to be known before the model runs, and heads the operator does
        not take."""
        space, node = paths.viewer.space, paths.before.product.node
        size = space.size(self.head_dim).const
        if size is None:
            raise Decline(Code.SHAPE, "the head size is not known before the model runs", node)
        options = paths.viewer.facts.options
        check_head_size(size, "head size", node, options)
        width = space.size(self.value_head_dim).const
        check_head_size(width or 0, "head size of the values", paths.after.product.node, options)
        if space.size(self.heads).const is None or space.size(self.kv_heads).const is None:
            raise Decline(
                Code.SHAPE, "the number of heads is not known before the model runs", node
            )

    def check_heads(self, views: Sequence[View], paths: AttentionPaths) -> None:
        """Decline views whose own number of heads is left open.

        Such a number may be 1 in some run and be broadcast, while the operator requires key and
        value to have equal numbers of heads.
        """
        space = paths.viewer.space
        for view in views:
            for dim in view.base_dims:
                own = tuple(axis for axis in space.resolve(dim) if axis in self.heads)
                if own and product(axis.size for axis in dim).exact_div(space.size(own)) is None:
                    reason = (
                        f"how many heads {view.base.name!r} has is not known before the model runs"
                    )
                    raise Decline(Code.SHAPE, reason, paths.before.product.node)


@dataclass(frozen=True)
class KeySide:
    """Which operand of the first product is the key, 0 or 1, and the axes that count the keys."""

    side: int
    kv_seq: Axes

    @staticmethod
    def of(paths: AttentionPaths) -> KeySide:
        """The key by the axes the softmax runs over. Raises Decline."""
        qk, node, space = paths.qk, paths.anchor.node, paths.viewer.space
        kv_seq = _softmax_axes(paths)
        for side in (1, 0):
            if not _is_layer(side, qk, paths.viewer) and qk.own_labels(side, kv_seq, space):
                return KeySide(side, kv_seq)
        raise Decline(Code.AXIS, "the softmax runs over an axis that is not the keys' alone", node)

    def row(self, qk: Operands, terms: tuple[Term, ...], viewer: Viewer) -> str | None:
        """The label of the query's dimension that counts its rows; None where the query has none,
        as a vector.

        Several dimensions may belong to the query alone. A dimension that a mask runs along is
        preferred, then a dimension of open size, then the last dimension. Any choice is right: the
        rest become heads or batches. But a mask knows heads and batches less often, and along a
        batch the keys are repeated.
        """
        resolve = viewer.space.resolve
        known = set(resolve(flat_axes(dim for mask in tensors_of(terms) for dim in mask.dims)))
        free = qk.free(1 - self.side)
        axes = {label: resolve(qk.dims[1 - self.side][label]) for label in free}
        likely = [label for label in free if known.intersection(axes[label])] or free
        open_size = [label for label in likely if viewer.space.size(axes[label]).const is None]
        return next(reversed(open_size or likely), None)

    def q_seq(self, qk: Operands, row: str | None, space: AxisSpace) -> Axes:
        """The axes of the dimension `row` of the query."""
        return () if row is None else space.resolve(qk.dims[1 - self.side][row])


def _sink_heads(found_sink: FoundSink | None, paths: AttentionPaths) -> Axes:
    """The axes along which a sink is not one number; none without a sink."""
    if found_sink is None:
        return ()
    return flat_axes(
        map(paths.viewer.space.resolve, found_sink.sink.varies_along(paths.viewer.info))
    )


def _softmax_axes(paths: AttentionPaths) -> Axes:
    """The axes that the softmax runs over, a sink beside them left out. Raises Decline."""
    anchor, dims, found_sink = paths.anchor, paths.scores.dims, paths.scores.found_sink
    resolve = paths.viewer.space.resolve
    if not anchor.axes or max(anchor.axes) >= len(dims):
        raise Decline(Code.AXIS, "the softmax does not run over one known axis", anchor.node)
    axes = resolve(flat_axes(dims[place] for place in anchor.axes))
    if found_sink is None:
        return axes
    if axes != resolve(found_sink.axes_with_sink):
        reason = "the scores are made longer along another axis than the softmax runs over"
        raise Decline(Code.SCORE_TERM, reason, found_sink.step.node)
    return resolve(found_sink.kv_seq)


def _is_layer(key_side: int, qk: Operands, viewer: Viewer) -> bool:
    """With the key on this side, is the first product a layer, such as the one that makes the keys
    of linear attention, whose softmax runs over them, too?

    A key may have batch dimensions that the query lacks, but not in front of a matrix of weights,
    as x in x W^T. Learned queries stand in front of the key, as Q in Q x^T, or are matrices of
    several heads.
    """
    in_front = key_side == 0 and len(qk.free(key_side)) > 1 and len(qk.dims[1]) == 2
    return in_front and holds_weights(qk.product.operands[1], viewer)


def batch_and_heads(dims: list[Axes], needed: Axes = ()) -> tuple[Axes, Axes]:
    """Batch and head axes of the dimensions before rows and columns.

    With two or more dimensions the last one of constant size counts heads. A single dimension holds
    both when it was merged from a batch and a constant number of heads; else it is the batch. Any
    choice is right, for attention does the same for every index of either; only the number of heads
    has to be known before the run. Dimensions with a part in `needed` are heads.
    """
    if len(dims) < 2:
        merged = flat_axes(dims)
        is_merged = len(merged) > 1 and all(axis.size.is_const for axis in merged[1:])
        return (merged[:1], merged[1:]) if is_merged else (merged, ())
    wanted = [place for place, dim in enumerate(dims) if not set(needed).isdisjoint(dim)]
    constant = [place for place, dim in enumerate(dims) if all(axis.size.is_const for axis in dim)]
    places = wanted or constant[-1:]
    batch = flat_axes(elsewhere(dims, places))
    return batch, flat_axes(dims[place] for place in places)


def shared_heads(key: View, value: View, heads: Axes, space: KnownAxes) -> Axes:
    """The head axes that key and value do not merely repeat.

    Query head n reads kv head n // group, so the repeated axes must be the fastest ones of the head
    dimension; when they are not, key and value are expanded.
    """
    kept = owned_heads((key, value), heads, space)
    return kept if heads[: len(kept)] == kept else heads


def owned_heads(keys: Sequence[View], heads: Axes, space: KnownAxes) -> Axes:
    """The head axes that one of these operands has of its own."""
    owned = set(space.resolve(flat_axes(dim for view in keys for dim in view.base_dims)))
    return tuple(axis for axis in heads if axis in owned)
