"""Judge the files of the sweep that have no verdict yet, and print the tables.

    PYTHONPATH=. python -m tools.sweep.report --state build/sweep [--only REGEX] [--again REGEX] [--details]

The state's folder `exports` comes from export.py, and `converted` from convert.py. Each file is judged in a process of
its own (judge.py), and its verdict is kept beside it, so a broken run continues. The exit code is 1 if a result is
wrong, if fa_compiler fails or refuses a model that ONNX Runtime runs, or if a file grows by a mask. It is 1, too, if
less than 98 % of the attentions are fused, or less than 98 % of the structures are kept, where there are 200 of them
or more: one layer of one model is 2 % of the sample that `make compat` takes.

    softmaxes     blocks of the report: softmaxes and attention operators
    attentions    those that are attention and for which there is an operator: fused or declined for another reason
    structures    fused attentions whose mask is causal, a window, key padding, or a window of keys with padding
    kept          those of which it is a mode of the operator, or a mask of one row
    wrong         models with another result than the original's; failed: in which fa_compiler raised an exception
    refused       models that fa_compiler refuses and ONNX Runtime runs; grown: files with a mask as a new constant
    *_vouched     fused and kept if the user vouches for what the hints name: that the numbers of masks outweigh scores,
                  which float16 does not prove, that masks hold 0 and 1, that no row is masked everywhere, and that
                  scores need not be rounded to 8 bits. The floor of structures counts these
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from tools.processes import HelperError, Server, module

FLOOR = 0.98
"""The share of attentions that has to be fused, and of structures that has to be kept."""
MANY = 200
"""The least number of which a share is judged."""
CONSTANT = 4096
"""A fused file whose constants are larger than the original's by more bytes than this holds a mask."""
QUANTISED = ("quantize", "bits")
"""Words in the names of converters that quantise."""

Verdict = dict[str, Any]


@dataclass
class Totals:
    """The counts of one line of a table, in the order of its columns."""

    models: int = 0
    softmaxes: int = 0
    attentions: int = 0
    fused: int = 0
    declined: int = 0
    structures: int = 0
    kept: int = 0
    wrong: int = 0
    failed: int = 0
    refused: int = 0
    grown: int = 0
    fused_vouched: int = 0
    kept_vouched: int = 0

    def add(self, verdict: Verdict) -> None:
        """Count one model."""
        self.models += 1
        self.softmaxes += verdict["softmaxes"]
        self.attentions += verdict["fused"] + verdict["declined"]
        self.fused += verdict["fused"]
        self.declined += verdict["declined"]
        self.structures += verdict["kept"] + verdict["lost"]
        self.kept += verdict["kept"]
        self.wrong += bool(verdict["problems"])
        self.failed += bool(verdict["error"])
        self.refused += bool(verdict["refused"] and verdict["runs"])
        self.grown += verdict["constants"] > CONSTANT
        self.fused_vouched += verdict["vouched_fused"]
        self.kept_vouched += verdict["vouched_kept"]

    def faults(self) -> bool:
        """Does the line break a promise?"""
        fused = self.attentions >= MANY and self.fused < FLOOR * self.attentions
        kept = self.structures >= MANY and self.kept_vouched < FLOOR * self.structures
        return bool(fused or kept or self.wrong or self.failed or self.refused or self.grown)


