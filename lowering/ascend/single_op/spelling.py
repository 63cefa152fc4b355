"""The spelling of types, formats and kinds of attributes in the JSON. ATC ignores the case of types
and formats."""

from __future__ import annotations

from fa_compiler.lowering.ascend.air.check_tensors import LAYOUTS

TYPES = {
    "bool": "DT_BOOL",
    "int8": "DT_INT8",
    "uint8": "DT_UINT8",
    "int16": "DT_INT16",
    "uint16": "DT_UINT16",
    "int32": "DT_INT32",
    "uint32": "DT_UINT32",
    "int64": "DT_INT64",
    "uint64": "DT_UINT64",
    "float16": "DT_FLOAT16",
    "half": "DT_FLOAT16",
    "fp16": "DT_FLOAT16",
    "float": "DT_FLOAT",
    "float32": "DT_FLOAT",
    "double": "DT_DOUBLE",
    "complex32": "DT_COMPLEX32",
    "complex64": "DT_COMPLEX64",
    "complex128": "DT_COMPLEX128",
    "uint1": "DT_UINT1",
    "bfloat16": "DT_BF16",
    "int4": "DT_INT4",
    "hifloat8": "DT_HIFLOAT8",
    "hifloat4": "DT_HIFLOAT4",
    "float8_e5m2": "DT_FLOAT8_E5M2",
    "float8_e4m3fn": "DT_FLOAT8_E4M3FN",
}
"""The GE type of each spelling that ATC knows. If a type has several spellings, the first one is
written."""

ABSENT_TYPE, ABSENT_FORMAT = "UNDEFINED", "RESERVED"
"""The type and the format of the placeholder of an absent optional input."""

FORMATS = (frozenset(map(str.lower, LAYOUTS)) | {"chwn"}) - {"", "reserved", "format_reserved"}
"""The formats of a tensor that ATC knows."""

ATTR_KINDS = {
    "bool": "Bool",
    "int": "Int",
    "float": "Float",
    "string": "String",
    "list_bool": "ListBool",
    "list_int": "ListInt",
    "list_float": "ListFloat",
    "list_string": "ListString",
    "list_list_int": "ListListInt",
    "data_type": "Type",
}

CONST_TYPES = frozenset(
    word
    for word in TYPES
    if word.startswith(("int", "uint", "float", "half", "fp16", "double")) and "_" not in word
) - {"int4", "uint1"}
"""The types for which an input may be constant. ATC ignores the value of an input of any other
type."""

_WORDS = {ge: word for word, ge in reversed(TYPES.items())}
_KIND_WORDS = {kind: word for word, kind in ATTR_KINDS.items()}


def type_spelling(ge: str) -> str | None:
    """The spelling of a GE type; None if ATC does not know the type."""
    return _WORDS.get(ge)


def kind_spelling(kind: str) -> str | None:
    """The spelling of an attribute's REG_OP type; None if ATC does not take attributes of this
    type."""
    return _KIND_WORDS.get(kind)
