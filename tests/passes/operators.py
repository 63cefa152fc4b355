"""Models of one attention operator, with inputs, for the tests of its conversion.

Dimensions are words: "B S 16" are three, of which the names get their sizes from `sizes`; "P+L" is a sum of two. With
`fixed` the model declares the sizes themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper

from fa_compiler.passes import analyse
from tests.passes.running import Array, Feeds, assert_same, fused, run

SIZES = {"B": 2, "S": 4, "L": 4, "T": 6, "P": 3}
TYPES = {
    np.dtype(np.float32): TensorProto.FLOAT,
    np.dtype(np.float16): TensorProto.FLOAT16,
    np.dtype(np.float64): TensorProto.DOUBLE,
    np.dtype(np.bool_): TensorProto.BOOL,
    np.dtype(np.int64): TensorProto.INT64,
    np.dtype(np.int32): TensorProto.INT32,
    np.dtype(np.int8): TensorProto.INT8,
    np.dtype(np.uint8): TensorProto.UINT8,
}
Given = str | tuple[str, Array]


@dataclass(frozen=True)
class Operator:
    """One node. `inputs` are dimensions in words, filled with normal numbers, or the words and the content."""

    op_type: str
    inputs: Mapping[str, Given | None]
    outputs: tuple[str, ...] = ("y",)
    attrs: Mapping[str, float | int | str | list[int]] = field(default_factory=dict)
    domain: str = ""
    opset: int = 23
    sizes: Mapping[str, int] = field(default_factory=dict)
    dtype: str = "float32"
    constants: tuple[str, ...] = ()
    fixed: bool = False
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of the outputs; that of the first input when not given."""

    def feeds(self, seed: int = 0) -> dict[str, Array]:
        """Inputs for one run."""
        rng = np.random.default_rng(seed)
        feeds: dict[str, Array] = {}
        for name, given in self.inputs.items():
            if given is None:
                continue
            if isinstance(given, str):
                shape = [self._size(word) for word in given.split()]
                feeds[name] = rng.standard_normal(shape).astype(self.dtype)
            else:
                feeds[name] = np.asarray(given[1])
        return feeds

    def model(self, feeds: Feeds) -> onnx.ModelProto:
        """The model of this node."""
        declared = [
            helper.make_tensor_value_info(name, TYPES[feeds[name].dtype], self._dims(name))
            for name, given in self.inputs.items()
            if given is not None and name not in self.constants
        ]
        tensors = [onnx.numpy_helper.from_array(np.asarray(feeds[name]), name) for name in self.constants]
        names = [name if given is not None else "" for name, given in self.inputs.items()]
        node = helper.make_node(
            self.op_type, names, list(self.outputs), name="op", domain=self.domain, **dict(self.attrs)
        )
        kind = TYPES[np.dtype(self.dtype)]
        rank = len(self._words(next(iter(self.inputs))))
        outputs = [
            helper.make_tensor_value_info(name, kind, [None] * self.ranks.get(name, rank))
            for name in self.outputs
            if name
        ]
        graph = helper.make_graph([node], "g", declared, outputs, tensors)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        imports += [helper.make_opsetid(domain, 1) for domain in ("npu",) if domain == self.domain]
        return helper.make_model(graph, opset_imports=imports, ir_version=10)

    def _words(self, name: str) -> list[str]:
        given = self.inputs[name]
        assert given is not None
        return (given if isinstance(given, str) else given[0]).split()

    def _dims(self, name: str) -> list[int | str]:
        return [self._size(word) if self.fixed or word.isdigit() else word for word in self._words(name)]

    def _size(self, word: str) -> int:
        sizes = {**SIZES, **self.sizes}
        return sum(int(part) if part.isdigit() else sizes[part] for part in word.split("+"))


def check_same(operator: Operator, mask: str | None = None, seed: int = 0, tolerance: float | None = None) -> None:
    """The operator is converted, with this mask, and gives what ONNX Runtime gives."""
    feeds = operator.feeds(seed)
    model = operator.model(feeds)
    result, report = fused(model)
    (block,) = report.blocks
    assert block.status == "fused", (block.code, block.reason)
    assert [node.op_type for node in result.graph.node].count("FlashAttentionScore") == 1
    assert all(node.op_type != operator.op_type or node.domain != operator.domain for node in result.graph.node)
    if mask is not None:
        assert block.mask == mask
    given = {name: value for name, value in feeds.items() if name not in operator.constants}
    if tolerance is None:
        tolerance = 1e-5 if operator.dtype == "float32" else 4e-3
    for got, wanted in zip(run(result, given), run(model, given), strict=True):
        assert got.dtype == wanted.dtype
        assert_same(got, wanted, tolerance)


def declined(operator: Operator, target: str = "ort") -> tuple[str, str]:
    """The code and the reason of an operator that is left as it is."""
    model = operator.model(operator.feeds())
    result, report = fused(model, "ascend" if target == "ascend" else "ort")
    (block,) = report.blocks
    assert block.status == "declined", block
    assert [node.op_type for node in result.graph.node] == [operator.op_type]
    assert block.code is not None and block.reason
    return block.code.value, block.reason


def check_shapes(operator: Operator) -> None:
    """What is inferred of the outputs' shapes, with the sizes put in, is what ONNX Runtime gives."""
    feeds = operator.feeds()
    model = operator.model(feeds)
    graph = ir.from_proto(model)
    info = analyse(graph)
    given = {name: value for name, value in feeds.items() if name not in operator.constants}
    outputs = [value for value in graph.graph.outputs if value.name]
    for value, result in zip(outputs, run(model, given), strict=True):
        shape = info.shape(value)
        assert shape is not None, value.name
        assert tuple(size.evaluate({**SIZES, **operator.sizes}) for size in shape) == result.shape
        assert info.dtype(value) == ir.DataType.from_numpy(result.dtype)
