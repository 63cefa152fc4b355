"""The inputs of a decoder that follow from the number of tokens, so that no step has to be given
them."""

from __future__ import annotations

from collections import Counter

import onnx

from fa_compiler.protos.subgraphs import all_nodes, graph_inputs

SWITCH = "use_cache_branch"
"""The input of a merged decoder that tells whether there are cached tokens."""

MASK = "attention_mask"

POSITIONS = ("position_ids", "cache_position")

MADE = frozenset(
    {
        *(SWITCH, MASK, *POSITIONS),
        *("past_sequence_length", "total_sequence_length", "seqlens_k"),
        *("write_indices", "nonpad_kv_seqlen"),
    }
)
"""Inputs that follow from the number of tokens. A session makes them where the caller gives
none."""

BY_SEQUENCE = 2
"""The axes of an input with numbers for each sequence."""


def is_made(info: onnx.ValueInfoProto, has_encoder: bool) -> bool:
    """Does an input follow from the number of tokens, by its name and its axes? The mask of a model
    with an encoder is that of the encoder's tokens."""
    rank = len(info.type.tensor_type.shape.dim)
    if info.name == MASK:
        return rank == BY_SEQUENCE and not has_encoder
    return info.name in MADE and not (info.name in POSITIONS and rank > BY_SEQUENCE)


def handed_on(model: onnx.ModelProto) -> dict[str, str]:
    """The scalar inputs that the model only hands on as outputs, whose numbers nothing else reads.

    The exporter of transformers 5 makes such inputs of a window's width, which the mask has as a
    constant.
    """
    nodes = list(all_nodes(model.graph.node))
    readers = Counter(name for node in nodes for name in node.input)
    outputs = {info.name for info in model.graph.output}
    scalars = {info.name for info in graph_inputs(model) if _is_scalar(info)}
    return {
        node.input[0]: node.output[0]
        for node in nodes
        if (node.domain, node.op_type) == ("", "Identity")
        and node.input[0] in scalars
        and node.output[0] in outputs
        and readers[node.input[0]] == 1
        and not readers[node.output[0]]
    }


def _is_scalar(info: onnx.ValueInfoProto) -> bool:
    return (
        info.type.HasField("tensor_type")
        and info.type.tensor_type.HasField("shape")
        and not (info.type.tensor_type.shape.dim)
    )
