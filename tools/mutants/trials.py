"""Runs tests on mutants: each in a process forked from one that has collected the suite, in which the mutated function
takes the place of the original.

A mutant is killed where a test fails, ends the process, or takes twenty times as long as it did; a test that fails
without the mutant as well does not count. The tests of a mutant are those that run its block, and as many of them as
take `LIMIT_S` seconds: of each test function the quickest first, then the second of each.
"""

from __future__ import annotations

import ast
import functools
import gc
import json
import mmap
import os
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from hypothesis import Phase, settings

from tools.mutants.blocks import ROOT, sources
from tools.mutants.mutations import Mutant, mutated
from tools.mutants.record import Record

LIMIT_S = 30.0
"""Of processor time, for the tests of one mutant; one test at least is run."""
MEMORY = 8 << 30
HANG_S = 1800
"""On the wall clock, for a test that waits for ever: long enough for a machine with much other work."""
SURVIVED, FAILED, NOT_PLACED = range(3)


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant."""

    word: str
    """killed, survived or not placed."""
    test: str = ""
    """The one that kills it."""
    how: str = ""
    """failed, hangs, or the signal that ended the process."""


def ordered(record: Record, covering: Sequence[int], limit: float, first: str = "") -> list[int]:
    """The tests to run on a mutant, in order."""
    of_function: dict[str, list[int]] = {}
    for test in sorted(covering, key=lambda each: record.seconds[each]):
        of_function.setdefault(record.tests[test].split("[")[0], []).append(test)
    ranked = sorted(
        (rank, record.seconds[test], test) for tests in of_function.values() for rank, test in enumerate(tests)
    )
    order = [test for _, _, test in ranked]
    if first:
        order.sort(key=lambda test: record.tests[test] != first)
    chosen, spent = [], 0.0
    for test in order:
        if spent + record.seconds[test] <= limit or not chosen:
            spent += record.seconds[test]
            chosen.append(test)
    return chosen


# -- putting a mutant in place ----------------------------------------------------------------------


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _by_name(tree: ast.Module, path: str) -> dict[tuple[str, int, int], CodeType]:
    named: dict[tuple[str, int, int], CodeType] = {}
    for code in _codes(compile(tree, path, "exec", dont_inherit=True)):
        twin = sum(key[:2] == (code.co_qualname, code.co_firstlineno) for key in named)
        named[code.co_qualname, code.co_firstlineno, twin] = code
    return named


@dataclass(frozen=True)
class Living:
    """The functions of each file that are in memory, and the caches of all."""

    functions: Mapping[str, Sequence[FunctionType]]
    caches: Sequence[Any]


def living() -> Living:
    """What there is now."""
    functions: dict[str, list[FunctionType]] = {}
    caches = []
    gc.unfreeze()  # get_objects leaves out what is frozen, as tests/conftest.py does with all modules
    for each in gc.get_objects():
        if isinstance(each, FunctionType):
            functions.setdefault(_file_of(each), []).append(each)
        elif isinstance(each, functools._lru_cache_wrapper):
            caches.append(each)
    return Living(functions, caches)


def place(mutant: Mutant, there: Living) -> bool:
    """Give the functions of the mutant's file their mutated code, and forget what all functions have computed."""
    tree, _ = mutated(mutant)
    ours = there.functions.get(mutant.file, ())
    if not ours:
        return False
    path = ours[0].__code__.co_filename
    before, after = _by_name(ast.parse(sources()[mutant.file]), path), _by_name(tree, path)
    new = {code: after[key] for key, code in before.items() if key in after and after[key] != code}
    placed = False
    for function in ours:
        if function.__code__ in new:
            function.__code__ = new[function.__code__]
            placed = True
    for cache in there.caches:
        cache.cache_clear()
    return placed


def _file_of(function: FunctionType) -> str:
    return _relative(function.__code__.co_filename)


@functools.cache
def _relative(path: str) -> str:
    """A path from the root, links resolved; empty for what lies elsewhere."""
    if not Path(path).is_absolute() or ROOT not in Path(path).parents:
        return ""
    return str(Path(path).resolve().relative_to(ROOT))


# -- the processes ----------------------------------------------------------------------------------


@dataclass
class _Trial:
    """A process that runs tests, on a mutant or on the sources as they are."""

    mutant: Mutant | None
    tests: list[int]
    started: float = field(default_factory=time.monotonic)
    at: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, 4))
    scratch: str = field(default_factory=lambda: tempfile.mkdtemp(prefix="mutant-"))
    process: int = 0

    @property
    def test(self) -> int:
        """The one that runs, or ran last."""
        return self.tests[struct.unpack("i", self.at[:])[0]]


