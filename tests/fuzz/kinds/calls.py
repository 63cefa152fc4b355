"""Right calls of all operators: the kernels of every instruction set against the float64 reference."""

from __future__ import annotations

import functools
import re

from tests.fuzz.calls import DRAWN, NoCase, variant, variants
from tests.fuzz.kind import Finding, Kind, Outcome


class Calls(Kind):
    """One call, on each instruction set that the machine has."""

    def check(self, seed: int) -> Outcome:
        op = list(DRAWN)[seed % len(DRAWN)]
        try:
            compared = DRAWN[op](seed // len(DRAWN))
        except NoCase:
            return Outcome("skipped")
        for name in _variants():
            with variant(name):
                try:
                    compared()
                except Exception as error:  # any at all: the call is right
                    first = re.sub(r"[-+]?\d[\d.e+-]*|nan|inf", "N", str(error).strip().split("\n")[0])
                    title = f"{op}: {type(error).__name__}: {first}"[:150]
                    return Outcome("wrong", Finding(title, f"{name}, seed {seed}\n{error}", suffix=".txt"))
        return Outcome(op.split()[0])


@functools.cache
def _variants() -> tuple[str, ...]:
    return tuple(variants())
