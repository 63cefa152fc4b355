"""IncreFlashAttention instead of FlashAttentionScore: the attention of one token to cached keys and values.

Accepted, given a match and the inputs a FlashAttentionScore would have:

    rows        one query row. It is proven, or the user vouches for it (`--assume decode`): the operator refuses every
                run with more rows
    layout      BSH, BSND or BNSD. Key and value have the same head size; query, key and value are proven to have the
                same batch size
    band        none, or the causal one from the bottom right corner: a single token is the last one and sees every key
    lengths     a mask that keeps the keys below a length or from a start on (lengths.py). A batch entry without keys
                gives 0. So the model must have no such entry, or give 0 for it, or give NaN, which a Where after the
                operator then puts in. Pages without such a mask get the number of all keys as the length
    atten_mask  any other mask of one row for each batch entry, [B,1,1,S2], with no bias beside it. The operator gives
                masked keys the score -1e12, so a row that is masked everywhere is the mean of the values. The model
                must have no such row, or give the mean for it, too. Beside other keys a masked key must have no weight.
                That is proven for float16, whose products do not get near -1e12 with an ordinary scale; for other types
                the user vouches for it (`--assume masks-dominate`). A selection with the fill -1e12 itself
                (NPUIncreFlashAttention) needs no proof and may have biases beside it. Where the model leaves the number
                of the mask's columns open, it must be the number of keys in the run, as for FlashAttentionScore
    pse_shift   biases that are added, of the query's type, [B or 1,N1,1,S2]; if the number of query rows is open, they
                may have as many. Both operators add them after the scale
    caches      float tensors; or both from int8 by DequantizeLinear with constant scales (quantization.py), in the
                query's type; or gathered from pools of blocks by a table (paging.py), without making the gathered copy

For Ascend an IncreFlashAttention is emitted wherever the product takes it. For ONNX Runtime it is emitted where the
caches are pages or quantised: contiguous float caches are read equally fast by the CPU kernels of both operators.
Everything else stays a FlashAttentionScore: sinks, dropout, packed sequences, guards, other bands. The Decline that is
raised here says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import DECODE, MASKS_DOMINATE, NO_EMPTY_ROWS, NO_EMPTY_ROWS_HINT, Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import INT64, Builder, LayoutEmitter
from fa_compiler.passes.layout.plan import plan_moves
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.magnitudes import FLOAT16_MAX
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.score_ops import Add, BiasOp, ExcludedPositions, Select
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

    `scored` are the selections that give keys the very score the operator gives masked keys. If `undefined`, a batch
    entry without keys has to give NaN.
    """

    lengths: Lengths
    bias: tuple[BiasOp, ...]
    scored: tuple[ExcludedPositions, ...]
    undefined: bool = False


def _agrees(size: Dim, keys: Dim) -> bool:
    """Does a mask or bias of `size` columns have one column for each key, in every run that does not broadcast it?

    A size that is not known may be 1 in a run. The model broadcasts such a mask, and the operator refuses it.
    """
    return size == keys or (size.const != 1 and not (size.is_const and keys.is_const))


