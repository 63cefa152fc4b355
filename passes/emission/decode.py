"""IncreFlashAttention in the place of FlashAttentionScore: attention of one token on cached keys and values.

Accepted, given a match and the inputs a FlashAttentionScore would have:

    rows        one, proven, or vouched for by `--assume decode`: the operator refuses every other run
    layout      BSH, BSND or BNSD; key and value of one head size; one batch size, proven
    band        none, or the causal one from the bottom right corner: one token is the last and sees every key
    lengths     a mask that keeps the keys below a length or from a start on (lengths.py), where no row is masked
                everywhere or such a row gave 0, which an entry of no keys gives, or NaN, which is put there. Of pages
                that have none, all keys
    atten_mask  any other mask of one row for each batch entry, [B,1,1,S2], without a bias beside it, and rows masked
                everywhere are the mean of the values, which the operator gives them, or there are none: masked keys
                have the score -1e12. That they weigh nothing beside other keys is proven for float16, whose products
                cannot get as low as -1e12 by a common scale; else the user vouches for it (`--assume masks-dominate`)
                Where it gives keys that very score (NPUIncreFlashAttention) it is the operator's own. A length that the
                model leaves open has to be that of the keys in the run, as for FlashAttentionScore
    real_shift  biases that were added, of the query's type, [B or 1,N1,1,S2], with the one row that is vouched for as
                well: both operators add them after the scale
    caches      as they are; or both by DequantizeLinear from int8 with constant scales (quantised.py), in the query's
                type; or gathered from pools of blocks by a table (paging.py), whose gathered copy is then never made

Emitted for Ascend wherever the product takes it, and for ONNX Runtime where the caches are pages or quantised: for
float caches that lie together the CPU kernels of both operators read the same bytes at the same speed. Everything else
stays a FlashAttentionScore: sinks, dropout, packed sequences, guards, other bands. A Decline here says why.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.build import INT64, Builder, Mover
from fa_compiler.passes.decline import Decline
from fa_compiler.passes.emission.lengths import Lengths, excluding, read_lengths
from fa_compiler.passes.emission.mask_builder import MaskBuilder
from fa_compiler.passes.emission.paging import Cache, Pages
from fa_compiler.passes.emission.quantised import Quantised, quantised
from fa_compiler.passes.emission.step import Step
from fa_compiler.passes.layout.axes import Arrangement, Axes
from fa_compiler.passes.layout.layout import moves
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.magnitudes import FLOAT16_MAX
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.options import DECODE, MASKS_DOMINATE, NO_EMPTY_ROWS, Options
from fa_compiler.passes.report import Code
from fa_compiler.passes.score_ops import Add, BiasOp, Masked, Select
from fa_compiler.passes.values.symbolic import Dim

LAYOUTS = ("BSH", "BSND", "BNSD")
CORNER_CAUSAL = 3
"""The sparse_mode of a causal band from the bottom right corner."""
MASKED_SCORE = -1e12
"""The operator's score of a masked key."""


@dataclass(frozen=True)
class Limits:
    """What excludes keys, the steps of a bias that are left beside it, and what gives keys the operator's own score of
    masked ones. With `undefined` an entry without keys has to give NaN."""

    lengths: Lengths
    bias: tuple[BiasOp, ...]
    scored: tuple[Masked, ...]
    undefined: bool = False


def _agrees(size: Dim, keys: Dim) -> bool:
    """Has a mask or bias as many columns as there are keys, in every run in which the model does not broadcast it?

    An open size may be 1 in a run. The model broadcasts such a mask, and the operator refuses it.
    """
    return size == keys or (size.const != 1 and not (size.is_const and keys.is_const))


