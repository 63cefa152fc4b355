"""Rules of types and shapes: the declared type and shape of a tensor are those that GE infers for
it."""

from __future__ import annotations

from collections.abc import Iterator

from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Rule, Severity
from fa_compiler.lowering.ascend.graph import Model
from fa_compiler.lowering.ascend.infer.graph import infer_model

INFERENCE = Rule("inference", Severity.LATER, "give the operator inputs that it takes together")
DECLARED = Rule(
    "declared", Severity.NOTE, "GE uses the types and shapes that it infers; declare those"
)
NO_RULE = Rule(
    "no-inference",
    Severity.NOTE,
    "GE infers them; here the declared shapes of their outputs were used",
)


def check(model: Model) -> Iterator[FileDiagnostic]:
    """The diagnostics of a model whose edges link.

    GE loads and compiles a file whose descriptors differ from the inferred ones. In a file of our
    own, such a difference is a fault of ours.
    """
    found = infer_model(model)
    for name, sentence in found.errors:
        yield INFERENCE(name, sentence)
    for name, sentence in found.differences:
        yield DECLARED(name, sentence)
    for op_type, count in sorted(found.without_rule.items()):
        operators = "operator" if count == 1 else "operators"
        yield NO_RULE(
            "", f"the shapes of {count} {operators} {op_type} were not checked: no rule is known"
        )
