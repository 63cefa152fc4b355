"""ai.onnx Attention, opset 23 and later.

    y, present_key, present_value = Attention(query, key, value, attn_mask, past_key, past_value,
    nonpad_kv_seqlen)

    query, key, value    [B, N, S, D], or [B, S, N * D] with q_num_heads and kv_num_heads
    attn_mask            boolean (True attends) or float (added), of any rank that broadcasts to [B,
                         N, S, T]; a mask shorter than T is padded with "excluded"
    past_key, past_value concatenated in front of key and value; the results become present_key and
    present_value
    nonpad_kv_seqlen     one length for each batch entry; the keys from it on are excluded
    is_causal, windows   key j is attended when p - left <= j <= p + right, p = i + offset; the
                         offset is the past length, or length - S with nonpad_kv_seqlen, else 0
    softcap              c: the scaled scores become c * tanh(scores / c) before they are masked
                         (not on Ascend)
    softmax_precision    of at least 32 bits: the operator computes the softmax in float32

A row without a key gives 0, whatever the values hold. Which numbers of a float mask exclude a key
depends on how ONNX Runtime (1.31 and 1.32) runs the node:

    its CPU kernel       opset 23 and 24, all types float32 or all float16: an element of a float
                         mask excludes where it is -inf or the type's lowest number
    the function body    everything else, all of opset 25 included: only -inf excludes

The kernel for float16 also rounds score + mask to float16. That rounding decides the result of a
row whose every key has a number like -1e4, and the operator, which adds in float32, cannot repeat
it. A float16 mask is therefore accepted only where its numbers other than the excluding ones are
proven small, or where the user vouches that no row is masked everywhere. The function body adds in
float32. But a 16-bit mask that the graph computes, such as a sum or product, reaches it rounded or
not, depending on where ONNX Runtime runs the nodes. The same condition holds for such a mask.

The order of cap and mask is that of onnx 1.23, for all opsets, and of ONNX Runtime 1.32. onnx 1.19
and ONNX Runtime 1.23 add the mask first, so that a masked key has the score -c.

Refused besides: the score or probability matrix as an output, and a softmax_precision that rounds,
or that is no type of floating point: such a node has no function body, and ONNX Runtime casts
operands of two types for its CPU kernel. Also a causal query of one row with several new keys and a
past: in ONNX Runtime the row sees all keys, in the specification it does not.
Also a float mask that may hold +inf beside other exclusions, where the function body runs: the body
adds their -inf to it. Also operands of three dimensions whose batch sizes differ: the function body
splits the heads of all three by the query's batch size, which moves elements of a smaller key or
value to other places.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry.sixteen_bit_kernels import GIVE_FLOAT32
from fa_compiler.passes.algebra.axes import Arrangement
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import POSITIVE_SCALE
from fa_compiler.passes.answer.options import BINARY_MASKS, NO_EMPTY_ROWS, NO_EMPTY_ROWS_HINT
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.call import ConvertedOp, OpConverter, Operand
from fa_compiler.passes.attention_ops.key_masks import DimRef, KeyMaskBuilder, Window
from fa_compiler.passes.ir.nodes import (
    FLOATS,
    SIXTEEN_BITS,
    constant,
    inputs_of,
    int_attr,
    is_op,
    without_none,
)
from fa_compiler.passes.masks.band import Band, SparseMode
from fa_compiler.passes.masks.magnitudes import DOMINATING
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.mask_values import TermValues
from fa_compiler.passes.masks.score_ops import Add, AlignedTensor, BiasOp, ExcludedPositions

PROBABILITIES = 3
"""The qk_matmul_output_mode that gives the probabilities; the others give scores."""
FIRST = 23
"""The first opset that has the operator."""
FIRST_WITHOUT_KERNEL = 25
"""From this opset on ONNX Runtime has no CPU kernel for the operator."""
SMALL_HALF = 8.0
"""A number up to this, added to a float16 score, rounds it no more than scores of common size are
rounded anyway."""


Offsets = tuple[int | None, int | None]
"""The lowest and the highest offset from its position at which a query sees a key; None where there
is no limit."""
UNLIMITED: Offsets = (None, None)


def convert(call: OpConverter) -> ConvertedOp:
    """The record of an Attention node."""
    _check(call)
    return _Attention(call).converted()


def _check(call: OpConverter) -> None:
    """Decline what no attention of ours computes. The head sizes and the shapes are checked with
    the operands."""
    node = call.node
    if call.builder.opset < FIRST:
        reason = f"the model is of opset {call.builder.opset}, and ONNX has the operator from opset {FIRST} on"
        raise call.decline(Code.READY_MADE, reason)
    call.check_matrix(
        "qk_matmul_output", int_attr(node, "qk_matmul_output_mode", 0) == PROBABILITIES
    )
    call.softcap()
    call.check_precision()


@dataclass(frozen=True)
class _Attention:
    call: OpConverter

    def converted(self) -> ConvertedOp:
        """The record. Raises Decline."""
        call = self.call
        query, key, value = (call.required_input(index) for index in range(3))
        q = self._operand(query, "q_num_heads")
        if call.input(4) is None:
            k, v = self._operand(key, "kv_num_heads"), self._operand(value, "kv_num_heads")
            columns = self._rows(key)
            presents = tuple((old, self._split(new)) for old, new in call.presents(key, value))
        else:
            keys, values = self._joined(4, key), self._joined(5, value)
            k, v, columns = (
                call.operand(keys, "BNSD"),
                call.operand(values, "BNSD"),
                DimRef(keys, 2),
            )
            presents = call.presents(keys, values)
        self._check_batches(q, k, v)
        scores = call.scores(q, k, v)
        key_masks = KeyMaskBuilder(call, self._rows(query), columns, DimRef(query, 0))
        plan = self._plan(key_masks, scores)
        scale = call.given_number("scale")
        if scale is not None and scale <= 0.0:
            raise call.decline(Code.SCALE, f"the scale {scale:g} is not positive", POSITIVE_SCALE)
        return ConvertedOp(call.record(q, k, v, scores, plan, scale, self._layout(query)), presents)

    # -- operands
    # ---------------------------------------------------------------------------------------

    def _check_batches(self, *operands: Operand) -> None:
        """Decline operands of three dimensions one of which has a batch of 1 beside a larger
        one."""
        split = any(self._flat(self.call.required_input(index)) for index in range(3))
        sizes = {self.call.viewer.space.size(operand.batch) for operand in operands}
        if split and Dim(1) in sizes and len(sizes) > 1:
            reason = "query, key and value of three dimensions differ in their batch size"
            raise self.call.decline(Code.SHAPE, reason)

    def _flat(self, value: ir.Value) -> bool:
        return len(self.call.shape(value)) == 3

    def _operand(self, value: ir.Value, heads: str) -> Operand:
        return self.call.operand(value, self._layout(value), int_attr(self.call.node, heads, 0))

    def _layout(self, value: ir.Value) -> str:
        """The layout of an input that is no past."""
        return "BSH" if self._flat(value) else "BNSD"

    def _rows(self, value: ir.Value) -> DimRef:
        """The number of rows or keys of an input that is no past."""
        return DimRef(value, self._layout(value).index("S"))

    def _split(self, value: ir.Value) -> ir.Value:
        return self.call.split_heads(value, int_attr(self.call.node, "kv_num_heads", 0))

    def _joined(self, index: int, new: ir.Value) -> ir.Value:
        """The past and the new keys or values in one tensor. Raises Decline where other sizes than
        the length differ."""
        split = self._split(new)
        past, fresh = self.call.info.shape(self.call.required_input(index)), self._new_sizes(new)
        if past is not None and (len(past) != 4 or any(map(_differ, past, fresh))):
            sizes = (
                " x ".join("?" if size is None else str(size) for size in shape)
                for shape in (past, fresh)
            )
            reason = f"a past of {next(sizes)} and new keys or values of {next(sizes)} do not go together"
            raise self.call.decline(Code.READY_MADE, reason)
        return self.call.builder.concat([self.call.required_input(index), split], 2)

    def _new_sizes(self, new: ir.Value) -> tuple[Dim | None, ...]:
        """Batch, heads, length and head size of new keys or values; the length is None, because it
        may be any."""
        shape = self.call.shape(new)
        if not self._flat(new):
            return *shape[:2], None, shape[3]
        heads = int_attr(self.call.node, "kv_num_heads", 0)
        return shape[0], Dim(heads), None, shape[2].exact_div(heads)

    # -- masks
    # ------------------------------------------------------------------------------------------

    def _plan(self, key_masks: KeyMaskBuilder, scores: Arrangement) -> MaskPlan:
        """The plan of the mask, the window and the lengths. Raises Decline."""
        call, offsets = self.call, self._offsets()
        lengths, mask = call.input(6), call.input(3)
        alone = offsets == UNLIMITED and lengths is None
        if mask is not None and alone and self._adds(mask, key_masks, scores):
            return key_masks.plain(mask, scores)
        if mask is not None and not alone:
            self._check_excluded(mask, scores)
        masked, bias, mode, assumed = self._mask_terms(key_masks, scores, band=offsets == UNLIMITED)
        if lengths is not None:
            masked += self._beyond_lengths(lengths, offsets, key_masks, scores)
            return replace(key_masks.plan(scores, masked, bias, None, mode), assumed=assumed)
        window = None
        if offsets != UNLIMITED:
            window = self._window(offsets, key_masks)
        plan = replace(key_masks.plan(scores, masked, bias, window, mode), assumed=assumed)
        if (
            mask is None
            or not alone
            or bias
            or len(masked) != 1
            or self._filled_up(mask, key_masks, scores) is not mask
        ):
            return plan
        return key_masks.packed(mask, masked[0].when, scores, plan)

    def _beyond_lengths(
        self, lengths: ir.Value, offsets: Offsets, key_masks: KeyMaskBuilder, scores: Arrangement
    ) -> list[ExcludedPositions]:
        """The keys from the length of each batch entry on, and the keys outside the window, which
        is counted from this length. A window that ends at the row's position leaves no key from the
        length on."""
        call, (_, high) = self.call, offsets
        excluded: list[ir.Value] = []
        if high is None or high > 0:
            excluded.append(key_masks.mask_from(lengths))
        if offsets != UNLIMITED:
            start = call.builder.sub(key_masks.by_batch(lengths), key_masks.length(key_masks.q_seq))
            excluded.append(key_masks.mask_outside_band(*key_masks.bounds_from(start, offsets)))
        return [ExcludedPositions(call.aligned(mask, scores)) for mask in excluded]

    def _offsets(self) -> Offsets:
        """The lowest and the highest offset from its position at which a query sees a key."""
        node, low, high = self.call.node, None, None
        left, right = (
            int_attr(node, "left_window_size", -1),
            int_attr(node, "right_window_size", -1),
        )
        if left >= 0:
            low = -left
        if right >= 0:
            high = right
        if int_attr(node, "is_causal", 0) == 1:
            high = 0
        return low, high

    def _window(self, offsets: Offsets, key_masks: KeyMaskBuilder) -> Window:
        """The window with positions counted from the first key."""
        past = self.call.input(4)
        if past is None:
            return Window.of(*offsets)
        self._check_one_row()
        before, length = self.call.dim(past, 2), key_masks.length(DimRef(past, 2))
        band = Band(*(None if offset is None else before + offset for offset in offsets))
        return Window(band, *key_masks.bounds_from(length, offsets))

    def _check_one_row(self) -> None:
        """Decline a single row with a past and several new keys: ONNX Runtime lets it see keys
        after its position."""
        places = [self._rows(self.call.required_input(index)) for index in (0, 1)]
        rows, new = (self.call.dim(place.value, place.axis) for place in places)
        if self._in_runtime() and rows != new and (rows.const or 0) < 2:
            reason = "one causal row with a past and several new keys means one thing in ONNX Runtime, another in ONNX"
            raise self.call.decline(Code.READY_MADE, reason)

    def _in_runtime(self) -> bool:
        """Does ONNX Runtime have a CPU kernel for this node? Otherwise it runs the function
        body."""
        call = self.call
        given = without_none(map(call.input, range(6)))
        types = {call.info.dtype(value) for value in given} - {ir.DataType.BOOL}
        one_type = types in ({ir.DataType.FLOAT}, {ir.DataType.FLOAT16})
        return one_type and call.builder.opset < FIRST_WITHOUT_KERNEL

    def _mask_terms(
        self, key_masks: KeyMaskBuilder, scores: Arrangement, band: bool
    ) -> tuple[list[ExcludedPositions], tuple[BiasOp, ...], SparseMode | None, tuple[str, ...]]:
        """attn_mask as exclusions, bias and, if `band` allows it, a sparse_mode; and what the user
        vouches for."""
        call, mask = self.call, self.call.input(3)
        if mask is None:
            return [], (), None, ()
        dtype = call.info.dtype(mask)
        full = self._filled_up(mask, key_masks, scores)
        if dtype not in (ir.DataType.BOOL, *FLOATS):
            raise call.decline(
                Code.DTYPE, "attn_mask is neither boolean nor float32, float16 or bfloat16"
            )
        assert dtype is not None
        boolean = dtype == ir.DataType.BOOL
        lowest = -math.inf
        if self._in_runtime() and not boolean:
            lowest = float(dtype.min)
        if boolean or (full is mask and key_masks.only_excludes(mask, lowest)):
            masked, mode = key_masks.excluded(full, not boolean, scores, band, call.has_input(6))
            return masked, (), mode, ()
        assumed: tuple[str, ...] = ()
        if dtype == ir.DataType.FLOAT16 and self._in_runtime():
            assumed = self._check_half(
                mask, lowest, "ONNX Runtime adds it to the scores in 16 bits"
            )
        elif dtype in SIXTEEN_BITS and not _is_exact(mask):
            assumed = self._check_half(
                mask, lowest, "ONNX Runtime rounds it to 16 bits or not, as it runs the node"
            )
        return *key_masks.added(mask, full, scores, lowest), None, assumed

    def _check_excluded(self, mask: ir.Value, scores: Arrangement) -> None:
        """Decline a mask that may hold +inf: the function body adds -inf to it at excluded keys,
        which gives NaN."""
        call = self.call
        term = Add(call.node, AlignedTensor(mask, call.viewer.alignment(mask, scores, call.node)))
        if (
            call.info.dtype(mask) not in FLOATS
            or BINARY_MASKS in call.options.assume
            or self._in_runtime()
        ):
            return
        if TermValues(call.viewer).may_be_plus_infinity((term,), 0):
            raise call.decline(
                Code.MASK_VALUE,
                f"the mask {mask.name!r} may hold +inf, which makes a row NaN where it stands at an excluded key",
                f"--assume {BINARY_MASKS} if every mask that is given to the model holds only 0 and 1",
            )

    def _adds(self, mask: ir.Value, key_masks: KeyMaskBuilder, scores: Arrangement) -> bool:
        """Does the function body add a mask of 0 and finite numbers that outweigh the scores, and
        nothing else?"""
        values = self.call.facts.sets.of(mask)
        finite = values is not None and all(x == 0.0 or -math.inf < x <= DOMINATING for x in values)
        float32 = self.call.info.dtype(mask) == ir.DataType.FLOAT
        return (
            finite
            and float32
            and not self._in_runtime()
            and self._filled_up(mask, key_masks, scores) is mask
        )

    def _check_half(self, mask: ir.Value, lowest: float, cause: str) -> tuple[str, ...]:
        """What the user vouches for so that rounding the mask, or mask + score, decides no row.
        Raises Decline."""
        call = self.call
        array, values = constant(mask), call.facts.sets.of(mask)
        numbers: Collection[float] | None = call.facts.bounds.unless_nan(mask)
        if array is not None:
            numbers = [float(np.abs(array[array > lowest].astype(np.float32)).max(initial=0.0))]
        elif values is not None:
            numbers = [x for x in values if x > lowest]
        if numbers is not None and all(abs(x) <= SMALL_HALF for x in numbers):
            return ()
        if NO_EMPTY_ROWS in call.options.assume:
            return (NO_EMPTY_ROWS,)
        raise call.decline(
            Code.MASK_VALUE,
            f"the numbers of the mask {mask.name!r} are not known to be small, and {cause}: that decides a row whose "
            "every key has a number like -1e4",
            NO_EMPTY_ROWS_HINT,
        )

    def _filled_up(
        self, mask: ir.Value, key_masks: KeyMaskBuilder, scores: Arrangement
    ) -> ir.Value:
        """A mask, padded with "excluded" where it may be shorter than the keys."""
        dtype, columns = self.call.info.dtype(mask), self.call.dim(mask, -1)
        if columns == self.call.viewer.space.size(scores[3]) or dtype is None:
            return mask
        if dtype == ir.DataType.BOOL:
            return key_masks.filled_up(mask, False)
        return key_masks.filled_up(mask, -math.inf)


def _is_exact(value: ir.Value) -> bool:
    """Is a 16-bit value certainly rounded to 16 bits, and not a result that ONNX Runtime may keep
    unrounded?"""
    node = value.producer()
    if not is_op(node, *GIVE_FLOAT32):
        return True
    return is_op(node, "Where", "Max", "Min", "Neg", "Clip") and all(
        map(_is_exact, inputs_of(node))
    )


def _differ(one: Dim, other: Dim | None) -> bool:
    """Are two sizes known, and not equal?"""
    return (
        other is not None
        and one.const is not None
        and other.const is not None
        and one.const != other.const
    )
