"""Inputs for a comparison: random ones that fit the model, or the user's from an .npz file."""

from __future__ import annotations

import ast
import difflib
import math
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx

from fa_compiler.comparison.cache_lengths import (
    CACHED_OPERATORS,
    CachedAttention,
    Requirements,
    attempts,
    attempts_of,
    cached_attention,
    disagreement,
    named_sizes,
    size_name,
)
from fa_compiler.comparison.decoder import caches_of, decoding_sizes
from fa_compiler.comparison.demanded_sizes import demanded_sizes
from fa_compiler.comparison.integers import Readers, number_range
from fa_compiler.comparison.masks import FLOATS, Mask, is_mask, ones_and_zeros
from fa_compiler.comparison.signals import numbers_as_names, signal_sizes
from fa_compiler.comparison.weights import weights_of
from fa_compiler.errors import InputError, one_line
from fa_compiler.model_files.refusals import reason
from fa_compiler.passes import analyse
from fa_compiler.protos.cache_names import CACHE_WORDS
from fa_compiler.protos.subgraphs import graph_inputs

BATCH = 2
LENGTH = 16
"""The sizes of dynamic dimensions: BATCH for a batch and for a first dimension, LENGTH for any
other, and twice LENGTH for a mask over past and present. A dimension is dynamic if it has a name,
no size, or the size -1."""


class Sizes(NamedTuple):
    """What open sizes become. With `signals` the sizes of sounds and images are those of
    signals.py."""

    batch: int = BATCH
    length: int = LENGTH
    signals: bool = False


TRIED = (
    *(Sizes(batch, LENGTH, signals=True) for batch in (BATCH, 1)),
    *(Sizes(batch, length) for length in (LENGTH, 32) for batch in (BATCH, 1)),
    *(Sizes(1, length) for length in (64, 128, 224, 1)),
)
"""The sizes to be tried in turn until a model runs. Models that shrink and enlarge their data need
multiples of 32 as length; others need a batch of 1."""

MAX_INDEX = 1000
"""Random indices are below this number, even if the indexed table is larger."""

GIVE_INPUTS = "give inputs with --inputs, an option of verify and run"
MAX_ELEMENTS = 1 << 28
"""The most elements of a random input; the machine would run out of memory with more."""

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


def random_inputs(
    model: onnx.ModelProto,
    name: str,
    seed: int = 0,
    shared: bool = False,
    batch: int = BATCH,
    length: int = LENGTH,
    masks: Mask | None = None,
    rows: int | None = None,
    past: int | None = None,
    only: Collection[str] | None = None,
    signals: bool = False,
) -> dict[str, np.ndarray]:
    """Random inputs for a model.

    Each symbolic dimension has one size in all inputs, which is the size that the model's nodes
    demand, if they demand one (demanded_sizes.py). Indices are valid for the indexed table, masks
    hold ones and some zeros, positions count up, and the lengths of caches are consistent
    (cache_lengths.py). Integers that a quantised model computes with have the range of their type
    (integers.py), other integers are 0 or 1. Weights are as large as those of a new layer
    (weights.py).

    Args:
        model: the model.
        name: the name of the model for messages.
        seed: of the random numbers.
        shared: leave space for the new keys in a past, which one buffer for past and present needs.
        batch, length: the sizes of dynamic dimensions.
        masks: makes other masks (masks.py). A mask whose sum is a number of keys is never changed.
        rows, past: of a decoder, the number of new tokens and of cached ones. None for `length`.
        only: the inputs to make; None makes all.
        signals: open sizes of sounds and images are not `length`, but those of signals.py.

    Raises:
        InputError: an input is not a tensor of numbers or is too large, or no consistent lengths
            were found.
    """
    calls, demanded = _known_from_nodes(model)
    inputs = graph_inputs(model)
    demanded = {**(signal_sizes(inputs) if signals else {}), **numbers_as_names(inputs), **demanded}
    wanted = inputs if only is None else [info for info in inputs if info.name in only]
    if rows is None:
        lengths = _cache_lengths(inputs, length)
        sums, tried = (
            _sums(inputs, *lengths) if lengths[0] else {},
            attempts(calls, length, batch, shared, demanded),
        )
    else:
        cached = length if past is None else past
        decoding = decoding_sizes(model, rows, cached)
        sums = (_sums(inputs, cached, rows) if caches_of(model) else {}) | decoding
        tried = attempts_of(calls, batch, rows, cached, shared, demanded | decoding)
    if not calls:
        return _made(
            model, name, seed, _Sizes({**sums, **demanded}, batch, length), None, masks, wanted
        )
    faults: list[str] = []
    for given in tried:
        sizes = _Sizes({**sums, **given.sizes}, given.batch, length)
        feeds = _made(model, name, seed, sizes, given, masks, wanted)
        fault = disagreement(model, calls, sizes.known, feeds)
        if fault is None:
            return feeds
        faults.append(fault)
    raise InputError(
        f"{name}: found no inputs with consistent lengths ({faults[0]}); {GIVE_INPUTS}"
    )


