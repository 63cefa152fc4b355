"""The caches of a decoder, and the input whose rows are its new tokens, as the file of a model
tells of them.

    buffer    named in the metadata of `in_place_caches`, whose count of tokens is an input
              | ScatterND(past, ..) of an input that gives an output; so `shared-caches` leaves a GroupQueryAttention
              | TensorScatter(past, ..) of an input that gives an output, not with the mode `circular`
    shared    the past and present of a GroupQueryAttention, which may be one buffer or two of
              different sizes, where nothing else reads the pasts, whose size is then the buffer's
    kept      of a decoder with the input SWITCH: an input named as a past of an encoder, and its
              present: the first run makes it, and no other changes it
    state     an input and an output named so, of fixed sizes besides the batch: it is replaced, and
              holds no tokens
    growing   the past and present of another attention operator
              | an input named as a past, and the output of the same type named as its present
              | an input to which a Concat adds rows that make it an output (passes/in_place/caches.py)

The first kind that fits is taken. The tokens of a cache lie along the axis that its operator or
Concat tells, else along the first open dimension behind the batch, where one with a name of lengths
goes before others.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir

from fa_compiler.comparison.buffers import buffers_of
from fa_compiler.comparison.cache_lengths import GROUP_QUERY, shared_pairs
from fa_compiler.comparison.masks import is_mask
from fa_compiler.errors import InputError
from fa_compiler.passes import analyse
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.in_place.caches import candidates, read_cache
from fa_compiler.passes.ir.nodes import input_of, is_op
from fa_compiler.protos.cache_names import (
    CACHE_WORDS,
    fixed_size,
    is_of_encoder,
    is_of_fixed_length,
    is_state,
    named_pairs,
)
from fa_compiler.protos.step_inputs import SWITCH
from fa_compiler.protos.subgraphs import all_nodes, graph_inputs

OPERATORS = {
    ("", "Attention"): ((4, 1), (5, 2)),
    ("ai.onnx", "Attention"): ((4, 1), (5, 2)),
    ("com.microsoft", "MultiHeadAttention"): ((6, 1), (7, 2)),
}
"""Operators with caches that grow: the index of each past, and of its present. Their tokens lie
along AXIS."""
AXIS = 2

TOKENS = ("input_ids", "decoder_input_ids", "inputs_embeds", "decoder_inputs_embeds")
"""Inputs whose rows are the new tokens, whatever else there is."""

Kind = Literal["buffer", "shared", "kept", "state", "growing"]


@dataclass(frozen=True)
class Cache:
    """One cache: its input `past` and output `present`, the axis of its tokens, and for a buffer
    the input `length` that counts the tokens, if there is one."""

    past: str
    present: str
    axis: int
    kind: Kind
    length: str | None = None

    @property
    def is_one_buffer(self) -> bool:
        """Whether past and present are one buffer in a session."""
        return self.kind in ("buffer", "shared")

    @property
    def has_tokens(self) -> bool:
        """Whether it has a row for each token."""
        return self.kind not in ("kept", "state")


@dataclass(frozen=True)
class Rows:
    """The input and the axis that tell how many new tokens a run has; without an axis it is one."""

    input: str
    axis: int | None

    def count(self, array: np.ndarray) -> int:
        """The number of new tokens that an array of the input has."""
        return 1 if self.axis is None else int(array.shape[self.axis])


def caches_of(model: onnx.ModelProto) -> tuple[Cache, ...]:
    """The caches of a model, in the order of its inputs. Raises InputError for metadata that name
    no caches."""
    found = {
        each.past: Cache(each.past, each.present, each.axis, "buffer", each.length)
        for each in buffers_of(model)
    }
    given = _given(model)
    of_operators = (*_of_group_query(model), *_of_operators(model), *_of_tensor_scatter(model))
    for past, present, axis, kind in (*of_operators, *_of_names(model)):
        if past in given and past not in found:
            found[past] = Cache(past, present, _axis(given[past]) if axis is None else axis, kind)
    named = any(word in name for name in given if name not in found for word in CACHE_WORDS)
    if named or not found:
        found |= {cache.past: cache for cache in _of_concats(model) if cache.past not in found}
    return tuple(found[name] for name in given if name in found)


def of_fixed_length(model: onnx.ModelProto, caches: Iterable[Cache]) -> Cache | None:
    """The first of the caches that grows although the model fixes its number of tokens: no other
    step can follow."""
    values = {info.name: info for info in (*model.graph.input, *model.graph.output)}
    states = (cache for cache in caches if cache.kind == "state")
    return next(
        (each for each in states if is_of_fixed_length(values[each.past], values[each.present])),
        None,
    )


def takes_steps(model: onnx.ModelProto, caches: Sequence[Cache]) -> bool:
    """Has a model caches, with which one step can follow another?"""
    return bool(caches) and of_fixed_length(model, caches) is None


def counts_the_mask(model: onnx.ModelProto, mask: str) -> bool:
    """Does a model read of a mask only how many ones each row has, as the files of
    onnxruntime-genai's builder do?"""
    names, is_summed = {mask}, False
    for node in all_nodes(model.graph.node):  # in the order of a run
        if names.isdisjoint(node.input):
            continue
        if node.op_type in ("Cast", "Identity"):
            names |= set(node.output)
        elif node.op_type == "ReduceSum":
            is_summed = True
        elif node.op_type != "Shape":
            return False
    return is_summed


