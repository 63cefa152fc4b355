"""Changes of what a file holds around its graph: functions of the model, and what ONNX Runtime takes and ONNX's checker
does not. `as_checked` leaves out the latter."""

from __future__ import annotations

import random
from functools import cache

import numpy as np
import onnx
from onnx import TensorProto, defs, helper, numpy_helper

from tests.passes import near_misses

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)
OWN = "fa.test"
NAMED = ((OWN, "Gelu"), (OWN, "Neg"), ("com.microsoft", "Gelu"), ("com.microsoft", "QuickGelu"), ("", "Softsign"))
"""Names of functions: the last three are those of operators, which ONNX Runtime runs in place of the function."""
DEPRECATED = "GroupNormalization"
KINDS = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(int64)": "int64",
    "tensor(int32)": "int32",
    "tensor(int8)": "int8",
    "tensor(uint8)": "uint8",
    "tensor(bool)": "bool",
}
GROUPED = range(18, 21)
"""The opsets for whose GroupNormalization ONNX Runtime has a definition that ONNX calls deprecated."""


def as_function(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """A value goes through a call of a function, which may have the name of an operator."""
    known = {each.name: each.type.tensor_type.elem_type for each in near_misses.values_of(model)}
    places = [
        (node, place)
        for node in model.graph.node
        if node.op_type in ("MatMul", "Transpose", "Reshape", "Softmax", "Add", "Mul")
        for place, name in enumerate(node.input)
        if known.get(name) in FLOATS
    ]
    domain, name = rng.choice(NAMED)
    if not places or any(function.name == name for function in model.functions):
        return None
    node, place = rng.choice(places)
    body = helper.make_node(rng.choice(["Neg", "Identity", "Abs"]), ["given"], ["made"])
    (opset,) = (each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    imports = [helper.make_opsetid("", opset)]
    model.functions.append(helper.make_function(domain, name, ["given"], ["made"], [body], imports))
    if domain not in {each.domain for each in model.opset_import}:
        model.opset_import.append(helper.make_opsetid(domain, 1))
    model.ir_version = max(model.ir_version, 8)
    fresh = f"called{len(model.graph.node)}"
    index = list(model.graph.node).index(node)
    call = helper.make_node(name, [node.input[place]], [fresh], name=fresh, domain=domain)
    node.input[place] = fresh
    model.graph.node.insert(index, call)
    return f"a function {domain}.{name} of {body.op_type} in front of {node.op_type} {node.output[0]}"


def written_twice(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """A weight is in the file twice, or a key of the metadata is."""
    if model.graph.initializer and rng.random() < 0.5:
        tensor = rng.choice(list(model.graph.initializer))
        model.graph.initializer.append(tensor)
        return f"{tensor.name} is written twice"
    for word in ("one", "other"):
        model.metadata_props.add(key="word", value=word)
    return "metadata is written twice"


def deprecated(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """A GroupNormalization of opset 18 to 20 makes an output of its own."""
    if not any(each.domain in ("", "ai.onnx") and each.version in GROUPED for each in model.opset_import):
        return None
    fresh = f"grouped{len(model.graph.node)}"
    numbers = np.random.default_rng(rng.getrandbits(32))
    shapes: dict[str, tuple[int, ...]] = {"x": (1, 4, 3), "scale": (2,), "bias": (2,)}
    for name, shape in shapes.items():
        array = numbers.standard_normal(shape).astype(np.float32)
        model.graph.initializer.append(numpy_helper.from_array(array, f"{fresh}_{name}"))
    given = [f"{fresh}_{name}" for name in shapes]
    model.graph.node.append(helper.make_node(DEPRECATED, given, [fresh], name=fresh, num_groups=2))
    model.graph.output.append(helper.make_tensor_value_info(fresh, TensorProto.FLOAT, None))
    return f"{DEPRECATED} beside it"


@cache
def _operators(opset: int) -> list[tuple[str, int, list[str]]]:
    """The operators of one or two operands of one type that need no attributes: name, operands, and types."""
    found = []
    for name in sorted({schema.name for schema in defs.get_all_schemas() if schema.domain == ""}):
        if not defs.has(name, opset, ""):
            continue
        schema = defs.get_schema(name, opset, "")
        words = {port.type_str for port in (*schema.inputs, *schema.outputs)}
        types = [each.allowed_type_strs for each in schema.type_constraints if {each.type_param_str} == words]
        needed = any(attribute.required for attribute in schema.attributes.values())
        if types and not needed and len(schema.inputs) in (1, 2) and len(schema.outputs) == 1:
            known = [each for each in types[0] if each in KINDS]
            found.append((name, len(schema.inputs), known))
    return found


def operator_beside(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """An operator of any type makes an output of its own."""
    (opset,) = (each.version for each in model.opset_import if each.domain in ("", "ai.onnx"))
    name, count, kinds = rng.choice(_operators(opset))
    if not kinds:
        return None
    kind = KINDS[rng.choice(kinds)]
    fresh = f"beside{len(model.graph.node)}"
    number = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    given = [f"{fresh}_{place}" for place in range(count)]
    numbers = np.random.default_rng(rng.getrandbits(32))
    for value in given:
        array = (numbers.random((4, 4)) * 3).astype(kind)
        model.graph.initializer.append(numpy_helper.from_array(array, value))
    model.graph.node.append(helper.make_node(name, given, [fresh], name=fresh))
    model.graph.output.append(helper.make_tensor_value_info(fresh, number, None))
    return f"{name} of {kind} beside it"


def as_checked(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model for ONNX's checker, without what `written_twice` and `deprecated` put in."""
    copy = onnx.ModelProto.FromString(single_weights(model).SerializeToString())
    del copy.metadata_props[:]
    grouped = [node for node in copy.graph.node if node.op_type == DEPRECATED]
    made = {node.output[0] for node in grouped}
    for node in grouped:
        copy.graph.node.remove(node)
    for output in [output for output in copy.graph.output if output.name in made]:
        copy.graph.output.remove(output)
    return copy


def single_weights(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model, with one weight of each name."""
    weights = {tensor.name: tensor for tensor in model.graph.initializer}
    if len(weights) == len(model.graph.initializer):
        return model
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    del copy.graph.initializer[:]
    copy.graph.initializer.extend(weights.values())
    return copy
