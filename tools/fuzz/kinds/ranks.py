"""Models that are divided along the sequence, run by threads, against one process."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np

import fa_compiler
from fa_compiler.errors import InputError
from fa_compiler.op_registry.collectives import METHODS
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.session import ShardedSession
from fa_compiler.parallel.threads import run_threads
from tools.fuzz.difference import run_original, session
from tools.fuzz.kind import Finding, Kind, Outcome
from tools.fuzz.sequence import sequences

TOLERANCE = 1e-4
"""Relative to the largest number: ranks add in another order, and a model is some projections and norms deep."""
TIMEOUT = 15.0


class Ranks(Kind):
    """A random model over a sequence. The ranks give what one process gives, or the model is refused by name."""

    innocent = ("run_original",)

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        drawn = sequences(rng)
        model = drawn.model(named=rng.random() < 0.6)
        ranks, method = rng.randint(2, 4), rng.choice(("auto", *METHODS))
        feeds: dict[str, Array] = {
            "x": drawn.numbers.standard_normal(drawn.x.shape).astype(np.float32),
            "ids": drawn.numbers.integers(0, 7, drawn.ids.shape),
        }
        try:
            expected = run_original(session(model, custom=False), feeds)
        except Exception:  # of ONNX Runtime: a size that does not fit, such as a Slice behind the end
            return Outcome("skipped")
        detail = f"{ranks} ranks, {method}, {drawn.x.shape}, {drawn.heads} heads: {' '.join(drawn.words)}"
        with tempfile.TemporaryDirectory(prefix="fa_compiler-ranks-") as folder:
            try:
                made = fa_compiler.shard(model, Path(folder) / "out", ranks, method=method, axes={"x": 1, "ids": 1})
            except InputError as error:
                named = " node '" in str(error) or "output '" in str(error) or "sequence is" in str(error)
                return Outcome("refused", None if named else Finding("a refusal names nothing", f"{error}\n{detail}"))

            def task(communicator: Communicator) -> dict[str, Array]:
                own = ShardedSession(made.path, communicator, threads=1)
                return own.gather(own.run(feeds), feeds)

            found = run_threads(ranks, task, TIMEOUT)[0]
        for output, wanted in zip(model.graph.output, expected, strict=True):
            wrong = fault(wanted, found[output.name])
            if wrong is not None:
                title = f"ranks give {wrong} [{' '.join(sorted(set(drawn.words)))}]"
                return Outcome("wrong", Finding(title, f"{output.name}, {detail}", model.SerializeToString()))
        return Outcome("divided")


def fault(wanted: Array, got: Array) -> str | None:
    """How the results of an output differ; None where they agree."""
    if wanted.shape != got.shape or wanted.dtype != got.dtype:
        return "another shape or type"
    if wanted.dtype.kind != "f":
        return None if (wanted == got).all() else "other integers"
    if (np.isfinite(wanted) != np.isfinite(got)).any():
        return "NaN or infinities at other places"
    finite = np.isfinite(wanted)
    largest = float(np.abs(wanted, where=finite, out=np.zeros_like(wanted)).max(initial=0.0))
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.where(finite, wanted - got, 0))
    return None if (apart <= TOLERANCE * largest).all() else "other numbers"
