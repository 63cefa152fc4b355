"""A quantised model in real numbers: what it computes if nothing is rounded to integers.

Each operator that rounds, or computes with integers, becomes one of real numbers. Scales and zero
points stay, so that a wrong one shows. Nothing is rounded and nothing is cut off at the ends of a
type. With r(x) = Cast(x) to float32:

    QuantizeLinear(x, s, z)            r(x) / s + r(z)
    DequantizeLinear(x, s, z)          (r(x) - r(z)) * s
    DynamicQuantizeLinear(x)           x / s, s, 0       s = (max(x, 0) - min(x, 0)) / 255, or 1 in
                                       place of 0
    MatMulInteger(a, b, za, zb)        MatMul(r(a) - r(za), r(b) - r(zb)); ConvInteger alike
    MatMulIntegerToFloat, DynamicQuantizeMatMul      MatMul of such numbers, scaled, and the bias
    QLinearX(...)                      X of the numbers that its operands stand for, divided by the
                                       scale of the result X: MatMul, Conv, Add, Mul, Softmax,
                                       Sigmoid, LeakyRelu, Concat, Where

A DequantizeLinear with the zero point of the QuantizeLinear in front of it leaves the point out:
the sum with it would lose small numbers, such as scores beside a mask of -3.4e38.

Inputs, initializers and Constants of 8 and 16 bits become float32, too, so that what lies between
these operators gets one type. Inputs of the model keep their type.

None is made of a model with other operators that compute with integers, with scales by block, or
with scales that are computed and not those of a DynamicQuantizeLinear; nor of a model that rounds
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.protos.subgraphs import all_nodes

CONTRIB = "com.microsoft"
SHORT = (TensorProto.INT8, TensorProto.UINT8, TensorProto.INT16, TensorProto.UINT16)
LEAST_OPSET = 13
CAST_LIKE_SINCE = 15
UNKNOWN = ("QLinear", "DynamicQuantize", "QOrdered", "QGemm", "QAttention", "QEmbed", "QMoE")
"""How the names of other operators begin that compute with integers."""


class NotKnown(Exception):
    """A model of which no version in real numbers can be made; the message says why."""


def roundings(model: onnx.ModelProto) -> Counter[bytes]:
    """How many operators of a model round to integers, by the constant that they scale with, which
    is empty where they compute it. Operators that nothing needs do not count."""
    constants = _constants(model.graph)
    found: Counter[bytes] = Counter()
    for node in all_nodes(_needed(model.graph)):
        place = ROUNDING.get((_domain(node), node.op_type))
        if place is None:
            continue
        scale = constants.get(node.input[place]) if 0 <= place < len(node.input) else None
        found[b"" if scale is None else scale.tobytes()] += 1
    return found


def unrounded(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in real numbers; its weights may lie in other files. Raises NotKnown."""
    versions = {
        ("" if opset.domain == "ai.onnx" else opset.domain): opset.version
        for opset in model.opset_import
    }
    if versions.get("", 0) < LEAST_OPSET:
        raise NotKnown(f"it is of an opset below {LEAST_OPSET}")
    for function in model.functions:
        if any(_is_integer(node) for node in function.node):
            raise NotKnown(f"its function {function.name} computes with integers")
    made = onnx.ModelProto()
    made.CopyFrom(model)
    names = {name for node in all_nodes(made.graph.node) for name in (*node.input, *node.output)}
    _Rewrite(names, _constants(made.graph), versions[""]).graph(made.graph, {})
    return made


