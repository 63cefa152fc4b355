"""Small questions about nodes and values that every matcher asks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice
from typing import Any, TypeGuard, TypeVar

import numpy as np
import onnx_ir as ir

T = TypeVar("T")
K = TypeVar("K")

STANDARD = ("", "ai.onnx")
SIXTEEN_BITS = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
FLOATS = (ir.DataType.FLOAT, *SIXTEEN_BITS)
"""The float types of 16 bits. They hold every integer up to 256."""
RANDOM = (
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
    "Bernoulli",
    "Multinomial",
    "Dropout",
)
"""The standard operators that may give other numbers each time."""
NUMBERS = {
    "value_float": np.float32,
    "value_int": np.int64,
    "value_floats": np.float32,
    "value_ints": np.int64,
}
"""The attributes that hold the numbers of a Constant without a tensor, and their types."""
FOLD_LIMIT = 1 << 22
"""Constants of more elements than this are not read as a whole; values/large_constants.py tells
what they hold."""

HELD = 1 << 16
"""Constants of more elements than this are read again from their file for each question, and not
held in memory."""


ABSENT = ir.Value(name="")
"""What stands for an absent input among `operands`. Nothing makes this value, and its shape, type
and content are unknown."""


def name_of(named: ir.Node | ir.Value | ir.TensorProtocol) -> str:
    """The name of a node, value or tensor; "" where it has none."""
    return named.name or ""


def is_op(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """Is this a node of the standard domain with one of these types? No node is of no type."""
    return node is not None and node.domain in STANDARD and node.op_type in op_types


def domain_of(node: ir.Node) -> str:
    """The domain of a node; empty for the standard domain, whose other name is "ai.onnx"."""
    return "" if node.domain in STANDARD else node.domain


def has_row(node: ir.Node | None, table: Collection[str]) -> TypeGuard[ir.Node]:
    """Is this a node of the standard domain whose type has a row in a table? No node has one."""
    return node is not None and node.domain in STANDARD and node.op_type in table


def any_op(nodes: Iterable[ir.Node | None], *op_types: str) -> bool:
    """Is one of these nodes of the standard domain and of one of these types?"""
    return any(is_op(node, *op_types) for node in nodes)


def all_ops(nodes: Iterable[ir.Node | None], *op_types: str) -> bool:
    """Are all of these nodes of the standard domain and of one of these types?"""
    return all(is_op(node, *op_types) for node in nodes)


def nodes_of_type(nodes: Iterable[ir.Node | None], *op_types: str) -> Iterator[ir.Node]:
    """Those of some nodes that are of the standard domain and of one of these types."""
    return (node for node in nodes if is_op(node, *op_types))


def producer(value: ir.Value | None) -> ir.Node | None:
    """The node that makes the value; None for graph inputs, initializers and absent inputs."""
    return None if value is None else value.producer()


def makers_of(values: Iterable[ir.Value | None]) -> list[ir.Node]:
    """The nodes that make values, those without one left out."""
    return without_none(map(producer, values))


def source_through(value: ir.Value, *op_types: str) -> ir.Value:
    """The source of a value: the start of the chain of operators of these types, each of which
    passes on its first input, that leads to the value. It is the value itself where there are no
    such operators."""
    while is_op(node := value.producer(), *op_types) and node.inputs[0] is not None:
        value = node.inputs[0]
    return value


def reached(
    starts: Iterable[T], further: Callable[[T], Iterable[T]], limit: int | None = None
) -> Iterator[T]:
    """What is reached from the starts, they first: each once, the nearest first. With a limit the
    search ends when so many are known."""
    known = dict.fromkeys(starts)
    pending = deque(known)
    while pending and (limit is None or len(known) < limit):
        current = pending.popleft()
        yield current
        for following in further(current):
            if following not in known:
                known[following] = None
                pending.append(following)


def made_of(
    values: Iterable[ir.Value], op_types: Collection[str], limit: int
) -> Iterator[ir.Value]:
    """The values that some values are made of by operators of these types, they first; at most so
    many."""
    return reached(values, lambda value: inputs_of(value.producer(), *op_types), limit)


def certain(item: T | None) -> T:
    """What is never None where it is asked for: a check or the caller has seen to it."""
    assert item is not None
    return item


def first(items: Iterable[T | None]) -> T | None:
    """The first item that is not None; None where there is none."""
    return next((item for item in items if item is not None), None)


def without_none(items: Iterable[T | None]) -> list[T]:
    """Those that are not None."""
    return [item for item in items if item is not None]


def without_absent(mapping: Mapping[K, T | None]) -> dict[K, T]:
    """The entries whose value is not None."""
    return {key: value for key, value in mapping.items() if value is not None}


def elsewhere(items: Iterable[T], places: Collection[int | None]) -> list[T]:
    """The items that stand at none of these places."""
    return [item for place, item in enumerate(items) if place not in places]


def instances(items: Iterable[object], kind: type[T]) -> list[T]:
    """Those of some items that are of a class."""
    return [item for item in items if isinstance(item, kind)]


def all_known(items: Iterable[T | None]) -> list[T] | None:
    """The items; None where one of them is unknown."""
    listed = list(items)
    known = without_none(listed)
    return known if len(known) == len(listed) else None


def sole(items: Iterable[T] | None) -> T | None:
    """The only item; None where there is none, where there are several, and where they are
    unknown."""
    ahead = [] if items is None else list(islice(items, 2))
    return ahead[0] if len(ahead) == 1 else None


def nodes_after(node: ir.Node) -> Iterator[ir.Node]:
    """The nodes that read what a node gives; dead ones do not count beside others."""
    return readers_of(node.outputs)


def outputs_of(nodes: Iterable[ir.Node]) -> list[ir.Value]:
    """What nodes give, in order."""
    return [output for node in nodes for output in node.outputs]


def readers_of(values: Iterable[ir.Value]) -> Iterator[ir.Node]:
    """The nodes that read values, one value after another; dead ones do not count beside others."""
    return chain.from_iterable(map(distinct_consumers, values))


def holds_output(values: Iterable[ir.Value]) -> bool:
    """Is one of these values a graph output?"""
    return any(value.is_graph_output() for value in values)


def is_read(value: ir.Value) -> bool:
    """Is a value read by a node, or an output?"""
    return bool(value.uses()) or value.is_graph_output()


def distinct_consumers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value, each once. Dead nodes are left out if there are others, because
    they are removed with what they read."""
    return list(each_consumer(value))


