"""The caches of a GroupQueryAttention, computed by standard operators outside of it.

past has room for P keys, and S rows are new. Batch entry b has seqlens_k[b] + 1 keys in all, the
longest one total_sequence_length.

    before[b]   the number of keys that are taken from past: 0 in a prompt, that is where S is
                total_sequence_length, whatever past holds; else seqlens_k[b] + 1 - S
    present     [B, K, max(P, total_sequence_length), D]: the first `before` keys of past, then all
                S new rows, even where the batch entry has fewer keys. The rows after these depend
                on the memory: ONNX Runtime writes zeros where past and present are separate
                buffers, and leaves the rows as they are in a shared one

A cache grows where total_sequence_length is proven to be P + S, and to be the number of keys of
every batch entry, as in the files of exporters. The present is then past and the new rows, however
the buffers are bound: a buffer that is past cannot be a larger present.

The other cases are rebuilt exactly, too, and the user says which of them holds. With a shared
buffer the update is one ScatterND. Its output lies where its input does, so it writes only the new
rows; nothing else reads past. With separate buffers past, new rows and zeros are joined, and every
row of present is gathered from there. That costs ONNX Runtime one copy more than the operator made.
On Ascend the buffers are separate.

ONNX Runtime makes sure that past holds the first `before` keys and that present has room for the
new ones: it accepts only a cache that grows by the new rows, or one with room for all keys, and
only lengths within present.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import SEPARATE_CACHES, SHARED_CACHES
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.cache_rows import CacheRows
from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.attention_ops.key_masks import DimRef, KeyMaskBuilder
from fa_compiler.passes.emit.build import INT64
from fa_compiler.passes.ops.movers import element_source

SINCE = 12
"""The first opset with Max of int64; the other operators are older."""


@dataclass(frozen=True)
class RunSizes:
    """The sizes of one run of the operator, computed in the graph.

    `rows` (S) and `total` (total_sequence_length) are int64 [1]; `lengths` (seqlens_k + 1) and
    `before` are int64 [B]; `prompt`, bool [1], says whether the run is a prompt. `full` is the
    number of keys of every batch entry where it is the same one, None where it is not known.
    """

    rows: ir.Value
    total: ir.Value
    lengths: ir.Value
    before: ir.Value
    prompt: ir.Value
    full: Dim | None

    @staticmethod
    def of(call: OpConverter, query: ir.Value, lengths: ir.Value, total: ir.Value) -> RunSizes:
        """The sizes that follow from seqlens_k (`lengths`) and total_sequence_length (`total`).
        Raises Decline."""
        builder = call.builder
        if builder.opset < SINCE:
            raise call.decline(
                Code.READY_MADE, f"its positions cannot be computed in opset {builder.opset}"
            )
        if len(call.shape(lengths)) != 1:
            raise call.decline(
                Code.RANK, f"{lengths.name!r} is not one number for each batch entry"
            )
        key_masks = KeyMaskBuilder(call, DimRef(query, 1), DimRef(query, 1), DimRef(query, 0))
        rows = key_masks.length(key_masks.q_seq)
        most = builder.reshape(builder.cast(total, INT64), [1])
        prompt = builder.equal(rows, most)
        own = key_masks.add_const(builder.cast(lengths, INT64), 1)
        before = builder.where(prompt, builder.ints([0]), builder.sub(own, rows))
        return RunSizes(
            rows, most, own, before, prompt, full_length(call, lengths, call.info.integer(total))
        )

    def after(self, call: OpConverter) -> ir.Value:
        """The number of keys of each batch entry when all S new rows count, int64 [B]."""
        return call.builder.add(self.before, self.rows)


@dataclass(frozen=True)
class Caches:
    """Makes present from past, for keys and for values. Both have the shape [B, K, `room`, D].

    `assumed` is what the user vouches for; it is empty for caches that grow.
    """

    call: OpConverter
    sizes: RunSizes
    rows: CacheRows
    assumed: tuple[str, ...]
    room: Dim

    @staticmethod
    def of(
        call: OpConverter, query: ir.Value, sizes: RunSizes, pasts: Sequence[ir.Value], heads: int
    ) -> Caches:
        """The caches of a call. Raises Decline where the user does not say how past and present are
        bound."""
        for past in pasts:
            if len(call.shape(past)) != 4:
                raise call.decline(
                    Code.RANK, f"{past.name!r} is not [batch, heads, keys, head size]"
                )
        past, options = pasts[0], call.options
        key_masks = KeyMaskBuilder(call, DimRef(query, 1), DimRef(past, 2), DimRef(query, 0))
        rows = CacheRows(call, heads, key_masks.batch)
        if sizes.full is not None and all(
            call.dim(each, 2) + call.dim(query, 1) == sizes.full for each in pasts
        ):
            return Caches(call, sizes, rows, (), sizes.full)
        shared = SHARED_CACHES in options.assume
        if not shared and options.target != "ascend" and SEPARATE_CACHES not in options.assume:
            raise _unsaid(call)
        if shared and not _bindable(call):
            reason = "past or present is no input or output of the model, so that no buffer can be bound to both"
            raise call.decline(Code.READY_MADE, reason)
        if shared:
            return Caches(call, sizes, rows, (SHARED_CACHES,), call.dim(past, 2))
        count = call.builder.max(sizes.total, key_masks.length(key_masks.kv_seq))
        known = call.info.integer(count)
        room = Dim.fresh() if known is None else known
        call.info.set(count, (1,), INT64, (room,))
        call.builder.lengths.setdefault(room, count)
        return Caches(call, sizes, rows, (SEPARATE_CACHES,), room)

    @property
    def grow(self) -> bool:
        """Is present nothing but past and the new rows?"""
        return not self.assumed

    def present(self, past: ir.Value, new: ir.Value) -> ir.Value:
        """The present of a past and new rows [B, K, S, D]."""
        if self.grow:
            return self._sized(self.call.builder.concat([past, new], 2), new)
        if SHARED_CACHES in self.assumed:
            return self._sized(
                self.rows.updated(past, new, self.sizes.before, self.sizes.rows), new
            )
        return self._sized(self._gathered(past, new), new)

    def _gathered(self, past: ir.Value, new: ir.Value) -> ir.Value:
        """The present, each row of it gathered from past, the new rows, or a row of zeros."""
        builder = self.call.builder
        zeros = builder.expand(self._zero(new), self._size_of_rows(new))
        rows = builder.concat([past, new, zeros], 2)
        count = (
            builder.lengths[self.room]
            if self.room.const is None
            else builder.ints([self.room.const])
        )
        places = builder.unsqueeze(builder.range(count), (0,))
        before, after = (
            builder.unsqueeze(number, (1,))
            for number in (self.sizes.before, self.sizes.after(self.call))
        )
        held = builder.length(past, 2)
        moved = builder.add(builder.sub(places, before), held)
        last = builder.add(held, self.sizes.rows)
        kept, added = (builder.less(places, end) for end in (before, after))
        source = builder.where(kept, places, builder.where(added, moved, last))
        index = self.rows.index(builder.unsqueeze(source, (1, 3)), count)
        return builder.op("GatherND", [rows, index])

    def _size_of_rows(self, new: ir.Value) -> ir.Value:
        """[B, K, 1, D], the shape of one row for each head."""
        builder = self.call.builder
        parts = [self.rows.entries(), builder.ints([self.rows.heads, 1]), builder.length(new, 3)]
        return builder.concat(parts, 0)

    def _sized(self, present: ir.Value, new: ir.Value) -> ir.Value:
        """The present, after its shape has been declared."""
        shape = self.call.shape(new)
        self.call.builder.info.set(
            present, (shape[0], shape[1], self.room, shape[3]), self._dtype(new)
        )
        return present

    def _zero(self, like: ir.Value) -> ir.Value:
        dtype = self._dtype(like)
        if dtype is None:
            raise self.call.decline(Code.DTYPE, f"the type of {like.name!r} is unknown")
        return self.call.builder.constant(np.zeros((), dtype.numpy()), "number")

    def _dtype(self, value: ir.Value) -> ir.DataType | None:
        return self.call.info.dtype(value)


def full_length(call: OpConverter, lengths: ir.Value, total: Dim | None) -> Dim | None:
    """`total`, if every number of seqlens_k (`lengths`) is proven to be one less; else None."""
    last = call.info.integer(element_source(lengths, "Cast"))
    if last is None or total is None or last + 1 != total:
        return None
    return total


def _bindable(call: OpConverter) -> bool:
    """Are both pasts inputs of a graph, and both presents outputs?"""
    pasts, presents = (call.input(3), call.input(4)), call.node.outputs[1:3]
    given = all(past is not None and past.is_graph_input() for past in pasts)
    return given and len(presents) == 2 and all(present.is_graph_output() for present in presents)


def _unsaid(call: OpConverter) -> Decline:
    """The Decline where the user has not said how past and present are bound."""
    reason = (
        "what present holds behind the last key depends on whether past and present are one buffer"
    )
    hint = (
        f"--assume {SHARED_CACHES} where each past is bound together with its present (IOBinding), --assume "
        f"{SEPARATE_CACHES} where they are not, as in every Session.run"
    )
    return call.decline(Code.READY_MADE, reason, hint)
