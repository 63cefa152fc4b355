"""Converts the attention operators of ONNX, ONNX Runtime and ATC's parser that a model holds to
FlashAttentionScore.

Each family of operators has a file, which begins with the grammar of what it accepts. `convert`
calls the file of an operator, by the table `FAMILIES`; `DIRECT` has the operators that become one
node as they stand. An operator that is not converted stays as it is, and the report says why.
"""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, attention_names
from fa_compiler.op_registry.collectives import (
    CACHE_ATTENTION,
    SEQUENCE_ATTENTION,
    SEQUENCE_STATES,
    SEQUENCE_TAILS,
)
from fa_compiler.op_registry.collectives import DOMAIN as PARALLEL
from fa_compiler.op_registry.runtimes import DOMAINS, OPERATORS
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code, Kind
from fa_compiler.passes.attention_ops import (
    flex,
    group_query,
    multi_head,
    npu,
    onnx,
    projected_attention,
)
from fa_compiler.passes.attention_ops.call import ConvertedOp, OpConverter
from fa_compiler.passes.attention_ops.direct import Direct
from fa_compiler.passes.attention_ops.dynamic_sparse import convert_dynamic_sparse
from fa_compiler.passes.attention_ops.gated_delta_net import convert_gated_delta_net
from fa_compiler.passes.attention_ops.linear import convert_convolution, convert_linear
from fa_compiler.passes.attention_ops.names import ATTENTION_OPS, is_attention_op
from fa_compiler.passes.attention_ops.packed import convert_packed
from fa_compiler.passes.attention_ops.paged import convert_paged
from fa_compiler.passes.attention_ops.sparse_paged import convert_sparse_paged
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import operand_at
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.values.facts import Facts

__all__ = [
    "ATTENTION_OPS",
    "DIRECT",
    "ConvertedOp",
    "OpConverter",
    "Replacing",
    "convert",
    "is_attention_op",
]

STANDARD_OR_CONTRIB = ("", "ai.onnx", "com.microsoft")
FAMILIES: dict[tuple[str, str], Callable[[OpConverter], ConvertedOp]] = {
    ("", "Attention"): onnx.convert,
    ("ai.onnx", "Attention"): onnx.convert,
    ("ai.onnx.preview", "FlexAttention"): flex.convert,
    ("com.microsoft", "Attention"): projected_attention.convert,
    ("com.microsoft", "QAttention"): projected_attention.convert_quantised,
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"): multi_head.convert_decoder,
    ("com.microsoft", "GroupQueryAttention"): group_query.convert,
    ("com.microsoft", "MultiHeadAttention"): multi_head.convert,
    **{
        (domain, name): family
        for domain in ("npu", "", "ai.onnx")
        for name, family in (
            ("NPUFlashAttention", npu.flash),
            ("NPUPromptFlashAttention", npu.prompt),
            ("NPUIncreFlashAttention", npu.incremental),
        )
    },
}


def _already(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
    """The decline of an operator that a run has made."""
    raise Decline(Code.ALREADY_FUSED, f"{node.op_type} is the operator already", node)


Replacing = Callable[[ir.Node, Facts, Builder], Direct]
DIRECT: dict[tuple[str, str], tuple[Kind, Replacing]] = {
    ("com.microsoft", "PackedAttention"): ("forward", convert_packed),
    ("com.microsoft", "PackedMultiHeadAttention"): ("forward", convert_packed),
    ("com.microsoft", "PagedAttention"): ("forward", convert_paged),
    ("com.microsoft", "SparsePagedAttention"): ("forward", convert_sparse_paged),
    ("com.microsoft", "DynamicSparseAttention"): ("forward", convert_dynamic_sparse),
    ("com.microsoft", "GatedDeltaNet"): ("no_softmax", convert_gated_delta_net),
    (DOMAIN, "FlashLinearAttention"): ("no_softmax", _already),
    (DOMAIN, "ShortConvolution"): ("convolution", _already),
    **{(DOMAIN, name): ("backward", _already) for name in attention_names() if "Grad" in name},
    (PARALLEL, SEQUENCE_ATTENTION): ("forward", _already),
    (PARALLEL, CACHE_ATTENTION): ("forward", _already),
    (PARALLEL, SEQUENCE_STATES): ("no_softmax", _already),
    (PARALLEL, SEQUENCE_TAILS): ("convolution", _already),
    **{
        (domain, "LinearAttention"): ("no_softmax", convert_linear)
        for domain in STANDARD_OR_CONTRIB
    },
    **{
        (domain, "CausalConvWithState"): ("convolution", convert_convolution)
        for domain in STANDARD_OR_CONTRIB
    },
}
"""The operators that become one node as they stand, with the kind of their blocks."""
REASONS = {
    "DecoderAttention": "ONNX Runtime's CPU provider does not have it, and whether its keys are cached is data",
    "DecoderMaskedSelfAttention": "ONNX Runtime's CPU provider does not have it, nor is its key cache in rows",
    "SparseAttention": "its keys are chosen by blocks, and its cache is written in place",
    "QOrderedAttention": "its operands are quantised",
    "QOrderedLongformerAttention": "its operands are quantised",
    "LongformerAttention": "its rows attend a window and global tokens, by projections of their own",
}
"""Why operators of com.microsoft have no conversion."""


def convert(call: OpConverter) -> ConvertedOp:
    """The conversion of an attention operator. Raises Decline."""
    node = call.node
    own = OPERATORS.get(call.options.target, ())
    if node.op_type in own and DOMAINS[node.op_type] == node.domain.removeprefix("ai.onnx"):
        raise call.decline(
            Code.ALREADY_FUSED, f"{node.op_type} is an operator of the target already"
        )
    family = FAMILIES.get((node.domain, node.op_type))
    if family is not None:
        if (unknown := unknown_part(node)) is not None:
            reason = f"{node.op_type} has {unknown}, and what it means is not known here"
            raise call.decline(Code.READY_MADE, reason)
        if any(size.const == 0 for size in call.info.sizes(operand_at(node, 0))):
            raise call.decline(
                Code.READY_MADE, f"the query of {node.op_type} has no elements in any run"
            )
        return family(call)
    if node.domain == DOMAIN:
        raise call.decline(Code.ALREADY_FUSED, f"{node.op_type} is the operator already")
    reason = REASONS.get(node.op_type, "there is no conversion for it")
    raise call.decline(Code.READY_MADE, f"{node.op_type} is left as it is: {reason}")