@dataclass(frozen=True)
class IncreFlashMatcher:
    """An attention that may become an IncreFlashAttention, with what the rewriter has planned for it."""

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
        """The contents of the node. Raises Decline where the attention has to stay a FlashAttentionScore."""
        self._check()
        caches = self._caches()
        scales = [cache.quantised for cache in caches if cache.quantised is not None]
        if len(scales) == 1:
            raise self._other("only one of key and value is quantised")
        if self.options.target == "ort" and self.pages is None and not scales:
            raise self._other("FlashAttentionScore reads float caches that lie together as fast")
        limits = self._limits()
        lengths = limits.lengths
        mask, shift = self._mask(lengths.rest, limits), self._shift(limits.bias)
        inputs = {"query": self.inputs["query"], "pse_shift": shift, "atten_mask": mask}
        key, value = (self.emitter.apply(cache.value, cache.dims, cache.plan) for cache in caches)
        inputs |= {"key": key, "value": value}
        if scales:
            inputs |= self._antiquant(scales)
        attrs: dict[str, int | float | str] = {"input_layout": self.layout, "inner_precise": 0}
        if self.pages is not None:
            table = inputs["block_table"] = self.pages.block_table(self.match, key, self.emitter)
            if (self.builder.info.shape(table) or (None,))[0] != self._size("query", 0):
                raise self._other("the block table is not proven to have one row for each batch entry")
            size = attrs["block_size"] = self.pages.block_size
            keys = self.builder.op("Mul", [self.builder.dimension(table, 1), self.builder.ints([size])], INT64)
            inputs |= lengths.build(self.match, keys, self.emitter)
        elif lengths.any:
            inputs |= lengths.build(self.match, self._keys(key), self.emitter)
        undefined = inputs.get("actual_seq_lengths") if limits.undefined else None
        rows = () if self.match.space.size(self.match.roles.q_seq).const == 1 else (DECODE,)
        scores = () if mask is None or limits.scored or self._bounded() else (MASKS_DOMINATE,)
        parts = {
            "pages": self.pages,
            "lengths": lengths.ends,
            "starts": lengths.starts,
            "atten_mask": mask,
            "real_shift": shift,
        }
        mask_label = "+".join(name for name, part in parts.items() if part) or "none"
        return IncreCall(inputs, attrs, (*rows, *scores), mask_label, undefined)

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
        rows = match.space.size(match.roles.q_seq)
        if rows.const is None and DECODE not in self.options.assume:
            raise self._other("the number of query rows is open", f"--assume {DECODE} if every run decodes one token")
        if rows.const not in (None, 1):
            raise self._other("it has several query rows")
        if match.sink is not None or match.dropout is not None or mask.packed is not None:
            raise self._other("it has a sink, dropout or packed sequences")
        if match.rope is not None:
            raise self._other("its scores are a sum of two products")
        if mask.mode is not None and mask.mode.sparse_mode != CORNER_CAUSAL:
            raise self._other("its mask is a band that does not end at the last key")
        if match.space.size(match.roles.head_dim) != match.space.size(match.roles.value_head_dim):
            raise self._other("key and value have different head sizes")
        if self.layout not in LAYOUTS:
            raise self._other(f"its layout is {self.layout}")
        if mask.masked_score is not None:
            raise self._other("masked keys keep a score that others may undercut")
        if mask.nan_rows:
            raise self._other("a guard behind the softmax turns NaN into 0")
        names = ("query",) if self.pages is not None else ("query", "key", "value")
        sizes = {self._size(name, 0) for name in names}
        if len(sizes) > 1 or None in sizes:
            raise self._other("query, key and value are not proven to have one batch size")

    def _limits(self) -> KeyLimits:
        """What excludes keys. A mask may become lengths where the model's result for an entry without keys is kept."""
        mask = self.match.mask
        fills = (step for step in mask.bias[:1] if isinstance(step, Select) and step.fill == MASKED_SCORE)
        scored = tuple(map(ExcludedPositions.by, fills))
        bias = mask.bias[len(scored) :]
        found = self._lengths(mask.masked)
        # NaN is put in by a Where, which ONNX Runtime lacks for bfloat16. Without any keys the model gives 0, not NaN.
        some = self.pages is not None or self.match.space.size(self.match.roles.kv_seq).is_at_least(1)
        repairs = some and self.match.dtype != ir.DataType.BFLOAT16
        if not found.any and repairs and not mask.masked:
            return self._infinite(KeyLimits(found, bias, scored))
        alone = not found.rest and (mask.empty_rows == "zero" or (mask.empty_rows == "nan" and repairs))
        if not found.any or mask.empty_rows == "" or alone:
            return KeyLimits(found, bias, scored, undefined=found.any and mask.empty_rows == "nan")
        if mask.empty_rows != "mean" or not (self._bounded() or MASKS_DOMINATE in self.options.assume):
            reason = "the mask is one of lengths, and an entry of length 0 would give 0 and no longer what it gave"
            raise self._other(reason, f"--assume {NO_EMPTY_ROWS} if every entry has a key")
        return KeyLimits(Lengths(rest=mask.masked), bias, scored)

    def _infinite(self, limits: KeyLimits) -> KeyLimits:
        """The limits with lengths also read from those steps of the bias that add or select -inf."""
        masks: list[ExcludedPositions] = []
        bias: list[BiasOp] = []
        for step in limits.bias:
            mask = excluding(step, self.builder.info)
            read = Lengths() if mask is None else self._lengths((mask,))
            if mask is None or read.rest or not read.any:
                bias.append(step)
            else:
                masks.append(mask)
        found = self._lengths(masks)
        if found.rest:
            return limits
        return KeyLimits(found, tuple(bias), limits.scored, undefined=found.any)

    def _lengths(self, masks: Sequence[ExcludedPositions]) -> Lengths:
        return read_lengths(masks, self.match, self.builder.info, starts=self.pages is None)

    def _mask(self, masked: tuple[ExcludedPositions, ...], limits: KeyLimits) -> ir.Value | None:
        """The atten_mask of the keys that lengths do not exclude, and of those that have the score of masked keys."""
        if not masked and not limits.scored:
            return None
        if masked:
            self._check_mask(bool(limits.scored))
        mask = self.masks(replace(self.match.mask, masked=(*masked, *limits.scored))).atten_mask()
        shape = () if mask is None else self.builder.info.shape(mask) or ()
        keys, batch = self.match.space.size(self.match.roles.kv_seq), self._size("query", 0)
        wanted = (Dim(1),) if len(shape) == 2 and batch == 1 else (batch, Dim(1), Dim(1))
        if tuple(shape[:-1]) != wanted or not _agrees(shape[-1], keys):
            raise self._other("its mask is not one row for each batch entry")
        return mask

    def _check_mask(self, scored: bool) -> None:
        """Check that the operator's atten_mask has the effect of the model's mask. Raises Decline."""
        empty = self.match.mask.empty_rows
        if empty not in ("", "mean"):
            what = {"nan": "is NaN", "zero": "is 0"}.get(empty, "is not masked at all")
            hint = NO_EMPTY_ROWS_HINT
            raise self._other(f"a row that is masked everywhere {what}", hint)
        if scored or self.match.mask.bias:
            raise self._other("it has a bias beside its mask")
        if not self._bounded() and MASKS_DOMINATE not in self.options.assume:
            reason = f"the operator gives masked keys the score {MASKED_SCORE:g}, and a lower score would count less"
            raise self._other(reason, f"--assume {MASKS_DOMINATE} if no score of the model comes near it")

    def _bounded(self) -> bool:
        """Is every score proven to be far above that of a masked key? A soft cap bounds it, or the type: float16
        products are at most 65504^2."""
        if 0.0 < self.match.softcap < -MASKED_SCORE / 10:
            return True
        depth = self.match.space.size(self.match.roles.head_dim).const
        if self.match.dtype != ir.DataType.FLOAT16 or depth is None:
            return False
        return abs(self.match.scale) * depth * FLOAT16_MAX**2 < -MASKED_SCORE / 10

    def _shift(self, steps: tuple[BiasOp, ...]) -> ir.Value | None:
        """The pse_shift that these steps of the bias make; None without steps. Raises Decline."""
        added = all(isinstance(step, Add) for step in steps)
        shift = self.masks(replace(self.match.mask, bias=steps)).real_shift() if added else None
        if added and shift is None:
            return None
        shape = (None if shift is None else self.builder.info.shape(shift)) or ()
        space, roles = self.match.space, self.match.roles
        heads, keys = space.size(roles.heads), space.size(roles.kv_seq)
        batch = len(shape) == 4 and shape[0] in (Dim(1), self._size("query", 0))
        fits = batch and shape[1] == heads and _agrees(shape[3], keys) and shape[2] in (Dim(1), space.size(roles.q_seq))
        if shift is None or not fits or self.builder.info.dtype(shift) != self.match.dtype:
            raise self._other("its bias is not a sum of the query's type for each head and key")
        return shift

    def _size(self, name: str, axis: int) -> Dim | None:
        value = self.inputs.get(name)
        shape = (None if value is None else self.builder.info.shape(value)) or ()
        return shape[axis] if axis < len(shape) else None

    def _caches(self) -> list[CacheSource]:
        """Key and value: the pools of the pages, two int8 caches, or the operands of a FlashAttentionScore."""
        if self.pages is not None:
            pools = [self.pages.key, self.pages.value]
            for pool in pools:
                if pool.quantised is None and self.builder.info.dtype(pool.value) != self.match.dtype:
                    raise self._other("the pool of blocks has another type than the query")
            return pools
        roles = self.match.roles
        head_dims = roles.head_dim, roles.value_head_dim
        views = zip((self.match.key, self.match.value), self.targets, head_dims, strict=True)
        found = [self._dequantized(view, target, head_dim) for view, target, head_dim in views]
        both = [cache for cache in found if cache is not None]
        if len(both) == 2:
            return both
        given = [self.inputs["key"], self.inputs["value"]]
        return [
            CacheSource(value, target, (), None)
            for value, target in zip(given, self.targets, strict=True)
            if value is not None
        ]

    def _dequantized(self, view: View, target: Arrangement, depth: Axes) -> CacheSource | None:
        dims = view.base_dims
        found = match_dequantize(view.base, dims, self.match.dtype, self.builder.info)
        plan = plan_moves(dims, target)
        if found is None or plan is None:
            return None
        known = found.by_channel(self.match.roles.kv_heads, depth, self.match.space)
        return None if known is None else CacheSource(found.value, dims, tuple(plan), found)

    def _antiquant(self, found: list[DequantizedInput]) -> dict[str, ir.Value]:
        """Scales and offsets of key and value: one number each, or one each for every head and element of a head."""
        roles, space = self.match.roles, self.match.space
        channels = [
            each.by_channel(roles.kv_heads, depth, space)
            for each, depth in zip(found, (roles.head_dim, roles.value_head_dim), strict=True)
        ]
        if any(each is None for each in channels):
            raise self._other("the scales of its caches run along other axes than heads and their numbers")
        scales, zeros = (np.stack([each[index] for each in channels if each is not None]) for index in (0, 1))
        if all(each.channels is None for each in found):
            scales, zeros = scales[:, 0, 0], zeros[:, 0, 0]
        else:
            _, heads, size = scales.shape
            form = {"BNSD": (2, heads, 1, size), "BSND": (2, heads, size), "BSH": (2, heads * size)}[self.layout]
            scales, zeros = scales.reshape(form), zeros.reshape(form)
        dtype = self.match.dtype.numpy()
        inputs = {"antiquant_scale": self.builder.constant(scales.astype(dtype), "antiquant")}
        if zeros.any():
            inputs["antiquant_offset"] = self.builder.constant((-zeros).astype(dtype), "antiquant")
        return inputs

    def _other(self, reason: str, hint: str = "") -> Decline:
        return Decline(Code.ILLEGAL, reason, self.match.node, hint)
