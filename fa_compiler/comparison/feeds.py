"""Inputs for a comparison: random ones that suit the model, or the user's own from an .npz file."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx

from fa_compiler.comparison.cache_lengths import Given, attempts, cache_calls, disagreement, size_name
from fa_compiler.comparison.masks import Mask, is_mask, ones_and_zeros
from fa_compiler.errors import InputError, one_line

BATCH = 2
LENGTH = 16
"""Sizes given to open dimensions: BATCH to a batch and to a first dimension, LENGTH to any other; twice that
to the length of a mask over past and present. A dimension is open where it has a name, no size, or the size -1."""

SIZES = ((BATCH, LENGTH), (1, LENGTH), (BATCH, 32), (1, 32), (1, 64), (1, 128), (1, 224), (1, 1))
"""Batch and length to try in turn where a model does not run with the first: those that join what they have shrunk and
enlarged want multiples of 32, others a batch of 1."""

MAX_INDEX = 1000
"""Random indices stay below this even where the table they index is larger."""

MAX_ELEMENTS = 1 << 28
"""Inputs with more elements are not made up: the machine would run out of memory."""

_NUMPY: Mapping[int, np.dtype[Any]] = {
    onnx.TensorProto.FLOAT: np.dtype(np.float32),
    onnx.TensorProto.DOUBLE: np.dtype(np.float64),
    onnx.TensorProto.FLOAT16: np.dtype(np.float16),
    onnx.TensorProto.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    onnx.TensorProto.BOOL: np.dtype(np.bool_),
    onnx.TensorProto.INT8: np.dtype(np.int8),
    onnx.TensorProto.INT16: np.dtype(np.int16),
    onnx.TensorProto.INT32: np.dtype(np.int32),
    onnx.TensorProto.INT64: np.dtype(np.int64),
    onnx.TensorProto.UINT8: np.dtype(np.uint8),
    onnx.TensorProto.UINT16: np.dtype(np.uint16),
    onnx.TensorProto.UINT32: np.dtype(np.uint32),
    onnx.TensorProto.UINT64: np.dtype(np.uint64),
}


def graph_inputs(model: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """The inputs a caller has to feed: those without an initializer."""
    given = {tensor.name for tensor in model.graph.initializer}
    return [info for info in model.graph.input if info.name not in given]


def random_inputs(
    model: onnx.ModelProto,
    name: str,
    seed: int = 0,
    shared: bool = False,
    batch: int = BATCH,
    length: int = LENGTH,
    masks: Mask | None = None,
) -> dict[str, np.ndarray]:
    """Random inputs: a symbolic dimension has one size throughout, indices are valid for the table they
    index, masks hold ones and some zeros, positions count up, lengths of caches agree (cache_lengths.py).

    `shared` leaves room in a past for the keys that are new, as one buffer for past and present needs it. `batch` and
    `length` are the sizes of open dimensions; `masks` makes other masks (masks.py), but none of those that say how many
    keys there are.

    Raises:
        InputError: an input is no tensor of numbers, or too large for this; or no lengths were found that agree.
    """
    calls = cache_calls(model)
    sums = _sums(graph_inputs(model), length)
    if not calls:
        return _made(model, name, seed, _Sizes(sums, batch, length), None, masks)
    faults: list[str] = []
    for given in attempts(calls, length, batch, shared):
        sizes = _Sizes({**sums, **given.sizes}, given.batch, length)
        feeds = _made(model, name, seed, sizes, given, masks)
        fault = disagreement(model, calls, sizes.known, feeds)
        if fault is None:
            return feeds
        faults.append(fault)
    raise InputError(f"{name}: no inputs were made whose lengths agree ({faults[0]}); give them by --inputs")


def _made(
    model: onnx.ModelProto, name: str, seed: int, sizes: _Sizes, given: Given | None, masks: Mask | None
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    bounds = _index_bounds(model.graph)
    feeds: dict[str, np.ndarray] = {}
    for info in graph_inputs(model):
        tensor = info.type.tensor_type
        dtype = _NUMPY.get(tensor.elem_type)
        if not info.type.HasField("tensor_type") or dtype is None:
            raise InputError(f"{name}: no random values can be made for input '{info.name}'; give them by --inputs")
        shape = tuple(sizes.of(info.name, dim, axis) for axis, dim in enumerate(tensor.shape.dim))
        if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
            text = " x ".join(map(str, shape))
            raise InputError(f"{name}: no random values can be made for input '{info.name}' of the sizes {text}")
        if given is not None and info.name in given.numbers:
            feeds[info.name] = np.resize(given.numbers[info.name], shape).astype(dtype)
        elif given is not None and info.name in given.masks:
            feeds[info.name] = ones_and_zeros(shape, dtype)
        elif masks is not None and is_mask(info):
            feeds[info.name] = masks(shape, dtype)
        else:
            feeds[info.name] = np.asarray(_values(info.name.lower(), shape, dtype, bounds.get(info.name), rng))
    return feeds


def load_inputs(path: Path, model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The inputs of `model` from an .npz file; bfloat16 may be stored as uint16 bits, raw or float32.

    Raises:
        InputError: the file cannot be read, or does not fit the model.
    """
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(f"{path} holds a single array; save the inputs by name with numpy.savez")
        wanted = {info.name: info for info in graph_inputs(model)}
        with archive:
            _names_fit(path, archive.files, wanted)  # before anything is unpacked
            arrays = {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise InputError(f"{path} is a folder; give the .npz file in it") from None
    except InputError:
        raise
    except Exception as error:  # of NumPy, zipfile and the decompressors: they share no class
        raise InputError(f"{path} is not an .npz file of plain arrays: {one_line(error)}") from None
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise InputError(f"{path} holds '{name}', which is no array; save the inputs by name with numpy.savez")
    return {name: _typed(path, name, arrays[name], info) for name, info in wanted.items()}


def _names_fit(path: Path, given: Iterable[str], wanted: Iterable[str]) -> None:
    missing, extra = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    if missing:
        raise InputError(f"{path} lacks the input '{missing[0]}' (the model takes {', '.join(sorted(wanted))})")
    if extra:
        raise InputError(f"{path} holds '{extra[0]}', which the model does not take ({', '.join(sorted(wanted))})")


def _typed(path: Path, name: str, array: np.ndarray, info: onnx.ValueInfoProto) -> np.ndarray:
    dtype = _NUMPY.get(info.type.tensor_type.elem_type)
    if dtype is None or array.dtype == dtype:
        return array
    if dtype == ml_dtypes.bfloat16:
        if array.dtype == np.float32:
            return array.astype(dtype)
        if array.dtype.itemsize == 2 and array.dtype.kind in "uV":
            return array.view(dtype)
    raise InputError(f"{path}: input '{name}' is {array.dtype}, but the model takes {dtype}")


class _Sizes:
    """One size for each symbol, in `known` once it was asked for; an expression of symbols is computed from them."""

    def __init__(self, known: dict[str, int], batch: int, length: int) -> None:
        self.known = known
        self._batch = batch
        self._length = length

    def of(self, name: str, dim: onnx.TensorShapeProto.Dimension, axis: int) -> int:
        if dim.HasField("dim_value") and dim.dim_value != -1:
            return int(dim.dim_value)
        if not dim.dim_param:
            return self._symbol(size_name(name, axis), axis)
        try:
            return self._computed(ast.parse(dim.dim_param.strip(), mode="eval").body, axis)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
            return self._symbol(dim.dim_param, axis)

    def _symbol(self, name: str, axis: int) -> int:
        if name not in self.known:
            self.known[name] = self._batch if "batch" in name.lower() or axis == 0 else self._length
        return self.known[name]

    def _computed(self, node: ast.expr, axis: int) -> int:
        match node:
            case ast.Name(id=name):
                return self._symbol(name, axis)
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right):
                a, b = self._computed(left, 1), self._computed(right, 1)
                match op:
                    case ast.Add():
                        return a + b
                    case ast.Sub():
                        return a - b
                    case ast.Mult():
                        return a * b
                    case ast.FloorDiv():
                        return a // b
        raise ValueError("no plain expression")


