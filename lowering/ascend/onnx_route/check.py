"""The rules of ATC's ONNX parser, and of the stages after it, in the order in which a fault is
found:

    reading     not protobuf, or 2 GiB and more (E13005); no inputs or no outputs (E16001)
    pre-check   a name used twice (E13009); an operator without a plugin (E13010); a domain that is
                not imported (E19999)
    nodes       faults of the parser's own plugins for attention and around it; attributes and
                inputs that the other plugins do not take (`plugin_reads.tsv`); an output without a
                name together with an absent input; more tensors than the operator has; types
                (E19999)
    later       an input that no node makes, an absent input in a branch (E11019); missing required
                attributes and inputs; operators that a plugin builds wrongly
    never       attributes that a plugin does not read; weights that are read from the wrong
                position; outputs that depend on constants only; the flags that a plugin leaves to
                all later nodes

A node of a plugin's domain is expected to become the GE operator of the same name, with the same
order of inputs and outputs and the same names of attributes. The generated plugin does this.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.lowering.ascend.onnx_route import parser
from fa_compiler.lowering.ascend.onnx_route.check_outputs import all_graphs, check_outputs
from fa_compiler.lowering.ascend.onnx_route.check_weights import check_weights
from fa_compiler.lowering.ascend.onnx_route.input_facts import input_facts
from fa_compiler.lowering.ascend.onnx_route.names import parser_nodes
from fa_compiler.lowering.ascend.onnx_route.plugin_reads import (
    InputFact,
    NodeForm,
    plain,
    plugin_mismatches,
)
from fa_compiler.op_registry import (
    DOMAIN,
    VERSION,
    NodeError,
    bind_inputs,
    bind_outputs,
    full_attrs,
    get,
)
from fa_compiler.op_registry import names as operators
from fa_compiler.op_registry.parser_plugins import PARSER_PLUGINS, plugin_misfit
from fa_compiler.passes.ir.nodes import STANDARD

LIMIT = (1 << 31) - 1
"""The most bytes that the parser can read."""

_REJECTED, _LATER = Severity.REJECTED, Severity.LATER
NOT_ONNX = Rule("not-onnx", _REJECTED, "give an ONNX model (E13005)")
TOO_LARGE = Rule("too-large", _REJECTED, "put the weights into a file beside the model (E13005)")
NO_ENDS = Rule("no-ends", _REJECTED, "ATC takes no model without inputs or outputs (E16001)")
NAME_TWICE = Rule(
    "name-twice", _REJECTED, "give every node a name of its own, other than the inputs' (E13009)"
)
NO_PLUGIN = Rule(
    "no-plugin", _REJECTED, "convert the model with `fa-compiler atc --route onnx` (E13010)"
)
OTHER_DOMAIN = Rule(
    "no-plugin", _REJECTED, "leave it out, or give --plugin-domain if you have its plugin (E13010)"
)
YOUR_PLUGIN = Rule("your-plugin", Severity.NOTE, "compare the results on the device")
NO_OPSET = Rule("no-opset", _REJECTED, "add the domain to the model's opset_import (E19999)")
EMPTY_OUTPUT = Rule(
    "empty-output",
    _REJECTED,
    "name every output: the parser connects absent inputs with it (E19999)",
)
TRAP = Rule("parser-plugin", _REJECTED, "give all inputs of a group, none of them empty (E19999)")
PARAMS = Rule("parser-params", _REJECTED, "write the attribute (E11010)")
TENSORS = Rule("too-many-tensors", _REJECTED, "leave out what the operator does not have (E19999)")
ELEMENT = Rule("element-type", _REJECTED, "use a type that ATC knows (E19999)")
BRANCHES = Rule(
    "branches", _REJECTED, "an If has then_branch and else_branch and nothing else (E19999)"
)
FORM = Rule(
    "plugin-form",
    _REJECTED,
    "convert the model with `fa-compiler atc --route onnx` (E11010, E19999)",
)
UNREAD = Rule(
    "plugin-misses", Severity.WRONG, "convert the model with `fa-compiler atc --route onnx`"
)
STOPS = Rule("plugin-stops", _LATER, "convert the model with `fa-compiler atc --route onnx`")
OPEN = Rule("plugin-unknown", Severity.NOTE, "compare the results on the device")
PLUGIN_RULES = {
    Severity.REJECTED: FORM,
    Severity.LATER: STOPS,
    Severity.WRONG: UNREAD,
    Severity.NOTE: OPEN,
}
FLAGS = Rule(
    "plugin-flags", Severity.WRONG, "convert the model with `fa-compiler atc --route onnx`"
)
GAP = Rule("gap-in-branch", _LATER, "give the input, or use an operator without it (E11019)")
UNLINKED = Rule("unlinked", _LATER, "correct the name (E11019)")
BROKEN = Rule("broken-plugin", _LATER, "use the plugin that `fa-compiler atc --route onnx` writes")
PROTOTYPE = Rule("prototype", _LATER, "write the node as `fa-compiler registry show` has it")

ACCEPTED_INPUTS = {"NPUPromptFlashAttention": (3, 5, 7, 9, 12), "NPUFlashAttention": (9,)}
"""The numbers of inputs that the parser's plugins accept; none of the inputs may be absent."""

