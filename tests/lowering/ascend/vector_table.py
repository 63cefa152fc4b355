"""The verdicts of the packed vectors, by file name: what tests are parametrised with."""

from __future__ import annotations

import tarfile

from tests.lowering.ascend.conftest import PACKED


def verdicts(suffix: str) -> list[tuple[str, str]]:
    """(file, verdict of GE's loading code) for every vector with that suffix."""
    with tarfile.open(PACKED) as packed:
        table = packed.extractfile("verdicts.tsv")
        assert table is not None
        rows = [line.split("\t") for line in table.read().decode().splitlines()[1:]]
    return [(row[0], row[1]) for row in rows if row[0].endswith(suffix)]
