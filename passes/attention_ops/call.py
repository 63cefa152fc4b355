"""The conversion of one attention operator: its operands as named axes, and the AttentionMatch that
is made of them.

Every family reads the inputs and attributes of its operators and passes on the same things: the
batch, head, row and depth axes of query, key and value (`Operand`), what is added to the scores or
excluded from them (`MaskPlan`), the scale, and the values that replace the other outputs. `record`
makes an AttentionMatch of them. Layouts, destinations and the registry's checks are then those of
every other attention.

Refused here, for all families: a head size or a number of heads that is not known before the run,
types the operator does not take, and sizes that contradict each other.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import chain

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import OTHER_SCALE, Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import FLOATS, SIXTEEN_BITS, input_of, is_read
from fa_compiler.passes.layout.plan import LAYOUTS
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.magnitudes import LARGEST_SCALE, SMALLEST_SCALE
from fa_compiler.passes.masks.mask import MaskPlan
from fa_compiler.passes.masks.score_ops import Add, BiasOperand
from fa_compiler.passes.matching.match import AttentionMatch
from fa_compiler.passes.matching.roles import Roles, check_head_size, shared_heads
from fa_compiler.passes.matching.sinks import Sink
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.values.facts import Facts
from fa_compiler.passes.values.shapes import ShapeInfo

PRECISIONS = (ir.DataType.FLOAT, ir.DataType.DOUBLE, *SIXTEEN_BITS)
"""The types that softmax_precision may name."""


@dataclass(frozen=True)
class Operand:
    """Query, key or value: a view, and its axes by what they mean."""

    view: View
    batch: Axes
    heads: Axes
    seq: Axes
    head_dim: Axes


@dataclass(frozen=True)
class ConvertedOp:
    """The record of the attention, and pairs of a further output of the operator and the value that
    replaces it."""

    match: AttentionMatch
    outputs: tuple[tuple[ir.Value, ir.Value], ...] = ()


@dataclass(frozen=True)
class OpConverter:
    """An attention operator, and what its conversion needs."""

    node: ir.Node
    facts: Facts
    builder: Builder
    viewer: Viewer

    @staticmethod
    def of(node: ir.Node, facts: Facts, builder: Builder) -> OpConverter:
        """The conversion of a node, with an axis space of its own."""
        return OpConverter(node, facts, builder, Viewer(facts, AxisSpace()))

    @property
    def info(self) -> ShapeInfo:
        """The shapes and types of values."""
        return self.facts.info

    @property
    def options(self) -> Options:
        """What the user asked for."""
        return self.facts.options

    # -- what the node says
    # -----------------------------------------------------------------------------

    def input(self, index: int) -> ir.Value | None:
        """An optional input; None where it is absent."""
        return input_of(self.node, index)

    def required_input(self, index: int) -> ir.Value:
        """A required input. Raises Decline where it is absent."""
        value = self.input(index)
        if value is None:
            raise self.decline(Code.SHAPE, f"input {index} of {self.node.op_type} is missing")
        return value

    def has_input(self, *indices: int) -> bool:
        """Is there one of these inputs?"""
        return any(self.input(index) is not None for index in indices)

    def used_output(self, index: int) -> ir.Value | None:
        """An output; None where nothing reads it."""
        for output in self.node.outputs[index : index + 1]:
            if is_read(output):
                return output
        return None

    def presents(self, *made: ir.Value) -> tuple[tuple[ir.Value, ir.Value], ...]:
        """The outputs from the second on that something reads, each with the value that takes its
        place."""
        outputs = [self.used_output(index + 1) for index in range(len(made))]
        return tuple((old, new) for old, new in zip(outputs, made, strict=True) if old is not None)

    def check_matrix(self, name: str, after_softmax: bool) -> None:
        """Decline a call whose fourth output is read: the scores, or the probabilities if
        `after_softmax`."""
        if self.used_output(3) is None:
            return
        if after_softmax:
            raise self.decline(Code.PROBABILITIES_ARE_OUTPUT, f"{name}, the probabilities, is read")
        raise self.decline(Code.SCORES_ARE_OUTPUT, f"{name}, the scores, is read")

    def check_precision(self) -> None:
        """Decline a softmax_precision that rounds float32 scores, and one that is no type of
        floating point. With such a number the operator has no function body, so ONNX Runtime casts
        operands of two types for a kernel of one."""
        attr = self.node.attributes.get("softmax_precision")
        if attr is None:
            return
        if attr.as_int() not in PRECISIONS:
            reason = f"softmax_precision is {attr.as_int()}, which is no type of floating point"
            raise self.decline(Code.READY_MADE, reason, "leave softmax_precision out")
        wide = self.info.dtype(self.required_input(0)) == ir.DataType.FLOAT
        if wide and attr.as_int() in SIXTEEN_BITS:
            raise self.decline(
                Code.CAST, "softmax_precision rounds the scores to 16 bits before the softmax"
            )

    def given_number(self, name: str) -> float | None:
        """A float attribute; None where it is not given."""
        attr = self.node.attributes.get(name)
        return None if attr is None else attr.as_float()

    def number(self, name: str, default: float) -> float:
        """A float attribute or its default."""
        given = self.given_number(name)
        return default if given is None else given

    def softcap(self) -> float:
        """The attribute softcap, c of c * tanh(scores / c); 0 where the scores are not capped.
        Raises Decline."""
        cap = self.number("softcap", 0.0)
        if cap != 0.0 and not SMALLEST_SCALE <= cap <= LARGEST_SCALE:
            what = "which overflows or vanishes"
            if math.isnan(cap):
                what = "not a number"
            elif cap < 0.0:
                what = "a negative number"
            hint = "give softcap a positive number, or 0 for none"
            raise self.decline(Code.SOFTCAP, f"softcap is {cap:g}, {what}", hint)
        if cap > 0.0 and self.options.target == "ascend":
            raise self.decline(
                Code.SOFTCAP, "the scores go through softcap * tanh(scores / softcap)"
            )
        return cap

    def decline(self, code: Code, reason: str, hint: str | None = None) -> Decline:
        """A Decline of this operator, to be raised."""
        return Decline(code, reason, self.node, hint)

    def shape(self, value: ir.Value) -> tuple[Dim, ...]:
        """The shape of a value. Raises Decline where its rank is unknown."""
        shape = self.info.shape(value)
        if shape is None:
            raise self.decline(Code.RANK, f"the rank of {value.name!r} is unknown")
        return shape

    def dim(self, value: ir.Value, axis: int) -> Dim:
        """One dimension of a value. Raises Decline where the value does not have it."""
        shape = self.shape(value)
        if not -len(shape) <= axis < len(shape):
            raise self.decline(Code.RANK, f"{value.name!r} has {len(shape)} dimensions")
        return shape[axis]

    def check_presents(self, reason: str) -> None:
        """Decline a past without both outputs for the caches, for this reason."""
        presents = self.node.outputs[1:3]
        if len(presents) < 2 or not all(present.name for present in presents):
            raise self.decline(
                Code.READY_MADE, reason, "let the operator give present_key and present_value"
            )

    def size(self, value: ir.Value, axis: int) -> int | None:
        """One dimension; None where it may differ between runs."""
        return self.dim(value, axis).const

    # -- operands
    # ---------------------------------------------------------------------------------------

    def operand(self, value: ir.Value, layout: str, heads: int = 0) -> Operand:
        """An operand in one of the operator's layouts; `heads` is the number of heads in the H of
        BSH and SBH."""
        shape = self.shape(value)
        if len(shape) != len(layout):
            raise self.decline(
                Code.RANK, f"{value.name!r} does not have the {len(layout)} dimensions of {layout}"
            )
        if layout in ("BNSD", "BSND"):
            view, dims = self._arranged(value, shape)
        else:
            if heads <= 0:
                raise self.decline(Code.SHAPE, "the number of heads is not given")
            head_dim = shape[2].exact_div(heads)
            if head_dim is None:
                raise self.decline(
                    Code.SHAPE, f"the width of {value.name!r} is not proven to be {heads} heads"
                )
            view, dims = self._arranged(value, (*shape[:2], Dim(heads), head_dim))
        axes = dict(zip(layout.replace("H", "ND"), dims, strict=True))
        return Operand(view, axes["B"], axes["N"], axes["S"], axes["D"])

    def split_heads(self, value: ir.Value, heads: int) -> ir.Value:
        """A key or value [batch, seq, heads * head_dim] as [batch, heads, seq, head_dim]; rank 4 is
        kept."""
        if len(self.shape(value)) == 4:
            return value
        if heads <= 0:
            raise self.decline(Code.SHAPE, "the number of heads is not given")
        width = self.dim(value, 2)
        head_dim = width.exact_div(heads)
        if head_dim is None and width.is_const:
            raise self.decline(
                Code.SHAPE, f"the width {width} of {value.name!r} is no multiple of {heads} heads"
            )
        # A known size is written out, because Reshape refuses -1 in a run in which another size
        # is 0.
        size = -1
        if head_dim is not None and head_dim.const is not None:
            size = head_dim.const
        by_row = self.builder.reshape(value, [0, 0, heads, size])
        return self.builder.transpose(by_row, (0, 2, 1, 3))

    def _arranged(self, value: ir.Value, target: tuple[Dim, ...]) -> tuple[View, Arrangement]:
        """The furthest view of a value that can be arranged in dimensions of the target's sizes,
        and its axes there."""
        for shallow in (False, True):
            view = self.viewer.view(value, factors=False, shallow=shallow)
            if view is None:
                continue
            if len(view.dims) == len(target):
                return view, view.dims
            dims = self.viewer.space.reshape(view.dims, target)
            if dims is not None:
                return view, dims
        raise self.decline(Code.SHAPE, f"{value.name!r} could not be taken apart into heads")

    def together(self, one: Axes, other: Axes, what: str) -> Axes:
        """Unify two dimensions that the operator walks together, and return their axes.

        One of the two may be known to be 1. Raises Decline where they differ.
        """
        space = self.viewer.space
        one, other = space.resolve(one), space.resolve(other)
        if one and other and not space.unify(one, other):
            raise self.decline(Code.SHAPE, f"the operands differ in their {what}")
        return space.resolve(one or other)

    def aligned(self, value: ir.Value, scores: Arrangement) -> View:
        """The furthest view of a value that broadcasts to the scores, along the axes of the
        scores."""
        return self.along(value, self.viewer.alignment(value, scores, self.node))

    def adding(self, value: ir.Value, scores: Arrangement) -> Add[BiasOperand]:
        """The step of a bias that adds a value which broadcasts to the scores."""
        return Add(self.node, BiasOperand(self.aligned(value, scores)))

    def along(self, value: ir.Value, dims: Arrangement) -> View:
        """The furthest view of a value whose dimensions run along these axes of the scores.

        The view stops at an Expand that may be what makes the scores larger.
        """
        sizes, size = self.info.sizes(value), self.viewer.space.size
        fits = all(own.const == 1 or own == size(dim) for own, dim in zip(sizes, dims, strict=True))
        depths = [True]
        if fits:
            depths = [False, True]
        for shallow in depths:
            view = self.viewer.view(value, factors=False, shallow=shallow)
            if view is None:
                continue
            pairs = zip(view.dims, dims, strict=True)
            if all(not own or self.viewer.space.unify(own, wanted) for own, wanted in pairs):
                return view
        raise self.decline(
            Code.SHAPE, f"the shape of {value.name!r} was not proven to fit the scores"
        )

    # -- the record
    # -------------------------------------------------------------------------------------

    def scores(self, query: Operand, key: Operand, value: Operand) -> Arrangement:
        """Unify the operands' axes, and return those of the scores as [batch, heads, q_seq,
        kv_seq].

        Query head n reads key head n // group.
        """
        space = self.viewer.space
        batch = self.together(self.together(query.batch, key.batch, "batch"), value.batch, "batch")
        self.together(key.heads, value.heads, "number of heads")
        wide, narrow = space.size(query.heads).const, space.size(key.heads).const
        if wide is None or narrow is None:
            raise self.decline(Code.SHAPE, "the number of heads is not known before the model runs")
        if wide % narrow:
            raise self.decline(
                Code.SHAPE, f"{wide} query heads are no multiple of {narrow} key heads"
            )
        if query.heads:
            self.together(
                query.heads, (*key.heads, *space.new(Dim(wide // narrow))), "number of heads"
            )
        self._same(query.head_dim, key.head_dim, "head size")
        kv_seq = self._same(key.seq, value.seq, "sequence length")
        return batch, space.resolve(query.heads), space.resolve(query.seq), kv_seq

    def _same(self, one: Axes, other: Axes, what: str) -> Axes:
        """As `together`, for dimensions that the operator does not broadcast."""
        if bool(self.viewer.space.resolve(one)) != bool(self.viewer.space.resolve(other)):
            raise self.decline(Code.SHAPE, f"the operands were not proven to have the same {what}")
        return self.together(one, other, what)

    def record(
        self,
        query: Operand,
        key: Operand,
        value: Operand,
        scores: Arrangement,
        plan: MaskPlan,
        scale: float | None,
        layout: str,
        sink: Sink | None = None,
    ) -> AttentionMatch:
        """The record of the attention, whose result is the operator's first output in the given
        layout.

        A scale of None stands for 1 / sqrt(head size). The operator's attribute softcap, if it has
        one, caps the scores before they are masked. Raises Decline.
        """
        space = self.viewer.space
        batch, heads, q_seq, kv_seq = map(space.resolve, scores)
        head_dim, width = space.resolve(query.head_dim), space.resolve(value.head_dim)
        size = space.size(head_dim).const
        if size is None or not space.size(width).is_const:
            raise self.decline(Code.SHAPE, "the head size is not known before the model runs")
        check_head_size(size, "head size", self.node, self.options)
        check_head_size(
            space.size(width).const or 0, "head size of the values", self.node, self.options
        )
        groups = (batch, heads, q_seq, kv_seq, head_dim, width)
        if len(set(chain(*groups))) != sum(map(len, groups)):
            raise self.decline(Code.SHAPE, "one axis would have to play two roles")
        if scale is None:
            scale = float(np.float32(1.0 / math.sqrt(size)))
        if not SMALLEST_SCALE <= abs(scale) <= LARGEST_SCALE:
            raise self.decline(
                Code.SCALE, f"the scale {scale:g} overflows or vanishes", OTHER_SCALE
            )
        kv_heads = shared_heads(key.view, value.view, heads, space)
        output = self.node.outputs[0]
        match = AttentionMatch(
            SoftmaxAnchor(output, output, (), (self.node,)),
            space,
            query.view,
            key.view,
            value.view,
            Roles(batch, heads, kv_heads, q_seq, kv_seq, head_dim, width),
            scale,
            plan,
            self._type(query, key, value),
            output,
            LAYOUTS[layout](batch, heads, q_seq, width),
            sink,
            softcap=self.softcap(),
        )
        return match.within(space.branch())

    def _type(self, query: Operand, key: Operand, value: Operand) -> ir.DataType:
        """The type to compute in: that of the result, or float32 where an operand has another
        type."""
        wanted = self.info.dtype(self.node.outputs[0])
        types = {self.info.dtype(operand.view.base) for operand in (query, key, value)}
        if wanted not in FLOATS or not types <= set(FLOATS):
            raise self.decline(
                Code.DTYPE, "query, key and value are not float32, float16 or bfloat16"
            )
        assert wanted is not None
        if types != {wanted}:
            return ir.DataType.FLOAT
        return wanted
