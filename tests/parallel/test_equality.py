"""Ranks compute what one process computes: every method, 1 to 8 ranks, lengths that do not divide, masks, biases."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import fa_compiler
from fa_compiler.atc.shapes import fix
from fa_compiler.errors import InputError
from fa_compiler.op_registry.collectives import METHODS
from tests.pairs import pairwise

from .running import by_one, by_ranks, check, content, sharded, text

MODELS = {
    "bert": "BSH, a padding mask",
    "gpt2": "BSH, causal, learned positions",
    "llama": "BNSD, causal, grouped heads, rotary positions",
    "bloom__tsn_eager_op14": "a bias from the mask (ALiBi)",
    "bert_relkey__tso_eager_op13": "a bias made of the keys, which are gathered for it",
    "mistral__tsn_eager_op14": "a causal window",
    "modernbert__dynamon_sdpa_op20": "a window to both sides",
    "roberta__tsn_eager_op14": "positions counted along the sequence",
    "llama_leftpad__tsn_eager_op14": "rows that attend nothing, which get the mean of all values",
}
NOT_DIVIDED = {3, 8}
"""Numbers of ranks that do not divide 4 heads."""


@pytest.mark.parametrize("ranks, name, length", pairwise([1, 2, 3, 4, 8], ["bert", "gpt2", "llama"], [16, 29]))
def test_every_number_of_ranks(ranks: int, name: str, length: int) -> None:
    feeds = text(name, length)
    expected = by_one(name, feeds)
    for method in METHODS:
        if method == "all-to-all" and ranks in NOT_DIVIDED:
            with pytest.raises(
                InputError, match=f"all-to-all is not possible: {ranks} ranks do not divide its 4 heads"
            ):
                sharded(name, ranks, method)
        else:
            check(expected, by_ranks(sharded(name, ranks, method).path, ranks, feeds))


@pytest.mark.parametrize("padded", ["right", "left"])
@pytest.mark.parametrize("name", [name for name in MODELS if "__" in name])
def test_masks_and_biases(name: str, padded: str) -> None:
    feeds = text(name, 23, padded)
    expected = by_one(name, feeds)
    for ranks, method in ((2, "all-to-all"), (3, "gather"), (4, "ring")):
        check(expected, by_ranks(sharded(name, ranks, method).path, ranks, feeds))


def test_heads_are_fewer_than_ranks_of_a_group() -> None:
    """4 query heads on 2 key heads: each of 4 ranks needs one key head, which two ranks share."""
    feeds = text("llama", 19)
    check(by_one("llama", feeds), by_ranks(sharded("llama", 4, "all-to-all").path, 4, feeds))


def test_token_that_is_taken_out_of_the_sequence() -> None:
    """A classifier reads the first token of each text: every rank gets it from the one that has it."""
    name = "bert_tt__tsn_sdpa_op17"
    feeds = text(name, 11)
    result = sharded(name, 3)
    assert result.report.outputs == {"logits": None}
    check(by_one(name, feeds), by_ranks(result.path, 3, feeds))


def test_a_length_that_the_model_fixes(tmp_path: Path) -> None:
    """Every rank gets the mask of all tokens, however many they are."""
    feeds = text("bert", 29)
    sizes = {name: array.shape for name, array in feeds.items()}
    model = fix(onnx.load_model_from_string(content("bert")), sizes, "bert")
    result = fa_compiler.shard(model, tmp_path / "out", 3)
    assert result.report.gathered == ("attention_mask",)
    check(by_one("bert", feeds), by_ranks(result.path, 3, feeds))
