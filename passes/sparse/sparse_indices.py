"""The lists of selected keys as sparse_indices, without the entries that the rest of the mask
excludes.

An excluded entry is replaced by an index beyond all keys, which the operator skips at any position
of the list. How an entry is tested depends on the mask:

    causal                  entry > row + keys - rows
    hidden keys (padding)   looked up in [B,T]
    anything else           looked up in the mask itself, [B,S,T]

Where the TopK ranks the scores of a lightning indexer under the same mask, and the user assumes
"close-ranks", a LightningIndexer makes the lists (index_scores.py says why they are the same). It
is told to rank NaN first, as the TopK of ONNX Runtime does. Then neither the scores nor a mask of
rows times keys is computed. Hidden keys get an additional head there, which scores them by the
mask's number and all other keys by 0, so that hidden keys rank last.

A list of blocks cannot leave out a single key of a block. Only the operator's own sparse_mode can,
so that a causal mask is the only one that may stand beside blocks. With it the operator reads no
more entries than the row sees blocks. The list is therefore sorted: the blocks that the row sees
come first, and no block is listed twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.answer.options import CLOSE_RANKS
from fa_compiler.passes.emit.build import INT64, Builder, LayoutEmitter
from fa_compiler.passes.ir.nodes import FOLD_LIMIT, input_of, int_attr, operand_at, without_none
from fa_compiler.passes.sparse.conditions import Condition
from fa_compiler.passes.sparse.emit import Sizes, domain_node
from fa_compiler.passes.sparse.index_scores import IndexScores, index_scores, unmasked
from fa_compiler.passes.sparse.key_mask import KeyMask, PaddedKeys, hidden_keys, read_key_mask
from fa_compiler.passes.sparse.selection import Selection
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import ShapeInfo

INT32, FLOAT, BOOL = ir.DataType.INT32, ir.DataType.FLOAT, ir.DataType.BOOL
BEYOND = 2**31 - 1
"""An index that no sequence has."""

BEHIND = float(np.finfo(np.float32).min)
"""The score of a hidden key."""

OPSET = 13
"""The first opset with batch_dims of GatherND, and with the axes of Squeeze as an input."""
CORNER_CAUSAL = 3
"""The sparse_mode of a causal band from the bottom right corner."""
SORTS_INTEGERS = 11
"""The first opset with a TopK of integers that gives the smallest first."""


@dataclass(frozen=True)
class SparseIndices:
    """sparse_indices [B,S1,1,K], and the sparse_mode and sparse_block_size that go with them.

    `indexer` is the LightningIndexer that makes them, if one does.
    """

    indices: ir.Value
    mode: int
    indexer: ir.Node | None = None
    block: int = 1

    @staticmethod
    def ranked(
        operands: tuple[ir.Value, ir.Value],
        selected: Selection,
        sizes: Sizes,
        whole: KeyMask,
        builder: Builder,
        facts: Facts,
    ) -> SparseIndices | None:
        """The entries made by a LightningIndexer under the mask `whole`.

        None where they are not known to be the model's.
        """
        return SparseIndicesBuilder(operands, selected, sizes, builder, facts).by_indexer(whole)

    @staticmethod
    def of(
        operands: tuple[ir.Value, ir.Value],
        selected: Selection,
        sizes: Sizes,
        builder: Builder,
        facts: Facts,
    ) -> SparseIndices | None:
        """The entries for a query and key in BSND; None where a condition cannot be looked up."""
        made = SparseIndicesBuilder(operands, selected, sizes, builder, facts)
        parts = [made.key_mask(condition) for condition in selected.others]
        known = without_none(parts)
        if selected.block != 1:
            return made.blocks(known) if len(known) == len(parts) else None
        if (
            CLOSE_RANKS in facts.options.assume
            and builder.opset >= OPSET
            and len(known) == len(parts)
        ):
            listed = made.by_indexer(reduce(and_, known, KeyMask()))
            if listed is not None:
                return listed
        entries = selected.entries(builder)
        indices = builder.cast(entries, INT32)
        for condition, part in zip(selected.others, parts, strict=True):
            if part is None or builder.opset < OPSET:
                excluded = made.in_mask(condition)
                if excluded is None:
                    return None
                indices = made.without(indices, excluded)
                continue
            if part.causal:
                indices = made.without(indices, builder.greater(indices, made.last_seen()))
            indices = made.without_hidden(indices, builder.cast(entries, INT64), part)
        return SparseIndices(builder.unsqueeze(indices, [2]), mode=0)


@dataclass(frozen=True)
class SparseIndicesBuilder:
    operands: tuple[ir.Value, ir.Value]
    selected: Selection
    sizes: Sizes
    builder: Builder
    facts: Facts

    def key_mask(self, condition: Condition) -> KeyMask | None:
        """What a condition leaves visible; None where key_mask.py does not read it."""
        return key_mask_of(condition, self.sizes, self.builder.info)

    def blocks(self, parts: Sequence[KeyMask]) -> SparseIndices | None:
        """Entries that are blocks of keys; None where a condition is not causal."""
        if any(part.hidden for part in parts) or self.builder.opset < SORTS_INTEGERS:
            return None
        indices, mode = self.builder.cast(self.selected.entries(self.builder), INT32), 0
        if any(part.causal for part in parts):
            shape = self.builder.shape_of(indices)
            count = self.builder.gather(shape, [2], 0)
            indices = self.builder.op(
                "TopK", [indices, count], {"axis": 2, "largest": 0}, outputs=2
            )
            mode = CORNER_CAUSAL
        return SparseIndices(self.builder.unsqueeze(indices, [2]), mode, block=self.selected.block)

    def without(self, indices: ir.Value, excluded: ir.Value) -> ir.Value:
        """The entries, the excluded ones replaced by an index beyond all keys."""
        beyond = self.builder.constant(np.array(BEYOND, np.int32), "beyond")
        return self.builder.where(excluded, beyond, indices)

    def without_hidden(self, indices: ir.Value, candidates: ir.Value, part: KeyMask) -> ir.Value:
        """The entries [B,S,K] without hidden keys; `candidates` are the keys they name, as
        int64."""
        builder = self.builder
        for hidden in sorted(part.hidden, key=_name):
            keys = hidden_keys(hidden, [self.length(0, 0), self.length(1, 1)], builder)
            points = builder.unsqueeze(candidates, [3])
            excluded = builder.op("GatherND", [keys, points], {"batch_dims": 1})
            indices = self.without(indices, excluded)
        return indices

    def length(self, operand: int, axis: int) -> ir.Value:
        """A dimension of query (0) or key (1), int64 [1]."""
        return self.builder.dimension(self.operands[operand], axis)

    def last_seen(self) -> ir.Value:
        """The last key that each row sees under a causal mask, [1,S,1]."""
        builder, rows, keys = self.builder, self.sizes.q_seq.const, self.sizes.kv_seq.const
        if rows is not None and keys is not None and rows <= FOLD_LIMIT:
            last = np.arange(keys - rows, keys, dtype=np.int32).reshape(1, rows, 1)
            return builder.constant(last, "last_seen")
        end = builder.squeeze(self.length(1, 1), [0])
        start = builder.sub(end, builder.squeeze(self.length(0, 1), [0]))
        step = builder.constant(np.array(1, np.int64), "one")
        counted = builder.op("Range", [start, end, step])
        return builder.unsqueeze(builder.cast(counted, INT32), [0, 2])

    def in_mask(self, condition: Condition) -> ir.Value | None:
        """Whether a condition excludes the listed keys, [B,S1,K]; None where it cannot be looked
        up."""
        builder, whole = self.builder, self.sizes.mask_shape
        value = self._by_rows(condition)
        if value is None:
            return None
        shape = builder.info.sizes(value)
        if any(own not in (size, Dim(1)) for own, size in zip(shape, whole, strict=True)):
            return None
        value = builder.cast(value, BOOL)
        if shape != whole:
            candidates = [(0, 0), (0, 1), (1, 1)]
            target = builder.concat([self.length(*place) for place in candidates], 0)
            value = builder.expand(value, target)
        entries = builder.cast(self.selected.entries(builder), INT64)
        value = builder.op("GatherElements", [value, entries], {"axis": 2})
        if condition.when:
            return value
        return builder.not_(value)

    def _by_rows(self, condition: Condition) -> ir.Value | None:
        """The value of a condition as [B,S1,S2], each of which may be 1; None where it runs along
        heads."""
        builder, value, shape = (
            self.builder,
            condition.value,
            self.builder.info.shape(condition.value),
        )
        if shape is None or len(shape) > 3 + condition.heads:
            return None
        # With the axis of the heads, the dimension in front of the rows is that of the heads.
        if condition.heads and len(shape) >= 3 and shape[-3].const != 1:
            return None
        if len(shape) == 4:
            return builder.squeeze(value, [1])
        if len(shape) < 3:
            return builder.unsqueeze(value, list(range(3 - len(shape))))
        return value

    def by_indexer(self, whole: KeyMask) -> SparseIndices | None:
        """The entries made by a LightningIndexer; None where they are not known to be the
        model's."""
        builder = self.builder
        scores, length = self._ranked_scores(), self.selected.count(builder.info)
        if scores is None or length is None or (count := length.upper) is None:
            return None
        if self._mask_of(scores) != whole:
            return None
        mode = CORNER_CAUSAL if whole.causal else 0
        inputs = self._indexer_inputs(scores, whole)
        attrs: dict[str, int | float | str] = {"sparse_count": count, "sparse_mode": mode}
        if self.facts.options.target == "ort":
            attrs["cpu_nan_scores"] = "first"
        node = domain_node("LightningIndexer", inputs, attrs, builder, self.facts.options)
        if node is None:
            return None
        indices = node.outputs[0]
        if whole.hidden:
            entries = builder.squeeze(indices, [2])
            # An entry of -1 ends the list. It is looked up as the last key: if that one is hidden,
            # the entry is skipped.
            kept = self.without_hidden(entries, builder.cast(entries, INT64), whole)
            indices = builder.unsqueeze(kept, [2])
        return SparseIndices(indices, mode, node)

    def _ranked_scores(self) -> IndexScores | None:
        """The scores that the TopK ranks, the largest first; None where they are not those of an
        indexer."""
        ranked = input_of(self.selected.top, 0)
        if ranked is None or int_attr(self.selected.top, "largest", 1) != 1:
            return None
        return index_scores(ranked, self.sizes.mask_shape, self.facts)

    def _mask_of(self, scores: IndexScores) -> KeyMask | None:
        """The mask under which the keys are ranked, the same for all heads; None where key_mask.py
        does not read it."""
        mask, info = scores.mask, self.builder.info
        if mask is None:
            return KeyMask()
        if len(info.sizes(mask.value)) > 3:
            return None
        return read_key_mask(mask.value, mask.when, self.sizes.q_seq, self.sizes.kv_seq, info)

    def _indexer_inputs(self, scores: IndexScores, whole: KeyMask) -> dict[str, ir.Value]:
        builder = self.builder
        emitter = LayoutEmitter(
            builder,
            scores.space,
            [stop for view in scores.views for stop in view.equivalent_values],
        )
        arranged: list[ir.Value] = []
        for view, wanted in zip(scores.views, scores.wanted, strict=True):
            arranged.append(emitter.arranged(view.base, view.base_dims, wanted))
        query, key, weights = arranged
        if scores.factor != 1.0:
            factor = builder.constant(np.array(scores.factor, np.float32), "factor")
            weights = builder.mul(weights, factor)
        for hidden in sorted(whole.hidden, key=_name):
            query, key, weights = self._behind(hidden, query, key, weights)
        return {"query": query, "key": key, "weights": weights}

    def _behind(
        self, hidden: PaddedKeys, query: ir.Value, key: ir.Value, weights: ir.Value
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """The operands with one more head and one more column, which score a hidden key by the
        mask's number.

        The new head is relu(1 * hidden), and its weight is the mask's number. It adds 0 for all
        other keys.
        """
        builder = self.builder
        keys = hidden_keys(hidden, [self.length(0, 0), self.length(1, 1)], builder)
        column = builder.unsqueeze(builder.cast(keys, FLOAT), [2, 3])
        key = builder.concat([key, column], 3)
        heads, width = consts(builder.info.sizes(query)[2:])
        assert heads is not None and width is not None
        # A head and a column of zeros, and 1 where they meet.
        grown = builder.op("Pad", [query, builder.ints([0, 0, 0, 0, 0, 0, 1, 1])])
        corner = np.zeros((1, 1, heads + 1, width + 1), np.float32)
        corner[0, 0, -1, -1] = 1
        query = builder.add(grown, builder.constant(corner, "corner"))
        weights = builder.op("Pad", [weights, builder.ints([0, 0, 0, 0, 0, 1])])
        number = np.zeros(heads + 1, np.float32)
        number[-1] = BEHIND
        return query, key, builder.add(weights, builder.constant(number, "behind"))


def _name(hidden: PaddedKeys) -> str:
    return str(hidden.value.name)


def selects_in_every_row(selected: Selection, sizes: Sizes, facts: Facts) -> bool:
    """Is every row proven to have a listed key that nothing excludes?

    It is so without other masks. It is also so where the mask beside the selection is causal, the
    keys are ranked under the same mask, and there are no more rows than keys: the first key of the
    list is then one that the row sees.
    """
    count = selected.count(facts.info)
    if count is None or not count.is_at_least(1) or selected.block != 1:
        return False
    parts = [key_mask_of(condition, sizes, facts.info) for condition in selected.others]
    causal = all(part == KeyMask(causal=True) for part in parts)
    return not parts or (causal and ranks_causally(selected.top, sizes, facts))


def ranks_causally(top: ir.Node, sizes: Sizes, facts: Facts) -> bool:
    """Does a TopK rank the keys under a causal mask in which every row sees a key?"""
    info, ranked = facts.info, operand_at(top, 0)
    if info.dtype(ranked) != FLOAT or int_attr(top, "largest", 1) != 1:
        return False
    if not (sizes.kv_seq - sizes.q_seq).is_at_least(0):
        return False
    masks = [mask for _, mask in unmasked(ranked, facts) if mask is not None]
    return any(
        len(info.sizes(mask.value)) in (2, 3)
        and read_key_mask(mask.value, mask.when, sizes.q_seq, sizes.kv_seq, info)
        == KeyMask(causal=True)
        for mask in masks
    )


def key_mask_of(condition: Condition, sizes: Sizes, info: ShapeInfo) -> KeyMask | None:
    """What a condition leaves visible; None where key_mask.py does not read it."""
    rank = len(info.sizes(condition.value))
    if rank not in (2, 3 + condition.heads):
        return None
    return read_key_mask(condition.value, condition.when, sizes.q_seq, sizes.kv_seq, info)
