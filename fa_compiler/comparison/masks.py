"""The masks of a comparison: ones and zeros, and the other values that users feed.

A mask is an input with "mask" in its name. Each kind but the first has its own round. A kind is
left out if it would break an assumption that the user vouches for:

    kind                        types      left out with
    --------------------------  ---------  ----------------------------------------------
    ones and zeros              all
    ones                        all
    zeros in a whole row        all        no-empty-rows, masks-dominate
    ids of packed sequences     integers   binary-masks
    numbers from -1 to 2        integers   binary-masks, unbroken-sequences (a label appears again after another)
    0 and -inf, the lowest      floats     binary-masks
      number, -1e9, -1e4
    the same in a whole row     floats     binary-masks, no-empty-rows, masks-dominate

Most models multiply 1 - mask by a number such as -1e4. A key whose mask is 1 adds 0 then, and this
key counts. In a row of zeros, and for a mask of 2, every score that counts has such a number added,
and is rounded by it. These kinds are coarse.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from fa_compiler.passes.answer.options import BINARY_MASKS, MASKS_DOMINATE, NO_EMPTY_ROWS, UNBROKEN

Mask = Callable[[tuple[int, ...], "np.dtype[Any]"], np.ndarray]
FLOATS = (
    onnx.TensorProto.FLOAT,
    onnx.TensorProto.DOUBLE,
    onnx.TensorProto.FLOAT16,
    onnx.TensorProto.BFLOAT16,
)
EXCLUDING = (-np.inf, None, -1e9, -1e4)
"""Numbers that exporters use for masked keys; None is the lowest number of the type."""


@dataclass(frozen=True)
class MaskKind:
    """One kind of masks: its name in a report, the function that makes it, and whether it is
    coarse: a large number may stay beside all scores that count."""

    name: str
    make: Mask | None = None
    coarse: bool = False


def is_mask(info: onnx.ValueInfoProto) -> bool:
    """Whether an input is a mask by its name."""
    return "mask" in info.name.lower()


def mask_kinds(
    inputs: Collection[onnx.ValueInfoProto], assume: Collection[str]
) -> Iterator[MaskKind]:
    """The kinds to try for the inputs of a model, after ones and zeros, if the user vouches for
    `assume`."""
    types = {info.type.tensor_type.elem_type for info in inputs if is_mask(info)}
    if not types:
        return
    whole_rows = not {NO_EMPTY_ROWS, MASKS_DOMINATE}.intersection(assume)
    yield MaskKind("masks of ones", lambda shape, dtype: np.ones(shape, dtype))
    if whole_rows:
        yield MaskKind("masks with zeros in a whole row", _empty_row, coarse=True)
    if BINARY_MASKS in assume:
        return
    if types - {*FLOATS, onnx.TensorProto.BOOL}:
        yield MaskKind("masks with the ids of packed sequences", _packed, coarse=True)
        if UNBROKEN not in assume:
            yield MaskKind("masks with numbers from -1 to 2", _small, coarse=True)
    if types.intersection(FLOATS):
        for number in EXCLUDING:
            name = "the lowest number" if number is None else f"{number:g}"
            yield MaskKind(f"masks of 0 and {name}", _excluding(number, whole_row=False))
            if whole_rows:
                row = _excluding(number, whole_row=True)
                yield MaskKind(f"masks of 0 and {name}, also in a whole row", row, coarse=True)


def ones_and_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Ones. Every second row along the last axis ends in zeros, as in a padded batch."""
    mask = np.ones(shape, np.int64)
    if shape and shape[-1] > 1:
        mask.reshape(-1, shape[-1])[1::2, -max(1, shape[-1] // 4) :] = 0
    return mask.astype(dtype)


def _empty_row(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    mask = ones_and_zeros(shape, dtype)
    if mask.ndim > 0 and mask.size:
        mask.reshape(-1, shape[-1])[0] = 0
    return mask


def _packed(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """1 1 2 2 3 and so on; every second row ends in zeros."""
    if dtype.kind not in "iu" or not shape:
        return ones_and_zeros(shape, dtype)
    ids = np.arange(shape[-1]) // max(2, shape[-1] // 3) + 1
    mask: np.ndarray = ids * ones_and_zeros(shape, np.dtype(np.int64))
    return mask.astype(dtype)


def _small(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers from -1 (0 for unsigned types) to 2; every row begins with a 1."""
    if dtype.kind not in "iu" or not shape:
        return ones_and_zeros(shape, dtype)
    mask = np.random.default_rng(0).integers(-1 if dtype.kind == "i" else 0, 3, shape)
    mask[..., :1] = 1
    return mask.astype(dtype)


def _excluding(number: float | None, whole_row: bool) -> Mask:
    def make(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        kept = (_empty_row if whole_row else ones_and_zeros)(shape, np.dtype(np.bool_))
        if dtype.kind != "f" and dtype != ml_dtypes.bfloat16:
            return kept.astype(dtype)
        lowest = float(ml_dtypes.finfo(dtype).min)  # type: ignore[no-untyped-call]
        excluded = lowest if number is None else number
        if excluded != -np.inf:
            excluded = max(excluded, lowest)
        return np.where(kept, 0.0, excluded).astype(dtype)

    return make
