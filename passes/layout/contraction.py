"""Matrix products of any spelling in one form: two operands, labelled dimensions and a factor.

    scores = query @ key.transpose(-1, -2)
    scores = torch.einsum("bind,bjnd->bnij", query, key)
    logits = torch.addmm(bias, x, weight.T)

    product := MatMul(x, y)                       any rank, batch dimensions broadcast from the
                                                  right; a vector has no dimension of its own
             | Gemm(x, y [, c])                   rank 2; alpha as factor; no c, or beta = 0
             | FusedMatMul(x, y)                  com.microsoft; transA, transB, transBatchA,
                                                  transBatchB, alpha
             | Einsum("ab,bc->ac", x, y)          two operands, explicit or implicit output, no
                                                  repeated label in one operand; an ellipsis stands
                                                  for batch dimensions, as in MatMul

A label that is in both operands and in the output is a batch dimension. A label that is in both
operands and not in the output is summed over. Everything else is refused: such a node counts as no
product.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from fa_compiler.passes.ir.nodes import (
    all_known,
    domain_of,
    float_attr,
    input_of,
    inputs_of,
    int_attr,
    is_op,
    text_attr,
)
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.ops.linear import PRODUCTS, einsum_terms
from fa_compiler.passes.values.shapes import ShapeInfo


@dataclass(frozen=True)
class Contraction:
    """`output[out] = factor * sum operands[0][labels[0]] * operands[1][labels[1]]`."""

    node: ir.Node
    operands: tuple[ir.Value, ir.Value]
    labels: tuple[tuple[str, ...], tuple[str, ...]]
    out: tuple[str, ...]
    factor: float = 1.0

    @property
    def output(self) -> ir.Value:
        """The product."""
        return self.node.outputs[0]

    @property
    def summed(self) -> tuple[str, ...]:
        """The labels summed over."""
        return tuple(label for label in self.labels[0] if label not in self.out)


def contraction(node: ir.Node | None, info: ShapeInfo) -> Contraction | None:
    """Read a node as a contraction over exactly one label; None for other nodes."""
    product = any_contraction(node, info)
    return product if product is not None and len(product.summed) == 1 else None


def any_contraction(node: ir.Node | None, info: ShapeInfo) -> Contraction | None:
    """Read a node as a contraction over any number of labels; None for other nodes."""
    if node is None or len(node.inputs) < 2:
        return None
    left, right = node.inputs[:2]
    reader = READERS.get((domain_of(node), node.op_type))
    if reader is None or left is None or right is None:
        return None
    return reader(node, left, right, info)


def addend(node: ir.Node) -> tuple[ir.Value, float] | None:
    """What a Gemm adds to its product, and the factor on it; None when it adds nothing."""
    value, beta = input_of(node, 2), float_attr(node, "beta", 1.0)
    if value is None or beta == 0.0:
        return None
    return (value, beta)


def without_addend(node: ir.Node, info: ShapeInfo) -> Contraction | None:
    """The product inside a Gemm that adds something to it. The `output` of this contraction is the
    sum."""
    left, right = node.inputs[0], node.inputs[1]
    if not is_op(node, "Gemm") or left is None or right is None:
        return None
    return _matmul(node, left, right, info, *_flags(node), _alpha(node))


def unknown_rank(node: ir.Node, info: ShapeInfo) -> str | None:
    """The name of an operand whose unknown rank keeps a product from being read as a contraction;
    None where there is none."""
    if not (
        is_op(node, *PRODUCTS) or (node.domain, node.op_type) == ("com.microsoft", "FusedMatMul")
    ):
        return None
    return next((value.name for value in inputs_of(node) if info.shape(value) is None), None)


def _with_batch_in_front(
    node: ir.Node, labels: tuple[tuple[str, ...], tuple[str, ...]]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The labels under transBatchA and transBatchB, which put the label before an operand's last
    one in front of its batch labels."""
    left, right = (
        (own[-2], *own[:-2], own[-1]) if int_attr(node, name, 0) else own
        for own, name in zip(labels, ("transBatchA", "transBatchB"), strict=True)
    )
    return left, right


def _flags(node: ir.Node) -> tuple[bool, bool]:
    return bool(int_attr(node, "transA", 0)), bool(int_attr(node, "transB", 0))


def _alpha(node: ir.Node) -> float:
    return float_attr(node, "alpha", 1.0)


