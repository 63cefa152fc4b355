"""Rules of types and shapes: what is declared of a tensor is what its operator makes of its inputs."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.lowering.ascend.air.finding import Finding, Rule, Severity
from fa_compiler.lowering.ascend.graph import Model
from fa_compiler.lowering.ascend.infer.graph import walk

MISFIT = Rule("misfit", Severity.LATER, "give the operator inputs that it takes together")
DECLARED = Rule("declared", Severity.NOTE, "GE goes by what it infers; declare that")
NO_RULE = Rule(
    "no-inference", Severity.NOTE, "GE infers them; what is declared of their outputs was taken as it stands"
)


def check(model: Model) -> Iterator[Finding]:
    """The findings of a model whose edges link. A file whose descriptors differ from what GE infers loads and compiles;
    one that we wrote ourselves shows a fault of ours by it."""
    found = walk(model)
    for name, sentence in found.misfits:
        yield MISFIT(name, sentence)
    for name, sentence in found.differences:
        yield DECLARED(name, sentence)
    for op_type, count in sorted(found.ruleless.items()):
        operators = "operator" if count == 1 else "operators"
        yield NO_RULE("", f"the shapes of {count} {operators} {op_type} were not checked: no rule is known")
