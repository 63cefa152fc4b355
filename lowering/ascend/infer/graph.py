"""Applies the rules to a whole model, in order of the edges, and compares the results with what the file declares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from fa_compiler.lowering.ascend.graph import UNDEFINED, UNKNOWN, Graph, Model, Op, TensorDesc, Weight
from fa_compiler.lowering.ascend.infer import RULES, Fact, Misfit, OpFacts
from fa_compiler.lowering.ascend.infer.rules import fits
from fa_compiler.op_registry.dtypes import to_numpy

_FOLLOWED = ("DT_INT32", "DT_INT64", "DT_BOOL")
_MOST = 64
"""Elements of a constant whose values are followed: shapes, axes, bounds."""

_ENDS = ("NetOutput",)

_DEEPEST = 50
"""Subgraphs within subgraphs that are walked; models have two or three."""


@dataclass
class Walk:
    """What came of a model: `misfits` are operators that cannot take their inputs, `differences` descriptors that say
    another thing than what is inferred, both as (operator, sentence); `ruleless` is how many operators of a type have
    no rule."""

    misfits: list[tuple[str, str]] = field(default_factory=list)
    differences: list[tuple[str, str]] = field(default_factory=list)
    ruleless: dict[str, int] = field(default_factory=dict)


def walk(model: Model) -> Walk:
    """Infer types and shapes through a model whose edges link and have no loop."""
    result = Walk()
    graphs = {graph.name: graph for graph in model.graphs}
    if model.graphs:
        _Walker(graphs, result).graph(model.root, {})
    return result


class _Walker:
    def __init__(self, graphs: Mapping[str, Graph], result: Walk) -> None:
        self.graphs = graphs
        self.result = result
        self._entered = set(list(graphs)[:1])  # the root
        self._depth = 0

    def graph(self, graph: Graph, passed: Mapping[int, Fact]) -> list[Fact]:
        """The facts of a graph's outputs; `passed` are those of the inputs of the operator that runs it."""
        import networkx as nx  # a tenth of a second, which only what needs shapes waits for

        ops = {op.name: op for op in graph.ops}
        after = nx.DiGraph()
        after.add_nodes_from(ops)
        after.add_edges_from((source.op, op.name) for op in graph.ops for source in op.inputs if source is not None)
        try:
            order = [name for name in nx.topological_sort(after) if name in ops]
        except nx.NetworkXUnfeasible:
            return []
        facts: dict[tuple[str, int], Fact] = {}
        outputs: list[Fact] = []
        self._depth += 1
        for name in order:
            op = ops[name]
            inputs = dict(self._inputs(op, facts))
            if op.type in _ENDS:
                outputs = list(inputs.values())
                continue
            for index, fact in enumerate(self._outputs(op, inputs, passed)):
                facts[op.name, index] = fact
        self._depth -= 1
        return outputs

    def _inputs(self, op: Op, facts: Mapping[tuple[str, int], Fact]) -> Iterator[tuple[str, Fact]]:
        """The facts of what is connected, by name, compared with what the descriptors say."""
        for source, desc in zip(op.inputs, op.input_descs, strict=False):
            if source is None:
                continue
            fact = facts.get((source.op, source.index), Fact(""))
            self._compare(op, f"input {desc.name}", desc, fact)
            yield desc.name, fact

    def _outputs(self, op: Op, inputs: Mapping[str, Fact], passed: Mapping[int, Fact]) -> list[Fact]:
        declared = [_declared(desc) for desc in op.output_descs]
        try:
            found = self._infer(op, inputs, passed, declared)
        except Misfit as misfit:
            self.result.misfits.append((op.name, str(misfit)))
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
            parent = op.attrs.get("_parent_node_index")
            return (
                [passed.get(parent.value, Fact(""))]
                if parent is not None and isinstance(parent.value, int)
                else declared
            )
        if op.type in ("Const", "Constant"):
            attr = op.attrs.get("value")
            return [constant(attr.value)] if attr is not None and isinstance(attr.value, Weight) else declared
        if op.subgraphs:
            return self._branches(op, inputs, declared)
        rule = RULES.get(op.type)
        if rule is None:
            self.result.ruleless[op.type] = self.result.ruleless.get(op.type, 0) + 1
            return declared
        if not inputs:
            raise Misfit("it has no inputs")
        found = list(rule(OpFacts(op, inputs)))
        sizes = [size for fact in found for size in fact.shape or ()]
        if any(size < UNKNOWN for size in sizes):
            raise Misfit(f"a size of its output is {min(sizes)}")
        return found

    def _branches(self, op: Op, inputs: Mapping[str, Fact], declared: list[Fact]) -> list[Fact]:
        """What both branches of an If agree on. Loops, whose sizes may change from round to round, say nothing."""
        given = dict(enumerate(_by_anchor(op, inputs)))
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
                raise Misfit(f"a branch has {len(outputs)} outputs, the operator {len(declared)}")
        return [_common(facts) for facts in zip(*results, strict=True)]

    def _enter(self, name: str) -> bool:
        """May a subgraph be walked? Each once, and no deeper than models go: another rule tells of shared ones."""
        if name in self._entered or self._depth > _DEEPEST:
            return False
        self._entered.add(name)
        return True

    def _compare(self, op: Op, what: str, desc: TensorDesc, fact: Fact) -> None:
        if desc.dtype != UNDEFINED and fact.dtype and desc.dtype != fact.dtype:
            self.result.differences.append((op.name, f"{what} is declared {desc.dtype}, but is {fact.dtype}"))
        if not fits(desc.shape, fact.shape):
            sentence = f"{what} is declared {_text(desc.shape)}, but is {_text(fact.shape)}"
            self.result.differences.append((op.name, sentence))


def _by_anchor(op: Op, inputs: Mapping[str, Fact]) -> list[Fact]:
    return [inputs.get(desc.name, Fact("")) for desc in op.input_descs]


def _declared(desc: TensorDesc) -> Fact:
    return Fact("" if desc.dtype == UNDEFINED else desc.dtype, desc.shape)


def _both(stated: Fact, found: Fact) -> Fact:
    """What is inferred, completed by what is declared; where they differ GE takes what it infers."""
    if not fits(stated.shape, found.shape):
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
    sizes = tuple(column[0] if len({*column}) == 1 else UNKNOWN for column in zip(*known, strict=True))
    return Fact(types.pop() if len(types) == 1 else "", sizes)


def constant(weight: Weight) -> Fact:
    """The fact of a constant, its elements included where it is a small tensor of integers."""
    value = None
    known = all(size >= 0 for size in weight.shape)  # another rule tells of a constant with an open size
    if known and weight.dtype in _FOLLOWED and int(np.prod(weight.shape, dtype=object)) <= _MOST:
        try:
            array = np.frombuffer(weight.load(), to_numpy(weight.dtype)).reshape(weight.shape)
        except (ValueError, OSError):  # too few bytes or a missing file, which another rule tells
            return Fact(weight.dtype, weight.shape)
        value = np.empty(weight.shape, dtype=object)
        value[...] = array.astype(object)
    return Fact(weight.dtype, weight.shape, value)


def _text(shape: tuple[int, ...] | None) -> str:
    return "of unknown rank" if shape is None else f"[{', '.join('?' if size < 0 else str(size) for size in shape)}]"
