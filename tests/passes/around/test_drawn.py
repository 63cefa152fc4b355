"""Random graphs of products, views, parts and equal nodes behind a norm, fused and compared with the original."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import onnx
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from tests.examples import examples
from tests.passes.around.running import feeds, fused, run

WIDTH = 8
Sizes = tuple[int, ...]


@dataclass
class Drawn:
    """A graph that grows. `values` are its tensors with their sizes, and `weights` those of each shape."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: list[onnx.TensorProto] = field(default_factory=list)
    values: list[tuple[str, Sizes]] = field(default_factory=list)
    weights: dict[Sizes, list[str]] = field(default_factory=dict)

    def op(self, op_type: str, *inputs: str, count: int = 1, **attrs: object) -> list[str]:
        outputs = [f"v{len(self.nodes)}_{place}" for place in range(count)]
        self.nodes.append(helper.make_node(op_type, inputs, outputs, **attrs))
        return outputs

    def constant(self, array: object) -> str:
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, value: str, sizes: Sizes) -> None:
        self.values.append((value, sizes))

    def heads(self, value: str, sizes: Sizes) -> None:
        """The value, or the heads that it is cut into."""
        if self.rng.integers(4) and sizes[-1] % 2 == 0:
            target = self.constant([0] * (len(sizes) - 1) + [sizes[-1] // 2, 2])
            self.add(*self.op("Reshape", value, target), (*sizes[:-1], sizes[-1] // 2, 2))
        else:
            self.add(value, sizes)

    def products(self, value: str, sizes: Sizes) -> None:
        for columns in map(int, self.rng.choice([2, 4, 4, 8, 8], int(self.rng.integers(1, 4)))):
            shape = (sizes[-1], columns)
            known = self.weights.setdefault(shape, [])
            if not known or self.rng.integers(4):
                known.append(self.constant(self.rng.standard_normal(shape).astype(np.float32)))
            (result,) = self.op("MatMul", value, known[int(self.rng.integers(len(known)))])
            if not self.rng.integers(3):
                (result,) = self.op("Add", result, self.constant(self.rng.standard_normal(columns).astype(np.float32)))
            self.heads(result, (*sizes[:-1], columns))

    def parts(self, value: str, sizes: Sizes) -> None:
        if sizes[-1] < 8:
            return
        columns = [2, 2, sizes[-1] - 4] if self.rng.integers(2) else [sizes[-1] // 2] * 2
        if self.rng.integers(2):
            results = self.op("Split", value, self.constant(columns), count=len(columns), axis=-1)
        else:
            ends = [0, *map(int, np.cumsum(columns))]
            last = self.constant([-1])
            results = [
                self.op("Slice", value, self.constant([start]), self.constant([end]), last)[0]
                for start, end in pairwise(ends)
            ]
        for result, count in zip(results, columns, strict=True):
            self.heads(result, (*sizes[:-1], count))

    def view(self, value: str, sizes: Sizes) -> None:
        place = int(self.rng.integers(len(sizes)))
        if sizes[place] == 1 and len(sizes) > 2 and place > 1:
            self.add(*self.op("Squeeze", value, self.constant([place])), (*sizes[:place], *sizes[place + 1 :]))
        elif len(sizes) < 6:
            self.add(*self.op("Unsqueeze", value, self.constant([place])), (*sizes[:place], 1, *sizes[place:]))

    def transpose(self, value: str, sizes: Sizes) -> None:
        perm = list(range(len(sizes)))
        place = int(self.rng.integers(len(sizes) - 1))
        perm[place], perm[place + 1] = perm[place + 1], perm[place]
        self.add(*self.op("Transpose", value, perm=perm), tuple(sizes[axis] for axis in perm))

    def joined(self, value: str, sizes: Sizes) -> None:
        alike = [each for each in self.values if each[1][:-1] == sizes[:-1]][-3:]
        (result,) = self.op("Concat", *(each for each, _ in alike), axis=len(sizes) - 1)
        self.add(result, (*sizes[:-1], sum(each[-1] for _, each in alike)))

    def elementwise(self, value: str, sizes: Sizes) -> None:
        self.add(*self.op(str(self.rng.choice(["Neg", "Abs", "Tanh"])), value), sizes)

    def cast(self, value: str, sizes: Sizes) -> None:
        self.add(*self.op("Cast", value, to=TensorProto.FLOAT), sizes)

    def expand(self, value: str, sizes: Sizes) -> None:
        self.add(*self.op("Expand", value, *self.op("Shape", value)), sizes)


STEPS = (Drawn.products, Drawn.products, Drawn.products, Drawn.parts, Drawn.view, Drawn.view, Drawn.transpose)
STEPS += (Drawn.joined, Drawn.elementwise, Drawn.cast, Drawn.expand)


def drawn(seed: int) -> onnx.ModelProto:
    """A model of a norm and 6 to 20 random steps behind it. What nothing reads is an output."""
    rng = np.random.default_rng(seed)
    graph, tokens = Drawn(rng), int(rng.choice([1, 3]))
    epsilon, gamma = graph.constant(np.float32(1e-5)), graph.constant(np.ones(WIDTH, np.float32))
    (mean,) = graph.op("ReduceMean", *graph.op("Mul", "x", "x"), graph.constant([-1]), keepdims=1)
    (root,) = graph.op("Sqrt", *graph.op("Add", mean, epsilon))
    graph.add(*graph.op("Mul", *graph.op("Div", "x", root), gamma), (2, tokens, WIDTH))
    for _ in range(int(rng.integers(6, 21))):
        value, sizes = graph.values[-1 - int(rng.integers(min(8, len(graph.values))))]
        STEPS[int(rng.integers(len(STEPS)))](graph, value, sizes)
    read = {name for node in graph.nodes for name in node.input}
    outputs = {value: sizes for value, sizes in graph.values if value not in read or not rng.integers(12)}
    opened = ["B", "S", WIDTH] if rng.integers(3) == 0 and tokens == 3 else [2, tokens, WIDTH]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, opened)
    infos = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [None] * len(sizes)) for name, sizes in outputs.items()
    ]
    made = helper.make_graph(graph.nodes, "drawn", [x], infos, graph.constants)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


@settings(max_examples=examples(12))
@given(st.integers(0, 2**32))
def test_a_drawn_graph(seed: int) -> None:
    proto = drawn(seed)
    result, report = fused(proto)
    assert report.is_changed
    assert len(result.graph.node) < len(proto.graph.node)
    inputs = feeds(proto, seed, odd=False)
    for one, two in zip(run(proto, inputs), run(result, inputs), strict=True):
        limit = 1e-4 * max(1.0, float(np.abs(one).max()))  # a Tanh of large sums, which were added up in another order
        np.testing.assert_allclose(two, one, rtol=1e-4, atol=limit)
