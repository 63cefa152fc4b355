"""What is computed at many lengths at once is what operators.py gives at each."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from fa_compiler.passes.ir.nodes import constant, inputs_of
from fa_compiler.passes.linear.columns import Column, Ragged, Rows, at_once, exact_results, of_lengths, of_sizes
from fa_compiler.passes.linear.tensors import exact
from fa_compiler.passes.values.shapes import ShapeInfo, analyse
from tests.passes.running import parse

LENGTHS = 7
NODES = {
    "Add": "y = Add(a, c)",
    "a quotient of integers": "y = Div(a, c)",
    "a truth value": "y = Less(a, one)",
    "a choice": "m = Constant<value_ints=[1,0,1]>() t = Cast<to=9>(m) y = Where(t, a, c)",
    "a type": "y = Cast<to=3>(a)",
    "a remainder": "k = Constant<value_int=3>() y = Mod(a, k)",
    "parts of a Concat": "y = Concat<axis=0>(a, b, a)",
    "a part that is the same": "k = Constant<value_ints=[4,5,6]>() k2 = Unsqueeze(k, zero1) y = Concat<axis=0>(k2, a)",
    "a Slice": "end = Constant<value_ints=[9]>() y = Slice(a, one1, end, one1)",
    "a Gather": "k = Constant<value_ints=[1,1,0]>() y = Gather<axis=1>(a, k)",
    "a Transpose": "y = Transpose<perm=[1,0]>(a)",
    "a Reshape": "k = Constant<value_ints=[3,-1]>() y = Reshape(a, k)",
    "an Expand": "k = Constant<value_ints=[2,2,3]>() y = Expand(a, k)",
    "a Pad": "k = Constant<value_ints=[0,1,1,-1]>() y = Pad(a, k)",
    "a Trilu": "y = Trilu<upper=1>(a, one)",
    "a Split": "k = Constant<value_ints=[1,2]>() z, y = Split<axis=1>(a, k)",
    "nothing": "y = Slice(a, one1, one1, zero1)",
}
ONE_BY_ONE = {
    "a place": "i0 = Slice(b, zero1, one1, one1) k = Constant<value_int=3>() i = Mod(i0, k) y = Gather<axis=1>(a, i)",
    "a sum": "y = ReduceSum(a, one1)",
    "a product": "y = MatMul(a, e)",
}
BEFORE = "one = Constant<value_int=1>() zero1 = Constant<value_ints=[0]>() one1 = Constant<value_ints=[1]>() "
INPUTS = "int64[2,3] a, int64[1,3] b, int64[3] c, int64[3,2] e, float[N,T] x, float[T] w"


def nodes_of(body: str) -> tuple[list[ir.Node], ShapeInfo, ir.Graph]:
    model = ir.from_proto(parse(BEFORE + body, inputs=INPUTS, outputs="int64 one", opset=18))
    return [*model.graph], analyse(model), model.graph


@pytest.mark.parametrize("name", NODES | ONE_BY_ONE)
def test_all_lengths_at_once(name: str) -> None:
    (*before, last), info, graph = nodes_of((NODES | ONE_BY_ONE)[name])
    rng = np.random.default_rng(LENGTHS)
    known = dict[ir.Value, Column]()
    for value in graph.inputs[:4]:
        shape = (LENGTHS, *(size for size in value.shape or () if isinstance(size, int)))
        known[value] = Rows(rng.integers(1, 9, shape) * rng.choice([-1, 1], shape))
    for node in before:
        for output in node.outputs:
            array = constant(output)
            made = (
                at_once(node, [known[value] for value in inputs_of(node)], info) if array is None else [Column(array)]
            )
            known[output] = (made or [])[0]
    operands = [known[value] for value in inputs_of(last)]
    found = at_once(last, operands, info)
    assert (found is None) == (name in ONE_BY_ONE)
    for place in range(LENGTHS):
        wanted = exact_results(last, [exact(column.at(place)) for column in operands], info)
        for column, array in zip(found or (), wanted or (), strict=found is not None):
            assert column.at(place).dtype == array.dtype
            np.testing.assert_array_equal(column.at(place), array)


def test_sizes() -> None:
    nodes, info, _ = nodes_of("s = Shape(x) s1 = Shape<start=-1>(x) n = Size(x) s0 = Shape<end=0>(w) y = Add(s1, n)")
    lengths = np.arange(1, 9)
    wanted = ([[3, length] for length in range(1, 9)], [[length] for length in range(1, 9)], 3 * lengths, [[]] * 8)
    shapes = [node for node in nodes if node.op_type in ("Shape", "Size")]
    for node, rows in zip(shapes, wanted, strict=True):
        (column,) = of_sizes(node, info, {"N": np.array(3), "T": lengths}) or ()
        np.testing.assert_array_equal(column.array, rows)
        assert of_sizes(node, info, {"N": np.array(3)}) is None or node.inputs[0] is None


def test_shapes_that_differ() -> None:
    column = of_lengths([np.zeros(length) for length in range(3)])
    assert isinstance(column, Ragged) and column.count == 2 and column.at(1).shape == (1,)