def _needed(graph: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes of a sorted graph that its outputs are computed from."""
    wanted = {output.name for output in graph.output}
    found = []
    for node in reversed(graph.node):
        if wanted.isdisjoint(node.output):
            continue
        found.append(node)
        for inner in all_nodes([node]):
            wanted.update(inner.input)
        wanted.update(output.name for attr in node.attribute for output in attr.g.output)
    return found


def _domain(node: onnx.NodeProto) -> str:
    return "" if node.domain == "ai.onnx" else node.domain


def _is_integer(node: onnx.NodeProto) -> bool:
    key = (_domain(node), node.op_type)
    return key in RULES or (key[0] in ("", CONTRIB) and node.op_type.startswith(UNKNOWN))


def _constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """Small constants by name, in all graphs."""
    found: dict[str, np.ndarray] = {}
    graphs = [
        graph,
        *(
            each.g
            for node in all_nodes(graph.node)
            for each in node.attribute
            if each.HasField("g")
        ),
    ]
    for part in graphs:
        for tensor in part.initializer:
            if tensor.data_location != TensorProto.EXTERNAL and np.prod(tensor.dims) <= 1 << 16:
                found[tensor.name] = numpy_helper.to_array(tensor)
    for node in all_nodes(graph.node):
        for attr in node.attribute:
            if node.op_type == "Constant" and attr.name == "value":
                found[node.output[0]] = numpy_helper.to_array(attr.t)
            elif node.op_type == "Constant" and attr.name in ("value_float", "value_floats"):
                found[node.output[0]] = np.asarray(helper.get_attribute_value(attr), np.float32)
    return found


@dataclass
class _Rewrite:
    """Rewrites the graphs of one model."""

    taken: set[str]
    constants: dict[str, np.ndarray]
    opset: int
    single: set[str] = field(default_factory=set)
    """Results that are one number: scales and zero points of DynamicQuantizeLinear."""
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    steps: dict[str, tuple[str, str]] = field(default_factory=dict)
    """For the result of a QuantizeLinear the number of steps without the zero point, and the zero
    point."""

    def graph(self, graph: onnx.GraphProto, renamed: Mapping[str, str]) -> None:
        """Rewrite a graph. `renamed` are the values of outer graphs that have become real
        numbers."""
        outer, self.nodes = self.nodes, []
        own = dict(renamed)
        given = {info.name for info in graph.input}
        shorts = [
            tensor.name
            for tensor in graph.initializer
            if tensor.data_type in SHORT and tensor.name not in given
        ]
        shorts += [info.name for info in graph.input if info.type.tensor_type.elem_type in SHORT]
        for name in shorts:
            own[name] = self.real(name)
        for node in list(graph.node):
            self._node(node, own)
        del graph.node[:], graph.value_info[:]
        graph.node.extend(self.nodes)
        self.nodes = outer
        for output in graph.output:
            if output.type.tensor_type.elem_type in SHORT:
                output.type.tensor_type.elem_type = TensorProto.FLOAT

    def _node(self, node: onnx.NodeProto, own: dict[str, str]) -> None:
        rule = RULES.get((_domain(node), node.op_type))
        if rule is None and _is_integer(node):
            raise NotKnown(
                f"no {node.op_type} of real numbers is known ({node.name or node.output[0]})"
            )
        made = onnx.NodeProto()
        made.CopyFrom(node)
        if rule is not None or _domain(node) == "":
            made.input[:] = [own.get(name, name) for name in node.input]
        for attr in made.attribute:
            if attr.HasField("g"):
                self.graph(attr.g, own)
        if rule is not None:
            rule(self, made, _attributes(made))
            return
        self.nodes.append(made)
        if made.op_type == "Constant" and any(attr.t.data_type in SHORT for attr in made.attribute):
            own[made.output[0]] = self.real(made.output[0])

    # -- making nodes
    # -------------------------------------------------------------------------------

    def op(self, op_type: str, *inputs: str, to: str | None = None, **attributes: Any) -> str:
        """Add a node, and return its output, which is `to` or has a new name."""
        name = to or self._new(op_type)
        self.nodes.append(helper.make_node(op_type, inputs, [name], **attributes))
        return name

    def _new(self, stem: str) -> str:
        count = len(self.taken)
        while (name := f"unrounded_{stem}_{count}") in self.taken:
            count += 1
        self.taken.add(name)
        return name

    def number(self, array: Any, dtype: type = np.float32) -> str:
        """A constant."""
        return self.op("Constant", value=numpy_helper.from_array(np.asarray(array, dtype)))

    def real(self, name: str) -> str:
        """A value as float32."""
        made = self._new("Cast")
        self.nodes.append(helper.make_node("Cast", [name], [made], to=TensorProto.FLOAT))
        if name in self.constants:
            self.constants[made] = self.constants[name]
        return made

    def along(self, name: str, beside: str, axis: int) -> str:
        """A scale or zero point, one number or a vector along an axis of another value, as it
        broadcasts to that. Raises NotKnown."""
        constant = self.constants.get(name)
        if constant is None and name not in self.single:
            raise NotKnown(f"the scale or zero point {name} is computed")
        value = self.real(name)
        if constant is None or constant.size == 1:
            return (
                self.op("Reshape", value, self.number([], np.int64))
                if constant is not None
                else value
            )
        if constant.ndim != 1:
            raise NotKnown(f"the scale or zero point {name} is a matrix")
        rank = self.op("Shape", self.op("Shape", beside))
        ones = self.op("ConstantOfShape", rank, value=numpy_helper.from_array(np.ones(1, np.int64)))
        place, whole = self.number([axis], np.int64), self.number([-1], np.int64)
        return self.op("Reshape", value, self.op("ScatterElements", ones, place, whole))

    def meant(self, value: str, scale: str, point: str, axis: int = -1) -> str:
        """The real numbers that integers stand for."""
        number = self.less(value, point, axis)
        return self.op("Mul", number, self.along(scale, value, axis))

    def less(self, value: str, point: str, axis: int = -1) -> str:
        """Integers less their zero point."""
        number = self.real(value)
        return self.op("Sub", number, self.along(point, value, axis)) if point else number

    def divided(self, value: str, scale: str, point: str, to: str, axis: int = -1) -> None:
        """What would be rounded to integers, as the value `to`."""
        steps = self.op("Div", self.real(value), self.along(scale, value, axis))
        if point:
            self.steps[to] = steps, point
            self.op("Add", steps, self.along(point, value, axis), to=to)
        else:
            self.op("Identity", steps, to=to)


def _attributes(node: onnx.NodeProto) -> dict[str, Any]:
    return {attr.name: helper.get_attribute_value(attr) for attr in node.attribute}


def _input(node: onnx.NodeProto, place: int) -> str:
    return node.input[place] if place < len(node.input) else ""


_Rule = Callable[[_Rewrite, onnx.NodeProto, Mapping[str, Any]], None]


def _quantize(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    _check_blocks(node, attributes)
    made.divided(
        node.input[0], node.input[1], _input(node, 2), node.output[0], attributes.get("axis", 1)
    )


def _dequantize(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    _check_blocks(node, attributes)
    value = made.meant(*_without_point(made, node), attributes.get("axis", 1))
    if made.opset >= CAST_LIKE_SINCE:
        made.op("CastLike", value, node.input[1], to=node.output[0])
    else:  # scales are float32
        made.op("Identity", value, to=node.output[0])


def _without_point(made: _Rewrite, node: onnx.NodeProto) -> tuple[str, str, str]:
    """The integers of a DequantizeLinear, their scale and zero point; the number of steps and no
    point where the QuantizeLinear has the same one."""
    value, scale, point = node.input[0], node.input[1], _input(node, 2)
    steps, other = made.steps.get(value, ("", ""))
    one, two = (made.constants.get(name) for name in (point, other))
    if steps and one is not None and two is not None and np.array_equal(one, two):
        return steps, scale, ""
    return value, scale, point


def _check_blocks(node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    if attributes.get("block_size", 0):
        raise NotKnown(f"{node.op_type} {node.name or node.output[0]} has scales by block")


def _dynamic(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    value, zero = node.input[0], made.number(0.0)
    least = made.op("Min", made.op("ReduceMin", value, keepdims=0), zero)
    largest = made.op("Max", made.op("ReduceMax", value, keepdims=0), zero)
    step = made.op("Div", made.op("Sub", largest, least), made.number(255.0))
    outputs = [*node.output, "", ""]
    scale = made.op(
        "Where", made.op("Equal", step, zero), made.number(1.0), step, to=outputs[1] or None
    )
    made.op("Div", value, scale, to=node.output[0])
    if outputs[2]:
        made.op("Identity", zero, to=outputs[2])
    made.single.update(outputs[1:3])


def _matmul(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    left = made.less(node.input[0], _input(node, 2), -2)
    made.op("MatMul", left, made.less(node.input[1], _input(node, 3)), to=node.output[0])


def _conv(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    left, right = (
        made.less(node.input[0], _input(node, 2)),
        made.less(node.input[1], _input(node, 3), 0),
    )
    made.op("Conv", left, right, to=node.output[0], **attributes)


def _matmul_to_float(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    a, b, scale_a, scale_b, point_a, point_b, bias = (_input(node, place) for place in range(7))
    _biased(
        made,
        made.meant(a, scale_a, point_a, -2),
        made.meant(b, scale_b, point_b),
        bias,
        node.output[0],
    )


def _dynamic_matmul(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    a, b, scale, point, bias = (_input(node, place) for place in range(5))
    _biased(made, a, made.meant(b, scale, point), bias, node.output[0])


def _biased(made: _Rewrite, left: str, right: str, bias: str, to: str) -> None:
    if not bias:
        made.op("MatMul", left, right, to=to)
        return
    made.op("Add", made.op("MatMul", left, right), bias, to=to)


def _on_integers(op_type: str, operands: Sequence[int], result: int) -> _Rule:
    """The rule of an operator on integers. `operands` are the places of its operands, each with
    scale and zero point behind it, `result` the place of the result's scale."""

    def rule(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
        parts = [[_input(node, place + offset) for offset in range(3)] for place in operands]
        values = [made.meant(value, scale, point) for value, scale, point in parts]
        kept = {name: value for name, value in attributes.items() if name in ("axis", "alpha")}
        if (
            op_type == "Softmax"
            and attributes.get("opset", 13) < 13
            and attributes.get("axis", -1) != -1
        ):
            raise NotKnown(f"{node.op_type} {node.name or node.output[0]} flattens its operand")
        if op_type == "Where":
            values.insert(0, node.input[0])
        found = made.op(op_type, *values, **kept)
        made.divided(found, node.input[result], _input(node, result + 1), node.output[0])

    return rule


def _linear_conv(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    x, scale_x, point_x, w, scale_w, point_w, scale, point, bias = (
        _input(node, place) for place in range(9)
    )
    operands = [made.meant(x, scale_x, point_x), made.meant(w, scale_w, point_w, 0)]
    if bias:
        step = made.op("Mul", made.real(scale_x), made.real(scale_w))
        operands.append(made.op("Mul", made.real(bias), step))
    made.divided(made.op("Conv", *operands, **attributes), scale, point, node.output[0])


def _linear_concat(made: _Rewrite, node: onnx.NodeProto, attributes: Mapping[str, Any]) -> None:
    parts = [made.meant(*node.input[place : place + 3]) for place in range(2, len(node.input), 3)]
    made.divided(
        made.op("Concat", *parts, **attributes), node.input[0], node.input[1], node.output[0]
    )


RULES: Mapping[tuple[str, str], _Rule] = {
    ("", "QuantizeLinear"): _quantize,
    (CONTRIB, "QuantizeLinear"): _quantize,
    ("", "DequantizeLinear"): _dequantize,
    (CONTRIB, "DequantizeLinear"): _dequantize,
    ("", "DynamicQuantizeLinear"): _dynamic,
    ("", "MatMulInteger"): _matmul,
    ("", "ConvInteger"): _conv,
    (CONTRIB, "MatMulIntegerToFloat"): _matmul_to_float,
    (CONTRIB, "DynamicQuantizeMatMul"): _dynamic_matmul,
    ("", "QLinearMatMul"): _on_integers("MatMul", (0, 3), 6),
    ("", "QLinearConv"): _linear_conv,
    (CONTRIB, "QLinearAdd"): _on_integers("Add", (0, 3), 6),
    (CONTRIB, "QLinearMul"): _on_integers("Mul", (0, 3), 6),
    (CONTRIB, "QLinearSoftmax"): _on_integers("Softmax", (0,), 3),
    (CONTRIB, "QLinearSigmoid"): _on_integers("Sigmoid", (0,), 3),
    (CONTRIB, "QLinearLeakyRelu"): _on_integers("LeakyRelu", (0,), 3),
    (CONTRIB, "QLinearWhere"): _on_integers("Where", (1, 4), 7),
    (CONTRIB, "QLinearConcat"): _linear_concat,
}
ROUNDING: Mapping[tuple[str, str], int] = {
    ("", "QuantizeLinear"): 1,
    (CONTRIB, "QuantizeLinear"): 1,
    ("", "DynamicQuantizeLinear"): -1,
    (CONTRIB, "DynamicQuantizeMatMul"): -1,
    ("", "QLinearMatMul"): 6,
    ("", "QLinearConv"): 6,
    **{(CONTRIB, f"QLinear{word}"): 6 for word in ("Add", "Mul")},
    **{(CONTRIB, f"QLinear{word}"): 3 for word in ("Softmax", "Sigmoid", "LeakyRelu")},
    (CONTRIB, "QLinearWhere"): 7,
    (CONTRIB, "QLinearConcat"): 0,
}
"""The operators that round to integers, and the place of the scale by which they do; -1 where they
compute it."""
