"""What a stock parser plugin misses in a node: attributes that it does not read, values that it does not take.

`plugin_reads.tsv` is the table, one row for each operator. `CASES` has what depends on more than one attribute. Both
serve the conversion, whose result must miss nothing, and the check of a finished file.
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
"""Coordinates and rounding of a nearest Resize that the operator has by itself. It reads the coordinates only."""

TIES = frozenset((coordinates, "round_prefer_floor") for coordinates, rounding in RIGHT_PIXELS if rounding != "floor")
"""These differ from `RIGHT_PIXELS` only where a coordinate lies exactly between two pixels."""

ACTIVATIONS = {"GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}
"""ONNX's default activations of one direction."""

_T = onnx.TensorProto
TYPED_VALUES = (_T.FLOAT, _T.DOUBLE, _T.INT32, _T.INT64)
"""Types of which ConstantOfShape's value may lie in the field of its type."""

LARGE_WINDOW, LARGE_STRIDE = 255, 63
"""Pools of a larger window or stride become another operator, which rounds sizes down and knows no automatic pads."""


@dataclass(frozen=True)
class Missed:
    """What a plugin misses: `is_refused` where the parser stops, else nobody notices."""

    sentence: str
    is_refused: bool


@dataclass(frozen=True)
class Form:
    """A node as its plugin sees it: attributes as Python values, names of inputs and outputs, "" for absent ones."""

    op_type: str
    version: int
    attributes: Mapping[str, Any]
    inputs: Sequence[str]
    outputs: Sequence[str]

    @staticmethod
    def of_proto(node: onnx.NodeProto, version: int, read: Collection[str]) -> Form:
        """The form of a node in a file that reads these tensors. Raises ValueError for an attribute of no type."""
        values = {attr.name: _plain(onnx.helper.get_attribute_value(attr)) for attr in node.attribute}
        outputs = tuple(name if name in read else "" for name in node.output)
        return Form(node.op_type, version, values, tuple(node.input), outputs)

    @staticmethod
    def of_node(node: ir.Node, version: int) -> Form:
        """The form of a node in memory. An output that nothing reads counts as absent."""
        values = {name: _plain(attr.value) for name, attr in node.attributes.items()}
        inputs = tuple("" if value is None else value.name or "?" for value in node.inputs)
        read = [value for value in node.outputs if value.uses() or value.is_graph_output()]
        outputs = tuple((value.name or "?") if value in read else "" for value in node.outputs)
        return Form(node.op_type, version, values, inputs, outputs)

    def get(self, name: str, default: Any = None) -> Any:
        """An attribute or what stands for it."""
        return self.attributes.get(name, default)

    def given(self, index: int) -> bool:
        """Is the input there?"""
        return index < len(self.inputs) and bool(self.inputs[index])


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value


# -- the table ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One attribute of a row: the values it may have (empty: any), whether another is refused, and the mark."""

    name: str
    values: tuple[str, ...]
    refuses: bool
    mark: str


@dataclass(frozen=True)
class Row:
    """What is read of an operator at some versions; None stands for all inputs or outputs."""

    entries: Mapping[str, Entry]
    inputs: int | None = None
    outputs: int | None = None


NOTHING = Row({})


@cache
def rows() -> Mapping[tuple[str, int], Row]:
    """The table, by operator and version."""
    text = resources.files(__package__).joinpath("plugin_reads.tsv").read_text()
    found: dict[tuple[str, int], Row] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            op_type, spans, names, inputs, outputs = line.split("\t")
            entries = [_entry(word) for word in names.split() if word != "-"]
            row = Row({entry.name: entry for entry in entries}, *map(_count, (inputs, outputs)))
            found |= {(op_type, version): row for version in versions_in(spans)}
    return found


def _count(word: str) -> int | None:
    return None if word == "*" else int(word)


def _entry(word: str) -> Entry:
    mark = word[-1] if word[-1] in "!?~" else ""
    word = word.removesuffix(mark)
    separator = next((sign for sign in "=:" if sign in word), "")
    name, _, values = word.partition(separator) if separator else (word, "", "")
    return Entry(name, tuple(values.split("|")) if values else (), separator == "=", mark)


def missed(form: Form) -> Iterator[Missed]:
    """What the plugin misses in a node of the standard domain; of operators that ONNX does not have nothing is said."""
    row = rows().get((form.op_type, form.version))
    if row is None and _schema(form) is None:
        return
    row = row or NOTHING
    for name, value in form.attributes.items():
        entry = row.entries.get(name)
        if entry is None:
            if not _is_default(form, name, value):
                yield Missed(f"ATC's plugin does not read {name}, which is {_shown(value)}", False)
        elif entry.values and not any(_same(value, text) for text in entry.values):
            listed = " or ".join(entry.values)
            verb = "takes" if entry.refuses else "computes"
            yield Missed(f"ATC's plugin {verb} {name} {listed} only, and it is {_shown(value)}", entry.refuses)
    for name in row.entries.keys() - form.attributes.keys():
        if row.entries[name].mark == "!":
            yield Missed(f"ATC's plugin needs the attribute {name}", True)
        elif row.entries[name].mark == "?":
            yield Missed(f"ATC's plugin takes a node without {name} for another than ONNX says", False)
    for kind, names, count in (("input", form.inputs, row.inputs), ("output", form.outputs, row.outputs)):
        if count is not None and any(names[count:]):
            yield Missed(f"ATC's plugin has no {kind} {count}, and one is connected there", True)
    case = CASES.get(form.op_type)
    if case is not None:
        yield from case(form)


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, int | float | str | list) else f"a {type(value).__name__}"