def _known_from_nodes(model: onnx.ModelProto) -> tuple[list[CachedAttention], dict[str, int]]:
    """The attention over caches, and the sizes that nodes demand; only models that may have some
    are analysed."""
    open_width = any(
        info.type.tensor_type.elem_type in FLOATS and dims and not dims[-1].dim_value > 0
        for info in graph_inputs(model)
        if (dims := info.type.tensor_type.shape.dim)
    )
    if not open_width and CACHED_OPERATORS.isdisjoint(
        (node.domain, node.op_type) for node in model.graph.node
    ):
        return [], {}
    loaded = named_sizes(model)
    info = analyse(loaded)
    return cached_attention(loaded.graph, info), demanded_sizes(loaded.graph, info)


def _made(
    model: onnx.ModelProto,
    name: str,
    seed: int,
    sizes: _Sizes,
    given: Requirements | None,
    masks: Mask | None,
    inputs: Iterable[onnx.ValueInfoProto],
) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    bounds, readers, weights = index_bounds(model.graph), Readers(model.graph), weights_of(model)
    feeds: dict[str, np.ndarray] = {}
    for info in inputs:
        tensor, dtype = info.type.tensor_type, _type_of(name, info)
        shape = tuple(sizes.of(info.name, dim, axis) for axis, dim in enumerate(tensor.shape.dim))
        if any(size < 0 for size in shape) or math.prod(shape) > MAX_ELEMENTS:
            text = " x ".join(map(str, shape))
            raise InputError(
                f"{name}: no random values can be made for input '{info.name}' of the sizes {text}"
            )
        if given is not None and info.name in given.numbers:
            feeds[info.name] = np.resize(given.numbers[info.name], shape).astype(dtype)
        elif given is not None and info.name in given.masks:
            feeds[info.name] = ones_and_zeros(shape, dtype)
        elif masks is not None and is_mask(info):
            feeds[info.name] = masks(shape, dtype)
        else:
            drawn = _drawn(info.name, shape, dtype, bounds.get(info.name), readers, rng)
            spread = weights.get(info.name)
            feeds[info.name] = drawn if spread is None else spread.of(drawn).astype(dtype)
    return feeds


def _type_of(name: str, info: onnx.ValueInfoProto) -> np.dtype[Any]:
    """The type of the numbers of an input. Raises InputError where no random ones can be made."""
    tensor = info.type.tensor_type
    dtype = _NUMPY.get(tensor.elem_type)
    if not info.type.HasField("tensor_type") or dtype is None:
        raise InputError(
            f"{name}: no random values can be made for input '{info.name}'; {GIVE_INPUTS}"
        )
    if not tensor.HasField("shape"):
        raise InputError(
            f"{name}: input '{info.name}' declares no sizes; declare them, or {GIVE_INPUTS}"
        )
    return dtype


def _drawn(
    name: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    bound: int | None,
    readers: Readers,
    rng: np.random.Generator,
) -> np.ndarray:
    """Random values of an input: numbers over their range if the model computes with them."""
    if bound is None and "mask" not in name.lower() and readers.computes_with(name, dtype):
        return np.asarray(_numbers(shape, dtype, rng))
    return np.asarray(_values(name.lower(), shape, dtype, bound, rng))


def _numbers(shape: tuple[int, ...], dtype: np.dtype, rng: np.random.Generator) -> np.ndarray:
    """Integers over the range of those that a model computes with."""
    low, high = number_range(dtype)
    return rng.integers(low, high, shape, endpoint=True).astype(dtype)


