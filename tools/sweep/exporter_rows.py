"""Rows of transformers' own exporter: the architectures of transformers_rows.py, and more, with the files it makes.

A decoder becomes a file for the prompt and one for a step behind caches, with `transformers.exporters`' decomposition
for generation. All sizes that torch.export leaves open are open. An exporter's name is the file that is kept; after a
dash stands the runtime for which the exporter rewrites the file (`ort_fusions`).
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tools.sweep import transformers_rows
from tools.sweep.rows import Row
from tools.sweep.transformers_rows import (
    MLA,
    SWIN,
    TABLE,
    Family,
    Wants,
    configuration,
    ids,
    image,
    padding,
    seq2seq,
    sound,
    text,
    video,
)

PRELOADED = (*transformers_rows.PRELOADED, "transformers.exporters")
GENERATED = ("prefill", "decode")
WORDS: Mapping[str, tuple[str, ...]] = {
    "decoder": (*GENERATED, *(f"{part}-{runtime}" for runtime in ("cpu", "webgpu") for part in GENERATED)),
    "seq2seq": (*GENERATED, "full"),
    "encoder": ("encoder", "encoder-cpu"),
}
"""The files of each kind of architecture, in the order in which they are made."""

GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "n_positions": 64}
MAMBA = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1}

MORE_DECODERS: Mapping[str, Wants] = {
    "bamba": {**MAMBA, "attn_layer_indices": [1]},
    "bloom": {"n_head": 4, "n_layer": 2},
    "deepseek_v3": {**MLA, "n_group": 1, "topk_group": 1},
    "falcon": {"head_dim": None, "num_kv_heads": 2, "new_decoder_architecture": True},
    "falcon_h1": {**MAMBA, "mamba_d_ssm": 64},
    "gemma2": {"sliding_window": 4},
    "gpt2": GPT,
    "gpt_bigcode": GPT,
    "gpt_neo": {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
    "gpt_oss": {"sliding_window": 4},
    "gptj": {**GPT, "rotary_dim": 4},
    "granitemoehybrid": {**MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 24},
    "granitemoeshared": {"shared_intermediate_size": 24},
    "hunyuan_v1_moe": {},
    "llama": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {"sliding_window": 4},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi3": {"sliding_window": 4},
    "qwen3": {},
    "smollm3": {},
    "xglm": {"num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "d_model": 32},
    "ernie4_5_moe": {},
    "dots1": {},
    "glm4_moe": {},
    "zamba2": {**MAMBA, "layers_block_type": ["mamba", "hybrid"], "hybrid_layer_ids": [1], "num_mem_blocks": 1},
}
MORE_ENCODERS: tuple[tuple[Family, str, Mapping[str, Wants]], ...] = (
    (
        text,
        "AutoModel",
        {
            "albert": {},
            "bert": {},
            "big_bird": {"attention_type": "original_full"},
            "convbert": {},
            "deberta-v2": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8},
            "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48},
            "ibert": {},
            "mobilebert": {"intra_bottleneck_size": 32, "embedding_size": 32},
            "modernbert": {"global_attn_every_n_layers": 2, "local_attention": 8},
            "nystromformer": {"num_landmarks": 4},
            "roberta": {},
            "roformer": {},
            "squeezebert": {"q_groups": 1, "k_groups": 1, "v_groups": 1, "post_attention_groups": 1,
                            "intermediate_groups": 1, "output_groups": 1},
            "xlm": {"n_layers": 2, "n_heads": 4, "emb_dim": 32},
            "xlm-roberta": {},
        },
    ),
    (
        image,
        "AutoModel",
        {
            "beit": {},
            "dinov2": {},
            "segformer": {
                "image_size": 64,
                "depths": [1, 1, 1, 1],
                "hidden_sizes": [8, 16, 16, 32],
                "num_attention_heads": [1, 2, 2, 4],
            },
            "siglip2_vision_model": {"num_patches": 16},
            "swin": SWIN,
            "vit": {},
        },
    ),
)  # fmt: skip
MORE_SEQ2SEQ: Mapping[str, Wants] = {"bart": {}, "m2m_100": {}, "t5": {"num_layers": 2, "num_heads": 4}}


def built(auto: str, kind: str, wants: Wants) -> Any:
    """A model with random weights, with scaled_dot_product_attention where it has it."""
    import transformers

    from tools.sweep.export import randomised

    config = configuration(kind, wants)
    made = getattr(transformers, auto)
    build = made.from_config if hasattr(made, "from_config") else made._from_config
    try:
        return randomised(build(config, attn_implementation="sdpa"))
    except ValueError as error:
        if "attention implementation" not in str(error):
            raise
        return randomised(build(config, attn_implementation="eager"))


def exported(module: Any, inputs: Mapping[str, Any], word: str) -> tuple[bytes, dict[str, Any]]:
    """The file of one part, and its inputs by name."""
    import onnx
    from transformers.exporters import OnnxConfig, OnnxExporter
    from transformers.exporters.utils import onnx_feed

    wish = word.partition("-")[2]  # cpu, cuda, webgpu or dml
    config = OnnxConfig(dynamic=True, ort_fusions=wish or None)
    program = OnnxExporter().export(module, copy.deepcopy(dict(inputs)), config=config)
    feeds = onnx_feed([value.name for value in program.program.graph.inputs], dict(inputs))
    with tempfile.TemporaryDirectory() as folder:
        program.save_pretrained(folder)
        (path,) = Path(folder).glob("*.onnx")
        return onnx.load(path).SerializeToString(), feeds


def generated(auto: str, kind: str, wants: Wants, inputs: Mapping[str, Any], word: str) -> tuple[bytes, dict[str, Any]]:
    """The part of a decoder that a word names."""
    from transformers.exporters.utils import decompose_for_generation

    model = built(auto, kind, wants)
    if hasattr(model, "generation_config"):
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 1
        model.generation_config.decoder_start_token_id = 0
    module, given = decompose_for_generation(model, dict(inputs))[word.partition("-")[0]]
    return exported(module, given, word)


def decoder(auto: str, kind: str, wants: Wants, word: str) -> tuple[bytes, dict[str, Any]]:
    """The prompt or a step of a decoder. The second sequence is padded on the left, as for generation."""
    return generated(auto, kind, wants, {"input_ids": ids(), "attention_mask": padding().flip(1)}, word)


def translator(auto: str, kind: str, wants: Wants, word: str) -> tuple[bytes, dict[str, Any]]:
    """A part of an encoder with a decoder, or both in one file."""
    if word != "full":
        wants = {"decoder_start_token_id": 2, **wants}
        return generated(auto, kind, wants, {"input_ids": ids(), "attention_mask": padding()}, word)
    inputs = {"input_ids": ids(), "attention_mask": padding(), "decoder_input_ids": ids(7, 1)}
    return exported(built(auto, kind, {**wants, "use_cache": False}), inputs, word)


def encoder(family: Family, auto: str, kind: str, wants: Wants, word: str) -> tuple[bytes, dict[str, Any]]:
    """An encoder with the inputs of its family."""
    own = {key: value for key, value in wants.items() if key not in ("shape", "reads")}
    _, inputs = family(auto, kind, wants, "dynamo")
    return exported(built(auto, kind, own), inputs, word)


def rows() -> list[Row]:
    """All rows, each architecture once."""
    found: dict[str, Row] = {}

    def add(kind: str, make: Any, word: str) -> None:
        found.setdefault(kind, Row("exporter", kind, make, exporters=WORDS[word]))

    for kind, wants in MORE_DECODERS.items():
        add(kind, functools.partial(decoder, "AutoModelForCausalLM", kind, wants), "decoder")
    for kind, wants in MORE_SEQ2SEQ.items():
        add(kind, functools.partial(translator, "AutoModelForSeq2SeqLM", kind, wants), "seq2seq")
    encoders = [*MORE_ENCODERS, *((family, auto, kinds) for family, auto, _, kinds in TABLE)]
    for family, auto, kinds in encoders:
        for kind, wants in kinds.items():
            if auto == "AutoModelForCausalLM":
                add(kind, functools.partial(decoder, auto, kind, wants), "decoder")
            elif family is seq2seq:
                add(kind, functools.partial(translator, auto, kind, wants), "seq2seq")
            elif family in (text, image, video, sound):
                add(kind, functools.partial(encoder, family, auto, kind, wants), "encoder")
    return list(found.values())


ROWS = rows()
