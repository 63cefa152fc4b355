"""Symbolic shapes, dtypes and small integer contents of every value of a model.

What is trusted, so that the equality of two `Dim`s may be relied upon:

- Graph inputs: the declared static dims (ONNX Runtime refuses other sizes) and the declared names.
  One name is one size in all inputs, as the ONNX specification says of `dim_param`; a run that
  feeds two sizes under one name is outside what is promised. A name that is a sum or product of
  names ("past + 1", as torch writes) is that expression. A name that is a number from 2 upwards is
  this size: torch writes "8" where an axis was asked to be dynamic, and the model only works
  with 8. The number of the axis itself ("1" for axis 1) says nothing. An unnamed dim is a fresh
  symbol, and so is one whose name has no letter: "-1" and "?" say that a size is open, not that two
  sizes are the same.
- Initializers and Constants. An initializer that is also a graph input of a model of IR version 4
  or later can be replaced by the caller, so only its declaration counts.
- The operators, as the rules in `ops/` state them, for runs that succeed: sizes that must agree for
  the operator to work are taken to agree in its result. No such agreement is carried to other
  values, so a branch that is not taken proves nothing. The convolutions of the main graph are the
  exception, see `conv_lengths`.
- Exporter value_info of intermediate values is not trusted: TorchScript writes the sizes it traced
  beside operators it does not know. For an operator without a rule only the declared rank and dtype
  are kept, with fresh dims; a rank does not depend on the run that was traced.
- Everything else is a fresh symbol, equal to nothing but itself.

Sizes may be 0 (a first decoding step has no past). Two kinds of runs are left out. In one, ONNX
Runtime departs from the operators' definitions: its reductions keep the reduced axis of an empty
tensor, and its Concat skips an empty tensor of other sizes. In the other, a Reshape target that is
computed from sizes holds a 0 (see `reshape.reshaped`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim, named
from fa_compiler.passes.ir.nodes import (
    all_nodes,
    domain_of,
    int_attr,
    is_op,
    opset,
    producer,
    remember_imports,
    sole,
)
from fa_compiler.passes.ops import RULES, Context, Fact, UnresolvedError
from fa_compiler.passes.ops.context import (
    UNKNOWN,
    Content,
    Shape,
    as_dim,
    axis_in,
    content_fact,
    dim_array,
    fresh,
    or_fresh,
    rank_of,
    with_dims,
)
from fa_compiler.passes.ops.generate import tensor_fact
from fa_compiler.passes.values.conv_lengths import least_sizes
from fa_compiler.passes.values.large_constants import LargeConstants
from fa_compiler.passes.values.position_contents import BlockLabels

__all__ = ["Fact", "ShapeInfo", "analyse"]

SMALLEST_NUMERAL = 2
"""Names that are smaller numbers are no sizes: a 1 that only looks like one would change what is
broadcast."""

_LOOPS, _ROUNDS = 2, 8
"""No sizes are known of the states of a loop that lies inside `_LOOPS` others, or whose sizes have
not settled after `_ROUNDS` walks of its body. Without these limits a file with nested loops would
be walked for years. The whole model is walked at most so often, too, after the first time."""

_OVERRIDABLE = 4
"""The IR version from which an initializer that is also a graph input can be replaced by the
caller."""

_Functions = Mapping[ir.OperatorIdentifier, ir.Function]


def analyse(model: ir.Model | ir.Graph) -> ShapeInfo:
    """Walk the main graph, its subgraphs and the function bodies once, and again where the
    convolutions tell more of how divisions of sizes are rounded.

    Function bodies are walked with unknown inputs and attributes; a call's outputs come from
    walking the body with what the caller gives. Time is linear in the number of nodes and calls.
    """
    overridable, functions = True, dict[ir.OperatorIdentifier, ir.Function]()
    if isinstance(model, ir.Model):
        overridable = model.ir_version is None or model.ir_version >= _OVERRIDABLE
        functions, main = dict(model.functions), model.graph
    else:
        main = model
    bodies: list[ir.Graph | ir.Function] = [main, *functions.values()]
    for body in bodies:
        remember_imports(body)

    def walked(least: Mapping[str, int]) -> ShapeInfo:
        info = ShapeInfo(functions, main, overridable=overridable, least=least)
        for body in bodies:
            info.walk(body)
        return info

    info, known = walked({}), dict[str, int]()
    for _ in range(_ROUNDS):
        least = least_sizes(main, info.shape) if info.has_open_roundings() else known
        if least == known:
            break
        info, known = walked(least), least
    return info


class ShapeInfo:
    """What is known of each value. For values that are made later it is inferred on demand."""

    def __init__(
        self,
        functions: _Functions,
        main: ir.Graph | None,
        *,
        overridable: bool,
        least: Mapping[str, int] | None = None,
    ) -> None:
        """`least` holds lower bounds of named sizes of the inputs."""
        self._functions = functions
        self._main = main
        self._least = least or {}
        self._overridable = overridable
        self._facts: dict[ir.Value, Fact] = {}
        self._bound: Mapping[str, ir.Attr] = {}
        self._calls: frozenset[ir.OperatorIdentifier] = frozenset()
        self._open: set[ir.Node] = set()
        self._loops = 0
        self.large = LargeConstants()
        self.labels = BlockLabels()

    # -- questions: of an absent input nothing is known ---------------------------------------

    def shape(self, value: ir.Value | None) -> Shape | None:
        """The symbolic shape, None when not even the rank is known."""
        return self.fact(value).shape

    def sizes(self, value: ir.Value | None) -> Shape:
        """The symbolic shape, as far as one is known: () when not even the rank is."""
        return self.fact(value).shape or ()

    def dtype(self, value: ir.Value | None) -> ir.DataType | None:
        """The element type."""
        return self.fact(value).dtype

    def content(self, value: ir.Value | None) -> tuple[Dim, ...] | Dim | None:
        """The elements of a small integer or boolean (0, 1) tensor: a Dim for 0-D, a tuple for
        1-D."""
        content = self.fact(value).content
        if content is None or content.dtype != object or content.ndim > 1:
            return None
        items: tuple[Dim, ...] = tuple(content.reshape(-1))
        return items if content.ndim else items[0]

    def integer(self, value: ir.Value | None) -> Dim | None:
        """The one element of a small integer tensor of rank 0 or 1; None when it is unknown."""
        content = self.content(value)
        return sole(content) if isinstance(content, tuple) else content

    def scalar(self, value: ir.Value | None) -> float | None:
        """The one element of a tensor of rank 0 or with all dims 1, when it is the same in every
        run.

        Computed in the tensor's dtype, each operation rounded as ONNX Runtime rounds it (square
        roots and the four operations exactly; powers and exponentials to the last bit or two).
        """
        content = self.fact(value).content
        if content is None or content.size != 1:
            return None
        item = content.reshape(-1)[0]
        return if_known(float, item.const) if isinstance(item, Dim) else float(item)

    def fact(self, value: ir.Value | None) -> Fact:
        """All that is known of `value`, inferred now when it was not seen before."""
        if value is None:
            return UNKNOWN
        fact = self._facts.get(value)
        if fact is None:
            maker = value.producer()
            if maker is None:
                fact = self._facts[value] = self._leaf(value)
            elif maker in self._open:
                # The graph has a cycle, so the model is not valid.
                return UNKNOWN
            else:
                self._ensure(maker)
                fact = self._facts.get(value, UNKNOWN)
        return fact

    def has_open_roundings(self) -> bool:
        """Is an integer known only as a quotient that may be negative, and that is rounded toward
        zero then? Or does the model ask for the sign of a size, to round it down?"""
        return any(itertools.chain.from_iterable(map(self._open_roundings, self._facts)))

    def _open_roundings(self, value: ir.Value) -> Iterator[bool]:
        """For each followed integer of a value, whether it is such a quotient or sign."""
        content = self._facts[value].content
        if content is None or content.dtype != object:
            return
        is_sign = is_op(value.producer(), "Sign")
        for dim in content.flat:
            yield (is_sign and not dim.is_const) or any(atom.op == "trunc" for atom in dim.atoms)

    # -- updates ------------------------------------------------------------------------------

    def set(
        self,
        value: ir.Value,
        shape: Iterable[Dim | int] | None,
        dtype: ir.DataType | None = None,
        content: Sequence[Dim | int] | Dim | int | None = None,
    ) -> None:
        """State what is known of a value, as a pass does for one that it made."""
        dims = None if shape is None else tuple(map(as_dim, shape))
        if dtype is None:
            dtype = value.dtype
        if content is None:
            self._facts[value] = Fact(dims, dtype)
        else:
            items = list(content) if isinstance(content, Sequence) else content
            self._facts[value] = content_fact(dim_array(items), dtype)

    def infer_node(self, node: ir.Node) -> None:
        """Infer the outputs of one node anew from what is known of its inputs."""
        facts = [None if value is None else self.fact(value) for value in node.inputs]
        results = [*self._infer(node, facts), *[UNKNOWN] * len(node.outputs)]
        for output, result in zip(node.outputs, results, strict=False):
            fact = _possible(result)
            if fact.dtype is None and output.dtype is not None:
                # A dtype that is wrong makes ONNX Runtime refuse the model, so a declared one
                # holds.
                fact = Fact(fact.shape, output.dtype, fact.content)
            self._facts[output] = fact

    def walk(self, graph: ir.Graph | ir.Function) -> None:
        """Infer every value of a graph or function body, subgraphs included."""
        facts = self._facts
        for node in graph:
            if not all(
                value is None or value in facts or value.producer() is None for value in node.inputs
            ):
                self._ensure(node)
            elif not node.outputs or not all(output in facts for output in node.outputs):
                self._open.add(node)
                self.infer_node(node)
                self._open.discard(node)

    # -- internals ----------------------------------------------------------------------------

    def _ensure(self, node: ir.Node) -> None:
        """Infer `node` after the producers of its inputs, whatever order the graph lists them
        in."""
        waiting = [node]
        while waiting:
            current = waiting[-1]
            if current.outputs and all(output in self._facts for output in current.outputs):
                waiting.pop()
                continue
            if current not in self._open:
                self._open.add(current)
                missing = self._missing(current)
                if missing:
                    waiting.extend(missing)
                    continue
            self.infer_node(current)
            self._open.discard(current)
            waiting.pop()

    def _missing(self, node: ir.Node) -> list[ir.Node]:
        """The producers of the inputs of which nothing was inferred yet. Those that are waited for
        are left out."""
        makers = (producer(value) for value in node.inputs if value not in self._facts)
        return [maker for maker in makers if maker is not None and maker not in self._open]

    def _leaf(self, value: ir.Value) -> Fact:
        """A value without a producer: an initializer, an input of the main graph, or another
        input."""
        tensor = value.const_value
        is_input = value.is_graph_input()
        if tensor is not None and not (is_input and self._overridable):
            return tensor_fact(tensor)
        if is_input and value.graph is self._main and value.shape is not None:
            return Fact(
                tuple(_declared(dim, axis, self._least) for axis, dim in enumerate(value.shape)),
                value.dtype,
            )
        return Fact(None, value.dtype)

    def _infer(self, node: ir.Node, facts: list[Fact | None]) -> Sequence[Fact]:
        function = self._functions.get(node.op_identifier())
        if function is not None:
            return self._call(node, function, facts)
        domain = domain_of(node)
        context = Context(node, facts, node.version or opset(node, domain), self._bound)
        try:
            if is_op(node, "If", "Loop", "Scan"):
                return self._control(context)
            rule = RULES.get((domain, node.op_type), _unknown)
            result = rule(context)
        except UnresolvedError:
            return []
        return [result] if isinstance(result, Fact) else result

    def _call(
        self, node: ir.Node, function: ir.Function, facts: list[Fact | None]
    ) -> Sequence[Fact]:
        if node.op_identifier() in self._calls:
            return []
        inner = ShapeInfo(self._functions, None, overridable=self._overridable)
        inner._calls = self._calls | {node.op_identifier()}
        inner._loops = self._loops
        inner._bound = self._arguments(node, function)
        for value, given in zip(
            function.inputs, [*facts, *[None] * len(function.inputs)], strict=False
        ):
            inner._facts[value] = given or UNKNOWN
        inner.walk(function)
        return [inner.fact(value) for value in function.outputs]

    def _arguments(self, node: ir.Node, function: ir.Function) -> dict[str, ir.Attr]:
        """The function's attributes in this call: defaults, overridden by those of the node."""
        bound = {name: attr for name, attr in function.attributes.items() if attr.value is not None}
        for name, attr in node.attributes.items():
            given = self._bound.get(attr.ref_attr_name or "") if attr.is_ref() else attr
            if given is None:
                bound.pop(name, None)
            else:
                bound[name] = given
        return bound

    def _control(self, context: Context) -> Sequence[Fact]:
        attributes = context.node.attributes.values()
        bodies = [attr.as_graph() for attr in attributes if attr.type == ir.AttributeType.GRAPH]
        if is_op(context.node, "If"):
            return self._branches(context, bodies)
        return self._iterations(context, bodies[0]) if bodies else []

    def _branches(self, context: Context, bodies: Sequence[ir.Graph]) -> Sequence[Fact]:
        """The results of an If: those of the branch that every run takes, else what both branches
        have in common."""
        for body in bodies:
            self.walk(body)
        taken = _taken(context)
        if taken is not None:
            return [self.fact(value) for value in taken.outputs]
        if len(bodies) != 2:
            return []
        then, otherwise = (map(self.fact, body.outputs) for body in bodies)
        return [_either(*pair) for pair in zip(then, otherwise, strict=False)]

    def _iterations(self, context: Context, body: ir.Graph) -> Sequence[Fact]:
        """The results of a Loop or Scan."""
        form = _LoopForm.of(context)
        if not 0 <= form.slices <= len(context.node.inputs):
            return []
        carried = self._walk_loop(context, body, form)
        # The other results of a body may differ from one iteration to the next, so no size of them
        # is known.
        results = body.outputs[form.results_before :]
        # the body has fewer values than the operator gives it
        if not len(carried) == form.states <= len(results):
            return []
        known = [*carried, *[None] * (len(results) - form.states)]
        return [
            Fact(shape, value.dtype or self.dtype(value))
            for shape, value in zip(known, results, strict=True)
        ]

    def _walk_loop(self, context: Context, body: ir.Graph, form: _LoopForm) -> list[Shape | None]:
        """Walk the body of a Loop or Scan, and return the shapes of its states.

        The states change from one iteration to the next. A state keeps a size if it starts with
        this size, and if the body returns it with this size in every iteration in which all states
        have their kept sizes. Ranks are treated alike. A slice of a Scan has the shape of its
        tensor without the scanned axis.
        """
        first, states = form.inputs_before, form.states
        self._give_counters(context, body, states)
        carried = list(
            zip(
                body.inputs[first : first + states],
                body.outputs[form.results_before :],
                strict=False,
            )
        )
        starts = [context.fact(first + index) for index in range(len(carried))]
        kept: list[tuple[Dim | None, ...] | None] = [start.shape for start in starts]
        for rounds in itertools.count():
            if self._loops >= _LOOPS or rounds >= _ROUNDS:
                kept = [None] * len(starts)
            given = [_with_unknown(sizes) for sizes in kept]
            for (value, _), shape, start in zip(carried, given, starts, strict=True):
                self._facts[value] = Fact(shape, value.dtype or start.dtype)
            self._forget(body)
            self._loops += 1
            self.walk(body)
            self._loops -= 1
            returned = [self.shape(result) for _, result in carried]
            still_kept = list(map(_common_sizes, kept, returned))
            if still_kept == kept:
                return given
            kept = still_kept
        raise AssertionError("unreachable")

    def _give_counters(self, context: Context, body: ir.Graph, states: int) -> None:
        """State what is known of the inputs of a body that are no states: the number of the
        iteration and the condition of a Loop, the slices of a Scan."""
        for value in body.inputs:
            self._facts[value] = Fact(None, value.dtype)
        if is_op(context.node, "Scan"):
            self._give_slices(context, body, states)
            return
        for value, dtype in zip(
            body.inputs[:2], (ir.DataType.INT64, ir.DataType.BOOL), strict=False
        ):
            self._facts[value] = Fact((), dtype)

    def _give_slices(self, context: Context, body: ir.Graph, states: int) -> None:
        """Set the shapes of the slices that a Scan gives to its body."""
        slices = body.inputs[states:]
        axes = [*(context.ints_attr("scan_input_axes") or ()), *[0] * len(slices)]
        for place, (value, scanned) in enumerate(zip(slices, axes, strict=False), states):
            shape = context.shape(place)
            axis = axis_in(scanned, rank_of(shape))
            if shape is not None and axis is not None and context.opset >= 9:
                self._facts[value] = Fact(with_dims(shape, axis), value.dtype)

    def _forget(self, body: ir.Graph) -> None:
        for node in all_nodes(body):
            for output in node.outputs:
                self._facts.pop(output, None)


