"""The values between the probabilities and the gradients, each as the quantity it is (see
quantities.py).

    dp = dy @ v.transpose(-2, -1)
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * scale
    dq, dk, dv = ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ dy

Grammar, from the probabilities downwards and, where another operand comes in, upwards to the
product that made it. The code cites the numbers of the cases; c is a number:

    region :=
      1     what the forward part left                    the probabilities, exponentials and their
                                                          row sums
      2   | dO V^T in any spelling of the product         G
      3   | arithmetic of regions                         layout, casts, factors, products, sums:
                                                          see polynomials.py
      4   | Pow(L, n) | Reciprocal(L) | c / L | Pow(region, 2)
      5   | ReduceSum(region) over the keys               of P*G, with powers of L before it
      6   | ReduceSum(dO * O) over the values' depth      D, as FlashAttention's backward part
                                                          computes it
      7   | ReduceSum(region) over a size of 1            jax: of what is repeated after it
      8   | Einsum(region, region)                        summed over the keys and nothing else
      9   | SoftmaxGrad_13(region, region), SoftmaxGrad   com.microsoft: P * (g - rowsum(P * g))
     10   | Where(c, region, 0) | Where(c, 0, region)     c the condition of a selection on the
                                                          scores, of the guard, or the drop mask
     11   | Cast(drop mask)                               zeros and ones: keep * F
     12   | DropoutGrad(region, drop mask, ratio)         com.microsoft: region * drop mask / (1 -
                                                          ratio)
          | DropoutGrad(region, ...)                      not in training mode: the region itself
     13   | Tanh of a soft cap, in the forward part       T
     14   | region + c | region - c | c - region          beside a soft cap: of 1 - T^2, or of (1 -
                                                          T) * (1 + T)
     15   | TanhGrad(region, T)                           com.microsoft: region * (1 - T^2)
     16   | region * b                                    b of 0 and c, from the condition of a
                                                          selection on the scores
     17   | region + 0                                    left of a Where that tf2onnx writes as g *
                                                          b + 0 * (1 - b)

Zeros put where the forward part masks change nothing in a row that attends a key, for in the end
everything there is multiplied by a probability of 0. Zeros put anywhere else change the gradient:
not accepted.

O is what the product with the values gives, P V, dropout included. So sum_d dO O = sum_j P (dO V^T)
= D in every row, one without keys included: there O was made of the same P. Who else reads O does
not matter, for the operator gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axes, Axis
from fa_compiler.passes.backward.polynomials import Monomial, PolynomialReader, Tensor
from fa_compiler.passes.backward.quantities import (
    ONE,
    SLOPE,
    D,
    E,
    F,
    G,
    L,
    MaskedRows,
    P,
    Quantity,
    T,
)
from fa_compiler.passes.backward.tracing import Tracer, left_by, seeds
from fa_compiler.passes.ir.nodes import (
    axes_of,
    constant,
    domain_of,
    equal_numbers,
    input_of,
    inputs_of,
    instances,
    int_attr,
    is_op,
    operand_at,
    operand_orders,
    operands,
    places_of,
    producer,
    selections_of,
    sole,
)
from fa_compiler.passes.layout.contraction import Contraction, any_contraction
from fa_compiler.passes.layout.views import View, Viewer
from fa_compiler.passes.masks.score_ops import AlignedTensor, Select
from fa_compiler.passes.matching.match import AttentionMatch, Derivation
from fa_compiler.passes.matching.probability_path import adds_nothing
from fa_compiler.passes.matching.softmax import SoftmaxAnchor
from fa_compiler.passes.ops.elementwise import bare
from fa_compiler.passes.values.patterns import Bind, OneOf, Op, match

BASE = Bind("base")
# 4
POWER = OneOf(
    (Op("Pow", BASE, Bind("exponent")), Op("Reciprocal", BASE), Op("Div", Bind("number"), BASE))
)


def _forward(monomial: Monomial, is_raw: bool) -> Quantity:
    """What the forward part computes: before its guard if it is raw."""
    return Quantity.of(monomial, rows=MaskedRows.RAW if is_raw else MaskedRows.SAME, raw=is_raw)


@dataclass
class Region:
    """The region of one match. `dy` is the gradient of the output, known from the first product
    that reads it."""

    match: AttentionMatch
    derivation: Derivation
    viewer: Viewer
    dy: View | None = None

    def __post_init__(self) -> None:
        self.tracer = Tracer(self.match, self.viewer)
        self.reader = PolynomialReader[Quantity](self.tracer, self._of_node)
        self._put_forward(self.match.anchor)

    def _put_forward(self, anchor: SoftmaxAnchor) -> None:
        """Cases 1 and 13: what the forward part computes."""
        paths = self.derivation.paths
        if (cap := paths.cap) is not None:
            self.reader.put(cap, Quantity.of(T), paths.dims[cap])
        guard = paths.after.guard
        is_raw = guard is not None
        scores = self.derivation.probabilities.seen[anchor.output]
        for node in anchor.nodes:
            made = node.outputs[0]
            if is_op(node, "Exp") and made is not anchor.output:
                self.reader.put(made, _forward(E, is_raw), scores)
            elif is_op(node, "ReduceSum") and anchor.axis is not None:
                self.reader.put(made, _forward(L, is_raw), left_by(node, scores, {anchor.axis}))
        self.reader.put(anchor.output, _forward(P, is_raw), scores)
        for node in paths.after.nodes:
            if is_op(node, "Mul", "Div"):
                # The grammar tells what follows.
                break
            if guard is not None and node is guard.where:
                is_raw = False
            own = self.derivation.probabilities.seen.get(node.outputs[0])
            if own is not None and not is_op(node, "IsNaN"):
                self.reader.put(node.outputs[0], _forward(P, is_raw), own)

    @property
    def dropout(self) -> bool:
        """Are probabilities dropped?"""
        return self.match.dropout is not None

    # -- one value ------------------------------------------------------------------------------

    def _of_node(self, node: ir.Node) -> Tensor[Quantity] | None:
        """What a node makes; None when it is nothing that the grammar knows."""
        if node.graph is not self.match.node.graph:
            return None
        made = self._made_by(node)
        if made is None or self._may_be_larger(node.outputs[0], made.dims):
            return None
        return made

    def _may_be_larger(self, value: ir.Value, dims: Arrangement) -> bool:
        """Does a value differ in size from the probabilities along one of their axes? Where that
        axis is 1 in a run, an operand enlarges only the gradient."""
        space, info, probabilities = self.viewer.space, self.viewer.info, self.match.anchor.output
        axes = space.resolve_all(self.derivation.probabilities.seen[probabilities])
        known = dict(zip(axes, info.sizes(probabilities), strict=False))
        sizes = zip(space.resolve_all(dims), info.sizes(value), strict=False)
        return any(
            size != known[axis] and not known[axis].is_const
            for axis, size in sizes
            if axis and axis in known
        )

    def _made_by(self, node: ir.Node) -> Tensor[Quantity] | None:
        kept = self._drop_mask(node.inputs[0]) if is_op(node, "Cast") else None  # 11
        # 3
        arithmetic = (
            kept or self._zeroed(node) or self.reader.made_by(node) or self._unchanged(node)
        )
        if arithmetic is not None:
            return arithmetic
        return OWN_RULES.get((domain_of(node), node.op_type), Region._of_product)(self, node)

    def _of_product(self, node: ir.Node) -> Tensor[Quantity] | None:
        product = any_contraction(node, self.viewer.info)
        return None if product is None else self._product(product)

    def _dropout_gradient(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Case 12: the gradient through a Dropout with a known mask, or through one that is
        switched off."""
        tensor, mode = self.reader.tensor(node.inputs[0]), input_of(node, 3)
        ratio, flag = self.viewer.info.scalar(operand_at(node, 2)), constant(mode, limit=1)
        if tensor is None or (mode is not None and flag is None):
            return None
        # onnxruntime-training's kernel does not look at the mask where nothing was dropped.
        if flag is None or not flag.any() or ratio == 0.0:
            return tensor
        kept = self._drop_mask(node.inputs[1])
        if kept is None or ratio is None or not 0.0 < ratio < 1.0:
            return None
        scaled = kept.quantity.scaled(1.0 / (1.0 - ratio))
        quantity = scaled and tensor.quantity.times(scaled)
        return Tensor.of(quantity, self.tracer.aligned(tensor.dims, kept.dims))

    def _plus_number(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Case 14: a number added to something, or the difference of the two."""
        if self.match.softcap == 0.0:
            return None
        left, right = operands(node)
        sign = -1.0 if is_op(node, "Sub") else 1.0
        for region, other, factor, sign_of_number in (
            (left, right, 1.0, sign),
            (right, left, sign, 1.0),
        ):
            tensor, number = self.reader.tensor(region), self.viewer.info.scalar(other)
            if tensor is not None and number is not None and number != 0.0:
                own = tensor.quantity.scaled(factor)
                return Tensor.of(
                    own and own.plus(Quantity.of(ONE, number * sign_of_number)), tensor.dims
                )
        return None

    def _tanh_gradient(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Case 15: the gradient of a tanh in one node."""
        tensors = self.reader.all(node.inputs[:2])
        if tensors is None or node.inputs[1] is not self.derivation.paths.cap:
            return None
        gradient, tanh = tensors
        dims = self.tracer.aligned(gradient.dims, tanh.dims)
        return Tensor.of(gradient.quantity.times(Quantity(SLOPE)), dims)

    def _drop_mask(self, value: ir.Value | None) -> Tensor[Quantity] | None:
        """Case 11: the drop mask, of zeros and ones, which is `keep` times F."""
        dropout = self.match.dropout
        if (
            dropout is None
            or (known := self.tracer.trace(value, {dropout.mask: dropout.dims})) is None
        ):
            return None
        return Tensor(Quantity.of(F, dropout.keep), known.dims)

    def _power(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Case 4: an integer power of row sums of exponentials, or a square."""
        power_of = match(POWER, node.outputs[0], self.viewer.info)
        if power_of is None or (tensor := self.reader.tensor(power_of["base"])) is None:
            return None
        number, exponent = (
            self._number(power_of.get("number"), 1.0),
            self._number(power_of.get("exponent"), -1.0),
        )
        if number is None or exponent is None or not exponent.is_integer():
            return None
        power = tensor.quantity.to_power(int(exponent))
        if power is None and exponent == 2.0:
            power = tensor.quantity.times(tensor.quantity)
        return Tensor.of(power and power.scaled(number), tensor.dims)

    def _row_sum(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Cases 5 to 7."""
        return self._output_sum(node) or self._sum_over_keys(node)

    def _number(self, value: ir.Value | None, absent: float) -> float | None:
        return absent if value is None else self.viewer.info.scalar(value)

    def _sum_over_keys(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Cases 5 and 7: the sum over the keys, or over a size of 1, which is no sum."""
        tensor = self.reader.tensor(node.inputs[0])
        if tensor is None:
            return None
        axis = sole(places_of(node, len(tensor.dims)) or ())
        if axis is None:
            return None
        dims = left_by(node, tensor.dims, {axis})
        if self.are_columns(tensor.dims[axis]):
            return Tensor.of(tensor.quantity.row_sum(self.dropout), dims)
        return None if tensor.dims[axis] else Tensor.of(tensor.quantity, dims)

    def _output_sum(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Case 6: the sum over the keys, computed from the output."""
        product, place = producer(node.inputs[0]), sole(axes_of(node) or ())
        if self.dy is None or place is None:
            return None
        space = self.viewer.space
        for out, gradient in operand_orders(product, "Mul"):
            output = self.tracer.trace(out, {self.match.output: self.match.output_dims})
            other = output and self.tracer.trace(gradient, seeds(self.dy.equivalent_values))
            if (
                output is None
                or other is None
                or not (dims := self.tracer.aligned(output.dims, other.dims))
            ):
                continue
            axis = place % len(dims)
            if space.resolve(dims[axis]) == space.resolve(self.match.roles.value_head_dim):
                return Tensor.of(
                    Quantity.of(D).scaled(output.factor * other.factor), left_by(node, dims, {axis})
                )
        return None

    def are_columns(self, axes: Axes) -> bool:
        """Is this the dimension of the keys?"""
        space = self.viewer.space
        return space.resolve(axes) == space.resolve(self.match.roles.kv_seq)

    def _softmax_gradient(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Case 9: the gradient of a softmax in one node."""
        tensors = self.reader.all(node.inputs[:2])
        if tensors is None:
            return None
        gradient, softmax = tensors
        dims = self.tracer.aligned(gradient.dims, softmax.dims)
        if dims is None or not self._runs_along_keys(node, dims):
            return None
        weighted = softmax.quantity.times(gradient.quantity)
        total = weighted and weighted.row_sum(self.dropout)
        inner = total and gradient.quantity.plus(total, -1.0)
        return Tensor.of(inner and softmax.quantity.times(inner), dims)

    def _runs_along_keys(self, softmax_gradient: ir.Node, dims: Arrangement) -> bool:
        """Is this the gradient of a softmax along the keys? The older operator flattens all axes
        from its own on."""
        last, modern = len(dims) - 1, softmax_gradient.op_type == "SoftmaxGrad_13"
        axis = int_attr(softmax_gradient, "axis", -1 if modern else 1)
        if axis < 0:
            axis += len(dims)
        return 0 <= axis <= last and self.are_columns(dims[axis]) and (modern or axis == last)

    # -- selections -----------------------------------------------------------------------------

    def _selected(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Case 10: zeros where the forward part masks, or where its guard does."""
        for condition, region, zero, keep in selections_of(node):
            if self._is_zero(zero) and (tensor := self.reader.tensor(region)) is not None:
                return Tensor.of(self._masked(condition, keep, tensor), tensor.dims)
        return None

    def _is_zero(self, value: ir.Value) -> bool:
        return (
            self.viewer.facts.sets.of(value) == frozenset((0.0,))
            or self.viewer.info.scalar(value) == 0.0
        )

    def _zeroed(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Case 16: zeros where the forward part masks, by a factor that is 0 there and one number
        elsewhere."""
        for region, factor in operand_orders(node, "Mul"):
            number = self.viewer.facts.sets.only_besides_zero(factor)
            if number is None or (tensor := self.reader.tensor(region)) is None:
                continue
            if (place := self._selection(factor, True, tensor)) is not None:
                masked = tensor.quantity.selected(place, len(self._selections), multiplied=True)
                return Tensor.of(masked.scaled(number), tensor.dims)
        return None

    def _unchanged(self, node: ir.Node) -> Tensor[Quantity] | None:
        """Case 17: what 0 is added to."""
        given = (value for value in inputs_of(node) if adds_nothing(node, value, self.viewer))
        return self.reader.tensor(next(given, None))

    def _masked(self, condition: ir.Value, keep: bool, tensor: Tensor[Quantity]) -> Quantity | None:
        """The tensor with zeros where `condition` is not `keep`; None for a condition foreign to
        the forward part."""
        own, negated = bare(condition, self.viewer.info)
        kept = self._drop_mask(own)
        if (
            kept is not None
            and keep != negated
            and self.tracer.aligned(tensor.dims, kept.dims) is not None
        ):
            return tensor.quantity.times(kept.quantity)
        if (selection := self._selection(condition, keep, tensor)) is not None:
            return tensor.quantity.selected(selection, len(self._selections))
        guard = self.derivation.paths.after.guard
        if guard is None:
            return None
        where = guard.where
        test, chosen, _ = operands(where)
        chosen_is_kept = self.reader.tensors.get(chosen) is not None
        theirs, other = bare(test, self.viewer.info)
        dims = self.viewer.alignment(
            test, self.derivation.probabilities.seen[where.outputs[0]], where
        )
        if keep ^ negated != chosen_is_kept ^ other or not self._selects_alike(
            own, theirs, dims, tensor
        ):
            return None
        return tensor.quantity.guarded()

    @property
    def _selections(self) -> list[Select[AlignedTensor]]:
        return instances(self.derivation.paths.scores.terms, Select)

    def _selection(self, condition: ir.Value, keep: bool, tensor: Tensor[Quantity]) -> int | None:
        """The place of the selection on the scores that keeps what is kept where `condition` is
        `keep`."""
        own, negated = bare(condition, self.viewer.info)
        for place, term in enumerate(self._selections):
            theirs, other = bare(term.operand.value, self.viewer.info)
            if keep ^ negated == term.keep ^ other and self._selects_alike(
                own, theirs, term.operand.dims, tensor
            ):
                return place
        return None

    def _selects_alike(
        self, own: ir.Value, theirs: ir.Value, dims: Arrangement, tensor: Tensor[Quantity]
    ) -> bool:
        """Does a condition select from the tensor along the axes along which the forward part's
        does?"""
        known = self.tracer.trace(theirs if equal_numbers(own, theirs) else own, {theirs: dims})
        if known is None:
            return False
        space = self.viewer.space
        mine, wanted = space.resolve_all(known.dims), space.resolve_all(tensor.dims)
        if len(mine) > len(wanted):
            return False
        return all(
            not a or self.tracer.same(a, b) for a, b in zip(mine[::-1], wanted[::-1], strict=False)
        )

    # -- products -------------------------------------------------------------------------------

    def _product(self, product: Contraction) -> Tensor[Quantity] | None:
        """Cases 2 and 8: dO V^T, or the row sums of a product of two tensors of the region."""
        values = seeds(self.match.value.equivalent_values)
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
                return Tensor.of(Quantity.of(G).scaled(known.factor * factor * product.factor), out)
        return self._row_products(product) if is_op(product.node, "Einsum") else None

    def _row_products(self, product: Contraction) -> Tensor[Quantity] | None:
        """Case 8: the row sums of a product of two tensors of the region."""
        tensors = self.reader.all(product.operands)
        if tensors is None or set(product.labels[0]) != set(product.labels[1]):
            return None
        one, other = tensors
        order = dict(zip(product.labels[1], other.dims, strict=True))
        dims = self.tracer.aligned(one.dims, tuple(order[label] for label in product.labels[0]))
        quantity = one.quantity.times(other.quantity)
        total = quantity and quantity.row_sum(self.dropout)
        if (
            dims is None
            or total is None
            or not self._runs_over(product, 0, dims, self.match.roles.kv_seq)
        ):
            return None
        by_label = dict(zip(product.labels[0], dims, strict=True))
        return Tensor.of(
            total.scaled(product.factor), tuple(by_label[label] for label in product.out)
        )

    def _runs_over(self, product: Contraction, side: int, dims: Arrangement, axes: Axes) -> bool:
        """Does the product sum over exactly these axes?"""
        space = self.viewer.space
        by_label = dict(zip(product.labels[side], dims, strict=True))
        summed = space.resolve(chain.from_iterable(by_label[label] for label in product.summed))
        return len(product.summed) == 1 and summed == space.resolve(axes)

    def output_gradient(
        self, product: Contraction, side: int, other: Arrangement
    ) -> tuple[Arrangement, float] | None:
        """The operand of a product as the gradient of the attention's output: its arrangement and
        factor.

        The first operand that stands where that gradient has to stand is taken for it; all others
        have to be the same. What it is does not matter: the operator's gradients are linear in it.
        """
        value = product.operands[side]
        if self.dy is not None:
            known = self.tracer.trace(value, seeds(self.dy.equivalent_values))
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
        """Let the labels two operands share run along the same axes. An axis that runs along two
        labels is refused: the product walks each of them by itself."""
        if len(dims) != len(product.labels[side]) or len(other) != len(product.labels[1 - side]):
            return False
        mine = dict(zip(product.labels[side], dims, strict=True))
        theirs = dict(zip(product.labels[1 - side], other, strict=True))
        for label in mine.keys() & theirs.keys():
            one, two = (
                self.viewer.space.resolve(mine[label]),
                self.viewer.space.resolve(theirs[label]),
            )
            broadcast = label in product.out and not (one and two)
            if not broadcast and not self.tracer.same(one, two):
                return False
        places: dict[Axis, str] = {}
        for label, dim in (*mine.items(), *theirs.items()):
            if any(
                places.setdefault(axis, label) != label for axis in self.viewer.space.resolve(dim)
            ):
                return False
        return True

    def arranged(
        self, product: Contraction, side: int, mine: Arrangement, other: Arrangement
    ) -> Arrangement:
        """The arrangement of a product's output."""
        one = dict(zip(product.labels[side], mine, strict=True))
        two = dict(zip(product.labels[1 - side], other, strict=True))
        return self.viewer.space.resolve_all(
            one.get(label) or two.get(label) or () for label in product.out
        )


OWN_RULES: Mapping[tuple[str, str], Callable[[Region, ir.Node], Tensor[Quantity] | None]] = {
    ("", "Add"): Region._plus_number,
    ("", "Sub"): Region._plus_number,
    ("", "Pow"): Region._power,
    ("", "Reciprocal"): Region._power,
    ("", "Div"): Region._power,
    ("", "ReduceSum"): Region._row_sum,
    ("", "Where"): Region._selected,
    ("com.microsoft", "TanhGrad"): Region._tanh_gradient,
    ("com.microsoft", "SoftmaxGrad"): Region._softmax_gradient,
    ("com.microsoft", "SoftmaxGrad_13"): Region._softmax_gradient,
    ("com.microsoft", "DropoutGrad"): Region._dropout_gradient,
}
"""What an operator makes where it is no arithmetic of tensors of the region."""
