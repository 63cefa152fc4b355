"""Work against size: each growing thing, and random ladders, in every public entry.

    few      two small sizes: what doubles with each step shows
    many     three sizes beyond those where some proofs end
    large    thousands of what is cheap, by the processor's time: a loop without a call is not counted otherwise

Calls are counted, which are the same on a busy machine. A time is the least of some runs at the larger size,
and the most at the smaller one.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import onnx

from fa_compiler import FaCompilerError
from tests.growth.entries import ENTRIES
from tests.growth.graphs import GROWING, mixed, model
from tests.growth.steps import FEW, measured
from tools.fuzz.kind import Finding, Kind, Outcome

HEAVY = ("attentions", "caches", "gradients", "readers", "passed_on", "branches_with", "sums_of")
"""The names of things each of which is an attention of its own: they cost a hundred times as much."""

CHEAP = (
    *("plain_chain", "plain_width", "plain_without_names", "initializers", "functions_called", "bias_chain"),
    *("functions_of_their_own", "mask_chain_of_negations", "query_activated", "result_steps", "reversed_nodes"),
)
"""Things that take less than a millisecond each."""
CUBIC = 3**3
"""What three times the size is in work, at most, where few steps are drawn."""
LARGE = (1200, 5000)
SLOWER = 1.8
"""How many times the time of linear growth is a fault."""
LEAST_S = 0.2
"""Less than this is no time to compare with."""


class GrowthOfWork(Kind):
    """One entry, one growing thing or random ladder, three sizes."""

    limit_s = 120.0
    """Steps are counted, which takes a multiple of the time; what hangs ends by their number."""

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        entry = rng.choice([*ENTRIES, *["inspect ort"] * len(ENTRIES)])
        way = rng.choice(("few", "few", "few", "few", "many", "large"))
        if way == "large":
            return _timed(entry, rng.choice(CHEAP))
        named = rng.random() < 0.6
        name = rng.choice(sorted(GROWING)) if named else "mixed"
        heavy = name.startswith(HEAVY)
        if way == "few":
            size = rng.randint(3, 5) if heavy else rng.randint(8, 12)
            sizes: tuple[int, ...] = (size, 3 * size)
        else:
            # Beyond 64 and 100 operators, where some proofs end whatever follows.
            size = rng.randint(8, 12) if heavy else rng.randint(60, 110)
            sizes = (size, 2 * size, 4 * size)
        made = measured(entry, name, sizes, model if named else lambda _, grown: mixed(seed, grown))
        # Some proofs are quadratic up to their limits, which few steps do not reach.
        bounded = way == "few" and not heavy and made.counts[-1] < CUBIC * max(made.counts[0], FEW)
        if made.fault is None or bounded:
            return Outcome("linear")
        detail = f"{entry}, {name} of the sizes {sizes}: {made.counts} calls; {made.fault}"
        data = (model(name, size) if named else mixed(seed, size)).SerializeToString()
        what = name if named else "a random ladder"
        return Outcome("grown", Finding(f"{entry} of {what} is not linear", detail, data))


def _timed(entry: str, name: str) -> Outcome:
    """One entry, one cheap thing, two large sizes."""
    small, large = (model(name, size) for size in LARGE)
    _seconds(entry, small)  # what is made once
    first, last = _seconds(entry, small), _seconds(entry, large)
    most = SLOWER * LARGE[1] / LARGE[0]
    for _ in range(2):
        if last <= most * max(first, LEAST_S):
            return Outcome("linear in time")
        first, last = max(first, _seconds(entry, small)), min(last, _seconds(entry, large))
    if last <= most * max(first, LEAST_S):
        return Outcome("linear in time")
    detail = f"{entry}, {name} of the sizes {LARGE}: {first:.2f} and {last:.2f} s of the processor"
    return Outcome("grown", Finding(f"{entry} of {name} is not linear in time", detail, suffix=".txt"))


def _seconds(entry: str, made: onnx.ModelProto) -> float:
    """The processor's time for a model; a refusal is an answer."""
    action: Callable[[onnx.ModelProto, Path], object] = ENTRIES[entry]
    with TemporaryDirectory() as folder:
        start = time.process_time()
        with suppress(FaCompilerError):
            action(made, Path(folder))
        return time.process_time() - start
