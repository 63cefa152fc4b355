"""What ATC's ONNX parser says of a file, and what is found only after it: rules in the order in which they bite.

    reading     no protobuf, 2 GiB or more (E13005); no inputs or outputs (E16001)
    pre-check   names twice (E13009); operators nobody registered (E13010); domains that are not imported (E19999)
    nodes       the traps of the parser's own attention plugins; attributes and inputs that the other plugins do not
                take (`plugin_reads.tsv`); empty output names beside empty inputs; more tensors than the operator has;
                types (E19999)
    later       inputs that nothing makes, absent ones in a branch (E11019); required attributes and inputs; operators
                that plugins build wrongly
    never       attributes that a plugin does not read; weights that are read from the wrong place

Nodes of a plugin's domain are taken to become the GE operator of their name, with inputs and outputs in its order and
attributes of its names: what the generated plugin does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fa_compiler.lowering.ascend.air.finding import Finding, Rule, Severity
from fa_compiler.lowering.ascend.onnx_route import parser
from fa_compiler.lowering.ascend.onnx_route.check_weights import check_weights
from fa_compiler.lowering.ascend.onnx_route.reads import Form, missed
from fa_compiler.op_registry import DOMAIN, VERSION, NodeError, bind_inputs, bind_outputs, full_attrs, get
from fa_compiler.op_registry import names as operators
from fa_compiler.passes.nodes import STANDARD

LIMIT = (1 << 31) - 1
"""Bytes the parser can read."""

_REJECTED, _LATER = Severity.REJECTED, Severity.LATER
NOT_ONNX = Rule("not-onnx", _REJECTED, "give an ONNX model (E13005)")
TOO_LARGE = Rule("too-large", _REJECTED, "put the weights into a file beside the model (E13005)")
NO_ENDS = Rule("no-ends", _REJECTED, "ATC takes no model without inputs or outputs (E16001)")
NAME_TWICE = Rule("name-twice", _REJECTED, "give every node a name of its own, other than the inputs' (E13009)")
NO_PLUGIN = Rule("no-plugin", _REJECTED, "convert the model with `fa-compiler atc --route onnx` (E13010)")
NO_OPSET = Rule("no-opset", _REJECTED, "add the domain to the model's opset_import (E19999)")
EMPTY_OUTPUT = Rule("empty-output", _REJECTED, "name every output: the parser connects absent inputs with it (E19999)")
TRAP = Rule("parser-plugin", _REJECTED, "give all inputs of a group, none of them empty (E19999)")
PARAMS = Rule("parser-params", _REJECTED, "write the attribute (E11010)")
TENSORS = Rule("too-many-tensors", _REJECTED, "leave out what the operator does not have (E19999)")
ELEMENT = Rule("element-type", _REJECTED, "use a type that ATC knows (E19999)")
BRANCHES = Rule("branches", _REJECTED, "an If has then_branch and else_branch and nothing else (E19999)")
FORM = Rule("plugin-form", _REJECTED, "convert the model with `fa-compiler atc --route onnx` (E11010, E19999)")
UNREAD = Rule("plugin-misses", Severity.WRONG, "convert the model with `fa-compiler atc --route onnx`")
GAP = Rule("gap-in-branch", _LATER, "give the input, or use an operator without it (E11019)")
UNLINKED = Rule("unlinked", _LATER, "correct the name (E11019)")
BROKEN = Rule("broken-plugin", _LATER, "use the plugin that `fa-compiler atc --route onnx` writes")
PROTOTYPE = Rule("prototype", _LATER, "write the node as `fa-compiler registry show` has it")

ACCEPTED_INPUTS = {"NPUPromptFlashAttention": (3, 5, 7, 9, 12), "NPUFlashAttention": (9,)}
"""Numbers of inputs that the parser's plugins connect; none of the inputs may be empty."""

REQUIRED = {
    "NPUFlashAttention": ("head_num", "input_layout"),
    "NPUIncreFlashAttention": ("num_heads", "input_layout"),
    "NPUPromptFlashAttention": ("num_heads", "input_layout"),
}

Domains = Mapping[str, int]


