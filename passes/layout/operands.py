"""The operands of a product as arrangements of axes. Dimensions that the product walks together
share their axes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from fa_compiler.passes.algebra.axes import Arrangement, Axes, AxisSpace
from fa_compiler.passes.answer.decline import Decline, if_possible
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import without_none
from fa_compiler.passes.layout.contraction import Contraction
from fa_compiler.passes.layout.views import View, Viewer


@dataclass(frozen=True)
class Operands:
    """A contraction and the axes of its operands' dimensions, by label. `scale` is the product of
    the views' scales."""

    product: Contraction
    views: tuple[View | None, View | None]
    dims: tuple[dict[str, Axes], dict[str, Axes]]
    scale: float

    @staticmethod
    def of(
        product: Contraction,
        viewer: Viewer,
        given: tuple[int, Arrangement] | None = None,
        widening: bool = False,
        factors: bool = True,
    ) -> Operands:
        """View the operands, and unify the axes of the labels that they share.

        `given` is the side and the arrangement of an operand that has no view because it is inside
        the match. `widening` and `factors` say what the views look through. Where sizes further
        upstream are not proven to match, the views are shallow: the product itself requires the
        dimensions of its operands to match.

        Raises Decline where ranks are unknown or the dimensions are not proven to fit.
        """
        viewed = partial(Operands._viewed, product, viewer, given, widening, factors)
        return if_possible(partial(viewed, shallow=False)) or viewed(shallow=True)

    @staticmethod
    def _viewed(
        product: Contraction,
        viewer: Viewer,
        given: tuple[int, Arrangement] | None,
        widening: bool,
        factors: bool,
        shallow: bool,
    ) -> Operands:
        views: list[View | None] = [None, None]
        dims: list[dict[str, Axes]] = [{}, {}]
        for side in (0, 1):
            labels = product.labels[side]
            if given is not None and given[0] == side:
                arrangement = given[1]
            else:
                view = viewer.view(product.operands[side], widening, factors, shallow)
                if view is None:
                    raise Decline(Code.RANK, "the rank of an operand is unknown", product.node)
                views[side] = view
                arrangement = view.dims
            if len(arrangement) != len(labels):
                raise Decline(
                    Code.RANK, "the rank of an operand is not what its product needs", product.node
                )
            dims[side] = dict(zip(labels, arrangement, strict=True))
        for name in product.labels[0]:
            if name in dims[1]:
                one, other = (
                    viewer.space.resolve(dims[0][name]),
                    viewer.space.resolve(dims[1][name]),
                )
                batch = name in product.out
                if batch and not (one and other):
                    continue  # one of them is broadcast
                unify = viewer.space.unify_broadcast if batch else viewer.space.unify
                if not unify(one, other):
                    raise Decline(
                        Code.SHAPE, "the operands' dimensions were not proven to fit", product.node
                    )
        scale = math.prod(view.scale for view in without_none(views))
        return Operands(product, (views[0], views[1]), (dims[0], dims[1]), scale)

    def free(self, side: int) -> list[str]:
        """The labels that only this operand has, in the order of the output."""
        return [
            label
            for label in self.product.out
            if label in self.dims[side] and label not in self.dims[1 - side]
        ]

    def own_dims(self, side: int) -> tuple[Axes, ...]:
        """The axes of the dimensions that only this operand has; empty for a vector."""
        return tuple(self.dims[side][label] for label in self.free(side))

    def own_labels(self, side: int, axes: Axes, space: AxisSpace) -> tuple[str, ...]:
        """The labels of dimensions that only this operand has and that together, one after the
        other, run along exactly these axes; empty where there are none."""
        own = [(label, space.resolve(self.dims[side][label])) for label in self.free(side)]
        rest, labels = space.resolve(axes), tuple[str, ...]()
        while rest or not labels:
            fitting = (
                (label, dim) for label, dim in own if dim == rest[: len(dim)] and (dim or not rest)
            )
            label, dim = next(fitting, (None, ()))
            if label is None:
                return ()
            labels, rest = (*labels, label), rest[len(dim) :]
        return labels

    def out_dim(self, label: str) -> Axes:
        """The axes of an output dimension: those of the operand that is not broadcast along it."""
        return self.dims[0].get(label) or self.dims[1].get(label) or ()

    @property
    def out(self) -> Arrangement:
        """The arrangement of the product."""
        return tuple(self.out_dim(label) for label in self.product.out)
