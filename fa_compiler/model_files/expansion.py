"""How much a model grows when its functions are inlined, computed before that is done.

If each function calls the next one twice, the number of nodes doubles at every level. A file of
thirty small functions then stands for a billion nodes; the checker, shape inference and ONNX
Runtime would not return from it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import onnx

from fa_compiler.protos.subgraphs import all_nodes, graphs_of

NODES = 250_000
"""The most nodes that calls of functions may add to a model. A model without functions has no
limit."""

DEPTH = 100
"""The deepest chain of calls of functions; the ONNX checker has the same limit."""

NAMES = 50_000_000
"""The most steps that inlining may take to find new names. For each node and value with a name, it
counts upwards from one until the number makes the name unique."""

GRAPHS = 30
"""The deepest nesting of graphs after functions are inlined. A model with a deeper one cannot be
read from a file."""

_Key = tuple[str, str, str]


def excess(model: onnx.ModelProto) -> str | None:
    """The limit that the model's functions exceed, as a sentence on one line; None if they exceed
    none."""
    if not model.functions:
        return None
    functions = {(each.domain, each.name, each.overload): each for each in model.functions}
    calls = {key: _calls(function.node, functions) for key, function in functions.items()}
    started = _calls(model.graph.node, functions)
    order = _callers_first(started, calls)
    if isinstance(order, str):
        return order
    counts: Counter[_Key] = Counter(started)
    levels: defaultdict[_Key, int] = defaultdict(int, dict.fromkeys(started, 1))
    inside: defaultdict[_Key, int] = defaultdict(int)
    _go_inside(inside, model.graph.node, 0)
    names: Counter[str] = Counter()
    nodes = 0
    for key in order:
        if levels[key] > DEPTH:
            return (
                f"its functions call each other over more than {DEPTH} levels, down to '{key[1]}'"
            )
        if _go_inside(inside, functions[key].node, inside[key]) > GRAPHS:
            return f"its functions put graphs into graphs over more than {GRAPHS} levels, down to '{key[1]}'"
        for callee, times in calls[key].items():
            counts[callee] += times * counts[key]
            levels[callee] = max(levels[callee], levels[key] + 1)
        for node in all_nodes(functions[key].node):
            nodes += counts[key]
            names.update(dict.fromkeys((node.name, *node.output), counts[key]))
        if nodes > NODES:
            return f"its functions stand for more than {NODES} nodes: '{key[1]}' is called {counts[key]} times"
    if sum(times * times for times in names.values()) > NAMES:
        most = max(counts, key=lambda key: counts[key])
        return f"its functions are called too often to be inlined: '{most[1]}' {counts[most]} times"
    return None


def _go_inside(inside: defaultdict[_Key, int], nodes: Iterable[onnx.NodeProto], depth: int) -> int:
    """Note the nesting depth of each call in `inside`, and return the deepest nesting of a graph in
    these nodes."""
    deepest = depth
    for node in nodes:
        key = (node.domain, node.op_type, node.overload)
        inside[key] = max(inside[key], depth)
        for graph in graphs_of(node):
            deepest = max(deepest, _go_inside(inside, graph.node, depth + 1))
    return deepest


def _calls(
    nodes: Iterable[onnx.NodeProto], functions: dict[_Key, onnx.FunctionProto]
) -> Counter[_Key]:
    keys = ((node.domain, node.op_type, node.overload) for node in all_nodes(nodes))
    return Counter(key for key in keys if key in functions)


def _callers_first(started: Iterable[_Key], calls: dict[_Key, Counter[_Key]]) -> list[_Key] | str:
    """The called functions, each before those that it calls; a sentence if a function calls
    itself."""
    done: list[_Key] = []
    state: dict[_Key, bool] = {}  # False while the functions that it calls are visited
    stack = [(key, False) for key in started]
    while stack:
        key, left = stack.pop()
        if left:
            state[key] = True
            done.append(key)
        elif key not in state:
            state[key] = False
            stack.append((key, True))
            stack.extend((callee, False) for callee in calls[key])
        elif not state[key]:
            return f"function '{key[1]}' calls itself"
    return done[::-1]
