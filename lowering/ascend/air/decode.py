"""From the message of an `.air` file to a graph in memory, as GE's loader reads it.

The loader has these rules:

    a list without a kind        is lost
    names of inputs and outputs  come from the name maps, or from the descriptors if there is no map
    a graph without NetOutput    gets one from its outputs
    attributes for the loader    (name maps, `_ir_*`, locations of weights) are not attributes of
                                 the operator
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from fa_compiler.lowering.ascend.air.schema import DATA_TYPE, LISTS, Proto
from fa_compiler.lowering.ascend.air.slots import slot_names
from fa_compiler.lowering.ascend.diagnostic import AirError
from fa_compiler.lowering.ascend.dtypes import attr_name
from fa_compiler.lowering.ascend.graph import (
    UNDEFINED,
    Attr,
    Graph,
    Model,
    Op,
    Opaque,
    Output,
    TensorDesc,
    Weight,
)

META = frozenset(
    f"_{side}_name_{part}" for side in ("input", "output") for part in ("key", "value")
) | frozenset(
    (
        "_opt_input",
        "_ir_attr_names",
        *(f"_ir_{side}_{part}" for side in ("inputs", "outputs") for part in ("key", "value")),
    )
)
"""Attributes that tell the loader how to read the operator's descriptors."""

CONSTANTS = ("Const", "Constant")
OUTPUT_NODE = "Node_Output"
"""GE's name for a NetOutput that it makes from the outputs of a graph."""

_TYPES = DATA_TYPE.values_by_number
_SCALARS = {"i": "Int", "f": "Float", "b": "Bool"}
_READ_LISTS = ("s", "i", "f", "b", "dt")
"""The fields of the lists that are read; the others are copied."""
_OTHERS = {
    "bt": "Bytes",
    "func": "NamedAttrs",
    "td": "TensorDesc",
    "g": "Graph",
    "expression": "Expression",
}


def decode(proto: Proto, folder: Path | None = None) -> Model:
    """The graph of a ModelDef that the loader accepts. `folder` is the folder of its weights'
    files.

    Raises:
        AirError: the file of a weight is not in the folder.
    """
    return Model(proto.name, [_graph(graph, folder) for graph in proto.graph])


def split_edge(text: str) -> tuple[str, int] | None:
    """The operator and index of an entry of `input`, or None if nothing is connected.

    The index is the number that GE reads after the last colon; it is -1 for a control edge. GE
    reads it with strtol into 32 bits: a text that is not a number counts as 0, characters after a
    number are ignored, and a large number wraps.
    """
    name, colon, index = text.rpartition(":")
    if not colon:
        return None
    found = re.match(r"[ \t-\r]*([+-]?)([0-9]*)", index)
    assert found is not None
    digits = found[2].lstrip("0")
    magnitude = _LONG if len(digits) > len(str(_LONG)) else min(int(digits or "0"), _LONG)
    wrapped = (magnitude if found[1] != "-" else -magnitude) & 0xFFFFFFFF
    return name, -1 if wrapped >> 31 else wrapped


def data_edges(op: Proto) -> list[tuple[str, int] | None]:
    """The edges of an operator's inputs, in order, without control edges; None for an input that is
    not connected."""
    return [edge for edge in map(split_edge, op.input) if edge is None or edge[1] >= 0]


_LONG = (1 << 63) - 1
"""The largest number of strtol, which it returns for any larger number."""


def has_index(text: str) -> bool:
    """Whether an entry of `input` ends in a number that GE reads correctly."""
    return re.fullmatch(r"-?[0-9]{1,9}", text.rpartition(":")[2]) is not None


def names_of(proto: Proto, side: str) -> dict[int, str] | None:
    """The name map of an operator's "input" or "output" descriptors, by index; None if there is no
    map."""
    keys = (
        [_text(name) for name in proto.attr[f"_{side}_name_key"].list.s]
        if f"_{side}_name_key" in proto.attr
        else []
    )
    values = (
        list(proto.attr[f"_{side}_name_value"].list.i)
        if f"_{side}_name_value" in proto.attr
        else []
    )
    if len(keys) != len(values) or not keys:
        return None
    return dict(zip(values, keys, strict=True))


def type_name(number: int) -> str:
    """The GE name of a descriptor's type; DT_UNDEFINED for a number that GE does not have."""
    found = _TYPES.get(number)
    return UNDEFINED if found is None else str(found.name)


def layout_of(proto: Proto) -> str:
    """The layout of a descriptor: the number that GE writes if it is there, otherwise the text."""
    if "format_for_int" in proto.attr:
        # The lowest byte is the format; the other bytes tell how it is split into groups.
        number = proto.attr["format_for_int"].i & 0xFF
        return FORMATS.get(number, f"FORMAT_{number}")
    return str(proto.layout)


FORMATS = {
    0: "NCHW",
    1: "NHWC",
    2: "ND",
    3: "NC1HWC0",
    4: "FRACTAL_Z",
    16: "HWCN",
    27: "NDHWC",
    29: "FRACTAL_NZ",
    30: "NCDHW",
    31: "DHWCN",
    40: "",
}
"""Layouts by the number of ge::Format. 40 is "reserved", which is also the meaning of an empty
layout."""


def location_of(proto: Proto) -> tuple[str, int] | None:
    """The file of a constant's data, relative to the `.air`, and its size; None if the data are
    inside the message."""
    if (
        proto.type not in CONSTANTS
        or not {"location", "value"} <= {*proto.attr}
        or proto.attr["value"].t.data
    ):
        return None
    length = int(proto.attr["length"].i) if "length" in proto.attr else 0
    return _text(proto.attr["location"].s), length


