"""The fused operators as nodes of the domain npu, for which ATC's own ONNX parser has plugins.

Attention becomes NPUPromptFlashAttention. What is around it was fused only where a plugin of
op_registry/parser_plugins.py writes it, and becomes the node of this plugin with the attributes
that it reads.

The plugin of attention passes on every attribute that is written; it treats an absent window as 0.
It connects 3, 5, 7, 9 or 12 inputs, none of which may be absent. So the inputs are

    query, key, value alone   these three
    with a bias and a mask    these are inputs 3 and 4
    with a mask alone         input 3 is a tensor without elements, which the operator's tiling
                              treats as no bias. The parser was seen to accept it, but it was not
                              tested on hardware. So it is written only if the user agreed
                              (`empty_bias`)
    with a bias alone         input 4 is a mask of the size of the scores that excludes nothing
                              (sparse_mode 1)

FlashAttentionScore (SBH after a transposition) and PromptFlashAttention of our domain are
converted. The type is float16, or bfloat16 if query, key and value have it. All other operators of
our domain are refused. float32 is refused, too, unless the user agreed to a cast.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.lowering.ascend.onnx_route.errors import (
    UnsupportedModel,
    UnsupportedNode,
    problem_at,
)
from fa_compiler.op_registry import DOMAIN, bind_inputs, full_attrs, get, verify
from fa_compiler.op_registry.parser_plugins import NPU, NPU_VERSION, PARSER_PLUGINS
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import EMPTY_BIAS, HALF_ATTENTION, Options
from fa_compiler.passes.emit.build import PREFIX, Builder, Names
from fa_compiler.passes.ir.nodes import (
    FOLD_LIMIT,
    all_graphs,
    attribute_values,
    remember_versions,
    text_attr,
)
from fa_compiler.passes.ir.surgery import replace_value, restore_order, sweep
from fa_compiler.passes.rewrite import prompt
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.passes.rewrite.prompt import PromptCall
from fa_compiler.passes.values.shapes import analyse

OP = "NPUPromptFlashAttention"
ATTRIBUTES = (
    *(
        "num_heads",
        "input_layout",
        "scale_value",
        "pre_tokens",
        "next_tokens",
        "num_key_value_heads",
        "sparse_mode",
    ),
    "inner_precise",
)
"""The attributes that the parser's plugin reads."""

_SWAP = (1, 0, 2)


@dataclass(frozen=True)
class Replaced:
    """The node that took the place of a fused one, its operator, the layout of an attention, and
    what of the user's assumptions it needs."""

    node: str
    op: str
    layout: str | None = None
    assumed: tuple[str, ...] = ()


def to_prompts(model: ir.Model, options: Options) -> dict[str, Replaced]:
    """Replace every FlashAttentionScore of a model by a PromptFlashAttention of our domain, in
    place.

    Returns:
        What took the place of each, by its name.

    Raises:
        UnsupportedModel: nodes have no such form; the error lists all of them with their reasons.
    """
    problems: list[str] = []
    replaced: dict[str, Replaced] = {}
    graphs = remember_versions(model)
    info = analyse(model)
    names = Names.of(graphs)
    for graph in graphs:
        builder = Builder(graph, names, info)
        for node in [node for node in graph if node.domain == DOMAIN]:
            try:
                if node.op_type != prompt.OP and node.op_type not in PARSER_PLUGINS:
                    replaced[node.name or ""] = _to_prompt(node, builder, options)
            except Decline as decline:
                own = (
                    "" if decline.hint in (None, decline.code.advice) else f"; try: {decline.hint}"
                )
                problems.append(problem_at(node, f"{decline.reason}{own}"))
            except UnsupportedNode as reason:
                problems.append(problem_at(node, str(reason)))
        if not problems:
            restore_order(graph)
    if problems:
        raise UnsupportedModel(problems)
    return replaced


def to_npu(model: ir.Model, empty_bias: bool) -> dict[str, Replaced]:
    """Write every node of our domain as that of the parser's plugin, in place; attention is a
    PromptFlashAttention.

    Returns:
        What took the place of each, by its name.

    Raises:
        UnsupportedModel: the parser's plugin cannot connect the inputs of nodes; the error lists
            all of them.
    """
    problems: list[str] = []
    replaced: dict[str, Replaced] = {}
    graphs = all_graphs(model)
    names = Names.of(graphs)
    for graph in graphs:
        builder = Builder(graph, names, analyse(model))
        for node in [node for node in graph if node.domain == DOMAIN]:
            try:
                is_around = node.op_type in PARSER_PLUGINS
                made = _around(node, builder) if is_around else _to_npu(node, builder, empty_bias)
                replaced[node.name or ""] = made
            except UnsupportedNode as reason:
                problems.append(problem_at(node, str(reason)))
        if not problems:
            restore_order(graph)
    if problems:
        raise UnsupportedModel(problems)
    model.opset_imports[NPU] = NPU_VERSION
    model.opset_imports.pop(DOMAIN, None)
    return replaced


