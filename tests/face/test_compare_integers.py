"""What `verify` feeds to integer inputs, to switches and to sizes with odd names."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.parser
import pytest

import fa_compiler
from fa_compiler.comparison.feeds import random_inputs


def model(inputs: str, body: str, outputs: str = "float y", opset: int = 17) -> onnx.ModelProto:
    domains = f'"": {opset}, "com.microsoft": 1'
    return onnx.parser.parse_model(
        f"<ir_version: 10, opset_import: [{domains}]> g ({inputs}) => ({outputs}) "
        f"<float scale = {{0.05}}, int8 point = {{3}}, float[9,2] table = {{{', '.join(['0.5'] * 18)}}}, "
        f"int8[4,2] weight = {{1, -2, 3, -4, 5, -6, 7, -8}}> {{ {body} }}"
    )


FULL = (-128, 127)
INPUTS = {
    # the input, what reads it, the numbers that it may hold
    "a DequantizeLinear": ("int8[64,4] x", "y = DequantizeLinear(x, scale, point)", FULL),
    "of uint8": ("uint8[64,4] x", "y = DequantizeLinear(x, scale)", (0, 255)),
    "of int32": ("int32[64,4] x", "y = DequantizeLinear(x, scale)", (-1000, 1000)),
    "of ONNX Runtime": ("uint16[64,64] x", "y = com.microsoft.DequantizeLinear(x, scale)", (0, 65535)),
    "moved": (
        "int8[64,4] x",
        "a = Transpose<perm=[1,0]>(x) b = Identity(a) c = Concat<axis=0>(b, b) y = DequantizeLinear(c, scale, point)",
        FULL,
    ),
    "a product of integers": ("int8[64,4] x", "i = MatMulInteger(x, weight) y = Cast<to=1>(i)", FULL),
    "cast and scaled": ("int8[64,4] x", "f = Cast<to=1>(x) y = Mul(f, scale)", FULL),
    "in a branch": (
        "int8[64,4] x, bool c",
        "y = If(c) <then_branch = a () => (float[64,4] r) {r = DequantizeLinear(x, scale)}, "
        "else_branch = b () => (float[64,4] o) {o = DequantizeLinear(x, scale, point)}>",
        FULL,
    ),
    "indices, too": (
        "int8[64,4] x",
        "i = Cast<to=6>(x) g = Gather(table, i) f = DequantizeLinear(x, scale) s = ReduceSum<keepdims=0>(g) "
        "y = Add(f, s)",
        (0, 8),
    ),
    "flags": ("int8[64,4] x", "b = Cast<to=9>(x) y = Cast<to=1>(b)", (0, 1)),
    "compared": (
        "int8[64,4] x",
        "b = Equal(x, point) f = DequantizeLinear(x, scale) g = Cast<to=1>(b) y = Add(f, g)",
        (0, 1),
    ),
    "wide": ("int64[64,4] x", "y = Cast<to=1>(x)", (0, 1)),
    "a mask": ("uint8[64,4] padding_mask", "y = DequantizeLinear(padding_mask, scale)", (0, 1)),
    "read by nothing": ("int8[64,4] x, float y0", "y = Identity(y0)", (0, 1)),
}


@pytest.mark.parametrize("name", INPUTS)
def test_numbers_of_integer_inputs(name: str) -> None:
    inputs, body, numbers = INPUTS[name]
    found = next(iter(random_inputs(model(inputs, body), "m").values())).astype(np.int64)
    assert numbers[0] <= found.min() <= found.max() <= numbers[1]
    span = numbers[1] - numbers[0]
    assert found.max() - found.min() >= 0.9 * span
    assert not span > 1000 or found.min() * 2 < sum(numbers) < found.max() * 2


def test_a_model_that_onnx_runtime_requantises_is_another_one() -> None:
    """Behind a Reshape ONNX Runtime's optimiser quantises again, to uint8: negative numbers become 0."""
    form = "f = DequantizeLinear(x, scale) shape = Constant<value_ints=[4,64]>() g = {} y = Sin(g)"
    one, other = (model("int8[64,4] x", form.format(word)) for word in ("Identity(f)", "Reshape(f, shape)"))
    other.graph.node.append(onnx.helper.make_node("Reshape", ["y", "back"], ["z"]))
    other.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["back"], value_ints=[64, 4]))
    other.graph.output[0].name = "z"
    one.graph.node.append(onnx.helper.make_node("Identity", ["y"], ["z"]))
    one.graph.output[0].name = "z"
    (output,) = fa_compiler.verify(one, other).outputs
    assert output.fault is not None and "differs" in output.fault


@pytest.mark.parametrize("rank", ["bool", "bool[1]"])
def test_both_branches_of_a_switch_are_compared(rank: str) -> None:
    def merged(one: str, other: str) -> onnx.ModelProto:
        body = (
            f"y = If(use_cache_branch) <then_branch = a () => (float[4] r) {{r = {one}(x)}}, "
            f"else_branch = b () => (float[4] o) {{o = {other}(x)}}>"
        )
        return model(f"float[4] x, {rank} use_cache_branch", body, "float[4] y")

    proto = merged("Sin", "Cos")
    same = fa_compiler.verify(proto, merged("Sin", "Cos"))
    assert (same.same, same.rounds) == (True, 2)
    faults = [fa_compiler.verify(proto, merged(*words)) for words in (("Tan", "Cos"), ("Sin", "Tan"))]
    assert [each.same for each in faults] == [False, False]
    assert sum(each.feed.endswith("and use_cache_branch the other way") for each in faults) == 1


@pytest.mark.parametrize("size", ["True", "False", "None"])
def test_sizes_that_are_named_like_constants_of_python(size: str) -> None:
    proto = model(f"float[{size},4] x", "y = Sin(x)", f"float[{size},4] y")
    found = fa_compiler.verify(proto, proto)
    assert (found.same, found.sizes) == (True, {"x": (2, 4)})
