"""Faults of a model that the ONNX checker accepts and the passes cannot handle.

    an output without a name, or one that nothing in the graph makes
    two weights of one name with different numbers
    an opset version or a type number that does not exist
    a name whose bytes are not UTF-8
    a tensor whose data do not fit its shape
    a Split with more outputs than `num_outputs`
    a Transpose whose `perm` is not a permutation
    a call of a function with more inputs or outputs than the function has
    a reference to an attribute that does not exist, or that has another type

The passes inline functions, and they read an attribute as the type that its operator defines.
"""

from __future__ import annotations

from collections import Counter

import onnx

from fa_compiler.protos.subgraphs import all_nodes
from fa_compiler.protos.tensors import all_tensors, content_fault

STANDARD = ("", "ai.onnx", "ai.onnx.ml")
"""The domains whose operators the checker knows."""

_TYPE_NAMES = frozenset(("dtype", "output_dtype", "softmax_precision", "stash_type", "to"))
"""Attributes of ONNX's operators whose value is the number of a type."""

_WITH_TYPES = (*STANDARD, "ai.onnx.preview")
_TYPE_NUMBERS = frozenset(onnx.TensorProto.DataType.values())

_Key = tuple[str, str, str]
_Types = dict[_Key, dict[str, int]]


def unchecked_fault(model: onnx.ModelProto) -> str | None:
    """The first fault of this kind on one line, or None."""
    for owner in (model, *model.functions):
        for opset in owner.opset_import:
            if opset.domain in STANDARD and not 0 < opset.version < 1 << 31:
                return f"there is no opset {opset.version} of domain '{opset.domain}'"
    if (found := _output_fault(model.graph) or _weight_fault(model.graph)) is not None:
        return found
    owners = (model, model.graph, *model.functions)
    if (found := next(filter(None, map(_metadata_fault, owners)), None)) is not None:
        return found
    return _node_fault(model) or _reference_fault(model) or _tensor_fault(model)


def _output_fault(graph: onnx.GraphProto) -> str | None:
    """The light copy of `checker` lacks the outputs without a type or rank, so that the checker
    does not see these."""
    made = {info.name for info in graph.input}
    made.update(tensor.name for tensor in graph.initializer)
    made.update(tensor.values.name for tensor in graph.sparse_initializer)
    made.update(name for node in graph.node for name in node.output)
    for info in graph.output:
        if not info.name:
            return "an output of its graph has no name"
        if info.name not in made:
            return f"no node makes the output {_shown(info.name)} of its graph"
    return None


def _weight_fault(graph: onnx.GraphProto) -> str | None:
    """Equal ones are repaired before. The light copy of `checker` makes inputs of large ones, and
    its error names these."""
    counts = Counter(tensor.name for tensor in graph.initializer)
    repeated = next((name for name, count in counts.items() if count > 1 and name), None)
    if repeated is None:
        return None
    return f"{counts[repeated]} weights have the name {_shown(repeated)}, and their numbers differ"


def _tensor_fault(model: onnx.ModelProto) -> str | None:
    return next(filter(None, map(content_fault, all_tensors(model))), None)


def _node_fault(model: onnx.ModelProto) -> str | None:
    for body in (model.graph.node, *(function.node for function in model.functions)):
        for node in all_nodes(body):
            found = _attribute_fault(node) or _metadata_fault(node) or _name_fault(node)
            if found is not None:
                return found
    return _value_name_fault(model.graph)


def _attribute_fault(node: onnx.NodeProto) -> str | None:
    """An attribute whose number no operator of this name can have."""
    for attr in node.attribute:
        if attr.name in _TYPE_NAMES and attr.i not in _TYPE_NUMBERS and node.domain in _WITH_TYPES:
            return f"node '{node.name}' ({node.op_type}) has the '{attr.name}' {attr.i}, which is not a type"
        # The checker reads past the end of its list of sizes here, which may crash the process.
        if attr.name == "num_outputs" and node.op_type == "Split" and attr.i < len(node.output):
            return f"node '{node.name}' (Split) has {len(node.output)} outputs and num_outputs {attr.i}"
        if attr.name == "perm" and node.op_type == "Transpose" and node.domain in STANDARD:
            perm = list(attr.ints)
            if sorted(perm) != list(range(len(perm))):
                return f"node '{node.name}' (Transpose) has the perm {perm[:16]}, which is not a permutation"
    return None


