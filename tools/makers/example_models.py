"""Exports small BERT-like, GPT-2-like and Llama-like models, and a BERT of real size, to ONNX.

This needs the `export` extra (torch, transformers). Nothing is downloaded; the weights are seeded random numbers. The
resulting files are in the repository, so you need this program only for other models:

    pip install -e '.[export]'
    python -m tools.makers.example_models                    the files of examples/models
    python -m tools.makers.example_models --variants DIR     every exporter x attention spelling, weights stripped
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import onnxruntime
import torch
import transformers

from examples import weights

MODELS = Path(__file__).parents[2] / "examples" / "models"

Exporter = Literal["dynamo", "torchscript"]
Spelling = Literal["eager", "sdpa"]

MAX_LENGTH = 2048


@dataclass(frozen=True)
class Family:
    """One architecture: the function that builds it, and the exported output."""

    build: Callable[[Spelling], transformers.PreTrainedModel]
    output: str


def bert(spelling: Spelling, size: dict[str, int] | None = None) -> transformers.PreTrainedModel:
    """A BERT encoder, small or of the given `size`."""
    small = {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 128,
        "max_position_embeddings": MAX_LENGTH,
    }
    config = transformers.BertConfig(**(size or small), attn_implementation=spelling)
    return transformers.BertModel(config, add_pooling_layer=False)


def bert_base(spelling: Spelling) -> transformers.PreTrainedModel:
    """BERT-base: 12 layers of 768 with 12 heads, up to 2048 positions."""
    size = {
        "vocab_size": 30522,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "max_position_embeddings": 2048,
    }
    return bert(spelling, size)


def gpt2(spelling: Spelling) -> transformers.PreTrainedModel:
    """A GPT-2 language model: causal, one projection for query, key and value."""
    config = transformers.GPT2Config(
        vocab_size=256,
        n_positions=MAX_LENGTH,
        n_embd=64,
        n_layer=2,
        n_head=4,
        n_inner=128,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=spelling,
    )
    return transformers.GPT2LMHeadModel(config)


def llama(spelling: Spelling) -> transformers.PreTrainedModel:
    """A Llama language model: causal, rotary positions, four query heads on two key and value heads."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        max_position_embeddings=MAX_LENGTH,
        use_cache=False,
        attn_implementation=spelling,
    )
    return transformers.LlamaForCausalLM(config)


FAMILIES = {
    "bert": Family(bert, "last_hidden_state"),
    "gpt2": Family(gpt2, "logits"),
    "llama": Family(llama, "logits"),
    "bert_base": Family(bert_base, "last_hidden_state"),
}


class _OneOutput(torch.nn.Module):
    """The model with tensors as inputs and one tensor as output, which both exporters understand."""

    def __init__(self, model: transformers.PreTrainedModel, output: str) -> None:
        super().__init__()
        self.model = model
        self.output = output

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> Any:
        return self.model(input_ids=input_ids, attention_mask=attention_mask)[self.output]


def export(name: str, exporter: Exporter, spelling: Spelling, seed: int = 0) -> onnx.ModelProto:
    """Export one family with dynamic batch and sequence length, as its exporter writes it."""
    torch.manual_seed(seed)
    family = FAMILIES[name]
    model = _OneOutput(family.build(spelling), family.output).eval()
    ids, mask = _sample(2, 24)
    inputs = ["input_ids", "attention_mask"]
    axes = {0: "batch", 1: "sequence"}
    with (
        tempfile.TemporaryDirectory() as folder,
        warnings.catch_warnings(),
        torch.no_grad(),
    ):
        warnings.simplefilter("ignore")
        path = str(Path(folder) / "model.onnx")
        if exporter == "dynamo":
            longest = model.model.config.max_position_embeddings
            dims = {
                0: torch.export.Dim("batch"),
                1: torch.export.Dim("sequence", max=longest),
            }
            torch.onnx.export(
                model,
                (ids, mask),
                path,
                input_names=inputs,
                output_names=[family.output],
                dynamic_shapes=(dims, dims),
                opset_version=20,
                dynamo=True,
                external_data=False,
                verbose=False,
            )
        else:
            torch.onnx.export(
                model,
                (ids, mask),
                path,
                input_names=inputs,
                output_names=[family.output],
                dynamic_axes=dict.fromkeys([*inputs, family.output], axes),
                opset_version=17,
                dynamo=False,
            )
        _check(path, model)
        result = onnx.load(path)
    weights.without_notes(result)
    return result


def _sample(batch: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and a mask whose last row is padded at its end."""
    ids = torch.randint(0, 256, (batch, length))
    mask = torch.ones_like(ids)
    mask[-1, length - length // 4 :] = 0
    return ids, mask


def _check(path: str, model: torch.nn.Module) -> None:
    """Compare the export with torch at other sizes than those of the trace, because an exporter may freeze an axis."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch, length in ((1, 24), (3, 40)):
        ids, mask = _sample(batch, length)
        expected = model(ids, mask).numpy()
        actual = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})[0]
        real = mask.numpy().astype(bool)
        if not np.allclose(actual[real], expected[real], atol=1e-4):
            raise SystemExit(f"{path}: the export differs from torch at batch {batch}, length {length}")


def _save(model: onnx.ModelProto, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, str(path))
    print(f"{path.name:34} {path.stat().st_size / 1024:8.0f} KB  {len(model.graph.node):5} nodes")


def main() -> None:
    """Write the examples of the repository, or every variant into a folder."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--variants",
        type=Path,
        metavar="DIR",
        help="write all variants, stripped, to DIR",
    )
    folder = parser.parse_args().variants
    if folder is None:
        _save(export("bert", "torchscript", "eager"), MODELS / "bert.onnx")
        _save(export("gpt2", "dynamo", "eager"), MODELS / "gpt2.onnx")
        _save(export("llama", "dynamo", "sdpa"), MODELS / "llama.onnx")
        base = export("bert_base", "dynamo", "sdpa")
        weights.strip(base)
        _save(base, MODELS / "bert_base.graph.onnx")
        return
    for name in ("bert", "gpt2", "llama"):
        for exporter in ("dynamo", "torchscript"):
            for spelling in ("eager", "sdpa"):
                model = export(name, exporter, spelling)
                weights.strip(model)
                _save(model, folder / f"{name}__{exporter}_{spelling}.onnx")


if __name__ == "__main__":
    main()
