"""Searches for faults with random cases.

    python -m tools.fuzz graphs --seconds 600 --seed 7          # kinds, groups of kinds, or all
    python -m tools.fuzz compose mutate --workers 1 --reduce
    python -m tools.fuzz --case compose:30064771073             # one case again, in this process

The exit code is 1 when something was found, 0 when not.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.built_library import choose_library
from tools.fuzz.engine import Engine, State, reduce_all, table
from tools.fuzz.kind import GROUPS, chosen, load, names
from tools.fuzz.worker import checked

DEFAULT_STATE = Path("build/fuzz")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser("python -m tools.fuzz", description=(__doc__ or "").splitlines()[0])
    known = ", ".join([*names(), *GROUPS, "all"])
    made.add_argument("kinds", nargs="*", default=["all"], metavar="KIND", help=f"what to search: {known}")
    made.add_argument("--seconds", type=float, default=60.0, help="time to search for, 60 if not given")
    made.add_argument("--cases", type=int, help="how many cases of each kind are enough")
    made.add_argument("--seed", type=int, default=0, help="other cases for another seed, 0 if not given")
    made.add_argument("--workers", type=int, default=2, help="processes, 2 if not given")
    made.add_argument("--state", type=Path, default=DEFAULT_STATE, help=f"folder of the state, {DEFAULT_STATE}")
    made.add_argument("--reduce", action="store_true", help="make a smaller case of each finding at the end")
    made.add_argument("--case", metavar="KIND:SEED", help="check one case in this process, and tell what became of it")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and return the exit code."""
    args = parser().parse_args(arguments)
    if args.case is not None:
        return _one(args.case)
    try:
        kinds = chosen(args.kinds)
    except ValueError as error:
        parser().error(str(error))
    engine = Engine(kinds, State(args.state, args.seed), args.seconds, args.workers, args.cases)
    totals = engine.run()
    if args.reduce:
        reduce_all(engine)
    print(table(totals))
    return int(any(total.titles for total in totals.values()))


def _one(case: str) -> int:
    choose_library()
    name, _, seed = case.partition(":")
    outcome = checked(load(name), int(seed))
    print(outcome.word)
    if outcome.finding is None:
        return 0
    print(outcome.finding.title, outcome.finding.detail, sep="\n")
    if outcome.finding.data:
        path = DEFAULT_STATE / f"{name}-{seed}{outcome.finding.suffix}"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(outcome.finding.data)
        print(path)
    return 1


if __name__ == "__main__":
    sys.exit(main())
