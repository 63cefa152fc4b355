"""Rules of edges: GE links them after it has made all nodes, and sorts the nodes by them
afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from fa_compiler.lowering.ascend.air.decode import (
    data_edges,
    has_index,
    layout_of,
    split_edge,
    type_name,
)
from fa_compiler.lowering.ascend.air.schema import Proto
from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.lowering.ascend.graph import UNDEFINED

NO_GRAPH = Rule("no-graph", Severity.REJECTED, "write the root graph as ModelDef.graph[0]")
SOURCE = Rule("edge-source", Severity.REJECTED, "name an operator of the same graph")
OUTPUT = Rule(
    "edge-output", Severity.REJECTED, "give the source a descriptor for every output that is read"
)
ANCHOR = Rule("edge-anchor", Severity.REJECTED, "give the operator a descriptor for every input")
INDEX = Rule(
    "edge-index",
    Severity.WRONG,
    'write "name:index" with a number from 0 on, or -1 for a control edge',
)
GRAPH_INPUT = Rule(
    "graph-input", Severity.REJECTED, "list operators of the graph, or leave the list empty"
)
GRAPH_OUTPUT = Rule(
    "graph-output", Severity.REJECTED, "list operators of the graph, or use NetOutput"
)
GRAPH_OUTPUT_IGNORED = Rule(
    "graph-output-ignored", Severity.WRONG, 'write "name:index", or use NetOutput'
)
GRAPH_OUTPUT_INDEX = Rule(
    "graph-output-index", Severity.LATER, "list outputs that the operators have"
)
DUPLICATE = Rule("duplicate-name", Severity.WRONG, "give each operator of a graph its own name")
UNLINKED = Rule(
    "unlinked-input", Severity.LATER, 'connect it, or declare it absent (type undefined, layout "")'
)
CYCLE = Rule("cycle", Severity.LATER, "break the loop")
NO_OPERATORS = Rule("no-operators", Severity.LATER, "leave the graph out, or write its operators")
NO_TYPE = Rule(
    "connected-without-type", Severity.WRONG, "declare the type and layout of the connected input"
)
NAME = Rule("empty-name", Severity.NOTE, "give it a name")

SOURCES = (
    "Data",
    "RefData",
    "AippData",
    "AnnData",
    "Const",
    "Constant",
    "Variable",
    "FileConstant",
)
"""Operators whose input descriptors, if any, need no edge."""


def rejections(model: Proto) -> Iterator[FileDiagnostic]:
    """The faults for which the loader rejects a file, in the order in which it meets them."""
    if not model.graph:
        yield NO_GRAPH("", "the file holds no graph")
    for graph in model.graph:
        ops = {op.name: op for op in graph.op}
        for op in graph.op:
            yield from _links(op, ops)
        for rule, entries in ((GRAPH_INPUT, graph.input), (GRAPH_OUTPUT, graph.output)):
            for text in entries:
                edge = split_edge(text)
                if edge is None and rule is GRAPH_OUTPUT:
                    continue  # the loader ignores it
                if edge is None or edge[0] not in ops:
                    yield rule(graph.name, f"{text!r} is listed, but names no operator")


def _links(op: Proto, ops: dict[str, Proto]) -> Iterator[FileDiagnostic]:
    anchor = 0
    for text in op.input:
        edge = split_edge(text)
        if edge is not None:
            name, index = edge
            if name not in ops:
                yield SOURCE(op.name, f"input {text!r} comes from an operator that does not exist")
            elif index >= len(ops[name].output_desc):
                yield OUTPUT(
                    op.name,
                    f"{name} has {len(ops[name].output_desc)} outputs, {text!r} reads another",
                )
            elif index >= 0 and anchor >= len(op.input_desc):
                yield ANCHOR(
                    op.name,
                    f"input {text!r} has number {anchor}, there are {len(op.input_desc)} descriptors",
                )
        if edge is None or edge[1] >= 0:
            anchor += 1


def check(graph: Proto) -> Iterator[FileDiagnostic]:
    """The faults of one graph whose edges link: GE finds them after loading, or does not notice
    them."""
    ops = {op.name: op for op in graph.op}
    if not graph.op:
        yield NO_OPERATORS(graph.name, "the graph has no operators")
    for name, count in Counter(op.name for op in graph.op).items():
        if count > 1:
            yield DUPLICATE(
                name, f"{count} operators have this name; every edge goes to the last one"
            )
        if not name:
            yield NAME(graph.name, "an operator has an empty name")
    for op in graph.op:
        yield from _misread(op.name, op.input)
        yield from _unlinked(op)
    yield from _misread(graph.name, (*graph.input, *graph.output))
    for text in graph.output:
        edge = split_edge(text)
        if edge is None:
            yield GRAPH_OUTPUT_IGNORED(
                graph.name, f"the entry {text!r} of the outputs has no index: GE ignores it"
            )
        elif not 0 <= edge[1] < len(ops[edge[0]].output_desc):
            yield GRAPH_OUTPUT_INDEX(graph.name, f"the output {text!r} does not exist")
    yield from _cycle(graph)


def _misread(node: str, entries: Iterable[str]) -> Iterator[FileDiagnostic]:
    for text in entries:
        edge = split_edge(text)
        if edge is not None and not has_index(text):
            read = "a control edge" if edge[1] < 0 else f"output {edge[1]}"
            yield INDEX(
                node,
                f"the entry {text!r} does not end in an index; GE reads it as {read} of {edge[0]!r}",
            )


def _unlinked(op: Proto) -> Iterator[FileDiagnostic]:
    if op.type in SOURCES:
        return
    edges = data_edges(op)
    for anchor, desc in enumerate(op.input_desc):
        linked = anchor < len(edges) and edges[anchor] is not None
        dtype, layout, name = (
            type_name(desc.dtype),
            layout_of(desc),
            desc.name or f"number {anchor}",
        )
        absent = dtype == UNDEFINED and layout in ("", "FORMAT_RESERVED")
        if linked and absent:
            problem = f"input {name} is connected, but declared without type and layout"
            yield NO_TYPE(op.name, f"{problem}: GE treats it as absent")
        if not linked and not absent:
            yield UNLINKED(
                op.name, f"input {name} is not connected, but declared as {dtype} {layout}".rstrip()
            )


def _cycle(graph: Proto) -> Iterator[FileDiagnostic]:
    import networkx as nx  # the import takes a tenth of a second; other commands do not need it

    edges = (
        (edge[0], op.name)
        for op in graph.op
        for edge in map(split_edge, op.input)
        if edge is not None
    )
    after = nx.DiGraph(edges)
    if nx.is_directed_acyclic_graph(after):
        return
    loop = [source for source, _ in nx.find_cycle(after)]
    shown = [*loop, loop[0]] if len(loop) < 7 else [*loop[:6], "..."]
    yield CYCLE(loop[0], f"the graph has a loop: {' -> '.join(shown)}")
