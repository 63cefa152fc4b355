"""How much a model grows when its functions are inlined, known before that is done.

Functions that call each other twice double at every level: a file of thirty small functions stands for a billion
nodes, and neither the checker nor shape inference nor ONNX Runtime comes back from it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import onnx

from fa_compiler.model_files.subgraphs import all_nodes, graphs_of

NODES = 250_000
"""Nodes that calls of functions may add to a model. What is in a file without functions has no limit."""

DEPTH = 100
"""How deep functions may call each other, as in the ONNX checker."""

NAMES = 50_000_000
"""Steps that inlining may take to find new names: it counts upwards from one for each node and value of a name."""

GRAPHS = 30
"""How deep graphs may lie in graphs once functions are inlined: what is deeper cannot be read from a file again."""

_Key = tuple[str, str, str]


def excess(model: onnx.ModelProto) -> str | None:
    """What is too much of the model's functions, on one line; None where nothing is."""
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
            return f"its functions call each other over more than {DEPTH} levels, down to '{key[1]}'"
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
    """Note for each function that is called here how many graphs lie around the call; returns the most there are."""
    deepest = depth
    for node in nodes:
        key = (node.domain, node.op_type, node.overload)
        inside[key] = max(inside[key], depth)
        for graph in graphs_of(node):
            deepest = max(deepest, _go_inside(inside, graph.node, depth + 1))
    return deepest


def _calls(nodes: Iterable[onnx.NodeProto], functions: dict[_Key, onnx.FunctionProto]) -> Counter[_Key]:
    keys = ((node.domain, node.op_type, node.overload) for node in all_nodes(nodes))
    return Counter(key for key in keys if key in functions)


def _callers_first(started: Iterable[_Key], calls: dict[_Key, Counter[_Key]]) -> list[_Key] | str:
    """The functions that are called, each before those that it calls; a sentence where one calls itself."""
    done: list[_Key] = []
    state: dict[_Key, bool] = {}  # False while those that it calls are looked at
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
