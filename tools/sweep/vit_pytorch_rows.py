"""Rows of vit-pytorch."""

from __future__ import annotations

import functools
from importlib import import_module
from typing import Any

from tools.sweep import torchvision_stub
from tools.sweep.rows import Row, by_position

PLAIN = {"image_size": 32, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48,
         "dim_head": 8}  # fmt: skip
ONE = {"seq_len": 64, "patch_size": 8, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48,
       "dim_head": 8}  # fmt: skip
FILM = {"image_size": 32, "image_patch_size": 8, "frames": 4, "frame_patch_size": 2, "num_classes": 5, "dim": 32,
        "heads": 4, "mlp_dim": 48, "dim_head": 8}  # fmt: skip
STAGES = {"num_classes": 5, "dim": 16, "depth": (1, 1, 1, 1), "heads": (1, 2, 4, 4)}
IMAGE, FOUR_STAGES = (3, 32, 32), (3, 64, 64)

# The module: its class, what it is made with, and the shape of what it reads.
TABLE: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "ats_vit": ("ViT", {**PLAIN, "max_tokens_per_depth": (12, 8)}, IMAGE),
    "cait": ("CaiT", {**PLAIN, "cls_depth": 1}, IMAGE),
    "cct": ("CCT", {"img_size": (32, 32), "embedding_dim": 32, "num_layers": 2, "num_heads": 4, "mlp_ratio": 2,
                    "num_classes": 5}, IMAGE),
    "cross_vit": ("CrossViT", {"image_size": 48, "num_classes": 5, "sm_dim": 16, "lg_dim": 32, "depth": 1,
                               "sm_enc_heads": 2, "lg_enc_depth": 1, "lg_enc_heads": 4, "cross_attn_depth": 1,
                               "cross_attn_heads": 4, "sm_enc_mlp_dim": 32, "lg_enc_mlp_dim": 48}, (3, 48, 48)),
    "crossformer": ("CrossFormer", {"dim": (32, 32, 32, 64), "depth": (1, 1, 1, 1), "global_window_size": (4, 2, 2, 1),
                                    "local_window_size": 2, "num_classes": 5}, FOUR_STAGES),
    "cvt": ("CvT", {"num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s2_heads": 2, "s2_depth": 1,
                    "s3_emb_dim": 32, "s3_heads": 2, "s3_depth": 1}, IMAGE),
    "deepvit": ("DeepViT", PLAIN, IMAGE),
    "jumbo_vit": ("JumboViT", {**PLAIN, "dim": 16, "jumbo_cls_k": 2}, IMAGE),
    "levit": ("LeViT", {"image_size": 64, "num_classes": 5, "dim": (32, 32, 32), "depth": 1, "heads": (2, 4, 4),
                        "mlp_mult": 2, "dim_key": 8, "dim_value": 16}, FOUR_STAGES),
    "look_vit": ("LookViT", {"dim": 32, "image_size": 32, "num_classes": 5, "depth": 1, "patch_size": 8, "heads": 4,
                             "dim_head": 8, "highres_patch_size": 4, "cross_attn_heads": 4,
                             "cross_attn_dim_head": 8}, IMAGE),
    "max_vit": ("MaxViT", {"num_classes": 5, "dim": 16, "depth": (1, 1), "dim_head": 8, "window_size": 4}, FOUR_STAGES),
    "nest": ("NesT", {"image_size": 32, "patch_size": 4, "num_classes": 5, "dim": 16, "heads": 2, "dim_head": 8,
                      "num_hierarchies": 3, "block_repeats": (1, 1, 1)}, IMAGE),
    "normalized_vit": ("nViT", PLAIN, IMAGE),
    "parallel_vit": ("ViT", PLAIN, IMAGE),
    "pit": ("PiT", {**PLAIN, "depth": (1, 1, 1)}, IMAGE),
    "regionvit": ("RegionViT", {"dim": (32, 32, 32, 64), "depth": (1, 1, 1, 1), "window_size": 2,
                                "num_classes": 5}, FOUR_STAGES),
    "rvt": ("RvT", PLAIN, IMAGE),
    "scalable_vit": ("ScalableViT", {**STAGES, "reduction_factor": (4, 2, 2, 1), "window_size": (4, 4, 2, 2)},
                     FOUR_STAGES),
    "sep_vit": ("SepViT", {**STAGES, "dim_head": 8}, (3, 224, 224)),
    "simple_uvit": ("SimpleUViT", PLAIN, IMAGE),
    "simple_vit": ("SimpleViT", PLAIN, IMAGE),
    "simple_vit_1d": ("SimpleViT", ONE, (3, 64)),
    "simple_vit_3d": ("SimpleViT", {**FILM, "depth": 2}, (3, 4, 32, 32)),
    "simple_vit_with_qk_norm": ("SimpleViT", PLAIN, IMAGE),
    "simple_vit_with_register_tokens": ("SimpleViT", PLAIN, IMAGE),
    "simple_vit_with_relative_proj_pos_bias": ("SimpleViT", PLAIN, IMAGE),
    "simple_vit_with_value_residual": ("SimpleViT", PLAIN, IMAGE),
    "simple_vit_attn_residual": ("SimpleViTAttnResidual", PLAIN, IMAGE),
    "t2t": ("T2TViT", {"image_size": 32, "num_classes": 5, "dim": 32, "depth": 2, "heads": 4, "mlp_dim": 48,
                       "dim_head": 8, "t2t_layers": ((3, 2), (3, 2))}, IMAGE),
    "twins_svt": ("TwinsSVT", {"num_classes": 5, "s1_emb_dim": 16, "s2_emb_dim": 16, "s3_emb_dim": 16, "s3_depth": 1,
                               "s4_emb_dim": 32, "s4_depth": 1}, (3, 224, 224)),
    "vit": ("ViT", PLAIN, IMAGE),
    "vit_5": ("ViT", PLAIN, IMAGE),
    "vit_detpool": ("ViTDetPool", PLAIN, IMAGE),
    "vit_for_small_dataset": ("ViT", PLAIN, IMAGE),
    "vit_nd_pope": ("ViTND", {**{key: PLAIN[key] for key in PLAIN if key != "image_size"}, "ndim": 2,
                              "input_shape": 32}, IMAGE),
    "vit_nd_rotary": ("ViTND", {**{key: PLAIN[key] for key in PLAIN if key != "image_size"}, "ndim": 2,
                                "input_shape": 32}, IMAGE),
    "vit_with_patch_merger": ("ViT", {**PLAIN, "patch_merge_layer": 1, "patch_merge_num_tokens": 4}, IMAGE),
    "vivit": ("ViViT", {**FILM, "spatial_depth": 1, "temporal_depth": 1}, (3, 4, 32, 32)),
    "xcit": ("XCiT", {**PLAIN, "cls_depth": 1}, IMAGE),
}  # fmt: skip


def make(module: str, name: str, numbers: dict[str, Any], shape: tuple[int, ...], _: str) -> tuple[Any, dict[str, Any]]:
    """The model and two inputs of a shape."""
    torchvision_stub.install()
    import torch

    made = getattr(import_module(f"vit_pytorch.{module}"), name)(**numbers)
    return by_position(made), {"image": torch.randn(2, *shape, generator=torch.Generator().manual_seed(1))}


ROWS = [
    Row("vit_pytorch", module, functools.partial(make, module, name, numbers, shape), {"image": {0: "batch"}})
    for module, (name, numbers, shape) in TABLE.items()
]