def each_consumer(value: ir.Value) -> Iterator[ir.Node]:
    """The same one by one: who needs only the first does not look at thousands."""
    seen: set[int] = set()
    dead: list[ir.Node] = []
    for node, _ in value.uses():
        if id(node) not in seen:
            seen.add(id(node))
            if is_dead(node):
                dead.append(node)
            else:
                yield node
    if len(dead) == len(seen):
        yield from dead


def only_reader(value: ir.Value) -> ir.Node | None:
    """The only reader of a value, if this node reads the value once and is in the same graph as the
    maker; else None."""
    maker, uses = value.producer(), value.uses()
    if value.is_graph_output() or maker is None or len(uses) != 1:
        return None
    ((reader, _),) = uses
    return reader if reader.graph is maker.graph else None


def data_readers(value: ir.Value) -> list[ir.Node]:
    """The nodes that read a value's elements, and not only its shape."""
    return [node for node in distinct_consumers(value) if not reads_shape(node)]


def reads_shape(node: ir.Node) -> bool:
    """Does the node read nothing but a shape?"""
    return is_op(node, "Shape")


def constant(value: ir.Value | None, limit: int = FOLD_LIMIT) -> np.ndarray | None:
    """The content of a constant or initializer of at most `limit` elements, else None.

    An initializer that is also a graph input can be overridden by the caller and is no constant,
    except in models before IR version 4, where every initializer had to be listed as an input.
    """
    tensor = constant_tensor(value)
    if tensor is None:
        return _numbers_of_attribute(producer(value))
    if tensor.size > limit or tensor.dtype == ir.DataType.STRING:
        return None
    return unheld(tensor).numpy()


