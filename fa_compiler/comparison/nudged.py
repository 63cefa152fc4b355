"""The weights of a model with other last bits: they show how much the model enlarges rounding
errors.

The difference that they make is what the model would give if its weights had been rounded to the
other neighbour. Two right orders of additions may differ by as much. An operator that divides by a
small number, such as the norm behind a linear attention, enlarges both.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

_NUDGED = (TensorProto.FLOAT, TensorProto.FLOAT16)
_SEED = 0


def nudged_weights(model: onnx.ModelProto, folder: Path) -> Mapping[str, np.ndarray]:
    """The matrices among a model's weights, each number replaced by the next larger or the next
    smaller one, by chance.

    Others stay: a small number, such as the frequency of a position, may be multiplied with
    thousands, and no order of additions changes it. A 0 stays 0, and no number becomes infinite.

    Args:
        model: the model, with its external data or without.
        folder: where the files of its external data are.

    Returns:
        The arrays by the names of the initializers.
    """
    draw = np.random.default_rng(_SEED)
    return {
        tensor.name: _nudged(numpy_helper.to_array(tensor, str(folder)), draw)
        for tensor in model.graph.initializer
        if tensor.data_type in _NUDGED and len(tensor.dims) == 2 and min(tensor.dims) > 1
    }


def nudged_model(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """The model, which is changed, with the weights of `nudged_weights`. It holds them itself."""
    nudged = nudged_weights(model, folder)
    for tensor in model.graph.initializer:
        if tensor.name in nudged:
            tensor.CopyFrom(numpy_helper.from_array(nudged[tensor.name], tensor.name))
    return model


def _nudged(array: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    towards = np.where(draw.random(array.shape, np.float32) < 0.5, -np.inf, np.inf).astype(
        array.dtype
    )
    moved = np.nextafter(array, towards)
    return np.where((array == 0) | ~np.isfinite(array) | ~np.isfinite(moved), array, moved)