REQUIRED = {
    "NPUFlashAttention": ("head_num", "input_layout"),
    "NPUIncreFlashAttention": ("num_heads", "input_layout"),
    "NPUPromptFlashAttention": ("num_heads", "input_layout"),
    "NPURotaryPositionEmbedding": ("mode",),
}

PLUGIN_NODES = {plugin.node: op_type for op_type, plugin in PARSER_PLUGINS.items()}
"""The operators around attention, by the nodes of the parser's own plugins."""
WRITE_AS_READ = "write the operator by `fa-compiler atc --route air` or onnx"

Domains = Mapping[str, int]


def check(path: Path, plugins: Iterable[str] = (DOMAIN,)) -> list[FileDiagnostic]:
    """All diagnostics of a file for ATC. `plugins` are the domains for which plugins are installed.

    Raises OSError if the file cannot be read.
    """
    if path.stat().st_size > LIMIT:
        return [TOO_LARGE("", f"{path.name} has more than {LIMIT} bytes")]
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError:
        return [NOT_ONNX("", f"{path.name} is not an ONNX model, or is truncated")]
    return check_model(model, path.parent, plugins)


def check_model(
    model: onnx.ModelProto, folder: Path | None, plugins: Iterable[str] = (DOMAIN,)
) -> list[FileDiagnostic]:
    """All diagnostics of a model. `folder` is the folder of its weights' files; None does not check
    these files."""
    if (text := _no_text(model)) is not None:
        return [NOT_ONNX("", f"it holds the text {text!r}, which is not UTF-8")]
    own, graphs = frozenset(plugins), list(all_graphs(model.graph))
    imports = {entry.domain or "ai.onnx": entry.version for entry in model.opset_import}
    found = list(_ends(model.graph)) or list(_pre_check(graphs, imports, own))
    if found:
        return found
    found += _empty_outputs(graphs)
    found += _flags(graphs)
    found += _tensors_and_nodes(model, graphs, folder, own, imports)
    found += check_outputs(model.graph)
    return sorted(found, key=lambda diagnostic: diagnostic.severity is not Severity.REJECTED)


def _ends(graph: onnx.GraphProto) -> Iterator[FileDiagnostic]:
    """The main graph has inputs and outputs."""
    initial = {tensor.name for tensor in graph.initializer}
    inputs = [value for value in graph.input if value.name not in initial]
    for what, values in (("inputs", inputs), ("outputs", graph.output)):
        if not values:
            yield NO_ENDS("", f"the graph has no {what}")


def _pre_check(
    graphs: Sequence[onnx.GraphProto], imports: Domains, own: frozenset[str]
) -> Iterator[FileDiagnostic]:
    """Names are unique, and there is a plugin for each node."""
    for graph in graphs:
        yield from _names(graph)
        for node in graph.node:
            yield from _registered(node, imports, own)


def _tensors_and_nodes(
    model: onnx.ModelProto,
    graphs: Sequence[onnx.GraphProto],
    folder: Path | None,
    own: frozenset[str],
    imports: Domains,
) -> Iterator[FileDiagnostic]:
    """What the parser finds in the graphs, one after the other: inputs and outputs, nodes,
    weights."""
    facts = input_facts(model, graphs)
    known = set[str]().union(*map(_made, graphs))
    read = set[str]().union(*map(_read, graphs))
    for graph in graphs:
        is_main = graph is model.graph
        for value in (*graph.input, *graph.output):
            if not value.type.HasField("tensor_type"):
                yield ELEMENT(value.name, "it is not a tensor")
        for node in graph.node:
            for name in node.input:
                if name not in known:
                    yield UNLINKED(_label(node), f"nothing makes its input '{name}'")
            yield from _node(node, own)
            if node.domain in STANDARD and node.op_type != "If":
                yield from _plugin(node, imports["ai.onnx"], read, facts)
            if not is_main and "" in node.input:
                yield GAP(_label(node), "it has an absent input and lies in a branch of an If")
        yield from check_weights(graph, folder, is_main=is_main)


