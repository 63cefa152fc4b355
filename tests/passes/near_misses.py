"""Models one change away from attention: whatever is still fused has to be what the changed model computes.

`changed` makes one random change to a valid model: another operator, other attributes, other constants, operands that
change places, a node in between, an inner value that is an output as well. Most results are still valid models, some of
them even attention; only a run can tell what they compute.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, shape_inference

from tests.passes.writer import Array

Types = Mapping[str, onnx.TypeProto]
Change = Callable[[onnx.GraphProto, Types, random.Random], str | None]
"""Changes the graph in place and says how, None where it found nothing to change; given are the values' types."""

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE)
OTHERS = {
    "Add": ("Sub", "Mul"),
    "Sub": ("Add",),
    "Mul": ("Div", "Add"),
    "Div": ("Mul", "Sub"),
    "And": ("Or", "Xor"),
    "Or": ("And",),
    "Less": ("Greater",),
    "Greater": ("Less",),
    "LessOrEqual": ("GreaterOrEqual", "Less"),
    "GreaterOrEqual": ("LessOrEqual", "Greater"),
    "Max": ("Min",),
    "ReduceMax": ("ReduceMin",),
    "ReduceSum": ("ReduceMean", "ReduceMax"),
    "Softmax": ("LogSoftmax", "Hardmax"),
    "Exp": ("Sigmoid", "Softplus"),
    "Sqrt": ("Reciprocal", "Neg"),
    "IsNaN": ("IsInf",),
}
ORDERED = ("Where", "MatMul", "FusedMatMul", "Gemm", "Sub", "Div", "Less", "Greater", "Concat", "Einsum")
UNARY = {"float": ("Neg", "Abs", "Relu", "Tanh", "Sigmoid"), "bool": ("Not",), "int": ("Neg", "Abs")}


def changed(model: onnx.ModelProto, rng: random.Random) -> tuple[onnx.ModelProto, str] | None:
    """The model after one change, and what was changed; None where nothing could be, or the result is no model."""
    result = onnx.ModelProto()
    result.CopyFrom(model)
    change = rng.choice(CHANGES)
    what = change(result.graph, {value.name: value.type for value in values_of(model)}, rng)
    if what is None:
        return None
    try:
        onnx.checker.check_model(result, full_check=True)
    except (onnx.checker.ValidationError, shape_inference.InferenceError):
        return None
    return result, what


def values_of(model: onnx.ModelProto) -> Sequence[onnx.ValueInfoProto]:
    """Every value whose type and shape can be told."""
    graph = shape_inference.infer_shapes(model).graph
    held = [helper.make_tensor_value_info(each.name, each.data_type, each.dims) for each in graph.initializer]
    return [*graph.input, *graph.value_info, *graph.output, *held]


def _kind(known: Types, name: str) -> int:
    return known[name].tensor_type.elem_type if name in known else 0


def _pick(graph: onnx.GraphProto, rng: random.Random, *op_types: str) -> onnx.NodeProto | None:
    nodes = [node for node in graph.node if node.op_type in op_types] if op_types else list(graph.node)
    return rng.choice(nodes) if nodes else None


def _other_operator(graph: onnx.GraphProto, known: Types, rng: random.Random) -> str | None:
    node = _pick(graph, rng, *OTHERS)
    if node is None:
        return None
    old, node.op_type = node.op_type, rng.choice(OTHERS[node.op_type])
    return f"{old} {node.name} becomes {node.op_type}"


def _swapped_operands(graph: onnx.GraphProto, known: Types, rng: random.Random) -> str | None:
    node = _pick(
        graph, rng, "Where", "MatMul", "FusedMatMul", "Gemm", "Sub", "Div", "Less", "Greater", "Concat", "Einsum"
    )
    if node is None or len(node.input) < 2:
        return None
    first, second = (1, 2) if node.op_type == "Where" else (0, 1)
    node.input[first], node.input[second] = node.input[second], node.input[first]
    return f"the operands of {node.op_type} {node.name} change places"


def _other_attribute(graph: onnx.GraphProto, known: Types, rng: random.Random) -> str | None:
    nodes = [node for node in graph.node if node.attribute and node.op_type not in ("Constant", "ConstantOfShape")]
    if not nodes:
        return None
    node = rng.choice(nodes)
    attribute = rng.choice(list(node.attribute))
    match attribute.type:
        case onnx.AttributeProto.INTS if len(attribute.ints) > 1:
            first, second = rng.sample(range(len(attribute.ints)), 2)
            attribute.ints[first], attribute.ints[second] = attribute.ints[second], attribute.ints[first]
        case onnx.AttributeProto.INT if attribute.name in ("upper", "transA", "transB", "keepdims"):
            attribute.i = 1 - attribute.i
        case onnx.AttributeProto.INT if attribute.name == "to":
            attribute.i = rng.choice([TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.INT64])
        case onnx.AttributeProto.INT:
            attribute.i += rng.choice([-1, 1, -2])
        case onnx.AttributeProto.FLOAT:
            attribute.f *= -2
        case onnx.AttributeProto.STRING:
            letters = [char for char in attribute.s.decode() if char.isalpha()]
            one, other = rng.sample(letters, 2)
            attribute.s = attribute.s.decode().replace(one, "_", 1).replace(other, one, 1).replace("_", other).encode()
        case _:
            return None
    return f"{attribute.name} of {node.op_type} {node.name} is another"