def rows_of(model: onnx.ModelProto, caches: Iterable[Cache]) -> Rows | None:
    """The input that tells the number of new tokens; None if the model has none."""
    pasts = {cache.past for cache in caches}
    others = {
        name: list(info.type.tensor_type.shape.dim)
        for name, info in _given(model).items()
        if name not in pasts and not is_mask(info) and info.type.tensor_type.shape.dim
    }
    ordered = [*TOKENS, *(name for name in others if "encoder" not in name.lower()), *others]
    found = next((name for name in ordered if name in others), None)
    return None if found is None else Rows(found, _axis_of_rows(found, others[found]))


def check_one_token(name: str, run: str, new: int, advice: str) -> None:
    """Raise InputError for a run of several new tokens of a model that `takes_one_token`. `run`
    names the run."""
    if new > 1:
        raise InputError(
            f"{name} was fused with the assumption that every run decodes one token ('decode'), and {run} has "
            f"{new}{advice}"
        )


def _axis_of_rows(name: str, dims: list[onnx.TensorShapeProto.Dimension]) -> int | None:
    """The axis of the new tokens: the first open one behind the batch. A vector of the batch has
    none."""
    if name in TOKENS and len(dims) > 1:
        return 1
    opened = [axis for axis, dim in enumerate(dims) if not fixed_size(dim)]
    if len(dims) > 1:
        return next((axis for axis in opened if axis), None)
    return 0 if opened and "batch" not in dims[0].dim_param.lower() else None


def decoding_sizes(model: onnx.ModelProto, rows: int, past: int | None) -> dict[str, int]:
    """The sizes of named dimensions in a run of `rows` new tokens behind `past` cached ones, where
    the caches and the new tokens name them. None leaves the cached tokens open."""
    given, caches = _given(model), caches_of(model)
    sizes: dict[str, int] = {}
    if past is not None:
        for cache in caches:
            _name(sizes, given[cache.past], cache.axis, past)
    found = rows_of(model, caches)
    if found is not None and found.axis is not None:
        _name(sizes, given[found.input], found.axis, rows)
    return sizes


def _name(sizes: dict[str, int], info: onnx.ValueInfoProto, axis: int, size: int) -> None:
    dims = info.type.tensor_type.shape.dim
    if axis < len(dims) and re.fullmatch(r"\w[\w.]*", dims[axis].dim_param):
        sizes.setdefault(dims[axis].dim_param, size)


def _given(model: onnx.ModelProto) -> dict[str, onnx.ValueInfoProto]:
    return {info.name: info for info in graph_inputs(model)}


