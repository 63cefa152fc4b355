"""Caches that are buffers in one model and grow in another: inputs for both, and outputs that can be compared.

A model made with `in_place_caches` names its buffers in its metadata. Its runs correspond to runs of the original:

    past of L tokens         a buffer with room for more, whose first L rows are the past; what lies behind is NaN here
    present of L + s tokens  the first L + s rows of the same piece of memory
    the rest                 as it was, and L beside it
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ml_dtypes
import numpy as np
import onnx

from fa_compiler.errors import InputError
from fa_compiler.passes.in_place import METADATA

SPARE = 3
"""Rows that the buffers have beyond those in use."""


@dataclass(frozen=True)
class Buffer:
    """One cache of a changed model: the input `past`, the output `present`, the axis of the tokens and the input with
    their number."""

    past: str
    present: str
    axis: int
    length: str

    def rows(self, array: np.ndarray, count: int) -> np.ndarray:
        """The first rows of a buffer or past, a view."""
        return array[(slice(None),) * self.axis + (slice(count),)]


def buffers_of(model: onnx.ModelProto) -> tuple[Buffer, ...]:
    """The buffers of a model, none if it was made without `in_place_caches`. Raises InputError for other metadata."""
    found = next((entry.value for entry in model.metadata_props if entry.key == METADATA), "[]")
    try:
        buffers = tuple(Buffer(**entry) for entry in json.loads(found))
        if all(isinstance(name, str) for each in buffers for name in (each.past, each.present, each.length)) and all(
            type(each.axis) is int for each in buffers
        ):
            return buffers
    except (ValueError, TypeError, RecursionError):
        pass
    raise InputError(f"the metadata entry {METADATA} does not name the model's caches: {found[:80]}")


def buffer_feeds(
    buffers: Sequence[Buffer], feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The inputs of the changed model for those and the outputs of the original's run."""
    changed = dict(feeds)
    for buffer in buffers:
        if buffer.past not in feeds or buffer.present not in outputs:
            raise InputError(f"the cache '{buffer.past}', '{buffer.present}' is none of the original model")
        past, present = feeds[buffer.past], outputs[buffer.present]
        if past.ndim != present.ndim or not 0 <= buffer.axis < past.ndim:
            raise InputError(f"the cache '{buffer.past}', '{buffer.present}' has no axis {buffer.axis} in the original")
        shape = list(present.shape)
        shape[buffer.axis] += SPARE
        memory = np.full(shape, _garbage(past.dtype), past.dtype)
        count = past.shape[buffer.axis]
        buffer.rows(memory, count)[...] = past
        changed[buffer.past], changed[buffer.length] = memory, np.array([count], np.int64)
    return changed


def grown_outputs(
    buffers: Sequence[Buffer], found: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The outputs of the changed model as those of the original: without the rows that are not in use."""
    grown = dict(found)
    for buffer in buffers:
        grown[buffer.present] = buffer.rows(found[buffer.present], outputs[buffer.present].shape[buffer.axis])
    return grown


def _garbage(dtype: np.dtype) -> float | int:
    """What no result may depend on."""
    return float("nan") if dtype.kind == "f" or dtype == ml_dtypes.bfloat16 else 77
