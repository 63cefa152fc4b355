"""The spellings that the ordinary tests draw (tests/passes/strategies.py), fed beyond what these feed them."""

from __future__ import annotations

import math
import re
from dataclasses import replace

from tests.passes.builder import build
from tests.passes.strategies import even
from tools.fuzz.feeds import feeds
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import GraphKind
from tools.fuzz.snippets import case_of


class Spellings(GraphKind):
    """One spelling, fed in several ways."""

    def judge(self, seed: int) -> Judge:
        spelt = build(even(seed))
        case = case_of(spelt.model, spelt.feeds(seed), [spelt.spelling.softmax])
        case.loose = any(each.source.startswith("const") for each in spelt.spelling.masks)  # whose sizes are fixed
        case.inputs = [
            replace(each, role="int01") if re.fullmatch(r"m\d", each.name) and each.dtype == "int64" else each
            for each in case.inputs
        ]
        group = f"{spelt.spelling.dtype}, "
        made = Judge(case.model, lambda: feeds(case, seed), (), seed % 32 == 0, repr(spelt.spelling), group)
        made.loose = spelt.spelling.symbolic
        factors = [each.fill for each in spelt.spelling.masks if each.form in ("add_mul", "mul_add")]
        made.undefined = any(map(math.isinf, factors))  # 0 times infinity, where a key is kept
        return made
