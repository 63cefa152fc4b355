"""Exports the whole models of models.py, with random weights, by torch's exporter.

    python bench/export_models.py DIR [NAME...]

It needs torch, transformers and onnxscript (the `export` extra). models.py does not need them: it runs this file in an
interpreter that has them. Nothing is downloaded. Each model becomes DIR/NAME/model.onnx with its weights beside it.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

LONGEST = 4096
"""The most tokens of a text model."""


@dataclass(frozen=True)
class Recipe:
    """The function that builds a model, and the name of the exported output. `pixels` is the side of an image."""

    build: Callable[[], transformers.PreTrainedModel]
    output: str
    pixels: int = 0


def bert_base() -> transformers.PreTrainedModel:
    """12 layers of 768, 12 heads; the published BERT-base with another number of positions."""
    config = transformers.BertConfig(max_position_embeddings=LONGEST, attn_implementation="sdpa")
    return transformers.BertModel(config, add_pooling_layer=False)


def gpt2() -> transformers.PreTrainedModel:
    """GPT-2 small: 12 layers of 768, 12 heads, causal; without the output layer over the vocabulary."""
    config = transformers.GPT2Config(n_positions=LONGEST, use_cache=False, attn_implementation="sdpa")
    return transformers.GPT2Model(config)


def vit_base(pixels: int) -> transformers.PreTrainedModel:
    """ViT-B/16: 12 layers of 768, 12 heads, (pixels / 16)^2 + 1 positions."""
    config = transformers.ViTConfig(image_size=pixels, attn_implementation="sdpa")
    return transformers.ViTModel(config, add_pooling_layer=False)


def llama() -> transformers.PreTrainedModel:
    """8 layers of 2048, 32 query heads on 8, rotary positions, causal; without the output layer."""
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=5632,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LONGEST,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaModel(config)


RECIPES = {
    "bert-base": Recipe(bert_base, "last_hidden_state"),
    "gpt2": Recipe(gpt2, "last_hidden_state"),
    "vit-b-224": Recipe(lambda: vit_base(224), "last_hidden_state", 224),
    "vit-b-512": Recipe(lambda: vit_base(512), "last_hidden_state", 512),
    "llama-8x2048": Recipe(llama, "last_hidden_state"),
}


class OneOutput(torch.nn.Module):
    """The model with tensors as inputs and one tensor as output."""

    def __init__(self, model: transformers.PreTrainedModel, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, first: torch.Tensor, mask: torch.Tensor | None = None) -> Any:
        """`first` is a batch of token ids or of images."""
        if mask is None:
            return self.model(pixel_values=first)[self.output]
        return self.model(input_ids=first, attention_mask=mask)[self.output]


def export(name: str, folder: Path) -> None:
    """Writes one model."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    model = OneOutput(recipe.build(), recipe.output).eval()
    batch = torch.export.Dim("batch")
    if recipe.pixels:
        inputs, names = (torch.randn(2, 3, recipe.pixels, recipe.pixels),), ["pixel_values"]
        shapes: tuple[dict[int, Any], ...] = ({0: batch},)
    else:
        ids = torch.randint(0, 1000, (2, 24))
        mask = torch.ones_like(ids)
        mask[-1, 18:] = 0
        inputs, names = (ids, mask), ["input_ids", "attention_mask"]
        dims = {0: batch, 1: torch.export.Dim("sequence", max=LONGEST)}
        shapes = (dims, dims)
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            inputs,
            str(folder / "model.onnx"),
            input_names=names,
            output_names=["output"],
            dynamic_shapes=shapes,
            opset_version=20,
            dynamo=True,
            external_data=True,
            verbose=False,
        )


def main() -> None:
    """Exports the models that are named, or all."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", default=list(RECIPES), metavar="NAME", help=", ".join(RECIPES))
    arguments = parser.parse_args()
    for name in arguments.names:
        export(name, arguments.folder / name)


if __name__ == "__main__":
    main()