@dataclass(frozen=True)
class _LoopForm:
    """The number of the states of a Loop or Scan, and what it has before them: inputs of the
    operator, and results of its body. A Scan has slices behind its states."""

    inputs_before: int
    results_before: int
    slices: int
    states: int

    @staticmethod
    def of(context: Context) -> _LoopForm:
        """The form of one operator. A Loop has the number of its iterations and its condition."""
        inputs = len(context.node.inputs)
        if not is_op(context.node, "Scan"):
            return _LoopForm(2, 1, 0, inputs - 2)
        slices = int_attr(context.node, "num_scan_inputs", 0)
        states = inputs - slices if context.opset >= 9 else 0  # an older Scan has a batch dimension
        return _LoopForm(0, 0, slices, states)


def _with_unknown(sizes: tuple[Dim | None, ...] | None) -> Shape | None:
    """A shape with a fresh size wherever a state keeps none."""
    if sizes is None:
        return None
    return tuple(map(or_fresh, sizes))


def _common_sizes(
    sizes: tuple[Dim | None, ...] | None, shape: Shape | None
) -> tuple[Dim | None, ...] | None:
    """The sizes that a state was given and is returned with; None when its rank is not the same or
    unknown."""
    if sizes is None or shape is None or len(sizes) != len(shape):
        return None
    return tuple(own if own == other else None for own, other in zip(sizes, shape, strict=True))


