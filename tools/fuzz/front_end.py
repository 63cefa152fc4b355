"""What ATC's ONNX front end makes of a model, as an ONNX model: the judge of the route's table and rewrites.

Most operators follow the table: an attribute that its row does not name is left out, so that ONNX's default counts. The
operators whose row was wrong once, or whose plugin does more than to read or not to read, have facts of their own here,
which repeat nothing of the product: rows in the form of the table, and a function of the node. Each fact was seen in
the graphs of GE's own parser, or read in its sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx import defs, helper

from fa_compiler.lowering.ascend.onnx_route import parser
from fa_compiler.lowering.ascend.onnx_route.plugin_reads import NOTHING, PluginRow, plugin_rows, rows_of

T = onnx.TensorProto


@dataclass(frozen=True)
class Perceived:
    """The model as ATC computes it. `stops` says why ATC stops, `differs` what it computes otherwise in a way that no
    ONNX model shows, and `is_same` that it changed nothing. `is_open`: ATC takes the model, and nobody knows what it
    computes of it. `is_unjudged`: it has an operator with rules that are not here."""

    model: onnx.ModelProto
    stops: str = ""
    differs: str = ""
    is_open: bool = False
    is_unjudged: bool = False
    is_same: bool = True


class _Stops(Exception):
    """ATC stops at the node."""


class _Differs(Exception):
    """ATC makes something of the node that no ONNX node computes."""


class _Open(Exception):
    """ATC takes the node, and nobody knows what it computes."""


class _Unjudged(Exception):
    """The rules of the node are not here."""


@dataclass
class Node:
    """One node with the types and ranks of what it reads."""

    proto: onnx.NodeProto
    version: int
    types: Mapping[str, tuple[int, int]]
    made: frozenset[str]
    read: frozenset[str]

    @property
    def attrs(self) -> dict[str, object]:
        values = {attr.name: helper.get_attribute_value(attr) for attr in self.proto.attribute}
        return {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}

    def get(self, name: str, default: object) -> object:
        return self.attrs.get(name, default)

    def numbers(self, name: str) -> Sequence[int]:
        value = self.attrs.get(name, ())
        assert isinstance(value, (list, tuple))
        return value

    def given(self, index: int) -> bool:
        return index < len(self.proto.input) and bool(self.proto.input[index])

    def dtype(self, index: int = 0) -> int:
        return self.types.get(self.proto.input[index], (0, -1))[0]

    def rank(self, index: int = 0) -> int:
        return self.types.get(self.proto.input[index], (0, -1))[1]

    def set(self, **values: int | float | str) -> None:
        self.drop(*values)
        self.proto.attribute.extend(helper.make_attribute(name, value) for name, value in values.items())

    def drop(self, *names: str) -> None:
        kept = [attr for attr in self.proto.attribute if attr.name not in names]
        del self.proto.attribute[:]
        self.proto.attribute.extend(kept)


ROWS = rows_of(
    "\n".join(
        row.strip().replace("  ", "\t")
        for row in """
    BatchNormalization  8-13  epsilon momentum~  5  5  loader
    BatchNormalization  14-18  epsilon momentum~ training_mode  5  1  loader
    Bernoulli  15-18  dtype seed  1  1  loader
    Clip  8-10  max? min?  1  1  loader
    Clip  11-18  -  3  1  loader
    Col2Im  18  dilations! pads! strides!  *  1  loader
    Constant  8-18  value  0  1  loader
    Conv  8-18  auto_pad dilations group kernel_shape pads strides  3  1  loader
    ConvTranspose  8-18  auto_pad dilations group kernel_shape! output_padding output_shape pads strides  3  1  loader
    EyeLike  8-18  dtype? k  1  1  loader
    Hardmax  8-12  axis?  1  1  loader
    Hardmax  13-18  axis  1  1  loader
    LayerNormalization  17-18  axis epsilon stash_type  3  3  loader
    LogSoftmax  8-12  axis?  1  1  loader
    LogSoftmax  13-18  axis  1  1  loader
    LSTM  8-18  direction  8  3  loader
    Multinomial  8-18  dtype sample_size seed  1  1  loader
    Pad  8-10  mode pads! value  1  1  loader
    Pad  11-18  mode  3  1  loader
    RandomNormal  8-18  dtype=1|10|11 mean scale seed shape!  0  1  loader
    RandomNormalLike  8-18  dtype=1|10|11 mean scale seed  1  1  loader
    RandomUniform  8-18  dtype=1|10|6|2 high low seed shape!  0  1  loader
    RandomUniformLike  8-18  dtype=1|10|11 high low seed  1  1  loader
    ReduceLogSum  8-12  axes? keepdims  1  1  loader
    ReduceLogSumExp  8-12  axes keepdims  1  1  loader
    ScatterElements  11-18  axis reduction  3  1  loader
    ScatterND  8-18  reduction  3  1  loader
    Softmax  8-18  axis  1  1  loader
    SoftmaxCrossEntropyLoss  12-18  ignore_index? reduction  3  2  loader
    Split  8-12  axis split  1  *  loader
    Split  13-18  axis num_outputs  2  *  loader
    TopK  8-9  axis k!  1  2  loader
    TopK  10-18  axis largest sorted  2  2  loader
