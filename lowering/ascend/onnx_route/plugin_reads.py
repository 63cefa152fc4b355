"""The mismatches of a node and ATC's own plugin for it: attributes and values that the plugin does not read or take.

`plugin_reads.tsv` is the table, with one row for each operator. `CASES` has the rules that depend on more than one
attribute. They are used by the conversion, whose result must have no mismatch, and by the check of a file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import onnx
import onnx_ir as ir
from onnx import defs

from fa_compiler.lowering.ascend.onnx_route.parser import versions_in

RIGHT_PIXELS = frozenset(
    (
        ("asymmetric", "floor"),
        ("half_pixel", "round_prefer_ceil"),
        ("pytorch_half_pixel", "round_prefer_ceil"),
        ("align_corners", "round_prefer_ceil"),
    )
)
"""The coordinates and the rounding of a nearest Resize in GE's operator, which reads the coordinates only."""

TIES = frozenset((coordinates, "round_prefer_floor") for coordinates, rounding in RIGHT_PIXELS if rounding != "floor")
"""These differ from `RIGHT_PIXELS` only for a coordinate exactly between two pixels."""

ACTIVATIONS = {"GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
"""ONNX's default activations of one direction."""

_T = onnx.TensorProto
TYPED_VALUES = (_T.FLOAT, _T.DOUBLE, _T.INT32, _T.INT64)
"""The types for which the value of ConstantOfShape may be in the typed field of its tensor."""

LARGE_WINDOW, LARGE_STRIDE = 255, 63
"""Pooling with a larger window or stride becomes another operator, which rounds sizes down and has no auto_pad."""


@dataclass(frozen=True)
class PluginMismatch:
    """A mismatch of a node and its plugin. The parser stops if `is_refused`; otherwise nothing is reported."""

    sentence: str
    is_refused: bool


@dataclass(frozen=True)
class NodeForm:
    """A node for its plugin: attributes as Python values, and the names of inputs and outputs, "" for absent ones."""

    op_type: str
    version: int
    attributes: Mapping[str, Any]
    inputs: Sequence[str]
    outputs: Sequence[str]

    @staticmethod
    def of_proto(node: onnx.NodeProto, version: int, read: Collection[str]) -> NodeForm:
        """The form of a node in a file. An output that is not in `read` counts as absent.

        Raises ValueError for an attribute without a type.
        """
        values = {attr.name: _plain(onnx.helper.get_attribute_value(attr)) for attr in node.attribute}
        outputs = tuple(name if name in read else "" for name in node.output)
        return NodeForm(node.op_type, version, values, tuple(node.input), outputs)

    @staticmethod
    def of_node(node: ir.Node, version: int) -> NodeForm:
        """The form of a node in memory. An unread output counts as absent."""
        values = {name: _plain(attr.value) for name, attr in node.attributes.items()}
        inputs = tuple("" if value is None else value.name or "?" for value in node.inputs)
        read = [value for value in node.outputs if value.uses() or value.is_graph_output()]
        outputs = tuple((value.name or "?") if value in read else "" for value in node.outputs)
        return NodeForm(node.op_type, version, values, inputs, outputs)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of an attribute, or `default`."""
        return self.attributes.get(name, default)

    def given(self, index: int) -> bool:
        """Whether the input is present."""
        return index < len(self.inputs) and bool(self.inputs[index])


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PluginAttribute:
    """One attribute of a row: the values that it may have (empty: any), whether other values are refused, and the mark
    of the table."""

    name: str
    values: tuple[str, ...]
    refuses: bool
    mark: str


@dataclass(frozen=True)
class PluginRow:
    """The attributes, and the numbers of inputs and outputs, that a plugin reads of an operator; None means all."""

    entries: Mapping[str, PluginAttribute]
    inputs: int | None = None
    outputs: int | None = None


NOTHING = PluginRow({})


@cache
def plugin_rows() -> Mapping[tuple[str, int], PluginRow]:
    """The table by operator and version."""
    text = resources.files(__package__).joinpath("plugin_reads.tsv").read_text()
    found: dict[tuple[str, int], PluginRow] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            op_type, spans, names, inputs, outputs = line.split("\t")
            entries = [_attribute(word) for word in names.split() if word != "-"]
            row = PluginRow({entry.name: entry for entry in entries}, *map(_count, (inputs, outputs)))
            found |= {(op_type, version): row for version in versions_in(spans)}
    return found


def _count(word: str) -> int | None:
    return None if word == "*" else int(word)


def _attribute(word: str) -> PluginAttribute:
    mark = word[-1] if word[-1] in "!?~" else ""
    word = word.removesuffix(mark)
    separator = next((sign for sign in "=:" if sign in word), "")
    name, _, values = word.partition(separator) if separator else (word, "", "")
    return PluginAttribute(name, tuple(values.split("|")) if values else (), separator == "=", mark)


def plugin_mismatches(form: NodeForm) -> Iterator[PluginMismatch]:
    """The mismatches of a node of the standard domain. None are known for an operator that ONNX does not have."""
    row = plugin_rows().get((form.op_type, form.version))
    if row is None and _schema(form) is None:
        return
    row = row or NOTHING
    for name, value in form.attributes.items():
        entry = row.entries.get(name)
        if entry is None:
            if not _is_default(form, name, value):
                yield PluginMismatch(f"ATC's plugin does not read {name}, which is {_shown(value)}", False)
        elif entry.values and not any(_same(value, text) for text in entry.values):
            listed = " or ".join(entry.values)
            verb = "takes" if entry.refuses else "computes"
            yield PluginMismatch(f"ATC's plugin {verb} {name} {listed} only, and it is {_shown(value)}", entry.refuses)
    for name in row.entries.keys() - form.attributes.keys():
        if row.entries[name].mark == "!":
            yield PluginMismatch(f"ATC's plugin needs the attribute {name}", True)
        elif row.entries[name].mark == "?":
            yield PluginMismatch(f"ATC's plugin treats a node without {name} differently from ONNX", False)
    for kind, names, count in (("input", form.inputs, row.inputs), ("output", form.outputs, row.outputs)):
        if count is not None and any(names[count:]):
            yield PluginMismatch(f"ATC's plugin has no {kind} {count}, and one is connected there", True)
    case = CASES.get(form.op_type)
    if case is not None:
        yield from case(form)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int | float | str | list) else f"a {type(value).__name__}"


def _same(value: Any, text: str) -> bool:
    return math.isclose(value, float(text), abs_tol=1e-5) if isinstance(value, float) else str(value) == text


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
    return bool(_plain(onnx.helper.get_attribute_value(attribute.default_value)) == value)


# -- what depends on more than one attribute --------------------------------------------------------


def _clip(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.version >= 11 and not form.given(1) and not form.given(2):
        yield PluginMismatch("ATC's plugin needs a bound", True)


def _padding(form: NodeForm) -> Iterator[PluginMismatch]:
    """Convolutions and average pooling of volumes have no auto_pad."""
    spatial = len(form.get("kernel_shape") or ())
    if spatial == 3 and str(form.get("auto_pad", "NOTSET")).startswith("SAME"):
        yield PluginMismatch(
            f"ATC's plugin does not compute auto_pad {form.get('auto_pad')} of volumes", form.op_type == "Conv"
        )


def _max_pool(form: NodeForm) -> Iterator[PluginMismatch]:
    kernel, strides = form.get("kernel_shape") or [], form.get("strides") or []
    if len(form.outputs) > 1 and not form.outputs[1]:
        yield PluginMismatch("ATC's plugin refuses a second output, even an unread one", True)
    if len(kernel) < 3 and not all(step == 1 for step in form.get("dilations") or ()):
        yield PluginMismatch("ATC's plugin reads dilations for volumes only", False)
    yield from _large(form, kernel, strides)


def _large(form: NodeForm, kernel: Sequence[int], strides: Sequence[int]) -> Iterator[PluginMismatch]:
    if len(kernel) == 3 or (math.prod(kernel) <= LARGE_WINDOW and max(strides, default=1) <= LARGE_STRIDE):
        return
    form_text = f"a window of {math.prod(kernel)} or a stride of {max(strides, default=1)}"
    if form.get("ceil_mode", 0):
        yield PluginMismatch(f"ATC's plugin does not read ceil_mode beside {form_text}", False)
    if str(form.get("auto_pad", "NOTSET")).startswith("SAME"):
        yield PluginMismatch(f"ATC's plugin does not read auto_pad beside {form_text}", False)


def _lp_pool(form: NodeForm) -> Iterator[PluginMismatch]:
    yield from _padding(form)
    yield from _large(form, form.get("kernel_shape") or [], form.get("strides") or [])


def _gemm(form: NodeForm) -> Iterator[PluginMismatch]:
    if not form.given(2) and form.get("alpha", 1.0) != 1.0:
        yield PluginMismatch(
            f"ATC's plugin does not read alpha, which is {form.get('alpha')}, without a third input", False
        )


def _lrn(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("size", 1) % 2 == 0:
        yield PluginMismatch(
            f"ATC's plugin computes windows of an odd size only, and size is {form.get('size')}", False
        )


def _depth_to_space(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("blocksize", 2) < 2:
        yield PluginMismatch(f"ATC's plugin takes blocks from 2 on, and blocksize is {form.get('blocksize')}", True)


def _unique(form: NodeForm) -> Iterator[PluginMismatch]:
    if len(form.outputs) > 1 and form.outputs[1]:
        yield PluginMismatch("ATC's plugin fills output 1, the indices, with zeros", False)


def _resize(form: NodeForm) -> Iterator[PluginMismatch]:
    mode = form.get("mode", "nearest")
    if form.version == 10:
        if mode == "linear":
            yield PluginMismatch(
                "ATC's plugin computes a linear Resize of opset 10 with the coordinates of opset 11", False
            )
        return
    if len(form.inputs) < 3:
        yield PluginMismatch("ATC's plugin needs the input scales, which may be empty", True)
    coordinates = form.get("coordinate_transformation_mode", "half_pixel")
    rounding = form.get("nearest_mode", "round_prefer_floor")
    if mode == "nearest" and (coordinates, rounding) not in RIGHT_PIXELS | TIES:
        form_text = f"coordinates {coordinates} with nearest_mode {rounding}"
        yield PluginMismatch(f"ATC's plugin does not read nearest_mode: it does not compute {form_text}", False)
    unread: dict[str, int | float | str | None] = {"antialias": 0, "axes": None, "keep_aspect_ratio_policy": "stretch"}
    unread |= {"cubic_coeff_a": -0.75, "exclude_outside": 0} if mode == "cubic" else {}
    unread |= {"extrapolation_value": 0.0} if coordinates == "tf_crop_and_resize" else {}
    for name, default in unread.items():
        value = form.get(name, default)
        if value != default:
            yield PluginMismatch(f"ATC's plugin does not read {name}, which is {_shown(value)}", False)


def _constant_of_shape(form: NodeForm) -> Iterator[PluginMismatch]:
    value = form.get("value")
    if isinstance(value, onnx.TensorProto) and not value.raw_data and value.data_type not in TYPED_VALUES:
        yield PluginMismatch("ATC's plugin reads a value of this type as bytes (raw_data) only", False)


def _upsample(form: NodeForm) -> Iterator[PluginMismatch]:
    if form.get("mode", "nearest") == "linear":
        yield PluginMismatch("ATC's plugin computes a linear Upsample with the coordinates of Resize 11", False)


CASES: Mapping[str, Callable[[NodeForm], Iterator[PluginMismatch]]] = {
    "AveragePool": _padding,
    "Clip": _clip,
    "ConstantOfShape": _constant_of_shape,
    "Conv": _padding,
    "DepthToSpace": _depth_to_space,
    "Gemm": _gemm,
    "LRN": _lrn,
    "LpPool": _lp_pool,
    "MaxPool": _max_pool,
    "Resize": _resize,
    "Unique": _unique,
    "Upsample": _upsample,
}
