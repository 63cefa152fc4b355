"""The ONNX checker on a model without its weights: the size of the weights and their files do not
matter.

The checker gets a light copy of the model, which differs in these points:

    a large or external weight          is an input in the main graph; elsewhere it is the output of
                                        an unknown node
    an input or output of unknown rank  is an inner value: the checker refuses it, but ONNX Runtime
                                        accepts it
    an output without a type            is an inner value, for the same reason
    an unknown operator                 of a standard domain, which the installed onnx does not
                                        have, is in an unknown domain: the checker does not check
                                        nodes of unknown domains
    a deprecated operator               that ONNX Runtime runs (`DEPRECATED`) is in an unknown
                                        domain, too
    leftovers of a converter            in training graphs (`LEFT_OVER`) are in an unknown domain,
                                        too: they do not run, but the attention in the same graph
                                        can be fused
    an old IR version                   is raised to 4, or to 8 in a model with functions: for older
                                        versions the checker has rules that ONNX Runtime does not
                                        have (before 4 each initializer is an input, and there are
                                        no opsets)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableSequence

import onnx
from onnx import checker, defs

from fa_compiler.checks.unchecked import STANDARD, unchecked_fault
from fa_compiler.errors import one_line
from fa_compiler.protos.tensors import is_external, is_plain, message_size

LIGHT = 1 << 16
"""Tensors of up to this many bytes stay in the light copy, because shape inference may need their
values."""

LEFT_OVER = {"BatchNormalization": 6}
"""The number of outputs by which a leftover node of a standard operator is recognised. tf2onnx
converts TensorFlow's FusedBatchNormV3 to a BatchNormalization and keeps all six outputs, because
the gradient reads them."""

DEPRECATED = frozenset({"GroupNormalization"})
"""Operators that ONNX Runtime runs in the opsets for which onnx calls them deprecated:
GroupNormalization of opset 18 to 20, whose scale and bias are for groups. The checker refuses a
node of them."""

_PLACEHOLDER = "fa_compiler.placeholder"
_UNLISTED = 4
"""The first IR version in which an initializer need not be an input."""
_FUNCTIONS = 8
"""The first IR version in which the checker checks functions. ONNX Runtime runs functions of older
models, too."""


def fault(model: onnx.ModelProto, full: bool, declared: bool = True) -> str | None:
    """The fault of an invalid model on one line, or None if the model is valid.

    The faults that the ONNX checker does not find (`unchecked`) come first. With `full` the checker
    also infers shapes; with `declared` these have to agree with the declared shapes.
    """
    if (found := unchecked_fault(model)) is not None:
        return found
    try:
        light = _light(model)
        if not declared:
            del light.graph.value_info[:], light.graph.output[:]
        checker.check_model(light, full_check=full)
    except UnicodeError:
        return "a text in it is not UTF-8"
    except (
        checker.ValidationError,
        onnx.shape_inference.InferenceError,
        ValueError,
        RuntimeError,
    ) as error:
        return one_line(error)
    return None


def contradiction(model: onnx.ModelProto) -> str | None:
    """The first node of the main graph that cannot take the types and sizes of its inputs, on one
    line, or None.

    `fault` does not find such a node in a model with an operator that the checker does not know:
    onnx then reports no error of shape inference. The model may be invalid in other ways, too.
    """
    try:
        light = onnx.shape_inference.infer_shapes(_light(model))
    except (UnicodeError, onnx.shape_inference.InferenceError, ValueError, RuntimeError):
        return None
    graph, data = light.graph, {tensor.name: tensor for tensor in light.graph.initializer}
    types = {
        name: onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
        for name, tensor in data.items()
    }
    types.update(
        {info.name: info.type for info in (*graph.value_info, *graph.output, *graph.input)}
    )
    faults = (_inference_fault(node, light, types, data) for node in graph.node)
    return next((found for found in faults if found is not None), None)


def _inference_fault(
    node: onnx.NodeProto,
    light: onnx.ModelProto,
    types: Mapping[str, onnx.TypeProto],
    data: Mapping[str, onnx.TensorProto],
) -> str | None:
    """Why a node cannot take its inputs; None if it can, or if its operator or an input is
    unknown."""
    version = {opset.domain: opset.version for opset in light.opset_import}.get(node.domain)
    if version is None or not all(name in types for name in node.input if name):
        return None
    if not defs.has(node.op_type, version, node.domain):
        return None
    schema = defs.get_schema(node.op_type, version, node.domain)
    has_graph = any(attr.HasField("g") for attr in node.attribute)
    read = dict(types) if has_graph else {name: types[name] for name in node.input if name}
    try:
        onnx.shape_inference.infer_node_outputs(
            schema,
            node,
            read,
            dict(data),
            opset_imports=list(light.opset_import),
            ir_version=light.ir_version,
        )
    except (onnx.shape_inference.InferenceError, ValueError, RuntimeError) as error:
        return f"node '{node.name}' ({node.op_type}) cannot take its inputs: {one_line(error)}"
    return None


def is_left_over(node: onnx.NodeProto) -> bool:
    """Whether the node is a leftover of a converter (`LEFT_OVER`): it looks like a standard
    operator, but is none."""
    return not node.domain and len(node.output) == LEFT_OVER.get(node.op_type)


def _light(model: onnx.ModelProto) -> onnx.ModelProto:
    least = _FUNCTIONS if model.functions else _UNLISTED
    light = onnx.ModelProto(ir_version=max(model.ir_version, least))
    light.opset_import.extend(model.opset_import)
    light.metadata_props.extend(model.metadata_props)
    local = {(function.domain, function.name) for function in model.functions}
    _light_graph(model.graph, light.graph, _Known(model.opset_import, local), main=True)
    for function in model.functions:
        copy = light.functions.add()
        copy.name, copy.domain, copy.overload = function.name, function.domain, function.overload
        for field in (
            "input",
            "output",
            "attribute",
            "attribute_proto",
            "opset_import",
            "value_info",
        ):
            getattr(copy, field).extend(getattr(function, field))
        _light_nodes(function.node, copy.node, _Known(function.opset_import, local))
        copy.opset_import.add(domain=_PLACEHOLDER, version=1)
    if light.opset_import:
        light.opset_import.add(domain=_PLACEHOLDER, version=1)
    return light


class _Known:
    """Tells whether the installed onnx can check a node at the given opsets."""

    def __init__(
        self, opsets: Iterable[onnx.OperatorSetIdProto], local: set[tuple[str, str]]
    ) -> None:
        self._versions = {opset.domain: opset.version for opset in opsets}
        if "ai.onnx" in self._versions:
            self._versions.setdefault("", self._versions["ai.onnx"])
        self._local = local
        self._found: dict[tuple[str, str], bool] = {}

    def __call__(self, node: onnx.NodeProto) -> bool:
        key = (node.domain, node.op_type)
        if key not in self._found:
            self._found[key] = self._is_known(*key)
        return self._found[key] and not is_left_over(node)

    def _is_known(self, domain: str, op_type: str) -> bool:
        if domain not in STANDARD or (domain, op_type) in self._local:
            return True
        domain = "" if domain == "ai.onnx" else domain
        if domain not in self._versions:
            return True
        if not defs.has(op_type, self._versions[domain], domain):
            return False
        return not (
            op_type in DEPRECATED
            and defs.get_schema(op_type, self._versions[domain], domain).deprecated
        )


def _light_graph(
    graph: onnx.GraphProto, light: onnx.GraphProto, known: _Known, main: bool = False
) -> None:
    light.name = graph.name
    for field in ("value_info", "sparse_initializer"):
        getattr(light, field).extend(getattr(graph, field))
    for info in graph.input:
        if main and _of_any_rank(info):
            light.node.append(_placeholder(info.name))
        else:
            light.input.append(info)
    for info in graph.output:
        if not (main and (_of_any_rank(info) or _of_any_type(info))):
            light.output.append(info)
    _light_weights(graph, light, main)
    _light_nodes(graph.node, light.node, known)


def _light_weights(graph: onnx.GraphProto, light: onnx.GraphProto, main: bool) -> None:
    """The light weights; an input of the main graph, or a placeholder in another one, for each
    heavy weight."""
    inputs = {info.name for info in graph.input}
    described = {info.name for info in graph.value_info}
    for tensor in graph.initializer:
        if not _heavy(tensor):
            light.initializer.append(tensor)
        elif tensor.name not in inputs:
            info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
            if main:
                light.input.append(info)
                continue
            light.node.append(_placeholder(tensor.name))
            if tensor.name not in described:
                light.value_info.append(info)


def _placeholder(name: str) -> onnx.NodeProto:
    """A node that makes a value of which nothing is known."""
    return onnx.helper.make_node("Weight", [], [name], domain=_PLACEHOLDER)


def _of_any_rank(info: onnx.ValueInfoProto) -> bool:
    kind = info.type.tensor_type if info.type.HasField("tensor_type") else None
    return kind is not None and bool(kind.elem_type) and not kind.HasField("shape")


def _of_any_type(info: onnx.ValueInfoProto) -> bool:
    return info.type.WhichOneof("value") is None


def _light_nodes(
    nodes: Iterable[onnx.NodeProto], light: MutableSequence[onnx.NodeProto], known: _Known
) -> None:
    unchanged: list[onnx.NodeProto] = []
    for node in nodes:
        if known(node) and all(
            is_plain(attribute) or _is_light(attribute) for attribute in node.attribute
        ):
            unchanged.append(node)
            continue
        light.extend(unchanged)
        unchanged.clear()
        light.append(_light_node(node, known))
    light.extend(unchanged)


def _light_node(node: onnx.NodeProto, known: _Known) -> onnx.NodeProto:
    copy = onnx.NodeProto(
        name=node.name, op_type=node.op_type, domain=node.domain, overload=node.overload
    )
    copy.input.extend(node.input)
    copy.output.extend(node.output)
    if not known(node) or any(
        attribute.HasField("t") and _heavy(attribute.t) for attribute in node.attribute
    ):
        copy.domain = _PLACEHOLDER
    for attribute in node.attribute:
        if attribute.HasField("t") and _heavy(attribute.t):
            continue
        if not attribute.HasField("g") and not attribute.graphs:
            copy.attribute.append(attribute)
            continue
        target = copy.attribute.add()
        target.name, target.type = attribute.name, attribute.type
        if attribute.HasField("g"):
            _light_graph(attribute.g, target.g, known)
        for graph in attribute.graphs:
            _light_graph(graph, target.graphs.add(), known)
    return copy


def _is_light(attribute: onnx.AttributeProto) -> bool:
    """Whether the attribute holds neither a graph nor a large tensor: it is copied unchanged."""
    graph = attribute.HasField("g") or attribute.graphs
    return not graph and not (attribute.HasField("t") and _heavy(attribute.t))


def _heavy(tensor: onnx.TensorProto) -> bool:
    return is_external(tensor) or message_size(tensor) > LIGHT
