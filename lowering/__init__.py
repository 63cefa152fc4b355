"""The lowering of fused nodes: CPU kernels for ONNX Runtime (`ort`) and Ascend's file formats (`ascend`)."""

OPERATORS = (
    "FlashAttentionScore",
    "FlashAttentionScoreGrad",
    "LightningIndexer",
    "LightningIndexerGrad",
    "SparseFlashAttention",
    "SparseFlashAttentionGrad",
    "SparseLightningIndexerGradKLLoss",
    "IncreFlashAttention",
    "PromptFlashAttention",
    "FusedInferAttentionScore",
    "RingAttentionUpdate",
    "AttentionUpdate",
)
"""The operators for which the library for ONNX Runtime has kernels."""