def _other_constant(graph: onnx.GraphProto, known: Types, rng: random.Random) -> str | None:
    held = [attribute.t for node in graph.node for attribute in node.attribute if attribute.HasField("t")]
    tensors = [*graph.initializer, *held]
    if not tensors:
        return None
    tensor = rng.choice(tensors)
    array = _other_numbers(numpy_helper.to_array(tensor).copy(), rng)
    if array is None:
        return None
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    return f"the constant {tensor.name} is another"


def _other_numbers(array: Array, rng: random.Random) -> Array | None:
    if array.size == 0:
        return None
    flat = array.reshape(-1)
    place = rng.randrange(flat.size)
    if array.dtype == np.bool_:
        flat[place] = ~flat[place]
        return array if rng.random() < 0.5 else ~array
    if array.dtype.kind == "i":
        if flat.size > 1 and rng.random() < 0.3:
            return np.ascontiguousarray(np.roll(array, 1))
        flat[place] += rng.choice([-1, 1])
        return array
    if flat.size > 1 and rng.random() < 0.7:
        flat[place] = rng.choice([1.0, -3.0, float("nan"), float("-inf"), 0.5])
        return array
    number = rng.choice([-1.0, 2.0, 0.0, 1e-3, float("inf"), float("-inf"), float("nan"), -7.5, 1.0, -1e30])
    if rng.random() < 0.4:
        with np.errstate(over="ignore", invalid="ignore"):
            return np.asarray(array * array.dtype.type(number))
    with np.errstate(over="ignore"):
        return np.full_like(array, number)


def _node_between(graph: onnx.GraphProto, known: Types, rng: random.Random) -> str | None:
    node = _pick(graph, rng)
    places = [place for place, name in enumerate(node.input) if name] if node is not None else []
    if node is None or not places:
        return None
    place = rng.choice(places)
    source = node.input[place]
    kind = _kind(known, source)
    fresh = "between"
    if kind in FLOATS and rng.random() < 0.5:
        narrow = rng.choice([each for each in (*FLOATS, TensorProto.INT32) if each != kind])
        added = [
            helper.make_node("Cast", [source], ["narrow"], name="narrow", to=narrow),
            helper.make_node("Cast", ["narrow"], [fresh], name=fresh, to=kind),
        ]
    else:
        group = "float" if kind in FLOATS else "bool" if kind == TensorProto.BOOL else "int"
        added = [helper.make_node(rng.choice(UNARY[group]), [source], [fresh], name=fresh)]
    node.input[place] = fresh
    _insert(graph, node, added)
    return f"{added[0].op_type} before input {place} of {node.op_type} {node.name}"


def _insert(graph: onnx.GraphProto, before: onnx.NodeProto, added: list[onnx.NodeProto]) -> None:
    nodes = list(graph.node)
    index = next(position for position, node in enumerate(nodes) if node.name == before.name)
    nodes[index:index] = added
    del graph.node[:]
    graph.node.extend(nodes)


def _other_source(graph: onnx.GraphProto, known: Types, rng: random.Random) -> str | None:
    """An operand is another value of the same type that exists already."""
    nodes = list(graph.node)
    index = rng.randrange(len(nodes))
    node = nodes[index]
    places = [place for place, name in enumerate(node.input) if name]
    if not places:
        return None
    place = rng.choice(places)
    old = node.input[place]
    made = [name for each in nodes[:index] for name in each.output] + [value.name for value in graph.input]
    same = [name for name in made if _kind(known, name) == _kind(known, old) and name != old]
    if not same:
        return None
    node.input[place] = rng.choice(same)
    return f"input {place} of {node.op_type} {node.name} is {node.input[place]}"


def _extra_output(graph: onnx.GraphProto, known: Types, rng: random.Random) -> str | None:
    values = [
        name
        for node in graph.node
        for name in node.output
        if name != "y" and name in known and known[name].tensor_type.HasField("shape")
    ]
    if not values:
        return None
    name = rng.choice(values)
    if rng.random() < 0.5 and _kind(known, name) in FLOATS:
        graph.node.append(helper.make_node("Exp", [name], ["extra"], name="extra"))
        graph.output.append(helper.make_value_info("extra", known[name]))
        return f"{name} is read elsewhere"
    graph.output.append(helper.make_value_info(name, known[name]))
    return f"{name} is an output"


CHANGES: tuple[Change, ...] = (
    _other_operator,
    _swapped_operands,
    _other_attribute,
    _other_constant,
    _other_constant,
    _node_between,
    _node_between,
    _other_source,
    _extra_output,
)
