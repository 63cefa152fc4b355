"""Reads a rank's part of the inputs from an .npz file. The rest of a tensor passes by and is never
held in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import onnx

from fa_compiler.comparison.feeds import opened, read_inputs, typed
from fa_compiler.errors import InputError
from fa_compiler.parallel.communicator import Array, Shape
from fa_compiler.parallel.parts import Parts

POSITIONS = "positions"
"""The name of the positions of a rank's tokens in a file of its outputs."""

_PIECE = 1 << 20
"""The bytes of tokens that are read at a time; one token at least."""


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


def load_caches(
    path: Path, infos: Mapping[str, onnx.ValueInfoProto]
) -> tuple[dict[str, Array], Array]:
    """The arrays of these names and types, and `positions`, from a file that an earlier run wrote
    with other outputs.

    Raises InputError.
    """
    with opened(path) as archive:
        missing = [name for name in (*infos, POSITIONS) if name not in archive.files]
        if missing:
            raise InputError(
                f"{path} lacks '{missing[0]}'; give a file that `run --parts` wrote of caches"
            )
        arrays = {name: archive[name] for name in (*infos, POSITIONS)}
    positions = arrays.pop(POSITIONS)
    return {
        name: typed(str(path), name, array, infos[name]) for name, array in arrays.items()
    }, positions


def _header(file: IO[bytes]) -> tuple[Shape, bool, np.dtype[Any]]:
    """The shape of an array in the form of NumPy, whether it is stored by columns, and its type."""
    version = np.lib.format.read_magic(file)
    read = (
        np.lib.format.read_array_header_1_0
        if version == (1, 0)
        else np.lib.format.read_array_header_2_0
    )
    shape, in_columns, dtype = read(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects")
    return shape, in_columns, dtype


def _part(file: IO[bytes], axis: int, rank: int, parts: Parts) -> Array:
    shape, _, dtype = _header(file)
    token = math.prod(shape[axis + 1 :]) * dtype.itemsize
    step = max(1, _PIECE // max(1, token))
    own = parts.positions(rank)
    content = bytearray()
    for _ in range(math.prod(shape[:axis])):
        for start in range(0, shape[axis], step):
            stop = min(start + step, shape[axis])
            piece = np.frombuffer(_exactly(file, (stop - start) * token), np.uint8).reshape(
                stop - start, token
            )
            content += piece[own[slice(*np.searchsorted(own, (start, stop)))] - start].tobytes()
    return np.frombuffer(content, dtype).reshape(*shape[:axis], len(own), *shape[axis + 1 :])


def _exactly(file: IO[bytes], count: int) -> bytes:
    content = file.read(count)
    if len(content) != count:
        raise ValueError("an array is shorter than its header says")
    return content
