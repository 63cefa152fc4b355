"""Repairs of models that ONNX Runtime accepts, but the ONNX checker refuses or reads in another
way.

No repair changes the meaning that the model has in ONNX Runtime:

    nodes out of order          are sorted, as ONNX Runtime sorts the nodes of the main graph
    a missing opset import      of a domain that ONNX Runtime knows is added, with the version that
                                ONNX Runtime assumes
    a size below 0              of an input or output becomes dynamic
    an input that is an output  has one type: that of the input replaces the one that is declared
                                for the output
    a weight that is an output  has the type and the shape of its numbers, if the output declares
                                others
    equal weights of one name   in the main graph: one of them is left out
    two entries of one key      in the metadata of the model: the last one counts
    "" and "ai.onnx"            are one domain: the last of two imports counts, and all nodes name
                                the domain ""
    a graph without a name      gets a name
    a device configuration      is removed if it names no configuration or no tensor, or if the IR
                                version has none; ONNX Runtime ignores all of them

A graph with a cycle, or with one name for two values, is not changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import onnx
from onnx import defs

from fa_compiler.model_files.inline_weights import FileWeights
from fa_compiler.protos.subgraphs import Subgraphs, all_nodes, graphs_below, graphs_of

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
"""The domains of ONNX Runtime whose only version is 1."""

NEWEST = {"": defs.onnx_opset_version(), "ai.onnx.ml": 5}
"""The version of ONNX's domains that ONNX Runtime assumes if a model names none."""

_UNNAMED = "graph"
_DEVICES = 11
"""The first IR version with device configurations."""
CYCLE_SHOWN = 7
"""The most nodes of a cycle that an error names."""

Body = onnx.GraphProto | onnx.FunctionProto


class OrderError(Exception):
    """There is no order in which the nodes can run. The text gives the reason."""


