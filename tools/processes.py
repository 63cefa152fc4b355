"""Processes that take and give lines of JSON, and may crash or hang without harm to whoever started them.

`Child` is such a process. `Server` is one that answers each line by one line, and is started again after a crash.
`serve` is the other end of it.

Where a process must begin with what its parent has in memory, it is forked instead: in the sweep (tools/sweep/child.py)
and for the mutants (tools/mutants/trials.py).
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[1]
"""The checkout."""

LAST_WORDS = 16000
"""Bytes that are kept of what a process wrote before it ended: the report of a sanitizer and a traceback."""

Line = dict[str, Any]


def module(python: str | Path, name: str, *words: str | Path, **settings: object) -> list[str]:
    """The command that runs a module of this checkout in an interpreter, which need not have its packages.

    `settings` are variables of its environment. PYTHONPATH is kept for this interpreter only, because no other one can
    use the packages there.
    """
    kept = os.environ.get("PYTHONPATH") if python == sys.executable else None
    path = os.pathsep.join([str(ROOT), *([kept] if kept else [])])
    variables = [f"{key}={value}" for key, value in {"PYTHONPATH": path, **settings}.items()]
    return ["env", *variables, str(python), "-m", name, *map(str, words)]


class HelperError(Exception):
    """The process crashed or took too long, and has been ended."""


class Child:
    """A process, from its start to its end. What it writes to standard error goes to a file without a name."""

    def __init__(self, command: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, bufsize=0
        )
        self._rest = b""
        self._waiting: list[Line] = []
        self.started = False
        """Whether it has written a line."""
        self.since = time.monotonic()
        """When it was last told something, or heard of."""
        self.words = ""
        """After its end: the last `LAST_WORDS` bytes that it wrote to standard error."""
        self.code = 0
        """After its end: the exit code, below 0 for a signal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def fileno(self) -> int:
        """Where its lines come from, for a selector."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def send(self, line: Mapping[str, Any]) -> None:
        """Give it a line. Raises BrokenPipeError if it has ended."""
        assert self._process.stdin is not None
        left = memoryview(json.dumps(line).encode() + b"\n")
        while left:
            left = left[self._process.stdin.write(left) :]
        self.since = time.monotonic()

    def lines(self) -> list[Line] | None:
        """What it has said meanwhile; None if it has ended. Waits until there is something."""
        data = os.read(self.fileno(), 1 << 20)
        if not data:
            return None
        *whole, self._rest = (self._rest + data).split(b"\n")
        self.since = time.monotonic()
        self.started = self.started or bool(whole)
        return [json.loads(line) for line in whole]

    def line(self, timeout: float) -> Line:
        """The next line. If there is none for `timeout` seconds, ends the process and raises HelperError."""
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while not self._waiting:
                if not selector.select(timeout):
                    raise self.failure(f"no answer in {timeout:g} s")
                said = self.lines()
                if said is None:
                    raise self.failure("crashed")
                self._waiting += said
        return self._waiting.pop(0)

    def failure(self, what: str) -> HelperError:
        """End it. The error says what happened, the exit code if it ended by itself, and the last line of its log."""
        code = f" (exit {self._process.returncode})" if self.ended() else ""
        self.end()
        last = self.words.strip().splitlines()[-1:]
        return HelperError(what + code + (f": {last[0][:200]}" if last else ""))

    def forget(self) -> None:
        """Empty its log."""
        self._log.seek(0)
        self._log.truncate()

    def abort(self) -> None:
        """Make it write where it is, if its faulthandler is enabled; this ends it."""
        self._process.send_signal(signal.SIGABRT)
        time.sleep(0.5)

    def end(self) -> None:
        """End it at once, and read its last words."""
        if self._log.closed:
            return
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self.code = self._process.wait()
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - LAST_WORDS))
        self.words = self._log.read().decode(errors="replace")
        self._log.close()


class Server:
    """A process that answers one line by one line. It is started for the first question, and again after a crash.

    `greeting` is its first line, which identifies it.
    """

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self.command = list(command)
        self.timeout = timeout
        self.greeting: Line = {}
        self._child: Child | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def ask(self, question: Mapping[str, Any]) -> Line:
        """Send one question and wait for its answer. Raises HelperError."""
        if self._child is None:
            self.start()
        assert self._child is not None
        self._child.forget()
        try:
            self._child.send(question)
        except BrokenPipeError:
            error = self._child.failure("crashed")
            self._child = None
            raise error from None
        return self._answer()

    def start(self) -> Line:
        """Start the process and return its greeting. Raises HelperError."""
        self.stop()
        self._child = Child(self.command)
        self.greeting = self._answer()
        return self.greeting

    def stop(self) -> None:
        """End the process at once."""
        if self._child is not None:
            self._child.end()
            self._child = None

    def _answer(self) -> Line:
        assert self._child is not None
        try:
            return self._child.line(self.timeout)
        except HelperError:
            self._child = None
            raise


# -- the other end ----------------------------------------------------------------------------------


def replies() -> Callable[[Mapping[str, Any]], None]:
    """The function that writes a line. What this process prints from now on goes to standard error, so it cannot be
    mixed with the lines."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda line: print(json.dumps(line), file=out)


def tasks() -> Iterator[Line]:
    """The lines of standard input, until it ends."""
    return map(json.loads, sys.stdin)


def serve(answer: Callable[[Line], Line], greeting: Mapping[str, Any]) -> None:
    """The main loop of a Server's process: send the greeting, then answer each line."""
    reply = replies()
    reply(greeting)
    for task in tasks():
        reply(answer(task))
