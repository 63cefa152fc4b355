"""Helper processes that answer one JSON line for each JSON line, and may crash without harm."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[1]
"""The checkout."""


def module(python: str | Path, name: str, *words: str | Path, **settings: object) -> list[str]:
    """The command that runs a module of this checkout in an interpreter that need not have its packages.

    `settings` are variables of its environment.
    """
    variables = [f"{key}={value}" for key, value in {"PYTHONPATH": ROOT, **settings}.items()]
    return ["env", *variables, str(python), "-m", name, *map(str, words)]


class HelperError(Exception):
    """The helper crashed or took too long. It is started again for the next question."""


class LineServer:
    """One helper process, which is started for the first question.

    `greeting` is its first line, which identifies it.
    """

    def __init__(self, command: Sequence[str], timeout: float) -> None:
        self.command = list(command)
        self.timeout = timeout
        self.greeting: dict[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._pending = b""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._errors.close()

    def ask(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send one question and wait for its answer. Raises HelperError."""
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin is not None
        self._errors.seek(0)
        self._errors.truncate()
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("crashed") from None
        return self._read()

    def start(self) -> dict[str, Any]:
        """Start the process and return its greeting."""
        self._pending = b""
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
        )
        self.greeting = self._read()
        return self.greeting

    def stop(self) -> None:
        """End the process at once."""
        if self._process is not None:
            self._process.kill()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with contextlib.suppress(BrokenPipeError):  # unread input of a process that has ended
                        pipe.close()
            self._process.wait()
            self._process = None

    def _read(self) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(self.timeout):
                    raise self._failure(f"no answer in {self.timeout:g} s")
                chunk = os.read(self._process.stdout.fileno(), 1 << 16)
                if not chunk:
                    raise self._failure("crashed")
                self._pending += chunk
        line, self._pending = self._pending.split(b"\n", 1)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _failure(self, what: str) -> HelperError:
        code = self._process.poll() if self._process is not None else None
        self.stop()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        detail = f" (exit {code})" if code is not None else ""
        return HelperError(what + detail + (f": {last[0][:200]}" if last else ""))


def serve(answer: Callable[[dict[str, Any]], dict[str, Any]], greeting: Mapping[str, Any]) -> None:
    """The main loop of a helper: send the greeting, then answer each line of standard input.

    Output of the answering code goes to standard error, so it cannot be mixed with the answers.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    replies.write(json.dumps(greeting) + "\n")
    replies.flush()
    for line in sys.stdin:
        replies.write(json.dumps(answer(json.loads(line))) + "\n")
        replies.flush()
