"""The operators and data types that ATC's ONNX parser takes.

`parser_ops.tsv` lists the operators that the parser plugins of CANN's open sources register
(2026-08): domain, operator and versions of the domain's opset. A closed CANN may take a few more
operators.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import resources

import onnx

NEWEST = 18
"""The newest opset of the standard domain for which the parser knows more than a few operators."""

NATIVE = ("Constant",)
"""Operators that the parser reads without a plugin, at every opset."""

_T = onnx.TensorProto
TYPES: frozenset[int] = frozenset(
    (
        *(
            _T.FLOAT,
            _T.FLOAT16,
            _T.BFLOAT16,
            _T.DOUBLE,
            _T.FLOAT8E5M2,
            _T.FLOAT8E4M3FN,
            _T.COMPLEX64,
            _T.COMPLEX128,
        ),
        *(
            _T.INT8,
            _T.INT16,
            _T.INT32,
            _T.INT64,
            _T.UINT8,
            _T.UINT16,
            _T.UINT32,
            _T.UINT64,
            _T.INT4,
        ),
        *(_T.BOOL, _T.STRING),
    )
)
"""The element types that the parser knows. Those in `NO_CONSTANTS` cannot be the type of a
constant."""

NO_CONSTANTS: frozenset[int] = frozenset((_T.FLOAT8E5M2, _T.FLOAT8E4M3FN))

EXTERNAL_ENTRIES = ("location", "offset", "length")
"""The entries of an external tensor that the parser knows. It reads any other entry as the
length."""


def takes(domain: str, op_type: str, version: int) -> bool:
    """Whether the parser takes the operator at this version of its domain's opset."""
    if not domain and op_type in NATIVE:
        return True
    return version in _table().get((domain, op_type), ())


@cache
def _table() -> Mapping[tuple[str, str], frozenset[int]]:
    text = resources.files(__package__).joinpath("parser_ops.tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if not line.startswith("#"))
    return {(domain, op): versions_in(text) for domain, op, text in rows}


def versions_in(text: str) -> frozenset[int]:
    """The versions in a text such as "8,10-12"."""
    spans = (part.partition("-") for part in text.split(","))
    return frozenset(
        number for low, _, high in spans for number in range(int(low), int(high or low) + 1)
    )
