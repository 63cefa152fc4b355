"""Attention without a softmax. It is left as it is, and the report names it, with the operator that
can take it.

    state = phi(k).transpose(-2, -1) @ v
    output = phi(q) @ state

Grammar, read upwards from the node that is named; the code cites the numbers of the cases:

    linear_attention :=
      1     LinearAttentionGate(...)                       of com.microsoft; LinearAttention itself
                                                           is converted
      2   | product(query, state)                          summed over the features of the keys
      3   | product(weighted(product(query, key)), value)            summed over the tokens of the
                                                           keys
      4   | state' := Add(decayed(state), update)          an input and an output of the graph, as
                                                           in the body of a Loop
                                                           or Scan and in a decoder of one token in
                                                           each run; a product reads state', or a
                                                           sum of products with another tensor
      8   | the same, where a product reads the state in front of the update, alone or with a part
          of the update that is added: RWKV-6, whose bonus is another weight of the present token.
          The update is an outer product
    state :=
      5     product(key, value)                            summed over the tokens; also the running
                                                           sum of the products of single numbers,
                                                           CumSum(Mul(key, value))
      6   | moved(state) | Mul(state, t) | Div(state, t) | Add(state, t)
    weighted, decayed :=
      7     moved(x) | Mul(x, t) | Div(x, t) | Where(c, x, t) | Trilu(x)
                                                           a state also after other updates

It is named only where layers make query and key: convolutions, or products with a matrix of
weights. The number of tokens differs from run to run, or it is at least 16. So chains of rotations
or of weights are not meant. Nothing in it may be probabilities: the result of another attention and
the gradient of a softmax are products of products, too. All products whose queries and keys come
from the same layers have one block, for an unrolled loop over chunks has many.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.passes.algebra.axes import AxisSpace
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    STANDARD,
    any_op,
    distinct_consumers,
    inputs_of,
    is_op,
    made_of,
    makers_of,
    nodes_of_type,
    operand_at,
    operands,
    others_of,
    outputs_of,
    reached,
    readers_of,
    text_attr,
    without_none,
)
from fa_compiler.passes.layout.contraction import Contraction, any_contraction, is_outer_product
from fa_compiler.passes.layout.views import Viewer
from fa_compiler.passes.matching.layers import BETWEEN
from fa_compiler.passes.matching.weights import holds_weights, is_matrix
from fa_compiler.passes.ops.linear import PRODUCTS
from fa_compiler.passes.ops.movers import LAYOUT_OPS, MOVES
from fa_compiler.passes.values.facts import Facts

READY_MADE = ("LinearAttentionGate",)  # 1
FEATURES = (*BETWEEN, "ReduceSum", "ReduceL2", "ReduceMean", "CumSum", "LpNormalization")
"""What may stand between a layer and the queries or keys: feature maps, norms, rotary positions,
decays."""
MOVING = (*MOVES, "Split", "Cast", "Mul", "Div", "Neg")
STATES = (*MOVING, "Add")  # 6
WEIGHTS = (*MOVING, "Where", "Trilu")  # 7
LIMIT = 96
"""So many values are looked at in one search."""
FEWEST = 16
"""Fewer tokens than this, where their number is fixed, may be the dimensions of a rotation."""
SUMMED = (
    "attention without a softmax: queries are multiplied by sums of the products of keys and values"
)
WEIGHTED = (
    "attention without a softmax: the products of queries and keys are the weights of the values"
)
UPDATED = (
    "attention without a softmax: a state is updated for each token, and multiplied by queries"
)
BEFORE = (
    "attention without a softmax: queries are multiplied by a state before it is updated for their token, which no "
    "operator computes, as in RWKV-6"
)


@dataclass(frozen=True)
class LinearAttention:
    """An attention without a softmax: the node that the report names, and what it is."""

    node: ir.Node
    reason: str

    def decline(self) -> Decline:
        """Why it is left as it is."""
        has_operator = self.node.op_type not in READY_MADE and self.reason != BEFORE
        return Decline(Code.LINEAR, self.reason, self.node, None if has_operator else "")


def linear_attentions(
    graph: ir.Graph, probabilities: Collection[ir.Value], facts: Facts
) -> list[LinearAttention]:
    """The attentions without a softmax of one graph, its subgraphs not included. `probabilities`
    are the results of its softmaxes."""
    ready = [
        node
        for node in graph
        if node.domain in (*STANDARD, "com.microsoft") and node.op_type in READY_MADE
    ]
    search = _Search(Viewer(facts, AxisSpace()), probabilities)
    made = [
        LinearAttention(node, f"{node.op_type} is attention without a softmax already")
        for node in ready
    ]
    return [*made, *search.by_products(graph), *search.recurrences(graph)]


@dataclass(frozen=True)
class _Search:
    """The search for the cases 2 to 4 in one graph."""

    viewer: Viewer
    probabilities: Collection[ir.Value]

    def by_products(self, graph: ir.Graph) -> Iterator[LinearAttention]:
        """Cases 2 and 3, one for each set of layers."""
        known = set[ir.Node]()
        for node in graph:
            for outer in self._products_of(node):
                for reason, layers in (*self._by_state(outer), *self._by_weights(outer)):
                    if not layers & known:
                        yield LinearAttention(node, reason)
                    known |= layers

    def _products_of(self, node: ir.Node) -> list[Contraction]:
        """The product that a node is, summed over one label; also of two operands of an Einsum
        whose third one only scales the result, as 1 / (Q z)."""
        products = without_none([any_contraction(node, self.viewer.info), *_scaled_einsums(node)])
        return [product for product in products if self._is_of_tensors(product)]

    def _is_of_tensors(self, product: Contraction) -> bool:
        """Is a product summed over one label, and none of its operands weights?"""
        return len(product.summed) == 1 and not self._is_layer(product)

    def _is_layer(self, product: Contraction) -> bool:
        """Is one of the operands weights?"""
        return any(holds_weights(operand, self.viewer) for operand in product.operands)

    def _by_state(self, outer: Contraction) -> Iterator[tuple[str, set[ir.Node]]]:
        """Case 2: the product is that of queries and a state."""
        for side in (0, 1):
            query = self._layers(outer.operands[1 - side])
            state = self._running(outer.operands[side]) or self._made_by_product(outer, side)
            if query and state:
                yield SUMMED, query | state

    def _made_by_product(self, outer: Contraction, side: int) -> set[ir.Node]:
        """Case 5: the layers that make the key of a state, an operand of a product, where that is a
        product itself."""
        inner = self._product_in(outer.operands[side], STATES)
        if inner is None or not self._is_long(inner) or self._length(outer) > self._length(inner):
            return set()
        return self._key_layers(inner, self._size(outer, outer.summed[0]))

    def _key_layers(self, state: Contraction, features: Dim | None) -> set[ir.Node]:
        """Case 2: the layers that make the key of a state, a product of keys and values; empty
        where neither operand has these features."""
        for key, value in (state.operands, state.operands[::-1]):
            free = [
                label for label in state.labels[state.operands.index(key)] if label in state.out
            ]
            if not any(self._size(state, label) == features for label in free):
                continue
            if (layers := self._layers(key)) and not self._has_probabilities(
                _upward([value], FEATURES)
            ):
                return layers
        return set()

    def _running(self, state: ir.Value) -> set[ir.Node]:
        """Case 5: the layers that make key and value of a running sum of their products."""
        for value in _upward([state], MOVING):
            node = value.producer()
            product = operand_at(node, 0).producer()
            if is_op(node, "CumSum") and is_op(product, "Mul"):
                key, other = map(self._layers, operands(product))
                return key | other if key and other else set()
        return set()

    def _by_weights(self, outer: Contraction) -> Iterator[tuple[str, set[ir.Node]]]:
        """Case 3: the product is that of weights and values."""
        for side in (0, 1):
            inner = self._product_in(outer.operands[side], WEIGHTS)
            if (
                inner is None
                or not self._is_long(outer)
                or self._length(outer) <= self._length(inner)
            ):
                continue
            query, key = map(self._layers, inner.operands)
            if query and key:
                yield WEIGHTED, query | key

    def recurrences(self, graph: ir.Graph) -> Iterator[LinearAttention]:
        """Case 4."""
        for output in graph.outputs:
            rank = len(self.viewer.info.sizes(output))
            add = _source(output, ("Identity", "Cast")).producer()
            if rank < 3 or not is_op(add, "Add") or add.graph is not graph:
                continue
            if not any(self._is_state(state, output, graph) for state in inputs_of(add)):
                continue
            if self._is_read(add.outputs[0]):
                yield LinearAttention(add, UPDATED)
            elif any(
                self._is_read_before(*pair) for pair in (inputs_of(add), inputs_of(add)[::-1])
            ):
                yield LinearAttention(add, BEFORE)

    def _is_state(self, value: ir.Value, output: ir.Value, graph: ir.Graph) -> bool:
        """Case 4: is a value made of an input of the graph that is as large as an output?"""
        decayed = _upward([value], (*LAYOUT_OPS, "Cast", "Mul", "Where", "Add"))
        inputs = (value for value in decayed if value in graph.inputs and value.const_value is None)
        return self.viewer.info.shape(output) in map(self.viewer.info.shape, inputs)

    def _is_read(self, state: ir.Value) -> bool:
        """Does a product of two tensors read it, or a sum of its products with another one?"""

        def moved(value: ir.Value) -> list[ir.Value]:
            return outputs_of(nodes_of_type(distinct_consumers(value), *LAYOUT_OPS, "Cast"))

        return any(map(self._multiplies, readers_of(reached([state], moved, LIMIT))))

    def _is_read_before(self, state: ir.Value, update: ir.Value) -> bool:
        """Case 8: does a product read what a state was before this update or an earlier one, or its
        sum with a part of an update?"""
        parts = set(_upward([update], (*LAYOUT_OPS, "Cast", "Mul")))
        if not any(map(self._is_outer, makers_of(parts))):
            return False
        chain = list(_upward([state], (*LAYOUT_OPS, "Cast", "Mul", "Add")))
        shape, parts = self.viewer.info.shape(state), parts.union(chain)
        earlier = [value for value in chain if self.viewer.info.shape(value) == shape]
        sums = [total for value in earlier for total in _sums_with(value, parts)]
        return any(map(self._is_read, (*earlier, *sums)))

    def _is_outer(self, node: ir.Node | None) -> bool:
        """Is a node the product of a column and a row?"""
        product = any_contraction(node, self.viewer.info)
        if product is not None:
            return not self._is_layer(product) and all(
                self._size(product, label) == 1 for label in product.summed
            )
        return is_outer_product(node, self.viewer.info)

    def _multiplies(self, node: ir.Node) -> bool:
        """Is a node a product of two tensors, or the first half of one, whose sum follows?"""
        if is_op(node, "Mul") and node.inputs[0] is not node.inputs[1]:
            return any_op(distinct_consumers(node.outputs[0]), "ReduceSum")
        product = any_contraction(node, self.viewer.info)
        return product is not None and not self._is_layer(product)

    def _product_in(self, value: ir.Value, through: Sequence[str]) -> Contraction | None:
        """The product of two tensors that a value is made of by these operators, without
        probabilities."""
        values = list(_upward([value], through))
        if self._has_probabilities(values):
            return None
        products = without_none(
            any_contraction(made.producer(), self.viewer.info) for made in values
        )
        return next(filter(self._is_of_tensors, products), None)

    def _layers(self, value: ir.Value) -> set[ir.Node]:
        """The layers that make queries or keys; empty where a product of two tensors or a softmax
        has a part in it."""
        values = list(_upward([value], FEATURES))
        makers = makers_of(values)
        products = [node for node in nodes_of_type(makers, *PRODUCTS) if not self._has_matrix(node)]
        if self._has_probabilities(values) or not all(map(self._has_weights, products)):
            return set()
        return {*nodes_of_type(makers, "Conv", *PRODUCTS)}.difference(products)

    def _has_matrix(self, product: ir.Node) -> bool:
        """Is one of the factors a matrix of weights?"""
        return any(is_matrix(operand, self.viewer) for operand in operands(product)[:2])

    def _has_weights(self, product: ir.Node) -> bool:
        return any(holds_weights(operand, self.viewer) for operand in operands(product))

    def _has_probabilities(self, values: Iterable[ir.Value]) -> bool:
        return any(value in self.probabilities for value in values)

    def _size(self, product: Contraction, label: str) -> Dim | None:
        """The size of a dimension of a product."""
        for operand, labels in zip(product.operands, product.labels, strict=True):
            shape = self.viewer.info.sizes(operand)
            if label in labels and len(shape) == len(labels):
                return shape[labels.index(label)]
        return None

    def _is_long(self, product: Contraction) -> bool:
        """May a product be summed over tokens?"""
        return (
            self._size(product, product.summed[0]) is not None and self._length(product) >= FEWEST
        )

    def _length(self, product: Contraction) -> float:
        """How many terms a product sums up; infinitely many where that differs from run to run, or
        is unknown."""
        size = self._size(product, product.summed[0])
        return math.inf if size is None or size.const is None else size.const


def _sums_with(value: ir.Value, parts: Collection[ir.Value]) -> Iterator[ir.Value]:
    """Case 8: the sums of a value and one of these parts that are no part themselves."""
    for node in nodes_of_type(distinct_consumers(value), "Add"):
        others = _upward(others_of(node, value), (*LAYOUT_OPS, "Cast", "Mul"))
        if node.outputs[0] not in parts and any(other in parts for other in others):
            yield node.outputs[0]


def _source(value: ir.Value, through: Sequence[str]) -> ir.Value:
    *_, start = _upward([value], through)
    return start


def _upward(values: Sequence[ir.Value], through: Sequence[str]) -> Iterator[ir.Value]:
    """The values that some values are made of by these operators, they first."""
    return made_of(values, through, LIMIT)


def _scaled_einsums(node: ir.Node) -> Iterator[Contraction]:
    """The products of two operands of an Einsum of three, whose third one scales the result."""
    terms, _, out = text_attr(node, "equation", "").replace(" ", "").partition("->")
    labels = [tuple(term) for term in terms.split(",")]
    if not is_op(node, "Einsum") or not len(labels) == len(node.inputs) == 3 or "." in terms:
        return
    given = operands(node)
    for left, right, scale in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):
        if set(labels[scale]) <= set(out):
            yield Contraction(
                node, (given[left], given[right]), (labels[left], labels[right]), tuple(out)
            )
