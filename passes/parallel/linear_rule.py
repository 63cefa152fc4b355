"""The forms of FlashLinearAttention and ShortConvolution: SequenceStates and SequenceTails.

Their results carry the sequence, and the states behind the last token are whole. The ranks hand on
what a token needs of the earlier ones: states of a fixed size, and the last tokens of a window.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from fa_compiler.op_registry import collectives, get
from fa_compiler.op_registry.ops.flash_linear_attention import CORRECTED
from fa_compiler.passes.algebra.symbolic import consts
from fa_compiler.passes.answer.decline import label
from fa_compiler.passes.ir.nodes import is_read
from fa_compiler.passes.parallel.attention_rule import add_collective, operands_of
from fa_compiler.passes.parallel.methods import Handed
from fa_compiler.passes.parallel.places import Place, Refusal
from fa_compiler.passes.parallel.sharder import Sharder, collapsing_rule, local_rule

TOKENS = {
    "FlashLinearAttention": (
        "query",
        "key",
        "value",
        "decay",
        "beta",
        "low_rank_write",
        "low_rank_read",
    ),
    "ShortConvolution": ("input",),
}
"""The inputs with a row for each token."""
TAKEN = {
    "FlashLinearAttention": (*TOKENS["FlashLinearAttention"], "past_state"),
    "ShortConvolution": ("input", "weight", "bias", "past_state"),
}
"""All inputs that are divided among ranks."""
OF = {
    collectives.SPECS[name]: name
    for name in (collectives.SEQUENCE_STATES, collectives.SEQUENCE_TAILS)
}
"""The operator of the ranks by that of one process."""


@local_rule(*OF)
def output(sharder: Sharder, node: ir.Node, number: int, place: Place) -> ir.Value:
    """The results of the rank's tokens."""
    name = get(node.op_type).output_names[number]
    if name != "output":
        raise Refusal(f"its output {name} has no tokens", node)
    _, attrs = operands_of(node)
    axis = axis_of(node.op_type, attrs)
    if place != Place(axis):
        raise Refusal(
            f"its result is demanded in parts along dimension {place.dim}, not along its tokens",
            node,
        )
    return _made(sharder, node).outputs[0]


@collapsing_rule(*OF)
def present_state(sharder: Sharder, node: ir.Node, number: int) -> ir.Value:
    """The state behind the last token, which every rank knows."""
    if number != 1:
        raise Refusal("it mixes the sequence: each rank would need its result for all tokens", node)
    return _made(sharder, node).outputs[1]


def axis_of(op_type: str, attrs: Mapping[str, Any]) -> int:
    """The dimension of the tokens."""
    if op_type == "ShortConvolution" and not attrs["channels_last"]:
        return 2
    return 1


def _made(sharder: Sharder, node: ir.Node) -> ir.Node:
    """The operator of the ranks in the place of the node."""
    if (made := sharder.attentions.get(node)) is not None:
        return made
    inputs, attrs = operands_of(node)
    axis = axis_of(node.op_type, attrs)
    forms = {}
    for name, value in inputs.items():
        if name not in TAKEN[node.op_type]:
            raise Refusal(f"its input {name} is not cut", node)
        if name not in TOKENS[node.op_type]:
            forms[name] = sharder.whole(value, node)
        elif sharder.shape(value, node)[axis] != sharder.length:
            raise Refusal(f"its {name} is not proven to be as long as the sequence", node)
        else:
            forms[name] = sharder.local(value, Place(axis), node)
    sharder.handed.append(Handed(label(node), _bytes(sharder, node, inputs, attrs)))
    read = is_read(node.outputs[-1]) and len(node.outputs) > 1
    names: Sequence[str] = collectives.STATE_OUTPUTS
    if not read:
        names = names[:1]
    return add_collective(sharder, node, OF[node.op_type], forms, attrs, names)


def _bytes(
    sharder: Sharder, node: ir.Node, inputs: Mapping[str, ir.Value], attrs: Mapping[str, Any]
) -> int:
    """What a chunk hands on (fa_compiler/parallel/states.py). Raises Refusal where the sizes are
    unknown."""
    sizes = {name: consts(sharder.shape(value, node)) for name, value in inputs.items()}
    if node.op_type == "ShortConvolution":
        channels, _, width = sizes["weight"]
        if channels is None or width is None:
            raise Refusal("its channels or its window are unknown", node)
        dtype = sharder.info.dtype(inputs["weight"])
        return channels * (width - 1) * (4 if dtype is None else int(dtype.itemsize))
    query, value = sizes["query"][2], sizes["value"][2]
    if query is None or value is None:
        raise Refusal("its heads and their sizes are unknown", node)
    heads = int(attrs["kv_num_heads"])
    size, width = query // int(attrs["q_num_heads"]), value // heads
    factors = 1
    if attrs["update_rule"] in CORRECTED:
        factors = size * size
    elif "decay" in sizes:
        decays = sizes["decay"][2]
        if decays is None:
            raise Refusal("the width of its decay is unknown", node)
        factors = decays // heads
    return 4 * heads * (size * width + factors)
