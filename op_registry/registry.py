"""Finds the operators' files and chooses a variant by CANN version."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping
from functools import cache

from fa_compiler.op_registry import ops
from fa_compiler.op_registry.errors import RegistryError, UnknownOp, UnknownVariant
from fa_compiler.op_registry.extensions import EXTENSIONS, Extension
from fa_compiler.op_registry.operator import Operator
from fa_compiler.op_registry.spec import AttrValue, OpSpec

DOMAIN = "ascend"
"""The ONNX operator domain of the fused nodes."""

FILE_DOMAIN = "fa_compiler"
FILE_OP = "FlashAttention"
GRAPH_OP = "FlashAttentionScore"
"""In a file for ONNX Runtime, a GRAPH_OP that only gives attention_out is FILE_DOMAIN::FILE_OP, with that one output.
The name differs, because onnx.reference does not take one name in two domains."""

FILE_OPS = (FILE_OP, *(f"{FILE_OP}Body{number}" for number in range(2, 9)))
"""The names of that operator. They mean the same; in a file the nodes of one name have one body."""

DOMAINS = (DOMAIN, FILE_DOMAIN)
"""The domains of the custom-op library."""

VERSION = 1
"""The opset version of both domains."""

_RELEASE = re.compile(
    r"(?:CANN[ -]?)?(\d+)\.(\d+)(?:\.(\d+))?((?:[.-]?(?:RC|T|alpha|beta)[.-]?\d*)*)", re.IGNORECASE
)
_ALMOST = re.compile(r"(?:CANN[ -]?)?v?(\d{1,2})((?:[.,]\d+){0,2})(?:[.,]\d+)*", re.IGNORECASE)
"""A version as it is not written: with a v in front of it, with commas, with one number or with
four."""


@cache
def _registry() -> Mapping[str, Operator]:
    found: dict[str, Operator] = {}
    for module in pkgutil.iter_modules(ops.__path__):
        record = getattr(importlib.import_module(f"{ops.__name__}.{module.name}"), "OPERATOR", None)
        if not isinstance(record, Operator):
            raise RegistryError(
                f"op_registry/ops/{module.name}.py does not define OPERATOR, see op_registry/operator.py"
            )
        if record.name in found or {variant.name for variant in record.variants} != {record.name}:
            raise RegistryError(
                f"op_registry/ops/{module.name}.py does not hold exactly one new operator"
            )
        found[record.name] = record
    return found


def names() -> tuple[str, ...]:
    """The operators the registry holds, in alphabetical order."""
    return tuple(sorted(_registry()))


@cache
def attention_names() -> tuple[str, ...]:
    """The operators that compute attention, a part of it or its gradient, in alphabetical order."""
    return tuple(name for name in names() if operator(name).is_attention)


def operator(op_type: str) -> Operator:
    """The record of an operator. Raises UnknownOp."""
    try:
        return _registry()[op_type]
    except KeyError:
        raise UnknownOp(op_type, _registry()) from None


def variants(op_type: str) -> tuple[OpSpec, ...]:
    """All known variants of an operator. The last one is the default, which `get` returns. Raises
    UnknownOp."""
    return operator(op_type).variants


def extensions_of(op_type: str) -> tuple[Extension, ...]:
    """The extensions that the operator's CPU kernel has, in the order of the table. There are none
    if the operator is unknown or has no kernel."""
    record = _registry().get(op_type)
    kernel = None if record is None else record.kernel
    return (
        ()
        if kernel is None
        else tuple(entry for entry in EXTENSIONS if entry.id in kernel.extensions)
    )


def has_kernel(op_type: str) -> bool:
    """Whether the library has a CPU kernel of the operator. Raises UnknownOp."""
    return operator(op_type).kernel is not None


def takes_float(op_type: str) -> bool:
    """Whether an extension allows float32 for the operator's float16 and bfloat16 tensors."""
    return any(entry.widens for entry in extensions_of(op_type))


def get(op_type: str, cann: str | None = None) -> OpSpec:
    """The prototype of an operator: the newest variant, or the one that fits `cann`.

    `cann` is a release in CANN's numbering ("8.0", "8.0.RC2", "8.5.0-beta.1", "9.0.0") or the name
    of a variant ("opdef_2025_11"). A release gives the newest variant whose first known release is
    not later. A variant whose release no source states can only be chosen by name. RC and beta
    builds count as their release, alpha builds as older. Raises UnknownOp. Raises UnknownVariant if
    `cann` is neither a release nor a variant, or is older than every known release.
    """
    known = variants(op_type)
    if cann is None:
        return known[-1]
    for variant in known:
        if variant.variant == cann:
            return variant
    asked = release(cann)
    if asked is None:
        told = meant(cann, (variant.variant for variant in known))
        told = told or f"; `fa-compiler registry show {op_type}` lists them"
        raise UnknownVariant(
            f"{cann!r} is neither a CANN version such as 8.5.0 nor a variant of {op_type}{told}"
        )
    stated = [v for v in known if v.cann is not None]
    fitting = [v for v in stated if (release(v.cann or "") or asked) <= asked]
    if not fitting:
        first = f"; the first is of CANN {stated[0].cann}" if stated else ""
        raise UnknownVariant(f"no variant of {op_type} is known for CANN {cann}{first}")
    return fitting[-1]


def meant(cann: str, known: Iterable[str] = ()) -> str:
    """The end of a message about a text that is no CANN version: what was probably meant, a version
    that is written in another way or one of the `known` variants. Empty if that is not known."""
    written = _ALMOST.fullmatch(cann.strip())
    if written is not None:
        major, rest = written.groups()
        return f", did you mean '{major}.{rest.replace(',', '.').lstrip('.') or '0'}'?"
    close = difflib.get_close_matches(cann, known, n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def later_attrs(spec: OpSpec) -> dict[str, AttrValue | None]:
    """The attributes that the newest variant has and `spec` lacks, with their defaults. A call of
    the older variant means these values. Code that computes a call adds them and then need not
    distinguish the variants."""
    return {
        entry.name: entry.value_if_absent
        for entry in get(spec.name).attrs
        if entry.name not in spec.attr_names
    }


@cache
def newest() -> str:
    """The newest CANN of which the registry has a prototype."""
    stated = [variant.cann for name in names() for variant in variants(name) if variant.cann]
    return max(stated, key=lambda version: release(version) or ())


def release(text: str) -> tuple[int, int, int, int] | None:
    """A CANN version as a sortable tuple (major, minor, patch, 0 if alpha else 1), or None if the
    text is not a version. Raises TypeError for a number: 8.10 would be 8.1."""
    if not isinstance(text, str):
        raise TypeError(f"`cann` is a text such as '8.5.0', not {text!r}")
    match = _RELEASE.fullmatch(text)
    if match is None:
        return None
    major, minor, patch, stage = match.groups()
    before = stage.lower().lstrip(".-").startswith("alpha")
    return int(major), int(minor), int(patch or 0), 0 if before else 1
