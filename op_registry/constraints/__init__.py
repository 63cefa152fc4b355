"""The numbered constraints, one module for each operator that has them; `core.py` says how they are written.

How to add those of another operator: write a module with `rules = Rules("IFA")`, one function for each
number, and `OWN_TYPES`, and name it below.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

from fa_compiler.op_registry.constraints import (
    attention_update,
    flash_attention_score,
    flash_attention_score_grad,
    fused_infer_attention_score,
    incre_flash_attention,
    lightning_indexer,
    lightning_indexer_grad,
    prompt_flash_attention,
    ring_attention_update,
    sparse_flash_attention,
    sparse_flash_attention_grad,
    sparse_lightning_indexer_grad_kl_loss,
)

MODULES: Mapping[str, ModuleType] = {
    "FlashAttentionScore": flash_attention_score,
    "FlashAttentionScoreGrad": flash_attention_score_grad,
    "IncreFlashAttention": incre_flash_attention,
    "PromptFlashAttention": prompt_flash_attention,
    "FusedInferAttentionScore": fused_infer_attention_score,
    "RingAttentionUpdate": ring_attention_update,
    "AttentionUpdate": attention_update,
    "LightningIndexer": lightning_indexer,
    "LightningIndexerGrad": lightning_indexer_grad,
    "SparseFlashAttention": sparse_flash_attention,
    "SparseFlashAttentionGrad": sparse_flash_attention_grad,
    "SparseLightningIndexerGradKLLoss": sparse_lightning_indexer_grad_kl_loss,
}
"""The operators whose constraints are numbered."""
