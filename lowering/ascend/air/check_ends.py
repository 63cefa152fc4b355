"""Rules of the ends of a graph (Data and NetOutput) and of subgraphs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from fa_compiler.lowering.ascend.air.decode import layout_of, split_edge
from fa_compiler.lowering.ascend.air.schema import Proto
from fa_compiler.lowering.ascend.air.slots import PARENT_INDEX
from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.passes.ir.nodes import reached

SUBGRAPH = Rule("subgraph", Severity.REJECTED, "write the graph, under exactly that name")
SUBGRAPH_LOST = Rule("subgraph-lost", Severity.WRONG, "write the graph, under exactly that name")
GRAPH_TWICE = Rule("graph-name-twice", Severity.WRONG, "give each graph its own name")
UNREACHABLE = Rule(
    "unreachable-graph", Severity.WRONG, "leave it out, or name it in an operator's subgraphs"
)
SHARED = Rule("shared-graph", Severity.WRONG, "give each operator its own copy")
PARENT = Rule(
    "parent-index", Severity.LATER, f"write {PARENT_INDEX} on Data and on the inputs of NetOutput"
)
DATA_FORM = Rule(
    "data-form",
    Severity.LATER,
    "give it an input x and an output y of one type and shape, and no edge",
)
DATA_EQUAL = Rule("data-equal", Severity.WRONG, "declare x and y alike")
DATA_INDEX = Rule("data-index", Severity.NOTE, "number the inputs 0, 1, 2 and so on")
NO_OUTPUT = Rule("no-output", Severity.NOTE, "end the graph in a NetOutput")
TWO_ENDS = Rule("two-netoutputs", Severity.WRONG, "keep one NetOutput")
DISAGREE = Rule("outputs-disagree", Severity.WRONG, "leave the graph's list of outputs empty")


def rejections(model: Proto) -> Iterator[FileDiagnostic]:
    """The subgraphs that the loader does not find. It looks for them only in a file with two graphs
    or more."""
    if len(model.graph) > 1:
        yield from (SUBGRAPH(name, message) for name, message in _missing(model))


def lost(model: Proto) -> Iterator[FileDiagnostic]:
    """The subgraphs that are not in a file with one graph, which the loader takes without them."""
    if len(model.graph) == 1:
        yield from (
            SUBGRAPH_LOST(name, f"{message}, and GE does not miss it")
            for name, message in _missing(model)
        )


def _missing(model: Proto) -> Iterator[tuple[str, str]]:
    names = {graph.name for graph in model.graph}
    for graph in model.graph:
        for op in graph.op:
            for name in op.subgraph_name:
                if name not in names:
                    yield op.name, f"its subgraph {name!r} is not in the file"


def check(model: Proto) -> Iterator[FileDiagnostic]:
    """The diagnostics of a model that the loader does not reject."""
    yield from lost(model)
    yield from _subgraphs(model)
    owners = {name: op for graph in model.graph for op in graph.op for name in op.subgraph_name}
    for graph in model.graph:
        owner = owners.get(graph.name)
        inputs = [op for op in graph.op if op.type == "Data"]
        for op in inputs:
            yield from _data(op)
        yield from _indices(graph.name, inputs)
        ends = [op for op in graph.op if op.type == "NetOutput"]
        yield from _ends(graph, ends)
        if owner is not None:
            yield from _parents(owner, inputs, ends)


def _subgraphs(model: Proto) -> Iterator[FileDiagnostic]:
    """Graphs have different names, and every graph but the root is the subgraph of one operator."""
    root = model.graph[0].name
    for name, count in Counter(graph.name for graph in model.graph).items():
        if count > 1:
            yield GRAPH_TWICE(name, f"{count} graphs have this name")
    uses = Counter(name for graph in model.graph for op in graph.op for name in op.subgraph_name)
    for name, count in uses.items():
        if count > 1:
            yield SHARED(name, f"the graph is the subgraph of {count} operators")
    used = _reached(model)
    for graph in model.graph[1:]:
        if graph.name not in used:
            yield UNREACHABLE(graph.name, "no operator has this graph as a subgraph")
    if uses[root]:
        yield SHARED(root, "the root graph is the subgraph of an operator")


def _reached(model: Proto) -> set[str]:
    """The names of the root graph and of the graphs in it."""
    inner = {
        graph.name: [name for op in graph.op for name in op.subgraph_name] for graph in model.graph
    }
    return set(reached([model.graph[0].name], lambda name: inner.get(name, ())))


def _data(op: Proto) -> Iterator[FileDiagnostic]:
    if len(op.input_desc) != 1 or len(op.output_desc) != 1:
        yield DATA_FORM(
            op.name, f"Data has {len(op.input_desc)} inputs and {len(op.output_desc)} outputs"
        )
        return
    if any(edge is not None and edge[1] >= 0 for edge in map(split_edge, op.input)):
        yield DATA_FORM(op.name, "an edge leads into Data")
    x, y = op.input_desc[0], op.output_desc[0]
    for what, left, right in (
        ("types", x.dtype, y.dtype),
        ("shapes", list(x.shape.dim), list(y.shape.dim)),
        ("layouts", layout_of(x), layout_of(y)),
    ):
        if left != right:
            yield DATA_EQUAL(op.name, f"its input and output have different {what}")


def _indices(graph: str, inputs: list[Proto]) -> Iterator[FileDiagnostic]:
    indices = [op.attr["index"].i if "index" in op.attr else -1 for op in inputs]
    if sorted(indices) != list(range(len(inputs))):
        yield DATA_INDEX(
            graph,
            f"Data are numbered {indices}: GE numbers them by their order in the file instead",
        )


def _ends(graph: Proto, ends: list[Proto]) -> Iterator[FileDiagnostic]:
    listed = dict.fromkeys(edge for edge in map(split_edge, graph.output) if edge is not None)
    if len(ends) > 1:
        yield TWO_ENDS(ends[1].name, "the graph has more than one NetOutput")
    elif ends and listed:
        named = dict.fromkeys(
            edge for edge in map(split_edge, ends[0].input) if edge is not None and edge[1] >= 0
        )
        if list(named) != list(listed):
            yield DISAGREE(
                ends[0].name, "NetOutput and the graph's list of outputs name different tensors"
            )
    elif not ends and not listed:
        yield NO_OUTPUT(graph.name, "the graph has no outputs")


def _parents(owner: Proto, inputs: list[Proto], ends: list[Proto]) -> Iterator[FileDiagnostic]:
    for op in inputs:
        index = op.attr[PARENT_INDEX].i if PARENT_INDEX in op.attr else -1
        if not 0 <= index < len(owner.input_desc):
            yield PARENT(
                op.name, f"it stands for no input of {owner.name}, the operator that runs its graph"
            )
    for op in ends:
        for desc in op.input_desc:
            index = desc.attr[PARENT_INDEX].i if PARENT_INDEX in desc.attr else -1
            if not 0 <= index < len(owner.output_desc):
                yield PARENT(op.name, f"its input {desc.name} stands for no output of {owner.name}")
