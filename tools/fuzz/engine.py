"""Gives cases to worker processes until the time is over, and keeps what they found.

The state folder holds, for each kind and seed, how many cases were done and what became of them (`KIND-SEED.json`),
and each finding under its title (`findings/KIND/TITLE.json`, beside it the file that reproduces it). The cases of one
seed are numbered; case i of seed s is `check(s << 32 | i)`. A run goes on behind the cases that were done.
"""

from __future__ import annotations

import hashlib
import json
import re
import selectors
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from tests.built_library import slowed
from tools.fuzz.kind import Finding, load
from tools.fuzz.worker import from_json, to_json
from tools.processes import ROOT, Child, HelperError, module

SEED_BITS = 32
TURN_S = 5.0
"""A worker stays with one kind for this long."""
START_S = 120.0
"""The first case of a worker may take this much longer: imports, and what a kind reads once."""
REDUCE_S = 60.0
KEPT_SEEDS = 20
"""A finding keeps this many of the seeds that show it."""
FUSED = ("fused", "accepted")
"""Words for cases that went all the way."""


@dataclass
class Progress:
    """How far a kind has come with one seed; kept in the state folder."""

    done: int = 0
    seconds: float = 0.0
    words: dict[str, int] = field(default_factory=dict)
    found: int = 0


@dataclass
class Total:
    """What this run did of one kind. `titles` are its findings: how many cases show each."""

    words: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    titles: Counter[str] = field(default_factory=Counter)

    @property
    def cases(self) -> int:
        return self.words.total()


