"""Small changes to a model: what one change of an exporter, a simplifier or a user's hand could leave behind."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.passes import near_misses
from tools.fuzz import file_parts, rebuilding
from tools.fuzz.difference import LARGEST, Array

Change = Callable[[onnx.ModelProto, random.Random], str | None]
NUMBERS = (
    -np.inf, -1e9, -1e4, -65504.0, -LARGEST, -LARGEST / 2, -5e8, -5e3, -32752.0, 1e9, 1e4, LARGEST, np.inf, np.nan, 0.0,
    -1e30, -100.0, 1.0, -1.0,
)  # fmt: skip
FACTORS = (0.5, 2.0, 1.0, 0.0, -1.0, 1e-3, 30.0, np.nan, np.inf)
RELATIVES = (
    ("Add", "Sub"), ("Less", "LessOrEqual", "Greater", "GreaterOrEqual"), ("Max", "Min"), ("And", "Or", "Xor"),
    ("ReduceSum", "ReduceMax", "ReduceMean"), ("Mul", "Div"), ("Softmax", "LogSoftmax"), ("IsNaN", "IsInf"),
    ("Equal", "Less", "Greater"), ("Exp", "Softplus"), ("ReduceMax", "ReduceMin"),
)  # fmt: skip


def change(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """Change the model in place, and say how; None where nothing was found to change."""
    return rng.choice(CHANGES)(model, rng)


def _constants(model: onnx.ModelProto) -> list[onnx.TensorProto]:
    nodes = model.graph.node
    held = [each.t for node in nodes for each in node.attribute if each.HasField("t")]
    return [*model.graph.initializer, *held]


def _is_float(tensor: onnx.TensorProto) -> bool:
    return tensor.data_type in (TensorProto.FLOAT, TensorProto.FLOAT16)


def _set(tensor: onnx.TensorProto, array: Array) -> None:
    name = tensor.name
    tensor.CopyFrom(numpy_helper.from_array(array, name))


def _other_number(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """A float constant of few elements: a mask's number, or a factor."""
    found = [each for each in _constants(model) if _is_float(each) and 0 < np.prod(each.dims, dtype=int) <= 64]
    if not found:
        return None
    tensor = rng.choice(found)
    array = numpy_helper.to_array(tensor).copy()
    low = bool((np.abs(array) >= 100).any())
    with np.errstate(all="ignore"):
        # In a weight NaN and infinities are values at masked keys, which are not read.
        factors = FACTORS if array.size == 1 else FACTORS[:7]
        number = array.dtype.type(rng.choice(NUMBERS if low or (array.size == 1 and rng.random() < 0.3) else factors))
        flat = array.reshape(-1)
        if low:
            flat[np.abs(flat) >= 100] = number
        elif rng.random() < 0.3:
            flat[rng.randrange(flat.size)] = number
        else:
            flat[:] = number
    _set(tensor, array)
    return f"{tensor.name or 'a constant'} is {number}"


