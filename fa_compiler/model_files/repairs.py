"""Mends what ONNX Runtime takes and the ONNX checker refuses, or reads in another way, without a change of meaning.

    nodes out of order          are sorted; ONNX Runtime does so, in the main graph
    no opset import             is added for a domain that ONNX Runtime knows, with the version that it takes then
    a size below 0              of an input or output is open
    an input that is an output  has the type of the input, where another one is declared
    "" and "ai.onnx"            are one domain: of two imports of it the last one counts, and nodes name it ""
    a graph without a name      gets one
    a device configuration      is left out where it names no configuration or no tensor, or the IR version has none;
                                ONNX Runtime reads none of them

A graph with a cycle, or with one name for two values, stays what it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx
from onnx import defs

from fa_compiler.model_files.subgraphs import all_nodes, graphs_below, graphs_of

ONE_VERSION = frozenset(
    (
        "ai.onnx.preview",
        "ai.onnx.preview.training",
        "ai.onnx.training",
        "com.microsoft",
        "com.microsoft.experimental",
        "com.microsoft.nchwc",
        "org.pytorch.aten",
    )
)
"""The domains of ONNX Runtime that have the version 1 only."""

NEWEST = {"": defs.onnx_opset_version(), "ai.onnx.ml": 5}
"""The version of ONNX's domains that ONNX Runtime takes where a model names none."""

_UNNAMED = "graph"
_DEVICES = 11
"""The first IR version with device configurations."""
CYCLE_TOLD = 7
"""So many nodes of a cycle an error names."""

Body = onnx.GraphProto | onnx.FunctionProto


class OrderError(Exception):
    """There is no order in which the nodes could run. The text says why."""


def as_runtime_reads(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of the model without what others read in another way than ONNX Runtime, and one sentence for each change;
    the model itself and nothing where there is no such thing."""
    imports = any(_other_opsets(owner) for owner in (model, *model.functions))
    sizes = any(map(_negative, (*model.graph.input, *model.graph.output)))
    devices = next(_unreadable_devices(model), None) is not None
    passed_on = bool(_passed_on(model))
    if not imports and not sizes and not devices and not passed_on:
        return model, []
    copy = _copy(model)
    return copy, [*_standard_opsets(copy), *_inputs_passed_on(copy), *_open_sizes(copy), *_devices(copy)]


def repaired(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of the model with all that can be mended, and one sentence for each kind of change; the model itself
    and nothing where there is nothing to mend.

    Raises:
        OrderError: there is no order in which the nodes could run.
    """
    copy = _copy(model)
    notes = [*_domains(copy), *_imports(copy), *_names(copy), *_order(copy)]
    return (copy, notes) if notes else (model, [])


_STANDARD = ("", "ai.onnx")


def _copy(model: onnx.ModelProto) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    return copy


def _called(owner: onnx.ModelProto | Body) -> str:
    if isinstance(owner, onnx.ModelProto):
        return "the model"
    return f"{'function' if isinstance(owner, onnx.FunctionProto) else 'graph'} '{owner.name}'"


def _standard(owner: onnx.ModelProto | onnx.FunctionProto) -> list[int]:
    return [opset.version for opset in owner.opset_import if opset.domain in _STANDARD]


def _other_opsets(owner: onnx.ModelProto | onnx.FunctionProto) -> set[int]:
    """The versions of ONNX's operators that are imported beside the one that counts."""
    versions = _standard(owner)
    return set(versions) - set(versions[-1:])


def _domains(model: onnx.ModelProto) -> Iterator[str]:
    nodes = [*model.graph.node, *(node for function in model.functions for node in function.node)]
    spelt = [node for node in all_nodes(nodes) if node.domain == "ai.onnx"]
    for node in spelt:
        node.domain = ""
    if spelt:
        yield f"{_counted(len(spelt), 'node')} of domain 'ai.onnx': it is the standard domain, as in ONNX Runtime"


def _standard_opsets(model: onnx.ModelProto) -> Iterator[str]:
    for owner in (model, *model.functions):
        if not (other := _other_opsets(owner)):
            continue
        kept = [opset for opset in owner.opset_import if opset.domain not in _STANDARD]
        version = _standard(owner)[-1]
        del owner.opset_import[:]
        owner.opset_import.extend([onnx.helper.make_opsetid("", version), *kept])
        versions = ", ".join(map(str, sorted(other)))
        yield f"{_called(owner)} imports opset {version} and, before it, {versions}: the last one counts"


def _passed_on(model: onnx.ModelProto) -> list[tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]]:
    """Outputs that are inputs, and are declared with another type, each with its input."""
    inputs = {info.name: info for info in model.graph.input}
    pairs = [(info, inputs[info.name]) for info in model.graph.output if info.name in inputs]
    return [each for each in pairs if each[0].type.tensor_type.elem_type != each[1].type.tensor_type.elem_type]


def _inputs_passed_on(model: onnx.ModelProto) -> Iterator[str]:
    for info, given in _passed_on(model):
        info.type.CopyFrom(given.type)
        yield f"the output '{info.name}' is an input, and declared with another type: it has that of the input"


def _negative(info: onnx.ValueInfoProto) -> bool:
    return any(dim.dim_value < 0 for dim in info.type.tensor_type.shape.dim)


