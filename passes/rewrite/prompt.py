"""Turns a FlashAttentionScore into an equal PromptFlashAttention, for products that have only the latter.

| FlashAttentionScore | PromptFlashAttention | because |
| --- | --- | --- |
| scale_value, head_num | the same, num_heads | |
| pse_type 0, or 1 with the scale 1 | pse_shift | it is always added after the scale |
| key of fewer heads | num_key_value_heads | FlashAttentionScore takes the number from the shapes |
| atten_mask, sparse_mode 1 to 4 | the same, True excludes | both have the same modes 1 to 4 |
| sparse_mode 0, unlimited tokens | the same | only the mask counts then |
| no mask | no mask, sparse_mode 0 | the mode means nothing then |
| inner_precise 2 | 2 | rows without a key give 0 in both |
| inner_precise 0, 1 | 0 | no row is without a key: that was proven, or the user vouched for it |

Refused: statistics that something reads, dropout, prefixes, sinks, rope, packed sequences and every other input;
layouts other than BSH, BSND and BNSD; on 310P rows without a key, because it is not known what 310P gives for them.
Sizes, masks by head and types are checked by the operator's own constraints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.op_registry import bind_inputs, full_attrs, get
from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.op_registry.products import product
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import HALF_ATTENTION, Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import SIXTEEN_BITS
from fa_compiler.passes.masks.missed import vouching
from fa_compiler.passes.rewrite.node_view import registry_node
from fa_compiler.passes.values.shapes import ShapeInfo

OP, TRAINING = "PromptFlashAttention", "FlashAttentionScore"
LAYOUTS = ("BSH", "BSND", "BNSD")
_INPUTS = {"query": "query", "key": "key", "value": "value", "real_shift": "pse_shift", "atten_mask": "atten_mask"}


@dataclass(frozen=True)
class PromptCall:
    """The inputs and attributes of a PromptFlashAttention."""

    inputs: Mapping[str, ir.Value]
    attrs: Mapping[str, int | float | str]


def is_wanted(options: Options) -> bool:
    """Does the product have PromptFlashAttention, but not FlashAttentionScore?"""
    if options.target != "ascend":
        return False
    socs = product(options.ascend_product).socs
    return not _registered(TRAINING, socs) and _registered(OP, socs)


def as_prompt(node: ir.Node, info: ShapeInfo) -> PromptCall:
    """The PromptFlashAttention that computes the same as a FlashAttentionScore. Raises Decline, naming the node."""
    spec = get(TRAINING)
    attrs = full_attrs(spec, {name: attr.value for name, attr in node.attributes.items()})
    bound = bind_inputs(spec, list(node.inputs), attrs)
    given = {name: value for name, value in bound.items() if isinstance(value, ir.Value)}
    for name in given:
        if name not in _INPUTS:
            raise _illegal(node, f"it has {name}, which {OP} does not have")
    for output in node.outputs[:-1]:
        if output.uses() or output.is_graph_output():
            raise _illegal(node, f"its statistic '{output.name}' is read, which {OP} does not compute")
    if attrs["keep_prob"] != 1.0:
        raise _illegal(node, f"it has dropout, which {OP} does not have")
    layout = attrs["input_layout"]
    if layout not in LAYOUTS:
        raise _illegal(node, f"its layout is {layout}, which {OP} does not take")
    if "real_shift" in given and attrs["pse_type"] != 0 and (attrs["pse_type"], attrs["scale_value"]) != (1, 1.0):
        raise _illegal(node, f"its bias of pse_type {attrs['pse_type']} is not added after the scale")
    heads, kv_heads = attrs["head_num"], _kv_heads(node, given, str(layout), attrs["head_num"], info)
    return PromptCall(
        {_INPUTS[name]: value for name, value in given.items()},
        {
            "num_heads": heads,
            "num_key_value_heads": 0 if kv_heads == heads else kv_heads,
            "input_layout": layout,
            "scale_value": attrs["scale_value"],
            "inner_precise": 2 if attrs["inner_precise"] == 2 else 0,
            **_window(node, attrs, "atten_mask" in given),
        },
    )


def build(
    call: PromptCall, node: ir.Node, old: ir.Value, builder: Builder, options: Options, words: tuple[str, ...] = ()
) -> ir.Node:
    """Add the PromptFlashAttention to the graph. Its result has the shape of `old`. `words` are the assumptions under
    which a bias would be a mask.

    A call of another type than float16 or bfloat16 is cast to float16 if the user agreed to that. Raises Decline,
    naming `node`, where the product is not known to compute the same.
    """
    if call.attrs["inner_precise"] == 2 and product(options.ascend_product).name == "310P":
        reason = "some rows are masked everywhere, and what 310P gives for those is not known"
        raise Decline(Code.EMPTY_ROWS, reason, node)
    if "pse_shift" in call.inputs and product(options.ascend_product).name == "310P":
        hint = vouching(words) if words else None
        raise Decline(Code.ILLEGAL, "310P takes no bias, and a mask whose empty rows matter is one here", node, hint)
    inputs = dict(call.inputs)
    dtype = builder.info.dtype(inputs["query"])
    if dtype not in SIXTEEN_BITS:
        if HALF_ATTENTION not in options.assume:
            reason = f"{OP} computes in float16 or bfloat16, and this is {dtype.name if dtype else 'of unknown type'}"
            hint = f"`--assume {HALF_ATTENTION}` casts query, key, value and result; or convert the model to float16"
            raise Decline(Code.DTYPE, reason, node, hint)
        dtype = ir.DataType.FLOAT16
        floats = [name for name in inputs if name != "atten_mask"]
        inputs |= {name: builder.cast(inputs[name], dtype) for name in floats}
    made = registry_node(get(OP, options.cann), inputs, call.attrs, builder)
    out = made.outputs[0]
    out.name, out.dtype, out.shape = builder.names.new(f"{made.name}_attention_out"), dtype, old.shape
    builder.info.set(out, builder.info.shape(old), dtype)
    builder.graph.append(made)
    return made


def _window(node: ir.Node, attrs: Mapping[str, object], masked: bool) -> dict[str, int | float | str]:
    mode, before, after = (attrs[name] for name in ("sparse_mode", "pre_tockens", "next_tockens"))
    assert isinstance(mode, int) and isinstance(before, int) and isinstance(after, int)
    if not masked:
        mode = 0
    elif mode > 4:
        raise _illegal(node, f"its sparse_mode is {mode}, which {OP} does not have")
    elif mode == 0 and min(before, after) < UNLIMITED:
        raise _illegal(node, "it has a mask and a window beside it")
    limited = mode == 4
    return {
        "sparse_mode": mode,
        "pre_tokens": before if limited else UNLIMITED,
        "next_tokens": after if limited else UNLIMITED,
    }


def _kv_heads(node: ir.Node, given: Mapping[str, ir.Value], layout: str, heads: object, info: ShapeInfo) -> int:
    """The number of key heads, which FlashAttentionScore takes from the shapes. Raises Decline."""
    shapes = [info.shape(given[name]) for name in ("query", "key")]
    if isinstance(heads, int) and all(shape is not None and len(shape) == len(layout) for shape in shapes):
        query, key = (shape for shape in shapes if shape is not None)
        if layout != "BSH":
            found = key[layout.index("N")].const
        else:
            width, own = key[2].const, query[2].const
            found = None if width is None or not own or (width * heads) % own else width * heads // own
        if found:
            return found
    raise _illegal(node, "the number of heads of its key is not known before the model runs")


def _registered(op_type: str, socs: tuple[str, ...]) -> bool:
    return any(get(op_type).product(soc) is not None for soc in socs)


def _illegal(node: ir.Node, reason: str) -> Decline:
    return Decline(Code.ILLEGAL, reason, node)
