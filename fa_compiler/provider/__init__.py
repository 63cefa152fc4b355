"""The plugin execution provider: attention is fused in any session of ONNX Runtime that names our
device.

`register_provider` registers the library with ONNX Runtime and gives it the matcher. From then on
ONNX Runtime calls the library while it makes a session, and the library calls `_answer` with the
session's graph. docs/provider.md draws this.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import onnxruntime as ort

from fa_compiler.errors import FaCompilerError, InputError, one_line
from fa_compiler.lowering.ort import custom_ops_library, have_custom_ops, loaded_library
from fa_compiler.passes import Options, Report
from fa_compiler.pipeline.fusing import log_report
from fa_compiler.provider.matching import Replacement, replacement
from fa_compiler.provider.plan_file import entry

PROVIDER = "FaCompilerExecutionProvider"
"""The name of the provider, in ONNX Runtime and in lists of providers."""

FIRST_RELEASE, FIRST_WITH_OPERATORS, FIRST_WITH_CAPTURES = (1, 23), (1, 24), (1, 27)
"""The first release of ONNX Runtime whose plugin interface the library can use, the first in which
our device brings the operators of fused files, and the first that gives a claimed node also the
inputs that only its subgraphs read."""

_LOGGER = logging.getLogger("fa_compiler")

_INFO, _WARNING = 1, 2
"""Severities of ONNX Runtime's log."""


_TAKE = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_char_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_int64),
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_uint64),
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_char_p,
)
_MATCHER = ctypes.CFUNCTYPE(
    None,
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_size_t,
    ctypes.c_void_p,
    _TAKE,
)
_FAILED = ctypes.CFUNCTYPE(None, ctypes.c_char_p)


class _Locks:
    """`matching` is held while a graph is matched: the passes share the symbols of sizes."""

    def __init__(self) -> None:
        self.renew()

    def renew(self) -> None:
        self.registration = threading.Lock()
        self.matching = threading.Lock()


_locks = _Locks()
# A child process has only the thread that forked: no other one would ever release what it held.
if hasattr(os, "register_at_fork"):  # not on Windows, where no process forks
    os.register_at_fork(after_in_child=_locks.renew)


@dataclass
class Overheard:
    """What the provider answers in the sessions that one thread makes.

    `reports` are those of the graphs that it saw, and `failures` say why a session runs without
    fused attention. `interrupted` says that the user ended the matcher. `entries` are the answers
    as a plan holds them, if `keeps_entries`. The matcher fuses with the `options`.
    """

    options: Options = field(default_factory=Options)
    reports: list[Report] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    interrupted: bool = False
    keeps_entries: bool = False
    entries: list[bytes] = field(default_factory=list)


class _Thread(threading.local):
    """ONNX Runtime asks in the thread that makes the session."""

    overheard: Overheard | None = None


_thread = _Thread()


@contextmanager
def overhear(entries: bool = False, options: Options | None = None) -> Iterator[Overheard]:
    """Write down what the provider does in the sessions that this thread makes, and, if wanted, the
    entries of a plan.

    The sessions are fused with the options. Whoever listens already hears the reports and failures,
    too.
    """
    before, heard = _thread.overheard, Overheard(options or Options(), keeps_entries=entries)
    _thread.overheard = heard
    try:
        yield heard
    finally:
        _thread.overheard = before
        if before is not None:
            before.reports += heard.reports
            before.failures += heard.failures


def register_provider() -> Sequence[Any]:
    """Register the provider with ONNX Runtime, and return its devices: `onnxruntime.OrtEpDevice`
    objects.

    A session fuses its attention if its options name the device:

        options = onnxruntime.SessionOptions()
        options.add_provider_for_devices(fa_compiler.register_provider(), {})
        session = onnxruntime.InferenceSession("model.onnx", options)

    A second call only returns the devices.

    Raises:
        InputError: this ONNX Runtime is older than 1.23.
        LibraryNotBuilt: the library is not installed.
        LibraryNotLoaded: the system does not load it.
    """
    check_available()
    with _locks.registration:
        if not (devices := _devices()):
            _library().FaCompilerSetMatcher(_matcher, _failure)
            ort.register_execution_provider_library(PROVIDER, custom_ops_library())
            devices = _devices()
    return devices


