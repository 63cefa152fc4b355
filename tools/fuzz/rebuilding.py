"""Larger changes to a model: what its inputs say of themselves, in which graph its nodes lie, who reads inner values,
in which type it computes, and numbers that differ along one axis.

They keep a model what it is as often as they make it another: a model that says less of its sizes, or that lies in a
branch, computes the same. What is still fused has to be what it computes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from tests.passes import near_misses

FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16)


def types_of(model: onnx.ModelProto) -> Mapping[str, onnx.TypeProto]:
    """What can be told of each value."""
    return {value.name: value.type for value in near_misses.values_of(model)}


def _sizes(known: Mapping[str, onnx.TypeProto], name: str) -> list[int] | None:
    """The sizes of a value, 0 for an open one; None where its rank is unknown."""
    if name not in known or not known[name].tensor_type.HasField("shape"):
        return None
    return [dim.dim_value for dim in known[name].tensor_type.shape.dim]


def put_before(model: onnx.ModelProto, node: onnx.NodeProto, place: int, made: onnx.NodeProto) -> None:
    """Let a node read what another makes, which comes to stand in front of it."""
    index = list(model.graph.node).index(node)
    node.input[place] = made.output[0]
    model.graph.node.insert(index, made)


def _place(
    model: onnx.ModelProto, rng: random.Random, op_types: Collection[str], fits: Callable[[str], bool]
) -> tuple[onnx.NodeProto, int] | None:
    """A node of these types, and the place of an input that fits; None where there is none."""
    places = [
        (node, place)
        for node in model.graph.node
        if node.op_type in op_types
        for place, name in enumerate(node.input)
        if fits(name)
    ]
    return rng.choice(places) if places else None


def undeclared(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """An input says nothing of its rank, and nor do inner values and outputs."""
    info = rng.choice(list(model.graph.input)) if model.graph.input else None
    if info is None:
        return None
    info.type.tensor_type.ClearField("shape")
    del model.graph.value_info[:]
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    return f"the rank of {info.name} is not declared"


def by_input(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """The shape that a Reshape, an Expand or a Tile is given comes out of a branch, so that nobody knows it."""
    nodes = [node for node in model.graph.node if node.op_type in ("Reshape", "Expand", "Tile") and node.input[1]]
    if not nodes:
        return None
    node = rng.choice(nodes)
    _branched(model, node, node.input[1], node.input[1])
    return f"the shape of {node.op_type} {node.output[0]} is not known"


def _branched(model: onnx.ModelProto, before: onnx.NodeProto, value: str, other: str, kind: int = 7) -> None:
    """Put an If in front of a node that gives a value in both its branches, and let the node read it."""
    name = f"either{len(model.graph.node)}_{len(model.graph.initializer)}"
    branches = []
    for mark, source in (("then", value), ("else", other)):
        made = helper.make_tensor_value_info(f"{name}_{mark}", kind, None)
        node = helper.make_node("Identity", [source], [made.name], name=f"{made.name}_node")
        branches.append(helper.make_graph([node], f"{name}_{mark}_graph", [], [made]))
    condition = numpy_helper.from_array(np.array(True), f"{name}_condition")
    model.graph.initializer.append(condition)
    chosen = helper.make_node(
        "If", [condition.name], [name], name=f"{name}_node", then_branch=branches[0], else_branch=branches[1]
    )
    index = next(place for place, node in enumerate(model.graph.node) if node is before or node == before)
    for place, read in enumerate(before.input):
        if read == value:
            before.input[place] = name
    model.graph.node.insert(index, chosen)


def in_branch(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """Some neighbouring nodes lie in both branches of an If."""
    known = types_of(model)
    nodes = list(model.graph.node)
    first = rng.randrange(len(nodes))
    count = rng.choice([1, 1, 2, 4, len(nodes)])
    inner = nodes[first : first + count]
    made = [output for node in inner for output in node.output if output]
    outside = {value for node in (*nodes[:first], *nodes[first + count :]) for value in node.input}
    outside |= {output.name for output in model.graph.output}
    needed = [name for name in made if name in outside]
    if (
        not needed
        or any(name not in known for name in needed)
        or any(each.HasField("g") for n in inner for each in n.attribute)
    ):
        return None
    name = f"branch{len(nodes)}_{len(model.graph.initializer)}"
    branches = []
    for mark in ("a", "b"):
        copies = []
        for node in inner:
            copy = onnx.NodeProto()
            copy.CopyFrom(node)
            copy.name = f"{node.name}_{mark}"
            copy.input[:] = [f"{value}_{mark}" if value in made else value for value in node.input]
            copy.output[:] = [f"{value}_{mark}" if value else "" for value in node.output]
            copies.append(copy)
        results = [
            helper.make_tensor_value_info(f"{each}_{mark}", known[each].tensor_type.elem_type, None) for each in needed
        ]
        branches.append(helper.make_graph(copies, f"{name}_{mark}", [], results))
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), f"{name}_condition"))
    chosen = helper.make_node(
        "If", [f"{name}_condition"], needed, name=name, then_branch=branches[0], else_branch=branches[1]
    )
    # What the nodes read has to be there: the If stands where the last of them stood.
    rest = [*nodes[:first], chosen, *nodes[first + count :]]
    del model.graph.node[:]
    model.graph.node.extend(rest)
    return f"{count} nodes from {inner[0].op_type} {inner[0].output[0]} on lie in a branch"


def shape_read(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """The shape of an inner value, or a value of its type, is an output."""
    known = types_of(model)
    values = [each for node in model.graph.node for each in node.output if each in known]
    if not values:
        return None
    name = rng.choice(values)
    fresh = f"about{len(model.graph.node)}"
    if rng.random() < 0.7 or known[name].tensor_type.elem_type not in FLOATS:
        model.graph.node.append(helper.make_node("Shape", [name], [fresh], name=fresh))
        model.graph.output.append(helper.make_tensor_value_info(fresh, TensorProto.INT64, None))
        return f"the shape of {name} is an output"
    if not any(each.domain == "" and each.version >= 15 for each in model.opset_import):
        return None
    number = numpy_helper.from_array(np.array([1.5], np.float32), f"{fresh}_number")
    model.graph.initializer.append(number)
    model.graph.node.append(helper.make_node("CastLike", [number.name, name], [fresh], name=fresh))
    model.graph.output.append(helper.make_tensor_value_info(fresh, known[name].tensor_type.elem_type, None))
    return f"the type of {name} is read"


def in_double(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """One node computes in float64."""
    known = types_of(model)

    def kind(name: str) -> int:
        return known[name].tensor_type.elem_type if name in known else 0

    nodes = [
        node
        for node in model.graph.node
        if node.op_type in ("MatMul", "Add", "Sub", "Mul", "Div", "Softmax", "Where", "Max", "Exp", "Einsum", "Reshape")
        and kind(node.output[0]) in FLOATS
    ]
    if not nodes:
        return None
    node = rng.choice(nodes)
    index = list(model.graph.node).index(node)
    old, wide = kind(node.output[0]), f"wide{len(model.graph.node)}"
    casts = []
    for place, name in enumerate(node.input):
        if kind(name) in FLOATS:
            casts.append(helper.make_node("Cast", [name], [f"{wide}_{place}"], name=f"{wide}_{place}", to=11))
            node.input[place] = f"{wide}_{place}"
    back = helper.make_node("Cast", [wide], [node.output[0]], name=f"{wide}_back", to=old)
    what = f"{node.op_type} {node.output[0]} computes in float64"
    node.output[0] = wide
    nodes = list(model.graph.node)
    nodes[index + 1 : index + 1] = [back]
    nodes[index:index] = casts
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    del model.graph.value_info[:]
    return what


def along_axis(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """A value is multiplied with, divided by, or increased by numbers that differ along one or two of its axes."""
    known = types_of(model)
    readers = ("Softmax", "Add", "Where", "MatMul", "Einsum", "ReduceMax", "Exp", "Transpose", "Mul", "Div")
    found = _place(
        model, rng, readers, lambda name: bool(_sizes(known, name)) and known[name].tensor_type.elem_type in FLOATS
    )
    if found is None:
        return None
    node, place = found
    name = node.input[place]
    sizes = _sizes(known, name) or []
    axes = rng.sample(range(len(sizes)), min(len(sizes), rng.choice([1, 1, 2])))
    shape = [sizes[axis] or 1 if axis in axes else 1 for axis in range(len(sizes))]
    numbers = np.random.default_rng(rng.getrandbits(32)).uniform(0.5, 2.0, shape)
    numbers *= rng.choice([1.0, 1.0, -1.0, 0.0, 1e20, 1e-20])
    kind = known[name].tensor_type.elem_type
    fresh = f"along{len(model.graph.node)}"
    with np.errstate(all="ignore"):
        array = numbers.astype(helper.tensor_dtype_to_np_dtype(kind))
    model.graph.initializer.append(numpy_helper.from_array(array, f"{fresh}_numbers"))
    op_type = rng.choice(["Mul", "Mul", "Mul", "Div", "Add"])
    put_before(model, node, place, helper.make_node(op_type, [name, f"{fresh}_numbers"], [fresh], name=fresh))
    smallest = np.abs(numbers).min(initial=1.0, where=numbers != 0)
    divides_by_zero = op_type == "Div" and not numbers.any()
    size = np.inf if divides_by_zero else max(np.abs(numbers).max(initial=1.0), 1 / smallest)
    return f"{op_type} of {shape} {size:.3g} before {node.op_type} {node.output[0]}"


def enlarged(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """A value is repeated along an axis on its way to one reader: where the axis was 1, or by numbers of its size."""
    known = types_of(model)
    found = _place(model, rng, ("Add", "Where", "MatMul", "Mul", "Div", "Softmax"), known.__contains__)
    if found is None:
        return None
    node, place = found
    name = node.input[place]
    sizes = _sizes(known, name)
    if sizes is None:
        return None
    rank = max(len(sizes), rng.choice([len(sizes), 4, 5]))
    wanted = [1] * rank
    ones = [rank - len(sizes) + axis for axis, size in enumerate(sizes) if size in (0, 1)] + list(
        range(rank - len(sizes))
    )
    if not ones:
        return None
    wanted[rng.choice(ones)] = rng.choice([2, 3])
    fresh = f"larger{len(model.graph.node)}"
    model.graph.initializer.append(numpy_helper.from_array(np.array(wanted, np.int64), f"{fresh}_shape"))
    put_before(model, node, place, helper.make_node("Expand", [name, f"{fresh}_shape"], [fresh], name=fresh))
    return f"Expand to {wanted} before {node.op_type} {node.output[0]}"


def of_other_scores(model: onnx.ModelProto, rng: random.Random) -> str | None:
    """One node reads the result of a second product in place of, or beside, what it read: of the same operands."""
    products = [node for node in model.graph.node if node.op_type in ("MatMul", "FusedMatMul", "Einsum")]
    readers = [
        node for node in model.graph.node if node.op_type in ("Softmax", "Add", "Where", "Mul", "Sub", "Reshape")
    ]
    if not products or not readers:
        return None
    product, reader = rng.choice(products), rng.choice(readers)
    made = [output for node in readers for output in node.output]
    nodes = list(model.graph.node)
    index, start = nodes.index(reader), nodes.index(product)
    if start >= index or product.output[0] in made:
        return None
    copy = onnx.NodeProto()
    copy.CopyFrom(product)
    copy.name = copy.output[0] = f"second{len(nodes)}"
    place = rng.randrange(len(reader.input))
    total = f"{copy.name}_sum"
    added = helper.make_node("Add", [reader.input[place], copy.output[0]], [total], name=total)
    reader.input[place] = total
    nodes[index:index] = [copy, added]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return f"a second {product.op_type} is added before {reader.op_type} {reader.output[0]}"
