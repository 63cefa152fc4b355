"""From fused nodes to something that runs: kernels for ONNX Runtime (`ort`)."""

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
"""The operators that the library for ONNX Runtime has kernels for."""
