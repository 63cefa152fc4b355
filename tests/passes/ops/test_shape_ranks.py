"""Every shape rule on inputs of ranks that its operator does not take: nothing is known of the outputs, and nothing
raised. ONNX's own inference lets such a model pass where it does not know the rank."""

from __future__ import annotations

import random

import onnx_ir as ir
import pytest

from fa_compiler.passes.ops.context import RULES
from fa_compiler.passes.values.shapes import analyse

ATTRIBUTES: dict[str, int | str | list[int]] = {
    "num_heads": 2,
    "q_num_heads": 2,
    "kv_num_heads": 1,
    "head_num": 2,
    "input_layout": "BNSD",
    "qkv_hidden_sizes": [4, 4, 4],
    "axis": 1,
    "axes": [1],
    "perm": [1, 0],
    "equation": "bnsd,bntd->bnst",
    "starts": [0],
    "ends": [1],
    "batch_dims": 1,
    "blocksize": 2,
    "block_size": 2,
    "kernel_shape": [2, 2],
    "split": [1, 1],
    "transA": 1,
    "transB": 1,
}
TRIALS = 30


@pytest.mark.parametrize(("domain", "op_type"), sorted(RULES))
@pytest.mark.parametrize("attributes", [{}, ATTRIBUTES], ids=["plain", "attributes"])
def test_any_rank(domain: str, op_type: str, attributes: dict[str, int | str | list[int]]) -> None:
    rng = random.Random(f"{domain} {op_type}")
    for _ in range(TRIALS):
        given = [_value(index, rng) if rng.random() < 0.9 else None for index in range(rng.choice([1, 2, 3, 4, 7]))]
        own = [_attribute(name, value) for name, value in attributes.items()]
        node = ir.Node(domain, op_type, given, own, num_outputs=3)
        inputs = [value for value in given if value is not None]
        graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 17, "com.microsoft": 1, "npu": 1})
        analyse(ir.Model(graph, ir_version=9))


def _value(index: int, rng: random.Random) -> ir.Value:
    sizes = [rng.choice([0, 1, 2, 4]) for _ in range(rng.choice([0, 0, 1, 1, 2, 3, 4, 5]))]
    kind = rng.choice([ir.DataType.FLOAT, ir.DataType.INT64])
    return ir.Value(name=f"x{index}", shape=ir.Shape(sizes), type=ir.TensorType(kind))


def _attribute(name: str, value: int | str | list[int]) -> ir.Attr:
    if isinstance(value, list):
        return ir.AttrInt64s(name, value)
    return ir.AttrInt64(name, value) if isinstance(value, int) else ir.AttrString(name, value)