def add_device(options: ort.SessionOptions) -> None:
    """Add the provider's device to the options of sessions; with the operators, unless they have
    them already.

    Raises what `register_provider` does, or an error of ONNX Runtime.
    """
    devices = register_provider()
    library = _library()
    library.FaCompilerHaveOperators(have_custom_ops(options))
    try:
        options.add_provider_for_devices(devices, {})
    finally:
        library.FaCompilerHaveOperators(False)


def check_available() -> None:
    """Raise what `register_provider` does, without registering anything."""
    if release() < FIRST_RELEASE:
        first = ".".join(map(str, FIRST_RELEASE))
        raise InputError(
            f"the provider needs ONNX Runtime {first} or newer; this is {ort.__version__}"
        )
    _library()


def release() -> tuple[int, int]:
    """The release of ONNX Runtime."""
    major, minor = ort.__version__.split(".")[:2]
    return int(major), int(minor)


def _devices() -> list[Any]:
    return [device for device in ort.get_ep_devices() if device.ep_name == PROVIDER]


@functools.cache
def _library() -> ctypes.CDLL:
    """The library, which ONNX Runtime loads, too. It has no matcher any more when the interpreter
    ends."""
    library = loaded_library("FaCompilerSetMatcher", "FaCompilerHaveOperators")
    atexit.register(library.FaCompilerSetMatcher, None, None)
    return library


def _answer(model: int, size: int, weights: Any, count: int, answer: int, take: Any) -> None:
    """Answer the library. No exception may leave this function: there is nobody to catch it."""
    found, severity, message = _match(ctypes.string_at(model, size), weights[:count])
    content = b"" if found is None or found.model is None else found.model
    sizes = () if found is None else found.sizes
    read = () if found is None else tuple(found.read)
    numbers, places = (ctypes.c_int64 * len(sizes))(*sizes), (ctypes.c_uint64 * len(read))(*read)
    take(
        answer,
        content,
        len(content),
        numbers,
        len(sizes),
        places,
        len(read),
        severity,
        message.encode(),
    )


_matcher = _MATCHER(_answer)


def _match(graph: bytes, addresses: Sequence[int]) -> tuple[Replacement | None, int, str]:
    """What takes the place of the graph, and a line for the log with its severity. None: the
    matcher failed."""
    heard = _thread.overheard or Overheard()
    try:
        with _locks.matching:
            found = replacement(graph, addresses, release() >= FIRST_WITH_CAPTURES, heard.options)
        if heard.keeps_entries:
            heard.entries.append(entry(graph, found))
    except FaCompilerError as error:
        return _failed(str(error))
    except BaseException as error:  # also an interrupt: ONNX Runtime cannot pass it on
        heard.interrupted |= isinstance(error, KeyboardInterrupt)
        return _failed(f"{type(error).__name__}: {one_line(error)}")
    heard.reports.append(found.report)
    log_report(found.report)
    return found, _INFO, found.report.summary


def _failed(reason: str) -> tuple[None, int, str]:
    _note_failure(reason)
    return None, _WARNING, f"the session runs without fused attention: {reason}"


def _library_failed(reason: bytes) -> None:
    """The library could not use the last answer: no session has the fused graph of its report."""
    if _thread.overheard is not None and _thread.overheard.reports:
        _thread.overheard.reports.pop()
    # a message of ONNX Runtime ends with a line
    _note_failure(" ".join(reason.decode(errors="replace").split()))


_failure = _FAILED(_library_failed)


def _note_failure(reason: str) -> None:
    _LOGGER.warning("a session runs without fused attention: %s", reason)
    if _thread.overheard is not None:
        _thread.overheard.failures.append(reason)