def _read(graph: onnx.GraphProto) -> set[str]:
    """The tensors that are outputs of a graph or inputs of its nodes."""
    return {
        *(value.name for value in graph.output),
        *(name for node in graph.node for name in node.input),
    }


def _no_text(message: Any) -> bytes | None:
    """A text of a message that is not UTF-8, or None. protobuf refuses it in the parser's schema,
    but not in ONNX's."""
    if isinstance(message, onnx.TensorProto):  # the data of a tensor are skipped
        texts: tuple[Any, ...] = (message.name, message.doc_string)
        return next((text for text in texts if isinstance(text, bytes)), None)
    for field, value in message.ListFields():
        if field.type not in (field.TYPE_STRING, field.TYPE_MESSAGE):
            continue
        items = (
            [value] if isinstance(value, (str, bytes)) or hasattr(value, "ListFields") else value
        )
        for item in items:
            if isinstance(item, bytes):
                return item
            if not isinstance(item, str) and (found := _no_text(item)) is not None:
                return found
    return None


def _made(graph: onnx.GraphProto) -> set[str]:
    named = [*(value.name for value in graph.input), *(tensor.name for tensor in graph.initializer)]
    return {"", *named, *(name for node in graph.node for name in node.output)}


def _label(node: onnx.NodeProto) -> str:
    return node.name or next(iter(node.output), node.op_type)


# -- the pre-check --------------------------------------------------------------------------------


def _names(graph: onnx.GraphProto) -> Iterator[FileDiagnostic]:
    """Nodes, inputs and initializers share one namespace. The parser itself names nodes without a
    name."""
    initial = {tensor.name for tensor in graph.initializer}
    taken = Counter(
        parser_nodes((value.name for value in graph.input if value.name not in initial), initial)
    )
    unnamed = 0
    for node in graph.node:
        name = node.name or f"{node.op_type}_{unnamed}"
        unnamed += not node.name
        taken[name] += 1
        if taken[name] > 1:
            yield NAME_TWICE(name, "another node, input or weight has this name")


def _registered(
    node: onnx.NodeProto, imports: Domains, own: frozenset[str]
) -> Iterator[FileDiagnostic]:
    domain = node.domain or "ai.onnx"
    if domain not in imports:
        yield NO_OPSET(_label(node), f"the model imports no opset of the domain '{domain}'")
    elif not _is_known(domain, node.op_type, imports[domain], own):
        rule = NO_PLUGIN if domain in ("ai.onnx", *own) else OTHER_DOMAIN
        version = imports[domain]
        said = f"no plugin is registered for {domain}::{version}::{node.op_type}"
        if (
            domain == "ai.onnx"
            and version > parser.NEWEST
            and parser.takes("", node.op_type, parser.NEWEST)
        ):
            said = f"the model has opset {version}, and the plugins of the parser are for {parser.NEWEST} and older"
        yield rule(_label(node), said)


def _is_known(domain: str, op_type: str, version: int, own: frozenset[str]) -> bool:
    if domain in own and op_type not in operators():
        return domain != DOMAIN
    if domain in own:
        return version == VERSION
    return parser.takes("" if domain == "ai.onnx" else domain, op_type, version)


# -- the nodes ------------------------------------------------------------------------------------


def _empty_outputs(graphs: list[onnx.GraphProto]) -> Iterator[FileDiagnostic]:
    """An output without a name is harmless unless some other node has an absent input."""
    for graph in graphs:
        makers = [node for node in graph.node if "" in node.output]
        readers = [node for node in graph.node if "" in node.input]
        for maker in makers:
            if any(reader is not maker for reader in readers):
                other = next(_label(reader) for reader in readers if reader is not maker)
                yield EMPTY_OUTPUT(
                    _label(maker), f"it has an output without a name, and {other} an absent input"
                )


def _node(node: onnx.NodeProto, own: frozenset[str]) -> Iterator[FileDiagnostic]:
    if node.domain in own and node.op_type not in operators():
        yield YOUR_PLUGIN(
            _label(node),
            f"{node.domain}::{node.op_type} is left to your plugin, which is not read here",
        )
    elif node.domain in own:
        yield from _own(node)
    elif node.op_type in PLUGIN_NODES:
        yield from _around(node)
    elif node.op_type.startswith("NPU") and node.op_type in REQUIRED:
        yield from _attention(node)
    elif node.op_type == "If" and sorted(attr.name for attr in node.attribute) != [
        "else_branch",
        "then_branch",
    ]:
        yield BRANCHES(_label(node), "its attributes are not the two branches")


