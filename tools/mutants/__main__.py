"""Which faults do the tests notice? Small ones are put into `passes/`, `op_registry/` and `lowering/`, one at a time.

    python -m tools.mutants record                     # one run of the suite: what each test runs, and for how long
    python -m tools.mutants times                      # the seconds of that run by file; --functions, --tests
    python -m tools.mutants measure                    # 300 mutants of covered code: which are killed, by which test
    python -m tools.mutants measure --against OLD.json # the same sample later: the kills that are lost
    python -m tools.mutants thin                       # write the list of the rows that are left to `make thorough`

`record` hands what follows `--` to pytest. The kinds of mutants are in `mutations.py`, what counts as a kill in
`trials.py`, and which rows `make test` leaves out in `thin.py`: `measure` leaves them out, too. The record and
`measure.json` lie in build/mutants (`--state`).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tools.mutants import record as records
from tools.mutants.blocks import ROOT, all_blocks
from tools.mutants.mutations import Mutant, drawn
from tools.mutants.thin import thinned
from tools.mutants.trials import LIMIT_S, Trials, Verdict, as_json

SEED = 19
"""Of the measure in docs/developing.md."""
FOLDER = "FA_COMPILER_MUTANTS"
THOROUGH = ROOT / "tests" / "thorough.txt"
"""Read by tests/conftest.py."""


def record(args: argparse.Namespace) -> int:
    """Run the suite with the recording plugin."""
    records.prepare(args.state)
    command = [sys.executable, "-m", "pytest", "-p", "tools.mutants.recording", "-q", "-n", str(args.workers)]
    environment = {**os.environ, FOLDER: str(args.state.resolve())}
    return subprocess.run([*command, *args.pytest], cwd=ROOT, env=environment, check=False).returncode


def times(args: argparse.Namespace) -> int:
    """Print where the time of the recorded run went."""
    found = records.load(args.state)
    spent: Counter[str] = Counter()
    counted: Counter[str] = Counter()
    for test, seconds in zip(found.tests, found.seconds.tolist(), strict=True):
        name = test if args.tests else test.split("[")[0] if args.functions else test.split("::")[0]
        spent[name] += seconds
        counted[name] += 1
    for name, seconds in spent.most_common(args.most):
        print(f"{seconds:7.2f} s {counted[name]:5} {name}")
    print(f"{len(found.tests)} tests, {found.seconds.sum():.0f} s of processor time", end="")
    print(f"; {len(found.covered())} of {len(all_blocks())} blocks covered")
    return 0


def measure(args: argparse.Namespace) -> int:
    """Try a sample of mutants; 1 where one survives that an earlier measure saw killed."""
    start = time.monotonic()
    found = records.load(args.state)
    old: dict[tuple[str, int], dict[str, str]] = {}
    if args.against:
        old = {(row["file"], row["index"]): row for row in json.loads(args.against.read_text())}
    sample = drawn(args.seed, found.covered(), args.mutants, args.only)
    if args.against:
        sample = [mutant for mutant in drawn(args.seed, set(all_blocks().values()), -1) if _key(mutant) in old]
        if args.killed_only:
            sample = [mutant for mutant in sample if old[_key(mutant)]["word"] == "killed"]
    first = {mutant: old[_key(mutant)]["test"] for mutant in sample if _key(mutant) in old}
    trials = Trials(sample, found, args.workers, args.limit, first)
    files = sorted({str(ROOT / test.split("::")[0]) for test in found.tests})
    usual = ["-q", "-s", "-p", "no:xdist", "-p", "no:cacheprovider", "--no-header", "-m", "not thorough"]
    pytest.main([*usual, *files], plugins=[trials])
    (args.state / "measure.json").write_text(as_json(trials.verdicts))
    lost = [each for each, verdict in trials.verdicts.items() if verdict.word != "killed" and _was_killed(each, old)]
    for mutant in lost:
        print(f"lost: {mutant.place} {mutant.kind}: {mutant.text}; killed by {old[_key(mutant)]['test']} before")
    _print_words(trials.verdicts)
    print(f"in {time.monotonic() - start:.0f} s" + (f"; {len(lost)} kills lost" if args.against else ""))
    return 1 if lost else 0


def thin(args: argparse.Namespace) -> int:
    """Write the list of the rows that `make test` leaves out."""
    found = records.load(args.state)
    noticed = {row["test"] for path in args.against for row in json.loads(path.read_text())}
    gone = thinned(found, noticed)
    THOROUGH.write_text("".join(f"{test}\n" for test in gone))
    spent = dict(zip(found.tests, found.seconds.tolist(), strict=True))
    print(f"{len(gone)} of {len(found.tests)} tests and {sum(map(spent.__getitem__, gone)):.0f} of", end=" ")
    print(f"{found.seconds.sum():.0f} s of processor time are left to make thorough")
    return 0


def _key(mutant: Mutant) -> tuple[str, int]:
    return mutant.file, mutant.index


def _was_killed(mutant: Mutant, old: dict[tuple[str, int], dict[str, str]]) -> bool:
    return _key(mutant) in old and old[_key(mutant)]["word"] == "killed"


def _print_words(verdicts: dict[Mutant, Verdict]) -> None:
    for folder in (*sorted({mutant.file.split("/")[0] for mutant in verdicts}), ""):
        words = Counter(verdict.word for mutant, verdict in verdicts.items() if mutant.file.startswith(folder))
        total = sum(words.values())
        print(f"{folder or 'all':12} {words['killed']} of {total} killed, {words['survived']} survived", end="")
        print(f", {words['not placed']} not placed" if words["not placed"] else "")


def main() -> int:
    """Run one of the commands."""
    parser = argparse.ArgumentParser(
        "python -m tools.mutants", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--state", type=Path, default=ROOT / "build" / "mutants", help="a folder")
    parser.add_argument("--workers", type=int, default=2, help="processes, 2 if not given")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    recording = commands.add_parser("record", help="run the suite, and note what each test runs")
    recording.add_argument("pytest", nargs="*", help="behind --: arguments of pytest")
    recording.set_defaults(run=record)
    timing = commands.add_parser("times", help="where the time of the recorded run went")
    timing.add_argument("--functions", action="store_true", help="by test function")
    timing.add_argument("--tests", action="store_true", help="by test")
    timing.add_argument("--most", type=int, default=40, help="how many lines")
    timing.set_defaults(run=times)
    measuring = commands.add_parser("measure", help="try a sample of mutants")
    measuring.add_argument("--mutants", type=int, default=300, help="how many")
    measuring.add_argument("--seed", type=int, default=SEED)
    measuring.add_argument("--only", default="", help="mutants of files whose path has this in it")
    measuring.add_argument("--limit", type=float, default=LIMIT_S, help="seconds of tests for a mutant")
    measuring.add_argument("--against", type=Path, metavar="JSON", help="the same mutants as an earlier measure")
    measuring.add_argument("--killed-only", action="store_true", help="of those only what it saw killed")
    measuring.set_defaults(run=measure)
    thinning = commands.add_parser("thin", help="list the rows that make test leaves to make thorough")
    thinning.add_argument(
        "--against",
        type=Path,
        nargs="*",
        default=[],
        metavar="JSON",
        help="results of measure: what noticed a fault stays",
    )
    thinning.set_defaults(run=thin)
    args = parser.parse_args()
    code: int = args.run(args)
    return code


if __name__ == "__main__":
    sys.exit(main())
