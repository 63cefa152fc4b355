"""The mismatches of a node and ATC's own plugin for it: attributes and values that the plugin does
not read or take.

`plugin_reads.tsv` is the table, with one row for each operator. `CASES` has the rules that depend
on more than one attribute, or on the type or the rank of an input. They are used by the conversion,
whose result must have no mismatch but notes, and by the check of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

import onnx
import onnx_ir as ir
from onnx import defs

from fa_compiler.lowering.ascend.diagnostic import Severity
from fa_compiler.lowering.ascend.onnx_route.parser import versions_in
from fa_compiler.passes.ir.nodes import input_of, is_read
from fa_compiler.passes.values.shapes import ShapeInfo

RIGHT_PIXELS = frozenset(
    (
        ("asymmetric", "floor"),
        ("half_pixel", "round_prefer_ceil"),
        ("pytorch_half_pixel", "round_prefer_ceil"),
        ("align_corners", "round_prefer_ceil"),
    )
)
"""The coordinates and the rounding of a nearest Resize in GE's operator, which reads the
coordinates only."""

TIES = frozenset(
    (coordinates, "round_prefer_floor")
    for coordinates, rounding in RIGHT_PIXELS
    if rounding != "floor"
)
"""These differ from `RIGHT_PIXELS` only for a coordinate exactly between two pixels."""

ACTIVATIONS = {"GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
"""ONNX's default activations of one direction."""

_T = onnx.TensorProto
TYPED_VALUES = (_T.FLOAT, _T.DOUBLE, _T.INT32, _T.INT64)
"""The types for which the value of ConstantOfShape may be in the typed field of its tensor."""

LARGE_WINDOW, LARGE_STRIDE = 255, 63
"""Pooling with a larger window or stride becomes another operator, which rounds sizes down and has
no auto_pad."""


FOUR_BYTES = (_T.FLOAT, _T.INT32, _T.UINT32)
"""The types of EyeLike for which the constant that its plugin makes has the right size."""

WHOLE = frozenset(
    (_T.INT8, _T.INT16, _T.INT32, _T.INT64, _T.UINT8, _T.UINT16, _T.UINT32, _T.UINT64)
)


@dataclass(frozen=True)
class PluginMismatch:
    """A mismatch of a node and its plugin.

    `severity` tells what ATC does: its parser stops (rejected), a later stage stops (found later),
    it reports nothing and computes something else (wrong), or nobody can tell from the public
    sources (note).
    """

    sentence: str
    severity: Severity = Severity.WRONG


def _refused(sentence: str) -> PluginMismatch:
    return PluginMismatch(sentence, Severity.REJECTED)


@dataclass(frozen=True)
class InputFact:
    """What is known of an input: its element type (a number of ONNX's list), its rank, and whether
    a node makes it."""

    dtype: int | None = None
    rank: int | None = None
    is_made: bool = False


UNKNOWN = InputFact()


