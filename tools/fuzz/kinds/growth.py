"""Work against size: each growing thing, and random ladders, at three sizes, in every public entry."""

from __future__ import annotations

import random

from tests.growth.entries import ENTRIES
from tests.growth.graphs import GROWING, mixed, model
from tests.growth.steps import measured
from tools.fuzz.kind import Finding, Kind, Outcome

HEAVY = ("attentions", "caches", "gradients", "readers", "passed_on", "branches_with", "sums_of")
"""The names of things each of which is an attention of its own: they cost a hundred times as much."""


class GrowthOfWork(Kind):
    """One entry, one growing thing or random ladder, three sizes."""

    limit_s = 120.0
    """Steps are counted, which takes a multiple of the time; what hangs ends by their number."""

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        entry = rng.choice([*ENTRIES, *["inspect ort"] * len(ENTRIES)])
        named = rng.random() < 0.6
        name = rng.choice(sorted(GROWING)) if named else "mixed"
        # Beyond 64 and 100 operators, where some proofs end whatever follows.
        size = rng.randint(8, 12) if name.startswith(HEAVY) else rng.randint(60, 110)
        sizes = (size, 2 * size, 4 * size)
        made = measured(entry, name, sizes, model if named else lambda _, grown: mixed(seed, grown))
        if made.fault is None:
            return Outcome("linear")
        detail = f"{entry}, {name} of the sizes {sizes}: {made.counts} calls; {made.fault}"
        data = (model(name, size) if named else mixed(seed, size)).SerializeToString()
        what = name if named else "a random ladder"
        return Outcome("grown", Finding(f"{entry} of {what} is not linear", detail, data))
