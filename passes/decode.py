"""IncreFlashAttention in the place of FlashAttentionScore: attention of one token on cached keys and values.

Accepted, given a match and the inputs a FlashAttentionScore would have:

    rows        one, proven, or vouched for by `--assume decode`: the operator refuses every other run
    layout      BSH, BSND or BNSD; key and value of one head size; one batch size, proven
    band        none, or the causal one from the bottom right corner: one token is the last and sees every key
    atten_mask  one row for each batch entry, [B,1,1,S2], without a bias beside it, and rows masked everywhere are the
                mean of the values, which the operator gives them: masked keys have the score -1e12. That they weigh
                nothing beside other keys is proven for float16, whose products cannot get as low as -1e12 by a
                common scale; else the user vouches for it (`--assume masks-dominate`)
    real_shift  biases that were added, of the query's type, [B or 1,N1,1,S2]: both operators add them after the scale
    caches      as they are; or both by DequantizeLinear from int8 with one constant scale each, in the query's type:
                (x - zero point) * scale is the operator's (x + offset) * scale with offset = -zero point, exactly

Emitted for Ascend wherever the product takes it, and for ONNX Runtime where the caches are quantised: the dequantised
copy is then never made. For float caches the CPU kernels of both operators read the same bytes at the same speed.
Everything else stays a FlashAttentionScore: sinks, dropout, packed sequences, guards, other bands. Nothing is declined
here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.axes import Arrangement
from fa_compiler.passes.build import Builder, Mover
from fa_compiler.passes.layout import Move, moves
from fa_compiler.passes.match import AttentionMatch
from fa_compiler.passes.nodes import constant, int_attr, is_op
from fa_compiler.passes.options import DECODE, MASKS_DOMINATE, Options
from fa_compiler.passes.symbolic import Dim
from fa_compiler.passes.terms import Add
from fa_compiler.passes.views import View

OP = "IncreFlashAttention"
LAYOUTS = ("BSH", "BSND", "BNSD")
CORNER_CAUSAL = 3
"""The sparse_mode of a causal band from the bottom right corner."""
MASKED_SCORE = -1e12
"""The operator's score of a masked key."""
LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Quantised:
    """A cache behind a DequantizeLinear: the int8 value, the moves to the layout, scale and zero point."""

    value: ir.Value
    dims: Arrangement
    plan: tuple[Move, ...]
    scale: np.floating
    zero_point: int