""".strip().splitlines()
    )
)
"""Rows of the operators that were seen to be read otherwise than the table once said."""


# -- facts ------------------------------------------------------------------------------------------


def _clip(node: Node) -> None:
    if node.version < 11 and node.dtype() != T.FLOAT:
        raise _Differs("its result is float32")
    if node.version >= 11 and not node.given(1) and not node.given(2):
        raise _Stops("it has no bound")


def _batch_normalization(node: Node) -> None:
    if node.version < 14 and any(name in node.read for name in node.proto.output[1:]):
        raise _Open("the statistics")


def _bernoulli(node: Node) -> None:
    if node.get("seed", 1.0) == 0:
        raise _Stops("an exception for a seed of 0")


def _col2im(node: Node) -> None:
    if len(node.numbers("pads")) != 2:
        raise _Stops("pads must have 2 numbers")
    raise _Unjudged("the operator of images")


def _constant(node: Node) -> None:
    if "value" not in node.attrs:
        raise _Differs("an empty constant")


def _conv(node: Node) -> None:
    lists = [node.numbers(name) for name in ("strides", "pads", "dilations")]
    if not any(lists):
        if not node.numbers("kernel_shape"):
            raise _Stops("no size of a window")
        if node.rank() == 5:
            raise _Differs("an image of a volume")
    elif not node.numbers("kernel_shape"):
        raise _Unjudged("a window without a size")
    if node.rank() == 5 and str(node.get("auto_pad", "")).startswith("SAME"):
        raise _Stops("auto_pad of volumes")


def _conv_transpose(node: Node) -> None:
    if len(node.numbers("kernel_shape")) != 1:
        return
    if node.numbers("output_shape"):
        raise _Stops("output_shape needs 2 sizes")
    node.drop("auto_pad")


def _eye_like(node: Node) -> None:
    if node.get("k", 0) != 0:
        raise _Differs("a diagonal of rows + k")
    if node.get("dtype", T.FLOAT) not in (T.FLOAT, T.INT32, T.UINT32):
        raise _Stops("a constant of the wrong size")


def _global_max_pool(node: Node) -> None:
    if node.rank() != 4:
        raise _Differs("axes -1 and 2 are reduced")


def _layer_normalization(node: Node) -> None:
    if len(node.proto.input) > 2 and not node.proto.input[2]:
        raise _Stops("an empty third input")
    if not node.given(2) and node.dtype() != T.FLOAT:
        raise _Differs("a bias of float32")


def _lstm(node: Node) -> None:
    raise _Differs("hidden_size is 0")


def _mod(node: Node) -> None:
    node.set(fmod=1)


def _multinomial(node: Node) -> None:
    node.set(dtype=T.INT32, sample_size=1)


def _pad(node: Node) -> None:
    if node.version < 11 and node.dtype() != T.FLOAT:
        raise _Differs("the padding is float32")


def _random_like(node: Node) -> None:
    if "dtype" not in node.attrs and node.proto.input[0] in node.made:
        node.set(dtype=T.FLOAT)


def _scatter(node: Node) -> None:
    kept = ("none", "add", "mul") if node.proto.op_type == "ScatterElements" else ("none",)
    if node.get("reduction", "none") not in kept:
        node.drop("reduction")


def _softmax(node: Node) -> None:
    """Before opset 13 the operator runs over one axis, as that of ONNX does over the last one."""
    axis, rank = node.get("axis", 1), node.rank()
    assert isinstance(axis, int)
    if node.version < 13 and axis % max(rank, 1) != rank - 1:
        raise _Differs("one axis")


def _split(node: Node) -> None:
    if "num_outputs" in node.attrs and node.proto.input[0] in node.made:
        raise _Stops("GE crashes")


def _split_to_sequence(node: Node) -> None:
    node.drop("keepdims")


def _top_k(node: Node) -> None:
    if node.version < 10:
        raise _Stops("a constant of the wrong size")


def _unknown(node: Node) -> None:
    raise _Unjudged("it has rules of its own")


def _size(node: Node) -> None:
    raise _Open("the type of its result")


def _div(node: Node) -> None:
    if node.dtype() not in (T.FLOAT, T.DOUBLE, T.FLOAT16):
        raise _Open("the division of integers")


FACTS: Mapping[str, Callable[[Node], None]] = {
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _softmax),
    **dict.fromkeys(("RandomNormalLike", "RandomUniformLike"), _random_like),
    **dict.fromkeys(("ScatterElements", "ScatterND"), _scatter),
    **dict.fromkeys(
        (
            *("AveragePool", "ConstantOfShape", "DepthToSpace", "Gemm", "LRN", "LpPool", "MaxPool", "Resize"),
            *("Unique", "Upsample"),
        ),
        _unknown,
    ),
    "BatchNormalization": _batch_normalization,
    "Bernoulli": _bernoulli,
    "Clip": _clip,
    "Col2Im": _col2im,
    "Constant": _constant,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "Div": _div,
    "EyeLike": _eye_like,
    "GlobalMaxPool": _global_max_pool,
    "LSTM": _lstm,
    "LayerNormalization": _layer_normalization,
    "Mod": _mod,
    "Multinomial": _multinomial,
    "Pad": _pad,
    "Size": _size,
    "Split": _split,
    "SplitToSequence": _split_to_sequence,
    "TopK": _top_k,
}
"""What the plugins do beyond their rows. A function changes the node, or says that no node does it."""


# -- the model --------------------------------------------------------------------------------------


def perceived(model: onnx.ModelProto) -> Perceived:
    """What ATC makes of a model of the standard domain, whose types and shapes are declared."""
    copy = onnx.ModelProto.FromString(model.SerializeToString())
    version = next(entry.version for entry in copy.opset_import if not entry.domain)
    graphs = list(_graphs(copy.graph))
    types = {name: kind for graph in graphs for name, kind in _types(graph)}
    made = frozenset(name for graph in graphs for node in graph.node for name in node.output)
    read = frozenset(
        name for graph in graphs for name in (*(n for node in graph.node for n in node.input), *_ends(graph))
    )
    before, is_open, is_unjudged, has_shape = copy.SerializeToString(), False, False, False
    for graph in graphs:
        for proto in graph.node:
            node = Node(proto, version, types, made, read)
            try:
                if proto.op_type not in ("Constant", "If") and not parser.takes("", proto.op_type, version):
                    raise _Stops("no plugin")
                if graph is not copy.graph and "" in proto.input:
                    raise _Stops("an absent input in a branch")
                if proto.op_type == "ConvTranspose":
                    if has_shape and not node.numbers("output_shape"):
                        raise _Differs("the flag of an earlier node")
                    has_shape |= bool(node.numbers("output_shape"))
                _by_row(node)
                if proto.op_type in FACTS:
                    FACTS[proto.op_type](node)
            except _Stops as error:
                return Perceived(copy, stops=f"{proto.op_type}: {error}", is_same=False)
            except _Differs as error:
                return Perceived(copy, differs=f"{proto.op_type}: {error}", is_same=False)
            except _Open:
                is_open = True
            except _Unjudged:
                is_unjudged = True
    for graph, starts in _with_starts(copy.graph):
        if lost := _lost(graph, starts):
            return Perceived(copy, differs=f"the output {lost[0]} is dropped", is_same=False)
    is_same = copy.SerializeToString() == before
    return Perceived(copy, is_open=is_open, is_unjudged=is_unjudged, is_same=is_same)


def _by_row(node: Node) -> None:
    """Leave out what the row of the node does not name."""
    proto, key = node.proto, (node.proto.op_type, node.version)
    if proto.op_type == "If":
        return
    row: PluginRow = ROWS.get(key) or plugin_rows().get(key) or NOTHING
    for attr in list(proto.attribute):
        entry = row.entries.get(attr.name)
        value = node.attrs[attr.name]
        if entry is None:
            if _has_default(proto.op_type, node.version, attr.name, value):
                continue
            node.drop(attr.name)
        elif entry.values and str(value) not in entry.values and not _is_close(value, entry.values):
            if entry.refuses:
                raise _Stops(f"{attr.name} is {value}")
            node.drop(attr.name)
    for name, entry in row.entries.items():
        if name not in node.attrs and entry.mark == "!":
            raise _Stops(f"{name} is missing")
        if name not in node.attrs and entry.mark == "?":
            raise _Unjudged(f"{name} is missing")
    for names, count in ((proto.input, row.inputs), (proto.output, row.outputs)):
        if count is not None and any(name and (names is proto.input or name in node.read) for name in names[count:]):
            raise _Stops("more inputs or outputs")


def _has_default(op_type: str, version: int, name: str, value: object) -> bool:
    try:
        default = defs.get_schema(op_type, version).attributes[name].default_value
    except (defs.SchemaError, KeyError):
        return False
    return bool(default.name) and _plain(helper.get_attribute_value(default)) == value


def _plain(value: object) -> object:
    return value.decode() if isinstance(value, bytes) else value


def _is_close(value: object, texts: Sequence[str]) -> bool:
    return isinstance(value, float) and any(np.isclose(value, float(text), atol=1e-5) for text in texts)


def _graphs(graph: onnx.GraphProto) -> Iterator[onnx.GraphProto]:
    yield graph
    for node in graph.node:
        for attr in node.attribute:
            if attr.type == onnx.AttributeProto.GRAPH:
                yield from _graphs(attr.g)


def _types(graph: onnx.GraphProto) -> Iterator[tuple[str, tuple[int, int]]]:
    for value in (*graph.input, *graph.output, *graph.value_info):
        kind = value.type.tensor_type
        yield value.name, (kind.elem_type, len(kind.shape.dim) if kind.HasField("shape") else -1)
    for tensor in graph.initializer:
        yield tensor.name, (tensor.data_type, len(tensor.dims))


def _ends(graph: onnx.GraphProto) -> list[str]:
    return [value.name for value in graph.output]


# -- what is dropped --------------------------------------------------------------------------------


def _with_starts(graph: onnx.GraphProto) -> Iterator[tuple[onnx.GraphProto, set[str]]]:
    """The graphs with the names at which the parser begins; an empty set for one in which it begins at constants."""
    yield graph, {value.name for value in graph.input} - {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        branches = [attr.g for attr in node.attribute if attr.type == onnx.AttributeProto.GRAPH]
        outside: set[str] = set().union(*map(_outside, branches)) if branches else set()
        for branch in branches:
            yield branch, outside


def _outside(graph: onnx.GraphProto) -> set[str]:
    inside = {name for node in graph.node for name in node.output} | {tensor.name for tensor in graph.initializer}
    return {name for node in graph.node for name in node.input} - inside - {""}


def _lost(graph: onnx.GraphProto, starts: set[str]) -> list[str]:
    """The outputs that are not connected with a start, except constants and what has no inputs."""
    if not starts:
        return []
    reached = set(starts)
    sides = [{*node.input, *node.output, *_read_inside(node)} - {""} for node in graph.node]
    while any(side & reached and not side <= reached for side in sides):
        reached |= set().union(*(side for side in sides if side & reached))
    makers = {name: node for node in graph.node for name in node.output}
    computed = [name for name in _ends(graph) if name in makers and any(makers[name].input)]
    return [name for name in computed if name not in reached]


def _read_inside(node: onnx.NodeProto) -> set[str]:
    branches = [attr.g for attr in node.attribute if attr.type == onnx.AttributeProto.GRAPH]
    return {name for branch in branches for name in _outside(branch)}
