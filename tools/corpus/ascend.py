"""Converts every model of a corpus to an `.air` file and back, and compares the result with the original.

    python -m tools.corpus.ascend --corpus DIR [--kinds issue2] [--filter REGEX] [--fixed] [--json OUT]

The corpus is that of coverage.py. Each model is optimised for Ascend, converted to GE operators, written, read, checked
by the rules of GE's loader, and converted back to ONNX. The result runs in ONNX Runtime with the custom operators; if
ONNX Runtime does not run the original, both run on the reference evaluators. The exit code is 1 if a file breaks a rule
or an output differs. A model with operators without a counterpart in GE is not a defect; these operators are listed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import onnx
from rich.console import Console
from rich.progress import track
from rich.table import Table

from tools.corpus.compare_run import load_inputs
from tools.corpus.coverage import add_corpus, chosen, group_of, inputs_of, kind_of
from tools.processes import HelperError, Server, module

HERE = Path(__file__).parent

ACCEPTED = {
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal__onnx123": (
        "ONNX Runtime's Attention gives the lowest float in its score output where ONNX's definition gives -inf"
    ),
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal__onnx123": (
        "ONNX Runtime's Attention gives the lowest float in its score output where ONNX's definition gives -inf"
    ),
}
"""Models whose outputs differ for a known reason."""


@dataclass
class RoundTrip:
    """The outcome of one model. `compared` is "ort", "reference", or "" if neither runs the original."""

    id: str
    kind: str
    air: bool = False
    fused: int = 0
    unmapped: list[tuple[str, str]] = field(default_factory=list)
    compared: str = ""
    error: float = 0.0
    operators: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


class Helpers:
    """The helper processes."""

    def __init__(self, stack: ExitStack, timeout: float, folder: Path, fixed: bool) -> None:
        def server(name: str) -> Server:
            return stack.enter_context(Server(module(sys.executable, f"tools.corpus.{name}"), timeout))

        self._folder = folder
        self._fixed = fixed
        self._converter = server("compare_ascend")
        self._runner = server("compare_run")
        self._reference = server("compare_optimise")
        self._library = self._converter.start()["library"]

    def trip(self, entry: dict[str, Any], corpus: Path) -> RoundTrip:
        """Convert one model to an `.air` file and back."""
        trip = RoundTrip(entry["id"], kind_of(entry) or group_of(entry))
        job = {"original": str(corpus / entry["file"]), "optimised": str(self._folder / f"{entry['id']}.onnx")}
        try:
            self._go(trip, job, str(inputs_of(entry, corpus, self._folder)))
        except HelperError as failure:
            trip.problems.append(str(failure))
        Path(job["optimised"]).unlink(missing_ok=True)
        return trip

    def _go(self, trip: RoundTrip, job: dict[str, Any], inputs: str) -> None:
        seen = self._converter.ask({**job, "shapes": _shapes(job["original"], inputs) if self._fixed else None})
        if seen["error"] is not None:
            if not seen.get("refused"):
                trip.problems.append(seen["error"])
            return
        trip.fused, trip.unmapped = seen["fused"], seen["unmapped"]
        if trip.unmapped:
            return
        trip.air, trip.operators = True, seen["operators"]
        trip.problems += seen["findings"] + ([f"types: {seen['types']}"] if seen["types"] else [])
        job = {**job, "inputs": inputs, "coarsest": seen["coarsest"]}
        verdict = self._runner.ask({**job, "library": self._library, "lenient": True})
        trip.compared = "ort"
        if verdict["original_error"] is not None:
            verdict = self._reference.ask(job)
            trip.compared = "" if verdict.get("original_error") else "reference"
            if verdict["error"] is not None:
                trip.problems.append(f"the reference does not run it: {verdict['error']}")
        if trip.id not in ACCEPTED:
            trip.problems += verdict.get("problems", [])
        trip.error = verdict.get("worst", verdict.get("error")) or 0.0


def _shapes(model: str, inputs: str) -> dict[str, list[int]]:
    """The sizes of a model's inputs in its inputs file."""
    graph = onnx.load(model, load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer}
    feeds = load_inputs(inputs)
    names = [value.name for value in graph.input if value.name not in weights and value.name in feeds]
    return {name: list(feeds[name].shape) for name in names}


def print_kinds(console: Console, trips: list[RoundTrip]) -> None:
    """Print one row for each kind: all models, those written as files, those compared, and the largest difference."""
    groups: dict[str, list[RoundTrip]] = defaultdict(list)
    for trip in trips:
        groups[trip.kind].append(trip)
    table = Table(title="To .air and back", title_justify="left")
    for column in ("kind", "models", "fused blocks", ".air", "equal in ORT", "by reference", "not run", "defects"):
        table.add_column(column, justify="left" if column == "kind" else "right", overflow="fold")
    for kind, members in [*sorted(groups.items()), ("all", trips)]:
        there = [trip for trip in members if trip.air]
        sound = Counter(trip.compared for trip in there if not trip.problems)
        row = (
            len(members),
            sum(trip.fused for trip in there),
            len(there),
            *(sound[where] for where in ("ort", "reference", "")),
            sum(bool(trip.problems) for trip in members),
        )
        table.add_row(kind, *map(str, row))
    console.print(table)


def print_unmapped(console: Console, trips: list[RoundTrip]) -> None:
    """Print the operators without a counterpart in GE."""
    rows: dict[tuple[str, str], list[str]] = defaultdict(list)
    for trip in trips:
        for op_type, reason in trip.unmapped:
            rows[op_type, reason].append(trip.id)
    table = Table(title="Operators without a counterpart", title_justify="left")
    for column in ("operator", "reason", "nodes", "models"):
        table.add_column(column, justify="right" if column == "nodes" else "left", overflow="fold")
    for (op_type, reason), models in sorted(rows.items()):
        table.add_row(op_type, reason, str(len(models)), ", ".join(sorted(set(models))[:3]))
    console.print(table if rows else "Operators without a counterpart: none")


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_corpus(parser)
    parser.add_argument("--fixed", action="store_true", help="with the input sizes of the run fixed")
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one step of one model (120)")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write every outcome as JSON")
    arguments = parser.parse_args()
    entries = chosen(parser, arguments)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        helpers = Helpers(stack, arguments.timeout, Path(folder), arguments.fixed)
        progress = Console(stderr=True)
        trips = [helpers.trip(entry, arguments.corpus) for entry in track(entries, console=progress, transient=True)]
    console = Console(width=None if sys.stdout.isatty() else 150)
    print_kinds(console, trips)
    print_unmapped(console, trips)
    defects = [trip for trip in trips if trip.problems]
    for trip in defects:
        console.print(f"{trip.id}: {trip.problems[0]}", highlight=False, markup=False)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(trip) for trip in trips], indent=1) + "\n")
    return 1 if defects else 0


if __name__ == "__main__":
    sys.exit(main())
