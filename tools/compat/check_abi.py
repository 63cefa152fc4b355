"""Compare our declarations of ONNX Runtime's C interface with its headers, one release after the other.

    python -m tools.compat.check_abi FOLDER... [--write]

The folders are searched for onnxruntime_c_api.h. `--write` adds their releases to tests/lowering/abi_slots.tsv. Without
it, a release that the table was not written from is a fault, too. The exit code is 1 if there is a fault.

The headers are read twice: as text (tests/lowering/abi.py), and by the C++ compiler, which confirms each line that the
text gives, and compares our declarations with ONNX Runtime's by their types.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.lowering import abi
from tests.lowering.abi import Declaration, Interface, Member

PRELUDE = """
template <class T> struct Plain { using type = T; };
template <class R, class... A> struct Plain<R (*)(A...) noexcept> { using type = R (*)(A...); };
template <class T> using plain = typename Plain<T>::type;

template <class T> struct Ours { using type = T; };
template <class T> struct Ours<const T> { using type = const typename Ours<T>::type; };
template <class T> struct Ours<T*> { using type = typename Ours<T>::type*; };
template <class R, class... A> struct Ours<R(A...)> { using type = typename Ours<R>::type(typename Ours<A>::type...); };
template <class T> using ours = typename Ours<plain<T>>::type;

