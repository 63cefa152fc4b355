"""Products of one operand by several weights: one product by the joined weights computes all of
them.

    q, k, v = x @ w_q, x @ w_k, x @ w_v
    q, k, v = torch.split(x @ torch.cat((w_q, w_k, w_v), 1), sizes, -1)

Grammar; the code cites the numbers of the cases:

    product(x) :=
      1     MatMul(x, w)               w a constant matrix
      2   | Gemm(x, w) | Gemm(x, w, b) alpha and beta 1, x not transposed, w for all transposed or
          for none
    part(x) :=
      3     product(x)
      4   | Add(product(x), b)         b, as that of a Gemm, a constant vector with one number for
                                       each column
    parts become :=
      5     Concat(part(x), ...)       along the last axis: the joined product itself
      6   | Reshape(part(x), ...)      all of them into heads of one size: a Split of the heads
      7   | part(x), ...               a Split of the columns

A column of the joined product is the product of the same rows with the same column, so that the
same numbers are multiplied and added up. ONNX leaves the order of the sum to whoever computes it,
and that order may depend on the number of columns: the last bits may differ, as they do from one
runtime to the next. Where one part has a bias and another one has none, -0 is added to the latter,
which changes no number and no sign of 0.

All weights of a group have the type of x (float32, float16 or bfloat16) and as many rows. They are
constants that no caller can replace, and are not quantised. They are read here only, or by groups
of the same weights in the same order (layers that share them): otherwise the file would hold them
twice. By default they lie in the model's own file, which is written anew in any case. Where this
does not hold, the report says why the products stay apart.

A product that another product alone reads is left out: both are one weight of low rank (LoRA). A
group becomes one product only if fewer kernels are left: a Reshape is none, a Split is one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import ALL_WEIGHTS, Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.around.heads import Heads, of_one_size
from fa_compiler.passes.emit.joined import is_of_other_file
from fa_compiler.passes.ir.nodes import (
    ABSENT,
    FLOATS,
    constant,
    constant_tensor,
    float_attr,
    int_attr,
    is_op,
    is_overridable,
    is_weight,
    only_reader,
    operand_at,
    operand_beside,
    operands,
)
from fa_compiler.passes.ops.parts import concat_of
from fa_compiler.passes.values.shapes import ShapeInfo

MOST_PARTS = 16
"""Larger groups are left alone: such as the keys and values of all layers that attend to one
encoder."""


@dataclass(frozen=True)
class Part:
    """One product of a group, with its bias. `nodes` are what computes it, `result` the last
    value."""

    node: ir.Node
    weight: ir.Value
    columns: int
    bias: np.ndarray | None
    result: ir.Value
    nodes: tuple[ir.Node, ...]


@dataclass(frozen=True)
class Group:
    """Products that become one. `heads` are those of case 6, in the order of the parts. `whole` is
    the Concat of case 5."""

    parts: tuple[Part, ...]
    whole: ir.Node | None = None
    heads: tuple[Heads, ...] = ()

    @property
    def weights(self) -> tuple[ir.Value, ...]:
        """The weights, in order. Groups with the same ones share the joined weight."""
        return tuple(part.weight for part in self.parts)

    @property
    def is_transposed(self) -> bool:
        """Do the weights hold a row for each column of the product?"""
        return _is_transposed(self.parts[0].node)


def groups(graph: ir.Graph, info: ShapeInfo, options: Options) -> Iterator[Group | Decline]:
    """The groups of a graph that become one product, and why others stay apart, in its order."""
    found = list(chain.from_iterable(_groups(parts, info) for parts in _by_operand(graph, info)))
    readers: dict[tuple[ir.Value, ...], set[ir.Node]] = defaultdict(set)
    for group in found:
        readers[group.weights].update(part.node for part in group.parts)
    for group in found:
        yield _refusal(group, readers[group.weights], options) or group


def _refusal(group: Group, readers: Container[ir.Node], options: Options) -> Decline | None:
    """Why the weights of a group cannot be joined; None where they can. `readers` are the products
    of all groups with these weights."""
    if len({*group.weights}) < len(group.parts):
        return _apart("two of them read one weight", group.parts[0])
    for part in group.parts:
        name, tensor = f"the weight {part.weight.name!r}", constant_tensor(part.weight)
        if tensor is None:
            free = is_overridable(part.weight)
            return _apart(f"a caller may replace {name}" if free else f"{name} is quantised", part)
        if tensor.dtype not in FLOATS:
            return _apart(f"{name} is of the type {tensor.dtype.name}", part)
        if not _is_of_graph(part) or any(reader not in readers for reader, _ in part.weight.uses()):
            return _apart(f"{name} is not read by them alone", part)
        if options.join_weights != ALL_WEIGHTS and is_of_other_file(tensor):
            hint = f"--join-weights {ALL_WEIGHTS} writes them anew"
            return _apart(f"{name} lies in a file beside the model's", part, hint)
    return None


def _is_of_graph(part: Part) -> bool:
    """Is the weight a constant of the product's graph, and neither an input nor an output?"""
    weight, maker = part.weight, part.weight.producer()
    bound = weight.is_graph_input() or weight.is_graph_output()
    return part.node.graph is (weight.graph if maker is None else maker.graph) and not bound


