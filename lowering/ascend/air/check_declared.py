"""Rules of the prototype that a file itself declares in `_ir_inputs_*` and `_ir_attr_names`.

While GE compiles, it compares this declaration with the prototype of the installed CANN. Names and kinds have to agree
in order. The declaration may be shorter: GE appends the missing entries. It may also be longer, as in a file for a
newer CANN, if the operator does not use the entries that GE does not know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fa_compiler.lowering.ascend.air.decode import names_of, split_edge
from fa_compiler.lowering.ascend.air.schema import Proto
from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import Kind

INPUTS = Rule("declared-inputs", Severity.LATER, "leave _ir_inputs_key and _ir_inputs_value out: GE knows them")
ATTRS = Rule("declared-attrs", Severity.LATER, "leave _ir_attr_names out: GE knows them")

_KINDS = {Kind.REQUIRED: 0, Kind.OPTIONAL: 1, Kind.DYNAMIC: 2}


def check(graph: Proto) -> Iterator[FileDiagnostic]:
    """The diagnostics of one graph."""
    for op in graph.op:
        spec = ge_prototype(op.type)
        if spec is not None:
            yield from _inputs(op, [(entry.name, _KINDS[entry.kind]) for entry in spec.inputs])
            yield from _attrs(op, spec.attr_names)


def _inputs(op: Proto, known: Sequence[tuple[str, int]]) -> Iterator[FileDiagnostic]:
    names = _names(op, "_ir_inputs_key")
    kinds = list(op.attr["_ir_inputs_value"].list.i) if "_ir_inputs_value" in op.attr else []
    if len(names) != len(kinds):
        yield INPUTS(op.name, f"_ir_inputs_key has {len(names)} names, _ir_inputs_value {len(kinds)} kinds")
        return
    for place, (given, entry) in enumerate(zip(zip(names, kinds, strict=True), known, strict=False)):
        if given != entry:
            (name, kind), (right, wanted) = given, entry
            declaration = f"declares input {place} as {name!r} of kind {kind}"
            yield INPUTS(op.name, f"it {declaration}; {op.type} has {right!r} of kind {wanted} there")
            return
    connected = _connected(op)
    for name, kind in list(zip(names, kinds, strict=True))[len(known) :]:
        if kind != _KINDS[Kind.OPTIONAL] or name in connected:
            yield INPUTS(op.name, f"it declares the input {name!r}, which {op.type} does not have")


def _connected(op: Proto) -> set[str]:
    edges = [edge for edge in map(split_edge, op.input) if edge is None or edge[1] >= 0]
    names = names_of(op, "input") or {}
    return {names.get(place, "") for place, edge in enumerate(edges) if edge is not None}


def _attrs(op: Proto, known: Sequence[str]) -> Iterator[FileDiagnostic]:
    names = _names(op, "_ir_attr_names")
    for place, (name, right) in enumerate(zip(names, known, strict=False)):
        if name != right:
            yield ATTRS(op.name, f"it declares attribute {place} as {name!r}; {op.type} has {right!r} there")
            return
    for name in names[len(known) :]:
        if name in op.attr:
            yield ATTRS(op.name, f"it declares the attribute {name!r}, which {op.type} does not have")


def _names(op: Proto, key: str) -> list[str]:
    return [name.decode(errors="surrogateescape") for name in op.attr[key].list.s] if key in op.attr else []
