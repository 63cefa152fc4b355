"""Exports a Llama of real widths with random weights for bench/exporter_tokens.py: its files, and those of the peers.

    python -m tools.makers.export_tokens DIR [--layers N] [--genai-python PYTHON]

It needs torch, transformers and onnxscript (the `export` extra); nothing is downloaded. transformers' own exporter
writes DIR/plain/prefill/model.onnx and DIR/plain/decode/model.onnx, and the same with `ort_fusions="cpu"` in DIR/cpu,
each with its weights beside it. DIR/one/decode/model.onnx takes any number of tokens, so that it serves for the prompt,
too (`multi_token_decode`). DIR/torch holds the model as transformers saves it. From that the builder of
onnxruntime-genai makes DIR/genai, if an interpreter has it. The sizes are those of Llama 3.2 1B with a small vocabulary
and few layers: 6 layers are 0.4 billion numbers.
"""

from __future__ import annotations

import argparse
import subprocess
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.exporters import OnnxConfig, OnnxExporter
from transformers.exporters.utils import decompose_for_generation

WORDS = 10240
"""The width of no other layer: the builder of onnxruntime-genai takes each layer that is so wide for the last one."""
LONGEST = 8192
TOKENS = 12
"""The tokens of the prompt at which the files are exported. Their number stays open."""


class Files(NamedTuple):
    """A folder of files: the runtime for which the exporter rewrites them, and whether one file takes all tokens."""

    folder: str
    fusions: str | None = None
    is_one: bool = False


FOLDERS = (Files("plain"), Files("cpu", "cpu"), Files("one", is_one=True))


def llama(layers: int) -> LlamaForCausalLM:
    """A Llama with random weights, the same ones each time."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=WORDS,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=LONGEST,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).eval()


def main() -> None:
    """Writes the files that are not there."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--genai-python", metavar="PYTHON", help="has onnxruntime-genai, torch and transformers")
    options = parser.parse_args()
    folder, model = options.folder, llama(options.layers)
    words = torch.randint(3, WORDS, (2, TOKENS))
    given = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    for files in FOLDERS:
        if (folder / files.folder).exists():
            continue
        parts = decompose_for_generation(model, dict(given), multi_token_decode=files.is_one)
        for part, (module, inputs) in parts.items():
            if files.is_one and part != "decode":
                continue
            exported = OnnxExporter().export(module, inputs, OnnxConfig(dynamic=True, ort_fusions=files.fusions))
            target = folder / files.folder / part
            target.mkdir(parents=True)
            ir.save(exported.program, target / "model.onnx", external_data="model.data")
    if options.genai_python and not (folder / "genai").exists():
        model.save_pretrained(folder / "torch")
        tokenizer = Tokenizer(WordLevel({f"t{number}": number for number in range(WORDS)}, unk_token="t0"))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "torch")
        words_of = ["-i", folder / "torch", "-o", folder / "genai", "-p", "fp32", "-e", "cpu"]
        subprocess.run([options.genai_python, "-m", "onnxruntime_genai.models.builder", *words_of], check=True)


if __name__ == "__main__":
    main()