def _sums(inputs: Sequence[onnx.ValueInfoProto], length: int) -> dict[str, int]:
    """Symbols that must be the sum of two lengths: exporters often name them apart from their terms.

    With a cache among the inputs that is the last dimension of a mask, if no other input has it.
    """
    ends: dict[str, set[bool]] = {}
    past = present = 0
    for info in inputs:
        dims = info.type.tensor_type.shape.dim
        mask = is_mask(info)
        if "past" in info.name.lower() and len(dims) > 2:
            past = dims[-2].dim_value or length
        elif not mask and len(dims) > 1:
            present = present or dims[-1].dim_value or length
        for position, dim in enumerate(dims):
            if dim.dim_param:
                ends.setdefault(dim.dim_param, set()).add(mask and position == len(dims) - 1)
    if not past:
        return {}
    return {name: past + (present or length) for name, kinds in ends.items() if kinds == {True}}


def _values(
    name: str, shape: tuple[int, ...], dtype: np.dtype, bound: int | None, rng: np.random.Generator
) -> np.ndarray:
    if "mask" in name:
        return ones_and_zeros(shape, dtype)
    if dtype.kind == "b":
        return rng.random(shape) < 0.5
    if dtype.kind in "iu":
        if "position" in name and shape:
            return np.broadcast_to(np.arange(shape[-1]) % (bound or MAX_INDEX), shape).astype(dtype)
        return rng.integers(0, min(bound or 2, MAX_INDEX), shape).astype(dtype)
    return rng.standard_normal(shape).astype(dtype)


def _index_bounds(graph: onnx.GraphProto) -> Mapping[str, int]:
    """For inputs that reach a Gather as indices: the size of the smallest table they index."""
    tables = {tensor.name: tensor.dims for tensor in graph.initializer}
    origin = {info.name: info.name for info in graph.input}
    bounds: dict[str, int] = {}
    for node in graph.node:
        if node.op_type in ("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape") and node.input[0] in origin:
            origin[node.output[0]] = origin[node.input[0]]
        elif node.op_type == "Gather" and node.input[0] in tables and node.input[1] in origin:
            axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), 0)
            source, size = origin[node.input[1]], tables[node.input[0]][axis]
            bounds[source] = min(size, bounds.get(source, size))
    return bounds