def check(path: Path, plugins: Iterable[str] = (DOMAIN,)) -> list[Finding]:
    """Everything that is wrong with a file for ATC. `plugins` are the domains an own plugin registers.

    Raises OSError if the file cannot be read.
    """
    if path.stat().st_size > LIMIT:
        return [TOO_LARGE("", f"{path.name} has more than {LIMIT} bytes")]
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        return [NOT_ONNX("", f"{path.name} is no ONNX model")]
    return check_model(model, path.parent, plugins)


def check_model(model: onnx.ModelProto, folder: Path | None, plugins: Iterable[str] = (DOMAIN,)) -> list[Finding]:
    """The same of a model whose weights in files lie in `folder` (None: not looked for)."""
    if (text := _no_text(model)) is not None:
        return [NOT_ONNX("", f"it holds the text {text!r}, which is not UTF-8")]
    own = frozenset(plugins)
    imports = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    initial = {tensor.name for tensor in model.graph.initializer}
    ends = {
        "inputs": [value for value in model.graph.input if value.name not in initial],
        "outputs": model.graph.output,
    }
    found = [NO_ENDS("", f"the graph has no {what}") for what, values in ends.items() if not values]
    if found:
        return found
    graphs = list(_graphs(model.graph))
    for graph in graphs:
        found += _names(graph)
        found += [finding for node in graph.node for finding in _registered(node, imports, own)]
    if found:
        return found
    found += _empty_outputs(graphs)
    known: set[str] = set()
    read: set[str] = set()
    for graph in graphs:
        known |= _made(graph)
        read |= {*(value.name for value in graph.output), *(name for node in graph.node for name in node.input)}
    for graph in graphs:
        for value in (*graph.input, *graph.output):
            if not value.type.HasField("tensor_type"):
                found.append(ELEMENT(value.name, "it is not a tensor"))
        for node in graph.node:
            found += [
                UNLINKED(_label(node), f"nothing makes its input '{name}'") for name in node.input if name not in known
            ]
            found += _node(node, own)
            if node.domain in STANDARD and node.op_type != "If":
                found += _plugin(node, imports["ai.onnx"], read)
            if graph is not model.graph and "" in node.input:
                found.append(GAP(_label(node), "it has an absent input and lies in a branch of an If"))
        found += check_weights(graph, folder, is_main=graph is model.graph)
    return sorted(found, key=lambda finding: finding.severity is not Severity.REJECTED)


def _no_text(message: Any) -> bytes | None:
    """A text of a message that is not UTF-8: protobuf refuses it in the parser's schema, and passes it on in ONNX's."""
    if isinstance(message, onnx.TensorProto):  # not its data
        texts: tuple[Any, ...] = (message.name, message.doc_string)
        return next((text for text in texts if isinstance(text, bytes)), None)
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        items = [value] if isinstance(value, (str, bytes)) or hasattr(value, "ListFields") else value
        for item in items:
            found = item if isinstance(item, bytes) else None if isinstance(item, str) else _no_text(item)
            if found is not None:
                return found
    return None


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attr in node.attribute:
            if attr.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attr.g)


def _made(graph: onnx.GraphProto) -> set[str]:
    named = [*(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)]
    return {"", *named, *(name for node in graph.node for name in node.output)}


def _label(node: onnx.NodeProto) -> str:
    return node.name or next(iter(node.output), node.op_type)


# -- the pre-check --------------------------------------------------------------------------------


def _names(graph: onnx.GraphProto) -> Iterator[Finding]:
    """Nodes, inputs and initializers share one space of names; the parser names what has none."""
    initial = {tensor.name for tensor in graph.initializer}
    taken = Counter(value.name for value in graph.input if value.name not in initial)
    taken.update(f"{name}_initializer_{position}" for position, name in enumerate(sorted(initial)))
    unnamed = 0
    for node in graph.node:
        name = node.name or f"{node.op_type}_{unnamed}"
        unnamed += not node.name
        taken[name] += 1
        if taken[name] > 1:
            yield NAME_TWICE(name, "another node, input or weight has this name")