def _to_prompt(node: ir.Node, builder: Builder, options: Options) -> Replaced:
    if node.op_type != prompt.TRAINING:
        raise UnsupportedNode(
            "ATC's own parser has no plugin for it that works; use --route air or onnx"
        )
    old, turned = node.outputs[-1], _turn(node, builder)
    made = prompt.build(prompt.as_prompt(node, builder.info), node, old, builder, options)
    result = made.outputs[0]
    if turned:
        query = made.inputs[0]
        shape = None if query is None else builder.info.shape(query)
        builder.info.set(result, shape, result.dtype)
        result.shape = None if shape is None else ir.Shape([size.const for size in shape])
    for violation in verify(node_view(made, builder.info), options.ascend_product, options.cann):
        raise UnsupportedNode(str(violation))
    wanted = builder.info.dtype(old)
    is_cast = wanted is not None and wanted is not result.dtype
    if wanted is not None:
        result = builder.cast(result, wanted)
    replace_value(old, builder.transpose(result, _SWAP) if turned else result)
    sweep(builder.graph, [node])
    assumed = (HALF_ATTENTION,) if is_cast else ()
    return Replaced(made.name or "", prompt.OP, text_attr(made, "input_layout", ""), assumed)


def _turn(node: ir.Node, builder: Builder) -> bool:
    """Transpose query, key and value from SBH to BSH. The caller transposes the result back."""
    if text_attr(node, "input_layout", "") != "SBH":
        return False
    for index, value in enumerate(node.inputs[:3]):
        assert value is not None
        node.replace_input_with(index, builder.transpose(value, _SWAP))
    node.attributes["input_layout"] = ir.AttrString("input_layout", "BSH")
    return True


def _to_npu(node: ir.Node, builder: Builder, empty_bias: bool) -> Replaced:
    call = _prompt_call(node)
    assumed: tuple[str, ...] = ()
    names = ["query", "key", "value"]
    inputs, attrs = dict(call.inputs), dict(call.attrs)
    if "atten_mask" in inputs or "pse_shift" in inputs:
        names += ["pse_shift", "atten_mask"]
    if "atten_mask" in inputs and "pse_shift" not in inputs:
        if not empty_bias:
            raise UnsupportedNode(
                "it has a mask and no bias, but ATC's parser needs a bias before a mask; an empty tensor as bias was "
                f"never tried on hardware: --assume {EMPTY_BIAS} writes it, or use --route air or onnx"
            )
        dtype = builder.info.dtype(inputs["query"]) or ir.DataType.FLOAT16
        inputs["pse_shift"] = builder.constant(np.zeros(0, dtype.numpy()), "no_bias")
        assumed = (EMPTY_BIAS,)
    elif "pse_shift" in inputs and "atten_mask" not in inputs:
        inputs["atten_mask"] = _nothing_masked(inputs, str(attrs["input_layout"]), builder)
        attrs["sparse_mode"] = 1
    if set(inputs) - set(names):
        raise UnsupportedNode(
            f"it has {sorted(set(inputs) - set(names))[0]}, which this route cannot write"
        )
    made = ir.Node(
        NPU,
        OP,
        [inputs[name] for name in names],
        [ir.convenience.convert_attribute(name, attrs[name]) for name in ATTRIBUTES],
        num_outputs=1,
        name=builder.names.new(f"{PREFIX}_{OP}"),
    )
    builder.graph.append(made)
    old, out = node.outputs[0], made.outputs[0]
    out.name = builder.names.new(f"{made.name}_attention_out")
    replace_value(old, out)
    sweep(builder.graph, [node])
    return Replaced(made.name or "", OP, str(attrs["input_layout"]), assumed)


def _around(node: ir.Node, builder: Builder) -> Replaced:
    """The node of a plugin in the place of an operator around attention, with the attributes that
    the plugin reads."""
    plugin = PARSER_PLUGINS[node.op_type]
    attrs = [node.attributes[name] for name in plugin.read]
    name, outputs = builder.names.new(f"{PREFIX}_{plugin.node}"), len(node.outputs)
    made = ir.Node(NPU, plugin.node, node.inputs, attrs, num_outputs=outputs, name=name)
    builder.graph.append(made)
    for place, (old, out) in enumerate(zip(node.outputs, made.outputs, strict=True)):
        out.name = builder.names.new(f"{name}_output_{place}")
        replace_value(old, out)
    sweep(builder.graph, [node])
    return Replaced(name, plugin.node)


def _nothing_masked(inputs: Mapping[str, ir.Value], layout: str, builder: Builder) -> ir.Value:
    """A mask [S1,S2] that excludes nothing."""
    axis = layout.index("S")
    shapes = [builder.info.shape(inputs[name]) for name in ("query", "key")]
    sizes = [shape[axis].const for shape in shapes if shape is not None]
    rows, columns = (sizes[0], sizes[1]) if len(sizes) == 2 else (None, None)
    if rows is None or columns is None or rows * columns > FOLD_LIMIT:
        raise UnsupportedNode(
            "it has a bias and no mask, but ATC's parser connects both or none, and a mask needs known sizes; fix the "
            "sizes with --input-shape, or use --route air or onnx"
        )
    return builder.constant(np.zeros((rows, columns), np.bool_), "no_mask")


def _prompt_call(node: ir.Node) -> PromptCall:
    """The inputs and attributes of a PromptFlashAttention."""
    if node.op_type != prompt.OP:
        raise UnsupportedNode("it is not a PromptFlashAttention")
    spec = get(prompt.OP)
    attrs = full_attrs(spec, attribute_values(node))
    bound = bind_inputs(spec, list(node.inputs), attrs)
    return PromptCall(
        {name: value for name, value in bound.items() if isinstance(value, ir.Value)}, attrs
    )
