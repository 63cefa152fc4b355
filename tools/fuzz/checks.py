"""Does the search notice it when a soundness check is missing? Takes one check of `passes/` away at a time, and looks.

    python -m tools.fuzz.checks                          # the measure of docs/developing.md: 50 checks of seed 18
    python -m tools.fuzz.checks tested --only matching/scores.py --checks 100 --workers 8

A check is a `raise` of a decline; with `--guards` also an `if` whose body only returns None or False. All are
instrumented while the modules are imported, so that any one of them can be switched off. Left out are those of
`excluded.tsv` beside this file, which says of each why its absence can have no effect that a case could show: it only
steers, it re-words a decline, another check that is named there declines the same, or nothing in ONNX Runtime is there
to be unlike. Of the others those are drawn that some case passes, in an order that depends on the seed and on their
text; how many no case passes is told apart (`--unreached` lists them, `--strict` draws them, too).

A first run over the cases tells what becomes of each and which checks it passes; a case that does not pass a check is
the same without it. So a check is taken away only for the cases that pass it and that have no finding, until one has.

The words of the table:

    noticed      a finding of the oracle
    raised       a finding that is an exception of none of the project's own types
    known        a finding that is also seen with all checks in force, and no more often
    changed      other fusions or another report, and no fault in them
    unnoticed    nothing changed
    unreached    no case passes it

Only the first two count: the others are what the search would not have told.
"""

from __future__ import annotations

import argparse
import ast
import csv
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import json
import mmap
import os
import pkgutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from types import CodeType
from typing import IO, Any

from tools.fuzz import oracle
from tools.fuzz.kind import Kind, chosen, load
from tools.fuzz.worker import checked

ROOT = Path(__file__).parents[2]
FOLDERS = (
    "algebra",
    "around",
    "attention_ops",
    "backward",
    "layout",
    "masks",
    "matching",
    "ops",
    "rewrite",
    "sparse",
    "values",
)
CASES = {"compose": 5000, "ready_made": 1500, "mutate": 1400, "gradients": 500, "tested": 3600}
"""How many of each kind tell what becomes of the cases."""
NO_DECLINE = ("NotImplementedError", "ValueError", "AssertionError", "KeyError", "InternalError")
EXCLUDED = Path(__file__).with_name("excluded.tsv")
SEED = 18
"""Of the measure in docs/developing.md."""
MOST = 1500
"""Cases that a check is taken away for, at most."""
CHANCE = 0.01
"""What a finding proves that is also seen with all checks in force: so few are expected among as many cases."""
CASE_S = 30
"""A case that takes longer hangs."""


@dataclass(frozen=True)
class Check:
    """One check: where it is, and how it reads."""

    file: str
    line: int
    function: str
    kind: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line} {self.function}"


CHECKS: list[Check] = []
OFF = -1
PASSED: set[int] = set()


def on(index: int) -> bool:
    """Is this check in force? Asked where it would decline."""
    PASSED.add(index)
    return index != OFF