def single(value: ir.Value | None) -> np.ndarray | None:
    """The content of a constant of one number; None for another value."""
    array = constant(value, limit=1)
    return array if array is not None and array.size == 1 else None


def number_of(value: ir.Value | None) -> Any:
    """The one number of a constant; None where a value is no constant, or holds more or less than
    one."""
    array = single(value)
    return None if array is None else array.item()


def unheld(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """A tensor with the same content. A larger one that lies in a file leaves memory together with
    the array that is made of it: the original would keep its array."""
    if not isinstance(tensor, ir.ExternalTensor) or tensor.size <= HELD:
        return tensor
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=name_of(tensor),
        base_dir=tensor.base_dir,
    )


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor of a constant or initializer of any size, which is not read. None for other
    values, and for a Constant whose numbers are not in a tensor."""
    if value is None or (value.is_graph_input() and not _is_legacy_initializer(value)):
        return None
    if value.const_value is not None:
        return value.const_value
    node = value.producer()
    if not is_op(node, "Constant") or (attr := node.attributes.get("value")) is None:
        return None
    # as_tensor() looks for each method of a tensor, which takes longer
    tensor: ir.TensorProtocol | None = attr.value
    return tensor


def _numbers_of_attribute(node: ir.Node | None) -> np.ndarray | None:
    """The content of a Constant whose numbers are not in a tensor; None for other nodes."""
    if is_op(node, "Constant"):
        for name, dtype in NUMBERS.items():
            if (attr := node.attributes.get(name)) is not None:
                return np.asarray(attr.value, dtype=dtype)
    return None


def equal_values(one: ir.Value | None, other: ir.Value | None, limit: int = 64) -> bool:
    """Do two values hold the same in every run, because they are one value, constants of the same
    content, or computed in the same way from such values? Then they are of one type and shape, too.
    Not more than `limit` pairs are looked at."""
    pairs = list(islice(reached([(one, other)], lambda pair: operand_pairs(*pair)), limit))
    return len(pairs) < limit and all(_are_one(*pair) or operand_pairs(*pair) for pair in pairs)


def equal_numbers(one: ir.Value, other: ir.Value) -> bool:
    """Do two values hold the same numbers in every run, as `equal_values`, or as constants of
    whatever type? Booleans are 0 and 1."""
    return _are_constants(one, other, np.array_equal) or equal_values(one, other)


def _are_one(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Are these the same value, absent both, or constants of the same content?"""
    return one is other or _are_constants(one, other, _same_content)


def _are_constants(
    one: ir.Value | None, other: ir.Value | None, agree: Callable[[np.ndarray, np.ndarray], bool]
) -> bool:
    """Are these two constants that agree?"""
    left, right = constant(one), constant(other)
    return left is not None and right is not None and agree(left, right)


def _same_content(one: np.ndarray, other: np.ndarray) -> bool:
    """Do two arrays hold the same bits? 0 and -0 are not the same: 1 divided by them is not."""
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def operand_pairs(
    one: ir.Value | None, other: ir.Value | None
) -> list[tuple[ir.Value | None, ir.Value | None]]:
    """The operands of two values, in pairs, where the same operator with the same attributes makes
    both: the values are equal if all pairs are. Empty where another thing differs, and where the
    values are one."""
    left, right = producer(one), producer(other)
    if one is None or other is None or left is None or right is None or _are_one(one, other):
        return []
    if left.outputs.index(one) != right.outputs.index(other) or not _compute_alike(left, right):
        return []
    return list(zip(left.inputs, right.inputs, strict=True))


def _compute_alike(one: ir.Node, other: ir.Node) -> bool:
    """Do two nodes of one graph compute the same of equal inputs in every run?"""
    return (
        one.op_identifier() == other.op_identifier()
        and one.domain in STANDARD
        and one.op_type not in RANDOM
        and one.graph is other.graph
        and len(one.inputs) == len(other.inputs)
        and _same_attributes(one, other)
    )


