"""The sweep over other collections (tools/sweep): its rows, and how it sees the structure of a mask."""

from __future__ import annotations

from collections import Counter
from importlib import import_module

import numpy as np
import pytest

from tools.sweep.mask_structure import is_structured
from tools.sweep.rows import Row

COLLECTIONS = ("diffusers", "exporter", "optimum", "timm", "transformers", "vit_pytorch", "x_transformers")
KEYS, PADDED = np.tri(5, 6, dtype=bool), np.arange(6) < 4


def test_rows_are_told_apart_and_many() -> None:
    """Making the list needs none of the collections."""
    rows: list[Row] = [row for name in COLLECTIONS for row in import_module(f"tools.sweep.{name}_rows").ROWS]
    files = Counter(row.id(exporter) for row in rows for exporter in row.exporters)
    assert set(files.values()) == {1}
    assert len({(row.collection, row.name) for row in rows}) > 200


@pytest.mark.parametrize(
    ("allowed", "structured"),
    [
        (KEYS, True),
        (KEYS & ~np.tri(5, 6, -3, dtype=bool), True),  # a window
        (np.broadcast_to(PADDED, (5, 6)), True),
        (KEYS & PADDED[::-1], True),  # the first rows see nothing
        (np.stack([KEYS, KEYS & PADDED]), True),
        (KEYS | np.eye(5, 6, 3, dtype=bool), False),
        (np.eye(5, 6, dtype=bool)[::-1], False),
        (np.outer(PADDED[:5], PADDED), False),  # rows that padding alone would not empty
    ],
)
def test_a_structure_is_a_band_a_choice_of_keys_or_both(allowed: np.ndarray, structured: bool) -> None:
    assert is_structured(allowed) is structured
