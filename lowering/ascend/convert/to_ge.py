"""An ONNX model as a GE graph.

The inputs become Data in the model's order, the weights that are read become Const, and the outputs
become the inputs of the only NetOutput. A branch of an If is a separate graph, whose Data are the
outer values that the branch reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import onnx_ir as ir

from fa_compiler.lowering.ascend.air.slots import PARENT_INDEX
from fa_compiler.lowering.ascend.convert.emit import Emitter, Names, Tensor, Type
from fa_compiler.lowering.ascend.convert.errors import CannotMapError, UnmappedError, UnmappedNode
from fa_compiler.lowering.ascend.convert.forward import HANDLERS, OnnxCall
from fa_compiler.lowering.ascend.convert.forward.onnx_call import type_of
from fa_compiler.lowering.ascend.convert.prepare import key_of, prepare
from fa_compiler.lowering.ascend.graph import Attr, Graph, Model, Op, Output, TensorDesc, Weight
from fa_compiler.op_registry import dtypes, hcom
from fa_compiler.passes.attention_ops.names import is_attention_op, is_linear_attention_op
from fa_compiler.passes.ir.nodes import opset, reached, subgraphs
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.ops.context import integers_of
from fa_compiler.passes.values.shapes import ShapeInfo

_CONSTANT, _IF = ("", "Constant"), ("", "If")

_ALIGNED = {
    ("", name)
    for name in ("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or", "Pow", "Sub", "Xor")
}
"""Operators that broadcast since opset 7. Before, the axes of the smaller input are the last axes,
which means the same, or the axes from the attribute `axis` on."""

Range = tuple[int, int]
"""The inclusive bounds of a size; an upper bound of -1 means no bound."""


def to_ge(
    model: ir.Model, *, input_shapes: Mapping[str, Sequence[int | Range]] | None = None
) -> Model:
    """The GE graph of a model; the model is not changed.

    `input_shapes` are the sizes of inputs by name: a number, or the bounds of a dynamic size.

    Raises:
        UnmappedError: nodes have no counterpart in GE; the error names all of them.
        ValueError: an input shape names no input, or has another rank or size than the input.
    """
    model = model.clone()
    ranges = input_shapes or {}
    _set_shapes(model.graph, ranges)
    prepared, info = prepare(model, _is_known)
    conversion = _Conversion(model.graph.name or "model", info)
    conversion.graph(prepared.graph, ranges)
    if conversion.unmapped:
        raise UnmappedError(conversion.unmapped)
    _drop_graphs(conversion.model)
    return conversion.model


def _drop_graphs(model: Model) -> None:
    """Drop the graphs of operators that were dropped."""
    graphs = {graph.name: graph for graph in model.graphs}
    needed = set(reached([model.root.name], lambda name: graphs[name].subgraphs))
    model.graphs[:] = [graph for graph in model.graphs if graph.name in needed]


def _key(node: ir.Node) -> tuple[str, str]:
    return key_of(node.domain, node.op_type)


def is_convertible(domain: str, op_type: str) -> bool:
    """Does any node of this operator have a counterpart in GE?"""
    return _is_known(key_of(domain, op_type))


def _is_known(key: tuple[str, str]) -> bool:
    return key in HANDLERS or key in (_CONSTANT, _IF)


def _set_shapes(graph: ir.Graph, shapes: Mapping[str, Sequence[int | Range]]) -> None:
    inputs = {value.name: value for value in graph.inputs}
    for name, given in shapes.items():
        value = inputs.get(name)
        if value is None:
            raise ValueError(
                f"the model has no input '{name}'; its inputs are {', '.join(map(str, inputs))}"
            )
        old = value.shape
        if old is not None and len(old) != len(given):
            raise ValueError(
                f"input '{name}' has rank {len(old)}, the shape given for it {len(given)}"
            )
        for axis, size in enumerate(given):
            fixed = old[axis] if old is not None else None
            if isinstance(fixed, int) and isinstance(size, int) and fixed != size:
                raise ValueError(
                    f"input '{name}' has size {fixed} in axis {axis}, the shape given for it {size}"
                )
        kept = [None] * len(given) if old is None else list(old)
        value.shape = ir.Shape(
            [size if isinstance(size, int) else kept[i] for i, size in enumerate(given)]
        )


class _Conversion:
    """The conversion of a model: the graphs made so far, and the nodes that could not be
    converted."""

    def __init__(self, name: str, info: ShapeInfo) -> None:
        self.model = Model(name)
        self.info = info
        self.unmapped: list[UnmappedNode] = []
        self._names = Names()

    def graph(
        self,
        source: ir.Graph,
        ranges: Mapping[str, Sequence[int | Range]],
        captured: Mapping[ir.Value, Tensor] | None = None,
    ) -> Graph:
        """Convert one graph. `captured` are the outer values that a branch reads, as tensors of the
        outer graph."""
        made = Graph(self._names.new(source.name or "graph"))
        self.model.graphs.append(made)
        names = Names()
        names.new("NetOutput")
        body = _Body(self, made, Emitter(made, names))
        for index, value in enumerate(
            value for value in source.inputs if not value.is_initializer()
        ):
            body.input(value, index, ranges.get(value.name or ""))
        for index, (value, outer) in enumerate((captured or {}).items()):
            body.data(
                value.name or "captured",
                index,
                outer,
                None,
                value,
                {PARENT_INDEX: Attr("Int", index + 1)},
            )
        for node in source:
            body.node(node)
        body.finish(source.outputs)
        return made


class _Body:
    """The conversion of one graph, with the GE tensor of each ONNX value so far."""

    def __init__(self, conversion: _Conversion, graph: Graph, emitter: Emitter) -> None:
        self._conversion = conversion
        self._info = conversion.info
        self._graph = graph
        self._e = emitter
        self._tensors: dict[ir.Value, Tensor] = {}
        self._broken: set[ir.Value] = set()

    def input(self, value: ir.Value, index: int, ranges: Sequence[int | Range] | None) -> None:
        """Add the Data of an input of the model."""
        try:
            given = type_of(value, self._info)
        except CannotMapError as error:
            self._conversion.unmapped.append(
                UnmappedNode(value.name or "", "input", error.reason, error.alternative)
            )
            self._broken.add(value)
            return
        self.data(value.name or "input", index, given, ranges, value)

    def data(
        self,
        name: str,
        index: int,
        given: Type,
        ranges: Sequence[int | Range] | None,
        value: ir.Value,
        more: Mapping[str, Attr] | None = None,
    ) -> None:
        """Add a Data."""
        bounds = None
        if ranges is not None and given.shape is not None:
            bounds = tuple((size, size) if isinstance(size, int) else size for size in ranges)
        op = Op(
            self._e.names.new(name), "Data", attrs={"index": Attr("Int", index), **(more or {})}
        )
        op.input_descs.append(TensorDesc("x", given.dtype, given.shape, ranges=bounds))
        op.output_descs.append(TensorDesc("y", given.dtype, given.shape, ranges=bounds))
        self._graph.ops.append(op)
        self._tensors[value] = Tensor(given.dtype, given.shape, Output(op.name))

    def node(self, node: ir.Node) -> None:
        """Convert one ONNX node.

        A node without a counterpart is recorded. Its readers are still converted, with placeholders
        of the right types: so all unsupported nodes are found. The graph is not used then.
        """
        if any(value in self._broken for value in node.inputs if value is not None):
            self._broken.update(node.outputs)
            self._only_name(node)
            return
        if self._known_in_every_run(node):
            return
        self._e.stem = node.name or (node.outputs[0].name if node.outputs else "") or node.op_type
        try:
            made = self._converted(node)
        except CannotMapError as error:
            self._note(node, error)
            for value in node.outputs:
                self._stand_in(value)
            return
        for value, tensor in zip(node.outputs, made, strict=False):
            self._tensors[value] = tensor

    def _known_in_every_run(self, node: ir.Node) -> bool:
        """Make constants of results that are known sizes or positions; False if the results are not
        known.

        At compile time GE evaluates few operators on sizes, and treats any result that it does not
        know as dynamic.
        """
        if _key(node) == _CONSTANT or not node.outputs:
            return False
        found = []
        for value in node.outputs:
            fact = self._info.fact(value)
            dtype = None if fact.dtype is None else dtypes.from_onnx(int(fact.dtype))
            if (
                fact.content is None
                or fact.content.dtype != object
                or dtype not in ("DT_INT32", "DT_INT64", "DT_BOOL")
            ):
                return False
            numbers = integers_of(fact.content)
            if numbers is None:
                return False
            found.append((value, numbers.astype(dtypes.to_numpy(dtype)), dtype))
        for value, array, dtype in found:
            self._tensors[value] = self._e.const(array, dtype)
        return True

    def _stand_in(self, value: ir.Value) -> None:
        try:
            given = type_of(value, self._info)
        except CannotMapError:
            self._broken.add(value)
        else:
            self._tensors[value] = Tensor(given.dtype, given.shape)

    def _only_name(self, node: ir.Node) -> None:
        """Record a node if it has no counterpart. It reads an unsupported node and so cannot be
        converted anyway."""
        if not _is_known(_key(node)):
            self._note(node, _unknown(node))

    def _note(self, node: ir.Node, error: CannotMapError) -> None:
        domain, op_type = _key(node)
        label = f"{domain}::{op_type}" if domain else op_type
        name = node.name or (node.outputs[0].name if node.outputs else "") or ""
        self._conversion.unmapped.append(UnmappedNode(name, label, error.reason, error.alternative))

    def _converted(self, node: ir.Node) -> Sequence[Tensor]:
        if _key(node) == _CONSTANT:
            return [self._constant(node)]
        if _key(node) == _IF:
            return self._branches(node)
        handler = HANDLERS.get(_key(node))
        if handler is None:
            raise _unknown(node)
        if (unknown := unknown_part(node)) is not None:
            raise CannotMapError(f"it has {unknown}, and what it means is not known here")
        if opset(node) < 7 and "axis" in node.attributes and _key(node) in _ALIGNED:
            raise CannotMapError(
                "its second input is for an axis of the first", "export with opset 7 or newer"
            )
        inputs = [None if value is None else self.tensor(value) for value in node.inputs]
        try:
            made = handler(OnnxCall(node, self._e, inputs, self._info, opset(node)))
        except (
            IndexError,
            ValueError,
        ) as error:  # inputs that ONNX's definition of the operator does not allow
            raise CannotMapError(
                f"its inputs and attributes do not match ({error})", "repair the model"
            ) from error
        return [made] if isinstance(made, Tensor) else made

    def tensor(self, value: ir.Value) -> Tensor:
        """The tensor of an ONNX value. A weight becomes a Const when it is first read."""
        found = self._tensors.get(value)
        if found is None:
            if value.const_value is None:
                raise CannotMapError(f"nothing makes its input '{value.name}'")
            found = self._tensors[value] = self._weight(value.name or "weight", value.const_value)
        return found

    def _constant(self, node: ir.Node) -> Tensor:
        attr = next(iter(node.attributes.values()), None)
        if attr is None or attr.name not in (
            "value",
            "value_float",
            "value_floats",
            "value_int",
            "value_ints",
        ):
            raise CannotMapError("its value is sparse or text")
        if attr.name == "value":
            return self._weight(self._e.stem, attr.as_tensor())
        dtype = "DT_FLOAT" if "float" in attr.name else "DT_INT64"
        return self._e.const(attr.value, dtype)

    def _weight(self, name: str, tensor: ir.TensorProtocol) -> Tensor:
        dtype = dtypes.from_onnx(int(tensor.dtype))
        if dtype is None or dtype == "DT_STRING":
            raise CannotMapError(f"GE has no constants of type {tensor.dtype.name.lower()}")
        shape = tuple(tensor.shape.numpy())
        weight = Weight(dtype, shape, int(tensor.nbytes), tensor.tobytes)
        return self._e.weight(name, weight)

    def _branches(self, node: ir.Node) -> Sequence[Tensor]:
        """An If. The outer values that the branches read become its inputs, the same ones for both
        branches.

        ONNX's condition is a tensor of one element. GE treats any condition that is not a scalar as
        true unless it is empty, so the condition becomes a scalar.
        """
        condition = self.tensor(node.inputs[0]) if node.inputs[0] is not None else None
        if condition is None:
            raise CannotMapError("its condition is missing")
        if condition.shape != ():
            condition = self._e.op("Squeeze", condition, axis=[], out=condition.with_shape(()))
        branches = {
            name: node.attributes[name].as_graph() for name in ("then_branch", "else_branch")
        }
        captured = dict.fromkeys(
            value for branch in branches.values() for value in free_values(branch)
        )
        given = {value: self.tensor(value) for value in captured}
        outs = [type_of(value, self._info) for value in node.outputs]
        made = self._e.ops("If", condition, list(given.values()), outs=outs)
        op = self._graph.ops[-1]
        for name, branch in branches.items():
            op.subgraphs[name] = self._conversion.graph(branch, {}, given).name
        return made

    def finish(self, outputs: Sequence[ir.Value]) -> None:
        """Add the NetOutput. A Data or Const that is an output goes through an Identity: an
        operator must make it."""
        if self._conversion.unmapped:
            return
        straight = {op.name for op in self._graph.ops if op.type in ("Data", "Const")}
        end = Op("NetOutput", "NetOutput")
        for index, value in enumerate(outputs):
            tensor = self.tensor(value)
            if tensor.output.op in straight:
                self._e.stem = f"{value.name}/Identity"
                tensor = self._e.op("Identity", tensor, out=tensor)
            end.inputs.append(tensor.output)
            end.input_descs.append(TensorDesc(f"x{index}", tensor.dtype, tensor.shape))
        self._graph.ops.append(end)
        _order_messages(self._graph, end)
        _prune(self._graph)


def _order_messages(graph: Graph, end: Op) -> None:
    """Put the operators that talk to other ranks into the order of their nodes, by control edges.

    Ranks wait for each other, so all of them must run these operators in one order. The data alone
    do not say it. The last edge leads to the NetOutput, because an HcomSend has no output that
    another operator reads.
    """
    messages = [op for op in graph.ops if op.type in hcom.OPERATORS]
    for before, after in pairwise([*messages, end]):
        after.controls.append(before.name)


def _prune(graph: Graph) -> None:
    """Drop the operators that no output needs, such as axes that became attributes. All Data stay,
    because the model's inputs stay, and all operators that talk to other ranks, because these wait
    for them."""
    by_name = {op.name: op for op in graph.ops}
    needed = set(reached(["NetOutput"], lambda name: by_name[name].sources))
    graph.ops[:] = [op for op in graph.ops if op.name in needed or op.type == "Data"]


_WRITE_OUT = (
    "leave it out, or export it as simpler operators (MatMul, Add, Sigmoid, ...), which GE has"
)


def _unknown(node: ir.Node) -> CannotMapError:
    if node.op_type in ("Loop", "Scan"):
        return CannotMapError("loops are not converted", "unroll it when exporting")
    if any(attr.type == ir.AttributeType.GRAPH for attr in node.attributes.values()):
        return CannotMapError("it holds a graph of its own", _WRITE_OUT)
    return not_fused(node) or CannotMapError("no GE operator computes this", _WRITE_OUT)


def not_fused(node: ir.Node) -> CannotMapError | None:
    """What is said of an operator that is attention; None for others."""
    why = "that was not fused (`fa-compiler inspect --target ascend` says why)"
    if is_attention_op(node):
        return CannotMapError(f"attention {why}", "export with attention in plain operators")
    if is_linear_attention_op(node):
        advice = "do what it says, or export with the recurrence in plain operators, unrolled"
        return CannotMapError(f"linear attention {why}", advice)
    return None


def free_values(graph: ir.Graph) -> list[ir.Value]:
    """The values of outer graphs that a graph and its subgraphs read, in the order of their first
    use."""
    own: set[ir.Value] = {*graph.inputs, *graph.initializers.values()}
    free: dict[ir.Value, None] = {}
    for node in graph:
        inner = [value for body in subgraphs(node) for value in free_values(body)]
        for value in (*node.inputs, *inner):
            if value is not None and value not in own:
                free[value] = None
        own.update(node.outputs)
    free.update({value: None for value in graph.outputs if value not in own})
    return list(free)
