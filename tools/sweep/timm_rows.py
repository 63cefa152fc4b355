"""Rows of timm: small variants, made smaller."""

from __future__ import annotations

import functools
from typing import Any

from tools.sweep import torchvision_stub
from tools.sweep.rows import Row, by_position

VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 4}
STAGES = {"embed_dim": 16, "depths": (1, 1, 2, 1), "num_heads": (1, 2, 4, 4)}

# The architecture: the name of a timm model, what replaces its own numbers, and the image's size.
TABLE: dict[str, tuple[str, dict[str, Any], int]] = {
    "beitv2": ("beitv2_base_patch16_224", VIT, 32),
    "cait": ("cait_xxs24_224", {**VIT, "depth_token_only": 1}, 32),
    "coat": ("coat_tiny", {"img_size": 64, "embed_dims": (32, 32, 32, 32), "serial_depths": (1, 1, 1, 1),
                           "parallel_depth": 1, "num_heads": 8}, 64),
    "coatnet": ("coatnet_pico_rw_224", {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 32, 64)}, 64),
    "convit": ("convit_tiny", {**VIT, "local_up_to_layer": 1}, 32),
    "crossvit": ("crossvit_tiny_240", {"embed_dim": (24, 48), "depth": ((1, 1, 0), (1, 1, 0))}, 240),
    "davit": ("davit_tiny", {"depths": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32), "num_heads": (1, 2, 4, 4)}, 64),
    "deit3": ("deit3_small_patch16_224", VIT, 32),
    "deit_distilled": ("deit_tiny_distilled_patch16_224", VIT, 32),
    "edgenext": ("edgenext_xx_small", {"dims": (16, 16, 32, 32), "depths": (1, 1, 2, 2)}, 64),
    "efficientformer": ("efficientformer_l1", {"depths": (1, 1, 1, 2), "embed_dims": (16, 16, 16, 32)}, 224),
    "efficientformerv2": ("efficientformerv2_s0", {"img_size": 64, "depths": (1, 1, 2, 2),
                                                   "embed_dims": (16, 16, 32, 32)}, 64),
    "efficientvit_b": ("efficientvit_b0", {"depths": (1, 1, 2, 2)}, 64),
    "efficientvit_m": ("efficientvit_m0", {"img_size": 128}, 128),
    "eva02": ("eva02_tiny_patch14_224", {**VIT, "mlp_ratio": 2}, 32),
    "fastvit": ("fastvit_sa12", {"layers": (1, 1, 1, 1), "embed_dims": (16, 16, 32, 32)}, 64),
    "flexivit": ("flexivit_small", VIT, 32),
    "gcvit": ("gcvit_xxtiny", {"img_size": 64}, 64),
    "hiera": ("hiera_tiny_224", {"embed_dim": 16, "stages": (1, 1, 1, 1)}, 224),
    "levit": ("levit_128s", {"embed_dim": (32, 32, 48), "depth": (1, 1, 1), "key_dim": 8, "num_heads": (2, 4, 4)}, 224),
    "levit_conv": ("levit_conv_128s", {"embed_dim": (32, 32, 48), "depth": (1, 1, 1), "key_dim": 8,
                                       "num_heads": (2, 4, 4)}, 224),
    "maxvit": ("maxvit_pico_rw_256", {"img_size": 64, "depths": (1, 1, 1, 1), "embed_dim": (32, 32, 32, 32)}, 64),
    "mobilevitv2": ("mobilevitv2_050", {}, 64),
    "mvitv2": ("mvitv2_tiny", {"img_size": 64}, 64),
    "naflexvit": ("naflexvit_base_patch16_gap", {"embed_dim": 32, "depth": 2, "num_heads": 4}, 64),
    "nest": ("nest_tiny_jx", {"img_size": 32, "patch_size": 2}, 32),
    "nextvit": ("nextvit_small", {}, 64),
    "pe_core": ("vit_pe_core_tiny_patch16_384", VIT, 32),
    "pit": ("pit_ti_224", {"img_size": 64, "base_dims": (8, 8, 8), "depth": (1, 1, 1), "heads": (2, 4, 4)}, 64),
    "pvt_v2": ("pvt_v2_b0", {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 16, 32), "num_heads": (1, 2, 2, 4)}, 64),
    "samvit": ("samvit_base_patch16", {**VIT, "window_size": 2, "global_attn_indexes": (1,)}, 32),
    "shvit": ("shvit_s1", {}, 64),
    "swiftformer": ("swiftformer_xs", {}, 64),
    "swin_s3": ("swin_s3_tiny_224", {"img_size": 64, "depths": (1, 1, 2, 1), "embed_dim": 16,
                                     "num_heads": (1, 2, 4, 4), "window_size": (4, 4, 2, 2)}, 64),
    "swinv2_cr": ("swinv2_cr_tiny_224", {"img_size": 64, **STAGES, "window_size": 2}, 64),
    "tiny_vit": ("tiny_vit_5m_224", {"embed_dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1),
                                     "num_heads": (2, 2, 4, 4)}, 64),
    "tnt": ("tnt_s_legacy_patch16_224", {"img_size": 32, "embed_dim": 32, "inner_dim": 8, "depth": 2,
                                         "num_heads_inner": 2, "num_heads_outer": 4}, 32),
    "twins_pcpvt": ("twins_pcpvt_small", {"img_size": 64, "embed_dims": (8, 16, 16, 32), "depths": (1, 1, 1, 1),
                                          "num_heads": (1, 2, 2, 4)}, 64),
    "twins_svt": ("twins_svt_small", {"img_size": 64, "embed_dims": (8, 16, 16, 32), "depths": (1, 2, 1, 1),
                                      "num_heads": (1, 2, 2, 4), "wss": (2, 2, 2, 2)}, 64),
    "visformer": ("visformer_tiny", {"img_size": 64, "embed_dim": 48, "depth": (1, 1, 1), "num_heads": 4}, 64),
    "vit_medium_gap": ("vit_medium_patch16_gap_240", VIT, 32),
    "vit_parallel": ("vit_small_patch16_18x2_224", VIT, 32),
    "vit_registers": ("vit_small_patch14_reg4_dinov2", VIT, 32),
    "vit_relpos": ("vit_relpos_small_patch16_224", VIT, 32),
    "vit_siglip": ("vit_base_patch16_siglip_224", VIT, 32),
    "vit_srelpos": ("vit_srelpos_small_patch16_224", VIT, 32),
    "volo": ("volo_d1_224", {"img_size": 64}, 64),
    "xcit": ("xcit_nano_12_p16_224", {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 4}, 64),
}  # fmt: skip


def make(name: str, numbers: dict[str, Any], size: int, exporter: str) -> tuple[Any, dict[str, Any]]:
    """The model and one image. TorchScript gets plain products where timm asks its switch."""
    torchvision_stub.install()
    import timm
    import torch
    from timm.layers import set_fused_attn

    set_fused_attn(exporter != "torchscript")
    model = timm.create_model(name, pretrained=False, num_classes=5, **numbers)
    return by_position(model), {"image": torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(1))}


ROWS = [
    Row("timm", name, functools.partial(make, model, numbers, size), {"image": {0: "batch"}})
    for name, (model, numbers, size) in TABLE.items()
]