def _registered(node: onnx.NodeProto, imports: Domains, own: frozenset[str]) -> Iterator[Finding]:
    domain = node.domain or "ai.onnx"
    if domain not in imports:
        yield NO_OPSET(_label(node), f"the model imports no opset of the domain '{domain}'")
    elif not _is_known(domain, node.op_type, imports[domain], own):
        yield NO_PLUGIN(_label(node), f"no plugin is registered for {domain}::{imports[domain]}::{node.op_type}")


def _is_known(domain: str, op_type: str, version: int, own: frozenset[str]) -> bool:
    if domain in own:
        return version == VERSION and op_type in operators()
    return parser.takes("" if domain == "ai.onnx" else domain, op_type, version)


# -- the nodes ------------------------------------------------------------------------------------


def _empty_outputs(graphs: list[onnx.GraphProto]) -> Iterator[Finding]:
    """One output without a name is harmless until some other node has an absent input."""
    for graph in graphs:
        makers = [node for node in graph.node if "" in node.output]
        readers = [node for node in graph.node if "" in node.input]
        for maker in makers:
            if any(reader is not maker for reader in readers):
                other = next(_label(reader) for reader in readers if reader is not maker)
                yield EMPTY_OUTPUT(_label(maker), f"it has an output without a name, and {other} an absent input")


def _node(node: onnx.NodeProto, own: frozenset[str]) -> Iterator[Finding]:
    if node.domain in own:
        yield from _own(node)
    elif node.op_type.startswith("NPU") and node.op_type in REQUIRED:
        yield from _attention(node)
    elif node.op_type == "If" and sorted(attr.name for attr in node.attribute) != ["else_branch", "then_branch"]:
        yield BRANCHES(_label(node), "its attributes are not the two branches")


def _plugin(node: onnx.NodeProto, version: int, read: set[str]) -> Iterator[Finding]:
    """What the operator's plugin refuses, and what it passes over."""
    try:
        form = Form.of_proto(node, version, read)
        found = list(missed(form))
    except (ValueError, TypeError, AttributeError) as error:
        yield FORM(_label(node), f"an attribute is of another type than {node.op_type} has ({error})")
        return
    for each in found:
        yield (FORM if each.is_refused else UNREAD)(_label(node), each.sentence)


def _attention(node: onnx.NodeProto) -> Iterator[Finding]:
    """The parser's own attention plugins: two of the three build an operator that does not work."""
    given = {attr.name for attr in node.attribute}
    for name in REQUIRED[node.op_type]:
        if name not in given:
            yield PARAMS(_label(node), f"the attribute {name} is absent, which the parser's plugin needs")
    counts = ACCEPTED_INPUTS.get(node.op_type)
    if counts and (len(node.input) not in counts or "" in node.input):
        listed = " or ".join(map(str, counts))
        absent = sum(not name for name in node.input)
        yield TRAP(
            _label(node), f"it has {len(node.input)} inputs, {absent} of them empty; expected {listed}, none empty"
        )
    if node.op_type == "NPUFlashAttention":
        yield BROKEN(_label(node), "the parser's plugin drops input_layout, which FlashAttentionScore needs")
    elif node.op_type == "NPUIncreFlashAttention":
        yield BROKEN(_label(node), "the parser's plugin leaves the keys and values unconnected")
    elif node.op_type == "NPUPromptFlashAttention" and not {"pre_tokens", "next_tokens"} <= given:
        yield BROKEN(_label(node), "the parser's plugin takes absent pre_tokens and next_tokens for 0", "write both")


def _own(node: onnx.NodeProto) -> Iterator[Finding]:
    """A node that becomes the GE operator of its name: tensors by position, attributes by name."""
    spec = get(node.op_type)
    try:
        attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
    except ValueError as error:
        yield PROTOTYPE(_label(node), str(error))
        return
    for bind, names in ((bind_inputs, node.input), (bind_outputs, node.output)):
        try:
            bind(spec, list(names), attrs)
        except NodeError as error:
            rule = TENSORS if " takes " in str(error) else PROTOTYPE
            yield rule(_label(node), str(error))
    try:
        full_attrs(spec, attrs)
    except NodeError as error:
        yield PROTOTYPE(_label(node), str(error))