def _of_group_query(model: onnx.ModelProto) -> Iterator[tuple[str, str, int | None, Kind]]:
    pairs = shared_pairs(model)
    readers = Counter(name for node in all_nodes(model.graph.node) for name in set(node.input))
    for node in model.graph.node:
        if (node.domain, node.op_type) == GROUP_QUERY:
            pasts = [name for name in node.input if name in pairs]
            alone = all(readers[name] == 1 for name in pasts)
            for past in pasts:
                yield past, pairs[past], AXIS, "shared" if alone else "growing"


def _of_operators(model: onnx.ModelProto) -> Iterator[tuple[str, str, int | None, Kind]]:
    inputs, outputs = _given(model), {info.name for info in model.graph.output}
    for node in model.graph.node:
        if (
            (node.domain, node.op_type) == ("", "ScatterND")
            and node.input[0] in inputs
            and node.output[0] in outputs
        ):
            yield node.input[0], node.output[0], None, "buffer"
        for index, result in OPERATORS.get((node.domain, node.op_type), ()):
            if (
                len(node.input) > index
                and len(node.output) > result
                and node.output[result] in outputs
            ):
                yield node.input[index], node.output[result], AXIS, "growing"


def _of_tensor_scatter(model: onnx.ModelProto) -> Iterator[tuple[str, str, int | None, Kind]]:
    inputs, outputs = _given(model), {info.name for info in model.graph.output}
    for node in filter(_is_written, model.graph.node):
        if node.input[0] in inputs and node.output[0] in outputs:
            rank = len(inputs[node.input[0]].type.tensor_type.shape.dim)
            axis = next((attr.i for attr in node.attribute if attr.name == "axis"), -2)
            yield node.input[0], node.output[0], axis % rank if rank else None, "buffer"


def _is_written(node: onnx.NodeProto) -> bool:
    """Does a TensorScatter write new rows behind the earlier ones, which all stay?"""
    circular = any(attr.name == "mode" and attr.s == b"circular" for attr in node.attribute)
    return (node.domain, node.op_type) == ("", "TensorScatter") and not circular


def _of_names(model: onnx.ModelProto) -> Iterator[tuple[str, str, int | None, Kind]]:
    has_switch = SWITCH in _given(model)
    for past, present in named_pairs(model):
        if has_switch or not is_of_encoder(past.name):
            yield past.name, present.name, None, _kind(past, present)


def _kind(past: onnx.ValueInfoProto, present: onnx.ValueInfoProto) -> Kind:
    """The kind of a cache that only its name tells."""
    if is_of_encoder(past.name):
        return "kept"
    return "state" if is_state(past, present) else "growing"


def _of_concats(model: onnx.ModelProto) -> Iterator[Cache]:
    loaded = ir.from_proto(model)
    info = analyse(loaded)
    for past in candidates(loaded.graph, info):
        try:
            cache = read_cache(past, info)
        except Decline:
            continue
        yield Cache(past.name or "", cache.output.name or "", cache.axis, "growing")


def _axis(info: onnx.ValueInfoProto) -> int:
    dims = info.type.tensor_type.shape.dim
    opened = [axis for axis, dim in enumerate(dims) if axis and not fixed_size(dim)]
    lengths = [
        axis
        for axis in opened
        if re.search("past|len|seq|room|total", dims[axis].dim_param.lower())
    ]
    return (*lengths, *opened, len(dims) - 2)[0]


def sizes_of_rows(model: onnx.ModelProto) -> dict[str, list[int]]:
    """The sizes of the rows that are written into each buffer, -1 where they are open, by the name
    of its input."""
    loaded = ir.from_proto(model)
    info = analyse(loaded)
    found: dict[str, list[int]] = {}
    for node in loaded.graph:
        past, rows = (
            (input_of(node, index) for index in (0, 2))
            if is_op(node, "ScatterND")
            else (None, None)
        )
        shape = None if rows is None else info.shape(rows)
        if past is not None and past.name and past.is_graph_input() and shape is not None:
            found[past.name] = [-1 if size.const is None else size.const for size in shape]
    return found
