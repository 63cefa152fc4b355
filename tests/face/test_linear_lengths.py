"""A file that is right for 33 to 48 tokens only: what verify compares, and where."""

from __future__ import annotations

import lzma
from pathlib import Path

import onnx
import pytest

import fa_compiler
from fa_compiler.comparison.compare import compare_models
from fa_compiler.comparison.lengths import lengths_of, other_length, right_length
from fa_compiler.passes.linear.lengths import Lengths
from tests.passes.linear.test_graphs import GRAPHS

FILE = "qwen3_next__rule_chunk16_dyn_dynamo"


@pytest.fixture
def original(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    path.write_bytes(lzma.decompress((GRAPHS / f"{FILE}.onnx.xz").read_bytes()))
    return path


def test_the_file_is_compared_where_it_is_right(original: Path) -> None:
    fused = original.with_name("fused.onnx")
    fa_compiler.optimize(original, fused)
    found = compare_models(original, fused)
    assert found.same
    assert found.sizes["q"][1] == 48
    assert found.rounds == 1


def test_beyond_it_is_compared_with_the_recurrence(original: Path) -> None:
    fused = original.with_name("fused.onnx")
    fa_compiler.optimize(original, fused, assume=["any-length"])
    found = compare_models(original, fused, assume=["any-length"])
    assert found.same
    assert found.rounds == 2
    proto = onnx.load(fused)
    (body,) = (each for each in proto.functions if each.name == "FlashLinearAttention")
    (scan,) = (node for node in body.node if node.op_type == "Scan")
    product = next(node for node in scan.attribute[0].g.node if node.op_type == "Mul")
    product.op_type = "Add"
    onnx.save(proto, fused)
    other = compare_models(original, fused, assume=["any-length"])
    assert not other.same
    assert "97 tokens, for which the original is not right, beside the recurrence" in other.given


def test_lengths_are_written_and_read() -> None:
    for lengths in (Lengths(((33, 48),)), Lengths(step=64), Lengths(((1, 3), (65, None)))):
        assert Lengths.read(lengths.written()) == lengths
    some = [Lengths(((33, 48),)), Lengths(((40, 100),))]
    assert right_length(some) == 48
    assert other_length(some) == 201
    assert right_length([Lengths(step=64)]) == 128
    assert right_length([]) is None
    assert lengths_of(onnx.ModelProto()) == []
