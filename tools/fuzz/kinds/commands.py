"""The command line: where its files go, what an interrupt leaves, and results that leave their process.

files        each output of a command goes to a new file, an existing one, a link, a pipe or standard output. The file
             is there and is whole, a link and a pipe stay what they are, and nothing else is written. Where a file goes
             to standard output, nothing else does
interrupts   Ctrl-C or SIGTERM, while the command imports some module or once it runs: one line, one exit code, no file
results      what `optimize` returns, and each error, is the same behind `pickle`

No place is one of the machine's own, such as /dev/null or /dev/stdout: a fault might replace it.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import onnx

import fa_compiler
from fa_compiler.command_line import main
from tests.passes.builder import build
from tests.passes.strategies import even
from tools.fuzz.kind import Finding, Kind, Outcome
from tools.processes import ROOT

OLD = b"what was there"
INTERRUPTED = (main.INTERRUPTED, "fa-compiler: error: interrupted; nothing was written\n")
IMPORTS = range(40, 900)
"""A command that fuses a model imports about so many modules; what it needs to handle interrupts is among the first."""
WAIT_S = 60.0
HASTY = """
import signal, sys
left, number, native = (int(sys.argv.pop(1)) for _ in range(3))

class Interrupting:
    def find_spec(self, name, *others):
        global left
        left -= 1
        if left != 0:
            return
        try:
            signal.raise_signal(number)
        except KeyboardInterrupt:
            if native:
                raise ImportError("initialization failed")
            raise

sys.argv[0] = "/usr/bin/fa-compiler"
sys.meta_path.insert(0, Interrupting())
from fa_compiler.__main__ import main
sys.exit(main())
"""
"""The command, with a signal at the import of a module, of which native code makes an ImportError at times."""
PLACES = ("new", "new", "old", "link", "link to nothing", "link to a pipe", "pipe", "standard output")


@cache
def _models() -> Sequence[bytes]:
    return [build(even(seed)).model.SerializeToString() for seed in range(8)]


def _is_model(content: bytes) -> bool:
    return bool(onnx.ModelProto.FromString(content).graph.node)


def _is_report(content: bytes) -> bool:
    return "blocks" in json.loads(content)


def _is_page(content: bytes) -> bool:
    return content.lstrip().lower().startswith(b"<!doctype html") and content.rstrip().endswith(b"</html>")


def _is_picture(content: bytes) -> bool:
    return b"<svg" in content[:500] and content.rstrip().endswith(b"</svg>")


PAGES: Mapping[str, Callable[[bytes], bool]] = {"--html": _is_page, "--graph": _is_picture}
OUTPUTS: Mapping[str, Mapping[str, Callable[[bytes], bool]]] = {
    "optimize": {"-o": _is_model, "--report": _is_report, **PAGES},
    "inspect": PAGES,
    "plan": {"-o": lambda content: content.startswith(b"fa_compiler plan")},
}
"""What each command writes, and what is in it."""
ENDINGS = {"--report": ".json", "--html": ".html", "--graph": ".svg"}


class Commands(Kind):
    """One command, or one result."""

    limit_s = 120.0

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        way = rng.choice([_files] * 12 + [_interrupted] * 2 + [_kept] * 2)
        with tempfile.TemporaryDirectory(prefix="fuzz-commands-") as folder:
            (Path(folder) / "model.onnx").write_bytes(rng.choice(_models()))
            return way(rng, Path(folder))


@dataclass
class _Place:
    """Where an output goes. `target` is the file that is to hold it, if that is a file."""

    kind: str
    given: Path
    target: Path | None
    read: list[bytes]
    """What was read from a pipe."""

    @staticmethod
    def of(kind: str, given: Path) -> _Place:
        """A place of a kind, under this name."""
        target = None if kind in ("pipe", "link to a pipe", "standard output") else given
        if kind == "old":
            given.write_bytes(OLD)
        elif kind.startswith("link"):
            other = given.with_name(f"other-{given.name}")
            target = other if target is not None else None
            if kind == "link":
                other.write_bytes(OLD)
            if kind == "link to a pipe":
                os.mkfifo(other)
            given.symlink_to(other.name)
        elif kind == "pipe":
            os.mkfifo(given)
        elif kind == "standard output":
            given.symlink_to("/proc/self/fd/1")
        return _Place(kind, given, target, [])

    def reader(self) -> threading.Thread | None:
        """A thread that reads a pipe."""
        if "pipe" not in self.kind:
            return None
        return threading.Thread(target=lambda: self.read.append(self.given.read_bytes()), daemon=True)

    def fault(self, holds: Callable[[bytes], bool], said: bytes) -> str | None:
        """What is wrong behind a run that went well."""
        if self.kind.startswith(("link", "standard")) and not self.given.is_symlink():
            return "a link was replaced"
        if "pipe" in self.kind and not self.given.is_fifo():
            return "a pipe was replaced"
        content = said if self.kind == "standard output" else b"".join(self.read)
        if self.target is not None:
            if not self.target.is_file():
                return "no file was written"
            content = self.target.read_bytes()
        try:
            whole = holds(content)
        except Exception as error:  # of whoever reads it
            return f"what was written is not read ({type(error).__name__})"
        return None if whole else "something else was written"


def _files(rng: random.Random, folder: Path) -> Outcome:
    """A command, with its outputs at odd places."""
    command = rng.choice(["optimize", "optimize", "optimize", "inspect", "plan"])
    known = OUTPUTS[command]
    options = [each for each in known if each == "-o" or rng.random() < 0.4]
    places: dict[str, _Place] = {}
    for option in options:
        taken = any(place.kind == "standard output" for place in places.values())
        kind = rng.choice(PLACES[:-1] if taken else PLACES)
        places[option] = _Place.of(kind, folder / f"{option.strip('-')}{ENDINGS.get(option, '.onnx')}")
    words = [command, str(folder / "model.onnx"), *(["--quiet"] if command == "optimize" else [])]
    words += [word for option, place in places.items() for word in (option, str(place.given))]
    before = {path.name for path in folder.iterdir()}
    readers = [reader for place in places.values() if (reader := place.reader()) is not None]
    for reader in readers:
        reader.start()
    code, said, errors = _forked(words)
    for reader in readers:
        reader.join(5.0 if code == 0 else 0.1)
    kinds = {option: place.kind for option, place in places.items()}
    detail = f"{' '.join(words)}\n{kinds}\n{code}\n{errors.decode(errors='replace')}"

    def found(title: str) -> Outcome:
        return Outcome("wrong", Finding(f"{command}: {title}", detail, suffix=".txt"))

    if code != main.OK:
        return found(f"exit code {code}")
    for option, place in places.items():
        if (fault := place.fault(known[option], said)) is not None:
            return found(f"{fault} [{option} at {place.kind}]")
    targets = {place.target.name for place in places.values() if place.target is not None}
    left = {path.name for path in folder.iterdir()} - before - targets
    return found(f"other files are left: {sorted(left)}") if left else Outcome("fused")


def _forked(words: Sequence[str]) -> tuple[int, bytes, bytes]:
    """The exit code of a command in a child of this process, and what it wrote to its two streams."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        child = os.fork()
        if child == 0:
            code = 120
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
                code = main.main(words)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        out.seek(0)
        err.seek(0)
        return os.waitstatus_to_exitcode(status), out.read(), err.read()


