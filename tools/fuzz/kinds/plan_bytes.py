"""Damaged plans of the execution provider: a session with one runs, and tells in its log that it is refused."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import onnxruntime as ort

import fa_compiler
from fa_compiler import provider
from fa_compiler.errors import InputError
from fa_compiler.lowering.ort import custom_ops_library
from fa_compiler.lowering.ort.eager import ORT_ERRORS
from fa_compiler.provider.plan_file import MAGIC, signed
from tests.face.builders import attention, feeds, plain, positions
from tools.fuzz.damage import NUMBERS, Damaged, Fault, Rng, any_bytes
from tools.fuzz.kind import Outcome

START = len(MAGIC) + 32
"""Where the content of a plan begins: behind the magic word and the digest."""
WARNINGS = 2
"""A severity of ONNX Runtime's log."""


class PlanBytes(Damaged):
    """A session of an attention with a damaged plan. Half of the plans get a digest that fits again.

    One without such a digest has to be refused, and the outputs are those without a plan. With a new digest the plan
    may say anything: what is asked is that the session is made, and ends its run with outputs or an error.
    """

    suffix = ".plan"
    unread = "it is damaged"

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="fuzz-plan-"))
        self.file, self.log = folder / "damaged.plan", folder / "log"
        self.plan, *_ = plans()
        self.devices = fa_compiler.register_provider()
        self.library = ctypes.CDLL(custom_ops_library())
        self.model, self.feeds = attention().SerializeToString(), feeds()
        with self._without_matcher():
            self.expected = ort.InferenceSession(self.model, self._options("")).run(None, self.feeds)[0]

    @contextmanager
    def _without_matcher(self) -> Iterator[None]:
        """It would answer where the plan does not. Other kinds in the same process need it."""
        self.library.FaCompilerSetMatcher(None, None)
        try:
            yield
        finally:
            self.library.FaCompilerSetMatcher(provider._matcher, provider._failure)

    def check(self, seed: int) -> Outcome:
        with self._without_matcher():
            return super().check(seed)

    def originals(self, rng: Rng) -> tuple[bytes, bytes]:
        return self.plan, rng.choice(plans())

    def damaged(self, data: bytes, donor: bytes, rng: Rng) -> bytes:
        if rng.random() < 0.5 or not data.startswith(MAGIC):
            return any_bytes(data, donor, rng)
        # The fused model stays as it is: what ONNX Runtime does with a damaged one is not the question.
        before, found, after = data[START:].partition(fused_model(self.plan))
        change = _other_number if rng.random() < 0.6 else any_bytes
        if rng.random() < 0.5:
            before = change(before, donor, rng)
        else:
            after = change(after, donor, rng)
        return signed(before + found + after)

    def read(self, data: bytes, rng: Rng) -> str:
        self.file.write_bytes(data)
        with self._logged():
            session = ort.InferenceSession(self.model, self._options(str(self.file)))
        log = self.log.read_text(errors="replace")
        if data == signed(data[START:]):
            return self._signed(session, log)
        refused = re.search(r"is not used: (.*)", log)
        if refused is None:
            raise Fault("a damaged plan is not refused", log)
        if not np.array_equal(session.run(None, self.feeds)[0], self.expected):
            raise Fault("a damaged plan changes the outputs")
        raise InputError(refused[1])

    def _signed(self, session: ort.InferenceSession, log: str) -> str:
        """What came of a plan with the right digest."""
        try:
            session.run(None, self.feeds)
        except ORT_ERRORS:
            return "does not run"
        told = re.search(r"(is not used|without fused attention): (.*)", log)
        return "runs" if told is None else told[2]

    def _options(self, plan: str) -> ort.SessionOptions:
        options = ort.SessionOptions()
        options.log_severity_level = WARNINGS
        options.intra_op_num_threads = 1
        options.add_provider_for_devices(self.devices, {"plan": plan})
        return options

    @contextmanager
    def _logged(self) -> Iterator[None]:
        """Write standard error of native code to the file."""
        kept = os.dup(2)
        with self.log.open("wb") as file:
            os.dup2(file.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(kept, 2)
                os.close(kept)


def _other_number(data: bytes, donor: bytes, rng: Rng) -> bytes:
    """The bytes with another number of eight bytes: lengths, sizes and places are such numbers."""
    at = 8 * rng.randrange(len(data) // 8 + 1) + len(data) % 8 * rng.randrange(2)
    number = rng.choice((*NUMBERS, len(data), len(donor)))
    return data[:at] + struct.pack("<Q", number) + data[at + 8 :]


@cache
def plans() -> list[bytes]:
    """The plan of the attention, and others."""
    made = []
    with tempfile.TemporaryDirectory() as folder:
        path, plan = Path(folder) / "model.onnx", Path(folder) / "model.plan"
        for model in (attention(), attention(length=8), plain(), positions()):
            path.write_bytes(model.SerializeToString())
            fa_compiler.plan(path, plan)
            made.append(plan.read_bytes())
    return made


@cache
def fused_model(plan: bytes) -> bytes:
    """The fused model of the first graph of a plan."""
    at = START
    texts = []
    for skipped in (0, 0, 0, 0, 8 + 32, 0):  # the number of graphs and the digest of the first are no texts
        at += skipped
        (length,) = struct.unpack_from("<Q", plan, at)
        texts.append(plan[at + 8 : at + 8 + length])
        at += 8 + length
    return texts[-1]