def _same(value: Any, text: str) -> bool:
    return math.isclose(value, float(text), abs_tol=1e-5) if isinstance(value, float) else str(value) == text


def _schema(form: Form) -> defs.OpSchema | None:
    try:
        return defs.get_schema(form.op_type, form.version)
    except defs.SchemaError:
        return None


def _is_default(form: Form, name: str, value: Any) -> bool:
    """Does an attribute that is not read say what the operator does without it?"""
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


def _clip(form: Form) -> Iterator[Missed]:
    if form.version >= 11 and not form.given(1) and not form.given(2):
        yield Missed("ATC's plugin needs a bound", True)


def _padding(form: Form) -> Iterator[Missed]:
    """Volumes: convolutions and averages know no automatic pads."""
    spatial = len(form.get("kernel_shape") or ())
    if spatial == 3 and str(form.get("auto_pad", "NOTSET")).startswith("SAME"):
        yield Missed(
            f"ATC's plugin does not compute auto_pad {form.get('auto_pad')} of volumes", form.op_type == "Conv"
        )


def _max_pool(form: Form) -> Iterator[Missed]:
    kernel, strides = form.get("kernel_shape") or [], form.get("strides") or []
    if len(form.outputs) > 1 and not form.outputs[1]:
        yield Missed("ATC's plugin refuses a second output, even where nothing reads it", True)
    if len(kernel) < 3 and not all(step == 1 for step in form.get("dilations") or ()):
        yield Missed("ATC's plugin reads dilations of volumes only", False)
    yield from _large(form, kernel, strides)


def _large(form: Form, kernel: Sequence[int], strides: Sequence[int]) -> Iterator[Missed]:
    if len(kernel) == 3 or (math.prod(kernel) <= LARGE_WINDOW and max(strides, default=1) <= LARGE_STRIDE):
        return
    said = f"a window of {math.prod(kernel)} or a stride of {max(strides, default=1)}"
    if form.get("ceil_mode", 0):
        yield Missed(f"ATC's plugin does not read ceil_mode beside {said}", False)
    if str(form.get("auto_pad", "NOTSET")).startswith("SAME"):
        yield Missed(f"ATC's plugin does not read auto_pad beside {said}", False)


def _lp_pool(form: Form) -> Iterator[Missed]:
    yield from _padding(form)
    yield from _large(form, form.get("kernel_shape") or [], form.get("strides") or [])


def _gemm(form: Form) -> Iterator[Missed]:
    if not form.given(2) and form.get("alpha", 1.0) != 1.0:
        yield Missed(f"ATC's plugin does not read alpha, which is {form.get('alpha')}, without a third input", False)


def _lrn(form: Form) -> Iterator[Missed]:
    if form.get("size", 1) % 2 == 0:
        yield Missed(f"ATC's plugin computes windows of an odd size only, and size is {form.get('size')}", False)


def _depth_to_space(form: Form) -> Iterator[Missed]:
    if form.get("blocksize", 2) < 2:
        yield Missed(f"ATC's plugin takes blocks from 2 on, and blocksize is {form.get('blocksize')}", True)


def _unique(form: Form) -> Iterator[Missed]:
    if len(form.outputs) > 1 and form.outputs[1]:
        yield Missed("ATC's plugin fills output 1, the places, with zeros", False)


def _resize(form: Form) -> Iterator[Missed]:
    mode = form.get("mode", "nearest")
    if form.version == 10:
        if mode == "linear":
            yield Missed("ATC's plugin computes a linear Resize of opset 10 with the coordinates of opset 11", False)
        return
    if len(form.inputs) < 3:
        yield Missed("ATC's plugin needs the input scales, or its empty place", True)
    coordinates = form.get("coordinate_transformation_mode", "half_pixel")
    rounding = form.get("nearest_mode", "round_prefer_floor")
    if mode == "nearest" and (coordinates, rounding) not in RIGHT_PIXELS | TIES:
        said = f"coordinates {coordinates} with nearest_mode {rounding}"
        yield Missed(f"ATC's plugin does not read nearest_mode: it does not compute {said}", False)
    unread: dict[str, int | float | str | None] = {"antialias": 0, "axes": None, "keep_aspect_ratio_policy": "stretch"}
    unread |= {"cubic_coeff_a": -0.75, "exclude_outside": 0} if mode == "cubic" else {}
    unread |= {"extrapolation_value": 0.0} if coordinates == "tf_crop_and_resize" else {}
    for name, default in unread.items():
        value = form.get(name, default)
        if value != default:
            yield Missed(f"ATC's plugin does not read {name}, which is {_shown(value)}", False)


def _constant_of_shape(form: Form) -> Iterator[Missed]:
    value = form.get("value")
    if isinstance(value, onnx.TensorProto) and not value.raw_data and value.data_type not in TYPED_VALUES:
        yield Missed("ATC's plugin reads a value of this type as bytes (raw_data) only", False)


def _upsample(form: Form) -> Iterator[Missed]:
    if form.get("mode", "nearest") == "linear":
        yield Missed("ATC's plugin computes a linear Upsample with the coordinates of Resize 11", False)


CASES: Mapping[str, Callable[[Form], Iterator[Missed]]] = {
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