def as_runtime_reads(
    below: Subgraphs, distinct: Sequence[int]
) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of the model without the parts that other tools read differently from ONNX Runtime,
    and a sentence for each change; the model itself and no sentences if there is no such part.
    `distinct` are the `distinct_weights`."""
    model = below.model
    imports = any(_other_opsets(owner) for owner in (model, *model.functions))
    sizes = any(map(_negative, (*model.graph.input, *model.graph.output)))
    devices = next(_unreadable_devices(model, below.nodes), None) is not None
    passed_on = bool(_passed_on(model))
    repeated = len(distinct) < len(model.graph.initializer) or bool(_repeated_keys(model))
    if not imports and not sizes and not devices and not passed_on and not repeated:
        return model, []
    copy = _copy(model)
    return copy, [
        *_standard_opsets(copy),
        *_equal_weights(copy, distinct),
        *_metadata_of_one_key(copy),
        *_outputs_passed_on(copy),
        *_open_sizes(copy),
        *_devices(copy),
    ]


def distinct_weights(model: onnx.ModelProto, weights: FileWeights | None) -> list[int]:
    """The positions of the initializers of the main graph without those that repeat an earlier one.

    Initializers of one name that differ all stay, and the checker refuses them: of two small ones
    ONNX Runtime takes the last, and of two large ones the first. `weights` is the file of the large
    ones, if they were left in it.

    Raises:
        InputError: the file cannot be read, or was changed.
    """
    first: dict[str, onnx.TensorProto] = {}
    stays = []
    for index, tensor in enumerate(model.graph.initializer):
        before = first.setdefault(tensor.name, tensor)
        if before is tensor or not tensor.name or not _equal(before, tensor, weights):
            stays.append(index)
    return stays


def repaired(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of the model with the repairs that make the checker accept it: domains, opset imports,
    graph names and the order of nodes, and a sentence for each kind; the model itself and no
    sentences if it needs none. `as_runtime_reads` makes the others.

    Raises:
        OrderError: there is no order in which the nodes can run.
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
    """The versions of the standard domain that are imported before the last one, which counts."""
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


def _passed_on(model: onnx.ModelProto) -> list[tuple[onnx.ValueInfoProto, onnx.TypeProto, str]]:
    """The outputs that are an input or a weight and contradict its type, with that type and the
    word for it."""
    outputs = {info.name: info for info in model.graph.output}
    found = []
    for given in model.graph.input:
        info = outputs.pop(given.name, None)
        if info is not None and info.type.tensor_type.elem_type != given.type.tensor_type.elem_type:
            found.append((info, given.type, "input"))
    for tensor in model.graph.initializer if outputs else ():
        info = outputs.get(tensor.name)
        if info is not None and _contradicts(info.type.tensor_type, tensor):
            kind = onnx.helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims))
            found.append((info, kind, "weight"))
    return found


def _contradicts(declared: onnx.TypeProto.Tensor, tensor: onnx.TensorProto) -> bool:
    """Does a declared type exclude this tensor? A symbolic size excludes none."""
    if declared.elem_type not in (0, tensor.data_type):
        return True
    if not declared.HasField("shape"):
        return False
    sizes = [dim.dim_value if dim.HasField("dim_value") else None for dim in declared.shape.dim]
    if len(sizes) != len(tensor.dims):
        return True
    return any(size not in (None, own) for size, own in zip(sizes, tensor.dims, strict=True))


def _outputs_passed_on(model: onnx.ModelProto) -> Iterator[str]:
    for info, kind, what in _passed_on(model):
        info.type.CopyFrom(kind)
        article = "an" if what == "input" else "a"
        yield f"the output '{info.name}' is {article} {what}, and declared with another type: it has that of the {what}"


def _equal(first: onnx.TensorProto, second: onnx.TensorProto, weights: FileWeights | None) -> bool:
    if first == second:
        return True
    if weights is None or not (weights.owns(first) and weights.owns(second)):
        return False
    same_kind = first.data_type == second.data_type and list(first.dims) == list(second.dims)
    return same_kind and weights.are_equal(first, second)


def _equal_weights(model: onnx.ModelProto, distinct: Sequence[int]) -> Iterator[str]:
    tensors = model.graph.initializer
    dropped = sorted(set(range(len(tensors))) - set(distinct))
    names = list(dict.fromkeys(tensors[index].name for index in dropped))
    for index in reversed(dropped):
        del tensors[index]
    if len(names) == 1:
        yield f"the weight '{names[0]}' is in the model twice with equal numbers: one is left out"
    elif names:
        which = f"the weights '{names[0]}' and {len(names) - 1} more"
        yield f"{which} are in the model twice with equal numbers: one of each is left out"


def _repeated_keys(model: onnx.ModelProto) -> list[str | bytes]:
    counts = Counter(prop.key for prop in model.metadata_props)
    return [key for key, count in counts.items() if count > 1]


def _metadata_of_one_key(model: onnx.ModelProto) -> Iterator[str]:
    if not (keys := _repeated_keys(model)):
        return
    last = {prop.key: prop for prop in model.metadata_props}
    kept = [
        onnx.StringStringEntryProto.FromString(prop.SerializeToString()) for prop in last.values()
    ]
    del model.metadata_props[:]
    model.metadata_props.extend(kept)
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    yield f"the metadata hold the key {keys[0]!r}{more} more than once: the last one counts, as in ONNX Runtime"


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


def _unreadable_devices(
    model: onnx.ModelProto, nodes: Iterable[onnx.NodeProto]
) -> Iterator[onnx.ModelProto | onnx.NodeProto]:
    """The model and those of its nodes that have an incomplete device configuration."""
    older = model.ir_version < _DEVICES
    if older and model.configuration:
        yield model
    for node in nodes:
        given = node.device_configurations
        if given and (older or not all(map(_names_all, given))):
            yield node


def _names_all(given: onnx.NodeDeviceConfigurationProto) -> bool:
    return bool(given.configuration_id) and all(spec.tensor_name for spec in given.sharding_spec)


def _devices(model: onnx.ModelProto) -> Iterator[str]:
    bodies = (model.graph, *model.functions)
    owners = list(
        _unreadable_devices(model, (node for body in bodies for node in all_nodes(body.node)))
    )
    for owner in owners:
        owner.ClearField(
            "configuration" if isinstance(owner, onnx.ModelProto) else "device_configurations"
        )
    if owners:
        first = owners[0]
        who = _shown(first) if isinstance(first, onnx.NodeProto) else "the model"
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        yield f"device configurations of {who}{more} are left out: ONNX Runtime reads none, and these are not complete"


def _imports(model: onnx.ModelProto) -> Iterator[str]:
    """Import the domains that nodes use and that have no import, in the version that ONNX Runtime
    takes."""
    owners: list[tuple[onnx.ModelProto | onnx.FunctionProto, Sequence[onnx.NodeProto]]] = [
        (model, model.graph.node),
        *((function, function.node) for function in model.functions),
    ]
    for owner, nodes in owners:
        given = {opset.domain for opset in owner.opset_import}
        if not given:
            continue  # ONNX Runtime refuses a model and a function without any import
        if not given.isdisjoint(_STANDARD):
            given.add("")
        versions = dict.fromkeys(ONE_VERSION, 1)
        if owner is model:  # ONNX Runtime assumes no version for a function
            versions = NEWEST | versions
        for domain in dict.fromkeys(node.domain for node in all_nodes(nodes)):
            if domain in given or domain not in versions:
                continue
            version = versions[domain]
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
    """Sort the nodes of one body; False if they were sorted already.

    A node keeps its place unless it stands before a node that it needs. A node also needs the nodes
    whose values its subgraphs read.
    """
    made: dict[str, int] = {}
    for index, node in enumerate(body.node):
        for name in filter(None, node.output):
            if (first := made.setdefault(name, index)) != index:
                raise OrderError(
                    f"'{name}' is made by {_shown(body.node[first])} and by {_shown(node)}"
                )
    needs = [sorted({made[name] for name in _read(node) if name in made}) for node in body.node]
    if all(not before or before[-1] < index for index, before in enumerate(needs)):
        return False
    nodes = [body.node[index] for index in _topological_order(body, needs)]
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del body.node[:]
    body.node.extend(copies)
    return True


def _topological_order(body: Body, needs: Sequence[Sequence[int]]) -> list[int]:
    """The order in which each node stands behind those that it needs, and else as early as it
    stood. Raises OrderError where there is none."""
    import networkx as nx  # the import takes a tenth of a second; sorted models do not need it

    after = nx.DiGraph()
    after.add_nodes_from(range(len(needs)))
    after.add_edges_from((other, index) for index, before in enumerate(needs) for other in before)
    try:
        return list(nx.lexicographical_topological_sort(after))
    except nx.NetworkXUnfeasible:
        loop = [_shown(body.node[index]) for index, _ in nx.find_cycle(after)]
        shown = [*loop, loop[0]] if len(loop) < CYCLE_SHOWN else [*loop[:CYCLE_SHOWN], "..."]
        raise OrderError(f"the nodes form a cycle: {' -> '.join(shown)}") from None


def _shown(node: onnx.NodeProto) -> str:
    return f"{node.op_type} '{node.name or next(filter(None, node.output), '')}'"


def _read(node: onnx.NodeProto) -> Iterator[str]:
    """The names that a node and its subgraphs read. The names that a subgraph makes are among them:
    no other node of a valid model makes the same name."""
    yield from filter(None, node.input)
    for graph in graphs_of(node):
        for inner in all_nodes(graph.node):
            yield from filter(None, inner.input)
        for each in (graph, *graphs_below(graph)):
            yield from (info.name for info in each.output)


def _graphs(model: onnx.ModelProto) -> Iterator[onnx.GraphProto]:
    """Every graph of the model, including those in functions."""
    yield model.graph
    for body in (model.graph, *model.functions):
        yield from graphs_below(body)
