"""The fused models of other kinds, fused once more: nothing is left to do, and nothing is changed."""

from __future__ import annotations

from dataclasses import dataclass, fields

import fa_compiler
from fa_compiler.errors import FaCompilerError
from tools.fuzz.kind import Outcome
from tools.fuzz.oracle import Judge
from tools.fuzz.reduction import GraphKind, judge_of_others

KINDS = ("compose", "spellings", "ready_made", "steps", "quantised", "gradients", "tested")
TARGETS = ("ort", "ort", "ascend", "onnx", "contrib")


@dataclass
class Twice(Judge):
    """What is asked of the second fusion of a model."""

    @classmethod
    def of(cls, judge: Judge) -> Twice:
        """The same model, with the same options."""
        return cls(**{each.name: getattr(judge, each.name) for each in fields(Judge) if each.init})

    def outcome(self) -> Outcome:
        try:
            first = self._optimized()
        except FaCompilerError:
            return Outcome("refused")
        if not first.report.count("fused"):
            return Outcome("declined")
        try:
            second = fa_compiler.optimize(first.model, target=self.target, runtime=self.runtime, assume=self.assume)
        except FaCompilerError as error:
            return self._found("fused", f"a fused model is refused: {type(error).__name__}", str(error))
        found = [block for block in second.report.blocks if block.status == "fused"]
        if found:
            ops = ", ".join(sorted({str(block.op) for block in found}))
            return self._found("fused", f"a second run fuses more [{ops}]", str(found))
        if second.model.graph != first.model.graph:
            return self._found("fused", "a second run changes the model", str(first.report))
        return Outcome("fused")


class Again(GraphKind):
    """A model of another kind, for one of the targets."""

    def judge(self, seed: int) -> Judge | None:
        made = judge_of_others(KINDS, seed)
        if made is None:
            return None
        made.target = TARGETS[seed // len(KINDS) % len(TARGETS)]
        return Twice.of(made)
