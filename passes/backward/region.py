"""The values between the probabilities and the gradients, each as the quantity it is (see quantities.py).

Grammar, from the probabilities downwards and, where another operand comes in, upwards to the product that made it:

    region := what the forward part left: the probabilities, exponentials and their row sums
            | dO V^T in any spelling of the product: G
            | layout(region) | Cast(region) | c * region | region / c | -region
            | region + region | region - region | Sum(region, ...) | region * region | region / L | Pow(L, n) | 1 / L
            | ReduceSum(region) over the keys             of P*G, with powers of L before it
            | ReduceSum(dO * O) over the values' depth    D, as FlashAttention's backward part computes it
            | ReduceSum(region) over a size of 1          jax: of what is repeated behind it
            | Einsum(region, region), summed over the keys and nothing else
            | SoftmaxGrad_13(region, region), SoftmaxGrad          com.microsoft: P * (g - rowsum(P * g))
            | Where(c, region, 0) | Where(c, 0, region)   c the condition of a selection on the scores, of the guard, or
                                                          the drop mask
            | Cast(drop mask)                             zeros and ones: keep * F
            | DropoutGrad(region, drop mask, ratio)        com.microsoft: region * drop mask / (1 - ratio)
            | DropoutGrad(region, ...)                     not in training mode: the region itself

Zeros put where the forward part masks change nothing in a row that attends a key, for in the end everything there is
multiplied by a probability of 0. Zeros put anywhere else change the gradient: not accepted.

O is what the product with the values gives, P V, dropout included. So sum_d dO O = sum_j P (dO V^T) = D in every row,
one without keys included: there O was made of the same P. Who else reads O does not matter, for the operator gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.backward.quantities import D, E, F, G, L, MaskedRows, P, Quantity
from fa_compiler.passes.backward.tracing import Tracer, seeds, stripped
from fa_compiler.passes.layout.axes import Arrangement, Axes, Axis
from fa_compiler.passes.layout.contraction import Contraction, any_contraction
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.matching.match import AttentionMatch, Derivation
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.nodes import constant, input_of, int_attr, is_op, producer, reduced_axes
from fa_compiler.passes.score_ops import Select

MAX_DEPTH = 40
"""Operands that come from further up are no part of a gradient."""


@dataclass(frozen=True)
class Tensor:
    """A quantity and the axes of the tensor that holds it."""

    quantity: Quantity
    dims: Arrangement


Combine = Callable[[Quantity, Quantity], Quantity | None]


@dataclass
class Region:
    """The region of one match. `dy` is the gradient of the output, known from the first product that reads it."""

    match: AttentionMatch
    derivation: Derivation
    viewer: Viewer
    tracer: Tracer
    dy: View | None = None
    tensors: dict[ir.Value, Tensor | None] = field(default_factory=dict)
    _depth: int = 0

    @staticmethod
    def of(match: AttentionMatch, derivation: Derivation, viewer: Viewer) -> Region:
        """The region with what the forward part left in it."""
        region = Region(match, derivation, viewer, Tracer(match, viewer))
        region._seed(match.anchor)
        return region

    def _seed(self, anchor: SoftmaxAnchor) -> None:
        after = self.derivation.steps.after
        where = None if after.guard is None else after.guard.where
        raw = where is not None
        rows = MaskedRows.RAW if raw else MaskedRows.SAME
        scores = self.derivation.probabilities.seen[anchor.output]
        for node in anchor.nodes:
            made = node.outputs[0]
            if is_op(node, "Exp") and made is not anchor.output:
                self._put(made, Quantity({E: 1.0}, rows, raw), scores)
            elif is_op(node, "ReduceSum") and anchor.axis is not None:
                kept: Arrangement = ((),) if int_attr(node, "keepdims", 1) else ()
                dims = (*scores[: anchor.axis], *kept, *scores[anchor.axis + 1 :])
                self._put(made, Quantity({L: 1.0}, rows, raw), dims)
        self._put(anchor.output, Quantity({P: 1.0}, rows, raw), scores)
        for node in after.nodes:
            if is_op(node, "Mul", "Div"):
                # What is behind follows by the grammar.
                break
            if node is where:
                rows, raw = MaskedRows.SAME, False
            own = self.derivation.probabilities.seen.get(node.outputs[0])
            if own is not None and not is_op(node, "IsNaN"):
                self._put(node.outputs[0], Quantity({P: 1.0}, rows, raw), own)

    @property
    def dropout(self) -> bool:
        """Are probabilities dropped?"""
        return self.match.dropout is not None

    def _put(self, value: ir.Value, quantity: Quantity, dims: Arrangement) -> None:
        self.tensors[value] = Tensor(quantity, self.viewer.space.resolve_all(dims))

    # -- one value ------------------------------------------------------------------------------

    def tensor(self, value: ir.Value | None) -> Tensor | None:
        """What a value is; None when it is nothing that the grammar knows."""
        if value is None:
            return None
        if value not in self.tensors:
            if self._depth >= MAX_DEPTH:
                return None
            node = value.producer()
            if node is None or node.graph is not self.match.node.graph or value is not node.outputs[0]:
                return None
            self.tensors[value] = None
            self._depth += 1
            made = self._of_node(node)
            self.tensors[value] = None if made is None or self._may_be_larger(value, made.dims) else made
            self._depth -= 1
        found = self.tensors[value]
        return None if found is None else Tensor(found.quantity, self.viewer.space.resolve_all(found.dims))

    def _may_be_larger(self, value: ir.Value, dims: Arrangement) -> bool:
        """Has a value a size of its own along an axis of the probabilities, which then may be 1 in some run? There an
        operand enlarges the gradient alone, and sums over that axis count it more than once."""
        space, info, probabilities = self.viewer.space, self.viewer.info, self.match.anchor.output
        axes = space.resolve_all(self.derivation.probabilities.seen[probabilities])
        known = dict(zip(axes, info.shape(probabilities) or (), strict=False))
        sizes = zip(space.resolve_all(dims), info.shape(value) or (), strict=False)
        return any(size != known[axis] and not known[axis].is_const for axis, size in sizes if axis and axis in known)

    def _of_node(self, node: ir.Node) -> Tensor | None:
        if is_op(node, "Cast") and (kept := self._kept(node.inputs[0])) is not None:
            return kept
        step = self.tracer.look_through(node)
        if step is not None:
            return self._rearranged(node, *step)
        if is_op(node, "Mul"):
            return self._combined(node, lambda a, b: a.times(b))
        if is_op(node, "Add", "Sum"):
            return self._combined(node, lambda a, b: a.plus(b))
        if is_op(node, "Sub"):
            return self._combined(node, lambda a, b: a.plus(b, -1.0))
        if is_op(node, "Div"):
            return self._divided(node)
        if is_op(node, "Pow", "Reciprocal"):
            return self._power(node)
        if is_op(node, "ReduceSum"):
            return self._summed(node)
        if is_op(node, "Where"):
            return self._selected(node)
        if node.domain == "com.microsoft" and node.op_type in ("SoftmaxGrad", "SoftmaxGrad_13"):
            return self._softmax_gradient(node)
        if node.domain == "com.microsoft" and node.op_type == "DropoutGrad":
            return self._dropout_gradient(node)
        product = any_contraction(node, self.viewer.info)
        return None if product is None else self._product(product)

    def _dropout_gradient(self, node: ir.Node) -> Tensor | None:
        """The gradient through a Dropout with a known mask, or through one that is switched off."""
        tensor, mode, given = self.tensor(node.inputs[0]), input_of(node, 3), input_of(node, 2)
        flag = constant(mode, limit=1)
        ratio = None if given is None else self.viewer.info.scalar(given)
        if tensor is None or (mode is not None and flag is None):
            return None
        # onnxruntime-training's kernel does not look at the mask where nothing was dropped.
        if flag is None or not flag.any() or ratio == 0.0:
            return tensor
        kept = self._kept(node.inputs[1])
        scaled = kept.quantity.scaled(1.0 / (1.0 - ratio)) if kept and ratio and 0.0 < ratio < 1.0 else None
        if kept is None or scaled is None:
            return None
        return _tensor(tensor.quantity.times(scaled), self.tracer.aligned(tensor.dims, kept.dims))

    def _kept(self, value: ir.Value | None) -> Tensor | None:
        """The drop mask, of zeros and ones: `keep` times F."""
        dropout = self.match.dropout
        known = None if dropout is None else self.tracer.trace(value, {dropout.mask: dropout.dims})
        if dropout is None or known is None:
            return None
        return Tensor(Quantity({F: dropout.keep}), known.dims)

    def _rearranged(self, node: ir.Node, source: ir.Value, factor: float) -> Tensor | None:
        tensor = self.tensor(source)
        if tensor is None:
            return None
        if self.viewer.factor(node) is not None:
            return _tensor(tensor.quantity.scaled(factor), tensor.dims)
        dims = self.viewer.rearranged(node, tensor.dims)
        return None if dims is None else Tensor(tensor.quantity, dims)

    def _combined(self, node: ir.Node, combine: Combine) -> Tensor | None:
        tensors = self._all(node.inputs)
        if tensors is None:
            return None
        result = tensors[0]
        for other in tensors[1:]:
            dims = self.tracer.aligned(result.dims, other.dims)
            combined = _tensor(combine(result.quantity, other.quantity), dims)
            if combined is None:
                return None
            result = combined
        return result

    def _all(self, values: Sequence[ir.Value | None]) -> list[Tensor] | None:
        """Every value as a tensor; the first that is none ends it, so that little is looked at in vain."""
        result: list[Tensor] = []
        for value in values:
            tensor = self.tensor(value)
            if tensor is None:
                return None
            result.append(tensor)
        return result or None

    def _divided(self, node: ir.Node) -> Tensor | None:
        below = self.tensor(node.inputs[1])
        inverse = None if below is None else below.quantity.to_power(-1)
        if below is None or inverse is None:
            return None
        above = self.tensor(node.inputs[0])
        if above is not None:
            dims = self.tracer.aligned(above.dims, below.dims)
            return _tensor(above.quantity.times(inverse), dims)
        number = None if node.inputs[0] is None else self.viewer.info.scalar(node.inputs[0])
        return None if number is None else _tensor(inverse.scaled(number), below.dims)

    def _power(self, node: ir.Node) -> Tensor | None:
        tensor = self.tensor(node.inputs[0])
        number = -1.0 if node.op_type == "Reciprocal" else None
        if number is None and (exponent := input_of(node, 1)) is not None:
            number = self.viewer.info.scalar(exponent)
        if tensor is None or number is None or not number.is_integer():
            return None
        return _tensor(tensor.quantity.to_power(int(number)), tensor.dims)

    def _summed(self, node: ir.Node) -> Tensor | None:
        """The sum over the keys, or over a size of 1, which is no sum; or that of dO * O."""
        if (found := self._output_sum(node)) is not None:
            return found
        tensor, axes = self.tensor(node.inputs[0]), reduced_axes(node)
        if tensor is None or axes is None or len(axes) != 1:
            return None
        axis = axes[0] % len(tensor.dims)
        kept: tuple[Axes, ...] = ((),) if int_attr(node, "keepdims", 1) else ()
        columns = self.are_columns(tensor.dims[axis])
        if not columns and tensor.dims[axis]:
            return None
        total = tensor.quantity.row_sum(self.dropout) if columns else tensor.quantity
        return _tensor(total, (*tensor.dims[:axis], *kept, *tensor.dims[axis + 1 :]))

    def _output_sum(self, node: ir.Node) -> Tensor | None:
        product, axes = producer(node.inputs[0]), reduced_axes(node)
        if self.dy is None or product is None or not is_op(product, "Mul") or axes is None or len(axes) != 1:
            return None
        space = self.viewer.space
        for out, gradient in (product.inputs, product.inputs[::-1]):
            first = self.tracer.trace(out, {self.match.output: self.match.output_dims})
            second = None if first is None else self.tracer.trace(gradient, seeds(self.dy.stops))
            dims = None if first is None or second is None else self.tracer.aligned(first.dims, second.dims)
            if first is None or second is None or dims is None:
                continue
            axis = axes[0] % len(dims)
            if space.resolve(dims[axis]) != space.resolve(self.match.roles.value_head_dim):
                continue
            kept: tuple[Axes, ...] = ((),) if int_attr(node, "keepdims", 1) else ()
            quantity = Quantity({D: 1.0}).scaled(first.factor * second.factor)
            return _tensor(quantity, (*dims[:axis], *kept, *dims[axis + 1 :]))
        return None

    def are_columns(self, axes: Axes) -> bool:
        """Is this the dimension of the keys?"""
        space = self.viewer.space
        return space.resolve(axes) == space.resolve(self.match.roles.kv_seq)

    def _softmax_gradient(self, node: ir.Node) -> Tensor | None:
        tensors = self._all(node.inputs[:2])
        if tensors is None:
            return None
        gradient, softmax = tensors
        dims = self.tracer.aligned(gradient.dims, softmax.dims)
        if dims is None:
            return None
        modern = node.op_type == "SoftmaxGrad_13"
        axis = int_attr(node, "axis", -1 if modern else 1)
        axis += len(dims) if axis < 0 else 0
        if not 0 <= axis < len(dims) or not self.are_columns(dims[axis]) or (not modern and axis != len(dims) - 1):
            return None
        weighted = softmax.quantity.times(gradient.quantity)
        total = None if weighted is None else weighted.row_sum(self.dropout)
        inner = None if total is None else gradient.quantity.plus(total, -1.0)
        return None if inner is None else _tensor(softmax.quantity.times(inner), dims)

    # -- selections -----------------------------------------------------------------------------

    def _selected(self, node: ir.Node) -> Tensor | None:
        """Zeros where the forward part masks, or where its guard does."""
        for index, keep in ((1, True), (2, False)):
            zero = node.inputs[3 - index]
            if zero is None or not self._is_zero(zero):
                continue
            tensor = self.tensor(node.inputs[index])
            if tensor is not None:
                return _tensor(self._masked(node.inputs[0], keep, tensor), tensor.dims)
        return None

    def _is_zero(self, value: ir.Value) -> bool:
        return self.viewer.facts.sets.of(value) == frozenset((0.0,)) or self.viewer.info.scalar(value) == 0.0

    def _masked(self, condition: ir.Value | None, keep: bool, tensor: Tensor) -> Quantity | None:
        """The tensor with zeros where `condition` is not `keep`; None for a condition foreign to the forward part."""
        own, negated = stripped(condition, self.tracer)
        kept = self._kept(own)
        if kept is not None and keep != negated and self.tracer.aligned(tensor.dims, kept.dims) is not None:
            return tensor.quantity.times(kept.quantity)
        selections = [term for term in self.derivation.steps.scores.terms if isinstance(term, Select)]
        for index, term in enumerate(selections):
            theirs, other = stripped(term.operand.value, self.tracer)
            if keep ^ negated == term.keep ^ other and self._same(own, theirs, term.operand.dims, tensor):
                return tensor.quantity.selected(index, len(selections))
        guard = self.derivation.steps.after.guard
        if guard is None:
            return None
        where = guard.where
        test, chosen, _ = where.inputs
        assert test is not None and chosen is not None
        chosen_is_kept = self.tensors.get(chosen) is not None
        theirs, other = stripped(test, self.tracer)
        dims = self.viewer.alignment(test, self.derivation.probabilities.seen[where.outputs[0]], where)
        if keep ^ negated != chosen_is_kept ^ other or not self._same(own, theirs, dims, tensor):
            return None
        return tensor.quantity.guarded()

    def _same(self, own: ir.Value | None, theirs: ir.Value | None, dims: Arrangement, tensor: Tensor) -> bool:
        """Does a condition select from the tensor along the axes along which the forward part's does?"""
        if own is None or theirs is None:
            return False
        known = self.tracer.trace(theirs if _equal(own, theirs) else own, {theirs: dims})
        if known is None:
            return False
        space = self.viewer.space
        mine, wanted = space.resolve_all(known.dims), space.resolve_all(tensor.dims)
        if len(mine) > len(wanted):
            return False
        return all(not a or self.tracer.same(a, b) for a, b in zip(mine[::-1], wanted[::-1], strict=False))

    # -- products -------------------------------------------------------------------------------

    def _product(self, product: Contraction) -> Tensor | None:
        """dO V^T, or the row sums of a product of two tensors of the region."""
        values = seeds(self.match.value.stops)
        for side in (0, 1):
            known = self.tracer.trace(product.operands[side], values)
            if known is None:
                continue
            output = self.output_gradient(product, 1 - side, known.dims)
            if output is None:
                continue
            dims, factor = output
            if self._runs_over(product, side, known.dims, self.match.roles.value_head_dim):
                out = self.arranged(product, side, known.dims, dims)
                return _tensor(Quantity({G: 1.0}).scaled(known.factor * factor * product.factor), out)
        return self._row_products(product) if is_op(product.node, "Einsum") else None

    def _row_products(self, product: Contraction) -> Tensor | None:
        tensors = self._all(product.operands)
        if tensors is None or set(product.labels[0]) != set(product.labels[1]):
            return None
        one, other = tensors
        order = dict(zip(product.labels[1], other.dims, strict=True))
        dims = self.tracer.aligned(one.dims, tuple(order[label] for label in product.labels[0]))
        quantity = one.quantity.times(other.quantity)
        total = None if quantity is None else quantity.row_sum(self.dropout)
        if dims is None or total is None or not self._runs_over(product, 0, dims, self.match.roles.kv_seq):
            return None
        by_label = dict(zip(product.labels[0], dims, strict=True))
        return _tensor(total.scaled(product.factor), tuple(by_label[label] for label in product.out))

    def _runs_over(self, product: Contraction, side: int, dims: Arrangement, axes: Axes) -> bool:
        """Does the product sum over exactly these axes?"""
        space = self.viewer.space
        by_label = dict(zip(product.labels[side], dims, strict=True))
        summed = [axis for label in product.summed for axis in space.resolve(by_label[label])]
        return len(product.summed) == 1 and tuple(summed) == space.resolve(axes)

    def output_gradient(self, product: Contraction, side: int, other: Arrangement) -> tuple[Arrangement, float] | None:
        """The operand of a product as the gradient of the attention's output: its arrangement and factor.

        The first operand that stands where that gradient has to stand is taken for it; all others have to be the same.
        What it is does not matter: the operator's gradients are linear in it.
        """
        value = product.operands[side]
        if self.dy is not None:
            known = self.tracer.trace(value, seeds(self.dy.stops))
            if known is None or not self.walk(product, side, known.dims, other):
                return None
            return self.viewer.space.resolve_all(known.dims), known.factor
        for shallow in (False, True):
            view = self.viewer.view(value, widening=True, shallow=shallow)
            if view is not None and self.walk(product, side, view.dims, other):
                self.dy = view
                return self.viewer.space.resolve_all(view.dims), view.scale
        return None

    def walk(self, product: Contraction, side: int, dims: Arrangement, other: Arrangement) -> bool:
        """Let the labels two operands share run along the same axes. An axis that runs along two labels is refused: the
        product walks each of them by itself."""
        if len(dims) != len(product.labels[side]) or len(other) != len(product.labels[1 - side]):
            return False
        mine = dict(zip(product.labels[side], dims, strict=True))
        theirs = dict(zip(product.labels[1 - side], other, strict=True))
        for label in mine.keys() & theirs.keys():
            one, two = self.viewer.space.resolve(mine[label]), self.viewer.space.resolve(theirs[label])
            broadcast = label in product.out and not (one and two)
            if not broadcast and not self.tracer.same(one, two):
                return False
        places: dict[Axis, str] = {}
        for label, dim in (*mine.items(), *theirs.items()):
            if any(places.setdefault(axis, label) != label for axis in self.viewer.space.resolve(dim)):
                return False
        return True

    def arranged(self, product: Contraction, side: int, mine: Arrangement, other: Arrangement) -> Arrangement:
        """The arrangement of a product's output."""
        one = dict(zip(product.labels[side], mine, strict=True))
        two = dict(zip(product.labels[1 - side], other, strict=True))
        return self.viewer.space.resolve_all(one.get(label) or two.get(label) or () for label in product.out)


def _equal(one: ir.Value, other: ir.Value) -> bool:
    """Are these two constants of the same content? jax2onnx writes a mask twice, once for the gradient."""
    arrays = constant(one), constant(other)
    if arrays[0] is None or arrays[1] is None or arrays[0].dtype != arrays[1].dtype:
        return False
    return np.array_equal(arrays[0], arrays[1])


def _tensor(quantity: Quantity | None, dims: Arrangement | None) -> Tensor | None:
    return None if quantity is None or dims is None else Tensor(quantity, dims)
