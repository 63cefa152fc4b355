"""Reads a rank's part of the inputs from an .npz file. The rest of a tensor passes by and is never held in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx

from fa_compiler.comparison.feeds import read_inputs
from fa_compiler.parallel.communicator import Array, Shape
from fa_compiler.parallel.parts import Parts

_PIECE = 1 << 20
"""The most bytes that are read at a time to pass over them."""


def load_part(
    path: Path,
    model: onnx.ModelProto,
    axes: Mapping[str, int | None],
    rank: int,
    parts_of: Callable[[Mapping[str, Shape]], Parts],
) -> tuple[dict[str, Array], Parts]:
    """A rank's part of each input with an axis, all of the others, and how the sequence is divided.

    `parts_of` divides it by the shapes of the inputs. Raises InputError as `load_inputs` does.
    """
    found: list[Parts] = []

    def read(archive: np.lib.npyio.NpzFile) -> dict[str, Array]:
        members = archive.zip
        assert members is not None  # as long as the archive is open
        headers = {}
        for name in archive.files:
            with members.open(f"{name}.npy") as file:
                headers[name] = _header(file)
        parts = parts_of({name: shape for name, (shape, _, _) in headers.items()})
        found.append(parts)
        own = {}
        for name, (_, in_columns, _) in headers.items():
            axis = axes.get(name)
            if axis is None:
                own[name] = archive[name]
            elif in_columns:
                own[name] = parts.own(archive[name], axis, rank)
            else:
                with members.open(f"{name}.npy") as file:
                    own[name] = _part(file, axis, rank, parts)
        return own

    arrays = read_inputs(path, model, read)
    return arrays, found[0]


def _header(file: IO[bytes]) -> tuple[Shape, bool, np.dtype[Any]]:
    """The shape of an array in the form of NumPy, whether it is stored by columns, and its type."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, in_columns, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return shape, in_columns, dtype


def _part(file: IO[bytes], axis: int, rank: int, parts: Parts) -> Array:
    shape, _, dtype = _header(file)
    token = math.prod(shape[axis + 1 :]) * dtype.itemsize
    content = bytearray()
    for _ in range(math.prod(shape[:axis])):
        place = 0
        for start, stop in (*parts.chunks(rank), (shape[axis], shape[axis])):
            _pass_over(file, (start - place) * token)
            content += _exactly(file, (stop - start) * token)
            place = stop
    return np.frombuffer(content, dtype).reshape(*shape[:axis], parts.count(rank), *shape[axis + 1 :])


def _pass_over(file: IO[bytes], count: int) -> None:
    while count > 0:
        count -= len(_exactly(file, min(count, _PIECE)))


def _exactly(file: IO[bytes], count: int) -> bytes:
    content = file.read(count)
    if len(content) != count:
        raise ValueError("an array is shorter than its header says")
    return content
