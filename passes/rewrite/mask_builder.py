"""Builds the tensors atten_mask and real_shift of a mask plan, in the shapes the target takes.

The CPU kernel takes masks that broadcast. It also takes a mask of a part of the batch, such as that
of the shifted windows of one image in a batch of images: with the attribute cpu_mask_batch it reads
the mask again for each image. For other targets masks are expanded along the dimensions that they
require in full, and the report says how many bytes that adds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, dropwhile

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry.constraints.training import compressed_mask
from fa_compiler.op_registry.sixteen_bit_kernels import GIVE_FLOAT32
from fa_compiler.passes.algebra.axes import Arrangement, Axes
from fa_compiler.passes.algebra.symbolic import product
from fa_compiler.passes.answer.decline import NEWER_OPSET, Decline
from fa_compiler.passes.answer.options import NO_EMPTY_ROWS, NO_EMPTY_ROWS_HINT, Options
from fa_compiler.passes.answer.report import Code, Missed, MissedCode
from fa_compiler.passes.emit.build import Builder, LayoutEmitter
from fa_compiler.passes.ir.nodes import certain, is_op, is_weight, sole
from fa_compiler.passes.layout.views import View
from fa_compiler.passes.masks.magnitudes import FLOAT16_MAX, FLOAT32_MAX
from fa_compiler.passes.masks.narrow import is_constant_along, narrowed
from fa_compiler.passes.masks.score_ops import (
    Add,
    BiasOp,
    BiasOperand,
    ExcludedPositions,
    Floor,
    Scale,
    Select,
    tensors_of,
)
from fa_compiler.passes.masks.structure import ONE_NAME
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.ops.movers import MOVES
from fa_compiler.passes.ops.numbers import LIMITS

LARGEST = {
    ir.DataType.FLOAT: FLOAT32_MAX,
    ir.DataType.FLOAT16: FLOAT16_MAX,
    ir.DataType.BFLOAT16: (2 - 2**-7) * 2.0**127,
}
INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class MaskBuilder:
    """Builds atten_mask and real_shift of one match."""

    match: AttentionMatch
    builder: Builder
    emitter: LayoutEmitter
    options: Options
    missed: list[Missed]
    """What the mask misses is appended here."""
    repeats: bool = False
    """Does the operator repeat a mask of a part of the batch?"""

    @property
    def _groups(self) -> tuple[Axes, ...]:
        roles = self.match.roles
        return roles.batch, roles.heads, roles.q_seq, roles.kv_seq

    def atten_mask(self) -> ir.Value | None:
        """The atten_mask, true where a position is excluded; None where the plan has no mask."""
        parts = self.match.mask.masked
        if not parts:
            return self._mask_of_mode()
        wanted = self._full_groups([part.view for part in parts], rows=True, heads=False)
        batch = self._batch_of(self._mask_views)
        masks = [self._excluded(part, wanted, batch) for part in parts]
        return reduce(lambda one, other: self.builder.or_(one, other), masks)

    def _mask_of_mode(self) -> ir.Value | None:
        """The atten_mask that a sparse_mode asks for; None where there is no such mode."""
        mode = self.match.mask.mode
        if mode is None or self.options.is_standard:
            return None
        if (
            self.options.target == "ort"
            and mode.sparse_mode in (2, 3, 4)
            and self.match.mask.packed is None
        ):
            # The CPU kernel computes the band from the sizes. Beside it, this mask excludes no
            # further key.
            return self.builder.constant(np.zeros((1, 1, 1, 1), np.bool_), "all_keys")
        return self.builder.constant(compressed_mask(mode.sparse_mode), "triangle")

    def prefix(self) -> ir.Value | None:
        """The number of keys that all rows keep, for each batch entry; None where the plan has no
        such prefix. Raises Decline for Ascend if the batch size is open."""
        mode, (batch, *_) = self.match.mask.mode, self._groups
        if mode is None or not mode.prefix:
            return None
        size = self.match.space.size(batch).const
        numbers = self.builder.constant(np.full(size or 1, mode.prefix, np.int64), "prefix")
        if size is not None:
            return numbers
        if self.options.target == "ascend":
            raise Decline(
                Code.ILLEGAL,
                "a prefix needs a batch size that is known before the run",
                self._culprit,
            )
        return self.emitter.repeated(self.emitter.arranged(numbers, ((),), (batch,)), (batch,))

    def sequence_ends(self) -> ir.Value | None:
        """The ends of the packed sequences, counted in tokens over all batches.

        A sequence ends after a token whose label differs from that of the next token, and after the
        last token of a batch.
        """
        view, builder = self.match.mask.packed, self.builder
        if view is None:
            return None
        if builder.opset < 11:
            raise Decline(
                Code.ILLEGAL, "packed sequences need opset 11 or newer", self._culprit, NEWER_OPSET
            )
        batch, _, rows, _ = self._groups
        view = self._unshortened(view)
        labels, reason = view.base, f"{view.base.name!r} could not be arranged by batch and token"
        if builder.info.labels.is_loose(labels) and labels.const_value is not None:
            labels = builder.constant(labels.const_value.numpy(), "blocks")
        # A batch that the labels are said to have may be 1 in a run: the operands tell how often
        # they are repeated.
        labels = self.emitter.arranged(labels, view.base_dims, (batch, rows), reason, self._culprit)
        labels = self.emitter.repeated(labels, (batch, rows))
        one = builder.ints([1])
        earlier, later, last = (
            builder.slice(labels, [start], [end], one)
            for start, end in ((0, -1), (1, INT64_MAX), (-1, INT64_MAX))
        )
        same = builder.equal(earlier, later)
        differs = builder.not_(same)
        # True for the last token; empty where there are no tokens.
        always = builder.equal(last, last)
        ending = builder.concat([differs, always], 1)
        places = builder.op("NonZero", [self._flat(ending)])
        return builder.add(self._flat(places), one)

    def _flat(self, value: ir.Value) -> ir.Value:
        return self.builder.reshape(value, [-1])

    def real_shift(self) -> ir.Value | None:
        """The bias, its steps computed in order; None where it has no steps. Raises Decline."""
        steps = self.match.mask.bias
        if not steps:
            return None
        views = [operand.view for operand in tensors_of(steps)]
        wanted = self._full_groups(views, rows=False, heads=True)
        dtype = self._shift_type(steps)
        batch = self._batch_of(self._bias_views)
        total: ir.Value | None = None
        for step in steps:
            match step:
                case Add(_, operand, sign):
                    value: ir.Value | None = None
                    for view in self._views_of(operand):
                        source = view.base
                        if self._stays_float32(operand, source):
                            source = self._unrounded(source)
                        part = self._arranged(
                            self._signed(source, sign, dtype), view, wanted, batch
                        )
                        value = self._sum(value, part)
                    assert value is not None
                    total = self._sum(total, value)
                case Select(_, operand, keep, fill):
                    (view,) = self._views_of(operand)
                    condition = self._arranged(
                        self.builder.cast(view.base, ir.DataType.BOOL), view, wanted, batch
                    )
                    total = self._selected(condition, keep, fill, total, dtype)
                case Scale(_, factor):
                    assert total is not None
                    total = self.builder.mul(total, self._number(factor, dtype))
                case Floor(_, floor):
                    assert total is not None
                    total = self.builder.max(total, self._number(floor, dtype))
        return total

    def _sum(self, total: ir.Value | None, value: ir.Value) -> ir.Value:
        """A total with a further summand, which may be the first one."""
        if total is None:
            return value
        return self.builder.add(total, value)

    @property
    def attrs(self) -> dict[str, str]:
        """The attribute that tells the operator to repeat a mask; empty where it need not."""
        whole = self._groups[0]
        repeated = any(
            self._batch_of(views) != whole for views in (self._mask_views, self._bias_views)
        )
        if not repeated:
            return {}
        return {"cpu_mask_batch": "repeated"}

    @property
    def _mask_views(self) -> list[View]:
        return [self._unshortened(part.view) for part in self.match.mask.masked]

    @property
    def _bias_views(self) -> list[View]:
        return [
            view for operand in tensors_of(self.match.mask.bias) for view in self._views_of(operand)
        ]

    def _views_of(self, operand: BiasOperand) -> tuple[View, ...]:
        """The views by which an operand is read: those of its summands, if the operator then
        repeats their sum. In 16 bits ONNX Runtime may round the sum or not, so it is read as it
        is."""
        whole = (self._unshortened(operand.view),)
        parts = tuple(map(self._unshortened, operand.summands))
        if not parts or self.builder.info.dtype(operand.view.base) != ir.DataType.FLOAT:
            return whole
        return min(whole, parts, key=lambda views: len(self._batch_of(views)))

    def _batch_of(self, views: Sequence[View]) -> Axes:
        """The batch axes of a mask that is made of these views: those of the operands, without the
        first ones if the views lack them and the operator repeats the mask along them.

        The operator takes every divisor of the batch. So the sizes along the other axes have to be
        proven.
        """
        batch, space = self._groups[0], self.match.space
        if not self.repeats:
            return batch
        dims = [
            (dim, size)
            for view in views
            for dim, size in zip(view.base_dims, self.builder.info.sizes(view.base), strict=True)
            if not set(dim).isdisjoint(batch)
        ]
        if any(space.size(dim) != size for dim, size in dims):
            return batch
        own = set(chain(*(dim for dim, _ in dims)))
        return tuple(dropwhile(lambda axis: axis not in own, batch)) or batch

    def _stays_float32(self, operand: BiasOperand, value: ir.Value) -> bool:
        """Does ONNX Runtime compute this 16-bit operand in float32 and add it to the scores without
        rounding it?"""
        maker, info = value.producer(), self.builder.info
        if not operand.unrounded or maker is None or info.dtype(value) == ir.DataType.FLOAT:
            return False
        if is_op(maker, "Cast") and maker.inputs[0] is not None:
            return info.dtype(maker.inputs[0]) in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        if is_op(maker, *MOVES):
            return operand.moved and value is operand.view.base
        return is_op(maker, *GIVE_FLOAT32)

    def _unrounded(self, value: ir.Value) -> ir.Value:
        """The unrounded form of an operand for which `_stays_float32` is true.

        ONNX Runtime leaves out a Cast that narrows such an operand, so the Cast's input is read.
        """
        maker, builder, dtype = (
            certain(value.producer()),
            self.builder,
            self.builder.info.dtype(value),
        )
        if is_op(maker, "Cast") and maker.inputs[0] is not None:
            return maker.inputs[0]
        # ONNX Runtime has 16-bit kernels for these operators. It uses them in front of a Cast, but
        # not between operators that it computes in float32. Here they are computed in float32, too.
        if is_op(maker, *MOVES) or (is_op(maker, *LIMITS) and not maker.attributes):
            operands = list(maker.inputs)
            for place, operand in enumerate(operands):
                if operand is not None and builder.info.dtype(operand) == dtype:
                    operands[place] = builder.cast(operand, ir.DataType.FLOAT)
            return builder.again(maker, operands)
        return value

    def _signed(self, value: ir.Value, sign: float, dtype: ir.DataType) -> ir.Value:
        """A value in a type, negated if the sign is."""
        value = self.builder.cast(value, dtype)
        if sign > 0:
            return value
        return self.builder.neg(value)

    def _selected(
        self,
        condition: ir.Value,
        keep: bool,
        fill: float,
        total: ir.Value | None,
        dtype: ir.DataType,
    ) -> ir.Value:
        if (
            math.isfinite(fill)
            and abs(fill) > LARGEST[dtype]
            and NO_EMPTY_ROWS not in self.options.assume
        ):
            raise Decline(
                Code.EMPTY_ROWS,
                f"{dtype.name} does not hold {fill:g}; with less, a row that is masked everywhere gives no mean",
                self._culprit,
                NO_EMPTY_ROWS_HINT,
            )
        filled = self._number(fill, dtype)
        own = total or self._number(0.0, dtype)
        return (
            self.builder.where(condition, own, filled)
            if keep
            else self.builder.where(condition, filled, own)
        )

    def _number(self, value: float, dtype: ir.DataType) -> ir.Value:
        """A number as a constant of a type. A finite number is clamped so that it stays finite."""
        if math.isfinite(value):
            value = min(max(value, -LARGEST[dtype]), LARGEST[dtype])
        return self.builder.constant(np.array(value, dtype=dtype.numpy()), "number")

    def _shift_type(self, steps: tuple[BiasOp, ...]) -> ir.DataType:
        """The type of the bias: the query's for a single bias of that type, else float32, in which
        no sum overflows.

        A 16-bit bias that ONNX Runtime adds to the scores unrounded becomes float32
        (mask_terms.py). Raises Decline.
        """
        query = self.match.dtype
        only = sole(steps)
        plain = (
            isinstance(only, Add)
            and only.sign > 0
            and self.builder.info.dtype(only.operand.view.base) == query
        )
        if isinstance(only, Add) and self._stays_float32(
            only.operand, self._unshortened(only.operand.view).base
        ):
            return ir.DataType.FLOAT
        if isinstance(only, Select) and self.options.target != "ort":
            return query
        if self.options.target != "ort" and not plain and query != ir.DataType.FLOAT:
            raise Decline(
                Code.ILLEGAL, "the target takes a bias of the query's type only", self._culprit
            )
        if plain:
            return query
        return ir.DataType.FLOAT

    @property
    def _culprit(self) -> ir.Node:
        return self.match.node

    def _full_groups(self, views: list[View], rows: bool, heads: bool) -> frozenset[int]:
        """The indices of the groups batch, heads, rows, columns that the target requires in
        full."""
        if self.options.target != "ascend":
            return frozenset()
        wanted = {3}
        if heads:
            wanted.add(1)
        if rows:
            wanted.add(2)
            heads_of = set(self._groups[1])
            if any(not heads_of.isdisjoint(chain(*view.base_dims)) for view in views):
                wanted.update((0, 1))
        return frozenset(wanted)

    def _excluded(self, part: ExcludedPositions, full: frozenset[int], batch: Axes) -> ir.Value:
        builder, view = self.builder, self._unshortened(part.view)
        value = view.base
        if part.cut is not None:
            value = self.emitter.cut(value, view.base_dims, part.cut)
        value = builder.cast(value, ir.DataType.BOOL)
        if not part.when:
            value = builder.not_(value)
        return self._arranged(value, view, full, batch)

    def _unshortened(self, view: View) -> View:
        """The view, read from the first of its equivalent values that has all its axes in every
        run, if there is one."""
        space, info = self.match.space, self.builder.info
        for value, dims in view.equivalent_values:
            if not space.short_dims(dims, info.shape(value)):
                return replace(view, base=value, base_dims=dims)
        return view

    def _arranged(self, value: ir.Value, view: View, full: frozenset[int], batch: Axes) -> ir.Value:
        """The value as [B|1, N|1, S1|1, S2|1], expanded along the groups in `full` and those it has
        an axis of. B runs along the axes `batch`."""
        stays = 2 in full and is_weight(view.base)  # narrowed, it would only be expanded again
        own_dims = view.base_dims
        if not stays:
            value, own_dims = self._with_one_row(value, own_dims)
        own = set(chain(*own_dims))
        target: list[Axes] = []
        for index, group in enumerate((batch, *self._groups[1:])):
            kept = index in full or not own.isdisjoint(group)
            target.append(group * kept)
        wanted = set(chain(*target))
        if not own <= wanted:
            raise Decline(
                Code.SHAPE,
                f"{view.base.name!r} runs along an axis the scores do not have",
                self._culprit,
            )
        reason = f"{view.base.name!r} could not be arranged like the scores"
        result = self.emitter.arranged(value, own_dims, tuple(target), reason, self._culprit)
        if own != wanted:
            by_batch = not own.issuperset(target[0])
            self._report_expanded(view.base, result, own_dims, tuple(target), by_batch)
        return result

    def _with_one_row(self, value: ir.Value, dims: Arrangement) -> tuple[ir.Value, Arrangement]:
        """A mask and its arrangement, with a single row where all rows of the scores have the same
        one. A mask may have more rows than the query: then each of its rows is a row of the
        result."""
        rows = self.match.roles.q_seq
        if self.match.space.may_broadcast(rows):
            return value, dims
        for axis, dim in enumerate(dims):
            if dim == rows and is_constant_along(value, axis, self.builder.info):
                value, dims = (
                    narrowed(value, axis, self.builder),
                    (*dims[:axis], (), *dims[axis + 1 :]),
                )
        return value, dims

    def _report_expanded(
        self,
        value: ir.Value,
        result: ir.Value,
        source: Arrangement,
        target: Arrangement,
        batch: bool,
    ) -> None:
        """Note what the expansion of a mask adds. `batch` says whether it is expanded along the
        batch."""
        space = self.match.space
        dtype = self.builder.info.dtype(result)
        size = 1 if dtype is None else int(dtype.itemsize)
        added = product(map(space.size, target)) - product(map(space.size, source))
        reason, hint = "the operator takes it in full only", None
        if self.repeats:
            reason = "the operator has one dimension for several axes, and the mask has only some of them"
            if batch:
                reason, hint = "its sizes are not proven to be those of the batch", ONE_NAME
        words = f"{reason}: {added * size} bytes are added"
        of_batch = set(space.resolve(self._groups[0]))
        after, before = (
            product(
                space.size(axis for axis in space.resolve(dim) if axis not in of_batch)
                for dim in dims
            )
            for dims in (target, source)
        )
        terms = tuple((factor * size, len(atoms)) for factor, atoms in (after - before).products)
        self.missed.append(Missed(MissedCode.EXPANDED_MASK, words, value.name, hint, terms))
