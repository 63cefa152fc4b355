"""The schema: the field numbers of the format's description, and the two numberings of types."""

from __future__ import annotations

import pytest

from fa_compiler.lowering.ascend.air import schema
from fa_compiler.lowering.ascend.air.decode import type_name
from fa_compiler.lowering.ascend.air.proto_text import file_descriptor
from fa_compiler.lowering.ascend.dtypes import attr_name, attr_number, data_size

FIELDS = {
    schema.ModelDef: "name 1, version 2, custom_version 3, graph 7, attr 11, attr_groups 12",
    schema.GraphDef: "name 1, input 4, output 5, op 6, attr 11, attr_groups 12",
    schema.OpDef: "name 1, type 2, input 5, attr 10, attr_groups 11, has_out_attr 20, id 21, stream_id 22, "
    "input_name 23, src_name 24, src_index 25, dst_name 26, dst_index 27, input_i 28, output_i 29, workspace 30, "
    "workspace_bytes 31, is_input_const 32, input_desc 33, output_desc 34, subgraph_name 35",
    schema.TensorDescriptor: "name 1, dtype 2, shape 3, layout 4, attr 5, attr_groups 6, has_out_attr 9, size 10, "
    "weight_size 11, reuse_input 12, output_tensor 13, device_type 14, input_tensor 15, real_dim_cnt 16, "
    "reuse_input_index 17, data_offset 18, cmps_size 19, cmps_tab 20, cmps_tab_offset 21",
    schema.TensorDef: "desc 1, data 2",
    schema.AttrDef: "list 1, s 2, i 3, f 4, b 5, bt 7, func 10, td 11, t 12, g 13, list_list_int 14, dt 15, "
    "list_list_float 16, expression 17",
    schema.ListValue: "s 2, i 3, f 4, b 5, bt 7, td 8, t 9, g 10, na 11, dt 12, val_type 20",
}

TYPES = {
    "DT_FLOAT": (1, 0, 4),
    "DT_FLOAT16": (2, 1, 2),
    "DT_INT8": (3, 2, 1),
    "DT_UINT8": (4, 4, 1),
    "DT_INT16": (5, 6, 2),
    "DT_UINT16": (6, 7, 2),
    "DT_INT32": (7, 3, 4),
    "DT_INT64": (8, 9, 8),
    "DT_UINT32": (9, 8, 4),
    "DT_UINT64": (10, 10, 8),
    "DT_BOOL": (11, 12, 1),
    "DT_DOUBLE": (12, 11, 8),
    "DT_STRING": (13, 13, None),
    "DT_COMPLEX64": (16, 16, 8),
    "DT_COMPLEX128": (17, 17, 16),
    "DT_BF16": (27, 27, 2),
    "DT_INT4": (28, 29, 0.5),
    "DT_UINT1": (29, 30, 0.125),
    "DT_COMPLEX32": (32, 33, 4),
    "DT_HIFLOAT8": (33, 34, 1),
    "DT_FLOAT8_E5M2": (34, 35, 1),
    "DT_FLOAT8_E4M3FN": (35, 36, 1),
    "DT_FLOAT8_E8M0": (36, 37, 1),
    "DT_FLOAT4_E2M1": (39, 40, 0.5),
    "DT_HIFLOAT4": (41, 42, 0.5),
    "DT_UNDEFINED": (0, 28, None),
}
"""Of each type its number in descriptors, its number in attributes, and the bytes of an element."""


@pytest.mark.parametrize("message", FIELDS, ids=lambda message: message.DESCRIPTOR.name)
def test_field_numbers(message: type) -> None:
    wanted = dict(entry.split() for entry in FIELDS[message].split(", "))
    found = {field.name: str(field.number) for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]
    assert found == wanted


def test_on_the_wire() -> None:
    """A few messages byte by byte: tag = number * 8 + wire type."""
    model = schema.ModelDef(name="m")
    op = model.graph.add(name="g").op.add(name="n", type="T")
    op.input.append("a:0")
    op.attr["k"].list.i.append(5)
    op.attr["k"].list.val_type = schema.ListValue.VT_LIST_INT
    assert op.SerializeToString() == (
        b"\x0a\x01n\x12\x01T\x2a\x03a:0" + b"\x52\x0d\x0a\x01k\x12\x08\x0a\x06\x1a\x01\x05\xa0\x01\x02"
    )
    assert model.SerializeToString().startswith(b"\x0a\x01m\x3a")
    desc = schema.TensorDescriptor(dtype=27, layout="ND")
    desc.shape.dim.extend([1, -1])
    assert desc.SerializeToString() == b"\x10\x1b\x1a\x0d\x0a\x0b\x01" + b"\xff" * 9 + b"\x01" + b"\x22\x02ND"


@pytest.mark.parametrize("name", TYPES)
def test_types(name: str) -> None:
    proto, attr, size = TYPES[name]
    assert type_name(proto) == name
    assert (attr_number(name), attr_name(attr)) == (attr, name)
    assert data_size(name, 16) == (None if size is None else size * 16)


def test_narrow_elements_are_packed() -> None:
    assert data_size("DT_INT4", 3) == 2
    assert data_size("DT_UINT1", 9) == 2
    assert data_size("DT_INT4", 0) == 0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("message A { string s = 1; ", "message A is not closed"),
        ("message A { string s; }", "'string s' is not understood"),
        ('import "x.proto";', "is not understood"),
        ("enum E { A; }", "'A' is not understood"),
        ("message A { ??? }", "is not understood"),
    ],
)
def test_what_the_reader_of_the_text_refuses(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        file_descriptor(text, "x.proto")
