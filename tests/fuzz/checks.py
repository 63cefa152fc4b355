"""Does the search notice it when a soundness check is missing? Takes one check of `passes/` away at a time, and looks.

    python -m tests.fuzz.checks --cases 3000 --checks 50 --seed 7

A check is a `raise` of a decline, or an `if` whose body only returns None or False. All are instrumented while the
modules are imported, so that any one of them can be switched off. A first run over the cases tells what becomes of each
and which checks it passes; a case that does not pass a check is the same without it. So a check is taken away only for
the cases that pass it, until the outcome of one has a finding that it did not have before.

The words of the table: `noticed` (a finding of the oracle), `raised` (an exception that is none of the project's own),
`changed` (other fusions, and no fault in them: the check may only steer, or a word of the report is what it is for),
`unnoticed` (nothing changed). Checks that no case passes are counted apart. What is equivalent is told apart by hand.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import pkgutil
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType

from tests.fuzz.kind import Kind, chosen, load
from tests.fuzz.worker import checked

ROOT = Path(__file__).parents[2]
FOLDERS = ("masks", "matching", "values", "layout", "ready_made")
NO_DECLINE = ("NotImplementedError", "ValueError", "AssertionError", "KeyError", "InternalError")
ATTEMPT_S = 60.0


@dataclass(frozen=True)
class Check:
    """One check: where it is, and how it reads."""

    file: str
    line: int
    kind: str
    text: str


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

    def _switch(self, node: ast.stmt, kind: str) -> ast.expr:
        index = len(CHECKS)
        CHECKS.append(Check(self.file, node.lineno, kind, ast.unparse(node).splitlines()[0][:110]))
        call = ast.parse(f"__import__('tests.fuzz.checks', fromlist=['on']).on({index})", mode="eval").body
        return ast.copy_location(call, node)

    def visit_Raise(self, node: ast.Raise) -> ast.stmt:  # the name is ast's
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


class _Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data: bytes, path: str, *, _optimize: int = -1) -> CodeType:  # type: ignore[override]
        tree = ast.parse(data)
        _Instrument(str(Path(path).relative_to(ROOT))).visit(tree)
        return compile(tree, path, "exec", dont_inherit=True)

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


class _Finder(importlib.abc.MetaPathFinder):
    """Loads the modules of the folders with their checks under switches."""

    def find_spec(self, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        if not any(fullname.startswith(f"fa_compiler.passes.{folder}.") for folder in FOLDERS):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.origin, str) and spec.origin.endswith(".py"):
            spec.loader = _Loader(fullname, spec.origin)
        return spec


@dataclass
class Case:
    """One case with all checks in force."""

    kind: Kind
    seed: int
    word: str
    fails: bool
    """Is there a finding?"""
    passed: frozenset[int]


def baseline(kinds: Sequence[str], seed: int, cases: int) -> list[Case]:
    """The outcomes with all checks in force. Cases that end their process are left out."""
    wanted = [(kind, seed << 32 | index) for kind in map(load, kinds) for index in range(cases)]
    found: list[Case] = []
    done = 0
    while done < len(wanted):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with os.fdopen(writer, "w", buffering=1) as out:
                for kind, case in wanted[done:]:
                    PASSED.clear()
                    outcome = checked(kind, case)
                    print(json.dumps([outcome.word, outcome.finding is not None, sorted(PASSED)]), file=out)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as told:
            for line in told:
                word, fails, passed = json.loads(line)
                found.append(Case(*wanted[done], word, fails, frozenset(passed)))
                done += 1
        os.waitpid(child, 0)
        done += 1  # the case that ended the process, or the end
    return found


def without(index: int, cases: Sequence[Case], seconds: float) -> tuple[str, str]:
    """What becomes of the cases without a check, in a process of its own: a word of the table, and where it shows."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        with os.fdopen(writer, "w") as out:
            json.dump(_attempts(index, cases, seconds), out)
        os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], seconds + 30)
    if not ready:
        os.kill(child, signal.SIGKILL)
    with os.fdopen(reader) as told:
        text = told.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return "noticed", "a hang" if not ready else f"the process ended: {os.waitstatus_to_exitcode(status)}"
    word, place = json.loads(text)
    return word, place


def _attempts(index: int, cases: Sequence[Case], seconds: float) -> tuple[str, str]:
    global OFF
    OFF = index
    end = time.monotonic() + seconds
    best = ("unnoticed", "")
    for case in cases:
        if time.monotonic() > end:
            break
        outcome = checked(case.kind, case.seed)
        place = f"{case.kind.__module__.rpartition('.')[2]}:{case.seed}"
        if outcome.finding is not None and not case.fails:
            if outcome.word != "raised":
                return "noticed", f"{place} {outcome.finding.title}"
            best = ("raised", f"{place} {outcome.finding.title}")
        elif outcome.word != case.word and best[0] == "unnoticed":
            best = ("changed", f"{place} {case.word} -> {outcome.word}")
    return best


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser("python -m tests.fuzz.checks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=["compose", "ready_made", "mutate"])
    parser.add_argument("--cases", type=int, default=2000, help="of each kind")
    parser.add_argument("--checks", type=int, default=50, help="how many checks are taken away")
    parser.add_argument("--only", default="", help="checks whose file, kind or text has this in it")
    parser.add_argument("--unreached", action="store_true", help="list the checks that no case passes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=ATTEMPT_S, help="for each check")
    args = parser.parse_args()
    start = time.monotonic()
    for folder in FOLDERS:
        for module in pkgutil.walk_packages([str(ROOT / "passes" / folder)], f"fa_compiler.passes.{folder}."):
            importlib.import_module(module.name)
    cases = baseline(chosen(args.kinds), args.seed, args.cases)
    candidates = [index for index, check in enumerate(CHECKS) if args.only in f"{check.file} {check.kind} {check.text}"]
    passed = {index for case in cases for index in case.passed}
    reached = [index for index in candidates if index in passed]
    seconds = time.monotonic() - start
    print(f"{len(cases)} cases in {seconds:.0f} s reach {len(reached)} of {len(candidates)} checks", flush=True)
    for index in candidates:
        if args.unreached and index not in passed:
            print(f"not reached {CHECKS[index].file}:{CHECKS[index].line} {CHECKS[index].text}")
    picked = random.Random(args.seed).sample(reached, min(args.checks, len(reached)))
    words: Counter[str] = Counter()
    for index in sorted(picked):
        check = CHECKS[index]
        passing = [case for case in cases if index in case.passed]
        word, place = without(index, passing, args.seconds)
        words[word] += 1
        print(f"{word:11} {check.file}:{check.line} {check.kind} ({len(passing)} cases) {check.text}", flush=True)
        if place:
            print(f"{'':11} {place}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in words.most_common()))


if __name__ == "__main__":
    # The switches live in the module of this name, not in the one that was started.
    sys.modules["tests.fuzz.checks"] = sys.modules["__main__"]
    sys.meta_path.insert(0, _Finder())
    main()
