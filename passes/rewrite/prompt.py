"""Turns a FlashAttentionScore into an equal PromptFlashAttention, for products that have only the
latter.

| FlashAttentionScore | PromptFlashAttention | because |
| --- | --- | --- |
| scale_value, head_num | the same, num_heads | |
| pse_type 0, or 1 with the scale 1 | pse_shift | it is always added after the scale |
| real_shift of one row | pse_shift with this row for each query row | FlashAttentionScore repeats it itself |
| key of fewer heads | num_key_value_heads | FlashAttentionScore takes the number from the shapes |
| atten_mask, sparse_mode 1 to 4 | the same, True excludes | both have the same modes 1 to 4 |
| sparse_mode 0, unlimited tokens | the same | only the mask counts then |
| no mask | no mask, sparse_mode 0 | the mode means nothing then |
| inner_precise 2 | 2 | rows without a key give 0 in both |
| inner_precise 0, 1 | 0 | no row is without a key: that was proven, or the user vouched for it |

Refused: statistics that something reads, dropout, prefixes, sinks, rope, packed sequences and every
other input; layouts other than BSH, BSND and BNSD; on 310P rows without a key, because it is not
known what 310P gives for them. Sizes, masks by head and types are checked by the operator's own
constraints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import onnx_ir as ir

from fa_compiler.op_registry import bind_inputs, full_attrs, get
from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.op_registry.products import product
from fa_compiler.passes.answer.decline import Decline, first_reason
from fa_compiler.passes.answer.options import HALF_ATTENTION, Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import SIXTEEN_BITS, attribute_values, is_read
from fa_compiler.passes.masks.missed import vouching
from fa_compiler.passes.ops.context import Shape
from fa_compiler.passes.rewrite.node_view import prototype, registry_node
from fa_compiler.passes.values.shapes import ShapeInfo

OP, TRAINING = "PromptFlashAttention", "FlashAttentionScore"
LAYOUTS = ("BSH", "BSND", "BNSD")
INNER_PRECISE: dict[object, int] = {0: 0, 1: 0, 2: 2}
_INPUTS = {
    "query": "query",
    "key": "key",
    "value": "value",
    "real_shift": "pse_shift",
    "atten_mask": "atten_mask",
}


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
    """The PromptFlashAttention that computes the same as a FlashAttentionScore. Raises Decline,
    naming the node."""
    spec = get(TRAINING)
    attrs = full_attrs(spec, attribute_values(node))
    bound = bind_inputs(spec, list(node.inputs), attrs)
    given = {name: value for name, value in bound.items() if isinstance(value, ir.Value)}
    reason = _refusal(node, given, attrs)
    if reason is not None:
        raise _illegal(node, reason)
    heads, layout = attrs["head_num"], attrs["input_layout"]
    kv_heads = _kv_heads(node, given, str(layout), heads, info)
    if kv_heads == heads:
        kv_heads = 0  # which stands for as many
    return PromptCall(
        {_INPUTS[name]: value for name, value in given.items()},
        {
            "num_heads": heads,
            "num_key_value_heads": kv_heads,
            "input_layout": layout,
            "scale_value": attrs["scale_value"],
            "inner_precise": INNER_PRECISE.get(attrs["inner_precise"], 0),
            **_window(node, attrs, "atten_mask" in given),
        },
    )


def _refusal(
    node: ir.Node, given: Mapping[str, ir.Value], attrs: Mapping[str, int | float | str]
) -> str | None:
    """Why no PromptFlashAttention computes the same as a FlashAttentionScore; None where one does,
    if it can have the window and the heads."""
    others = [name for name in given if name not in _INPUTS]
    if others:
        return f"it has {others[0]}, which {OP} does not have"
    read = [output for output in node.outputs[:-1] if is_read(output)]
    if read:
        return f"its statistic '{read[0].name}' is read, which {OP} does not compute"
    layout, pse_type = attrs["input_layout"], attrs["pse_type"]
    scaled = pse_type != 0 and (pse_type, attrs["scale_value"]) != (1, 1.0)
    return first_reason(
        {
            f"it has dropout, which {OP} does not have": attrs["keep_prob"] != 1.0,
            f"its layout is {layout}, which {OP} does not take": layout not in LAYOUTS,
            f"its bias of pse_type {pse_type} is not added after the scale": "real_shift" in given
            and scaled,
        }
    )


def build(
    call: PromptCall,
    node: ir.Node,
    old: ir.Value,
    builder: Builder,
    options: Options,
    words: tuple[str, ...] = (),
) -> ir.Node:
    """Add the PromptFlashAttention to the graph. Its result has the shape of `old`. `words` are the
    assumptions under which a bias would be a mask.

    A call of another type than float16 or bfloat16 is cast to float16 if the user agreed to that.
    Raises Decline, naming `node`, where the CANN version is not known to have the operator, or the
    product to compute the same. The version comes first: no assumption that a user vouches for
    helps against it.
    """
    spec = prototype(OP, options, node)
    if call.attrs["inner_precise"] == 2 and product(options.ascend_product).name == "310P":
        reason = "some rows are masked everywhere, and what 310P gives for those is not known"
        raise Decline(Code.EMPTY_ROWS, reason, node)
    if "pse_shift" in call.inputs and product(options.ascend_product).name == "310P":
        hint = None
        if words:
            hint = vouching(words)
        reason = "the operator of 310P takes no bias"
        if words:
            reason += "; the mask has to be one, because its numbers decide what a row gives that is masked everywhere"
        raise Decline(Code.ILLEGAL, reason, node, hint)
    inputs = dict(call.inputs)
    dtype = builder.info.dtype(inputs["query"])
    if dtype not in SIXTEEN_BITS:
        if HALF_ATTENTION not in options.assume:
            kind = dtype.numpy().name if dtype else "of unknown type"
            reason = f"{OP} computes in float16 or bfloat16, and this is {kind}"
            hint = f"--assume {HALF_ATTENTION} casts query, key, value and result; or convert the model to float16"
            raise Decline(Code.DTYPE, reason, node, hint)
        dtype = ir.DataType.FLOAT16
        floats = [name for name in inputs if name != "atten_mask"]
        inputs |= {name: builder.cast(inputs[name], dtype) for name in floats}
    if "pse_shift" in inputs:
        inputs["pse_shift"] = _with_all_rows(inputs["pse_shift"], call, builder)
    made = registry_node(spec, inputs, call.attrs, builder)
    out = made.outputs[0]
    out.name, out.dtype, out.shape = (
        builder.names.new(f"{made.name}_attention_out"),
        dtype,
        old.shape,
    )
    builder.info.set(out, builder.info.shape(old), dtype)
    builder.graph.append(made)
    return made


def _with_all_rows(bias: ir.Value, call: PromptCall, builder: Builder) -> ir.Value:
    """A bias of one row, repeated for the rows of the query if their number is known; any other one
    as it is."""
    query, shape = builder.info.shape(call.inputs["query"]), builder.info.sizes(bias)
    if query is None or len(shape) != 4 or shape[2].const != 1:
        return bias
    rows = query[2 if call.attrs["input_layout"] == "BNSD" else 1].const
    return bias if rows in (None, 1) else builder.expand(bias, [1, 1, rows, 1])


def _window(
    node: ir.Node, attrs: Mapping[str, object], masked: bool
) -> dict[str, int | float | str]:
    """The mode of a mask, and the tokens of a band in the mode that has them. Raises Decline."""
    mode, before, after = (attrs[name] for name in ("sparse_mode", "pre_tockens", "next_tockens"))
    assert isinstance(mode, int) and isinstance(before, int) and isinstance(after, int)
    if not masked:
        mode = 0
    elif mode > 4:
        raise _illegal(node, f"its sparse_mode is {mode}, which {OP} does not have")
    elif mode == 0 and min(before, after) < UNLIMITED:
        raise _illegal(node, "it has a mask and a window beside it")
    if mode != 4:
        before = after = UNLIMITED
    return {"sparse_mode": mode, "pre_tokens": before, "next_tokens": after}


def _kv_heads(
    node: ir.Node, given: Mapping[str, ir.Value], layout: str, heads: object, info: ShapeInfo
) -> int:
    """The number of key heads, which FlashAttentionScore takes from the shapes. Raises Decline."""
    query, key = (info.sizes(given[name]) for name in ("query", "key"))
    if isinstance(heads, int) and len(query) == len(key) == len(layout):
        kv_heads = _heads_in(query, key, layout, heads)
        if kv_heads:
            return kv_heads
    raise _illegal(node, "the number of heads of its key is not known before the model runs")


def _heads_in(query: Shape, key: Shape, layout: str, heads: int) -> int | None:
    """The number of heads of a key, beside a query of `heads` heads; None where it is unknown."""
    if layout != "BSH":
        return key[layout.index("N")].const
    width, own = key[2].const, query[2].const
    if width is None or not own or (width * heads) % own:
        return None
    return width * heads // own


def _registered(op_type: str, socs: tuple[str, ...]) -> bool:
    return any(get(op_type).product(soc) is not None for soc in socs)


def _illegal(node: ir.Node, reason: str) -> Decline:
    return Decline(Code.ILLEGAL, reason, node)
