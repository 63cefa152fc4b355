"""The targets of a gradient: the values of the original graph that an operator's result can take
the place of.

    target := gradient
            | Transpose | Reshape | ... of it (views.py), a factor, a cast between float types      not Expand, Tile
            | ReduceSum over axes that may be summed over, with keepdims or without

each value read by nothing but the next.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import Arrangement, Axis
from fa_compiler.passes.backward.tracing import Tracer, left_by
from fa_compiler.passes.ir.nodes import is_op, only_reader, places_of
from fa_compiler.passes.layout.plan import COPY_COST

MAX_TAIL = 32
"""More operators than this are not looked at for a better target."""


@dataclass(frozen=True)
class GradientTarget:
    """A value that is `factor` times the operator's output.

    `saved` is the cost of the operators that are not needed when this value is replaced.
    """

    value: ir.Value
    dims: Arrangement
    factor: float
    saved: int = 0


def targets_after(
    start: GradientTarget, summable: Collection[Axis], tracer: Tracer
) -> tuple[GradientTarget, ...]:
    """The target itself and those after it; sums may run over the `summable` axes."""
    targets = [start]
    while len(targets) < MAX_TAIL and (node := only_reader(targets[-1].value)) is not None:
        last = targets[-1]
        moved = _after_operator(node, last, summable, tracer)
        if moved is None:
            break
        work = COPY_COST if node.op_type in ("Transpose", "Mul", "Div", "ReduceSum") else 1
        targets.append(GradientTarget(node.outputs[0], *moved, last.saved + work))
    return tuple(targets)


def _after_operator(
    node: ir.Node, target: GradientTarget, summable: Collection[Axis], tracer: Tracer
) -> tuple[Arrangement, float] | None:
    """The arrangement and factor after one operator."""
    if is_op(node, "ReduceSum"):
        return _with_factor(_without_summed(node, target.dims, summable, tracer), target.factor)
    step = tracer.look_through(node)
    if step is None or step[0] is not target.value or is_op(node, "Expand", "Tile"):
        return None
    if tracer.viewer.factor(node) is not None:
        return target.dims, target.factor * step[1]
    return _with_factor(tracer.viewer.rearranged(node, target.dims), target.factor)


def _with_factor(dims: Arrangement | None, factor: float) -> tuple[Arrangement, float] | None:
    """An arrangement with a factor; None where it is unknown."""
    return None if dims is None else (dims, factor)


def _without_summed(
    node: ir.Node, dims: Arrangement, summable: Collection[Axis], tracer: Tracer
) -> Arrangement | None:
    """What a sum over such axes leaves."""
    axes = places_of(node, len(dims))
    if not axes:
        return None
    space = tracer.viewer.space
    chosen = set(axes)
    if not {part for axis in chosen for part in space.resolve(dims[axis])} <= set(
        space.resolve(tuple(summable))
    ):
        return None
    return left_by(node, dims, chosen)
