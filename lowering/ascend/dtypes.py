"""The data types of GE: the number an attribute has for each, and the bits of one element.

Attributes (`Type`, and `Int` where an operator such as Cast spells a type so) number the types as ge::DataType does,
the descriptors of tensors as ge.proto.DataType does; the second numbering is the enum of `air/ge_ir.proto`.
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
"""GE name: (number in attributes, bits of an element; None where elements have no fixed size)."""

_NAMES = {number: name for name, (number, _) in _BITS.items()}


def attr_number(name: str) -> int:
    """The number an attribute has for a type: 27 for "DT_BF16". Raises KeyError for a name GE does not have."""
    return _BITS[canonical(name)][0]


def attr_name(number: int) -> str | None:
    """The inverse of `attr_number`; None for a number GE does not have."""
    return _NAMES.get(number)


def data_size(name: str, count: int) -> int | None:
    """Bytes of `count` elements as a constant stores them, narrow ones packed; None where there is no fixed size."""
    bits = _BITS[canonical(name)][1]
    return None if bits is None else -(-count * bits // 8)


def is_type(name: str) -> bool:
    """Whether GE has a type of that name."""
    return canonical(name) in _BITS