def named_inputs(
    given: Mapping[str, npt.ArrayLike], model: onnx.ModelProto
) -> dict[str, np.ndarray]:
    """The inputs of `model` from arrays by name; bfloat16 as in `load_inputs`.

    Raises:
        InputError: the arrays do not fit the model.
    """
    where, wanted = "the dictionary of inputs", {info.name: info for info in graph_inputs(model)}
    _names_fit(where, given, wanted)
    return {
        name: typed(where, name, np.asarray(given[name]), info) for name, info in wanted.items()
    }


def save_arrays(place: Path | BinaryIO, arrays: Mapping[str, np.ndarray]) -> None:
    """Write an .npz file that `load_inputs` reads, whatever the names are: some are arguments of
    numpy.savez."""
    with zipfile.ZipFile(place, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)


def load_inputs(path: Path, model: onnx.ModelProto) -> dict[str, np.ndarray]:
    """The inputs of `model` from an .npz file. bfloat16 may be stored as uint16 bits, as raw bytes
    or as float32.

    Raises:
        InputError: the file cannot be read, or does not fit the model.
    """
    return read_inputs(path, model, lambda archive: {name: archive[name] for name in archive.files})


@contextmanager
def opened(path: Path) -> Iterator[np.lib.npyio.NpzFile]:
    """The archive of a file of arrays by name. Raises InputError, also for what fails while it is
    read."""
    if path.is_dir():  # Windows says of opening one that it is not permitted
        raise InputError(f"{path} is a folder; give the .npz file in it")
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise InputError(
                f"{path} holds a single array; save the inputs by name with numpy.savez"
            )
        with archive:
            yield archive
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except PermissionError as error:
        raise InputError(f"{path} cannot be read: {reason(error, path)}") from None
    except InputError:
        raise
    except (
        Exception
    ) as error:  # the exceptions of NumPy, zipfile and the decompressors share no class
        why = (
            "save the inputs by name with numpy.savez"
            if "pickle" in str(error)
            else one_line(error)
        )
        raise InputError(f"{path} is not an .npz file of plain arrays: {why}") from None


def read_inputs(
    path: Path,
    model: onnx.ModelProto,
    read: Callable[[np.lib.npyio.NpzFile], dict[str, np.ndarray]],
) -> dict[str, np.ndarray]:
    """`load_inputs`, where `read` takes the arrays, or parts of them, out of the archive."""
    wanted = {info.name: info for info in graph_inputs(model)}
    with opened(path) as archive:
        _names_fit(str(path), archive.files, wanted)  # before the arrays are decompressed
        arrays = read(archive)
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise InputError(
                f"{path} holds '{name}', which is not an array; save the inputs by name with numpy.savez"
            )
    return {name: typed(str(path), name, arrays[name], info) for name, info in wanted.items()}


def _names_fit(where: str, given: Iterable[str], wanted: Iterable[str]) -> None:
    missing, extra = sorted(set(wanted) - set(given)), sorted(set(given) - set(wanted))
    for name in extra:
        if close := difflib.get_close_matches(name, missing, n=1):
            raise InputError(
                f"{where} holds '{name}', which the model does not take; did you mean '{close[0]}'?"
            )
    if missing:
        raise InputError(
            f"{where} lacks the input '{missing[0]}' (the model takes {', '.join(sorted(wanted))})"
        )
    if extra:
        raise InputError(
            f"{where} holds '{extra[0]}', which the model does not take ({', '.join(sorted(wanted))})"
        )


def typed(where: str, name: str, array: np.ndarray, info: onnx.ValueInfoProto) -> np.ndarray:
    """The array in the type of an input. bfloat16 may be float32 or its bits. Raises InputError for
    another type."""
    dtype = _NUMPY.get(info.type.tensor_type.elem_type)
    if dtype is None or array.dtype == dtype:
        return array
    if dtype == ml_dtypes.bfloat16:
        if array.dtype == np.float32:
            return array.astype(dtype)
        if array.dtype.itemsize == 2 and array.dtype.kind in "uV":
            return array.view(dtype)
    raise InputError(f"{where}: input '{name}' is {array.dtype}, but the model takes {dtype}")


def with_misfit(message: str, feeds: Mapping[str, np.ndarray], model: onnx.ModelProto) -> str:
    """The message of a model that has failed with given inputs. In front of it stands what the
    inputs contradict in the model, if something is known: a shape, a size that is one in two
    inputs, or the rows of a table."""
    found = misfit(feeds, graph_inputs(model), index_bounds(model.graph))
    return message if found is None else f"{found}; {message}"