def _name_fault(node: onnx.NodeProto) -> str | None:
    """A name at a node that is not UTF-8."""
    for text in (node.op_type, node.name, node.domain, *node.input, *node.output):
        if isinstance(text, bytes):  # protobuf returns bytes for a string that is not UTF-8
            return f"the name {text!r} at a node {_shown(node.op_type)} is not UTF-8"
    return None


def _value_name_fault(graph: onnx.GraphProto) -> str | None:
    """A name of a value, of its sizes or of a weight of the main graph that is not UTF-8."""
    for info in (*graph.input, *graph.output, *graph.value_info):
        for text in (info.name, *(dim.dim_param for dim in info.type.tensor_type.shape.dim)):
            if isinstance(text, bytes):
                return f"the name {text!r} at the value {_shown(info.name)} is not UTF-8"
    for tensor in graph.initializer:
        if isinstance(tensor.name, bytes):
            return f"the name {tensor.name!r} of an initializer is not UTF-8"
    return None


def _metadata_fault(
    owner: onnx.ModelProto | onnx.GraphProto | onnx.FunctionProto | onnx.NodeProto,
) -> str | None:
    """A key or value of the metadata that is not UTF-8: onnx-ir cannot sort such keys."""
    texts = (text for prop in owner.metadata_props for text in (prop.key, prop.value))
    return next(
        (
            f"the text {text!r} in its metadata is not UTF-8"
            for text in texts
            if isinstance(text, bytes)
        ),
        None,
    )


def _shown(text: str | bytes) -> str:
    return f"'{text}'" if isinstance(text, str) else repr(text)


def _reference_fault(model: onnx.ModelProto) -> str | None:
    wanted: _Types = {}
    most: dict[_Key, tuple[int, int]] = {}
    for function in model.functions:
        most[function.domain, function.name, function.overload] = (
            len(function.input),
            len(function.output),
        )
        own = wanted[function.domain, function.name, function.overload] = {}
        for node in all_nodes(function.node):
            own.update(
                {attr.ref_attr_name: attr.type for attr in node.attribute if attr.ref_attr_name}
            )
    for function in model.functions:
        types = wanted[function.domain, function.name, function.overload]
        for attr in function.attribute_proto:
            if types.get(attr.name, attr.type) != attr.type:
                return f"function '{function.name}' has an attribute '{attr.name}' of another type than its nodes take"
        for node in all_nodes(function.node):
            if (fault := _call_fault(node, wanted, most)) is not None:
                return fault
    for node in all_nodes(model.graph.node):
        for attr in node.attribute:
            if attr.ref_attr_name:
                return f"node '{node.name}' takes its '{attr.name}' from a function, but is in none"
        if wanted and (fault := _call_fault(node, wanted, most)) is not None:
            return fault
    return None


def _call_fault(
    node: onnx.NodeProto, wanted: _Types, most: dict[_Key, tuple[int, int]]
) -> str | None:
    key = (node.domain, node.op_type, node.overload)
    inputs, outputs = most.get(key, (len(node.input), len(node.output)))
    if len(node.input) > inputs or len(node.output) > outputs:
        return (
            f"node '{node.name}' gives function '{node.op_type}' more inputs or outputs than it has"
        )
    types = wanted.get(key, {})
    for attr in node.attribute:
        if types.get(attr.name, attr.type) != attr.type:
            return f"node '{node.name}' gives function '{node.op_type}' an attribute '{attr.name}' of another type"
    return None