def _flags(graphs: list[onnx.GraphProto]) -> Iterator[FileDiagnostic]:
    """The plugin of ConvTranspose sets flags for the whole file, and does not reset them."""
    earlier = ""
    for graph in graphs:
        for node in graph.node:
            if node.domain not in STANDARD or node.op_type != "ConvTranspose":
                continue
            names = {attr.name for attr in node.attribute}
            if earlier and "output_shape" not in names:
                sentence = (
                    f"{earlier} has output_shape, and ATC's plugin treats all later ConvTransposes as "
                    "if they had it"
                )
                yield FLAGS(_label(node), sentence)
            if "output_shape" in names:
                earlier = _label(node)


def _plugin(
    node: onnx.NodeProto, version: int, read: set[str], facts: Mapping[str, InputFact]
) -> Iterator[FileDiagnostic]:
    """The diagnostics of a node for the plugin of its operator: what it refuses, and what it
    ignores."""
    try:
        form = NodeForm.of_proto(node, version, read, facts)
        found = list(plugin_mismatches(form))
    except (ValueError, TypeError, AttributeError) as error:
        yield FORM(
            _label(node), f"an attribute is of another type than {node.op_type} has ({error})"
        )
        return
    for mismatch in found:
        yield PLUGIN_RULES[mismatch.severity](_label(node), mismatch.sentence)


def _attention(node: onnx.NodeProto) -> Iterator[FileDiagnostic]:
    """The diagnostics of the parser's own attention plugins. Two of the three build an operator
    that does not work."""
    given = {attr.name for attr in node.attribute}
    for name in REQUIRED[node.op_type]:
        if name not in given:
            yield PARAMS(
                _label(node), f"the attribute {name} is absent, which the parser's plugin needs"
            )
    counts = ACCEPTED_INPUTS.get(node.op_type)
    if counts and (len(node.input) not in counts or "" in node.input):
        listed = " or ".join(map(str, counts))
        absent = sum(not name for name in node.input)
        yield TRAP(
            _label(node),
            f"it has {len(node.input)} inputs, {absent} of them empty; expected {listed}, none empty",
        )
    if node.op_type == "NPUFlashAttention":
        yield BROKEN(
            _label(node), "the parser's plugin drops input_layout, which FlashAttentionScore needs"
        )
    elif node.op_type == "NPUIncreFlashAttention":
        yield BROKEN(_label(node), "the parser's plugin leaves the keys and values unconnected")
    elif node.op_type == "NPUPromptFlashAttention" and not {"pre_tokens", "next_tokens"} <= given:
        yield BROKEN(
            _label(node),
            "the parser's plugin treats absent pre_tokens and next_tokens as 0",
            "write both",
        )


def _around(node: onnx.NodeProto) -> Iterator[FileDiagnostic]:
    """The diagnostics of a node for the parser's own plugin of an operator around attention."""
    op_type = PLUGIN_NODES[node.op_type]
    attrs = {attr.name: plain(onnx.helper.get_attribute_value(attr)) for attr in node.attribute}
    for name in REQUIRED.get(node.op_type, ()):
        if name not in attrs:
            yield PARAMS(
                _label(node), f"the attribute {name} is absent, which the parser's plugin needs"
            )
    spec = get(op_type)
    for names, count in ((node.input, len(spec.inputs)), (node.output, len(spec.outputs))):
        if any(names[count:]):
            yield TENSORS(
                _label(node),
                f"{op_type} has {count} of these tensors, and the node has {len(names)}",
            )
    unknown = next((name for name in attrs if name not in spec.attr_names), None)
    if unknown is not None:
        yield UNREAD(
            _label(node),
            f"{node.op_type} of ATC's own parser does not read {unknown}",
            WRITE_AS_READ,
        )
    elif (misfit := plugin_misfit(op_type, {**PARSER_PLUGINS[op_type].fixed, **attrs})) is not None:
        yield UNREAD(_label(node), misfit, WRITE_AS_READ)


def _own(node: onnx.NodeProto) -> Iterator[FileDiagnostic]:
    """The diagnostics of a node that becomes the GE operator of its name: tensors by position,
    attributes by name."""
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
