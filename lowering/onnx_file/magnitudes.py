"""How large the operands of fused nodes get: their bodies need no branch for numbers that cannot
occur.

What a model computes from integers and finite weights is finite, and a norm makes it small again in
every layer. So the bounds of passes/values/bounds.py prove for most models of text that query, key
and value are tame in every run. What they need beside the rules for single operators is here:

    weights                          each is read, if it is in the model's own file or in memory
    MatMul, Gemm                     by the sums of the absolute weights, or by the number of
                                     products
    norms, ready made or not         at most the root of the number of elements, times the weight
    Erf, Gelu                        at most 1, and at most the operand
    norms, rotary positions and      the same, of a sum with a second operand or a bias
    Gelu of ONNX Runtime
    FlashAttentionScore              at most the largest value

A float input of the model may hold anything, so nothing is proven behind it: images, sounds,
embeddings, caches. The variance of a norm is taken to be computed to float32's precision; a kernel
that makes NaN of finite numbers there makes it in the original, too.

Models of more than MOST_WEIGHTS are not looked at: one layer takes a thousand times as long as the
branch, and reading all weights takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, GRAPH_OP, get
from fa_compiler.passes.algebra.intervals import Bound
from fa_compiler.passes.answer.budget import limited_attempt
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import Options
from fa_compiler.passes.around import layer_norm, rms_norm
from fa_compiler.passes.around.records import Norm, SummedNorm
from fa_compiler.passes.emit.joined import is_of_other_file
from fa_compiler.passes.ir.nodes import (
    constant_tensor,
    float_attr,
    input_of,
    int_attr,
    is_op,
    text_attr,
    unheld,
)
from fa_compiler.passes.values.bounds import Bounds
from fa_compiler.passes.values.shapes import ShapeInfo

MOST_WEIGHTS = 1 << 26
"""The most weights of a model that is looked at: 256 MB in float32."""
TAME = 1e30
"""Scores below this are lost in the lowest number of float32, and do not overflow."""
SQUARED = 1e15
"""The squares of numbers below this, and their sums over a row, do not overflow in float32."""
ROUNDED = 1.0 + 2.0**-10
"""More than what roundings add to a sum of up to LONGEST products."""
LONGEST = 1 << 13

_RESULT = get(GRAPH_OP).output_names.index("attention_out")
_NO_NUMBERS = (ir.DataType.STRING, ir.DataType.COMPLEX64, ir.DataType.COMPLEX128)

Rule = Callable[["Magnitudes", ir.Node], Bound | None]
_READY_MADE = {
    "LayerNormalization": True,
    "RMSNormalization": False,
    "SimplifiedLayerNormalization": False,
}
"""Norms, and whether they have a bias."""


def tame_nodes(nodes: Sequence[ir.Node], model: ir.Model, info: ShapeInfo) -> set[ir.Node]:
    """Those FlashAttentionScore nodes of a model that have a mask, and whose operands are finite in
    every run, with scores below TAME. Without a mask this changes no body.

    `info` is what is known of the model. External data are not read, but for weights of the model's
    own file.
    """
    masked = [node for node in nodes if "atten_mask" in _by_name(node)]
    weights = [
        value.const_value
        for value in model.graph.initializers.values()
        if value.const_value is not None
    ]
    if not masked or sum(weight.size for weight in weights) > MOST_WEIGHTS:
        return set()
    known = Magnitudes(info, norms=norms_of(model.graph, info))
    pending = set(masked)
    for node in model.graph:  # in this order no chain is long
        if not pending:
            break
        pending.discard(node)
        for output in node.outputs:
            known.of(output)
    return {node for node in masked if known.is_tame(node)}


def norms_of(graph: ir.Graph, info: ShapeInfo) -> dict[ir.Value, Norm]:
    """The norms that single operators compute, by their results without weights."""
    found: dict[ir.Value, Norm] = {}
    for node in graph:
        if is_op(node, *_READY_MADE):
            continue
        norms: Decline | list[Norm | SummedNorm] = []
        if rms_norm.is_anchor(node, info):
            norms = limited_attempt(node, lambda node=node: [*rms_norm.norms(node, info)])  # type: ignore[misc]
        elif layer_norm.is_anchor(node, info):
            norms = limited_attempt(
                node,
                lambda node=node: [*layer_norm.norms(node, info, Options())],  # type: ignore[misc]
            )
        if not isinstance(norms, Decline):
            alone = (norm for norm in norms if isinstance(norm, Norm))
            found.update(
                (norm.result, norm)
                for norm in alone
                if not norm.gamma.is_given and not norm.beta.is_given
            )
    return found


@dataclass
class Magnitudes(Bounds):
    """The bounds of the values of one model, with those behind products, norms and attention."""

    norms: Mapping[ir.Value, Norm] = field(kw_only=True)

    def is_tame(self, node: ir.Node) -> bool:
        """Whether the operands of a FlashAttentionScore are finite in every run, and its scores
        below TAME."""
        given = _by_name(node)
        scores = self._dot(given["query"], given["key"])
        if "query_rope" in given:
            scores += self._dot(given["query_rope"], given["key_rope"])
        beside = [self.largest(given[name]) for name in ("real_shift", "sink") if name in given]
        scaled = (scores + sum(beside)) * _enlarging(float_attr(node, "scale_value", 1.0))
        return scaled < TAME and self.largest(given["value"]) < TAME

    def largest(self, value: ir.Value | None) -> float:
        """The largest absolute number of a value; infinity where none is known, or where one may be
        NaN."""
        interval = self.always(value)
        return math.inf if interval is None else max(map(abs, interval))

    def _compute(self, value: ir.Value) -> Bound | None:
        tensor = constant_tensor(value)
        if tensor is not None:
            array = self._numbers(tensor)
            return None if array is None else _bound(array)
        node = value.producer()
        if value in self.norms:
            return self._finite(self._normalised(self.norms[value]), value)
        if (
            node is not None
            and (node.domain, node.op_type) == (DOMAIN, GRAPH_OP)
            and value is node.outputs[_RESULT]
        ):
            return self._finite(self._attended(node), value)
        if node is not None and node.domain == "com.microsoft" and node.op_type in _OF_RUNTIME:
            return self._finite(_OF_RUNTIME[node.op_type](self, node, value), value)
        if is_op(node, *_RULES) and value is node.outputs[0] and not self._has_integers(value):
            return self._finite(_RULES[node.op_type](self, node), value)
        return super()._compute(value)

    def _finite(self, bound: Bound | None, value: ir.Value) -> Bound | None:
        """The bound, rounded to the type of the value. None where that overflows: a sum of an
        infinite part and another one of the opposite sign is NaN."""
        rounded = self._rounded(bound, self.info.dtype(value))
        return (
            rounded if rounded is not None and all(map(math.isfinite, rounded.unless_nan)) else None
        )

    def _numbers(self, tensor: ir.TensorProtocol | None) -> np.ndarray | None:
        """The content of a tensor; None where there is none, where it is not read, or not of
        numbers."""
        if (
            tensor is None
            or tensor.dtype in _NO_NUMBERS
            or tensor.size > MOST_WEIGHTS
            or is_of_other_file(tensor)
        ):
            return None
        array = unheld(tensor).numpy()
        return array if array.dtype.kind in "fiub" else array.astype(np.float32)

    def _size(self, value: ir.Value | None, axis: int) -> int | None:
        shape = None if value is None else self.info.shape(value)
        return shape[axis].const if shape else None

    def _attended(self, node: ir.Node) -> Bound | None:
        """No number of the result is larger than all values. A row without keys is NaN if the node
        says so."""
        if not self.is_tame(node):
            return None
        return _within(
            self.largest(_by_name(node)["value"]), text_attr(node, "cpu_empty_rows", "") == "nan"
        )

    def _normalised(self, norm: Norm) -> Bound | None:
        """The root of the mean square is at least the largest number by the root of the count."""
        size = self._size(norm.x, -1)
        if size is None or norm.epsilon <= 0.0 or not self.largest(norm.x) < SQUARED:
            return None
        return _within(math.sqrt(size))

    def ready_made(self, node: ir.Node) -> Bound | None:
        """A norm, with its weight and bias."""
        shape = None if node.inputs[0] is None else self.info.shape(node.inputs[0])
        axis = int_attr(node, "axis", -1)
        sizes = [dim.const for dim in shape[axis % len(shape) :]] if shape else [None]
        has_floor = float_attr(node, "epsilon", 1e-5) > 0.0
        if None in sizes or not has_floor or not self.largest(node.inputs[0]) < SQUARED:
            return None
        count = math.prod(size for size in sizes if size is not None)
        bias = input_of(node, 2) if _READY_MADE[node.op_type] else None
        return _within(
            math.sqrt(count) * self.largest(node.inputs[1])
            + (0.0 if bias is None else self.largest(bias))
        )

    def product(self, node: ir.Node) -> Bound | None:
        """The sums of products of a MatMul."""
        one, other = node.inputs[0], node.inputs[1]
        of_weight = (self._of_weight(one, other, False), self._of_weight(other, one, True))
        return _within(
            next((total for total in of_weight if total is not None), self._dot(one, other))
        )

    def gemm(self, node: ir.Node) -> Bound | None:
        """The same of a Gemm, with its factors and what it adds."""
        alpha, beta = float_attr(node, "alpha", 1.0), float_attr(node, "beta", 1.0)
        total = self._of_weight(node.inputs[0], node.inputs[1], bool(int_attr(node, "transB", 0)))
        added = input_of(node, 2)
        if total is None or int_attr(node, "transA", 0):
            return None
        return _within(
            abs(alpha) * total + (0.0 if added is None else abs(beta) * self.largest(added))
        )

    def _of_weight(
        self, value: ir.Value | None, weight: ir.Value | None, by_rows: bool
    ) -> float | None:
        """The largest sum of products with a weight, of whose columns or rows each is one factor;
        None where there is no weight."""
        array = self._numbers(constant_tensor(weight))
        if array is None or array.ndim < 2 or array.shape[-1 if by_rows else -2] > LONGEST:
            return None
        sums = np.abs(array).sum(axis=-1 if by_rows else -2, dtype=np.float64)
        return self.largest(value) * float(sums.max(initial=0.0))

    def _dot(self, one: ir.Value | None, other: ir.Value | None) -> float:
        """The largest sum of products of two values over the last axis of the first one; infinity
        where none is known."""
        count = self._size(one, -1)
        if count is None or count > LONGEST:
            return math.inf
        return count * self.largest(one) * self.largest(other)

    def gelu(self, node: ir.Node) -> Bound | None:
        """A part of the operand."""
        return _within(self.largest(node.inputs[0]))

    def gelu_of_sum(self, node: ir.Node, value: ir.Value) -> Bound | None:
        """The same of a sum with a bias, if there is one. QuickGelu has a factor, which may be
        infinite."""
        return (
            _within(self._sum_of(node.inputs))
            if math.isfinite(float_attr(node, "alpha", 1.0))
            else None
        )

    def skip_norm(self, node: ir.Node, value: ir.Value) -> Bound | None:
        """A norm of a sum, and the sum."""
        is_centred = node.op_type == "SkipLayerNormalization"
        beta, bias = (
            (input_of(node, 3), input_of(node, 4)) if is_centred else (None, input_of(node, 3))
        )
        total = self._sum_of([*node.inputs[:2], bias])
        if value in node.outputs[3:]:
            return _within(total)
        size = self._size(node.inputs[0], -1)
        has_floor = float_attr(node, "epsilon", layer_norm.SKIP_EPSILON) > 0.0
        if value is not node.outputs[0] or size is None or not has_floor or not total < SQUARED:
            return None
        return _within(math.sqrt(size) * self.largest(node.inputs[2]) + self._sum_of([beta]))

    def rotated(self, node: ir.Node, value: ir.Value) -> Bound | None:
        """Two numbers, times a cosine and a sine, or a number as it is."""
        factor = _enlarging(self._sum_of(node.inputs[2:4])) * _enlarging(
            float_attr(node, "scale", 1.0)
        )
        return _within(self.largest(node.inputs[0]) * factor)

    def _sum_of(self, values: Iterable[ir.Value | None]) -> float:
        """The largest sum of values, as far as they are given."""
        return sum(self.largest(value) for value in values if value is not None and value.name)

    def error_function(self, node: ir.Node) -> Bound | None:
        """Between -1 and 1."""
        return _within(1.0) if math.isfinite(self.largest(node.inputs[0])) else None


_RULES: Mapping[str, Rule] = {
    "MatMul": Magnitudes.product,
    "Gemm": Magnitudes.gemm,
    "Erf": Magnitudes.error_function,
    "Gelu": Magnitudes.gelu,
    **dict.fromkeys(_READY_MADE, Magnitudes.ready_made),
}
_OF_RUNTIME: Mapping[str, Callable[[Magnitudes, ir.Node, ir.Value], Bound | None]] = {
    "SkipLayerNormalization": Magnitudes.skip_norm,
    "SkipSimplifiedLayerNormalization": Magnitudes.skip_norm,
    "RotaryEmbedding": Magnitudes.rotated,
    **dict.fromkeys(("Gelu", "BiasGelu", "FastGelu", "QuickGelu"), Magnitudes.gelu_of_sum),
}
"""Operators of ONNX Runtime."""


def _by_name(node: ir.Node) -> dict[str, ir.Value]:
    """The inputs of a FlashAttentionScore by their names."""
    pairs = zip(get(GRAPH_OP).input_names, node.inputs, strict=False)
    return {name: value for name, value in pairs if value is not None and value.name}


def _enlarging(factor: float) -> float:
    """How much a factor enlarges numbers: it may be 1, or NaN."""
    return 1.0 if abs(factor) <= 1.0 else abs(factor)


def _bound(array: np.ndarray) -> Bound | None:
    """The bound of numbers; None where one is NaN."""
    if not array.size:
        return Bound((0.0, 0.0), False)
    low, high = float(array.min()), float(array.max())
    return None if math.isnan(low) or math.isnan(high) else Bound((low, high), False)


def _within(largest: float, may_be_nan: bool = False) -> Bound | None:
    """The bound of numbers up to the largest one, which were rounded; None where there is none."""
    if not math.isfinite(largest):
        return None
    largest *= ROUNDED
    return Bound((-largest, largest), may_be_nan)