class _Instrument(ast.NodeTransformer):
    """Puts every check of a module under its switch."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.function = ""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:  # the names are ast's
        outer, self.function = self.function, node.name
        self.generic_visit(node)
        self.function = outer
        return node

    def _switch(self, node: ast.stmt, kind: str) -> ast.expr:
        index = len(CHECKS)
        CHECKS.append(Check(self.file, node.lineno, self.function, kind, ast.unparse(node).splitlines()[0][:110]))
        call = ast.parse(f"__import__('tools.fuzz.checks', fromlist=['on']).on({index})", mode="eval").body
        return ast.copy_location(call, node)

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:
        text = ast.unparse(node)
        if not isinstance(node.exc, ast.Call) or any(word in text for word in NO_DECLINE):
            return node
        guarded = ast.If(test=self._switch(node, "decline"), body=[node], orelse=[])
        return ast.fix_missing_locations(ast.copy_location(guarded, node))

    def visit_If(self, node: ast.If) -> ast.stmt:
        self.generic_visit(node)
        (first, *more) = node.body
        gives_up = isinstance(first, ast.Return) and (
            first.value is None or (isinstance(first.value, ast.Constant) and first.value.value in (None, False))
        )
        if gives_up and not more and not node.orelse:
            node.test = ast.BoolOp(op=ast.And(), values=[node.test, self._switch(node, "guard")])
            ast.fix_missing_locations(node)
        return node


def instrument_all() -> None:
    """List the checks of all folders, without importing a module."""
    CHECKS.clear()
    for folder in FOLDERS:
        for path in sorted((ROOT / "passes" / folder).rglob("*.py")):
            _Instrument(str(path.relative_to(ROOT))).visit(ast.parse(path.read_bytes()))


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data)
        _Instrument(str(Path(path).resolve().relative_to(ROOT))).visit(tree)
        return compile(tree, path, "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the modules of the folders with their checks under switches."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if not any(f"{fullname}.".startswith(f"fa_compiler.passes.{folder}.") for folder in FOLDERS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.origin, str) and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


@dataclass(frozen=True)
class Case:
    """One case with all checks in force."""

    kind: str
    seed: int
    word: str = ""
    title: str | None = None
    """Of its finding, if there is one."""
    passed: frozenset[int] = frozenset()

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.seed}"


@cache
def _kind(name: str) -> Kind:
    return load(name)


# -- what is taken away -----------------------------------------------------------------------------


def excluded() -> dict[tuple[str, str, str], str]:
    """The reasons of excluded.tsv, by file, function and text; `*` stands for all of a file's, or of a function's."""
    with EXCLUDED.open(newline="") as lines:
        rows = csv.DictReader(lines, delimiter="\t", quoting=csv.QUOTE_NONE)
        return {(row["file"], row["function"], row["text"]): row["reason"] for row in rows}


def reason_of(check: Check, reasons: Mapping[tuple[str, str, str], str]) -> str | None:
    """Why a check is left out; None of others."""
    keys = (check.function, check.text), (check.function, "*"), ("*", "*")
    return next((reasons[check.file, *key] for key in keys if (check.file, *key) in reasons), None)


def drawn(seed: int, checks: Sequence[Check], candidates: Sequence[int], count: int) -> list[int]:
    """The first of the candidates in an order that depends on the seed and on their text only."""

    def place(index: int) -> bytes:
        check = checks[index]
        return hashlib.sha256(f"{seed} {check.file} {check.function} {check.text}".encode()).digest()

    return sorted(candidates, key=place)[:count]


# -- runs -------------------------------------------------------------------------------------------


class _Place:
    """Where a process is, for whoever finds it dead: does the original run?"""

    def __init__(self) -> None:
        self.memory = mmap.mmap(-1, 1)

    @property
    def in_original(self) -> bool:
        return self.memory[0] == 1

    def watch(self) -> None:
        """Note where ONNX Runtime runs what it was given: what ends the process there is no fault of ours."""
        run = oracle.run_original

        def noted(*arguments: Any) -> Any:
            self.memory[0] = 1
            made = run(*arguments)
            self.memory[0] = 0
            return made

        oracle.run_original = noted


def outcomes(cases: Sequence[Case], off: int = -1) -> Iterator[Case]:
    """The cases as they are without a check, in processes of their own. One that ends its process has a finding, unless
    it is the original that does."""
    done = 0
    while done < len(cases):
        reader, writer = os.pipe()
        place = _Place()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with os.fdopen(writer, "w", buffering=1) as out:
                _serve(cases[done:], off, place, out)
            os._exit(0)
        os.close(writer)
        try:
            with os.fdopen(reader) as told:
                for line in told:
                    word, title, passed = json.loads(line)
                    yield replace(cases[done], word=word, title=title, passed=frozenset(passed))
                    done += 1
        except GeneratorExit:
            os.kill(child, signal.SIGKILL)
            raise
        finally:
            _, status = os.waitpid(child, 0)
        if done < len(cases):
            if not place.in_original:
                code = os.waitstatus_to_exitcode(status)
                yield replace(
                    cases[done], word="ended", title="a hang" if code == -signal.SIGALRM else f"ended: {code}"
                )
            done += 1


def _serve(cases: Sequence[Case], off: int, place: _Place, out: IO[str]) -> None:
    global OFF
    OFF = off
    place.watch()
    for case in cases:
        PASSED.clear()
        signal.alarm(CASE_S)
        outcome = checked(_kind(case.kind), case.seed)
        title = None if outcome.finding is None else outcome.finding.title
        print(json.dumps([outcome.word, title, sorted(PASSED)]), file=out)


def _all_of(cases: Sequence[Case]) -> list[Case]:
    return list(outcomes(cases))


def without(index: int, cases: Sequence[Case], known: Mapping[str, float]) -> tuple[int, str, str]:
    """What becomes of the cases without a check: the check, a word of the table, and where it shows. `known` are the
    titles that findings have with all checks in force, and how often."""
    passing = [case for case in cases if index in case.passed and case.title is None]
    if not passing:
        return index, "unreached", ""
    best = "unnoticed", ""
    before = {case.name: case for case in passing}
    shown: Counter[str] = Counter()
    different = 0
    for case in outcomes(passing[:MOST], index):
        if case.title is None:
            if case.word != before[case.name].word:
                different += 1
                if best[0] == "unnoticed":
                    best = "changed", f"{case.name} {before[case.name].word} -> {case.word}"
            continue
        different += 1
        shown[case.title] += 1
        place = f"{case.name} {case.title}"
        by_chance = different * known.get(case.title, 0.0)
        if by_chance < CHANCE * shown[case.title]:
            return index, "raised" if case.word == "raised" else "noticed", place
        best = "known", place
    return index, *best


def all_cases(kinds: Sequence[str], seed: int, count: int | None) -> list[Case]:
    """The cases of all kinds, none of which comes last as a whole."""
    counts = {kind: count or CASES.get(kind, 1000) for kind in kinds}
    for kind in kinds:
        _kind(kind)  # once, and not in every process
    placed = [(index / counts[kind], kind, index) for kind in kinds for index in range(counts[kind])]
    return [Case(kind, seed << 32 | index) for _, kind, index in sorted(placed)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m tools.fuzz.checks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=list(CASES))
    parser.add_argument("--cases", type=int, help="of each kind; thousands if not given")
    parser.add_argument("--checks", type=int, default=50, help="how many checks are taken away")
    parser.add_argument("--only", default="", help="checks whose file, function or text has this in it")
    parser.add_argument("--guards", action="store_true", help="also what gives up without an exception")
    parser.add_argument("--unreached", action="store_true", help="list the checks that no case passes")
    parser.add_argument("--strict", action="store_true", help="draw from those that no case passes, too")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--workers", type=int, default=2, help="processes, 2 if not given")
    args = parser.parse_args()
    start = time.monotonic()
    for folder in FOLDERS:
        for module in pkgutil.walk_packages([str(ROOT / "passes" / folder)], f"fa_compiler.passes.{folder}."):
            importlib.import_module(module.name)
    assert CHECKS, "something has imported passes/ before its checks could be put under switches"
    reasons = excluded()
    wanted = [
        index
        for index, check in enumerate(CHECKS)
        if args.only in f"{check.file} {check.function} {check.text}" and (args.guards or check.kind == "decline")
    ]
    candidates = [index for index in wanted if reason_of(CHECKS[index], reasons) is None]
    kinds = chosen(args.kinds)
    cases = all_cases(kinds, args.seed, args.cases)
    with get_context("fork").Pool(args.workers) as pool:
        parts = [cases[first : first + 100] for first in range(0, len(cases), 100)]
        base = [case for part in pool.imap(_all_of, parts) for case in part]
        fused = sum(case.word == "fused" for case in base)
        titles = Counter(case.title for case in base if case.title is not None)
        known = {title: count / fused for title, count in titles.items()}
        print(f"{len(base)} cases in {time.monotonic() - start:.0f} s, {len(known)} findings with all checks in force")
        for title in sorted(known):
            print(f"{'':11} {next(case.name for case in base if case.title == title)} {title}")
        passed = {index for case in base for index in case.passed}
        reached = len(passed & set(candidates))
        print(f"{len(candidates)} checks, {len(wanted) - len(candidates)} left out; {reached} reached", flush=True)
        for index in candidates:
            if args.unreached and index not in passed:
                print(f"{'unreached':11} {CHECKS[index].place} {CHECKS[index].text}", flush=True)
        drawing = [index for index in candidates if args.strict or index in passed]
        picked = drawn(args.seed, CHECKS, drawing, args.checks)
        words: Counter[str] = Counter()
        for index, word, place in pool.imap(partial(without, cases=base, known=known), picked):
            check = CHECKS[index]
            passing = sum(index in case.passed for case in base)
            words[word] += 1
            print(f"{word:11} {check.place} ({passing} cases) {check.text}", flush=True)
            if place:
                print(f"{'':11} {place}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in words.most_common()), f"in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    # The switches live in the module of this name, not in the one that was started.
    sys.modules["tools.fuzz.checks"] = sys.modules["__main__"]
    sys.meta_path.insert(0, _Finder())
    main()
