"""The types that a type expression of REG_OP allows.

Expressions such as `TensorType({BasicType(), DT_BOOL})` and `TensorType::RealNumberType()` name sets of types that
CANN's headers define. The members of these sets are listed here, including bfloat16, which the newer headers added.
`ALL()` stands for every type. The expression `T` is bound by a DATATYPE clause, so it does not tell the types by
itself.
"""

from __future__ import annotations

import re
from functools import cache

from fa_compiler.op_registry.dtypes import canonical
from fa_compiler.op_registry.spec import OpSpec

_INTEGERS = (
    "DT_INT8",
    "DT_INT16",
    "DT_INT32",
    "DT_INT64",
    "DT_UINT8",
    "DT_UINT16",
    "DT_UINT32",
    "DT_UINT64",
)
_FLOATS = ("DT_FLOAT16", "DT_BF16", "DT_FLOAT", "DT_DOUBLE")
_COMPLEX = ("DT_COMPLEX32", "DT_COMPLEX64", "DT_COMPLEX128")
_MUL = (
    *_FLOATS,
    "DT_INT8",
    "DT_INT16",
    "DT_INT32",
    "DT_INT64",
    "DT_UINT8",
    "DT_UINT16",
    "DT_BOOL",
    *_COMPLEX[1:],
)
_QUANTIZED = ("DT_QINT8", "DT_QINT16", "DT_QINT32", "DT_QUINT8", "DT_QUINT16")

SETS = {
    "BasicType": (*_FLOATS, *_INTEGERS, *_COMPLEX, *_QUANTIZED),
    "NumberType": (*_FLOATS, *_INTEGERS, *_COMPLEX, "DT_QINT8", "DT_QINT32", "DT_QUINT8"),
    "RealNumberType": (*_FLOATS, *_INTEGERS),
    "REALNUMBERTYPE": (*_FLOATS, *_INTEGERS),
    "UnaryDataType": (*_FLOATS, *_COMPLEX),
    "FloatingDataType": ("DT_FLOAT16", "DT_FLOAT", "DT_DOUBLE"),
    "IntegerDataType": _INTEGERS,
    "IndexNumberType": ("DT_INT32", "DT_INT64"),
}
"""The sets of types that the headers define, by name."""

BOUND = {
    "Abs.x": (*_FLOATS, "DT_INT8", "DT_INT16", "DT_INT32", "DT_INT64"),
    "Acos.x": (*_FLOATS, "DT_INT32", "DT_INT64"),
    "Fill.value": (*_FLOATS, *_INTEGERS, "DT_BOOL"),
    "GeluV2.x": ("DT_FLOAT16", "DT_BF16", "DT_FLOAT"),
    "GeluGradV2.dy": ("DT_FLOAT16", "DT_BF16", "DT_FLOAT"),
    "GeluGradV2.x": ("DT_FLOAT16", "DT_BF16", "DT_FLOAT"),
    "Mul.x1": _MUL,
    "Mul.x2": _MUL,
    "Pow.x1": (*_FLOATS, "DT_INT8", "DT_INT16", "DT_INT32", "DT_INT64", "DT_UINT8"),
    "Pow.x2": (*_FLOATS, "DT_INT8", "DT_INT16", "DT_INT32", "DT_INT64", "DT_UINT8"),
}
"""Types of inputs whose expression is only a `T` that a DATATYPE clause binds, for operators that
models use. Types that ONNX does not have are left out."""


@cache
def types_of(written: str) -> tuple[str, ...] | None:
    """The GE names that a type expression allows, or None if it allows every type or does not name
    any."""
    found = [canonical(word) for word in re.findall(r"\bDT_\w+", written)]
    rest = re.sub(r"\bDT_\w+", "", written)
    for word in re.findall(r"\w+", rest):
        if word == "ALL":
            return None
        found += SETS.get(word, ())
    return tuple(dict.fromkeys(found)) or None


def input_types(spec: OpSpec, name: str) -> tuple[str, ...] | None:
    """The GE names that input `name` of an operator may have, or None if it may have all or nothing
    is known."""
    if spec.products:  # only operators of the registry have products
        return spec.legal_types(name) or None
    return BOUND.get(f"{spec.name}.{name}") or types_of(spec.input(name).written)
