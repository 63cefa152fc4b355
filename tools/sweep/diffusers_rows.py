"""Rows of diffusers: transformers and U-nets of diffusion models."""

from __future__ import annotations

import functools
from typing import Any

from tools.sweep.rows import Row

PRELOADED = ("diffusers", "diffusers.models.transformers", "diffusers.models.unets")

Shape = tuple[int, ...]
HEADS = {"num_attention_heads": 4, "attention_head_dim": 8, "num_layers": 2}
IMAGE, TEXT, TIME = (2, 4, 8, 8), (2, 7, 32), (2,)
STAGES = {"in_channels": 4, "out_channels": 4, "block_out_channels": (32, 32), "layers_per_block": 1,
          "norm_num_groups": 8}  # fmt: skip

# The row: its class, what it is made with, and the shape of each input. A name in INTEGERS is an integer, one in MASKS
# a mask of ones with a short second sequence.
INTEGERS = {"class_labels": 9}
MASKS = ("encoder_attention_mask", "text_embedding_mask", "text_embedding_mask_t5")
TABLE: dict[str, tuple[str, dict[str, Any], dict[str, Shape]]] = {
    "dit": (
        "DiTTransformer2DModel",
        {**HEADS, "sample_size": 8, "num_embeds_ada_norm": 1000, "norm_num_groups": 8},
        {"hidden_states": IMAGE, "timestep": TIME, "class_labels": TIME},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {**HEADS, "sample_size": 8, "cross_attention_dim": 32, "caption_channels": 32, "norm_num_groups": 8,
         "use_additional_conditions": False},
        {"hidden_states": IMAGE, "encoder_hidden_states": TEXT, "timestep": TIME, "encoder_attention_mask": (2, 7)},
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {**HEADS, "sample_size": 8, "in_channels": 4, "out_channels": 4, "joint_attention_dim": 32,
         "caption_projection_dim": 32, "pooled_projection_dim": 16, "pos_embed_max_size": 8, "qk_norm": "rms_norm",
         "dual_attention_layers": (0,)},
        {"hidden_states": IMAGE, "encoder_hidden_states": TEXT, "pooled_projections": (2, 16), "timestep": TIME},
    ),
    "flux": (
        "FluxTransformer2DModel",
        {**HEADS, "num_layers": 1, "num_single_layers": 1, "in_channels": 8, "joint_attention_dim": 32,
         "pooled_projection_dim": 16, "axes_dims_rope": (2, 2, 4)},
        {"hidden_states": (2, 16, 8), "encoder_hidden_states": TEXT, "pooled_projections": (2, 16), "timestep": TIME,
         "img_ids": (16, 3), "txt_ids": (7, 3)},
    ),
    "flux2": (
        "Flux2Transformer2DModel",
        {**HEADS, "num_layers": 1, "num_single_layers": 1, "in_channels": 8, "joint_attention_dim": 32,
         "axes_dims_rope": (2, 2, 2, 2), "guidance_embeds": False},
        {"hidden_states": (2, 16, 8), "encoder_hidden_states": TEXT, "timestep": TIME, "img_ids": (16, 4),
         "txt_ids": (7, 4)},
    ),
    "chroma": (
        "ChromaTransformer2DModel",
        {**HEADS, "num_layers": 1, "num_single_layers": 1, "in_channels": 8, "joint_attention_dim": 32,
         "axes_dims_rope": (2, 2, 4), "approximator_num_channels": 16, "approximator_hidden_dim": 32,
         "approximator_layers": 1},
        {"hidden_states": (2, 16, 8), "encoder_hidden_states": TEXT, "timestep": TIME, "img_ids": (16, 3),
         "txt_ids": (7, 3)},
    ),
    "bria": (
        "BriaTransformer2DModel",
        {**HEADS, "num_layers": 1, "num_single_layers": 1, "in_channels": 8, "joint_attention_dim": 32,
         "axes_dims_rope": [2, 2, 4]},
        {"hidden_states": (2, 16, 8), "encoder_hidden_states": TEXT, "timestep": TIME, "img_ids": (16, 3),
         "txt_ids": (7, 3)},
    ),
    "auraflow": (
        "AuraFlowTransformer2DModel",
        {**HEADS, "num_layers": None, "num_mmdit_layers": 1, "num_single_dit_layers": 1, "sample_size": 8,
         "joint_attention_dim": 32, "caption_projection_dim": 32, "pos_embed_max_size": 16},
        {"hidden_states": IMAGE, "encoder_hidden_states": TEXT, "timestep": TIME},
    ),
    "hunyuan_dit": (
        "HunyuanDiT2DModel",
        {**HEADS, "in_channels": 4, "patch_size": 2, "sample_size": 8, "hidden_size": 32, "cross_attention_dim": 32,
         "cross_attention_dim_t5": 32, "pooled_projection_dim": 16, "text_len": 7, "text_len_t5": 5,
         "use_style_cond_and_image_meta_size": False},
        {"hidden_states": IMAGE, "timestep": TIME, "encoder_hidden_states": TEXT, "text_embedding_mask": (2, 7),
         "encoder_hidden_states_t5": (2, 5, 32), "text_embedding_mask_t5": (2, 5)},
    ),
    "hunyuan_video": (
        "HunyuanVideoTransformer3DModel",
        {**HEADS, "num_layers": 1, "num_single_layers": 1, "num_refiner_layers": 1, "in_channels": 4,
         "out_channels": 4, "patch_size": 2, "guidance_embeds": False, "text_embed_dim": 32,
         "pooled_projection_dim": 16, "rope_axes_dim": (2, 2, 4)},
        {"hidden_states": (2, 4, 2, 8, 8), "timestep": TIME, "encoder_hidden_states": TEXT,
         "encoder_attention_mask": (2, 7), "pooled_projections": (2, 16)},
    ),
    "latte": (
        "LatteTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "sample_size": 8, "patch_size": 2, "cross_attention_dim": 32,
         "caption_channels": 32, "video_length": 2, "norm_type": "ada_norm_single", "num_embeds_ada_norm": 1000,
         "attention_bias": True, "norm_elementwise_affine": False},
        {"hidden_states": (2, 4, 2, 8, 8), "timestep": TIME, "encoder_hidden_states": TEXT},
    ),
    "lumina2": (
        "Lumina2Transformer2DModel",
        {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 1, "num_refiner_layers": 1,
         "num_attention_heads": 4, "num_kv_heads": 2, "multiple_of": 8, "axes_dim_rope": (2, 2, 4),
         "axes_lens": (16, 16, 16), "cap_feat_dim": 32},
        {"hidden_states": IMAGE, "timestep": TIME, "encoder_hidden_states": TEXT, "encoder_attention_mask": (2, 7)},
    ),
    "mochi": (
        "MochiTransformer3DModel",
        {**HEADS, "pooled_projection_dim": 16, "in_channels": 4, "text_embed_dim": 16, "time_embed_dim": 8,
         "max_sequence_length": 7},
        {"hidden_states": (2, 4, 2, 8, 8), "encoder_hidden_states": (2, 7, 16), "timestep": TIME,
         "encoder_attention_mask": (2, 7)},
    ),
    "sana": (
        "SanaTransformer2DModel",
        {**HEADS, "num_layers": 1, "in_channels": 4, "out_channels": 4, "num_cross_attention_heads": 4,
         "cross_attention_head_dim": 8, "cross_attention_dim": 32, "caption_channels": 32, "sample_size": 8},
        {"hidden_states": IMAGE, "encoder_hidden_states": TEXT, "timestep": TIME, "encoder_attention_mask": (2, 7)},
    ),
    "stable_audio": (
        "StableAudioDiTModel",
        {**HEADS, "num_key_value_attention_heads": 2, "sample_size": 16, "in_channels": 4, "out_channels": 4,
         "cross_attention_dim": 16, "time_proj_dim": 8, "global_states_input_dim": 16, "cross_attention_input_dim": 32},
        {"hidden_states": (2, 4, 16), "timestep": TIME, "encoder_hidden_states": TEXT,
         "global_hidden_states": (2, 1, 16)},
    ),
    "wan": (
        "WanTransformer3DModel",
        {**HEADS, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 16,
         "ffn_dim": 48, "rope_max_seq_len": 16},
        {"hidden_states": (2, 4, 2, 8, 8), "timestep": TIME, "encoder_hidden_states": TEXT},
    ),
    "skyreels_v2": (
        "SkyReelsV2Transformer3DModel",
        {**HEADS, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 32, "freq_dim": 16,
         "ffn_dim": 48, "rope_max_seq_len": 16},
        {"hidden_states": (2, 4, 2, 8, 8), "timestep": TIME, "encoder_hidden_states": TEXT},
    ),
    "allegro": (
        "AllegroTransformer3DModel",
        {**HEADS, "attention_head_dim": 12, "cross_attention_dim": 48, "sample_height": 8, "sample_width": 8,
         "sample_frames": 2, "caption_channels": 32},
        {"hidden_states": (2, 4, 2, 8, 8), "encoder_hidden_states": (2, 1, 7, 32), "timestep": TIME},
    ),
    "cogvideox": (
        "CogVideoXTransformer3DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32, "sample_width": 8,
         "sample_height": 8, "sample_frames": 5, "max_text_seq_length": 7},
        {"hidden_states": (2, 2, 4, 8, 8), "encoder_hidden_states": TEXT, "timestep": TIME},
    ),
    "cogview3plus": (
        "CogView3PlusTransformer2DModel",
        {**HEADS, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32, "time_embed_dim": 16, "condition_dim": 8,
         "pos_embed_max_size": 8, "sample_size": 8},
        {"hidden_states": IMAGE, "encoder_hidden_states": TEXT, "timestep": TIME, "original_size": (2, 2),
         "target_size": (2, 2), "crop_coords": (2, 2)},
    ),
    "cosmos": (
        "CosmosTransformer3DModel",
        {**HEADS, "attention_head_dim": 16, "in_channels": 4, "out_channels": 4, "text_embed_dim": 32,
         "adaln_lora_dim": 8, "max_size": (4, 16, 16), "concat_padding_mask": False,
         "extra_pos_embed_type": "learnable"},
        {"hidden_states": (2, 4, 2, 8, 8), "timestep": TIME, "encoder_hidden_states": TEXT},
    ),
    "prior": (
        "PriorTransformer",
        {**HEADS, "embedding_dim": 32, "num_embeddings": 7, "additional_embeddings": 4},
        {"hidden_states": (2, 32), "timestep": TIME, "proj_embedding": (2, 32), "encoder_hidden_states": TEXT},
    ),
    "prx": (
        "PRXTransformer2DModel",
        {"in_channels": 4, "context_in_dim": 32, "hidden_size": 32, "num_heads": 4, "depth": 2, "axes_dim": [4, 4]},
        {"hidden_states": IMAGE, "timestep": TIME, "encoder_hidden_states": TEXT},
    ),
    "transformer2d": (
        "Transformer2DModel",
        {**HEADS, "in_channels": 32, "norm_num_groups": 8, "cross_attention_dim": 32},
        {"hidden_states": (2, 32, 8, 8), "encoder_hidden_states": TEXT, "encoder_attention_mask": (2, 7)},
    ),
    "unet2d": (
        "UNet2DModel",
        {**STAGES, "sample_size": 16, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": (2, 4, 16, 16), "timestep": TIME},
    ),
    "unet2d_condition": (
        "UNet2DConditionModel",
        {**STAGES, "sample_size": 16, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"), "cross_attention_dim": 32, "attention_head_dim": 4},
        {"sample": (2, 4, 16, 16), "timestep": TIME, "encoder_hidden_states": TEXT, "encoder_attention_mask": (2, 7)},
    ),
    "unet3d_condition": (
        "UNet3DConditionModel",
        {**STAGES, "sample_size": 16, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
         "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"), "cross_attention_dim": 32, "attention_head_dim": 8},
        {"sample": (2, 4, 2, 16, 16), "timestep": TIME, "encoder_hidden_states": TEXT},
    ),
    "unet_spatiotemporal": (
        "UNetSpatioTemporalConditionModel",
        {key: STAGES[key] for key in STAGES if key != "norm_num_groups"}
        | {"sample_size": 16, "in_channels": 8, "num_frames": 2, "addition_time_embed_dim": 8,
           "projection_class_embeddings_input_dim": 24, "cross_attention_dim": 32, "num_attention_heads": (2, 4),
           "down_block_types": ("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
           "up_block_types": ("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal")},
        {"sample": (2, 2, 8, 16, 16), "timestep": TIME, "encoder_hidden_states": (2, 1, 32), "added_time_ids": (2, 3)},
    ),
    "autoencoder_kl": (
        "AutoencoderKL",
        {"block_out_channels": (16, 32), "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 8},
        {"sample": (2, 3, 32, 32)},
    ),
}  # fmt: skip


def make(name: str, numbers: dict[str, Any], shapes: dict[str, Shape], exporter: str) -> tuple[Any, dict[str, Any]]:
    """The model and its inputs. TorchScript gets plain products where diffusers has a switch for them."""
    import diffusers
    import torch

    model = getattr(diffusers, name)(**{key: value for key, value in numbers.items() if value is not None})
    if exporter == "torchscript" and hasattr(model, "set_default_attn_processor"):
        model.set_default_attn_processor()
    draw = torch.Generator().manual_seed(1)
    inputs: dict[str, Any] = {}
    for key, shape in shapes.items():
        if key in INTEGERS:
            inputs[key] = torch.randint(0, INTEGERS[key], shape, generator=draw)
        elif key == "timestep":
            inputs[key] = torch.rand(shape, generator=draw) * 900
        elif key in MASKS:
            inputs[key] = torch.ones(shape, dtype=torch.int64)
            inputs[key][1, ..., -2:] = 0
        elif key.endswith("_ids") and len(shape) == 2:
            inputs[key] = torch.randint(0, 4, shape, generator=draw).float()
        else:
            inputs[key] = torch.randn(shape, generator=draw)
    return model, inputs


ROWS = [
    Row(
        "diffusers",
        name,
        functools.partial(make, made, numbers, shapes),
        {key: {0: "batch"} for key in shapes if not key.endswith(("img_ids", "txt_ids"))},
    )
    for name, (made, numbers, shapes) in TABLE.items()
]
