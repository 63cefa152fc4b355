"""IncreFlashAttention instead of FlashAttentionScore: the attention of one token to cached keys and
values.

Accepted, given a match and the inputs a FlashAttentionScore would have:

    rows        one query row. It is proven, or the user vouches for it (`--assume decode`): the
                operator refuses every run with more rows
    layout      BSH, BSND or BNSD. Key and value have the same head size; query, key and value are
                proven to have the same batch size
    band        none, or the causal one from the bottom right corner: a single token is the last one
                and sees every key
    lengths     a mask that keeps the keys below a length or from a start on (lengths.py). A batch
                entry without keys gives 0. So the model must have no such entry, or give 0 for it,
                or give NaN, which a Where after the operator then puts in. Pages without such a
                mask get the number of all keys as the length
    atten_mask  any other mask of one row for each batch entry, [B,1,1,S2], with no bias beside it.
                The operator gives masked keys the score -1e12, so a row that is masked everywhere
                is the mean of the values. The model must have no such row, or give the mean for it,
                too. Beside other keys a masked key must have no weight. That is proven for float16,
                whose products do not get near -1e12 with an ordinary scale; for other types the
                user vouches for it (`--assume masks-dominate`). A selection with the fill -1e12
                itself (NPUIncreFlashAttention) needs no proof and may have biases beside it. Where
                the model leaves the number of the mask's columns open, it must be the number of
                keys in the run, as for FlashAttentionScore
    pse_shift   biases that are added, of the query's type, [B or 1,N1,1,S2]; if the number of query
                rows is open, they may have as many. Both operators add them after the scale
    caches      float tensors; or both from int8 by DequantizeLinear with constant scales
                (quantization.py), in the query's type; or gathered from pools of blocks by a table
                (paging.py), without making the gathered copy

For Ascend an IncreFlashAttention is emitted wherever the product takes it. For ONNX Runtime it is
emitted where the caches are pages or quantised: contiguous float caches are read equally fast by
the CPU kernels of both operators. Everything else stays a FlashAttentionScore: sinks, dropout,
packed sequences, guards, other bands. The Decline that is raised here says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline, first_reason
from fa_compiler.passes.answer.options import (
    DECODE,
    MASKS_DOMINATE,
    NO_EMPTY_ROWS,
    NO_EMPTY_ROWS_HINT,
    ONE_TOKEN_HINT,
    Options,
)
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder, LayoutEmitter
from fa_compiler.passes.ir.nodes import ABSENT, certain, without_none
from fa_compiler.passes.layout.plan import plan_moves
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.magnitudes import FLOAT16_MAX
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.score_ops import Add, BiasOp, BiasOperand, ExcludedPositions, Select
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.rewrite.incre_call import IncreCall
from fa_compiler.passes.rewrite.lengths import Lengths, excluding, read_lengths
from fa_compiler.passes.rewrite.mask_builder import MaskBuilder
from fa_compiler.passes.rewrite.paging import CacheSource, Pages
from fa_compiler.passes.rewrite.quantization import DequantizedInput, match_dequantize

LAYOUTS = ("BSH", "BSND", "BNSD")
CORNER_CAUSAL = 3
"""The sparse_mode of a causal band from the bottom right corner."""
MASKED_SCORE = -1e12
"""The operator's score of a masked key."""


@dataclass(frozen=True)
class KeyLimits:
    """What excludes keys, and the steps of the bias that are left (`bias`).

    `scored` are the selections that give keys the very score the operator gives masked keys. If
    `undefined`, a batch entry without keys has to give NaN.
    """

    lengths: Lengths
    bias: tuple[BiasOp, ...]
    scored: tuple[ExcludedPositions, ...]
    undefined: bool = False


def _agrees(size: Dim, keys: Dim) -> bool:
    """Does a mask or bias of `size` columns have one column for each key, in every run that does
    not broadcast it?

    A size that is not known may be 1 in a run. The model broadcasts such a mask, and the operator
    refuses it.
    """
    return size == keys or (size.const != 1 and not (size.is_const and keys.is_const))


