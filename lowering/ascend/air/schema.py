"""The message classes of an `.air` file. They are made at import from `ge_ir.proto`, which defines
their fields."""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf import descriptor_pool, message_factory  # type: ignore[import-untyped]

from fa_compiler.lowering.ascend.air.proto_text import file_descriptor

Proto = Any
"""A protobuf message of one of the classes below. There is no static type, because the classes are
made at import."""


def _messages() -> dict[str, Any]:
    text = resources.files(__package__).joinpath("ge_ir.proto").read_text(encoding="utf-8")
    # A separate pool: CANN's Python packages declare the same messages in the default one.
    pool = descriptor_pool.DescriptorPool()
    file = file_descriptor(text, "ge_ir.proto")
    pool.AddSerializedFile(file.SerializeToString())
    return {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"{file.package}.{message.name}")
        )
        for message in file.message_type
    }


_MESSAGES = _messages()
ModelDef = _MESSAGES["ModelDef"]
GraphDef = _MESSAGES["GraphDef"]
OpDef = _MESSAGES["OpDef"]
AttrDef = _MESSAGES["AttrDef"]
TensorDef = _MESSAGES["TensorDef"]
TensorDescriptor = _MESSAGES["TensorDescriptor"]
DATA_TYPE = TensorDescriptor.DESCRIPTOR.fields_by_name["dtype"].enum_type
ListValue = AttrDef.ListValue
LISTS = {
    ListValue.VT_LIST_STRING: ("s", "ListString"),
    ListValue.VT_LIST_INT: ("i", "ListInt"),
    ListValue.VT_LIST_FLOAT: ("f", "ListFloat"),
    ListValue.VT_LIST_BOOL: ("b", "ListBool"),
    ListValue.VT_LIST_BYTES: ("bt", "ListBytes"),
    ListValue.VT_LIST_TENSOR_DESC: ("td", "ListTensorDesc"),
    ListValue.VT_LIST_TENSOR: ("t", "ListTensor"),
    ListValue.VT_LIST_GRAPH: ("g", "ListGraph"),
    ListValue.VT_LIST_NAMED_ATTRS: ("na", "ListNamedAttrs"),
    ListValue.VT_LIST_DATA_TYPE: ("dt", "ListType"),
}
"""For each kind of list: the field that holds it, and its name among the types of attributes."""
