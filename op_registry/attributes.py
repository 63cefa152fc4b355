"""All attributes of a node: those of its prototype, the tensor counts of dynamic inputs, and those
of the CPU kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fa_compiler.op_registry.errors import NodeError, suggestion
from fa_compiler.op_registry.node import attr_value
from fa_compiler.op_registry.registry import extensions_of, variants
from fa_compiler.op_registry.spec import AttrSpec, Kind, OpSpec


def known_attrs(spec: OpSpec, name: str) -> str:
    """The end of a message about an attribute that a prototype does not have: the CANN that has it,
    or else what was probably meant."""
    other = [
        variant.cann
        for variant in variants(spec.name)
        if name in variant.attr_names and variant.cann
    ]
    return (
        f"; CANN {other[0]} has it"
        if other
        else suggestion(name, (*spec.attr_names, *extra_attrs(spec)))
    )


def full_attrs(spec: OpSpec, attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Every attribute of `spec` in REG_OP order, with the given value or its default.

    The `<name>_count` and extension attributes that are given come after them. Each value is
    checked against the attribute's type and converted to it: 1 is a Float, but 8.0 is not an Int.
    Raises NodeError for an unknown attribute, a missing required one, a value of a wrong type, or a
    Float that is not a finite float32.
    """
    extra = extra_attrs(spec)
    for name in attrs:
        if name not in spec.attr_names and name not in extra:
            raise NodeError(f"{spec.name} has no attribute {name!r}{known_attrs(spec, name)}")
    full: dict[str, Any] = {}
    for entry in spec.attrs:
        if attrs.get(entry.name) is not None:
            full[entry.name] = attr_value(spec.name, entry, attrs[entry.name])
        elif entry.required:
            raise NodeError(f"{spec.name} needs the attribute {entry.name}")
        else:
            full[entry.name] = entry.value_if_absent
    for name, entry in extra.items():
        if attrs.get(name) is not None:
            full[name] = attr_value(spec.name, entry, attrs[name])
    return full


def extra_attrs(spec: OpSpec) -> dict[str, AttrSpec]:
    """The attributes that a node may have in addition to those of its prototype: tensor counts and
    extension attributes."""
    counts = [f"{entry.name}_count" for entry in spec.inputs if entry.kind is Kind.DYNAMIC]
    extended = [entry.spec for entry in extensions_of(spec.name)]
    return {
        **{name: AttrSpec(name, "Int", False, 1) for name in counts},
        **{entry.name: entry for entry in extended if entry is not None},
    }