def _same_attributes(one: ir.Node, other: ir.Node) -> bool:
    """Do two nodes have the same attributes, and none of them a graph or a reference?"""
    if one.attributes.keys() != other.attributes.keys():
        return False
    pairs = [(attr, other.attributes[name]) for name, attr in one.attributes.items()]
    return all(_same_attribute(*pair) for pair in pairs)


def _same_attribute(one: ir.Attr, other: ir.Attr) -> bool:
    if one.is_ref() or other.is_ref() or one.type != other.type:
        return False
    if (array := _ARRAYS.get(one.type)) is not None:
        return _same_content(array(one), array(other))
    return bool(one.type in _PLAIN and one.value == other.value)


_ARRAYS: Mapping[ir.AttributeType, Callable[[ir.Attr], np.ndarray]] = {
    ir.AttributeType.TENSOR: lambda attr: attr.as_tensor().numpy(),
    ir.AttributeType.FLOAT: lambda attr: np.array(attr.as_float()),
}
_PLAIN = (ir.AttributeType.INT, ir.AttributeType.STRING, ir.AttributeType.INTS)
"""The types of attributes that are compared: by their bits, and as they are."""


def is_overridable(value: ir.Value | None) -> bool:
    """Is the value an initializer that is an input of the model, too, so that a caller may replace
    what it holds?"""
    return (
        value is not None
        and value.is_graph_input()
        and value.const_value is not None
        and not _is_legacy_initializer(value)
    )


def is_weight(value: ir.Value) -> bool:
    """Is the value an initializer, overridable or not, or a constant, of whatever size?"""
    return value.const_value is not None or is_op(value.producer(), "Constant")


IR_WITH_CONSTANTS = 4
"""From this IR version on an initializer need not be a graph input, and one that is can be
overridden."""
LEGACY_INITIALIZERS = "fa_compiler.legacy_initializers"
IMPORTS = "fa_compiler.opset_imports"
DEAD = "fa_compiler.dead_nodes"


def _is_legacy_initializer(value: ir.Value) -> bool:
    return value.graph is not None and bool(value.graph.meta.get(LEGACY_INITIALIZERS))


def takes_initializers(graph: ir.Graph) -> bool:
    """May a graph be given initializers that are not its inputs? Subgraphs may not before IR
    version 4.

    The model has to be prepared by `remember_versions`.
    """
    return IMPORTS not in graph.meta or not graph.meta.get(LEGACY_INITIALIZERS)


def opset(node: ir.Node, domain: str = "") -> int:
    """The version of a domain, by default the standard one, that applies to a node
    (`graph_opset`)."""
    return 1 if node.graph is None else graph_opset(node.graph, domain)


def graph_opset(graph: ir.Graph, domain: str = "") -> int:
    """The version of a domain, by default the standard one, that applies to the nodes of a graph; 1
    where the domain is not imported.

    A main graph and a function have their own imports. A subgraph has those of the graph around it,
    in a model that `remember_imports` has seen.
    """
    imports: Mapping[str, int] = graph.opset_imports or graph.meta.get(IMPORTS, {})
    return imports.get(domain) or (imports.get("ai.onnx") if domain == "" else None) or 1


def remember_imports(body: ir.Graph | ir.Function) -> None:
    """Store in every subgraph of a main graph or function the imports of that graph or function,
    which apply to it."""
    for node in all_nodes(body):
        for graph in subgraphs(node):
            graph.meta[IMPORTS] = body.opset_imports


def remember_versions(model: ir.Model) -> list[ir.Graph]:
    """Store in every graph what only the model knows: its imports, and whether its initializers are
    constants. Store which of its nodes are dead, too.

    Returns the graphs: the main one and the subgraphs in it.
    """
    legacy = model.ir_version is not None and model.ir_version < IR_WITH_CONSTANTS
    graphs = all_graphs(model)
    remember_imports(model.graph)
    for graph in graphs:
        graph.meta[LEGACY_INITIALIZERS] = legacy
        graph.meta[DEAD] = _dead_nodes(graph)
    return graphs


