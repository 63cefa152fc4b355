"""What the operators that multiply two halves of a tensor ask of it."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.op_registry.constraints.core import CheckedNode
from fa_compiler.op_registry.constraints.norms import MOST_AXES
from fa_compiler.op_registry.diagnostic import Diagnostic
from fa_compiler.op_registry.geometry import Shape, divide, no_multiple
from fa_compiler.op_registry.node import TensorInfo


def parts_of_axis(call: CheckedNode) -> Iterator[Diagnostic]:
    """x has 1 to 8 axes, and the axis dim among them, which counts from the end if it is negative.
    Its size is even."""
    shape, dim = call.shape("x"), call.attr("dim")
    if shape is None:
        return
    rank = len(shape)
    if not 1 <= rank <= MOST_AXES:
        yield Diagnostic("x", f"x has rank {rank}, expected 1 to {MOST_AXES}")
    elif not -rank <= dim < rank:
        yield Diagnostic("dim", f"dim is {dim}, expected {-rank} to {rank - 1}")
    elif no_multiple(size := shape[dim], 2):
        yield Diagnostic("x", f"x has the size {size} along the axis {dim}, expected an even one")


def halved(x: TensorInfo, dim: int) -> TensorInfo:
    """A tensor of the type and shape of x, but with half its size along the axis dim."""
    if x.shape is None or not -len(x.shape) <= dim < len(x.shape):
        return TensorInfo(x.dtype)
    place = dim % len(x.shape)
    shape: Shape = (*x.shape[:place], divide(x.shape[place], 2), *x.shape[place + 1 :])
    return TensorInfo(x.dtype, shape)
