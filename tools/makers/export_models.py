"""Exports the whole models of models.py, with random weights, by torch's exporters.

    python -m tools.makers.export_models DIR NAME [--layers N] [--torchscript]

It needs torch, transformers and onnxscript (the `export` extra). models.py does not need them: it runs this file in an
interpreter that has them. Nothing is downloaded. The model becomes DIR/model.onnx with its weights beside it.
The sizes are the published ones, except that text models have more positions and no output layer over the vocabulary,
and that Llama has a small vocabulary.

A model whose name ends in `-step` decodes one token with caches: its inputs past.0, past.1 ... are key and value of the
first layer, of the second ..., [batch, heads, past, size], and the grown ones are outputs behind the first.
whisper-step also has the encoder's keys and values, cross.0, cross.1 ..., which do not grow.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from transformers.cache_utils import DynamicCache, EncoderDecoderCache

LONGEST = 4096
"""The most tokens of a text model."""

FRAMES = 1500
"""The positions of Whisper's encoder: 30 seconds."""

BATCH, TOKENS, PAST = 2, 24, 7
"""The sizes with which a model is traced."""


@dataclass(frozen=True)
class Recipe:
    """The function that builds a model of so many layers with an implementation of attention, and its own layers.

    The inputs by kind: `image` has pixel_values; `text` input_ids and attention_mask; `step` these and the caches;
    `sound` input_features; `translation` input_ids and encoder_hidden_states; `translation-step` input_ids and caches.
    """

    build: Callable[[int, str], transformers.PreTrainedModel]
    layers: int
    kind: Literal["image", "text", "step", "sound", "translation", "translation-step"]


def bert_base(layers: int, attention: str) -> transformers.PreTrainedModel:
    """Layers of 768, 12 heads."""
    config = transformers.BertConfig(
        max_position_embeddings=LONGEST, num_hidden_layers=layers, attn_implementation=attention
    )
    return transformers.BertModel(config, add_pooling_layer=False)


def gpt2(layers: int, attention: str) -> transformers.PreTrainedModel:
    """GPT-2 small: layers of 768, 12 heads, causal."""
    return transformers.GPT2Model(
        transformers.GPT2Config(n_positions=LONGEST, n_layer=layers, attn_implementation=attention)
    )


def vit_base(pixels: int) -> Callable[[int, str], transformers.PreTrainedModel]:
    """ViT-B/16: layers of 768, 12 heads, (pixels / 16)^2 + 1 positions."""

    def build(layers: int, attention: str) -> transformers.PreTrainedModel:
        config = transformers.ViTConfig(image_size=pixels, num_hidden_layers=layers, attn_implementation=attention)
        return transformers.ViTModel(config, add_pooling_layer=False)

    return build


def whisper(layers: int, attention: str) -> transformers.PreTrainedModel:
    """Whisper small: layers of 768, 12 heads, in the encoder and in the decoder."""
    config = transformers.WhisperConfig(
        vocab_size=51865,
        d_model=768,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=12,
        decoder_attention_heads=12,
        encoder_ffn_dim=3072,
        decoder_ffn_dim=3072,
        max_source_positions=FRAMES,
        attn_implementation=attention,
    )
    return transformers.WhisperModel(config)


def llama(layers: int, attention: str) -> transformers.PreTrainedModel:
    """Llama 3.2 1B: layers of 2048, 32 query heads on 8, rotary positions, causal."""
    config = transformers.LlamaConfig(
        vocab_size=8192,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LONGEST,
        attn_implementation=attention,
    )
    return transformers.LlamaModel(config)


RECIPES = {
    "bert-base": Recipe(bert_base, 12, "text"),
    "gpt2": Recipe(gpt2, 12, "text"),
    "gpt2-step": Recipe(gpt2, 12, "step"),
    "vit-b-224": Recipe(vit_base(224), 12, "image"),
    "vit-b-512": Recipe(vit_base(512), 12, "image"),
    "whisper-encoder": Recipe(whisper, 12, "sound"),
    "whisper-decoder": Recipe(whisper, 12, "translation"),
    "whisper-step": Recipe(whisper, 12, "translation-step"),
    "llama-1b": Recipe(llama, 16, "text"),
    "llama-1b-step": Recipe(llama, 16, "step"),
}