def answers(folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The files that an exporter or a converter made: the name and what is known of it."""
    for path in sorted(folder.glob("*.json")):
        if path.name.endswith(".verdict.json"):
            continue
        entry = json.loads(path.read_text())
        if not entry["problem"]:
            yield path.stem, entry


def verdicts(folder: Path, only: str, again: str, server: Server) -> Iterator[tuple[str, dict[str, Any], Verdict]]:
    """The verdict on each file of a folder. What has none is judged now."""
    for name, entry in answers(folder):
        if not re.search(only, name):
            continue
        place = folder / f"{name}.verdict.json"
        if not place.exists() or (again and re.search(again, name)):
            place.write_text(json.dumps(judged(folder, name, entry, server)) + "\n")
        yield name, entry, json.loads(place.read_text())


def judged(folder: Path, name: str, entry: dict[str, Any], server: Server) -> Verdict:
    """The verdict of judge.py; a crash is one, too."""
    fused = folder / "fused" / f"{name}.onnx"
    fused.parent.mkdir(exist_ok=True)
    job = {
        "model": str(folder / f"{name}.onnx"),
        "inputs": str(folder / entry.get("inputs", f"{name}.npz")),
        "fused": str(fused),
        "quantised": any(word in entry.get("converter", "") for word in QUANTISED),
    }
    try:
        verdict = server.ask(job)
    except HelperError as failure:
        empty = dict.fromkeys(("softmaxes", "fused", "declined", "inexpressible", "kept", "lost", "constants"), 0)
        empty |= {"vouched_fused": 0, "vouched_kept": 0}
        verdict = {**empty, "runs": True, "refused": "", "problems": [], "blocks": [], "error": str(failure)}
    for rest in fused.parent.glob(f"{name}.*"):
        rest.unlink()
    return verdict


def table(title: str, lines: dict[str, Totals]) -> bool:
    """Print one table with its sum; True if a line breaks a promise that holds for the sum, too."""
    total = Totals()
    for line in lines.values():
        for field in fields(Totals):
            setattr(total, field.name, getattr(total, field.name) + getattr(line, field.name))
    words = [field.name for field in fields(Totals)]
    print(f"\n| {title} | " + " | ".join(words) + " |")
    print("| --- |" + " ---: |" * len(words))
    for name, line in [*sorted(lines.items()), ("all", total)]:
        print(f"| {name} | " + " | ".join(str(getattr(line, word)) for word in words) + " |")
    return total.faults()


def details(found: Iterable[tuple[str, Verdict]]) -> None:
    """Print what is wrong, declined or lost, by model."""
    for name, verdict in found:
        for what in ("error", "refused"):
            if verdict[what] and (what == "error" or verdict["runs"]):
                print(f"{name}: {what}: {verdict[what]}")
        for problem in verdict["problems"]:
            print(f"{name}: WRONG {problem}")
        for block in verdict["blocks"]:
            if block["status"] == "declined":
                print(f"{name}: {block['code']}: {block['reason']} [{block['culprit']}]")
            elif block["node"] in verdict.get("lost_at", ()):
                reasons = [f"{each['code']}: {each['reason']}" for each in block["missed"]]
                print(f"{name}: lost a structure: {block['mask']}; {'; '.join(reasons)}")
        if verdict["constants"] > CONSTANT:
            print(f"{name}: its constants grow by {verdict['constants']} bytes")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--only", default="", metavar="REGEX", help="only files whose name matches")
    parser.add_argument("--again", default="", metavar="REGEX", help="judge files again whose name matches")
    parser.add_argument("--details", action="store_true", help="print what is declined, lost or wrong")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one file (300)")
    arguments = parser.parse_args()
    broken = False
    with Server(module(sys.executable, "tools.sweep.judge"), arguments.timeout) as server:
        for folder, column, title in (
            ("exports", "collection", "collection"),
            ("converted", "converter", "converter"),
        ):
            lines: dict[str, Totals] = defaultdict(Totals)
            judged_all = list(verdicts(arguments.state / folder, arguments.only, arguments.again, server))
            found = [each for each in judged_all if each[2]["runs"]]
            for _, entry, verdict in found:
                lines[entry[column] + (f", {entry['exporter']}" if folder == "exports" else "")].add(verdict)
            if arguments.details:
                details((name, verdict) for name, _, verdict in found)
            architectures = {(entry["collection"], entry["architecture"]) for _, entry, _ in found}
            print(f"\n{len(architectures)} architectures in {folder}", end="; ")
            print(f"{len(judged_all) - len(found)} files are left out, because ONNX Runtime does not run the original")
            broken |= table(title, lines)
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
