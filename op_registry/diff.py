"""The differences between the prototypes of an installed CANN and those of the registry.

The headers of an installation (REG_OP text) are compared operator by operator with a variant of the
registry. A difference is *serious* if the installed CANN could refuse a node we write, or read it
wrongly. The other differences are for information only: for example what the installation has and
we do not use.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import NoReturn

from fa_compiler.op_registry.errors import RegistryError, RegOpSyntaxError, UnknownVariant
from fa_compiler.op_registry.reg_op import Parsed, Unreadable, parse_file
from fa_compiler.op_registry.registry import get, meant, names, release, variants
from fa_compiler.op_registry.spec import AttrSpec, Kind, OpSpec, TensorSpec

HEADER_SUFFIXES = (".h", ".hpp", ".hh", ".inc")

_WHERE = (
    "the prototypes of CANN are in the headers of $ASCEND_HOME_PATH/opp/built-in/op_proto/inc; CANN's set_env.sh sets "
    "this variable"
)


class Change(StrEnum):
    """The kinds of difference. "missing" means that we write something the header lacks, "extra"
    that the header has something our prototype lacks."""

    MISSING_OP = "missing op"
    UNREADABLE = "unreadable"
    NOT_COMPARED = "not compared"
    OTHER_VARIANT = "other variant"
    MISSING_INPUT = "missing input"
    EXTRA_INPUT = "extra input"
    INPUT_ORDER = "input order"
    INPUT_KIND = "input kind"
    INPUT_TYPES = "input types"
    MISSING_OUTPUT = "missing output"
    EXTRA_OUTPUT = "extra output"
    OUTPUT_ORDER = "output order"
    OUTPUT_KIND = "output kind"
    OUTPUT_TYPES = "output types"
    MISSING_ATTR = "missing attribute"
    EXTRA_ATTR = "extra attribute"
    ATTR_TYPE = "attribute type"
    ATTR_REQUIRED = "attribute required"
    ATTR_DEFAULT = "attribute default"


@dataclass(frozen=True)
class Difference:
    """One difference. `ours` and `theirs` are the two states as text. `where` is the place of the
    header as "file:line", or "" if no header declares the operator. `name` is the input, output or
    attribute, or "" if the whole operator is meant."""

    op: str
    change: Change
    name: str
    ours: str
    theirs: str
    sentence: str
    where: str
    serious: bool

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.op}: {self.sentence}"


_MakeDifference = Callable[[Change, str, str, str, str, bool], Difference]
"""Makes a Difference of one operator. The arguments are change, name, ours, theirs, sentence and
serious."""


def diff_paths(paths: Sequence[str | Path], cann: str | None = None) -> list[Difference]:
    """Compares the headers in `paths` (files, or folders that are searched) with the registry.

    `cann` chooses the variants to compare with, as in `get`. An operator that has no such variant
    is not compared, and each of its headers is reported as such. A prototype that cannot be read is
    reported as a difference. An operator without a prototype is a serious difference in a folder;
    single files need not declare all operators. Raises RegistryError if a path cannot be read or if
    there is no prototype at all, and UnknownVariant if `cann` fits no operator.
    """
    expected = _expected(cann)
    wanted = _names()
    entries = [entry for path in _files(paths) for entry in parse_file(path, only=wanted)]
    if not entries:
        raise RegistryError(f"no REG_OP prototype in {_listed(paths)}; {_WHERE}")
    found = [
        difference
        for name in wanted
        for difference in _diff_headers(name, entries, expected.get(name), cann)
    ]
    if any(Path(path).is_dir() for path in paths):
        return found
    if {entry.change for entry in found} == {Change.MISSING_OP} and len(found) == len(expected):
        raise RegistryError(
            f"no prototype of an operator of the registry in {_listed(paths)}; {_WHERE}"
        )
    return [
        replace(entry, serious=entry.serious and entry.change is not Change.MISSING_OP)
        for entry in found
    ]


def _listed(paths: Sequence[str | Path]) -> str:
    return ", ".join(map(str, paths))


def _diff_headers(
    name: str, entries: Sequence[Parsed | Unreadable], ours: OpSpec | None, cann: str | None
) -> Iterator[Difference]:
    """The differences of all headers of one operator. `ours` is None if no variant of it is known
    for `cann`."""
    unreadable = [
        entry.error for entry in entries if isinstance(entry, Unreadable) and entry.op == name
    ]
    errors = [error for error in unreadable if error]
    headers = _distinct(
        entry for entry in entries if isinstance(entry, Parsed) and entry.spec.name == name
    )
    for error in errors:
        yield _unreadable(name, error)
    for entry in headers:
        if ours is None:
            yield _not_compared(entry, cann)
        else:
            yield from diff_op(ours, entry.spec, f"{entry.path}:{entry.line}")
    if ours is not None and not headers and not errors:
        yield Difference(
            name, Change.MISSING_OP, "", name, "", "no header declares it", "", serious=True
        )


def diff_op(ours: OpSpec, theirs: OpSpec, where: str = "") -> list[Difference]:
    """The differences of one operator: first the inputs, then outputs and attributes. If the header
    is another of our variants, the first difference says so."""

    def difference(
        change: Change, name: str, own: str, other: str, sentence: str, serious: bool
    ) -> Difference:
        return Difference(ours.name, change, name, own, other, sentence, where, serious)

    found = [
        *_diff_tensors(difference, "input", ours.inputs, theirs.inputs),
        *_diff_tensors(difference, "output", ours.outputs, theirs.outputs),
        *_diff_attrs(difference, ours.attrs, theirs.attrs),
    ]
    other = next((v for v in variants(ours.name) if _same(v, theirs)), None) if found else None
    if other is not None:
        release_text = f" (from CANN {other.cann})" if other.cann else ""
        stated = other.cann is not None and get(ours.name, other.cann) == other
        asked = other.cann if stated else other.variant
        sentence = (
            f"the header is our variant {other.variant}{release_text}: compare with --cann {asked}"
        )
        found.insert(
            0, difference(Change.OTHER_VARIANT, "", ours.variant, other.variant, sentence, False)
        )
    return found


def _diff_tensors(
    make: _MakeDifference, what: str, ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]
) -> Iterator[Difference]:
    own, other = {entry.name: entry for entry in ours}, {entry.name: entry for entry in theirs}
    for name in _without(own, other):
        sentence = f"{what} {name} is missing in the header"
        yield make(Change(f"missing {what}"), name, own[name].kind, "", sentence, True)
    for name in _without(other, own):
        kind = other[name].kind
        sentence = f"{what} {name} ({kind}) is not in our prototype"
        required = what == "input" and kind is not Kind.OPTIONAL
        yield make(Change(f"extra {what}"), name, "", kind, sentence, required)
    here, there = [name for name in own if name in other], [name for name in other if name in own]
    if here != there:
        first = next(name for name, same in zip(here, there, strict=True) if name != same)
        sentence = f"the {what}s are in another order, from {first} on: {', '.join(there)}"
        yield make(
            Change(f"{what} order"), first, ", ".join(here), ", ".join(there), sentence, True
        )
    for name in here:
        yield from _diff_tensor(make, what, own[name], other[name])


def _without(names: Iterable[str], others: Container[str]) -> list[str]:
    """The names that are not among the others."""
    return [name for name in names if name not in others]


def _diff_tensor(
    make: _MakeDifference, what: str, ours: TensorSpec, theirs: TensorSpec
) -> Iterator[Difference]:
    name = ours.name
    if ours.kind is not theirs.kind:
        sentence = f"{what} {name} is {theirs.kind} in the header, {ours.kind} in our prototype"
        # We may leave out a tensor that is optional in our prototype. A dynamic tensor is written
        # differently.
        serious = Kind.DYNAMIC in (ours.kind, theirs.kind) or theirs.kind is Kind.REQUIRED
        yield make(Change(f"{what} kind"), name, ours.kind, theirs.kind, sentence, serious)
    change = Change(f"{what} types")
    if re.search(r"\bALL\(\)", theirs.written):
        return
    if not theirs.dtypes or re.search(r"\w\(\)", theirs.written):
        sentence = (
            f"{what} {name} has the types {theirs.written} in the header, which is not compared"
        )
        yield make(change, name, ours.written, theirs.written, sentence, False)
        return
    missing = [dtype for dtype in ours.dtypes if dtype not in theirs.dtypes]
    extra = [dtype for dtype in theirs.dtypes if dtype not in ours.dtypes]
    if missing or extra:
        parts = [f"lacks {', '.join(missing)}"] if missing else []
        parts += [f"also takes {', '.join(extra)}"] if extra else []
        sentence = f"{what} {name} {' and '.join(parts)} in the header"
        yield make(
            change, name, ", ".join(ours.dtypes), ", ".join(theirs.dtypes), sentence, bool(missing)
        )


def _diff_attrs(
    make: _MakeDifference, ours: Sequence[AttrSpec], theirs: Sequence[AttrSpec]
) -> Iterator[Difference]:
    own, other = {entry.name: entry for entry in ours}, {entry.name: entry for entry in theirs}
    for name in _without(own, other):
        sentence = f"attribute {name} is missing in the header; we always write it"
        yield make(Change.MISSING_ATTR, name, _attr_text(own[name]), "", sentence, True)
    for name in _without(other, own):
        sentence = f"attribute {name} ({_attr_text(other[name])}) is not in our prototype"
        yield make(
            Change.EXTRA_ATTR, name, "", _attr_text(other[name]), sentence, other[name].required
        )
    for name in (name for name in own if name in other):
        a, b = own[name], other[name]
        if a.type != b.type:
            sentence = (
                f"attribute {name} is of type {b.type} in the header, {a.type} in our prototype"
            )
            yield make(Change.ATTR_TYPE, name, a.type, b.type, sentence, True)
        elif a.required != b.required:
            sentence = f"attribute {name} is {_attr_text(b)} in the header, {_attr_text(a)} in our prototype"
            yield make(Change.ATTR_REQUIRED, name, _attr_text(a), _attr_text(b), sentence, False)
        elif a.default != b.default:
            sentence = f"attribute {name} has the default {b.written} in the header, {a.written} in our prototype"
            yield make(Change.ATTR_DEFAULT, name, str(a.written), str(b.written), sentence, False)


def _attr_text(entry: AttrSpec) -> str:
    return f"{entry.type}, required" if entry.required else f"{entry.type}, default {entry.written}"


def _same(ours: OpSpec, theirs: OpSpec) -> bool:
    """Whether two prototypes agree in everything except the spelling of types and defaults."""

    def facts(spec: OpSpec) -> object:
        tensors = [
            (entry.name, entry.kind, frozenset(entry.dtypes))
            for entry in (*spec.inputs, *spec.outputs)
        ]
        return tensors, [(attr.name, attr.type, attr.required, attr.default) for attr in spec.attrs]

    return facts(ours) == facts(theirs)


def _names() -> tuple[str, ...]:
    """The operators of CANN. Those that are this package's own stand in no header of it, and in no
    node for ATC."""
    return tuple(name for name in names() if not get(name).variant.startswith("fa_compiler_"))


def _expected(cann: str | None) -> dict[str, OpSpec]:
    expected: dict[str, OpSpec] = {}
    problem: UnknownVariant | None = None
    for name in _names():
        try:
            expected[name] = get(name, cann)
        except UnknownVariant as error:
            problem = problem or error
    if not expected and problem is not None:
        if cann is not None and release(cann) is None:
            sentence = "is neither a CANN version such as 8.5.0 nor a variant of any operator"
            raise UnknownVariant(f"{cann!r} {sentence}{meant(cann)}")
        raise problem
    return expected


def _unreadable(op: str, error: RegOpSyntaxError) -> Difference:
    where = f"{error.path}:{error.line}"
    sentence = f"cannot be read: {str(error).removeprefix(f'{where}: ')}"
    return Difference(op, Change.UNREADABLE, "", "", "", sentence, where, serious=True)


def _not_compared(entry: Parsed, cann: str | None) -> Difference:
    sentence = f"in the header, but no variant of it is known for {cann}"
    where = f"{entry.path}:{entry.line}"
    return Difference(
        entry.spec.name, Change.NOT_COMPARED, "", "", "", sentence, where, serious=False
    )


def _distinct(entries: Iterable[Parsed]) -> list[Parsed]:
    """The entries with different prototypes. Of equal prototypes only the first is kept, because
    headers are often installed several times."""
    kept: list[Parsed] = []
    for entry in entries:
        if all(entry.spec != other.spec for other in kept):
            kept.append(entry)
    return kept


def _refuse(error: OSError) -> NoReturn:
    """A folder that is left out could hold prototypes, which would then be missed without a
    word."""
    raise RegistryError(f"cannot read {error.filename}: {error.strerror or error}") from error


def _files(paths: Sequence[str | Path]) -> Iterator[Path]:
    for path in map(Path, paths):
        if path.is_dir():
            found = sorted(
                Path(folder) / name
                for folder, _, files in os.walk(path, onerror=_refuse)
                for name in files
            )
            yield from (file for file in found if file.suffix in HEADER_SUFFIXES and file.is_file())
        elif path.exists():
            yield path
        else:
            raise RegistryError(f"{path}: no such file or folder; {_WHERE}")