class State:
    """The state folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        folder.mkdir(parents=True, exist_ok=True)
        self._progress: dict[str, Progress] = {}

    def progress(self, kind: str) -> Progress:
        if kind not in self._progress:
            path = self._path(kind)
            self._progress[kind] = Progress(**json.loads(path.read_text())) if path.exists() else Progress()
        return self._progress[kind]

    def save(self, kind: str) -> None:
        _write(self._path(kind), json.dumps(asdict(self.progress(kind))))

    def keep(self, kind: str, seed: int, finding: Finding) -> Path:
        """Keep a finding, or count it where its title is known."""
        path = self._finding(kind, finding.title)
        if path.exists():
            kept = json.loads(path.read_text())
            kept["count"] += 1
            kept["seeds"] = sorted({*kept["seeds"], seed})[:KEPT_SEEDS]
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            kept = {"kind": kind, "title": finding.title, "count": 1, "seeds": [seed], "detail": finding.detail}
            if finding.data:
                path.with_suffix(finding.suffix).write_bytes(finding.data)
        _write(path, json.dumps(kept, indent=1))
        return path

    def keep_reduced(self, kind: str, finding: Finding) -> None:
        path = self._finding(kind, finding.title)
        path.with_suffix(f".reduced{finding.suffix}").write_bytes(finding.data)
        kept = json.loads(path.read_text())
        _write(path, json.dumps({**kept, "reduced": finding.detail}, indent=1))

    def first(self, kind: str, title: str) -> int:
        """The lowest seed that shows a finding."""
        return int(json.loads(self._finding(kind, title).read_text())["seeds"][0])

    def _path(self, kind: str) -> Path:
        return self.folder / f"{kind}-{self.seed}.json"

    def _finding(self, kind: str, title: str) -> Path:
        slug = re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60]
        digest = hashlib.sha256(title.encode()).hexdigest()[:6]
        return self.folder / "findings" / kind / f"{slug}-{digest}.json"


def _write(path: Path, text: str) -> None:
    """Replace a file as a whole, so that an interrupted run leaves the old one or the new one."""
    beside = path.with_suffix(".part")
    beside.write_text(text)
    beside.replace(path)


WORKER = module(sys.executable, "tools.fuzz.worker", OMP_NUM_THREADS=1, PYTHONHASHSEED=0)


class Worker:
    """One worker process, and the task it has."""

    def __init__(self) -> None:
        self.child = Child(WORKER)
        self.kind = ""
        self.next = self.last = 0
        """The case it is at, and the end of those it was given."""
        self.turn = 0.0
        """When its turn began."""


class Engine:
    """One run."""

    def __init__(
        self, kinds: Sequence[str], state: State, seconds: float, workers: int = 2, cases: int | None = None
    ) -> None:
        """`cases` is how many of each kind are done at most in this run."""
        self.kinds, self.state, self.seconds, self.count = list(kinds), state, seconds, workers
        self.cases = cases
        loaded = {name: load(name) for name in kinds}
        self.limits = {name: kind.limit_s * slowed() for name, kind in loaded.items()}
        self.innocent = {name: kind.innocent for name, kind in loaded.items()}
        self.totals = {name: Total() for name in kinds}
        self.given = {name: state.progress(name).done for name in kinds}
        """The number of the first case that no worker has."""
        self.behind: dict[str, list[tuple[int, int]]] = {name: [] for name in kinds}
        """Cases below `given` that nobody has done: what a worker left when its turn or its life was over."""
        self.earlier = {name: replace(state.progress(name)) for name in kinds}
        self.done: dict[str, set[int]] = {name: set() for name in kinds}
        self.start = 0.0
        self.shown = 0.0

    def run(self) -> dict[str, Total]:
        """Work until the time is over; what was done is kept, also when the user interrupts."""
        self.start = time.monotonic()
        running: list[Worker] = []
        with selectors.DefaultSelector() as selector:
            try:
                while True:
                    running = [worker for worker in running if not worker.child.ended() or worker.kind]
                    while len(running) < self.count and self._work_left():
                        worker = Worker()
                        selector.register(worker.child, selectors.EVENT_READ, worker)
                        running.append(worker)
                    for worker in running:
                        if not worker.kind:
                            self._give(worker)
                    if not any(worker.kind for worker in running):
                        break
                    for key, _ in selector.select(timeout=0.5):
                        self._hear(key.data, selector)
                    for worker in running:
                        self._look_after(worker, selector)
                    self._show()
            except KeyboardInterrupt:
                print(file=sys.stderr)
            finally:
                for worker in running:
                    worker.child.end()
                for kind in self.kinds:
                    self._save(kind)
        self._show(last=True)
        return self.totals

    # -- giving out ---------------------------------------------------------------------------------

    def _left(self) -> float:
        return self.start + self.seconds - time.monotonic()

    def _open(self, kind: str) -> int:
        """How many cases of a kind may still be given out."""
        if self.cases is None:
            return 1 << 20
        spare = self.earlier[kind].done + self.cases - self.given[kind]
        return spare + sum(count for _, count in self.behind[kind])

    def _work_left(self) -> bool:
        return self._left() > 0 and any(self._open(kind) > 0 for kind in self.kinds)

    def _give(self, worker: Worker) -> None:
        """The kind that had the least time so far gets the next turn."""
        if not self._work_left():
            return
        kind = min((each for each in self.kinds if self._open(each) > 0), key=lambda each: self.totals[each].seconds)
        if self.behind[kind]:
            first, count = self.behind[kind].pop(0)
        else:
            rate = self.totals[kind].cases / max(self.totals[kind].seconds, 1.0)
            first, count = self.given[kind], min(max(int(rate * TURN_S), 20), self._open(kind))
            self.given[kind] += count
        worker.kind, worker.next, worker.last = kind, first, first + count
        self.totals[kind].seconds += 1e-3
        seconds = min(TURN_S, max(self._left(), 0.1))
        seed = self.state.seed << SEED_BITS | first
        worker.child.send({"do": "check", "kind": kind, "first": seed, "count": count, "seconds": seconds})
        worker.turn = time.monotonic()

    # -- taking back --------------------------------------------------------------------------------

    def _hear(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        lines = worker.child.lines()
        if lines is None:
            self._lost(worker, selector, "ended")
            return
        for line in lines:
            if "done" in line:
                self._over(worker)
                if line["large"]:
                    selector.unregister(worker.child)
                    worker.child.end()
            else:
                self._note(worker, line["word"], from_json(line["finding"]))

    def _note(self, worker: Worker, word: str, finding: Finding | None) -> None:
        kind, total = worker.kind, self.totals[worker.kind]
        total.words[word] += 1
        self.done[kind].add(worker.next)
        if finding is not None:
            total.titles[finding.title] += 1
            path = self.state.keep(kind, self.state.seed << SEED_BITS | worker.next, finding)
            if total.titles[finding.title] == 1:
                after = f"after {total.cases} cases, {time.monotonic() - self.start:.0f} s"
                case = self.state.seed << SEED_BITS | worker.next
                self._say(f"{kind}:{case} {finding.title} ({after}; {path.name})")
        worker.next += 1

    def _over(self, worker: Worker) -> None:
        """The worker's turn is over: what it has not done is left for another turn."""
        kind = worker.kind
        self.totals[kind].seconds += time.monotonic() - worker.turn
        if worker.next < worker.last:
            self.behind[kind].append((worker.next, worker.last - worker.next))
        worker.kind = ""
        self._save(kind)

    def _look_after(self, worker: Worker, selector: selectors.BaseSelector) -> None:
        limit = self.limits.get(worker.kind, 0.0) + (0.0 if worker.child.started else START_S)
        if worker.kind and time.monotonic() - worker.child.since > limit:
            worker.child.abort()
            self._lost(worker, selector, "hang")

    def _lost(self, worker: Worker, selector: selectors.BaseSelector, how: str) -> None:
        """A worker ended or hangs: the case it was at is the finding."""
        selector.unregister(worker.child)
        worker.child.end()
        if worker.kind:
            words = worker.child.words
            place = _place(words)
            where = f" in {place[2]} ({place[1]})" if place else ""
            title = f"hang{where}" if how == "hang" else f"{_ending(words, worker.child.code)}{where}"
            finding = Finding(title, words, suffix=".txt")
            innocent = (place is not None and place[2] in self.innocent[worker.kind]) or _runtime_asks_too_much(words)
            self._note(worker, "hang" if how == "hang" else "crash", None if innocent else finding)
            self._over(worker)

    # -- telling ------------------------------------------------------------------------------------

    def _save(self, kind: str) -> None:
        """The state goes as far as all cases are done."""
        progress, total, done = self.state.progress(kind), self.totals[kind], self.done[kind]
        while progress.done in done:
            done.remove(progress.done)
            progress.done += 1
        earlier = self.earlier[kind]
        progress.seconds = earlier.seconds + total.seconds
        progress.found = earlier.found + total.titles.total()
        progress.words = dict(Counter(earlier.words) + total.words)
        self.state.save(kind)

    def _say(self, text: str) -> None:
        print(f"\r\033[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)

    def _show(self, last: bool = False) -> None:
        now = time.monotonic()
        pause = 1.0 if sys.stderr.isatty() else 60.0
        if not last and now - self.shown < pause:
            return
        self.shown = now
        cases = sum(total.cases for total in self.totals.values())
        found = sum(len(total.titles) for total in self.totals.values())
        elapsed = now - self.start
        text = f"{elapsed:.0f} of {self.seconds:.0f} s, {cases} cases, {cases / max(elapsed, 1):.0f} a second, "
        text += f"{found} kinds of faults"
        end = "" if sys.stderr.isatty() and not last else "\n"
        print(f"\r\033[K{text}" if sys.stderr.isatty() else text, file=sys.stderr, end=end, flush=True)


def _place(words: str) -> tuple[str, str, str] | None:
    """The innermost frame of ours, with which faulthandler begins: folder, file and function. Packages may be installed
    in the checkout or anywhere else."""
    frames = re.findall(r'File "(.*?)([^/"]+)", line \d+ in (\w+)', words)
    return next((frame for frame in frames if frame[0].startswith(str(ROOT)) and "site-packages" not in frame[0]), None)


def _runtime_asks_too_much(words: str) -> bool:
    """Whether AddressSanitizer ended the process because ONNX Runtime allocates more than a sanitizer can. Without one,
    ONNX Runtime gets no memory and returns an error. An allocation by our own library is a fault."""
    caller = re.search(r"^ *#1 .*$", words, re.MULTILINE)
    return "allocation-size-too-big" in words and caller is not None and "onnxruntime/capi" in caller[0]


def _ending(words: str, code: int) -> str:
    """How a process ended: what a sanitizer reports, else its signal or exit code."""
    if (report := re.search(r"SUMMARY: (\w+): (\S+) (?:\S*/)?(\S+)", words)) is not None:
        return f"{report[1]}: {report[2]} at {report[3]}"
    return f"the process was {f'killed by {signal.Signals(-code).name}' if code < 0 else f'exit code {code}'}"


def reduce_all(engine: Engine) -> None:
    """Reduce what the run found, each in a process of its own."""
    for kind, total in engine.totals.items():
        for title in total.titles:
            finding = engine.state.first(kind, title)
            small = _reduced(kind, finding, title)
            if small is not None:
                engine.state.keep_reduced(kind, small)


def _reduced(kind: str, seed: int, title: str) -> Finding | None:
    task = {"do": "reduce", "kind": kind, "seed": seed, "finding": to_json(Finding(title))}
    with Child(WORKER) as child:
        child.send(task)
        try:
            return from_json(child.line(REDUCE_S)["finding"])
        except HelperError:
            return None


def table(totals: dict[str, Total]) -> str:
    """The closing table."""
    rows = [("kind", "cases", "fused", "skipped", "found", "seconds", "what became of them")]
    for kind, total in totals.items():
        words = ", ".join(f"{count} {word}" for word, count in total.words.most_common())
        went = sum(total.words[word] for word in FUSED)
        found = f"{total.titles.total()}" + (f" of {len(total.titles)} kinds" if total.titles else "")
        numbers = (f"{total.cases}", f"{went}", f"{total.words['skipped']}")
        rows.append((kind, *numbers, found, f"{total.seconds:.0f}", words))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
