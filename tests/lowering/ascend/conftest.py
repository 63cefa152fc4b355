"""The vectors: good and broken files with the verdict of GE's own loading code, packed (most of them is one mask)."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

PACKED = Path(__file__).with_name("vectors.tar.xz")


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked folder of vectors: samples, rules, onnx_samples, singleop_samples, verdicts.tsv."""
    folder = tmp_path_factory.mktemp("vectors")
    with tarfile.open(PACKED) as packed:
        packed.extractall(folder, filter="data")
    return folder