def misfit(
    feeds: Mapping[str, np.ndarray],
    inputs: Iterable[onnx.ValueInfoProto],
    bounds: Mapping[str, int],
) -> str | None:
    """What the arrays contradict in a model's inputs, or None: a shape, a size that is one in two
    inputs, or the rows of a table, of which `index_bounds` gives the `bounds`. Inputs without an
    array are not looked at."""
    return next(_misfits(feeds, inputs, bounds), None)


def _misfits(
    feeds: Mapping[str, np.ndarray],
    inputs: Iterable[onnx.ValueInfoProto],
    bounds: Mapping[str, int],
) -> Iterator[str]:
    named: dict[str, tuple[str, int]] = {}
    for info in inputs:
        if info.name not in feeds:
            continue
        name, array = info.name, feeds[info.name]
        dims = list(info.type.tensor_type.shape.dim)
        if info.type.tensor_type.HasField("shape") and not _has_shape(array, dims):
            declared = ", ".join(str(dim.dim_value or dim.dim_param or "?") for dim in dims)
            yield f"'{name}' has the shape {list(array.shape)}, and the model takes [{declared}]"
            return
        for dim, size in zip(dims, array.shape, strict=False):
            other, known = named.setdefault(dim.dim_param, (name, size))
            if dim.dim_param and known != size:
                yield f"the size '{dim.dim_param}' is {known} in '{other}' and {size} in '{name}'"
        bound = bounds.get(name)
        if bound is not None and array.size and not -bound <= array.min() <= array.max() < bound:
            yield f"'{name}' holds numbers from {array.min()} to {array.max()}, and the model's table has {bound} rows"


def _has_shape(array: np.ndarray, dims: Sequence[onnx.TensorShapeProto.Dimension]) -> bool:
    return len(dims) == array.ndim and all(
        dim.dim_value in (-1, 0, size) for dim, size in zip(dims, array.shape, strict=True)
    )


class _Sizes:
    """The sizes of dimensions. A symbol gets its size, in `known`, on its first use; expressions
    are computed."""

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
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
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
        raise ValueError("not a sum, difference, product or quotient of symbols and integers")


def _sums(inputs: Sequence[onnx.ValueInfoProto], past: int, present: int) -> dict[str, int]:
    """The sizes of symbols that have to be the sum of two lengths, past and present.

    Exporters often give such a sum a symbol of its own. If the inputs hold a cache, it is the last
    dimension of a mask, provided that no other input has this symbol.
    """
    ends: dict[str, set[bool]] = {}
    for info in inputs:
        dims, mask = info.type.tensor_type.shape.dim, is_mask(info)
        for position, dim in enumerate(dims):
            if dim.dim_param:
                ends.setdefault(dim.dim_param, set()).add(mask and position == len(dims) - 1)
    return {name: past + present for name, kinds in ends.items() if kinds == {True}}


def _cache_lengths(inputs: Sequence[onnx.ValueInfoProto], length: int) -> tuple[int, int]:
    """The length of the last past, 0 without one, and that of the first other tensor, both `length`
    where open."""
    past = present = 0
    for info in inputs:
        dims = info.type.tensor_type.shape.dim
        if any(word in info.name.lower() for word in CACHE_WORDS) and len(dims) > 2:
            past = dims[-2].dim_value or length
        elif not present and not is_mask(info) and len(dims) > 1:
            present = dims[-1].dim_value or length
    return past, present or length


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


def index_bounds(graph: onnx.GraphProto) -> Mapping[str, int]:
    """The size of the smallest table that an input indexes, for the inputs that are the indices of
    a Gather."""
    tables = {tensor.name: tensor.dims for tensor in graph.initializer}
    origin = {info.name: info.name for info in graph.input}
    bounds: dict[str, int] = {}
    for node in graph.node:
        if (
            node.op_type in ("Cast", "Identity", "Unsqueeze", "Squeeze", "Reshape")
            and node.input[0] in origin
        ):
            origin[node.output[0]] = origin[node.input[0]]
        elif node.op_type == "Gather" and node.input[0] in tables and node.input[1] in origin:
            axis = next(
                (attribute.i for attribute in node.attribute if attribute.name == "axis"), 0
            )
            source, size = origin[node.input[1]], tables[node.input[0]][axis]
            bounds[source] = min(size, bounds.get(source, size))
    return bounds
