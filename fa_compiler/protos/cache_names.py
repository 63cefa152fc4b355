"""The caches of a decoder as their names tell of them: an input of a step, and the output that
continues it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import onnx

from fa_compiler.protos.subgraphs import graph_inputs

NAMES = (
    ("past_key_values", "present"),
    ("past", "present"),
    ("cache_in", "cache_out"),
    ("input.cache", "output.cache"),
)
"""What stands in the name of an input, and in that of the output that continues it."""

CACHE_WORDS = ("past", "cache")
"""What the names of caches have in them."""
CACHE_AXES = 3
"""The fewest axes of a cache: the batch, its rows and their numbers."""
STATE_AXES = 2
"""The axes behind the batch of the columns that a causal convolution keeps: channels and
columns."""


def named_pairs(
    model: onnx.ModelProto,
) -> Iterator[tuple[onnx.ValueInfoProto, onnx.ValueInfoProto]]:
    """The inputs that are named as caches, each with the output of the same type that continues
    it."""
    outputs = {info.name: info for info in model.graph.output}
    for info in graph_inputs(model):
        type_ = info.type.tensor_type
        if len(type_.shape.dim) < CACHE_AXES:
            continue
        for words in NAMES:
            other = outputs.get(info.name.replace(*words, 1))
            if (
                other is not None
                and other.name != info.name
                and other.type.tensor_type.elem_type == type_.elem_type
            ):
                yield info, other
                break


def is_of_encoder(name: str) -> bool:
    """Is it a cache of keys and values of an encoder?"""
    return re.search("encoder|cross", name) is not None


def fixed_size(dim: onnx.TensorShapeProto.Dimension) -> int:
    """The size of a dimension, 0 if it is open. Some exporters write a size as a name."""
    return int(dim.dim_param) if dim.dim_param.isdecimal() else max(0, int(dim.dim_value))


def is_state(past: onnx.ValueInfoProto, present: onnx.ValueInfoProto) -> bool:
    """Is a named pair a state, which has as many columns behind a run as before it?"""
    before, after = _sizes(past), _sizes(present)
    if all(isinstance(size, int) for size in before):
        return True
    return len(before) == STATE_AXES and all(before) and before == after


def is_of_fixed_length(past: onnx.ValueInfoProto, present: onnx.ValueInfoProto) -> bool:
    """Does a state have another size behind a step than before it? It is a cache of a model that
    fixes its number of tokens, and no other step can follow."""
    shapes = (
        [fixed_size(dim) for dim in info.type.tensor_type.shape.dim] for info in (past, present)
    )
    return any(size and other and size != other for size, other in zip(*shapes, strict=False))


def has_steps(model: onnx.ModelProto) -> bool:
    """Is this a decoder, by its names, whose steps follow one another for sure? A state whose size
    behind a step is open may be a cache of a fixed number of tokens."""
    pairs = [
        (past, present) for past, present in named_pairs(model) if not is_of_encoder(past.name)
    ]
    return bool(pairs) and all(
        _sizes(past) == _sizes(present) for past, present in pairs if is_state(past, present)
    )


def open_states(model: onnx.ModelProto) -> list[str]:
    """The inputs that are states whose size the model leaves open. Nothing can make them for a
    first step."""
    pairs = (
        (past, present) for past, present in named_pairs(model) if not is_of_encoder(past.name)
    )
    return [
        past.name
        for past, present in pairs
        if is_state(past, present) and not all(isinstance(size, int) for size in _sizes(past))
    ]


def _sizes(info: onnx.ValueInfoProto) -> list[int | str]:
    """The sizes behind the batch; an open one is its name, or empty."""
    return [fixed_size(dim) or dim.dim_param for dim in info.type.tensor_type.shape.dim[1:]]
