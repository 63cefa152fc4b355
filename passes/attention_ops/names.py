"""Attention operators that a model may already hold."""

from __future__ import annotations

import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, attention_names

NPU = ("NPUFlashAttention", "NPUPromptFlashAttention", "NPUIncreFlashAttention")
"""The attention operators that ATC's parser knows in the domain npu, and in the standard domain,
too."""

ATTENTION_OPS = {
    ("ai.onnx.preview", "FlexAttention"),
    ("", "Attention"),
    ("ai.onnx", "Attention"),
    ("com.microsoft", "Attention"),
    ("com.microsoft", "MultiHeadAttention"),
    ("com.microsoft", "GroupQueryAttention"),
    ("com.microsoft", "DecoderMaskedMultiHeadAttention"),
    ("com.microsoft", "DecoderMaskedSelfAttention"),
    ("com.microsoft", "PackedMultiHeadAttention"),
    ("com.microsoft", "PackedAttention"),
    ("com.microsoft", "PagedAttention"),
    ("com.microsoft", "SparseAttention"),
    ("com.microsoft", "SparsePagedAttention"),
    ("com.microsoft", "DynamicSparseAttention"),
    ("com.microsoft", "QAttention"),
    ("com.microsoft", "DecoderAttention"),
    ("com.microsoft", "LongformerAttention"),
    ("com.microsoft", "QOrderedAttention"),
    ("com.microsoft", "QOrderedLongformerAttention"),
    *((domain, name) for domain in ("npu", "", "ai.onnx") for name in NPU),
    *((DOMAIN, name) for name in attention_names()),
}


def is_attention_op(node: ir.Node) -> bool:
    """Is this node a fused attention operator of ONNX, ONNX Runtime or Ascend?"""
    return (node.domain, node.op_type) in ATTENTION_OPS


def is_linear_attention_op(node: ir.Node) -> bool:
    """Is this node the linear attention of ONNX or ONNX Runtime?"""
    return node.domain in ("", "ai.onnx", "com.microsoft") and node.op_type == "LinearAttention"