def dead_nodes(graph: ir.Graph) -> frozenset[ir.Node]:
    """The nodes of a graph from which no path leads to an output. The model has to be prepared by
    `remember_versions`."""
    dead: frozenset[ir.Node] = graph.meta.get(DEAD, frozenset())
    return dead


def is_dead(node: ir.Node) -> bool:
    """Is the node one of the dead nodes of its graph?"""
    return isinstance(node.graph, ir.Graph) and node in dead_nodes(node.graph)


def _dead_nodes(graph: ir.Graph) -> frozenset[ir.Node]:
    def is_needed(value: ir.Value) -> bool:
        # A value that another graph reads, such as a branch of an If, counts as needed.
        return value.is_graph_output() or any(
            reader.graph is not graph for reader, _ in value.uses()
        )

    def makers(node: ir.Node) -> Iterator[ir.Node]:
        return (maker for maker in makers_of(node.inputs) if maker.graph is graph)

    needed = (node for node in graph if any(map(is_needed, node.outputs)))
    alive = set(reached(needed, makers))
    return frozenset(node for node in graph if node not in alive)


def _attr(node: ir.Node, name: str, read: Callable[[ir.Attr], T], default: T) -> T:
    """What is read of an attribute, or its default."""
    attr = node.attributes.get(name)
    return default if attr is None else read(attr)


def int_attr(node: ir.Node, name: str, default: int) -> int:
    """The value of an integer attribute, or its default."""
    return _attr(node, name, ir.Attr.as_int, default)


def float_attr(node: ir.Node, name: str, default: float) -> float:
    """The value of a float attribute, or its default."""
    return _attr(node, name, ir.Attr.as_float, default)


def ints_attr(node: ir.Node, name: str, default: Sequence[int]) -> list[int]:
    """The integers of an attribute, or its default."""
    return list(_attr(node, name, ir.Attr.as_ints, default))


def attribute_values(node: ir.Node) -> dict[str, Any]:
    """The values of all attributes of a node, by their names."""
    return {name: attr.value for name, attr in node.attributes.items()}


def text_attr(node: ir.Node, name: str, default: str) -> str:
    """The value of a string attribute, or its default. A string may hold any bytes: those that are
    not text are replaced, so that the result is no known word."""
    return _attr(node, name, _text, default)


def _text(attr: ir.Attr) -> str:
    return (
        attr.value.decode(errors="replace") if isinstance(attr.value, bytes) else attr.as_string()
    )


def permutation(node: ir.Node, rank: int) -> list[int] | None:
    """The input dimension of each output dimension of a Transpose; None where its `perm` is no
    permutation of this rank."""
    places = list(range(rank))
    perm = ints_attr(node, "perm", places[::-1])
    return perm if sorted(perm) == places else None


def axes_of(node: ir.Node, limit: int = 8) -> list[int] | None:
    """The axes that a reduction, Squeeze or Unsqueeze names, as written; None when it names none,
    or when they are unknown, no integers or more than `limit`."""
    attr = node.attributes.get("axes")
    if attr is not None:
        return list(attr.as_ints())
    array = constant(input_of(node, 1), limit=limit)
    if array is None or array.dtype.kind != "i":
        return None
    return [int(axis) for axis in array.reshape(-1)]


def places_of(node: ir.Node, rank: int, limit: int = 8) -> list[int] | None:
    """The axes of `axes_of`, counted from the first one of an operand of this rank. None for a
    scalar, too, which has no axes."""
    axes = axes_of(node, limit)
    if axes is None or not rank:
        return None
    return [axis % rank for axis in axes]


def all_nodes(body: ir.Graph | ir.Function) -> Iterator[ir.Node]:
    """The nodes of a body and of the subgraphs in it. A node comes before the nodes of its
    subgraphs."""
    for node in body:
        yield node
        for graph in subgraphs(node):
            yield from all_nodes(graph)