@dataclass(frozen=True)
class NodeForm:
    """A node for its plugin: attributes as Python values, the names of inputs and outputs, "" for
    absent ones, and what is known of the first input."""

    op_type: str
    version: int
    attributes: Mapping[str, Any]
    inputs: Sequence[str]
    outputs: Sequence[str]
    first: InputFact = UNKNOWN

    @staticmethod
    def of_proto(
        node: onnx.NodeProto, version: int, read: Collection[str], facts: Mapping[str, InputFact]
    ) -> NodeForm:
        """The form of a node in a file. An output that is not in `read` counts as absent.

        Raises ValueError for an attribute without a type.
        """
        values = {
            attr.name: plain(onnx.helper.get_attribute_value(attr)) for attr in node.attribute
        }
        outputs = tuple(name if name in read else "" for name in node.output)
        first = facts.get(node.input[0], UNKNOWN) if node.input else UNKNOWN
        return NodeForm(node.op_type, version, values, tuple(node.input), outputs, first)

    @staticmethod
    def of_node(node: ir.Node, version: int, info: ShapeInfo | None = None) -> NodeForm:
        """The form of a node in memory. An unread output counts as absent."""
        values = {name: plain(attr.value) for name, attr in node.attributes.items()}
        inputs = tuple("" if value is None else value.name or "?" for value in node.inputs)
        outputs = tuple((value.name or "?") if is_read(value) else "" for value in node.outputs)
        first = UNKNOWN if info is None else _fact(input_of(node, 0), info)
        return NodeForm(node.op_type, version, values, inputs, outputs, first)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, or `default`."""
        return self.attributes.get(name, default)

    def given(self, index: int) -> bool:
        """Whether the input is present."""
        return index < len(self.inputs) and bool(self.inputs[index])


def _fact(value: ir.Value | None, info: ShapeInfo) -> InputFact:
    if value is None:
        return UNKNOWN
    dtype, shape = info.dtype(value), info.shape(value)
    number = None if dtype is None else int(dtype)
    rank = None if shape is None else len(shape)
    return InputFact(number, rank, value.producer() is not None)


def plain(value: Any) -> Any:
    """The value of an attribute with texts as str, and with lists for all sequences."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [plain(item) for item in value]
    return value


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PluginAttribute:
    """One attribute of a row: the values that it may have (empty: any), whether other values are
    refused, and the mark of the table."""

    name: str
    values: tuple[str, ...]
    refuses: bool
    mark: str


class Known(StrEnum):
    """How a row is known."""

    LOADER = "loader"
    """GE's own parser, built from its sources, was run on variants of the operator, and its graphs
    were read."""

    SOURCE = "source"
    """A source file was read, of the plugin or of a later stage that was not run. The row names the
    file."""

    INFERRED = "inferred"
    """The parser's graph was read, but what the operator computes from it is in no public
    source."""


@dataclass(frozen=True)
class PluginRow:
    """The attributes, and the numbers of inputs and outputs, that a plugin reads of an operator;
    None means all.

    `known` says how the row is known, and `source` names the file that was read.
    """

    entries: Mapping[str, PluginAttribute]
    inputs: int | None = None
    outputs: int | None = None
    known: Known = Known.LOADER
    source: str = ""


NOTHING = PluginRow({})


@cache
def plugin_rows() -> Mapping[tuple[str, int], PluginRow]:
    """The table by operator and version."""
    return rows_of(
        resources.files(__package__).joinpath("plugin_reads.tsv").read_text(encoding="utf-8")
    )


def rows_of(text: str) -> Mapping[tuple[str, int], PluginRow]:
    """The rows of a table in the form of `plugin_reads.tsv`.

    Raises ValueError, which names the line, for a line that is not in this form, and for a second
    row of an operator and version.
    """
    found: dict[tuple[str, int], PluginRow] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("#"):
            continue
        try:
            op_type, spans, names, inputs, outputs, known = line.split("\t")
            row = _row(names, inputs, outputs, known)
            versions = versions_in(spans)
            if again := sorted(version for version in versions if (op_type, version) in found):
                raise ValueError(f"{op_type} has a row for version {again[0]} already")
        except ValueError as error:
            raise ValueError(f"line {number} of the table is {line!r}: {error}") from None
        found |= {(op_type, version): row for version in versions}
    return found


def _row(names: str, inputs: str, outputs: str, known: str) -> PluginRow:
    entries = [_attribute(word) for word in names.split() if word != "-"]
    by_name = {entry.name: entry for entry in entries}
    if len(by_name) < len(entries):
        raise ValueError("it names an attribute twice")
    word, _, source = known.partition(" ")
    if (Known(word) is Known.SOURCE) != source.endswith((".cc", ".cpp", ".h")):
        raise ValueError(
            "the last column is loader, inferred, or source and the name of a C++ file"
        )
    return PluginRow(by_name, _count(inputs), _count(outputs), Known(word), source)


def _count(word: str) -> int | None:
    return None if word == "*" else int(word)


