"""Exports three models that mix linear attention with softmax attention, of real widths and with random weights.

    python -m tools.makers.export_hybrids DIR NAME [--layers N] [--tokens T]

It needs torch, transformers and onnxscript (the `export` extra); nothing is downloaded. transformers' own exporter
writes DIR/prefill/model.onnx and DIR/step/model.onnx, each with its weights beside it: what `export_for_generation`
makes of a prompt of so many tokens and of the step after it. The sizes are the published ones, with a dense layer in
the place of the experts, a small vocabulary, and few layers, of which the last has softmax attention, too.

The lengths of Falcon-H1 are open. Those of the others are fixed in the prompts, because with open ones the exporter
follows the unrolled chunks for longer than half an hour.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.exporters import OnnxConfig, OnnxExporter
from transformers.exporters.utils import decompose_for_generation

WORDS = 8192
TOKENS = 500
"""No multiple of a chunk: exported at one, Mamba-2 returns its padding."""


@dataclass(frozen=True)
class Recipe:
    """A type of transformers, its sizes beside those of its configuration, and whether lengths of prompts are open."""

    kind: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = False


RECIPES = {
    "qwen3-next": Recipe("qwen3_next", {"mlp_only_layers": [*range(64)], "num_experts": 4, "num_experts_per_tok": 2}),
    "kimi-linear": Recipe("kimi_linear", {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}),
    "falcon-h1": Recipe(
        "falcon_h1",
        {
            "hidden_size": 2048,
            "intermediate_size": 4096,
            "head_dim": 128,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "mamba_d_ssm": 3072,
            "mamba_n_heads": 48,
            "mamba_d_head": 64,
            "mamba_d_state": 256,
        },
        is_open=True,
    ),
}
"""Qwen3-Next 80B-A3B, Kimi Linear 48B-A3B, Falcon-H1 1.5B."""


def model_of(recipe: Recipe, layers: int) -> torch.nn.Module:
    """A model with random weights, the same ones each time."""
    torch.manual_seed(0)
    sizes = {"vocab_size": WORDS, "num_hidden_layers": layers, **recipe.sizes}
    if recipe.kind == "kimi_linear":
        sizes["mlp_layer_types"] = ["dense"] * layers
        sizes["layer_types"] = ["linear_attention"] * (layers - 1) + ["full_attention"]
    config = AutoConfig.for_model(recipe.kind, **sizes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().float()


def main() -> None:
    """Writes the files that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    options = parser.parse_args()
    recipe = RECIPES[options.name]
    words = torch.randint(3, WORDS, (1, options.tokens))
    given = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    for part, (model, inputs) in decompose_for_generation(model_of(recipe, options.layers), given).items():
        exported = OnnxExporter().export(model, inputs, OnnxConfig(dynamic=recipe.is_open or part == "decode"))
        folder = options.folder / ("step" if part == "decode" else part)
        folder.mkdir(parents=True, exist_ok=True)
        ir.save(exported.program, folder / "model.onnx", external_data="model.data")


if __name__ == "__main__":
    main()