def all_graphs(model: ir.Model) -> list[ir.Graph]:
    """The main graph and the subgraphs in it."""
    inner = chain.from_iterable(map(subgraphs, all_nodes(model.graph)))
    return list(dict.fromkeys([model.graph, *inner]))


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """The graphs among the attributes of a node."""
    graphs: list[ir.Graph] = []
    for attr in node.attributes.data.values():  # several times as fast as the values of a UserDict
        if attr.type == ir.AttributeType.GRAPH and not attr.is_ref():
            graphs.append(attr.as_graph())
        elif attr.type == ir.AttributeType.GRAPHS and not attr.is_ref():
            graphs.extend(attr.as_graphs())
    return graphs


def values_read(node: ir.Node) -> list[ir.Value]:
    """The values that a node reads: its inputs, the inputs of nodes in its subgraphs, and the
    results of these subgraphs."""
    bodies = subgraphs(node)
    if not bodies:
        return without_none(node.inputs)
    readers = chain.from_iterable(map(all_nodes, bodies))
    inner = chain.from_iterable(reader.inputs for reader in readers)
    returned = chain.from_iterable(body.outputs for body in bodies)
    return without_none([*node.inputs, *inner, *returned])


def inner_values(value: ir.Value) -> list[ir.Value] | None:
    """The values that an If chooses from to make a value, one for each branch. Empty where another
    operator with subgraphs makes the value, and None where no such operator does."""
    node = value.producer()
    if node is None or not (bodies := subgraphs(node)):
        return None
    if not is_op(node, "If"):
        return []
    place = node.outputs.index(value)
    return [body.outputs[place] for body in bodies]


def input_of(node: ir.Node, index: int) -> ir.Value | None:
    """The input at `index`, None when it is absent or beyond the end."""
    return node.inputs[index] if index < len(node.inputs) else None


def operands(node: ir.Node | None) -> tuple[ir.Value, ...]:
    """The inputs of a node. ABSENT takes the place of an absent one, so that no caller has to test
    for it. None where there is no node."""
    return () if node is None else tuple(value or ABSENT for value in node.inputs)


def operand_at(node: ir.Node | None, index: int) -> ir.Value:
    """The input at `index`; ABSENT where there is none, also where there is no node."""
    return (node and input_of(node, index)) or ABSENT


def operand_orders(node: ir.Node | None, *op_types: str) -> tuple[tuple[ir.Value, ir.Value], ...]:
    """The two operands of a node of one of these types, in both orders; none where it is another
    node, or one that has more or fewer operands."""
    if not is_op(node, *op_types) or len(node.inputs) != 2:
        return ()
    left, right = operands(node)
    return (left, right), (right, left)


def selections_of(node: ir.Node | None) -> Iterator[tuple[ir.Value, ir.Value, ir.Value, bool]]:
    """How a Where may be read as a selection: the condition, what it keeps, what stands elsewhere,
    and whether it keeps that where the condition is true. Another node is read in no way."""
    if is_op(node, "Where"):
        condition, chosen, other = operands(node)
        yield condition, chosen, other, True
        yield condition, other, chosen, False


def operand_beside(node: ir.Node | None, value: ir.Value, *op_types: str) -> ir.Value | None:
    """What a node of one of these types, which has two operands, combines with a value; None where
    the node is another one, or does not read the value."""
    return next((other for one, other in operand_orders(node, *op_types) if one is value), None)


def others_of(node: ir.Node, value: ir.Value) -> list[ir.Value]:
    """The inputs that are given to a node beside a value."""
    return [other for other in without_none(node.inputs) if other is not value]


def output_of(node: ir.Node | None) -> ir.Value | None:
    """The first output of a node; None where there is no node."""
    return None if node is None else node.outputs[0]


def inputs_of(node: ir.Node | None, *op_types: str) -> list[ir.Value]:
    """The inputs that are given to a node, where types are named only to one of these types; none
    where there is no such node."""
    if node is None or (op_types and not is_op(node, *op_types)):
        return []
    return without_none(node.inputs)
