"""Rules of the prototypes: an operator has the inputs, outputs and attributes of its REG_OP, in its
order and types.

GE's graph layer checks none of these rules. The effect of a violation on the compiled model is not
known.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.lowering.ascend.graph import Model, Op, TensorDesc
from fa_compiler.op_registry.errors import suggestion
from fa_compiler.op_registry.ge_prototypes import ge_operators, ge_prototype
from fa_compiler.op_registry.ge_types import input_types
from fa_compiler.op_registry.spec import Kind, OpSpec, TensorSpec

UNKNOWN_OP = Rule("unknown-op", Severity.LATER, "use an operator of GE")
INPUT_NAME = Rule("input-name", Severity.WRONG, "name the inputs as the prototype does")
OUTPUT_NAME = Rule("output-name", Severity.WRONG, "name the outputs as the prototype does")
REQUIRED_INPUT = Rule("required-input", Severity.WRONG, "connect it")
REQUIRED_OUTPUT = Rule("required-output", Severity.WRONG, "declare all outputs of the prototype")
INPUT_ORDER = Rule("input-order", Severity.WRONG, "put the inputs in the order of the prototype")
OUTPUT_ORDER = Rule("output-order", Severity.WRONG, "put the outputs in the order of the prototype")
DYNAMIC = Rule(
    "dynamic-input", Severity.WRONG, "number the tensors of a dynamic input 0, 1, 2 and so on"
)
DTYPE = Rule(
    "dtype", Severity.WRONG, "use a type the prototype lists, with a Cast before the operator"
)
REQUIRED_ATTR = Rule("required-attr", Severity.WRONG, "write the attribute")
ATTR_KIND = Rule("attr-kind", Severity.WRONG, "write the attribute in the kind of the prototype")
UNKNOWN_ATTR = Rule(
    "unknown-attr", Severity.NOTE, "GE ignores it; leave it out or check its spelling"
)

_GE_OWN = ("NetOutput",)
"""Operators that GE makes itself; their form varies."""


def check(model: Model) -> list[FileDiagnostic]:
    """The diagnostics of all operators."""
    return [diagnostic for graph in model.graphs for op in graph.ops for diagnostic in check_op(op)]


def check_op(op: Op) -> Iterator[FileDiagnostic]:
    """The diagnostics of one operator."""
    if op.type in _GE_OWN:
        return
    spec = ge_prototype(op.type)
    if spec is None:
        yield UNKNOWN_OP(
            op.name, f"GE has no operator {op.type}{suggestion(op.type, ge_operators())}"
        )
        return
    if op.type not in ("Data", "Const", "Constant"):
        yield from _tensors(op, spec, op.input_descs, "input", INPUT_NAME, INPUT_ORDER)
        yield from _tensors(op, spec, op.output_descs, "output", OUTPUT_NAME, OUTPUT_ORDER)
        yield from _required(op, spec)
    yield from _attrs(op, spec)


def entry_of(entries: Sequence[TensorSpec], name: str) -> tuple[TensorSpec, int] | None:
    """The input or output of a prototype to which the name of a descriptor belongs, and its number
    if it is dynamic."""
    for entry in entries:
        if entry.kind is not Kind.DYNAMIC and entry.name == name:
            return entry, 0
    for entry in entries:
        if entry.kind is Kind.DYNAMIC and (
            found := re.fullmatch(re.escape(entry.name) + r"(\d{1,9})", name)
        ):
            return entry, int(found[1])
    return None


def _tensors(
    op: Op, spec: OpSpec, descs: Sequence[TensorDesc], side: str, unknown: Rule, order: Rule
) -> Iterator[FileDiagnostic]:
    entries: Sequence[TensorSpec] = spec.inputs if side == "input" else spec.outputs
    last = -1
    counts: dict[str, int] = {}
    for anchor, desc in enumerate(descs):
        found = entry_of(entries, desc.name)
        if found is None:
            if desc.name:
                hint = suggestion(desc.name, [entry.name for entry in entries])
                yield unknown(op.name, f"{op.type} has no {side} {desc.name}{hint}")
            continue
        entry, number = found
        place = list(entries).index(entry)
        if place < last:
            yield order(
                op.name,
                f"{side} {desc.name} is at {anchor}, after one that follows it in the prototype",
            )
        last = max(last, place)
        if entry.kind is Kind.DYNAMIC:
            if number != counts.get(entry.name, 0):
                yield DYNAMIC(
                    op.name,
                    f"{desc.name} stands where {entry.name}{counts.get(entry.name, 0)} should",
                )
            counts[entry.name] = counts.get(entry.name, 0) + 1
        legal = input_types(spec, entry.name) if side == "input" else entry.dtypes
        if not desc.is_absent and legal and desc.dtype not in legal:
            yield DTYPE(
                op.name, f"{side} {desc.name} is {desc.dtype}, {op.type} takes {', '.join(legal)}"
            )


def _required(op: Op, spec: OpSpec) -> Iterator[FileDiagnostic]:
    pairs = zip(op.input_descs, [*op.inputs, *[None] * len(op.input_descs)], strict=False)
    given = {
        found[0].name
        for desc, source in pairs
        if source and (found := entry_of(spec.inputs, desc.name))
    }
    for entry in spec.inputs:
        if entry.kind is Kind.REQUIRED and entry.name not in given:
            yield REQUIRED_INPUT(op.name, f"{op.type} needs the input {entry.name}")
    made = {
        found[0].name for desc in op.output_descs if (found := entry_of(spec.outputs, desc.name))
    }
    for output in spec.outputs:
        if output.kind is Kind.REQUIRED and output.name not in made:
            yield REQUIRED_OUTPUT(
                op.name, f"{op.type} has the output {output.name}, which is not declared"
            )


def _attrs(op: Op, spec: OpSpec) -> Iterator[FileDiagnostic]:
    for entry in spec.attrs:
        attr = op.attrs.get(entry.name)
        if attr is None:
            if entry.required:
                yield REQUIRED_ATTR(
                    op.name, f"{op.type} needs the attribute {entry.name} ({entry.type})"
                )
        elif attr.kind != entry.type:
            yield ATTR_KIND(
                op.name,
                f"attribute {entry.name} is of type {attr.kind}, {op.type} wants {entry.type}",
            )
    for name in op.attrs:
        if name not in spec.attr_names and not name.startswith("_"):
            yield UNKNOWN_ATTR(
                op.name, f"{op.type} has no attribute {name}{suggestion(name, spec.attr_names)}"
            )