class Traced(torch.nn.Module):
    """The model of a recipe with tensors as inputs, and the last hidden state and the grown caches as outputs."""

    def __init__(self, model: transformers.PreTrainedModel, kind: str) -> None:
        super().__init__()
        self.model = model
        self.kind = kind

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> Any:
        """`first` is a batch of images, sounds or token ids; `others` follow in the order of `Recipe`."""
        if self.kind == "image":
            return self.model(pixel_values=first).last_hidden_state
        if self.kind == "sound":
            return self.model.encoder(first).last_hidden_state
        if self.kind == "text":
            return self.model(input_ids=first, attention_mask=others[0], use_cache=False).last_hidden_state
        if self.kind == "translation":
            given = {"encoder_hidden_states": others[0], "use_cache": False}
            return self.model.decoder(input_ids=first, **given).last_hidden_state
        if self.kind == "step":
            cache = _cache(others[1:])
            result = self.model(input_ids=first, attention_mask=others[0], past_key_values=cache, use_cache=True)
            return (result.last_hidden_state, *_numbers(cache))
        half = len(others) // 2
        both = EncoderDecoderCache(_cache(others[:half]), _cache(others[half:]))
        # The encoder's result is not read, because its keys and values are there; but it has to be given.
        unread = first.new_zeros((first.shape[0], FRAMES, self.model.config.d_model), dtype=torch.float32)
        result = self.model.decoder(input_ids=first, encoder_hidden_states=unread, past_key_values=both, use_cache=True)
        return (result.last_hidden_state, *_numbers(both.self_attention_cache))


def _cache(tensors: tuple[torch.Tensor, ...]) -> DynamicCache:
    cache = DynamicCache()
    for layer in range(len(tensors) // 2):
        cache.update(tensors[2 * layer], tensors[2 * layer + 1], layer)
    return cache


def _numbers(cache: DynamicCache) -> list[torch.Tensor]:
    return [each for layer in cache.layers for each in (layer.keys, layer.values)]


def inputs(recipe: Recipe, model: transformers.PreTrainedModel) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The inputs with which a model is traced, and the names of their variable sizes by input and axis."""
    kind, config = recipe.kind, model.config
    if kind == "image":
        return {"pixel_values": torch.randn(BATCH, 3, config.image_size, config.image_size)}, {
            "pixel_values": {0: "batch"}
        }
    if kind == "sound":
        return {"input_features": torch.randn(BATCH, config.num_mel_bins, 2 * FRAMES)}, {"input_features": {0: "batch"}}
    step = kind.endswith("step")
    given: dict[str, torch.Tensor] = {"input_ids": torch.randint(0, 1000, (BATCH, 1 if step else TOKENS))}
    sizes: dict[str, dict[int, str]] = {"input_ids": {0: "batch"} if step else {0: "batch", 1: "sequence"}}
    if kind in ("text", "step"):
        given["attention_mask"] = torch.ones(BATCH, PAST + 1 if step else TOKENS, dtype=torch.int64)
        given["attention_mask"][-1, :2] = 0
        sizes["attention_mask"] = {0: "batch", 1: "total" if step else "sequence"}
    if kind == "translation":
        given["encoder_hidden_states"] = torch.randn(BATCH, FRAMES, config.d_model)
        sizes["encoder_hidden_states"] = {0: "batch"}
    if step:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = config.hidden_size // config.num_attention_heads
        caches = {"past": PAST} | ({"cross": FRAMES} if kind == "translation-step" else {})
        for name, length in caches.items():
            for index in range(2 * config.num_hidden_layers):
                given[f"{name}.{index}"] = torch.randn(BATCH, heads, length, size)
                sizes[f"{name}.{index}"] = {0: "batch", 2: "past"} if name == "past" else {0: "batch"}
    return given, sizes


def export(name: str, folder: Path, layers: int | None = None, torchscript: bool = False) -> None:
    """Writes one model: with scaled_dot_product_attention by dynamo, or in single operators by TorchScript."""
    recipe = RECIPES[name]
    torch.manual_seed(0)
    built = recipe.build(min(layers or recipe.layers, recipe.layers), "eager" if torchscript else "sdpa")
    given, sizes = inputs(recipe, built)
    outputs = ["output", *(each.replace("past", "present") for each in given if each.startswith("past."))]
    options: dict[str, Any] = {"dynamo": False, "dynamic_axes": sizes, "opset_version": 17}
    if not torchscript:
        dims = {each: torch.export.Dim(each, max=LONGEST) for each in ("batch", "sequence", "past")}
        dims["total"] = torch.export.Dim.DYNAMIC
        shapes = [{axis: dims[size] for axis, size in sizes[each].items()} for each in given]
        split = (shapes[0], tuple(shapes[1:])) if len(shapes) > 1 else (shapes[0],)
        options = {"dynamo": True, "dynamic_shapes": split, "opset_version": 20}
    folder.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            Traced(built, recipe.kind).eval(),
            tuple(given.values()),
            str(folder / "model.onnx"),
            input_names=list(given),
            output_names=outputs,
            external_data=True,
            verbose=False,
            **options,
        )


def main() -> None:
    """Exports one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("name", choices=RECIPES)
    parser.add_argument("--layers", type=int, help="at most so many layers")
    parser.add_argument("--torchscript", action="store_true", help="by the older exporter, attention in operators")
    arguments = parser.parse_args()
    export(arguments.name, arguments.folder, arguments.layers, arguments.torchscript)


if __name__ == "__main__":
    main()