def _other_whole(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """A small constant of integers: axes, bounds of a Slice, offsets, shapes."""
    found = [
        each
        for each in _constants(model)
        if each.data_type in (TensorProto.INT64, TensorProto.INT32) and 0 < np.prod(each.dims, dtype=int) <= 8
    ]
    if not found:
        return None
    tensor = rng.choice(found)
    array = numpy_helper.to_array(tensor).copy()
    flat = array.reshape(-1)
    place = rng.randrange(flat.size)
    flat[place] += rng.choice([1, -1, 1, -1, 2]) if abs(int(flat[place])) < 1 << 30 else -int(flat[place])
    _set(tensor, array)
    return f"{tensor.name or 'a constant'} is {array.tolist()}"


def _other_mask(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """Elements of a constant boolean, or of a float mask."""
    found = [each for each in _constants(model) if each.data_type == TensorProto.BOOL and np.prod(each.dims, dtype=int)]
    if not found:
        return None
    tensor = rng.choice(found)
    array = numpy_helper.to_array(tensor).copy()
    flat = array.reshape(-1)
    if rng.random() < 0.5:
        flat[rng.randrange(flat.size)] ^= True
    elif array.ndim > 1:
        array[..., rng.randrange(array.shape[-2]), :] = rng.random() < 0.5
    else:
        flat[:] = ~flat
    _set(tensor, array)
    return f"{tensor.name or 'a constant'} has another element"


def _relative(model: onnx.ModelProto, rng: random.Random) -> str | None:
    family = rng.choice(RELATIVES)
    nodes = [node for node in model.graph.node if node.op_type in family]
    if not nodes:
        return None
    node = rng.choice(nodes)
    old, node.op_type = node.op_type, rng.choice([each for each in family if each != node.op_type])
    return f"{old} {node.output[0]} is {node.op_type}"


def _swapped(model: onnx.ModelProto, rng: random.Random) -> str | None:
    nodes = [node for node in model.graph.node if len(node.input) >= 2 and node.op_type not in ("Reshape", "Expand")]
    if not nodes:
        return None
    node = rng.choice(nodes)
    first, second = (1, 2) if node.op_type == "Where" else (0, 1)
    node.input[first], node.input[second] = node.input[second], node.input[first]
    return f"operands of {node.op_type} {node.output[0]}"


def _attribute(model: onnx.ModelProto, rng: random.Random) -> str | None:
    found = [
        (node, each)
        for node in model.graph.node
        for each in node.attribute
        if each.type in (onnx.AttributeProto.INT, onnx.AttributeProto.INTS, onnx.AttributeProto.FLOAT)
    ]
    if not found:
        return None
    node, attribute = rng.choice(found)
    if attribute.type == onnx.AttributeProto.FLOAT:
        attribute.f = rng.choice([*FACTORS, -1e4, -LARGEST, -np.inf])
    elif attribute.type == onnx.AttributeProto.INTS:
        values = list(attribute.ints)
        rng.shuffle(values)
        attribute.ints[:] = values
    elif attribute.name == "to":
        attribute.i = rng.choice([TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BOOL, TensorProto.INT64])
    else:
        attribute.i = 1 - attribute.i if attribute.i in (0, 1) else attribute.i + rng.choice([-1, 1])
    return f"{attribute.name} of {node.op_type} {node.output[0]}"


def _reader(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """An inner value is an output as well, or read by a node of its own."""
    return near_misses._extra_output(model.graph, rebuilding.types_of(model), rng)


def _near_miss(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """One of the changes that the ordinary tests make."""
    made = rng.choice([near_misses._node_between, near_misses._other_source])
    for index, node in enumerate(model.graph.node):
        node.name = node.name or f"node{index}"
    return made(model.graph, rebuilding.types_of(model), rng)


def _size(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """A size of an input is open, fixed, or has another name; outputs say nothing of sizes any more."""
    dims = [(info, dim) for info in model.graph.input for dim in info.type.tensor_type.shape.dim]
    if not dims:
        return None
    info, dim = rng.choice(dims)
    others = [each.dim_param for _, each in dims if each.dim_param]
    if dim.dim_param and rng.random() < 0.5:
        dim.dim_param = rng.choice([*others, "other"])
    else:
        dim.dim_param = rng.choice([*others, "fresh", "fresh"])
    forget(model)
    return f"a size of {info.name} is {dim.dim_param}"


def forget(model: onnx.ModelProto) -> None:
    """Outputs and inner values say nothing of their sizes."""
    del model.graph.value_info[:]
    for output in model.graph.output:
        for dim in output.type.tensor_type.shape.dim:
            dim.Clear()


def _half(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """float16 in place of float32, everywhere."""
    for tensor in _constants(model):
        if tensor.data_type == TensorProto.FLOAT:
            array = numpy_helper.to_array(tensor)
            with np.errstate(all="ignore"):
                _set(tensor, np.where(np.isfinite(array), np.clip(array, -65504, 65504), array).astype(np.float16))
    for info in (*model.graph.input, *model.graph.output):
        if info.type.tensor_type.elem_type == TensorProto.FLOAT:
            info.type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in model.graph.node:
        for each in node.attribute:
            if each.name == "to" and each.i == TensorProto.FLOAT and rng.random() < 0.9:
                each.i = TensorProto.FLOAT16
    del model.graph.value_info[:]
    return "float16"


def _added(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """A constant added to, multiplied with, or put in a place of one input of a node."""
    nodes = [node for node in model.graph.node if node.op_type in ("Softmax", "Add", "Where", "MatMul", "Div", "Mul")]
    if not nodes:
        return None
    node = rng.choice(nodes)
    place = rng.randrange(len(node.input))
    types = rebuilding.types_of(model)
    kind = types[node.input[place]].tensor_type.elem_type if node.input[place] in types else 0
    if kind not in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return None
    name = f"added{len(model.graph.node)}"
    with np.errstate(all="ignore"):
        number = np.array(rng.choice([*NUMBERS, *FACTORS]), helper.tensor_dtype_to_np_dtype(kind))
    model.graph.initializer.append(numpy_helper.from_array(number, f"{name}_number"))
    op_type = rng.choice(["Add", "Mul", "Max", "Min", "Sub"])
    added = helper.make_node(op_type, [node.input[place], f"{name}_number"], [name], name=name)
    rebuilding.put_before(model, node, place, added)
    return f"{op_type} {number} before {node.op_type} {node.output[0]}"


CHANGES: tuple[Change, ...] = (
    _other_number, _other_number, _other_number, _other_whole, _other_mask, _relative, _relative, _swapped, _attribute,
    _reader, _near_miss, _size, _size, _half, _added, rebuilding.undeclared, rebuilding.by_input, rebuilding.in_branch,
    rebuilding.shape_read, rebuilding.in_double, rebuilding.along_axis, rebuilding.enlarged, rebuilding.of_other_scores,
    file_parts.as_function, file_parts.written_twice, file_parts.deprecated,
)  # fmt: skip
