"""Rows of optimum: tiny configurations with random weights, exported as `optimum-cli export onnx` does.

An exporter's name is the file that is kept of what optimum writes: a decoder with a cache and its prompt are one file,
an encoder and a decoder are several.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from tools.sweep.rows import Row
from tools.sweep.transformers_rows import SOUND, configuration

PRELOADED = ("transformers", "optimum.exporters.onnx")

GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48}
# The task, the files that are kept, and the model types with what their configurations need.
TABLE: tuple[tuple[str, tuple[str, ...], dict[str, dict[str, Any]]], ...] = (
    (
        "text-generation-with-past",
        ("model",),
        {
            "codegen": {**GPT, "rotary_dim": 4},
            "cohere": {},
            "gemma": {},
            "gemma3_text": {"sliding_window": 4},
            "glm": {},
            "gpt_neox": {},
            "granite": {},
            "helium": {},
            "mpt": {"n_heads": 4, "n_layers": 2, "d_model": 32, "max_seq_len": 64},
            "nemotron": {},
            "olmo": {},
            "olmo2": {},
            "phi": {},
            "qwen2": {},
            "qwen3_moe": {},
            "stablelm": {},
            "starcoder2": {},
            "biogpt": {},
            "arcee": {},
            "openai-gpt": GPT,
        },
    ),
    (
        "feature-extraction",
        ("model",),
        {
            "camembert": {},
            "data2vec-text": {},
            "deberta": {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
            "electra": {},
            "esm": {"mask_token_id": 4, "position_embedding_type": "rotary"},
            "flaubert": {"n_layers": 2, "n_heads": 4, "emb_dim": 32},
            "megatron-bert": {},
            "mpnet": {},
            "rembert": {"input_embedding_size": 32},
            "roberta-prelayernorm": {},
            "splinter": {},
            "deit": {},
            "data2vec-vision": {},
            "vit_msn": {},
            "hubert": SOUND,
            "unispeech": SOUND,
            "audio-spectrogram-transformer": {"max_length": 64, "num_mel_bins": 32, "patch_size": 8},
        },
    ),
    (
        "text2text-generation-with-past",
        ("encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged"),
        {
            "blenderbot": {},
            "blenderbot-small": {},
            "longt5": {"num_layers": 2, "num_heads": 4, "local_radius": 3, "global_block_size": 4},
            "marian": {},
            "mbart": {},
            "mt5": {"num_layers": 2, "num_heads": 4},
            "pegasus": {},
        },
    ),
)  # fmt: skip

CLASSES = {
    "text-generation-with-past": "AutoModelForCausalLM",
    "feature-extraction": "AutoModel",
    "text2text-generation-with-past": "AutoModelForSeq2SeqLM",
}
SIZES = {
    "batch_size": 2,
    "sequence_length": 3,
    "past_sequence_length": 4,
    "encoder_sequence_length": 6,
    "decoder_sequence_length": 3,
    "past_decoder_sequence_length": 4,
    "encoder_sequence_length_out": 6,
    "num_channels": 3,
    "height": 32,
    "width": 32,
}
"""The sizes of the inputs, by the names that optimum gives them; a name may be a sum of names."""


def make(task: str, kind: str, wants: dict[str, Any], stem: str) -> tuple[bytes, dict[str, Any]]:
    """One of the files that optimum writes, and its inputs."""
    import transformers
    from optimum.exporters.onnx import main_export

    from tools.sweep.export import randomised

    config = configuration(kind, wants)
    with tempfile.TemporaryDirectory() as folder:
        model = getattr(transformers, CLASSES[task]).from_config(config)
        randomised(model).save_pretrained(f"{folder}/model")
        main_export(
            f"{folder}/model",
            f"{folder}/onnx",
            task=task,
            do_validation=False,
            no_post_process=stem != "decoder_model_merged",
            monolith=False,
        )
        content = Path(f"{folder}/onnx/{stem}.onnx").read_bytes()
    return content, inputs_of(content)


def inputs_of(content: bytes) -> dict[str, Any]:
    """Inputs of a model that optimum wrote."""
    import numpy as np
    import onnx

    draw = np.random.default_rng(0)
    result: dict[str, Any] = {}
    for value in onnx.load_model_from_string(content).graph.input:
        tensor = value.type.tensor_type
        shape = [
            dim.dim_value or sum(SIZES[name.strip()] for name in dim.dim_param.split("+")) for dim in tensor.shape.dim
        ]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
        if value.name.endswith("attention_mask"):
            result[value.name] = np.ones(shape, dtype)
            result[value.name][1, :1] = 0
        elif value.name == "position_ids":
            past = SIZES["past_sequence_length"]
            result[value.name] = np.broadcast_to(np.arange(past, past + shape[1]), shape).astype(dtype)
        elif dtype.kind == "f":
            result[value.name] = draw.standard_normal(shape).astype(dtype)
        elif dtype.kind == "b":
            result[value.name] = np.ones(shape, dtype)
        else:
            result[value.name] = draw.integers(0 if value.name == "token_type_ids" else 3, 90, shape).astype(dtype)
            if value.name == "token_type_ids":
                result[value.name] %= 2
    return result


ROWS = [
    Row("optimum", kind, functools.partial(make, task, kind, wants), exporters=stems)
    for task, stems, kinds in TABLE
    for kind, wants in kinds.items()
]