def _apart(reason: str, part: Part, hint: str | None = None) -> Decline:
    return Decline(Code.WEIGHTS, f"products of one operand stay apart: {reason}", part.node, hint)


def _by_operand(graph: ir.Graph, info: ShapeInfo) -> Iterable[list[Part]]:
    """The products that have one operand and weights of one form, in groups."""
    found: dict[object, list[Part]] = defaultdict(list)
    for node in graph:
        if (part := _part(node, info)) is not None:
            rows = info.sizes(part.weight)[_is_transposed(node)]
            found[operand_at(node, 0), node.op_type, _is_transposed(node), rows].append(part)
    return found.values()


def _is_transposed(node: ir.Node) -> bool:
    """Does a product read its weight transposed?"""
    return bool(int_attr(node, "transB", 0))


def _part(node: ir.Node, info: ShapeInfo) -> Part | None:
    """A product by a weight; None for other nodes."""
    if not is_op(node, "MatMul", "Gemm"):  # 1
        return None
    weight = operand_at(node, 1)
    shape = info.sizes(weight)
    if not _is_fixed(weight) or len(shape) != 2 or not _is_plain(node):
        return None
    columns = shape[not _is_transposed(node)].const
    if not columns or len(info.sizes(node.outputs[0])) < 2:
        return None
    return _with_bias(Part(node, weight, columns, None, node.outputs[0], (node,)))


def _is_fixed(weight: ir.Value) -> bool:
    """Is this a weight, or one that is quantised?"""
    maker = weight.producer()
    return is_weight(weight) or (
        is_op(maker, "DequantizeLinear") and is_weight(operand_at(maker, 0))
    )


def _is_plain(node: ir.Node) -> bool:
    """Is this a MatMul, or a Gemm that computes x w + b?"""  # 2
    factors = float_attr(node, "alpha", 1.0), float_attr(node, "beta", 1.0)
    return factors == (1, 1) and not int_attr(node, "transA", 0)


def _with_bias(part: Part) -> Part | None:
    """A product with the bias that it has or that is added to it; None for a bias that cannot be
    joined, and for a product that another product alone reads."""
    given = operand_at(part.node, 2)
    if given is not ABSENT:
        bias = _vector(given, part.columns)
        part = replace(part, bias=bias)
        if bias is None:
            return None
    else:
        reader = only_reader(part.result)
        bias = _vector(operand_beside(reader, part.result, "Add"), part.columns)
        if reader is not None and bias is not None:  # 4
            part = replace(part, bias=bias, result=reader.outputs[0], nodes=(part.node, reader))
    reader = only_reader(part.result)
    is_inner = is_op(reader, "MatMul", "Gemm") and operand_at(reader, 0) is part.result
    return None if is_inner or part.result.is_graph_output() else part  # 3


def _vector(value: ir.Value | None, columns: int) -> np.ndarray | None:
    """The numbers of a constant vector; None for another value."""
    numbers = constant(value)
    return numbers if numbers is not None and numbers.shape == (columns,) else None


def _groups(parts: Sequence[Part], info: ShapeInfo) -> Iterator[Group]:
    """The groups among the products of one operand: first those that are joined anyway."""
    left = {part.result: part for part in parts}
    for value in list(left):
        if value in left and (whole := _whole(value, left, info)) is not None:  # 5
            yield Group(tuple(left.pop(each) for each in operands(whole)), whole=whole)
    if 1 < len(left) <= MOST_PARTS and (group := _divided(tuple(left.values()), info)) is not None:
        yield group


def _whole(value: ir.Value, parts: Iterable[ir.Value], info: ShapeInfo) -> ir.Node | None:
    """The Concat along the last axis of some of the parts, which nothing else reads; None where
    there is none."""
    joined, known = concat_of(only_reader(value), info), {*parts}
    if joined is None or len(joined.parts) < 2:
        return None
    alone = all(each in known and only_reader(each) is joined.node for each in joined.parts)
    return joined.node if alone and joined.is_last else None


def _divided(parts: tuple[Part, ...], info: ShapeInfo) -> Group | None:
    """A group whose product is divided; None where this saves no kernel."""
    after = 2 + any(len(part.nodes) > 1 for part in parts)
    if sum(len(part.nodes) for part in parts) <= after:
        return None
    heads = of_one_size([part.result for part in parts], info)
    return Group(parts, heads=heads or ())  # 6 and 7
