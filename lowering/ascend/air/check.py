"""The checker of `.air` files: every rule of the loader, of the prototypes and of inference, in one list.

Rules are grouped by file: edges, names, tensors, ends (Data, NetOutput, subgraphs), the prototypes a file declares,
prototypes, shapes. A group is only asked what makes sense after those before it: what does not link has no shapes.
"""

from __future__ import annotations

from pathlib import Path

from fa_compiler.lowering.ascend.air import (
    check_declared,
    check_edges,
    check_ends,
    check_names,
    check_prototypes,
    check_shapes,
    check_tensors,
)
from fa_compiler.lowering.ascend.air.decode import decode
from fa_compiler.lowering.ascend.air.errors import AirError
from fa_compiler.lowering.ascend.air.files import read_message
from fa_compiler.lowering.ascend.air.finding import Finding, Rule, Severity
from fa_compiler.lowering.ascend.air.rejections import rejections
from fa_compiler.lowering.ascend.air.schema import Proto

NOT_AIR = Rule("not-air", Severity.REJECTED, "give a file that GE or `fa-compiler atc` wrote")

ACCEPTED, INVALID, REJECTED = "accepted", "loads-but-invalid", "rejected"


def check(path: Path) -> list[Finding]:
    """Everything that is wrong with a file, what the loader rejects first. Raises OSError if it cannot be read."""
    try:
        proto = read_message(path)
    except AirError as error:
        message, _, hint = str(error).partition("; ")
        return [NOT_AIR("", message, hint or None)]
    return check_message(proto, path.parent)


def check_message(proto: Proto, folder: Path | None = None) -> list[Finding]:
    """Everything that is wrong with a ModelDef; `folder` is where its weights' files are (None: not looked for)."""
    found = list(rejections(proto))
    if found:
        return found
    for graph in proto.graph:
        found += check_edges.later(graph)
        found += check_names.check(graph)
        found += check_declared.check(graph)
        found += check_tensors.check(graph, folder)
    found += check_ends.check(proto)
    try:
        model = decode(proto, folder)
    except AirError:  # a missing file of weights, which is among the findings
        return found
    found += check_prototypes.check(model)
    return (
        found if check_edges.CYCLE.name in {finding.rule for finding in found} else [*found, *check_shapes.check(model)]
    )


def verdict(findings: list[Finding]) -> str:
    """ACCEPTED, INVALID or REJECTED; notes do not count."""
    severities = {finding.severity for finding in findings}
    if Severity.REJECTED in severities:
        return REJECTED
    return INVALID if severities - {Severity.NOTE} else ACCEPTED