@dataclass(frozen=True)
class Step:
    """The inputs and attributes of an IncreFlashAttention, and what the user vouched for."""

    inputs: dict[str, ir.Value | None]
    attrs: dict[str, int | float | str]
    assumed: tuple[str, ...] = ()


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

    def step(self) -> Step | None:
        """The node's contents, or None where it has to be a FlashAttentionScore."""
        if not self._applies():
            return None
        caches = [self._quantised(view, to) for view, to in zip(self._caches, self.targets, strict=True)]
        quantised = [cache for cache in caches if cache is not None]
        if self.options.target == "ort" and len(quantised) < 2:
            return None
        inputs = {name: self.inputs.get(name) for name in ("query", "key", "value")}
        if len(quantised) == 2:
            key, value = (self.mover.apply(cache.value, cache.dims, cache.plan) for cache in quantised)
            inputs |= {"key": key, "value": value, "antiquant_scale": self._pair([c.scale for c in quantised])}
            if any(cache.zero_point for cache in quantised):
                inputs["antiquant_offset"] = self._pair([-cache.zero_point for cache in quantised])
        inputs["pse_shift"] = self.inputs.get("real_shift")
        if self.match.mask.masked:
            inputs["atten_mask"] = self.inputs.get("atten_mask")
        assumed = (MASKS_DOMINATE,) if self.match.mask.masked and not self._bounded() else ()
        return Step(inputs, {"input_layout": self.layout, "inner_precise": 0}, (*self._open_rows(), *assumed))

    def _open_rows(self) -> tuple[str, ...]:
        return () if self.match.space.size(self.match.roles.rows).const == 1 else (DECODE,)

    def _bounded(self) -> bool:
        """Is no score as low as that of a masked key? A product of float16 numbers is at most 65504^2."""
        depth = self.match.space.size(self.match.roles.depth).const
        if self.match.dtype != ir.DataType.FLOAT16 or depth is None:
            return False
        return abs(self.match.scale) * depth * LARGEST_HALF**2 < -MASKED_SCORE / 10

    @property
    def _caches(self) -> tuple[View, View]:
        return self.match.key, self.match.value

    def _applies(self) -> bool:
        match, mask = self.match, self.match.mask
        rows = match.space.size(match.roles.rows)
        one_row = rows.const == 1 or (rows.const is None and DECODE in self.options.assume)
        plain = match.sink is None and match.dropout is None and mask.packed is None
        band = mask.mode is None or mask.mode.sparse_mode == CORNER_CAUSAL
        same_size = match.space.size(match.roles.depth) == match.space.size(match.roles.value_depth)
        if not (one_row and plain and band and same_size and self.layout in LAYOUTS):
            return False
        if mask.value is not None or mask.nan_rows:
            return False
        if mask.masked and (mask.empty_rows != "mean" or mask.shifts or self.inputs.get("atten_mask") is None):
            return False
        if mask.masked and not self._bounded() and MASKS_DOMINATE not in self.options.assume:
            return False
        return self._one_batch() and self._mask_fits() and self._shift_fits()

    def _one_batch(self) -> bool:
        sizes = {self._size(name, 0) for name in ("query", "key", "value")}
        return len(sizes) == 1 and None not in sizes

    def _mask_fits(self) -> bool:
        if not self.match.mask.masked:
            return True
        shape = self._shape("atten_mask")
        keys = self.match.space.size(self.match.roles.columns)
        if len(shape) == 2:  # rows and keys: of one batch entry
            return self._size("query", 0) == 1 and shape[0] == 1 and shape[1] == keys
        fits = len(shape) == 4 and shape[0] == self._size("query", 0) and shape[3] == keys
        return fits and all(size == 1 for size in shape[1:3])

    def _shift_fits(self) -> bool:
        shift = self.inputs.get("real_shift")
        if shift is None:
            return True
        if not all(isinstance(step, Add) for step in self.match.mask.shifts):
            return False
        shape, space, roles = self._shape("real_shift"), self.match.space, self.match.roles
        if len(shape) != 4 or self.builder.info.dtype(shift) != self.match.dtype:
            return False
        heads, keys = space.size(roles.heads), space.size(roles.columns)
        return shape[0] in (Dim(1), self._size("query", 0)) and shape[1] == heads and shape[2] == 1 and shape[3] == keys

    def _shape(self, name: str) -> tuple[Dim, ...]:
        value = self.inputs.get(name)
        return tuple((None if value is None else self.builder.info.shape(value)) or ())

    def _size(self, name: str, axis: int) -> Dim | None:
        shape = self._shape(name)
        return shape[axis] if axis < len(shape) else None

    def _quantised(self, view: View, target: Arrangement) -> Quantised | None:
        node = view.base.producer()
        if node is None or not is_op(node, "DequantizeLinear") or len(node.inputs) < 2:
            return None
        x, scale = node.inputs[0], constant(node.inputs[1])
        point = node.inputs[2] if len(node.inputs) > 2 else None
        zero = np.zeros(1) if point is None else constant(point)
        if x is None or scale is None or zero is None or scale.size != 1 or zero.size != 1:
            return None
        if self.builder.info.dtype(x) != ir.DataType.INT8 or int_attr(node, "block_size", 0):
            return None
        if self.builder.info.dtype(view.base) != self.match.dtype or scale.dtype != self.match.dtype.numpy():
            return None
        if not np.isfinite(scale).all():
            return None
        dims = self.match.space.resolve_all(view.base_dims)
        plan = moves(dims, target)
        if plan is None:
            return None
        return Quantised(x, dims, tuple(plan), scale.reshape(-1)[0], int(zero.reshape(-1)[0]))

    def _pair(self, numbers: list[int] | list[np.floating]) -> ir.Value:
        return self.builder.constant(np.array(numbers, dtype=self.match.dtype.numpy()), "antiquant")
