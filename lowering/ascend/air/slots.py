"""The subgraphs of an operator in a file: a list of names in the order of the prototype.

In a subgraph, the attribute `_parent_node_index` of Data and NetOutput is the index of the
operator's input or output that they represent. The inputs before the operator's dynamic input (the
condition of If) are not passed to a subgraph.
"""

from __future__ import annotations

from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import Kind

PARENT_INDEX = "_parent_node_index"

_ORDER = (("then_branch", "else_branch"), ("cond", "body"))
"""The names of subgraphs, in the order of the prototypes, for the operators whose order is not
alphabetical."""


def slot_names(op_type: str, count: int) -> tuple[str, ...]:
    """The prototype's names of an operator's `count` subgraphs, in the order of the file.

    The names of a dynamic graph "branches" are branches0, branches1 and so on; so are those without
    a prototype.
    """
    prototype = ge_prototype(op_type)
    names = tuple(sorted(graph.name for graph in prototype.graphs)) if prototype is not None else ()
    names = next((order for order in _ORDER if set(order) == set(names)), names)
    if len(names) == count:
        return names
    stem = names[0] if len(names) == 1 else "graph"
    return tuple(f"{stem}{number}" for number in range(count))


def first_passed(op_type: str) -> int:
    """The index of the operator's input that is Data 0 of its subgraphs."""
    prototype = ge_prototype(op_type)
    kinds = [entry.kind for entry in prototype.inputs] if prototype is not None else []
    return kinds.index(Kind.DYNAMIC) if Kind.DYNAMIC in kinds else 0