def _has_masked_score(step: BiasOp) -> TypeGuard[Select[BiasOperand]]:
    """Is a step a selection that gives keys the very score the operator gives masked keys?"""
    return isinstance(step, Select) and step.fill == MASKED_SCORE


@dataclass(frozen=True)
class IncreFlashMatcher:
    """An attention that may become an IncreFlashAttention, with what the rewriter has planned for
    it."""

    match: AttentionMatch
    layout: str
    targets: tuple[Arrangement, Arrangement]  # key and value in the layout
    inputs: Mapping[str, ir.Value | None]
    builder: Builder
    emitter: LayoutEmitter
    options: Options
    masks: Callable[[MaskPlan], MaskBuilder]
    pages: Pages | None = None

    def incre_call(self) -> IncreCall:
        """The contents of the node. Raises Decline where the attention has to stay a
        FlashAttentionScore."""
        self._check()
        caches = self._caches()
        scales = self._scales(caches)
        limits = self._limits()
        lengths = limits.lengths
        mask, shift = self._mask(lengths.rest, limits), self._shift(limits.bias)
        key, value = (self.emitter.apply(cache.value, cache.dims, cache.plan) for cache in caches)
        inputs = {
            "query": self.inputs["query"],
            "pse_shift": shift,
            "atten_mask": mask,
            "key": key,
            "value": value,
        }
        inputs |= self._antiquant(scales)
        attrs: dict[str, int | float | str] = {"input_layout": self.layout, "inner_precise": 0}
        if self.pages is not None:
            attrs["block_size"] = self.pages.block_size
            inputs |= self._paged_inputs(self.pages, key, lengths)
        elif lengths.any:
            inputs |= lengths.build(self.match, self._keys(key), self.emitter)
        labelled = {
            "pages": self.pages,
            "lengths": lengths.ends,
            "starts": lengths.starts,
            "atten_mask": mask,
            "real_shift": shift,
        }
        mask_label = "+".join(name for name, part in labelled.items() if part) or "none"
        call = IncreCall(inputs, attrs, self._vouched(mask, limits), mask_label)
        return (
            replace(call, undefined=inputs.get("actual_seq_lengths")) if limits.undefined else call
        )

    def _scales(self, caches: Sequence[CacheSource]) -> list[DequantizedInput]:
        """The scales of both caches; none where the caches are floats. Raises Decline where only
        one cache is quantised, and where a FlashAttentionScore reads the caches as fast."""
        scales = [cache.quantised for cache in caches if cache.quantised is not None]
        if len(scales) == 1:
            raise self._other("only one of key and value is quantised")
        if self.options.target == "ort" and self.pages is None and not scales:
            raise self._other("FlashAttentionScore reads float caches that lie together as fast")
        return scales

    def _paged_inputs(self, pages: Pages, pool: ir.Value, lengths: Lengths) -> dict[str, ir.Value]:
        """The block table, and the lengths of the batch entries in its blocks. Raises Decline."""
        table = pages.block_table(self.match, pool, self.emitter)
        if (self.builder.info.shape(table) or (None,))[0] != self._size("query", 0):
            raise self._other("the block table is not proven to have one row for each batch entry")
        size = self.builder.ints([pages.block_size])
        keys = self.builder.mul(self.builder.dimension(table, 1), size)
        return {"block_table": table, **lengths.build(self.match, keys, self.emitter)}

    def _vouched(self, mask: ir.Value | None, limits: KeyLimits) -> tuple[str, ...]:
        """The assumptions that the node rests on, which the user has made: `_check` and
        `_check_mask` ask for them."""
        vouched = {
            DECODE: self.match.space.size(self.match.roles.q_seq).const != 1,
            MASKS_DOMINATE: mask is not None and not limits.scored and not self._bounded(),
        }
        return tuple(word for word, needed in vouched.items() if needed)

    def _keys(self, key: ir.Value) -> ir.Value:
        """The number of keys, int64 [1]; `key` is arranged in the layout."""
        size, axis = self.match.space.size(self.match.roles.kv_seq), self.layout.index("S")
        own = self.builder.info.shape(key)
        if size.const is not None:
            return self.builder.ints([size.const])
        if own is None or own[axis] != size:
            raise self._other("the number of its keys is not known to be that of its mask")
        return self.builder.dimension(key, axis)

    def _check(self) -> None:
        """Check everything that does not depend on the caches. Raises Decline."""
        match, mask = self.match, self.match.mask
        space, roles = match.space, match.roles
        rows = space.size(roles.q_seq)
        if rows.const is None and DECODE not in self.options.assume:
            raise self._other("the number of query rows is open", ONE_TOKEN_HINT)
        reason = first_reason(
            {
                "it has several query rows": rows.const not in (None, 1),
                "it has a sink, dropout or packed sequences": any(
                    part is not None for part in (match.sink, match.dropout, mask.packed)
                ),
                "its scores are a sum of two products": match.rope is not None,
                "its mask is a band that does not end at the last key": mask.mode is not None
                and mask.mode.sparse_mode != CORNER_CAUSAL,
                "key and value have different head sizes": space.size(roles.head_dim)
                != space.size(roles.value_head_dim),
                f"its layout is {self.layout}": self.layout not in LAYOUTS,
                "masked keys keep a score that others may undercut": mask.masked_score is not None,
                "a guard behind the softmax turns NaN into 0": bool(mask.nan_rows),
                "query, key and value are not proven to have one batch size": not self._has_one_batch_size(),
            }
        )
        if reason is not None:
            raise self._other(reason)

    def _has_one_batch_size(self) -> bool:
        """Are query, key and value proven to have the same batch size? Pages have none."""
        names = ["query"]
        if self.pages is None:
            names += ["key", "value"]
        sizes = {self._size(name, 0) for name in names}
        return len(sizes) == 1 and None not in sizes

    def _limits(self) -> KeyLimits:
        """What excludes keys. A mask may become lengths where the model's result for an entry
        without keys is kept."""
        mask = self.match.mask
        scored = tuple(
            ExcludedPositions.by(step) for step in mask.bias[:1] if _has_masked_score(step)
        )
        limits = KeyLimits(self._lengths(mask.masked), mask.bias[len(scored) :], scored)
        if not mask.masked and self._takes_nan_rows():
            return self._with_infinite_bias(limits)
        if not limits.lengths.any or mask.empty_rows == "":
            return limits
        alone = not limits.lengths.rest
        if alone and mask.empty_rows == "zero":
            return limits
        if alone and mask.empty_rows == "nan" and self._takes_nan_rows():
            return replace(limits, undefined=True)
        if mask.empty_rows == "mean" and self._masks_dominate():
            return replace(limits, lengths=Lengths(rest=mask.masked))
        reason = "the mask is one of lengths, and an entry of length 0 would give 0 and no longer what it gave"
        raise self._other(reason, f"--assume {NO_EMPTY_ROWS} if every entry has a key")

    def _takes_nan_rows(self) -> bool:
        """Can a batch entry without keys give NaN? A Where puts it in, which ONNX Runtime lacks for
        bfloat16. Where no entry has a key the model gives 0, not NaN."""
        some = self.pages is not None or self.match.space.size(self.match.roles.kv_seq).is_at_least(
            1
        )
        return some and self.match.dtype != ir.DataType.BFLOAT16

    def _with_infinite_bias(self, limits: KeyLimits) -> KeyLimits:
        """The limits with lengths also read from those steps of the bias that add or select
        -inf."""
        masks: list[ExcludedPositions] = []
        bias: list[BiasOp] = []
        for step in limits.bias:
            mask = excluding(step, self.builder.info)
            if mask is not None and self._is_of_lengths(mask):
                masks.append(mask)
            else:
                bias.append(step)
        lengths = self._lengths(masks)
        if lengths.rest:
            return limits
        return KeyLimits(lengths, tuple(bias), limits.scored, undefined=lengths.any)

    def _is_of_lengths(self, mask: ExcludedPositions) -> bool:
        """Does a mask consist of lengths and starts alone?"""
        lengths = self._lengths((mask,))
        return lengths.any and not lengths.rest

    def _lengths(self, masks: Sequence[ExcludedPositions]) -> Lengths:
        return read_lengths(masks, self.match, self.builder.info, starts=self.pages is None)

    def _mask(self, masked: tuple[ExcludedPositions, ...], limits: KeyLimits) -> ir.Value | None:
        """The atten_mask of the keys that lengths do not exclude, and of those that have the score
        of masked keys."""
        if not masked and not limits.scored:
            return None
        if masked:
            self._check_mask(bool(limits.scored))
        mask = certain(
            self.masks(replace(self.match.mask, masked=(*masked, *limits.scored))).atten_mask()
        )
        shape = self.builder.info.sizes(mask)
        keys, batch = self.match.space.size(self.match.roles.kv_seq), self._size("query", 0)
        wanted: list[tuple[Dim | None, ...]] = [(batch, Dim(1), Dim(1))]
        if batch == 1:
            wanted.append((Dim(1),))
        if shape[:-1] not in wanted or not _agrees(shape[-1], keys):
            raise self._other("its mask is not one row for each batch entry")
        return mask

    def _check_mask(self, scored: bool) -> None:
        """Check that the operator's atten_mask has the effect of the model's mask. Raises
        Decline."""
        empty = self.match.mask.empty_rows
        if empty not in ("", "mean"):
            what = {"nan": "is NaN", "zero": "is 0"}.get(empty, "is not masked at all")
            hint = NO_EMPTY_ROWS_HINT
            reason = f"a row that is masked everywhere {what} in the model, and the mean of the values there"
            raise self._other(reason, hint)
        if scored or self.match.mask.bias:
            raise self._other("it has a bias beside its mask")
        if not self._masks_dominate():
            reason = f"the operator gives masked keys the score {MASKED_SCORE:g}, and a lower score would count less"
            raise self._other(
                reason, f"--assume {MASKS_DOMINATE} if no score of the model comes near it"
            )

    def _masks_dominate(self) -> bool:
        """Is every score far above that of a masked key, by proof or by the user's word?"""
        return self._bounded() or MASKS_DOMINATE in self.options.assume

    def _bounded(self) -> bool:
        """Is every score proven to be far above that of a masked key? A soft cap bounds it, or the
        type: float16 products are at most 65504^2."""
        if 0.0 < self.match.softcap < -MASKED_SCORE / 10:
            return True
        depth = self.match.space.size(self.match.roles.head_dim).const
        if self.match.dtype != ir.DataType.FLOAT16 or depth is None:
            return False
        return abs(self.match.scale) * depth * FLOAT16_MAX**2 < -MASKED_SCORE / 10

    def _shift(self, steps: tuple[BiasOp, ...]) -> ir.Value | None:
        """The pse_shift that these steps of the bias make; None without steps. Raises Decline."""
        if not steps:
            return None
        shift = None
        if all(isinstance(step, Add) for step in steps):
            shift = self.masks(replace(self.match.mask, bias=steps)).real_shift()
        if (
            shift is None
            or not self._is_by_head_and_key(shift)
            or self.builder.info.dtype(shift) != self.match.dtype
        ):
            raise self._other("its bias is not a sum of the query's type for each head and key")
        return shift

    def _is_by_head_and_key(self, shift: ir.Value) -> bool:
        """Is a bias [B or 1, N1, 1 or as many rows as the query, S2]?"""
        shape = self.builder.info.sizes(shift)
        if len(shape) != 4:
            return False
        batch, heads, rows, keys = shape
        space, roles = self.match.space, self.match.roles
        return (
            batch in (Dim(1), self._size("query", 0))
            and heads == space.size(roles.heads)
            and rows in (Dim(1), space.size(roles.q_seq))
            and _agrees(keys, space.size(roles.kv_seq))
        )

    def _size(self, name: str, axis: int) -> Dim | None:
        """The size of an input along an axis; None where it is unknown."""
        sizes = self.builder.info.sizes(self.inputs.get(name) or ABSENT)
        return dict(enumerate(sizes)).get(axis)

    def _caches(self) -> list[CacheSource]:
        """Key and value: the pools of the pages, two int8 caches, or the operands of a
        FlashAttentionScore."""
        if self.pages is not None:
            return self._pools(self.pages)
        roles = self.match.roles
        head_dims = roles.head_dim, roles.value_head_dim
        views = zip((self.match.key, self.match.value), self.targets, head_dims, strict=True)
        int8 = without_none(self._dequantized(*view) for view in views)
        if len(int8) == 2:
            return int8
        given = zip(map(self.inputs.get, ("key", "value")), self.targets, strict=True)
        return [
            CacheSource(value, target, (), None) for value, target in given if value is not None
        ]

    def _pools(self, pages: Pages) -> list[CacheSource]:
        """The pools of blocks of key and value, of the query's type or quantised. Raises
        Decline."""
        pools = [pages.key, pages.value]
        for pool in pools:
            if pool.quantised is None and self.builder.info.dtype(pool.value) != self.match.dtype:
                raise self._other("the pool of blocks has another type than the query")
        return pools

    def _dequantized(self, view: View, target: Arrangement, depth: Axes) -> CacheSource | None:
        """The int8 cache that a view reads, with scales by head and element; None where there is no
        such cache."""
        dims = view.base_dims
        source = match_dequantize(view.base, dims, self.match.dtype, self.builder.info)
        plan = plan_moves(dims, target)
        if source is None or plan is None:
            return None
        if source.by_channel(self.match.roles.kv_heads, depth, self.match.space) is None:
            return None
        return CacheSource(source.value, dims, tuple(plan), source)

    def _antiquant(self, caches: Sequence[DequantizedInput]) -> dict[str, ir.Value]:
        """Scales and offsets of key and value: one number each, or one each for every head and
        element of a head. Nothing for float caches."""
        if not caches:
            return {}
        roles, space = self.match.roles, self.match.space
        depths = roles.head_dim, roles.value_head_dim
        pairs = [
            cache.by_channel(roles.kv_heads, depth, space)
            for cache, depth in zip(caches, depths, strict=True)
        ]
        known = without_none(pairs)
        if len(known) < len(pairs):
            raise self._other(
                "the scales of its caches run along other axes than heads and their numbers"
            )
        scales, zeros = (np.stack(parts) for parts in zip(*known, strict=True))
        if all(cache.channels is None for cache in caches):
            scales, zeros = scales[:, 0, 0], zeros[:, 0, 0]
        else:
            _, heads, size = scales.shape
            form = {
                "BNSD": (2, heads, 1, size),
                "BSND": (2, heads, size),
                "BSH": (2, heads * size),
            }[self.layout]
            scales, zeros = scales.reshape(form), zeros.reshape(form)
        dtype = self.match.dtype.numpy()
        inputs = {"antiquant_scale": self.builder.constant(scales.astype(dtype), "antiquant")}
        if zeros.any():
            inputs["antiquant_offset"] = self.builder.constant((-zeros).astype(dtype), "antiquant")
        return inputs

    def _other(self, reason: str, hint: str = "") -> Decline:
        return Decline(Code.ILLEGAL, reason, self.match.node, hint)
