"""The data types of GE: the number of each type in attributes, and the bits of an element.

Attributes (of kind `Type`, and of kind `Int` in operators such as Cast) use the numbers of ge::DataType. The
descriptors of tensors use the numbers of ge.proto.DataType, which is the enum in `air/ge_ir.proto`.
"""

from __future__ import annotations

from fa_compiler.op_registry.dtypes import canonical

_BITS = {
    "DT_FLOAT": (0, 32),
    "DT_FLOAT16": (1, 16),
    "DT_INT8": (2, 8),
    "DT_INT32": (3, 32),
    "DT_UINT8": (4, 8),
    "DT_INT16": (6, 16),
    "DT_UINT16": (7, 16),
    "DT_UINT32": (8, 32),
    "DT_INT64": (9, 64),
    "DT_UINT64": (10, 64),
    "DT_DOUBLE": (11, 64),
    "DT_BOOL": (12, 8),
    "DT_STRING": (13, None),
    "DT_DUAL_SUB_INT8": (14, 8),
    "DT_DUAL_SUB_UINT8": (15, 8),
    "DT_COMPLEX64": (16, 64),
    "DT_COMPLEX128": (17, 128),
    "DT_QINT8": (18, 8),
    "DT_QINT16": (19, 16),
    "DT_QINT32": (20, 32),
    "DT_QUINT8": (21, 8),
    "DT_QUINT16": (22, 16),
    "DT_RESOURCE": (23, None),
    "DT_STRING_REF": (24, None),
    "DT_DUAL": (25, None),
    "DT_VARIANT": (26, None),
    "DT_BF16": (27, 16),
    "DT_UNDEFINED": (28, None),
    "DT_INT4": (29, 4),
    "DT_UINT1": (30, 1),
    "DT_INT2": (31, 2),
    "DT_UINT2": (32, 2),
    "DT_COMPLEX32": (33, 32),
    "DT_HIFLOAT8": (34, 8),
    "DT_FLOAT8_E5M2": (35, 8),
    "DT_FLOAT8_E4M3FN": (36, 8),
    "DT_FLOAT8_E8M0": (37, 8),
    "DT_FLOAT6_E3M2": (38, 6),
    "DT_FLOAT6_E2M3": (39, 6),
    "DT_FLOAT4_E2M1": (40, 4),
    "DT_FLOAT4_E1M2": (41, 4),
    "DT_HIFLOAT4": (42, 4),
}
"""By GE name: the number in attributes, and the bits of an element (None if elements have no fixed
size)."""

_NAMES = {number: name for name, (number, _) in _BITS.items()}


def attr_number(name: str) -> int:
    """The number of a type in attributes, such as 27 for "DT_BF16". Raises KeyError for an unknown
    name."""
    return _BITS[canonical(name)][0]


def attr_name(number: int) -> str | None:
    """The inverse of `attr_number`; None for an unknown number."""
    return _NAMES.get(number)


def data_size(name: str, count: int) -> int | None:
    """The bytes of `count` elements in a constant, where narrow types are packed; None without a
    fixed size."""
    bits = _BITS[canonical(name)][1]
    return None if bits is None else -(-count * bits // 8)


def is_type(name: str) -> bool:
    """Whether GE has a type of this name."""
    return canonical(name) in _BITS
