"""Caches that are buffers in the changed model and grow in the original: inputs for both, and
comparable outputs.

A model that was made with `in_place_caches` names its buffers in its metadata. Its inputs and
outputs correspond to those of the original:

    original                   changed model
    -------------------------  ------------------------------------------------------------------------------------
    a past of L tokens         a larger buffer, whose first L rows are the past; the comparison fills the rest with NaN
    a present of L + s tokens  the first L + s rows of the same buffer
    any other tensor           the same tensor; one more input holds L
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
from fa_compiler.protos.metadata import metadata_of

SPARE = 3
"""Number of rows that the buffers have beyond the rows in use."""


@dataclass(frozen=True)
class Buffer:
    """One cache of a changed model: its input `past` and output `present`, the axis of the tokens,
    and the input `length` with the number of tokens."""

    past: str
    present: str
    axis: int
    length: str

    def rows(self, array: np.ndarray, count: int) -> np.ndarray:
        """A view of the first `count` rows of a buffer or past."""
        return array[(slice(None),) * self.axis + (slice(count),)]


def buffers_of(model: onnx.ModelProto) -> tuple[Buffer, ...]:
    """The buffers of a model; a model made without `in_place_caches` has none.

    Raises:
        InputError: the metadata entry does not have the expected form.
    """
    found = metadata_of(model, METADATA)
    if found is None:
        return ()
    try:
        buffers = tuple(Buffer(**entry) for entry in json.loads(found))
        names = (name for each in buffers for name in (each.past, each.present, each.length))
        if all(isinstance(name, str) for name in names) and all(
            type(buffer.axis) is int for buffer in buffers
        ):
            return buffers
    except (ValueError, TypeError, RecursionError):
        pass
    raise InputError(
        f"the metadata entry {METADATA} does not name the model's caches: {found[:80]}"
    )


def buffer_feeds(
    buffers: Sequence[Buffer], feeds: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The inputs of the changed model, from the inputs (`feeds`) and outputs of a run of the
    original.

    Raises:
        InputError: the original model has no such cache, or the cache has no such axis.
    """
    changed = dict(feeds)
    for buffer in buffers:
        if buffer.past not in feeds or buffer.present not in outputs:
            raise InputError(f"the original model has no cache '{buffer.past}', '{buffer.present}'")
        past, present = feeds[buffer.past], outputs[buffer.present]
        if past.ndim != present.ndim or not 0 <= buffer.axis < past.ndim:
            raise InputError(
                f"the cache '{buffer.past}', '{buffer.present}' has no axis {buffer.axis} in the original"
            )
        shape = list(present.shape)
        shape[buffer.axis] = max(shape[buffer.axis], past.shape[buffer.axis]) + SPARE
        memory = np.full(shape, _garbage(past.dtype), past.dtype)
        count = past.shape[buffer.axis]
        buffer.rows(memory, count)[...] = past
        changed[buffer.past], changed[buffer.length] = memory, np.array([count], np.int64)
    return changed


def grown_outputs(
    buffers: Sequence[Buffer], found: Mapping[str, np.ndarray], outputs: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """The outputs `found` of the changed model in the shapes of the original, without the rows that
    are not in use."""
    grown = dict(found)
    for buffer in buffers:
        grown[buffer.present] = buffer.rows(
            found[buffer.present], outputs[buffer.present].shape[buffer.axis]
        )
    return grown


def _garbage(dtype: np.dtype) -> float | int:
    """The value of the rows that are not in use; no result may depend on it."""
    return float("nan") if dtype.kind == "f" or dtype == ml_dtypes.bfloat16 else 77
