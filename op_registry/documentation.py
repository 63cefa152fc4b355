"""Texts about an operator, its tensors and its attributes, for the schemas that other tools show.

They come from the operator's file: its first line, what the shape function says of the outputs, and
the constraints.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Iterator

from fa_compiler.op_registry.registry import extensions_of, get, operator
from fa_compiler.op_registry.spec import AttrSpec, InputSpec, Kind, OpSpec, OutputSpec


def of_operator(spec: OpSpec) -> str:
    """What the operator is, what it gives, and all its constraints with their numbers."""
    record = operator(spec.name)
    module = sys.modules[record.infer.__module__].__doc__ or spec.name
    lines = [
        module.partition("\n")[0],
        f"The schema is the variant {spec.variant} of the prototype. An attribute that begins with cpu_ is an "
        "extension of the CPU kernel, which Ascend does not have.",
        _plain(record.infer.__doc__),
        *(f"{number}: {text}" for number, text, _ in _constraints(spec.name)),
    ]
    return "\n".join(line for line in lines if line)


def constraints(op: str) -> list[tuple[str, str]]:
    """The number of each constraint that a message may name, and what it demands. Raises
    UnknownOp."""
    return [(number, text) for number, text, _ in _constraints(get(op).name)]


def of_input(spec: OpSpec, entry: InputSpec) -> str:
    """Whether the input is required, since which variant there is one, and the constraints that
    name it."""
    kind = {
        Kind.REQUIRED: "Required",
        Kind.OPTIONAL: "Optional",
        Kind.DYNAMIC: "A list of tensors",
    }[entry.kind]
    return " ".join([f"{kind}; since the variant {entry.since}.", *_about(spec, entry.name)])


def of_output(spec: OpSpec, entry: OutputSpec) -> str:
    """What the shape function says of the output."""
    sentences = re.split(r"(?<=\.)\s+", _plain(operator(spec.name).infer.__doc__))
    return (
        " ".join(text for text in sentences if entry.name in _words(text))
        or f"Since the variant {entry.since}."
    )


def of_attribute(spec: OpSpec, entry: AttrSpec) -> str:
    """What is special about the attribute, and the constraints that name it; of an extension what
    it does."""
    own = [
        extension.sentence for extension in extensions_of(spec.name) if extension.attr == entry.name
    ]
    counted = entry.name.removesuffix("_count")
    if counted != entry.name and entry.name not in spec.attr_names:
        return f"The number of tensors in the list {counted}."
    since = [] if entry.since is None else [f"Since the variant {entry.since}."]
    return " ".join(
        [*since, *([entry.note] if entry.note else []), *own, *_about(spec, entry.name)]
    )


def _about(spec: OpSpec, name: str) -> Iterator[str]:
    return (
        f"{text} ({number})" for number, text, words in _constraints(spec.name) if name in words
    )


@functools.cache
def _constraints(op: str) -> tuple[tuple[str, str, frozenset[str]], ...]:
    """The number of each constraint, its sentences, and the words in them."""
    rules = operator(op).rules
    texts = (
        (f"{rules.prefix}.{number}", rule.text) for number, rule in sorted(rules.table.items())
    )
    return tuple((number, text, _words(text)) for number, text in texts)


def _plain(text: str | None) -> str:
    return " ".join((text or "").split())


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))
