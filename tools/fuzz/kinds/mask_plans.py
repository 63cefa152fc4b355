"""The plans for the masks of other kinds' models, judged by tools/fuzz/mask_oracle.py, without running a model."""

from __future__ import annotations

from typing import cast

import fa_compiler
from fa_compiler.errors import FaCompilerError
from fa_compiler.passes.answer.options import Target
from tools.fuzz.kind import Finding, Kind, Outcome
from tools.fuzz.mask_oracle import Planned, Verdict, judged
from tools.fuzz.reduction import judge_of_others

KINDS = ("compose", "spellings", "tested", "mutate")
TARGETS = ("ort", "ascend", "contrib", "onnx")


class MaskPlans(Kind):
    """A model of another kind, for one of the targets. The plan of each of its attentions is confirmed."""

    def check(self, seed: int) -> Outcome:
        made = judge_of_others(KINDS, seed)
        if made is None:
            return Outcome("skipped")
        target = cast(Target, TARGETS[seed // len(KINDS) % len(TARGETS)])
        verdicts: list[tuple[Planned, Verdict]] = []
        try:
            with judged(verdicts):
                fa_compiler.inspect(made.model, target=target, assume=made.assume)
        except FaCompilerError:
            return Outcome("refused")
        for planned, verdict in verdicts:
            if verdict.word == "refuted":
                title = f"a plan that its terms do not confirm [{target} {planned.plan.mask_label}]"
                detail = f"{verdict.detail}\n{planned.plan}\n{planned.terms}\n{made.note}"
                return Outcome("refuted", Finding(title, detail, made.model.SerializeToString()))
        if any(verdict.word == "unread" for _, verdict in verdicts):
            return Outcome("unread")
        return Outcome("accepted" if verdicts else "declined")