def _declared(dim: int | ir.SymbolicDim, axis: int, least: Mapping[str, int]) -> Dim:
    """The size of an axis of an input, as it is declared."""
    if isinstance(dim, int):
        return Dim(dim) if dim >= 0 else Dim.fresh()
    name = dim.value or ""
    if name.isdecimal() and name != str(axis) and int(name) >= SMALLEST_NUMERAL:
        return Dim(int(name))
    if not any(map(str.isalpha, name)):
        return Dim.fresh()
    size = named(name)
    return size.substitute(
        {atom: Dim.symbol(atom.name, least[atom.name]) for atom in size.atoms if atom.name in least}
    )


def _possible(fact: Fact) -> Fact:
    """The fact with unknown sizes in place of negative ones, which no run that succeeds has."""
    if fact.shape is None or all(dim.const is None or dim.const >= 0 for dim in fact.shape):
        return fact
    return Fact(
        tuple(Dim.fresh() if (dim.const or 0) < 0 else dim for dim in fact.shape), fact.dtype
    )


def _unknown(context: Context) -> Sequence[Fact]:
    """What is known of the results of an operator without a rule: their declared ranks and
    types."""
    return [Fact(fresh(if_known(len, value.shape)), value.dtype) for value in context.node.outputs]


def _taken(context: Context) -> ir.Graph | None:
    """The branch that an If takes in every run; None when it is unknown. TorchScript tests whether
    a constant size is 1 before it squeezes the axis."""
    condition = sole(context.ints(0))
    name = "then_branch" if condition else "else_branch"
    branch = context.node.attributes.get(name)
    return None if condition is None or branch is None else branch.as_graph()


def _either(a: Fact, b: Fact) -> Fact:
    """What is known of a value that is one of two others."""
    dtype = a.dtype if a.dtype == b.dtype else None
    shape = _with_unknown(_common_sizes(a.shape, b.shape))
    return Fact(shape, dtype, _same_content(a.content, b.content))


def _same_content(a: Content | None, b: Content | None) -> Content | None:
    """The content that two values have in common: all of it, or nothing. A NaN is equal to a
    NaN."""
    if a is None or b is None or a.dtype != b.dtype:
        return None
    return a if np.array_equal(a, b, equal_nan=a.dtype != object) else None
