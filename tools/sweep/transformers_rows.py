"""Rows of transformers: tiny configurations with random weights.

A family says how a model is made and what it reads. A row is a model type, with what its configuration needs besides
the sizes of `TINY`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from tools.sweep.rows import Axes, Row

PRELOADED = ("transformers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto")

TINY: Mapping[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "embedding_size": 32,
    "max_position_embeddings": 128,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "d_model": 32,
    "d_ff": 48,
    "d_kv": 8,
    "image_size": 32,
    "patch_size": 8,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 0,
    "dropout": 0.0,
}
"""A configuration gets those that it has, unless the row says None."""

BATCH, LENGTH = 2, 12
TEXT_AXES: Axes = {name: {0: "batch", 1: "sequence"} for name in ("input_ids", "attention_mask")}
SEQ2SEQ_AXES: Axes = {
    **TEXT_AXES,
    **{name: {0: "batch", 1: "target"} for name in ("decoder_input_ids", "decoder_attention_mask")},
}
IMAGE_AXES: Axes = {"pixel_values": {0: "batch"}}
SOUND_AXES: Axes = {"input_values": {0: "batch", 1: "samples"}, "attention_mask": {0: "batch", 1: "samples"}}

Wants = Mapping[str, Any]


def configuration(kind: str, wants: Wants) -> Any:
    """The tiny configuration of a model type."""
    from transformers import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    default = made()
    own = {key: value for key, value in TINY.items() if hasattr(default, key)}
    return made(**{key: value for key, value in {**own, **wants}.items() if value is not None})


def model(auto: str, kind: str, wants: Wants, exporter: str) -> Any:
    """A model with random weights. TorchScript gets plain products, dynamo scaled_dot_product_attention."""
    import transformers

    config = configuration(kind, wants)
    config.use_cache = False
    config.return_dict = True
    wanted = "eager" if exporter == "torchscript" else "sdpa"
    made = getattr(transformers, auto)
    build = made.from_config if hasattr(made, "from_config") else made._from_config
    try:
        return build(config, attn_implementation=wanted)
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        return build(config, attn_implementation="eager")


def ids(length: int = LENGTH, seed: int = 0, least: int = 3, most: int = 90) -> Any:
    """Random token numbers of the shape [BATCH, length]."""
    import torch

    return torch.randint(least, most, (BATCH, length), generator=torch.Generator().manual_seed(seed))


def padding(length: int = LENGTH) -> Any:
    """A mask of the shape [BATCH, length]: the second sequence is three tokens shorter."""
    import torch

    mask = torch.ones(BATCH, length, dtype=torch.int64)
    mask[1, length - 3 :] = 0
    return mask


def noise(*shape: int) -> Any:
    """Normal numbers."""
    import torch

    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def text(auto: str, kind: str, wants: Wants, exporter: str) -> tuple[Any, dict[str, Any]]:
    """A model of a sequence with a padding mask."""
    return model(auto, kind, wants, exporter), {"input_ids": ids(), "attention_mask": padding()}


def seq2seq(auto: str, kind: str, wants: Wants, exporter: str) -> tuple[Any, dict[str, Any]]:
    """An encoder and a decoder, with a padding mask for the encoder."""
    inputs = {"input_ids": ids(), "attention_mask": padding(), "decoder_input_ids": ids(7, 1)}
    return model(auto, kind, wants, exporter), inputs


def image(auto: str, kind: str, wants: Wants, exporter: str) -> tuple[Any, dict[str, Any]]:
    """A model of images."""
    made = model(auto, kind, wants, exporter)
    size = wants.get("image_size", getattr(made.config, "image_size", None)) or 32
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return made, {"pixel_values": noise(BATCH, getattr(made.config, "num_channels", 3), height, width)}


def video(auto: str, kind: str, wants: Wants, exporter: str) -> tuple[Any, dict[str, Any]]:
    """A model of four frames."""
    return model(auto, kind, wants, exporter), {"pixel_values": noise(BATCH, 4, 3, 32, 32)}


def sound(auto: str, kind: str, wants: Wants, exporter: str) -> tuple[Any, dict[str, Any]]:
    """A model of samples of sound."""
    return model(auto, kind, wants, exporter), {"input_values": noise(BATCH, 640), "attention_mask": padding(640)}


def features(auto: str, kind: str, wants: Wants, exporter: str) -> tuple[Any, dict[str, Any]]:
    """A model of a spectrogram whose sizes the row gives as `shape`, under the name `reads`."""
    own = {key: value for key, value in wants.items() if key not in ("shape", "reads")}
    return model(auto, kind, own, exporter), {wants["reads"]: noise(BATCH, *wants["shape"])}


def boxes(auto: str, kind: str, wants: Wants, exporter: str) -> tuple[Any, dict[str, Any]]:
    """A model of text with a box on a page for each token."""
    import torch

    corner = ids(LENGTH, 2)
    box = torch.stack([corner, corner, corner + 5, corner + 7], -1)
    inputs = {"input_ids": ids(), "bbox": box, "attention_mask": padding()}
    return model(auto, kind, wants, exporter), inputs


SOUND = {"conv_dim": (32, 32), "conv_kernel": (8, 8), "conv_stride": (4, 4), "num_feat_extract_layers": 2,
         "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2}  # fmt: skip

SWIN = {"num_attention_heads": None, "num_hidden_layers": None, "image_size": 32, "patch_size": 2, "embed_dim": 16,
        "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}  # fmt: skip

MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
       "num_key_value_heads": 4}  # fmt: skip

Family = Callable[[str, str, Wants, str], tuple[Any, dict[str, Any]]]

TABLE: tuple[tuple[Family, str, Axes, dict[str, dict[str, Any]]], ...] = (
    (
        text,
        "AutoModel",
        TEXT_AXES,
        {
            "electra": {},
            "camembert": {},
            "ernie": {},
            "esm": {"mask_token_id": 4, "token_dropout": False, "position_embedding_type": "rotary"},
            "esmc": {"num_key_value_heads": None},
            "flaubert": {"n_layers": 2, "n_heads": 4, "emb_dim": 32},
            "layoutlm": {},
            "megatron-bert": {},
            "mpnet": {},
            "rembert": {"input_embedding_size": 32},
            "roberta-prelayernorm": {},
            "roc_bert": {
                "pronunciation_vocab_size": 9,
                "shape_vocab_size": 9,
                "enable_pronunciation": False,
                "enable_shape": False,
            },
            "splinter": {},
            "xlm-roberta-xl": {},
            "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
            "data2vec-text": {},
            "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
            "eurobert": {},
            "visual_bert": {"visual_embedding_dim": 32},
            "markuplm": {},
            "longformer": {"attention_window": 4},
            "luke": {"entity_vocab_size": 20, "entity_emb_size": 16},
            "lilt": {"channel_shrink_ratio": 2, "hidden_size": 48},
            "canine": {"num_hash_buckets": 64, "local_transformer_stride": 8, "upsampling_kernel_size": 4},
            "yoso": {},
            "mra": {},
            "bert-generation": {},
            "reformer": {
                "attn_layers": ["local", "local"],
                "axial_pos_shape": [4, 3],
                "axial_pos_embds_dim": [16, 16],
                "local_attn_chunk_length": 4,
                "attention_head_size": 8,
                "feed_forward_size": 48,
            },
            "jina_embeddings_v3": {},
            "ultrabert": {},
            "gte": {},
        },
    ),
    (
        text,
        "AutoModelForCausalLM",
        TEXT_AXES,
        {
            "apertus": {},
            "arcee": {},
            "biogpt": {},
            "bitnet": {},
            "codegen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "n_positions": 64},
            "cohere": {},
            "cohere2": {"sliding_window": 4},
            "ctrl": {"n_embd": 32, "n_layer": 2, "n_head": 4, "dff": 48},
            "cwm": {},
            "deepseek_v2": {**MLA, "n_group": 1, "topk_group": 1},
            "diffllama": {"num_key_value_heads": 2},
            "doge": {},
            "ernie4_5": {},
            "exaone4": {"sliding_window": 4},
            "flex_olmo": {},
            "gemma": {},
            "gemma3_text": {"sliding_window": 4},
            "glm": {},
            "glm4": {},
            "glm4_moe": {},
            "gpt_neox": {},
            "gpt_neox_japanese": {},
            "granite": {},
            "granitemoe": {},
            "helium": {},
            "hunyuan_v1_dense": {},
            "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
            "jetmoe": {"kv_channels": 8},
            "lfm2": {"full_attn_idxs": [1]},
            "llama4_text": {},
            "minimax": {},
            "ministral": {"sliding_window": 4},
            "modernbert-decoder": {"global_attn_every_n_layers": 2, "local_attention": 8},
            "moshi": {},
            "mpt": {"n_heads": 4, "n_layers": 2, "max_seq_len": 64},
            "nanochat": {},
            "nemotron": {},
            "olmo": {},
            "olmo2": {},
            "olmo3": {"sliding_window": 4},
            "olmoe": {},
            "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
            "persimmon": {},
            "phi": {},
            "phimoe": {},
            "qwen2": {},
            "qwen2_moe": {"shared_expert_intermediate_size": 24},
            "qwen3_moe": {},
            "qwen3_next": {
                "linear_num_key_heads": 2,
                "linear_num_value_heads": 2,
                "linear_key_head_dim": 8,
                "linear_value_head_dim": 8,
                "layer_types": ["linear_attention", "full_attention"],
            },
            "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 4},
            "seed_oss": {},
            "stablelm": {},
            "starcoder2": {"sliding_window": 4},
            "vaultgemma": {"sliding_window": 4},
            "internlm3": {},
            "minicpm3": {**MLA, "head_dim": None},
            "mellum": {},
            "exaone": {},
            "solar_open": {},
            "youtu": {**MLA, "head_dim": None},
            "laguna": {},
        },
    ),
    (
        seq2seq,
        "AutoModelForSeq2SeqLM",
        SEQ2SEQ_AXES,
        {
            "blenderbot": {},
            "blenderbot-small": {},
            "fsmt": {"src_vocab_size": 99, "tgt_vocab_size": 99, "langs": ["en", "de"]},
            "led": {
                "attention_window": 4,
                "max_encoder_position_embeddings": 64,
                "max_decoder_position_embeddings": 64,
            },
            "longt5": {"num_layers": 2, "num_heads": 4, "local_radius": 3, "global_block_size": 4},
            "marian": {},
            "mbart": {},
            "mt5": {"num_layers": 2, "num_heads": 4},
            "mvp": {},
            "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 4},
            "pegasus": {},
            "pegasus_x": {"block_size": 4, "num_global_tokens": 4, "stagger_local_blocks": False},
            "plbart": {},
            "prophetnet": {"num_hidden_layers": None, "num_encoder_layers": 2, "num_decoder_layers": 2, "ngram": 2},
            "switch_transformers": {"num_layers": 2, "num_heads": 4, "num_experts": 4},
            "umt5": {"num_layers": 2, "num_heads": 4},
        },
    ),
    (
        image,
        "AutoModel",
        IMAGE_AXES,
        {
            "aimv2_vision_model": {},
            "chinese_clip_vision_model": {},
            "cvt": {
                "num_attention_heads": None,
                "num_hidden_layers": None,
                "image_size": 32,
                "embed_dim": [16, 16, 32],
                "num_heads": [1, 2, 4],
                "depth": [1, 1, 2],
                "drop_path_rate": [0.0, 0.0, 0.0],
            },
            "data2vec-vision": {},
            "deit": {},
            "dinov2_with_registers": {},
            "dinov3_vit": {"rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}},
            "donut-swin": SWIN,
            "dpt": {
                "backbone_out_indices": [0, 1, 0, 1],
                "is_hybrid": False,
                "neck_hidden_sizes": [16] * 4,
                "fusion_hidden_size": 16,
            },
            "glpn": {
                "image_size": 64,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
                "num_attention_heads": [1, 2, 2, 4],
                "decoder_hidden_size": 16,
            },
            "hiera": {
                "image_size": [32, 32],
                "embed_dim": 16,
                "depths": [1, 1, 2],
                "num_heads": [1, 2, 4],
                "patch_stride": [2, 2],
                "patch_size": [3, 3],
                "patch_padding": [1, 1],
                "masked_unit_size": [4, 4],
                "num_query_pool": 2,
            },
            "ijepa": {},
            "internvl_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
            "mgp-str": {"image_size": [16, 64], "patch_size": 4},
            "mlcd_vision_model": {},
            "mobilevitv2": {
                "image_size": 256,
                "patch_size": 2,
                "base_attn_unit_dims": [16, 24, 32],
                "width_multiplier": 0.25,
            },
            "pixio": {},
            "poolformer": {"image_size": 64, "depths": [1, 1, 1, 1], "hidden_sizes": [8, 16, 16, 32]},
            "pvt": {
                "image_size": 64,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
                "num_attention_heads": [1, 2, 2, 4],
                "num_encoder_blocks": 4,
            },
            "pvt_v2": {
                "image_size": 64,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
                "num_attention_heads": [1, 2, 2, 4],
            },
            "radio": {},
            "siglip_vision_model": {},
            "clip_vision_model": {"hidden_act": "gelu"},
            "swin2sr": {**SWIN, "patch_size": 1, "depths": [2, 2]},
            "swiftformer": {"image_size": 64, "depths": [1, 1, 1, 1], "embed_dims": [8, 16, 16, 32]},
            "swinv2": SWIN,
            "vit_mae": {"decoder_num_hidden_layers": 1},
            "vit_msn": {},
            "vitdet": {"image_size": 32, "patch_size": 8, "window_block_indices": [0], "window_size": 2},
            "yolos": {"image_size": [32, 32], "num_detection_tokens": 5},
        },
    ),
    (
        video,
        "AutoModel",
        IMAGE_AXES,
        {
            "timesformer": {"num_frames": 4},
            "videomae": {"num_frames": 4, "tubelet_size": 2, "use_mean_pooling": True},
            "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
        },
    ),
    (
        sound,
        "AutoModel",
        SOUND_AXES,
        {
            "hubert": SOUND,
            "sew": {**SOUND, "squeeze_factor": 2},
            "sew-d": {**SOUND, "squeeze_factor": 2, "position_buckets": 8},
            "unispeech": SOUND,
            "unispeech-sat": SOUND,
            "data2vec-audio": {**SOUND, "num_conv_pos_embeddings": 3},
            "wav2vec2-conformer": {**SOUND, "position_embeddings_type": "relative", "max_source_positions": 200},
        },
    ),
    (
        features,
        "AutoModel",
        {},
        {
            "audio-spectrogram-transformer": {
                "shape": (64, 32),
                "reads": "input_values",
                "max_length": 64,
                "num_mel_bins": 32,
                "patch_size": 8,
            },
            "wav2vec2-bert": {
                "shape": (20, 16),
                "reads": "input_features",
                "feature_projection_input_dim": 16,
                "left_max_position_embeddings": 4,
                "right_max_position_embeddings": 4,
            },
            "patchtst": {
                "shape": (32, 2),
                "reads": "past_values",
                "context_length": 32,
                "num_input_channels": 2,
                "patch_length": 8,
                "patch_stride": 8,
            },
            "lasr_encoder": {"shape": (64, 16), "reads": "input_features", "num_mel_bins": 16},
            "parakeet_encoder": {
                "shape": (64, 16),
                "reads": "input_features",
                "num_mel_bins": 16,
                "subsampling_conv_channels": 8,
            },
            "voxtral_encoder": {
                "shape": (16, 32),
                "reads": "input_features",
                "num_mel_bins": 16,
                "max_source_positions": 16,
            },
            "qwen2_audio_encoder": {
                "shape": (16, 32),
                "reads": "input_features",
                "num_mel_bins": 16,
                "max_source_positions": 16,
            },
        },
    ),
    (
        text,
        "FunnelModel",
        TEXT_AXES,
        {
            "funnel": {
                "num_hidden_layers": None,
                "block_sizes": [1, 1],
                "n_head": 4,
                "d_head": 8,
                "d_inner": 48,
                "num_decoder_layers": 1,
            }
        },
    ),
    (boxes, "AutoModel", TEXT_AXES, {"bros": {"hidden_size": 64}}),
)

ROWS = [
    Row("transformers", kind, functools.partial(family, auto, kind, wants), axes)
    for family, auto, axes, kinds in TABLE
    for kind, wants in kinds.items()
]