def _attribute(word: str) -> PluginAttribute:
    mark = word[-1] if word[-1] in "!?~" else ""
    word = word.removesuffix(mark)
    separator = next((sign for sign in "=:" if sign in word), "")
    name, _, values = word.partition(separator) if separator else (word, "", "")
    if not name.isidentifier() or (separator and not all(values.split("|"))):
        raise ValueError(f"{word!r} is no attribute")
    return PluginAttribute(name, tuple(values.split("|")) if values else (), separator == "=", mark)


def plugin_mismatches(form: NodeForm) -> Iterator[PluginMismatch]:
    """The mismatches of a node of the standard domain. None are known for an operator that ONNX
    does not have."""
    row = plugin_rows().get((form.op_type, form.version))
    if row is None and _schema(form) is None:
        return
    row = row or NOTHING
    for found in _mismatches(form, row):
        doubt = (
            "; this is inferred, no public source says it" if row.known is Known.INFERRED else ""
        )
        yield replace(found, sentence=found.sentence + doubt)


def _mismatches(form: NodeForm, row: PluginRow) -> Iterator[PluginMismatch]:
    for name, value in form.attributes.items():
        if name in row.entries:
            yield from _value_mismatches(row.entries[name], value)
        elif not _is_default(form, name, value):
            yield PluginMismatch(f"ATC's plugin does not read {name}, which is {_shown(value)}")
    for name, entry in row.entries.items():
        if name in form.attributes:
            continue
        if entry.mark == "!":
            yield _refused(f"ATC's plugin needs the attribute {name}")
        elif entry.mark == "?":
            yield PluginMismatch(f"ATC's plugin treats a node without {name} differently from ONNX")
    for kind, names, count in (
        ("input", form.inputs, row.inputs),
        ("output", form.outputs, row.outputs),
    ):
        if count is not None and any(names[count:]):
            yield _refused(f"ATC's plugin has no {kind} {count}, and one is connected there")
    case = CASES.get(form.op_type)
    if case is not None:
        yield from case(form)


def _value_mismatches(entry: PluginAttribute, value: Any) -> Iterator[PluginMismatch]:
    """An attribute that the plugin reads has one of the values that it takes, or for which it
    computes the same."""
    if not entry.values or any(_same(value, text) for text in entry.values):
        return
    verb, severity = ("takes", Severity.REJECTED) if entry.refuses else ("computes", Severity.WRONG)
    listed = " or ".join(entry.values)
    yield PluginMismatch(
        f"ATC's plugin {verb} {entry.name} {listed} only, and it is {_shown(value)}", severity
    )


def _shown(value: Any) -> str:
    return (
        str(value) if isinstance(value, int | float | str | list) else f"a {type(value).__name__}"
    )


def _same(value: Any, text: str) -> bool:
    return (
        math.isclose(value, float(text), abs_tol=1e-5)
        if isinstance(value, float)
        else str(value) == text
    )


def _schema(form: NodeForm) -> defs.OpSchema | None:
    try:
        return defs.get_schema(form.op_type, form.version)
    except defs.SchemaError:
        return None


def _is_default(form: NodeForm, name: str, value: Any) -> bool:
    """Whether an unread attribute has its default."""
    if name == "activations" and form.op_type in ACTIVATIONS:
        directions = 2 if form.get("direction") == "bidirectional" else 1
        return bool(value == ACTIVATIONS[form.op_type] * directions)
    if name == "dilations":
        return all(step == 1 for step in value)
    schema = _schema(form)
    attribute = None if schema is None else schema.attributes.get(name)
    if attribute is None or not attribute.default_value.name:
        return False
    return bool(plain(onnx.helper.get_attribute_value(attribute.default_value)) == value)


# -- what depends on more than one attribute
# --------------------------------------------------------


