"""One operator at a time of those that ranks compute from their parts, run by threads, against one process."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np

import fa_compiler
from fa_compiler.errors import InputError
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.session import ShardedSession
from fa_compiler.parallel.threads import run_threads
from tools.fuzz.difference import run_original, session
from tools.fuzz.kind import Finding, Kind, Outcome
from tools.fuzz.kinds.ranks import TIMEOUT
from tools.fuzz.rules import drawn

TOLERANCE = {"float16": 2.0**-9, "float32": 1e-5, "float64": 1e-9}
"""Relative to the largest number: ranks add in another order, and a sum of 16 bits may be rounded to either side."""
TYPES = {"tensor(float)": 1, "tensor(uint8)": 2, "tensor(int8)": 3, "tensor(uint16)": 4, "tensor(int16)": 5}
TYPES |= {"tensor(int32)": 6, "tensor(int64)": 7, "tensor(bool)": 9, "tensor(float16)": 10, "tensor(double)": 11}
TYPES |= {"tensor(uint32)": 12, "tensor(uint64)": 13}
SUMMING = ("MatMul", "Gemm", "Einsum", "ReduceSum", "ReduceMean")
"""Operators that add up numbers. Whether a sum overflows depends on the order of the additions, in ONNX Runtime, too: a
product that is added without being rounded may stay finite where it alone is infinite."""


class Rules(Kind):
    """A random operator of the tables of rules. The ranks give what one process gives, or it is refused by name."""

    innocent = ("run_original", "session")

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        case = drawn(rng)
        if case is None:
            return Outcome("no such opset")
        model, ranks = case.model, rng.randint(1, 3)
        if not case.axes or case.length < ranks:
            return Outcome("no sequence")
        try:
            original = session(model, custom=False)
            for output, made in zip(model.graph.output, original.get_outputs(), strict=True):
                output.type.tensor_type.elem_type = TYPES[made.type]
            expected = run_original(session(model, custom=False), case.feeds)
        except Exception:  # of ONNX Runtime: sizes that do not fit, a type without a kernel
            return Outcome("skipped")
        detail = f"{ranks} ranks, {case.detail}"
        op = next(each.op_type for each in model.graph.node if each.name == "node")
        with tempfile.TemporaryDirectory(prefix="fa_compiler-rules-") as folder:
            try:
                sharded = fa_compiler.shard(model, Path(folder) / "out", ranks, axes=case.axes)
            except InputError as error:
                named = " node '" in str(error) or "output '" in str(error) or "sequence is" in str(error)
                return Outcome("refused", None if named else Finding("a refusal names nothing", f"{error}\n{detail}"))

            def task(communicator: Communicator) -> dict[str, Array]:
                own = ShardedSession(sharded.path, communicator, threads=1)
                return own.gather(own.run(case.feeds), case.feeds)

            try:
                found = run_threads(ranks, task, TIMEOUT)[0]
            except InputError as error:
                title = f"ranks end in an error [{op}]"
                return Outcome("wrong", Finding(title, f"{error}\n{detail}", model.SerializeToString()))
        overflows = op in SUMMING and any(map(is_huge, case.feeds.values()))
        for output, wanted in zip(model.graph.output, expected, strict=True):
            got = found[output.name]
            if overflows:
                known = np.isfinite(wanted) & np.isfinite(got)
                wanted, got = np.where(known, wanted, 0), np.where(known, got, 0)
            wrong = fault(wanted, got)
            if wrong is not None:
                title = f"ranks give {wrong} [{op}]"
                return Outcome("wrong", Finding(title, f"{output.name}, {detail}", model.SerializeToString()))
        whole = all(axis is None for axis in sharded.report.outputs.values())
        return Outcome("whole" if whole else "in parts")


def is_huge(array: Array) -> bool:
    """Does an input hold numbers whose sum may overflow?"""
    return array.dtype.kind == "f" and bool((np.abs(array[np.isfinite(array)]) > np.finfo(array.dtype).max / 1e3).any())


def fault(wanted: Array, got: Array) -> str | None:
    """How the results of an output differ; None where they agree."""
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return "another shape or type"
    if wanted.dtype.kind != "f":
        return None if (wanted == got).all() else "other integers"
    if (np.isnan(wanted) != np.isnan(got)).any():
        return "NaN at other places"
    finite = np.isfinite(wanted)
    if (np.isfinite(got) != finite).any() or (wanted != got)[~finite & ~np.isnan(wanted)].any():
        return "infinities at other places"
    largest = float(np.abs(wanted, where=finite, out=np.zeros_like(wanted)).max(initial=0.0))
    with np.errstate(all="ignore"):
        apart = np.abs(np.where(finite, wanted - got, 0))
    return None if (apart <= TOLERANCE[str(wanted.dtype)] * largest).all() else "other numbers"