def _interrupted(rng: random.Random, folder: Path) -> Outcome:
    """A command that gets a signal at the import of a module; it is not asked where nothing is imported any more."""
    number = rng.choice((signal.SIGINT, signal.SIGTERM))
    place, native = rng.choice(IMPORTS), rng.choice((0, 1))
    words = ["optimize", "model.onnx", "-o", "out.onnx", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", HASTY, *map(str, (place, int(number), native)), *words],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=WAIT_S,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a search in the background ignores it
    )  # fmt: skip
    left = sorted(path.name for path in folder.iterdir() if path.name != "model.onnx")
    if done.returncode == 0 and left == ["out.onnx"]:
        return Outcome("accepted")
    if (done.returncode, done.stderr) == INTERRUPTED and not left and not done.stdout:
        return Outcome("interrupted")
    words[:0] = [signal.Signals(number).name, f"at import {place}", "as another error" if native else ""]
    detail = f"{' '.join(words)}: {done.returncode}, {left}\n{done.stdout}\n{done.stderr}"
    title = f"an interrupt ends in exit code {done.returncode}" if not left else "an interrupt leaves files"
    return Outcome("wrong", Finding(title, detail, suffix=".txt"))


def _kept(rng: random.Random, folder: Path) -> Outcome:
    """Results and errors behind `pickle`, as a process pool returns them."""
    word = rng.choice(("result", "written", "unknown option", "unknown operator", "no model", "comparison"))
    model, out = folder / "model.onnx", folder / "out.onnx"
    try:
        made: object
        if word == "comparison":
            made = fa_compiler.verify(model, model)
        elif word == "no model":
            made = fa_compiler.optimize(b"no model")
        elif word == "unknown option":
            made = fa_compiler.optimize(model, assume=["nothing"])
        elif word == "unknown operator":
            made = fa_compiler.ops.run("Nothing", {}, {})
        else:
            made = fa_compiler.optimize(model, out if word == "written" else None)
    except fa_compiler.FaCompilerError as error:
        made = error
    try:
        same = str(pickle.loads(pickle.dumps(made))) == str(made)
    except Exception as error:  # of pickle
        title = f"not returned by a process pool: {type(made).__name__}"
        return Outcome("wrong", Finding(title, str(error), suffix=".txt"))
    title = f"another {type(made).__name__} behind pickle"
    return Outcome("fused", None if same else Finding(title, str(made), suffix=".txt"))
