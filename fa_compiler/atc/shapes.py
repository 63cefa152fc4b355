"""The sizes of inputs: set in a model before it is optimised, and requested where they are
missing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import onnx

from fa_compiler.atc.sizes import DYNAMIC, Size, Sizes, atc_size
from fa_compiler.errors import InputError
from fa_compiler.protos.subgraphs import graph_inputs, graphs_below


def check_gears(gears: Sequence[Sequence[int]], sizes: Sizes, most: int) -> None:
    """Raise InputError for gears that break ATC's rules for --dynamic_dims.

    Each group has one value for each -1 of --input_shape, no input has a range, and there are 2 to
    `most` different groups.
    """
    if not gears:
        return
    bounds = [size for shape in sizes.values() for size in shape if isinstance(size, tuple)]
    if any(size != DYNAMIC for size in bounds):
        raise InputError("--dynamic-dims goes with -1 in --input-shape, not with ranges")
    if not bounds:
        raise InputError("--dynamic-dims goes with -1 in --input-shape, and no size there is -1")
    if any(len(group) != len(bounds) for group in gears):
        wanted = "1 size" if len(bounds) == 1 else f"{len(bounds)} sizes"
        raise InputError(
            f"--dynamic-dims needs {wanted} in each group, one for each -1 of --input-shape"
        )
    if not 2 <= len(gears) <= most or len({*map(tuple, gears)}) != len(gears):
        found = len({*map(tuple, gears)})
        raise InputError(
            f"--dynamic-dims needs 2 to {most} groups, all of them different; found {found} different"
        )


def with_gears(sizes: Sizes, gears: Sequence[Sequence[int]]) -> dict[str, tuple[Size, ...]]:
    """The sizes, with each -1 replaced by the smallest and the largest size that the gears give
    it."""
    columns = iter(zip(*gears, strict=True))
    filled: dict[str, tuple[Size, ...]] = {}
    for name, shape in sizes.items():
        filled[name] = tuple(
            _bounds(next(columns)) if gears and isinstance(size, tuple) else size for size in shape
        )
    return filled


def gears_of_model(
    gears: Sequence[Sequence[int]], given: Sizes, full: Sizes
) -> tuple[tuple[int, ...], ...]:
    """The gears in the order of the model's inputs, which ATC expects. The user's gears follow
    --input-shape."""
    columns = dict(zip(_dynamic_axes(given), zip(*gears, strict=True), strict=False))
    return (
        tuple(zip(*(columns[place] for place in _dynamic_axes(full)), strict=True)) if gears else ()
    )


def check_symbols(proto: onnx.ModelProto, sizes: Sizes, gears: Sequence[Sequence[int]]) -> None:
    """Raise InputError for a group of gears that gives one symbol of the model two sizes.

    Args:
        sizes: those of all inputs of the model.
        gears: in the order of the model's inputs.
    """
    dims = {value.name: value.type.tensor_type.shape.dim for value in graph_inputs(proto)}
    symbols = [dims[name][axis].dim_param for name, axis in _dynamic_axes(sizes)]
    for group in gears:
        known: dict[str, int] = {}
        for symbol, size in zip(symbols, group, strict=True):
            if symbol and known.setdefault(symbol, size) != size:
                raise InputError(
                    f"--dynamic-dims gives {symbol!r} two sizes in the group {','.join(map(str, group))}: "
                    f"{known[symbol]} and {size}; it is one size in the model"
                )


def extreme_groups(
    sizes: Sizes, gears: Sequence[Sequence[int]]
) -> list[dict[str, tuple[int, ...]]]:
    """The sizes of all inputs in those groups of gears that have the smallest or the largest size
    of an axis."""
    ends = {
        end(gears, key=lambda group: group[column])
        for column in range(len(gears[0]))
        for end in (min, max)
    }
    filled = []
    for group in ends:
        values = iter(group)
        filled.append(
            {
                name: tuple(size if isinstance(size, int) else next(values) for size in shape)
                for name, shape in sizes.items()
            }
        )
    return filled


def _dynamic_axes(sizes: Sizes) -> list[tuple[str, int]]:
    """Input and axis of each size that is not fixed."""
    return [
        (name, axis)
        for name, shape in sizes.items()
        for axis, size in enumerate(shape)
        if isinstance(size, tuple)
    ]


def _bounds(column: Sequence[int]) -> Size:
    return (min(column), max(column))


def _refuse_name(key: str, inputs: Sequence[str], name: str) -> NoReturn:
    """Two inputs with a comma between them look like one with a strange name."""
    if any(key.startswith(f"{other}:") for other in inputs):
        raise InputError(
            f"--input-shape {key!r}: between two inputs stands ';', as in a:1,128;b:1,128"
        )
    raise InputError(f"{name} has no input {key!r}; its inputs are {', '.join(inputs)}")


def fix(proto: onnx.ModelProto, sizes: Sizes, name: str) -> onnx.ModelProto:
    """A copy of a model with the fixed sizes in its inputs. A symbol that gets a size gets it
    everywhere.

    Raises:
        InputError: the model has no such input, the input has another rank or size, one symbol gets
            two sizes, or an input is not a tensor.
    """
    fixed = onnx.ModelProto()
    fixed.CopyFrom(proto)
    inputs = {value.name: value for value in graph_inputs(fixed)}
    for value in inputs.values():
        kind = value.type.WhichOneof("value")
        if kind not in (None, "tensor_type"):
            what = kind.removesuffix("_type").replace("_", " ")
            raise InputError(
                f"{name}: the input {value.name!r} has the type {what!r}, and ATC takes only tensors"
            )
    given: dict[str, Size] = {}
    for key, shape in sizes.items():
        if key not in inputs:
            if key in {tensor.name for tensor in proto.graph.initializer}:
                raise InputError(
                    f"{name}: {key!r} has a value in the model, so it is no input for ATC; leave it out"
                )
            _refuse_name(key, [*inputs], name)
        _fix_input(inputs[key], shape, given, name)
    symbols = {symbol: size for symbol, size in given.items() if isinstance(size, int)}
    for graph in (fixed.graph, *graphs_below(fixed.graph)):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if dim.HasField("dim_param") and dim.dim_param in symbols:
                    dim.dim_value = symbols[dim.dim_param]
    return fixed


def _fix_input(
    value: onnx.ValueInfoProto, shape: Sequence[Size], given: dict[str, Size], name: str
) -> None:
    """Set the fixed sizes of one input. `given` are the sizes that symbols have been given."""
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        tensor.shape.SetInParent()
        for _ in shape:
            tensor.shape.dim.add()
    if len(tensor.shape.dim) != len(shape):
        rank = len(tensor.shape.dim)
        raise InputError(
            f"{name}: input {value.name!r} has {rank} dimensions, --input-shape {len(shape)}"
        )
    for axis, (dim, size) in enumerate(zip(tensor.shape.dim, shape, strict=True)):
        if dim.HasField("dim_value"):
            if size != dim.dim_value:
                found = f"the size {dim.dim_value} where --input-shape has {atc_size(size)} (axis {axis})"
                raise InputError(
                    f"{name}: input {value.name!r} has {found}: the model fixes this size"
                )
            continue
        if dim.dim_param and (known := given.setdefault(dim.dim_param, size)) != size:
            raise InputError(
                f"--input-shape gives {dim.dim_param!r} two sizes: {atc_size(known)} and {atc_size(size)}; it is one "
                "size in the model"
            )
        if isinstance(size, int):
            dim.dim_value = size


def complete(
    proto: onnx.ModelProto,
    sizes: Sizes,
    gears: Sequence[Sequence[int]],
    name: str,
    may_be_open: bool,
) -> dict[str, tuple[Size, ...]]:
    """The sizes of all inputs: those of the model, and those that the user gave for its dynamic
    sizes. Gears give the bounds of each -1. The error asks for numbers alone, unless sizes
    `may_be_open`, and for no range beside gears.

    Raises:
        InputError: the user gave nothing for a dynamic size. The message holds an --input-shape to
            fill in, with what the user gave.
    """
    bounds = with_gears(sizes, gears)
    full: dict[str, tuple[Size, ...]] = {}
    lacking: list[str] = []
    asked: list[str] = []
    for value in graph_inputs(proto):
        tensor = value.type.tensor_type
        given: Mapping[int, Size] = dict(enumerate(bounds.get(value.name) or ()))
        dims: list[Size | str] = [
            dim.dim_value if dim.HasField("dim_value") else given.get(axis, dim.dim_param or "?")
            for axis, dim in enumerate(tensor.shape.dim)
        ]
        full[value.name] = tuple(dim for dim in dims if not isinstance(dim, str))
        if not tensor.HasField("shape") or len(full[value.name]) != len(dims):
            lacking.append(value.name)
            asked.append(f"{value.name}:{','.join(map(str, dims))}")
        elif value.name in sizes:
            asked.append(f"{value.name}:{','.join(map(atc_size, sizes[value.name]))}")
    if lacking:
        ways = "a number, a range such as 1~512, or -1 for any size" if may_be_open else "a number"
        if gears:
            ways = "a number, or -1 for a size that each group of --dynamic-dims has"
        raise InputError(
            f"{name} has inputs with dynamic sizes; give them with --input-shape {';'.join(asked)!r}, and replace "
            f"each name by {ways}"
        )
    return full