@dataclass(frozen=True)
class Decoding:
    """What the emitter knows when it is about to build a node."""

    match: AttentionMatch
    layout: str
    targets: tuple[Arrangement, Arrangement]  # of key and value
    inputs: Mapping[str, ir.Value | None]
    builder: Builder
    mover: Mover
    options: Options
    masks: Callable[[MaskPlan], MaskBuilder]
    pages: Pages | None = None

    def step(self) -> Step:
        """The node's contents. Raises Decline where it has to be a FlashAttentionScore."""
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
        key, value = (self.mover.apply(cache.value, cache.dims, cache.plan) for cache in caches)
        inputs |= {"key": key, "value": value}
        if scales:
            inputs |= self._antiquant(scales)
        attrs: dict[str, int | float | str] = {"input_layout": self.layout, "inner_precise": 0}
        if self.pages is not None:
            table = inputs["block_table"] = self.pages.block_table(self.match, key, self.mover)
            if (self.builder.info.shape(table) or (None,))[0] != self._size("query", 0):
                raise self._other("the block table is not proven to have one row for each batch entry")
            size = attrs["block_size"] = self.pages.block_size
            keys = self.builder.op("Mul", [self.builder.dimension(table, 1), self.builder.ints([size])], INT64)
            inputs |= lengths.build(self.match, keys, self.mover)
        elif lengths.any:
            inputs |= lengths.build(self.match, self._keys(key), self.mover)
        undefined = inputs.get("actual_seq_lengths") if limits.undefined else None
        rows = () if self.match.space.size(self.match.roles.q_seq).const == 1 else (DECODE,)
        scores = () if mask is None or limits.scored or self._bounded() else (MASKS_DOMINATE,)
        words = {
            "pages": self.pages,
            "lengths": lengths.found,
            "starts": lengths.starts,
            "atten_mask": mask,
            "real_shift": shift,
        }
        word = "+".join(word for word, part in words.items() if part) or "none"
        return Step(inputs, attrs, (*rows, *scores), word, undefined)

    def _keys(self, key: ir.Value) -> ir.Value:
        """How many keys there are, int64 [1]; `key` is in the layout."""
        size, axis = self.match.space.size(self.match.roles.kv_seq), self.layout.index("S")
        own = self.builder.info.shape(key)
        if size.const is not None:
            return self.builder.ints([size.const])
        if own is None or own[axis] != size:
            raise self._other("the number of its keys is not known to be that of its mask")
        return self.builder.dimension(key, axis)

    def _check(self) -> None:
        """What does not depend on the caches."""
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
        if mask.value is not None:
            raise self._other("masked keys keep a score that others may undercut")
        if mask.nan_rows:
            raise self._other("a guard behind the softmax turns NaN into 0")
        names = ("query",) if self.pages is not None else ("query", "key", "value")
        sizes = {self._size(name, 0) for name in names}
        if len(sizes) > 1 or None in sizes:
            raise self._other("query, key and value are not proven to have one batch size")

    def _limits(self) -> Limits:
        """What excludes keys. A mask may be told by lengths where an entry without keys gives what it gave."""
        mask = self.match.mask
        fills = (step for step in mask.bias[:1] if isinstance(step, Select) and step.fill == MASKED_SCORE)
        scored = tuple(map(Masked.by, fills))
        bias = mask.bias[len(scored) :]
        found = self._lengths(mask.masked)
        # ONNX Runtime has no Where of bfloat16 to put NaN with; of no keys at all the sum is 0 in the model.
        some = self.pages is not None or self.match.space.size(self.match.roles.kv_seq).is_at_least(1)
        repairs = some and self.match.dtype != ir.DataType.BFLOAT16
        if not found.any and repairs and not mask.masked:
            return self._infinite(Limits(found, bias, scored))
        alone = not found.rest and (mask.empty_rows == "zero" or (mask.empty_rows == "nan" and repairs))
        if not found.any or mask.empty_rows == "" or alone:
            return Limits(found, bias, scored, undefined=found.any and mask.empty_rows == "nan")
        if mask.empty_rows != "mean" or not (self._bounded() or MASKS_DOMINATE in self.options.assume):
            reason = "the mask is one of lengths, and an entry of length 0 would give 0 and no longer what it gave"
            raise self._other(reason, f"--assume {NO_EMPTY_ROWS} if every entry has a key")
        return Limits(Lengths(rest=mask.masked), bias, scored)

    def _infinite(self, limits: Limits) -> Limits:
        """The limits with lengths that are steps of the bias: those that add or put -inf."""
        masks: list[Masked] = []
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
        return Limits(found, tuple(bias), limits.scored, undefined=found.any)

    def _lengths(self, masks: Sequence[Masked]) -> Lengths:
        return read_lengths(masks, self.match, self.builder.info, starts=self.pages is None)

    def _mask(self, masked: tuple[Masked, ...], limits: Limits) -> ir.Value | None:
        """The atten_mask of what is excluded besides, or has the score of what is."""
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
        """Does the operator's atten_mask exclude as the mask did?"""
        empty = self.match.mask.empty_rows
        if empty not in ("", "mean"):
            what = {"nan": "is NaN", "zero": "is 0"}.get(empty, "is not masked at all")
            hint = f"--assume {NO_EMPTY_ROWS} if no query row is masked everywhere"
            raise self._other(f"a row that is masked everywhere {what}", hint)
        if scored or self.match.mask.bias:
            raise self._other("it has a bias beside its mask")
        if not self._bounded() and MASKS_DOMINATE not in self.options.assume:
            reason = f"the operator gives masked keys the score {MASKED_SCORE:g}, and a lower score would count less"
            raise self._other(reason, f"--assume {MASKS_DOMINATE} if no score of the model comes near it")

    def _bounded(self) -> bool:
        """Is no score as low as that of a masked key? A product of float16 numbers is at most 65504^2."""
        depth = self.match.space.size(self.match.roles.head_dim).const
        if self.match.dtype != ir.DataType.FLOAT16 or depth is None:
            return False
        return abs(self.match.scale) * depth * FLOAT16_MAX**2 < -MASKED_SCORE / 10

    def _shift(self, steps: tuple[BiasOp, ...]) -> ir.Value | None:
        """The pse_shift."""
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

    def _caches(self) -> list[Cache]:
        """Key and value: pages, int8 caches where both are, or what FlashAttentionScore would read."""
        if self.pages is not None:
            pools = [self.pages.key, self.pages.value]
            for pool in pools:
                if pool.quantised is None and self.builder.info.dtype(pool.value) != self.match.dtype:
                    raise self._other("the pool of blocks has another type than the query")
            return pools
        roles = self.match.roles
        head_dims = roles.head_dim, roles.value_head_dim
        views = zip((self.match.key, self.match.value), self.targets, head_dims, strict=True)
        found = [self._quantised(view, target, head_dim) for view, target, head_dim in views]
        both = [cache for cache in found if cache is not None]
        if len(both) == 2:
            return both
        given = [self.inputs["key"], self.inputs["value"]]
        return [
            Cache(value, target, (), None)
            for value, target in zip(given, self.targets, strict=True)
            if value is not None
        ]

    def _quantised(self, view: View, target: Arrangement, depth: Axes) -> Cache | None:
        dims = view.base_dims
        found = quantised(view.base, dims, self.match.dtype, self.builder.info)
        plan = moves(dims, target)
        if found is None or plan is None:
            return None
        known = found.by_channel(self.match.roles.kv_heads, depth, self.match.space)
        return None if known is None else Cache(found.value, dims, tuple(plan), found)

    def _antiquant(self, found: list[Quantised]) -> dict[str, ir.Value]:
        """Scales and offsets of key and value: two numbers, or two for each head and number of it."""
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
