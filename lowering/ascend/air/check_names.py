"""Rules of name maps and attributes: faults that the loader does not report, but that change the
graph it reads."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.lowering.ascend.air.decode import META
from fa_compiler.lowering.ascend.air.schema import LISTS, ListValue, Proto
from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity

MISSING = Rule("name-map", Severity.WRONG, "write _{side}_name_key and _{side}_name_value")
UNEQUAL = Rule("name-map-length", Severity.WRONG, "write one position for each name")
PAST = Rule("name-map-past-descs", Severity.LATER, "name only descriptors that exist")
PAST_OUTPUTS = Rule("name-map-past-outputs", Severity.WRONG, "name only descriptors that exist")
TWICE = Rule("name-map-twice", Severity.WRONG, "give each name its own position")
UNNAMED = Rule("name-map-incomplete", Severity.WRONG, "name every descriptor")
LOST = Rule(
    "lost-attr", Severity.WRONG, "set val_type on every list, and a value in every attribute"
)
MIXED = Rule("list-kind", Severity.WRONG, "fill the field that val_type names, and no other")
EXPRESSION = Rule(
    "expression-attr", Severity.REJECTED, "write the attribute as a value of another kind"
)
UNKNOWN_KIND = Rule(
    "list-kind-unknown", Severity.REJECTED, "set val_type to one of GE's kinds of list"
)
GRAPH_NAME = Rule("empty-graph-name", Severity.NOTE, "give it a name")

_FIELDS = {kind: field for kind, (field, _) in LISTS.items()}


def rejections(model: Proto) -> Iterator[FileDiagnostic]:
    """The attributes, of any part of the model, for which the loader rejects a file."""
    yield from _unreadable("", model.attr)
    for graph in model.graph:
        yield from _graph_rejections(graph)


def _graph_rejections(graph: Proto) -> Iterator[FileDiagnostic]:
    yield from _unreadable(graph.name, graph.attr)
    for op in graph.op:
        yield from _unreadable(op.name, op.attr)
        for desc in (*op.input_desc, *op.output_desc):
            yield from _unreadable(op.name, desc.attr)


def _unreadable(node: str, attrs: Proto) -> Iterator[FileDiagnostic]:
    for name, attr in attrs.items():
        field = attr.WhichOneof("value")
        if field == "expression":
            yield EXPRESSION(node, f"the loader does not read the expression in attribute {name}")
        elif field == "list":
            if attr.list.val_type not in (ListValue.VT_LIST_NONE, *_FIELDS):
                yield UNKNOWN_KIND(
                    node, f"the list {name} is of kind {attr.list.val_type}, which GE does not have"
                )
            for inner in attr.list.na:
                yield from _unreadable(node, inner.attr)
            for graph in attr.list.g:
                yield from _graph_rejections(graph)
        elif field == "func":
            yield from _unreadable(node, attr.func.attr)
        elif field == "td":
            yield from _unreadable(node, attr.td.attr)
        elif field == "t":
            yield from _unreadable(node, attr.t.desc.attr)
        elif field == "g":
            yield from _graph_rejections(attr.g)


def check(graph: Proto) -> Iterator[FileDiagnostic]:
    """The diagnostics of one graph."""
    if not graph.name:
        yield GRAPH_NAME("", "a graph has an empty name")
    for op in graph.op:
        yield from _map(op, "input", len(op.input_desc))
        yield from _map(op, "output", len(op.output_desc))
        yield from _attrs(op.name, op.attr)
        for desc in (*op.input_desc, *op.output_desc):
            yield from _attrs(op.name, desc.attr)


def _map(op: Proto, side: str, count: int) -> Iterator[FileDiagnostic]:
    names, places = f"_{side}_name_key", f"_{side}_name_value"
    keys = list(op.attr[names].list.s) if names in op.attr else []
    values = list(op.attr[places].list.i) if places in op.attr else []
    if len(keys) != len(values):
        yield UNEQUAL(
            op.name, f"{names} has {len(keys)} names for {len(values)} positions: GE drops the map"
        )
        return
    if count and not keys:
        hint = MISSING.hint.format(side=side)
        yield MISSING(op.name, f"its {side}s have no name map: GE finds {side}s by name", hint)
        return
    for key, value in zip(keys, values, strict=True):
        if not 0 <= value < count:
            text = f"{side} {key.decode(errors='replace')} is said to be number {value} of {count}"
            if side == "input":
                yield PAST(op.name, f"{text}: GE crashes on that")
            else:
                yield PAST_OUTPUTS(
                    op.name, f"{text}: GE keeps the name for an output that is not there"
                )
    if len({*keys}) < len(keys) or len({*values}) < len(values):
        yield TWICE(op.name, f"{names} gives a name or a position twice")
    elif len(keys) < count:
        yield UNNAMED(op.name, f"{names} names {len(keys)} of {count} {side}s")


def _attrs(node: str, attrs: Proto) -> Iterator[FileDiagnostic]:
    for name, attr in attrs.items():
        field = attr.WhichOneof("value")
        if field is None:
            yield LOST(node, f"attribute {name} has no value: GE leaves it out")
        elif field == "list" and name not in META:
            yield from _list(node, name, attr.list)


def _list(node: str, name: str, value: Proto) -> Iterator[FileDiagnostic]:
    if value.val_type not in _FIELDS:
        yield LOST(
            node, f"the list {name} has no kind (val_type {value.val_type}): GE leaves it out"
        )
        return
    filled = [field for field in _FIELDS.values() if getattr(value, field)]
    wanted = _FIELDS[value.val_type]
    if any(field != wanted for field in filled):
        yield MIXED(
            node, f"the list {name} has values in {', '.join(filled)}, but its kind reads {wanted}"
        )