def _open_sizes(model: onnx.ModelProto) -> Iterator[str]:
    infos = list(filter(_negative, (*model.graph.input, *model.graph.output)))
    for info in infos:
        for dim in info.type.tensor_type.shape.dim:
            if dim.dim_value < 0:
                dim.ClearField("value")
    if infos:
        more = f" and {len(infos) - 1} more" if len(infos) > 1 else ""
        yield f"'{infos[0].name}'{more} declared with a size below 0: the size is open, as in ONNX Runtime"


def _unreadable_devices(model: onnx.ModelProto) -> Iterator[onnx.ModelProto | onnx.NodeProto]:
    """The model and the nodes with device configurations that no reader could follow."""
    older = model.ir_version < _DEVICES
    if older and model.configuration:
        yield model
    for body in (model.graph, *model.functions):
        for node in all_nodes(body.node):
            given = node.device_configurations
            if given and (older or not all(map(_names_all, given))):
                yield node


def _names_all(given: onnx.NodeDeviceConfigurationProto) -> bool:
    return bool(given.configuration_id) and all(spec.tensor_name for spec in given.sharding_spec)


def _devices(model: onnx.ModelProto) -> Iterator[str]:
    owners = list(_unreadable_devices(model))
    for owner in owners:
        owner.ClearField("configuration" if isinstance(owner, onnx.ModelProto) else "device_configurations")
    if owners:
        first = owners[0]
        who = _shown(first) if isinstance(first, onnx.NodeProto) else "the model"
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        yield f"device configurations of {who}{more} are left out: ONNX Runtime reads none, and these are not complete"


def _imports(model: onnx.ModelProto) -> Iterator[str]:
    owners: list[tuple[onnx.ModelProto | onnx.FunctionProto, Sequence[onnx.NodeProto]]] = [
        (model, model.graph.node),
        *((function, function.node) for function in model.functions),
    ]
    for owner, nodes in owners:
        given = {opset.domain: opset.version for opset in owner.opset_import}
        if not given:
            continue  # ONNX Runtime refuses a model and a function without any import
        standard = next((given[domain] for domain in _STANDARD if domain in given), None)
        for domain in dict.fromkeys(node.domain for node in all_nodes(nodes)):
            if domain in given or (domain == "" and standard is not None):
                continue
            if domain in ONE_VERSION:
                version = 1
            elif owner is model and domain in NEWEST:  # what a function takes has no version of ONNX Runtime's own
                version = NEWEST[domain]
            else:
                continue
            owner.opset_import.add(domain=domain, version=version)
            named = domain or "ai.onnx"
            yield f"{_called(owner)} imports no opset of domain '{named}': {version} is taken, as in ONNX Runtime"


def _names(model: onnx.ModelProto) -> Iterator[str]:
    unnamed = [graph for graph in _graphs(model) if not graph.name]
    for graph in unnamed:
        graph.name = _UNNAMED
    if unnamed:
        yield f"{_counted(len(unnamed), 'graph')} had no name: '{_UNNAMED}' is taken"


def _order(model: onnx.ModelProto) -> Iterator[str]:
    moved = [owner for owner in (*_graphs(model), *model.functions) if _sorted(owner)]
    if moved:
        more = f", and in {_counted(len(moved) - 1, 'graph')} more" if len(moved) > 1 else ""
        yield f"nodes of {_called(moved[0])}{more} stood before others that they need: they are sorted"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'s' if count > 1 else ''}"


def _sorted(body: Body) -> bool:
    """Put the nodes of one body in order; False where they were.

    A node comes where it was, behind those that it needs. It needs those whose values its subgraphs read, too.
    """
    made: dict[str, int] = {}
    for index, node in enumerate(body.node):
        for name in filter(None, node.output):
            if (first := made.setdefault(name, index)) != index:
                raise OrderError(f"'{name}' is made by {_shown(body.node[first])} and by {_shown(node)}")
    needs = [sorted({made[name] for name in _read(node) if name in made}) for node in body.node]
    if all(not before or before[-1] < index for index, before in enumerate(needs)):
        return False
    import networkx as nx  # a tenth of a second, which models in order need not wait for

    after = nx.DiGraph()
    after.add_nodes_from(range(len(needs)))
    after.add_edges_from((other, index) for index, before in enumerate(needs) for other in before)
    try:
        order = list(nx.lexicographical_topological_sort(after))
    except nx.NetworkXUnfeasible:
        loop = [_shown(body.node[index]) for index, _ in nx.find_cycle(after)]
        told = [*loop, loop[0]] if len(loop) < CYCLE_TOLD else [*loop[:CYCLE_TOLD], "..."]
        raise OrderError(f"the nodes form a cycle: {' -> '.join(told)}") from None
    nodes = [body.node[index] for index in order]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del body.node[:]
    body.node.extend(copies)
    return True


def _shown(node: onnx.NodeProto) -> str:
    return f"{node.op_type} '{node.name or next(filter(None, node.output), '')}'"


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node and its subgraphs read. A name that a subgraph makes itself has no other maker."""
    yield from filter(None, node.input)
    for graph in graphs_of(node):
        for inner in all_nodes(graph.node):
            yield from filter(None, inner.input)
        for each in (graph, *graphs_below(graph)):
            yield from (info.name for info in each.output)


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Every graph of the model, those in functions too."""
    yield model.graph
    for body in (model.graph, *model.functions):
        yield from graphs_below(body)
