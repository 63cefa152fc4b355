"""Data types under their three names: GE ("DT_FLOAT16"), ONNX (TensorProto number) and NumPy.

The registry uses the GE names. The prototype text of some headers spells float32 as DT_FLOAT32;
`canonical` replaces such spellings.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_compiler.op_registry.errors import RegistryError


@dataclass(frozen=True)
class DType:
    """One type. `onnx` is the TensorProto.DataType number, `numpy` a NumPy or ml_dtypes name; each
    is None if there is no such type. `bits` is the size of one element. `onnx_name` is the type's
    name in ONNX schema strings."""

    ge: str
    bits: int
    onnx: int | None = None
    onnx_name: str | None = None
    numpy: str | None = None


TABLE = (
    DType("DT_FLOAT", 32, 1, "float", "float32"),
    DType("DT_FLOAT16", 16, 10, "float16", "float16"),
    DType("DT_BF16", 16, 16, "bfloat16", "bfloat16"),
    DType("DT_DOUBLE", 64, 11, "double", "float64"),
    DType("DT_BOOL", 8, 9, "bool", "bool"),
    DType("DT_INT4", 4, 22, "int4", "int4"),
    DType("DT_INT8", 8, 3, "int8", "int8"),
    DType("DT_INT16", 16, 5, "int16", "int16"),
    DType("DT_INT32", 32, 6, "int32", "int32"),
    DType("DT_INT64", 64, 7, "int64", "int64"),
    DType("DT_UINT1", 1),
    DType("DT_UINT8", 8, 2, "uint8", "uint8"),
    DType("DT_UINT16", 16, 4, "uint16", "uint16"),
    DType("DT_UINT32", 32, 12, "uint32", "uint32"),
    DType("DT_UINT64", 64, 13, "uint64", "uint64"),
    DType("DT_COMPLEX64", 64, 14, "complex64", "complex64"),
    DType("DT_COMPLEX128", 128, 15, "complex128", "complex128"),
    DType("DT_FLOAT8_E4M3FN", 8, 17, "float8e4m3fn", "float8_e4m3fn"),
    DType("DT_FLOAT8_E5M2", 8, 19, "float8e5m2", "float8_e5m2"),
    DType("DT_FLOAT8_E8M0", 8, 24, "float8e8m0", "float8_e8m0fnu"),
    DType("DT_FLOAT4_E2M1", 4, 23, "float4e2m1", "float4_e2m1fn"),
    DType("DT_FLOAT4_E1M2", 4),
    DType("DT_HIFLOAT8", 8),
    DType("DT_STRING", 0, 8, "string", "object"),
)
"""Every type that a prototype of the registry names, and the types that ONNX shares with GE."""

SPELLINGS = {
    "DT_FLOAT32": "DT_FLOAT",
    "DT_FP32": "DT_FLOAT",
    "DT_FLOAT64": "DT_DOUBLE",
    "DT_FP16": "DT_FLOAT16",
    "DT_BFLOAT16": "DT_BF16",
    "DT_Int32": "DT_INT32",
}
"""Other spellings found in prototype text, and the names that the registry uses."""

_BY_GE = {entry.ge: entry for entry in TABLE}
_BY_ONNX = {entry.onnx: entry for entry in TABLE if entry.onnx is not None}
_BY_NUMPY = {entry.numpy: entry for entry in TABLE if entry.numpy is not None}

FLOATS = ("DT_FLOAT16", "DT_BF16", "DT_FLOAT")


def canonical(name: str) -> str:
    """The registry's name for a GE type name: "DT_FLOAT32" gives "DT_FLOAT". Unknown names pass
    unchanged."""
    return SPELLINGS.get(name, name)


def lookup(name: str) -> DType:
    """The table row of a GE name. Raises RegistryError for a name outside the table."""
    entry = _BY_GE.get(canonical(name))
    if entry is None:
        raise RegistryError(f"unknown GE data type {name!r}")
    return entry


def from_onnx(number: int) -> str | None:
    """GE name of a TensorProto.DataType number, or None if GE has no such type (or it is
    UNDEFINED)."""
    entry = _BY_ONNX.get(number)
    return None if entry is None else entry.ge


def to_onnx(name: str) -> int | None:
    """TensorProto.DataType number of a GE name, or None if ONNX has no such type."""
    return lookup(name).onnx


def from_numpy(dtype: Any) -> str | None:
    """GE name of a NumPy or ml_dtypes dtype, or None if GE has no such type."""
    entry = _BY_NUMPY.get(np.dtype(dtype).name)
    return None if entry is None else entry.ge


def to_numpy(name: str) -> np.dtype[Any]:
    """NumPy dtype of a GE name. The narrow floats come from ml_dtypes. Raises RegistryError if
    neither package has the type."""
    entry = lookup(name)
    if entry.numpy is None:
        raise RegistryError(f"{name} has no NumPy type")
    try:
        return np.dtype(entry.numpy)
    except TypeError:
        pass
    try:
        import ml_dtypes

        narrow: np.dtype[Any] = np.dtype(getattr(ml_dtypes, entry.numpy))
    except (ImportError, AttributeError) as error:
        raise RegistryError(
            f"{name} needs the package ml_dtypes, which has no {entry.numpy} here"
        ) from error
    return narrow
