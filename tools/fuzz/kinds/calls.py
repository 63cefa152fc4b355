"""Right calls of all operators: the kernels of every instruction set against the float64 reference."""

from __future__ import annotations

import functools
import re

from tests.lowering.remembering import remembered
from tools.fuzz.calls import DRAWN, FORMS, NoCase, Together, variant, variants
from tools.fuzz.kind import Finding, Kind, Outcome

ROUNDS = 2
"""A case has this many calls of each operator."""
PLAIN = 8
"""One in so many cases runs on the plain loops, too, which are slow."""


class Calls(Kind):
    """Calls of every operator, on each instruction set that the machine has."""

    limit_s = 120.0

    def check(self, seed: int) -> Outcome:
        comparisons = {}
        for turn in range(ROUNDS):
            for op, draw in DRAWN.items():
                try:
                    comparisons[f"{op} {turn}"] = draw(seed * ROUNDS + turn)
                except NoCase:
                    continue
        with remembered():
            for name in _variants():
                if name == "reference" and seed % PLAIN:
                    continue
                with variant(name):
                    found = Together(FORMS[seed % len(FORMS)]).faults(comparisons)
                for call, error in found.items():
                    first = re.sub(r"[-+]?\d[\d.e+-]*|nan|inf", "N", str(error).strip().split("\n")[0])
                    title = f"{call.rpartition(' ')[0]}: {type(error).__name__}: {first}"[:150]
                    return Outcome("wrong", Finding(title, f"{name}, {call}\n{error}", suffix=".txt"))
        return Outcome(f"{len(comparisons)} calls")


@functools.cache
def _variants() -> tuple[str, ...]:
    return tuple(variants())