class Trials:
    """A plugin of pytest that runs trials in place of the tests."""

    def __init__(
        self, sample: Sequence[Mutant], record: Record, workers: int, limit: float, first: Mapping[Mutant, str]
    ) -> None:
        self.sample = sample
        self.record = record
        self.workers = workers
        self.limit = limit
        self.first = first
        self.verdicts: dict[Mutant, Verdict] = {}
        self.sound: dict[int, bool] = {}
        """Of the tests that killed one: does it pass without a mutant?"""

    def pytest_collection(self) -> None:
        # A counterexample need not be small.
        phases = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
        settings.register_profile("mutants", settings(phases=phases))
        settings.load_profile("mutants")

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.items = {item.nodeid: item for item in session.items}
        self.living = living()
        # Sessions of ONNX Runtime end here. In a trial their end would wait for threads that only this process has.
        for cache in self.living.caches:
            cache.cache_clear()
        gc.collect()
        gc.freeze()
        waiting = list(self.sample)[::-1]
        running: dict[int, _Trial] = {}
        while waiting or running:
            while waiting and len(running) < self.workers:
                trial = self._start(waiting.pop())
                running[trial.process] = trial
            time.sleep(0.02)
            for process, trial in list(running.items()):
                if time.monotonic() - trial.started > HANG_S:
                    os.kill(process, signal.SIGKILL)
                done, status = os.waitpid(process, os.WNOHANG)
                if not done:
                    continue
                del running[process]
                shutil.rmtree(trial.scratch, ignore_errors=True)
                follower = self._finished(trial, os.waitstatus_to_exitcode(status))
                if follower is not None:
                    running[follower.process] = follower
        return True

    def _start(self, mutant: Mutant | None, tests: list[int] | None = None) -> _Trial:
        if tests is None:
            assert mutant is not None
            covering = [test for test in self.record.covering(mutant.block) if self._counts(test)]
            tests = ordered(self.record, covering, self.limit, self.first.get(mutant, ""))
        trial = _Trial(mutant, tests)
        sys.stdout.flush()
        trial.process = os.fork()
        if trial.process == 0:
            try:
                code = self._run(trial)
            except BaseException:
                code = FAILED
            os._exit(code)
        return trial

    def _counts(self, test: int) -> bool:
        return self.sound.get(test, True) and self.record.tests[test] in self.items

    def _run(self, trial: _Trial) -> int:
        """What the process does; its exit code."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 1)
        os.dup2(nothing, 2)
        import resource  # Windows has none

        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        if trial.mutant is not None and not place(trial.mutant, self.living):
            return NOT_PLACED
        for number, test in enumerate(trial.tests):
            trial.at[:] = struct.pack("i", number)
            signal.setitimer(signal.ITIMER_PROF, 10 + 20 * float(self.record.seconds[test]))
            item = self.items[self.record.tests[test]]
            item.config._tmp_path_factory._basetemp = Path(trial.scratch)  # type: ignore[attr-defined]
            following = trial.tests[number + 1 : number + 2]
            after = self.items[self.record.tests[following[0]]] if following else None
            if any(report.failed for report in runtestprotocol(item, log=False, nextitem=after)):
                return FAILED
        return SURVIVED

    def _finished(self, trial: _Trial, code: int) -> _Trial | None:
        """Note a verdict; the next trial where there is none yet."""
        if trial.mutant is None:
            self.sound[trial.test] = code == SURVIVED
            return None
        if code in (SURVIVED, NOT_PLACED) or not trial.tests:
            return self._note(trial.mutant, Verdict("survived" if code == SURVIVED else "not placed"))
        if not self._passes(trial.test):
            return self._start(trial.mutant)
        how = "failed" if code == FAILED else "hangs" if -code in (signal.SIGPROF, signal.SIGKILL) else f"ended {code}"
        return self._note(trial.mutant, Verdict("killed", self.record.tests[trial.test], how))

    def _passes(self, test: int) -> bool:
        """Does a test pass without a mutant, in a process of its own?"""
        if test not in self.sound:
            trial = self._start(None, [test])
            _, status = os.waitpid(trial.process, 0)
            shutil.rmtree(trial.scratch, ignore_errors=True)
            self._finished(trial, os.waitstatus_to_exitcode(status))
        return self.sound[test]

    def _note(self, mutant: Mutant, verdict: Verdict) -> None:
        self.verdicts[mutant] = verdict
        print(f"{verdict.word:10} {mutant.place} {mutant.kind}: {mutant.text}", flush=True)
        print(f"{'':10} {mutated(mutant)[1]}", flush=True)
        if verdict.test:
            print(f"{'':10} {verdict.how}: {verdict.test}", flush=True)


def as_json(verdicts: Mapping[Mutant, Verdict]) -> str:
    """The verdicts for a later measure to compare with."""
    rows = [{**vars(mutant), **vars(verdict)} for mutant, verdict in verdicts.items()]
    return json.dumps(rows, indent=1)