template <class Signature> Signature* function(const ort::Slot<Signature>&);
namespace ort { using namespace ep; }
"""
"""`plain` removes noexcept, `ours` gives a type of ONNX Runtime our names, `function` has the type of a slot."""


def found(folders: Sequence[Path]) -> dict[Path, str]:
    """The folders with headers, in the order of the releases, and the text of all headers. Equal ones count once."""
    texts: dict[str, Path] = {}
    for header in sorted(path for folder in folders for path in folder.rglob("onnxruntime_c_api.h")):
        parts = (header.with_name(name) for name in abi.HEADERS)
        text = "\n".join(part.read_text() for part in parts if part.exists())
        texts.setdefault(text, header.parent)
    return {folder: text for text, folder in sorted(texts.items(), key=lambda item: abi.release_of(item[0]))}


def unlike_table(header: Interface, table: Interface, release: int) -> Iterator[str]:
    """What the header of a release says otherwise than the table."""
    for key in sorted(header.keys() | table.keys()):
        if header.get(key) != table.get(key):
            yield (
                f"{abi.TABLE.name}: {'.'.join(key)} is {shown(table.get(key))} in 1.{release}, "
                f"but {shown(header.get(key))} in the header"
            )


def shown(member: Member | None) -> str:
    return "missing" if member is None else f"slot {member.slot} `{member.signature}`"


def compiled(folder: Path, theirs: Interface, ours: Sequence[Declaration]) -> Iterator[str]:
    """What the compiler finds different: between the headers and what was read in them, and between them and ours."""
    program = [
        "#include <cstddef>",
        "#include <type_traits>",
        f'#include "{folder.resolve()}/onnxruntime_c_api.h"',
        *(f'#include "{abi.SOURCES.resolve()}/{file}"' for file in abi.OURS),
        PRELUDE,
        *types(theirs, ours),
        *(f'static_assert({condition}, "{what}");' for what, condition in (*read(theirs), *declared(theirs, ours))),
    ]
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch, "abi.cc")
        source.write_text("\n".join(program) + "\n")
        command = [os.environ.get("CXX", "c++"), "-std=c++20", "-fsyntax-only", str(source)]
        result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        errors = re.findall(r"error: (.*)", result.stderr)
        yield from (f"the compiler: {error}" for error in errors or [result.stderr])


def types(theirs: Interface, ours: Sequence[Declaration]) -> Iterator[str]:
    """Specialisations of Ours for the types that our declarations use."""
    used = " ".join(theirs[one.owner, one.name].signature for one in ours if one.signature not in ("", abi.PLACE))
    for table in ("OrtApi", "OrtEpApi"):
        if any(owner == table for owner, _ in theirs):
            yield f"template <> struct Ours<const {table}*> {{ using type = ort::Api; }};"
    for name in sorted(set(re.findall(r"\b(?:Ort|ONNX)\w+", used)) - {"OrtApi", "OrtEpApi"}):
        yield f"template <> struct Ours<{name}> {{ using type = ort::{abi.translated(name)}; }};"


def read(theirs: Interface) -> Iterator[tuple[str, str]]:
    """What has to hold if the text was read right: each member with its place and type, and no further ones."""
    for member in theirs.values():
        what = f"{member.owner}.{member.name} as it was read in the header"
        if not member.signature:
            yield what, f"int({member.name}) == {member.slot}"
            continue
        result, parenthesis, parameters = member.signature.partition("(")
        kind = f"{result}(*)({parameters}" if parenthesis else result
        name = member.name if member.owner == "typedef" else f"decltype({member.owner}::{member.name})"
        yield what, f"std::is_same_v<plain<{name}>, {kind}>"
        if parenthesis and member.owner != "typedef":
            yield what, f"offsetof({member.owner}, {member.name}) == {member.slot} * sizeof(void*)"
    for struct in abi.STRUCTS:
        count = sum(member.owner == struct for member in theirs.values())
        if count:
            yield f"{struct} has {count} members", f"sizeof({struct}) <= {count} * sizeof(void*)"


def declared(theirs: Interface, ours: Sequence[Declaration]) -> Iterator[tuple[str, str]]:
    """What has to hold of our declarations."""
    for one in ours:
        what = f"{one.ours} of {one.file} as {one.owner}.{one.name}"
        name = f"ort::{one.ours}"
        if one.owner in ("OrtApi", "OrtEpApi"):
            yield what, f"{name}.index * sizeof(void*) == offsetof({one.owner}, {one.name})"
            yield what, f"std::is_same_v<decltype(function({name})), ours<decltype({one.owner}::{one.name})>>"
        elif one.owner in abi.STRUCTS:
            struct, _, field = name.rpartition("::")
            yield what, f"offsetof({struct}, {field}) == offsetof({one.owner}, {one.name})"
            if one.signature != abi.PLACE:
                yield what, f"std::is_same_v<decltype({name}), ours<decltype({one.owner}::{one.name})>>"
        elif one.owner in abi.ENUMS:
            yield what, f"int({name}) == int({one.name})"


def faults_of(folder: Path, text: str, declarations: Sequence[Declaration], table: Interface | None) -> list[str]:
    """What is wrong with the release of a header: with our declarations, or with the table, if it has the release."""
    release, theirs = abi.release_of(text), abi.by_name(abi.members(text))
    ours = [one for one in declarations if abi.compared(one, theirs, release)]
    found = abi.differences(ours, theirs, release) or list(compiled(folder, theirs, ours))
    print(f"ONNX Runtime 1.{release}: {len(ours)} declarations compared")
    return found + list(unlike_table(theirs, theirs if table is None else table, release))


def main() -> int:
    """Print a line for each release, and one for each fault."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", metavar="FOLDER", nargs="+", type=Path)
    parser.add_argument("--write", action="store_true", help="add the releases to the table")
    arguments = parser.parse_args()
    table = abi.read_table(abi.TABLE.read_text()) if abi.TABLE.exists() else {}
    declarations = abi.declarations(abi.sources())
    headers = found(arguments.folders)
    if not headers:
        sys.exit("error: no onnxruntime_c_api.h in " + ", ".join(map(str, arguments.folders)))
    faults: list[str] = []
    for folder, text in headers.items():
        release = abi.release_of(text)
        try:
            faults += faults_of(folder, text, declarations, table.get(release))
        except ValueError as error:
            sys.exit(f"error: {folder}: {error}")
        if release not in table and not arguments.write:
            faults.append(f"{abi.TABLE.name} was not written from ONNX Runtime 1.{release}; --write adds it")
        table.setdefault(release, abi.by_name(abi.members(text)))
    for fault in faults:
        print(fault)
    if arguments.write:
        abi.TABLE.write_text(abi.written_table(table))
    return int(faults != [])


if __name__ == "__main__":
    sys.exit(main())
