"""How small the named sizes of the inputs can be, because a convolution refuses smaller ones.

    x = torch.nn.functional.conv1d(waves, weight, stride=2)       # fails for waves shorter than the kernel
    length = (waves.shape[-1] - kernel) // 2 + 1                  # as the mask of its result is computed

    length := floor(rest / stride) + 1      behind a convolution, as ONNX defines it. `rest` is the
                                            size in front of it and its padding, less the reach of
                                            the kernel
            | trunc(rest / stride) + 1      as a model computes it by an integer Div

torch's exporter computes the length behind a convolution from sizes, and Div rounds toward zero.
The two lengths differ only where `rest` is negative. ONNX Runtime refuses a convolution whose
result has no element along a spatial axis, so `rest` is not negative in a run that succeeds. That
holds for all values of the model, also for those that do not depend on the convolution: the main
graph runs each convolution that leads to an output, whatever its inputs hold. A convolution in a
branch may not run, and proves nothing. Neither does one of which only the shape leads to an output:
ONNX Runtime does not run it where the part of the shape is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.ir.nodes import domain_of, makers_of, reached, reads_shape
from fa_compiler.passes.ops.context import (
    Shape,
)

CONVOLUTIONS = frozenset(
    {("", "Conv"), ("", "ConvInteger"), ("", "QLinearConv"), ("com.microsoft", "FusedConv")}
)
"""The convolutions that ONNX Runtime does not run to an empty result. Their spatial axes are the
last ones."""


def least_sizes(graph: ir.Graph, shape: Callable[[ir.Value], Shape | None]) -> dict[str, int]:
    """The named sizes that are at least 1 or more in each successful run of a main graph, with
    these lower bounds."""
    least: dict[str, int] = {}
    for node in _always_run(graph):
        if (domain_of(node), node.op_type) in CONVOLUTIONS:
            for size in (shape(node.outputs[0]) or ())[2:]:
                name, bound = _bounded(size, 1) or ("", 0)
                if bound > least.get(name, 0):
                    least[name] = bound
    return least


def _always_run(graph: ir.Graph) -> Iterator[ir.Node]:
    """The nodes of a main graph whose elements its outputs are computed from."""

    def makers(node: ir.Node) -> list[ir.Node]:
        read = () if reads_shape(node) else node.inputs
        return makers_of(read)

    return reached(makers_of(graph.outputs), makers)


def _bounded(dim: Dim, bound: int) -> tuple[str, int] | None:
    """The named size that a dim of at least `bound` is computed from by quotients and sums with
    numbers, and the lower bound of it."""
    while True:
        bound -= dim.addend
        atom = (dim - dim.addend).single_atom
        if atom is not None and atom.op == "symbol":
            return atom.name, bound
        if atom is None or atom.op != "floor" or (by := atom.args[1].const) is None or by < 1:
            return None
        dim, bound = atom.args[0], bound * by  # floor(x / n) is at least b where x is at least n*b