def _clip(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.version >= 11 and not form.given(1) and not form.given(2):
        yield _refused("ATC's plugin needs a bound")
    if form.version < 11 and form.first.dtype not in (None, _T.FLOAT):
        yield PluginMismatch("the result of ATC's plugin is float32 for any type before opset 11")


def _padding(form: NodeForm) -> Iterator[PluginMismatch]:
    """Convolutions and average pooling of volumes have no auto_pad."""
    spatial = len(form.get("kernel_shape") or ())
    if spatial == 3 and str(form.get("auto_pad", "NOTSET")).startswith("SAME"):
        severity = Severity.REJECTED if form.op_type == "Conv" else Severity.WRONG
        yield PluginMismatch(
            f"ATC's plugin does not compute auto_pad {form.get('auto_pad')} of volumes", severity
        )


def _max_pool(form: NodeForm) -> Iterator[PluginMismatch]:
    kernel, strides = form.get("kernel_shape") or [], form.get("strides") or []
    if len(form.outputs) > 1 and not form.outputs[1]:
        yield _refused("ATC's plugin refuses a second output, even an unread one")
    if len(kernel) < 3 and not all(step == 1 for step in form.get("dilations") or ()):
        yield PluginMismatch("ATC's plugin reads dilations for volumes only")
    yield from _large(form, kernel, strides)


def _large(
    form: NodeForm, kernel: Sequence[int], strides: Sequence[int]
) -> Iterator[PluginMismatch]:
    if len(kernel) == 3 or (
        math.prod(kernel) <= LARGE_WINDOW and max(strides, default=1) <= LARGE_STRIDE
    ):
        return
    form_text = f"a window of {math.prod(kernel)} or a stride of {max(strides, default=1)}"
    if form.get("ceil_mode", 0):
        yield PluginMismatch(f"ATC's plugin does not read ceil_mode beside {form_text}")
    if str(form.get("auto_pad", "NOTSET")).startswith("SAME"):
        yield PluginMismatch(f"ATC's plugin does not read auto_pad beside {form_text}")


def _lp_pool(form: NodeForm) -> Iterator[PluginMismatch]:
    yield from _padding(form)
    yield from _large(form, form.get("kernel_shape") or [], form.get("strides") or [])


def _gemm(form: NodeForm) -> Iterator[PluginMismatch]:
    if not form.given(2) and form.get("alpha", 1.0) != 1.0:
        yield PluginMismatch(
            f"ATC's plugin does not read alpha, which is {form.get('alpha')}, without a third input"
        )


def _lrn(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("size", 1) % 2 == 0:
        yield PluginMismatch(
            f"ATC's plugin computes windows of an odd size only, and size is {form.get('size')}"
        )


def _depth_to_space(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("blocksize", 2) < 2:
        yield _refused(
            f"ATC's plugin takes blocks from 2 on, and blocksize is {form.get('blocksize')}"
        )


def _unique(form: NodeForm) -> Iterator[PluginMismatch]:
    if len(form.outputs) > 1 and form.outputs[1]:
        yield PluginMismatch("ATC's plugin fills output 1, the indices, with zeros")


def _resize(form: NodeForm) -> Iterator[PluginMismatch]:
    mode = form.get("mode", "nearest")
    if form.version == 10:
        if mode == "linear":
            yield PluginMismatch(
                "ATC's plugin computes a linear Resize of opset 10 with the coordinates of opset 11"
            )
        return
    if len(form.inputs) < 3:
        yield _refused("ATC's plugin needs the input scales, which may be empty")
    coordinates = form.get("coordinate_transformation_mode", "half_pixel")
    rounding = form.get("nearest_mode", "round_prefer_floor")
    if mode == "nearest" and (coordinates, rounding) not in RIGHT_PIXELS | TIES:
        form_text = f"coordinates {coordinates} with nearest_mode {rounding}"
        yield PluginMismatch(
            f"ATC's plugin does not read nearest_mode: it does not compute {form_text}"
        )
    unread: dict[str, int | float | str | None] = {
        "antialias": 0,
        "axes": None,
        "keep_aspect_ratio_policy": "stretch",
    }
    unread |= {"cubic_coeff_a": -0.75, "exclude_outside": 0} if mode == "cubic" else {}
    unread |= {"extrapolation_value": 0.0} if coordinates == "tf_crop_and_resize" else {}
    for name, default in unread.items():
        value = form.get(name, default)
        if value != default:
            yield PluginMismatch(f"ATC's plugin does not read {name}, which is {_shown(value)}")


def _constant_of_shape(form: NodeForm) -> Iterator[PluginMismatch]:
    value = form.get("value")
    if (
        isinstance(value, onnx.TensorProto)
        and not value.raw_data
        and value.data_type not in TYPED_VALUES
    ):
        yield PluginMismatch("ATC's plugin reads a value of this type as bytes (raw_data) only")


def _upsample(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("mode", "nearest") == "linear":
        yield PluginMismatch(
            "ATC's plugin computes a linear Upsample with the coordinates of Resize 11"
        )


def _batch_normalization(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.version < 14 and any(form.outputs[1:]):
        yield PluginMismatch(
            "ATC's plugin connects the outputs behind the first one, and no public source says what they hold",
            Severity.NOTE,
        )


def _bernoulli(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("seed") == 0:
        yield _refused("ATC's plugin throws an exception for a seed of 0, and ATC aborts")


def _col2im(form: NodeForm) -> Iterator[PluginMismatch]:
    pads = form.get("pads")
    if pads is not None and len(pads) != 2:
        yield _refused(f"ATC's plugin takes pads of 2 numbers only, and there are {len(pads)}")
    elif pads is not None:
        yield PluginMismatch("ATC's plugin makes an operator of images, which have 4 pads in ONNX")


def _conv(form: NodeForm) -> Iterator[PluginMismatch]:
    """The plugin counts the axes in strides, pads and dilations, before it fills in their
    defaults."""
    yield from _padding(form)
    if any(form.get(name) for name in ("strides", "pads", "dilations")):
        if form.get("kernel_shape") is None:
            yield PluginMismatch(
                "ATC's plugin treats a node without kernel_shape differently from ONNX"
            )
    elif form.get("kernel_shape") is None:
        yield _refused("ATC's plugin needs kernel_shape, strides, pads or dilations")
    elif len(form.get("kernel_shape")) == 3:
        yield PluginMismatch(
            "ATC's plugin makes an image of a volume without strides, pads and dilations"
        )


def _conv_transpose(form: NodeForm) -> Iterator[PluginMismatch]:
    if len(form.get("kernel_shape") or ()) != 1:
        return
    if form.get("output_shape"):
        yield _refused("ATC's plugin takes output_shape of images and volumes only")
    if str(form.get("auto_pad", "NOTSET")).startswith("SAME"):
        yield PluginMismatch(
            f"ATC's plugin does not compute auto_pad {form.get('auto_pad')} of one axis"
        )


def _div(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.first.dtype in WHOLE:
        yield PluginMismatch(
            "ATC's plugin makes a RealDiv of a division of integers; the public kernels (AICPU, 950) divide towards 0, "
            "as ONNX does, the kernel of A2 is not public",
            Severity.NOTE,
        )


def _eye_like(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("k", 0) != 0:
        yield PluginMismatch(f"ATC's plugin makes another diagonal of k, which is {form.get('k')}")
    dtype = form.get("dtype", _T.FLOAT)
    if dtype not in FOUR_BYTES:
        yield PluginMismatch(
            f"ATC's plugin fills a constant of type number {dtype} with 4 bytes, and GE stops at its size",
            Severity.LATER,
        )


def _global_max_pool(form: NodeForm) -> Iterator[PluginMismatch]:
    rank = form.first.rank
    if rank not in (None, 4):
        yield PluginMismatch(
            f"ATC's plugin reduces the axes of 4 dimensions only, and there are {rank}"
        )


def _layer_normalization(form: NodeForm) -> Iterator[PluginMismatch]:
    if len(form.inputs) > 2 and not form.inputs[2]:
        yield _refused("ATC's plugin refuses an empty third input; leave it out")
    elif not form.given(2) and form.first.dtype not in (None, _T.FLOAT):
        yield PluginMismatch(
            "without a third input ATC's plugin adds a bias of float32 to a tensor of another type"
        )


def _lstm(form: NodeForm) -> Iterator[PluginMismatch]:
    yield PluginMismatch("ATC's plugin does not store hidden_size: the operator is given 0")


def _one_axis(form: NodeForm) -> Iterator[PluginMismatch]:
    """Softmax and its like run over all axes from their axis on before opset 13."""
    axis, rank = form.get("axis", 1), form.first.rank
    if form.version < 13 and axis != -1 and (rank is None or axis % max(rank, 1) != rank - 1):
        yield PluginMismatch(
            f"ATC's plugin computes axis {axis} only, and before opset 13 ONNX all axes from it on"
        )


def _old_pad(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.version < 11 and form.first.dtype not in (None, _T.FLOAT):
        yield PluginMismatch(
            "before opset 11 ATC's plugin pads every type with a number of float32"
        )


def _random_like(form: NodeForm) -> Iterator[PluginMismatch]:
    """While the parser runs, every tensor that a node makes counts as float32."""
    if form.get("dtype") is None and form.first.is_made and form.first.dtype != _T.FLOAT:
        yield PluginMismatch(
            "without dtype ATC's plugin makes float32 of every tensor inside the graph"
        )


def _scatter_nd(form: NodeForm) -> Iterator[PluginMismatch]:
    reduction = form.get("reduction", "none")
    if reduction != "none":
        yield PluginMismatch(
            "ATC has two plugins for this operator and takes the one that its folder lists first; one of them drops "
            f"the reduction, which is {reduction}"
        )


def _size(form: NodeForm) -> Iterator[PluginMismatch]:
    yield PluginMismatch(
        "ATC's plugin writes the type of Size as another kind of attribute than the operator has, and no public source "
        "says whether the result is int64 or int32",
        Severity.NOTE,
    )


def _split(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("num_outputs") is not None and form.first.is_made:
        yield _refused("ATC's plugin crashes on num_outputs for a tensor inside the graph")


def _split_to_sequence(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("keepdims", 1) == 0 and not form.given(1):
        yield PluginMismatch("ATC's plugin loses keepdims, which is 0")


def _top_k(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.version < 10:
        yield PluginMismatch(
            "before opset 10 ATC's plugin writes k as a constant of the wrong size, at which GE stops",
            Severity.LATER,
        )


CASES: Mapping[str, Callable[[NodeForm], Iterator[PluginMismatch]]] = {
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _one_axis),
    **dict.fromkeys(("RandomNormalLike", "RandomUniformLike"), _random_like),
    "AveragePool": _padding,
    "BatchNormalization": _batch_normalization,
    "Bernoulli": _bernoulli,
    "Clip": _clip,
    "Col2Im": _col2im,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DepthToSpace": _depth_to_space,
    "Div": _div,
    "EyeLike": _eye_like,
    "Gemm": _gemm,
    "GlobalMaxPool": _global_max_pool,
    "LRN": _lrn,
    "LSTM": _lstm,
    "LayerNormalization": _layer_normalization,
    "LpPool": _lp_pool,
    "MaxPool": _max_pool,
    "Pad": _old_pad,
    "Resize": _resize,
    "ScatterND": _scatter_nd,
    "Size": _size,
    "Split": _split,
    "SplitToSequence": _split_to_sequence,
    "TopK": _top_k,
    "Unique": _unique,
    "Upsample": _upsample,
}
"""The rules of each operator that depend on more than one attribute, or on the type or the rank of
an input."""

BY_FACTS = frozenset(
    (
        *("Clip", "Div", "GlobalMaxPool", "Hardmax", "LayerNormalization", "LogSoftmax", "Pad"),
        *("RandomNormalLike", "RandomUniformLike", "Softmax"),
    )
)
"""The operators whose rules depend on the type or the rank of their first input."""
