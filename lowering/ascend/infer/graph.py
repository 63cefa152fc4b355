"""Applies the rules to a whole model, in the order of the edges, and compares the results with the
declared shapes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fa_compiler.lowering.ascend.graph import (
    UNDEFINED,
    UNKNOWN,
    Graph,
    Model,
    Op,
    TensorDesc,
    Weight,
)
from fa_compiler.lowering.ascend.infer import Fact, InferenceError, can_infer, infer
from fa_compiler.lowering.ascend.infer.facts import shapes_agree
from fa_compiler.op_registry.dtypes import to_numpy
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import Kind

_TRACKED_TYPES = ("DT_INT32", "DT_INT64", "DT_BOOL")
_MAX_ELEMENTS = 64
"""The most elements of a constant whose values are tracked: shapes, axes, bounds."""

_MAX_DEPTH = 50
"""The deepest nesting of subgraphs that is inferred; models have two or three levels."""


@dataclass
class InferenceResult:
    """The result of the inference of a model.

    `errors` are the operators that cannot take their inputs, `differences` the descriptors that
    differ from the inferred types and shapes, both as (operator, sentence). `without_rule` is the
    number of operators of each type without a rule.
    """

    errors: list[tuple[str, str]] = field(default_factory=list)
    differences: list[tuple[str, str]] = field(default_factory=list)
    without_rule: dict[str, int] = field(default_factory=dict)


def infer_model(model: Model) -> InferenceResult:
    """Infer the types and shapes of a model whose edges link and form no loop."""
    result = InferenceResult()
    graphs = {graph.name: graph for graph in model.graphs}
    if model.graphs:
        _Inference(graphs, result).graph(model.root, {})
    return result


class _Inference:
    def __init__(self, graphs: Mapping[str, Graph], result: InferenceResult) -> None:
        self.graphs = graphs
        self.result = result
        self._entered = set(list(graphs)[:1])  # the root
        self._depth = 0

    def graph(self, graph: Graph, passed: Mapping[int, Fact]) -> list[Fact]:
        """The facts of a graph's outputs. `passed` are the facts of the inputs of the operator that
        owns the graph."""
        try:
            order = graph.ordered()
        except ValueError:
            return []
        facts: dict[tuple[str, int], Fact] = {}
        outputs: list[Fact] = []
        self._depth += 1
        for op in order:
            inputs = dict(self._inputs(op, facts))
            if op.type == "NetOutput":
                outputs = list(inputs.values())
                continue
            for index, fact in enumerate(self._outputs(op, inputs, passed)):
                facts[op.name, index] = fact
        self._depth -= 1
        return outputs

    def _inputs(self, op: Op, facts: Mapping[tuple[str, int], Fact]) -> Iterator[tuple[str, Fact]]:
        """The facts of the connected inputs by name. They are compared with the descriptors."""
        for source, desc in zip(op.inputs, op.input_descs, strict=False):
            if source is None:
                continue
            fact = facts.get((source.op, source.index), Fact(""))
            self._compare(op, f"input {desc.name}", desc, fact)
            yield desc.name, fact

    def _outputs(
        self, op: Op, inputs: Mapping[str, Fact], passed: Mapping[int, Fact]
    ) -> list[Fact]:
        declared = [_declared(desc) for desc in op.output_descs]
        try:
            found = self._infer(op, inputs, passed, declared)
        except InferenceError as error:
            self.result.errors.append((op.name, str(error)))
            return declared
        if len(found) < len(declared):
            found = [*found, *[Fact("")] * (len(declared) - len(found))]
        for desc, fact in zip(op.output_descs, found, strict=False):
            self._compare(op, f"output {desc.name}", desc, fact)
        return [_both(stated, fact) for stated, fact in zip(declared, found, strict=False)]

    def _infer(
        self, op: Op, inputs: Mapping[str, Fact], passed: Mapping[int, Fact], declared: list[Fact]
    ) -> list[Fact]:
        if op.type == "Data":
            parent = _value_of(op, "_parent_node_index")
            return [passed.get(parent, Fact(""))] if isinstance(parent, int) else declared
        if op.type in ("Const", "Constant"):
            weight = _value_of(op, "value")
            return [constant(weight)] if isinstance(weight, Weight) else declared
        if op.subgraphs:
            return self._branches(op, inputs, declared)
        if not can_infer(op.type):
            self.result.without_rule[op.type] = self.result.without_rule.get(op.type, 0) + 1
            return declared
        if not inputs and needs_input(op.type):
            raise InferenceError("it has no inputs")
        found = infer(op, inputs)
        sizes = [size for fact in found for size in fact.shape or ()]
        if any(size < UNKNOWN for size in sizes):
            raise InferenceError(f"a size of its output is {min(sizes)}")
        return found

    def _branches(self, op: Op, inputs: Mapping[str, Fact], declared: list[Fact]) -> list[Fact]:
        """The facts that are the same in both branches of an If. For a loop nothing is inferred:
        its sizes may change in each iteration."""
        given = {
            anchor: inputs.get(desc.name, Fact("")) for anchor, desc in enumerate(op.input_descs)
        }
        passes = op.type in ("If", "_If", "StatelessIf", "Case", "StatelessCase", "PartitionedCall")
        results = [
            self.graph(self.graphs[name], given if passes else {})
            for name in op.subgraphs.values()
            if name in self.graphs and self._enter(name)
        ]
        if not passes or not results:
            return declared
        for outputs in results:
            if len(outputs) != len(declared):
                raise InferenceError(
                    f"a branch has {len(outputs)} outputs, the operator {len(declared)}"
                )
        return [_common(facts) for facts in zip(*results, strict=True)]

    def _enter(self, name: str) -> bool:
        """Whether to infer a subgraph: each only once, up to `_MAX_DEPTH`. Another rule reports
        shared subgraphs."""
        if name in self._entered or self._depth > _MAX_DEPTH:
            return False
        self._entered.add(name)
        return True

    def _compare(self, op: Op, what: str, desc: TensorDesc, fact: Fact) -> None:
        if desc.dtype != UNDEFINED and fact.dtype and desc.dtype != fact.dtype:
            self.result.differences.append(
                (op.name, f"{what} is declared {desc.dtype}, but is {fact.dtype}")
            )
        if not shapes_agree(desc.shape, fact.shape):
            sentence = f"{what} is declared {_text(desc.shape)}, but is {_text(fact.shape)}"
            self.result.differences.append((op.name, sentence))


def _value_of(op: Op, name: str) -> object:
    """What an attribute holds; None where the operator does not have it."""
    attr = op.attrs.get(name)
    return None if attr is None else attr.value


def needs_input(op_type: str) -> bool:
    """Does the prototype of an operator have a required input? True for an unknown operator."""
    spec = ge_prototype(op_type)
    return spec is None or any(entry.kind is not Kind.OPTIONAL for entry in spec.inputs)


def _declared(desc: TensorDesc) -> Fact:
    return Fact("" if desc.dtype == UNDEFINED else desc.dtype, desc.shape)


def _both(stated: Fact, found: Fact) -> Fact:
    """The inferred fact, completed by the declared one. If they differ, GE uses the inferred
    one."""
    if not shapes_agree(stated.shape, found.shape):
        return Fact(found.dtype or stated.dtype, found.shape, found.value)
    shape = found.shape if stated.shape is None else stated.shape
    if found.shape is not None and stated.shape is not None:
        shape = tuple(max(pair) for pair in zip(stated.shape, found.shape, strict=True))
    return Fact(found.dtype or stated.dtype, shape, found.value)


def _common(facts: tuple[Fact, ...]) -> Fact:
    types, shapes = {fact.dtype for fact in facts}, [fact.shape for fact in facts]
    known = [shape for shape in shapes if shape is not None]
    if len(known) < len(shapes) or len({len(shape) for shape in known}) != 1:
        return Fact(types.pop() if len(types) == 1 else "")
    sizes = tuple(
        column[0] if len({*column}) == 1 else UNKNOWN for column in zip(*known, strict=True)
    )
    return Fact(types.pop() if len(types) == 1 else "", sizes)


def constant(weight: Weight) -> Fact:
    """The fact of a constant, with its elements if it is a small tensor of integers."""
    value = None
    # another rule reports a constant with an unknown size
    known = all(size >= 0 for size in weight.shape)
    if (
        known
        and weight.dtype in _TRACKED_TYPES
        and int(np.prod(weight.shape, dtype=object)) <= _MAX_ELEMENTS
    ):
        try:
            array = np.frombuffer(weight.load(), to_numpy(weight.dtype)).reshape(weight.shape)
        except (ValueError, OSError):  # too few bytes or a missing file; another rule reports it
            return Fact(weight.dtype, weight.shape)
        value = np.empty(weight.shape, dtype=object)
        value[...] = array.astype(object)
    return Fact(weight.dtype, weight.shape, value)


def _text(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "of unknown rank"
    return f"[{', '.join('?' if size < 0 else str(size) for size in shape)}]"