def file_at(folder: Path | None, location: str) -> Path | None:
    """The path of a location, or None if it leads out of the folder."""
    path = PurePosixPath(location)
    if (
        folder is None
        or path.is_absolute()
        or ".." in path.parts
        or not location
        or "\0" in location
    ):
        return None
    return folder / path


def _graph(proto: Proto, folder: Path | None) -> Graph:
    graph = Graph(proto.name, [_op(op, folder) for op in proto.op])
    if proto.output and not any(op.type == "NetOutput" for op in graph.ops):
        graph.ops.append(_net_output(proto.output, graph))
    return graph


def _net_output(outputs: Sequence[str], graph: Graph) -> Op:
    ops = {op.name: op for op in graph.ops}
    sources = [
        Output(*edge) for edge in dict.fromkeys(map(split_edge, outputs)) if edge is not None
    ]
    descs = []
    for number, source in enumerate(sources):
        found = ops[source.op].output_descs if source.op in ops else []
        known = found[source.index] if 0 <= source.index < len(found) else TensorDesc("", UNDEFINED)
        descs.append(TensorDesc(f"x{number}", known.dtype, known.shape, known.layout))
    return Op(OUTPUT_NODE, "NetOutput", list(sources), descs)


def _op(proto: Proto, folder: Path | None) -> Op:
    op = Op(proto.name, proto.type)
    for text in proto.input:
        edge = split_edge(text)
        if edge is not None and edge[1] < 0:
            op.controls.append(edge[0])
        else:
            op.inputs.append(None if edge is None else Output(*edge))
    op.inputs += [None] * (len(proto.input_desc) - len(op.inputs))
    op.input_descs = _descs(proto, "input")
    op.output_descs = _descs(proto, "output")
    inside = location_of(proto) is None
    for name, value in proto.attr.items():
        if name in META or (not inside and name in ("location", "length")):
            continue
        attr = _attr(value)
        if attr is not None:
            op.attrs[name] = attr
    if not inside:
        op.attrs["value"] = Attr("Tensor", _outside(proto, folder))
    op.subgraphs = dict(
        zip(slot_names(op.type, len(proto.subgraph_name)), proto.subgraph_name, strict=True)
    )
    return op


def _descs(proto: Proto, side: str) -> list[TensorDesc]:
    names = names_of(proto, side)
    protos = proto.input_desc if side == "input" else proto.output_desc
    return [
        _desc(desc, desc.name if names is None else names.get(index, ""))
        for index, desc in enumerate(protos)
    ]


def _desc(proto: Proto, name: str) -> TensorDesc:
    ranges = None
    if "shape_range" in proto.attr:
        rows = [list(row.list_i) for row in proto.attr["shape_range"].list_list_int.list_list_i]
        ranges = tuple((row[0], row[1]) for row in rows if len(row) == 2)
    return TensorDesc(name, type_name(proto.dtype), _shape(proto), layout_of(proto), ranges)


def _shape(proto: Proto) -> tuple[int, ...] | None:
    dims = tuple(proto.shape.dim)
    return None if dims == (-2,) else dims


def _attr(proto: Proto) -> Attr | None:
    """The attribute, or None if the loader loses it."""
    field = proto.WhichOneof("value")
    if field in _SCALARS:
        return Attr(_SCALARS[field], getattr(proto, field))
    if field == "s":
        return Attr("String", _text(proto.s))
    if field == "dt":
        return Attr("Type", _type(proto.dt))
    if field == "t":
        return Attr("Tensor", _weight(proto.t))
    if field == "list_list_int":
        return Attr(
            "ListListInt", tuple(tuple(row.list_i) for row in proto.list_list_int.list_list_i)
        )
    if field == "list_list_float":
        return Attr(
            "ListListFloat", tuple(tuple(row.list_f) for row in proto.list_list_float.list_list_f)
        )
    if field == "list":
        return _list(proto)
    return Attr(_OTHERS[field], Opaque(proto.SerializeToString())) if field in _OTHERS else None


def _list(proto: Proto) -> Attr | None:
    kind = proto.list.val_type
    if kind not in LISTS:
        return None
    field, name = LISTS[kind]
    if field not in _READ_LISTS:
        return Attr(name, Opaque(proto.SerializeToString()))
    values = list(getattr(proto.list, field))
    if name == "ListString":
        values = [_text(value) for value in values]
    if name == "ListType":
        values = [_type(value) for value in values]
    return Attr(name, tuple(values))


def _type(number: int) -> str:
    return attr_name(number) or UNDEFINED


def _weight(proto: Proto) -> Weight:
    return Weight(
        type_name(proto.desc.dtype),
        _shape(proto.desc) or (),
        len(proto.data),
        lambda: bytes(proto.data),
    )


def _outside(proto: Proto, folder: Path | None) -> Weight:
    place = location_of(proto)
    assert place is not None
    location, length = place
    path = file_at(folder, location)
    if path is None or not path.is_file():
        raise AirError(
            f"{proto.name}: the file of its data, {location}, is not beside the .air; put it there"
        )

    def load() -> bytes:
        data = path.read_bytes()
        if len(data) != length:
            raise AirError(
                f"{proto.name}: {location} has {len(data)} bytes, the .air says {length}; restore the file"
            )
        return data

    desc = proto.attr["value"].t.desc
    return Weight(type_name(desc.dtype), _shape(desc) or (), length, load)


def _text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")