LEAST_RANKS = {"MatMul": 1}
"""The least rank of an operand, where it is not 2."""
LEFT = {False: ("m", "k"), True: ("k", "m")}
RIGHT = {False: ("k", "n"), True: ("n", "k")}
"""The last two labels of the operands of a product, by whether the operand is transposed."""


def _matmul(
    node: ir.Node,
    left: ir.Value,
    right: ir.Value,
    info: ShapeInfo,
    trans_a: bool = False,
    trans_b: bool = False,
    factor: float = 1.0,
) -> Contraction | None:
    ranks = len(info.sizes(left)), len(info.sizes(right))
    if min(ranks) < LEAST_RANKS.get(node.op_type, 2):
        return None
    batch = tuple(f"b{index}" for index in range(max(*ranks, 2) - 2))
    last = (LEFT[trans_a], RIGHT[trans_b])
    labels = tuple(
        ("k",) if rank == 1 else batch[len(batch) - (rank - 2) :] + own
        for rank, own in zip(ranks, last, strict=True)
    )
    out = (*batch, *(name for rank, name in zip(ranks, ("m", "n"), strict=True) if rank > 1))
    return Contraction(node, (left, right), (labels[0], labels[1]), out, factor)


def _fused_matmul(
    node: ir.Node, left: ir.Value, right: ir.Value, info: ShapeInfo
) -> Contraction | None:
    if unknown_part(node) is not None:
        return None
    product = _matmul(node, left, right, info, *_flags(node), _alpha(node))
    return (
        None
        if product is None
        else replace(product, labels=_with_batch_in_front(node, product.labels))
    )


def _gemm(node: ir.Node, left: ir.Value, right: ir.Value, info: ShapeInfo) -> Contraction | None:
    return (
        None
        if addend(node) is not None
        else _matmul(node, left, right, info, *_flags(node), _alpha(node))
    )


def _einsum(node: ir.Node, left: ir.Value, right: ir.Value, info: ShapeInfo) -> Contraction | None:
    first, second = info.shape(left), info.shape(right)
    operands, result = einsum_terms(text_attr(node, "equation", ""))
    if first is None or second is None or not len(operands) == len(node.inputs) == 2:
        return None
    hidden = _hidden(operands, (len(first), len(second)))
    if hidden is None or any("..." in term for term in operands) != ("..." in result):
        return None
    batch = tuple(f"b{index}" for index in range(max(hidden)))
    one, other = (
        _labels(term, batch[len(batch) - count :])
        for term, count in zip(operands, hidden, strict=True)
    )
    out = _labels(result, batch)
    if any(len(set(labels)) != len(labels) for labels in (one, other, out)) or (
        set(one) ^ set(other)
    ) - set(out):
        return None
    return Contraction(node, (left, right), (one, other), out)


READERS: Mapping[
    tuple[str, str], Callable[[ir.Node, ir.Value, ir.Value, ShapeInfo], Contraction | None]
] = {
    ("", "MatMul"): _matmul,
    ("", "Gemm"): _gemm,
    ("", "Einsum"): _einsum,
    ("com.microsoft", "FusedMatMul"): _fused_matmul,
}
"""How the products are read, by domain and type."""


def _hidden(terms: Sequence[str], ranks: Sequence[int]) -> list[int] | None:
    """How many dimensions of each operand its ellipsis stands for; None where ONNX Runtime refuses
    the equation."""
    counts = [rank - len(term.replace(".", "")) for term, rank in zip(terms, ranks, strict=True)]
    with_dots = {count for term, count in zip(terms, counts, strict=True) if "..." in term}
    without = {count for term, count in zip(terms, counts, strict=True) if "..." not in term}
    if min(counts) >= 0 and len(with_dots) <= 1 and without <= {0}:
        return counts
    return None


def _labels(term: str, batch: tuple[str, ...]) -> tuple[str, ...]:
    """The labels of one term, with the labels `batch` in place of its ellipsis."""
    before, dots, after = term.partition("...")
    if not dots:
        return tuple(term)
    return (*before, *batch, *after)


def is_outer_product(node: ir.Node | None, info: ShapeInfo) -> bool:
    """Is a node a Mul whose result is larger than both of its operands?"""
    if not is_op(node, "Mul"):
        return False
    shapes = all_known(map(info.shape, (*node.inputs, *node.outputs)))
    if shapes is None:
        return False
    *factors, product = (sum(size.const != 1 for size in shape) for shape in shapes)
    return max(factors) < product
