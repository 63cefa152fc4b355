"""Rules of the prototype that a file itself declares in `_ir_inputs_*`, `_ir_outputs_*` and
`_ir_attr_names`.

While GE compiles, it compares this declaration with the prototype of the installed CANN. Names and
kinds have to agree in order. The declaration may be shorter: GE appends the missing entries. It may
also be longer, as in a file for a newer CANN, if the operator does not use the entries that GE does
not know. A declaration with more names than kinds, or fewer, is dropped without an error.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence

from fa_compiler.lowering.ascend.air.decode import data_edges, names_of
from fa_compiler.lowering.ascend.air.schema import Proto
from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.op_registry.ge_prototypes import ge_prototype
from fa_compiler.op_registry.spec import Kind

INPUTS = Rule(
    "declared-inputs",
    Severity.LATER,
    "leave _ir_inputs_key and _ir_inputs_value out: GE knows them",
)
OUTPUTS = Rule(
    "declared-outputs",
    Severity.LATER,
    "leave _ir_outputs_key and _ir_outputs_value out: GE knows them",
)
DROPPED = Rule("declared-dropped", Severity.NOTE, "leave it out: GE knows it")
ATTRS = Rule("declared-attrs", Severity.LATER, "leave _ir_attr_names out: GE knows them")

_KINDS = {Kind.REQUIRED: 0, Kind.OPTIONAL: 1, Kind.DYNAMIC: 2}
_OUTPUT_KINDS = {Kind.REQUIRED: 0, Kind.DYNAMIC: 1}


def check(graph: Proto) -> Iterator[FileDiagnostic]:
    """The diagnostics of one graph."""
    for op in graph.op:
        spec = ge_prototype(op.type)
        if spec is not None:
            yield from _inputs(op, [(entry.name, _KINDS[entry.kind]) for entry in spec.inputs])
            yield from _outputs(
                op, [(entry.name, _OUTPUT_KINDS.get(entry.kind, 0)) for entry in spec.outputs]
            )
            yield from _attrs(op, spec.attr_names)


def _inputs(op: Proto, known: Sequence[tuple[str, int]]) -> Iterator[FileDiagnostic]:
    given = yield from _declared(op, "input", known, INPUTS)
    connected = _connected(op)
    for name, kind in given[len(known) :]:
        if kind != _KINDS[Kind.OPTIONAL] or name in connected:
            yield INPUTS(op.name, f"it declares the input {name!r}, which {op.type} does not have")


def _outputs(op: Proto, known: Sequence[tuple[str, int]]) -> Iterator[FileDiagnostic]:
    given = yield from _declared(op, "output", known, OUTPUTS)
    for name, _ in given[len(known) :]:
        yield OUTPUTS(op.name, f"it declares the output {name!r}, which {op.type} does not have")


def _declared(
    op: Proto, side: str, known: Sequence[tuple[str, int]], rule: Rule
) -> Generator[FileDiagnostic, None, list[tuple[str, int]]]:
    """The names and kinds that a file declares, after the diagnostics of those that are not the
    prototype's; none if GE drops them, or stops at one of them."""
    keys, values = f"_ir_{side}s_key", f"_ir_{side}s_value"
    names = _names(op, keys)
    kinds = list(op.attr[values].list.i) if values in op.attr else []
    if len(names) != len(kinds):
        yield DROPPED(
            op.name, f"{keys} has {len(names)} names, {values} {len(kinds)} kinds: GE drops both"
        )
        return []
    given = list(zip(names, kinds, strict=True))
    for place, ((name, kind), (right, wanted)) in enumerate(zip(given, known, strict=False)):
        if (name, kind) != (right, wanted):
            declaration = f"declares {side} {place} as {name!r} of kind {kind}"
            yield rule(op.name, f"it {declaration}; {op.type} has {right!r} of kind {wanted} there")
            return []
    return given


def _connected(op: Proto) -> set[str]:
    names = names_of(op, "input") or {}
    return {names.get(place, "") for place, edge in enumerate(data_edges(op)) if edge is not None}


def _attrs(op: Proto, known: Sequence[str]) -> Iterator[FileDiagnostic]:
    names = _names(op, "_ir_attr_names")
    for place, (name, right) in enumerate(zip(names, known, strict=False)):
        if name != right:
            yield ATTRS(
                op.name, f"it declares attribute {place} as {name!r}; {op.type} has {right!r} there"
            )
            return
    for name in names[len(known) :]:
        if name in op.attr:
            yield ATTRS(
                op.name, f"it declares the attribute {name!r}, which {op.type} does not have"
            )


def _names(op: Proto, key: str) -> list[str]:
    return (
        [name.decode(errors="surrogateescape") for name in op.attr[key].list.s]
        if key in op.attr
        else []
    )
