"""The checker of `.air` files, with the rules of GE's loader, of the prototypes and of shape
inference.

Each `check_*.py` holds one group of rules: edges, ends (Data, NetOutput, subgraphs), names, the
prototypes that a file declares, tensors, prototypes, shapes. A group runs only if the groups before
it found nothing that would make its results meaningless: a graph that does not link has no shapes.
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
from fa_compiler.lowering.ascend.air.files import read_message, rejections
from fa_compiler.lowering.ascend.air.schema import Proto
from fa_compiler.lowering.ascend.diagnostic import AirError, FileDiagnostic, Rule, Severity

NOT_AIR = Rule("not-air", Severity.REJECTED, "give a file that GE or `fa-compiler atc` wrote")

ACCEPTED, INVALID, REJECTED = "accepted", "loads-but-invalid", "rejected"


def check(path: Path) -> list[FileDiagnostic]:
    """All diagnostics of a file; those for which the loader rejects it come first. Raises
    OSError."""
    try:
        proto = read_message(path)
    except AirError as error:
        message, _, hint = str(error).partition("; ")
        return [NOT_AIR("", message, hint or None)]
    return check_message(proto, path.parent)


def check_message(proto: Proto, folder: Path | None = None) -> list[FileDiagnostic]:
    """All diagnostics of a ModelDef. `folder` is the folder of its weights' files; None does not
    check these files."""
    found = list(rejections(proto))
    if found:
        return found
    for graph in proto.graph:
        found += check_edges.check(graph)
        found += check_names.check(graph)
        found += check_declared.check(graph)
        found += check_tensors.check(graph, folder)
    found += check_ends.check(proto)
    try:
        model = decode(proto, folder)
    except AirError:  # a missing file of weights, for which there is a diagnostic already
        return found
    found += check_prototypes.check(model)
    without_shapes = {check_edges.CYCLE.name, check_ends.SUBGRAPH_LOST.name}
    if without_shapes & {diagnostic.rule for diagnostic in found}:
        return found
    return [*found, *check_shapes.check(model)]


def verdict(diagnostics: list[FileDiagnostic]) -> str:
    """ACCEPTED, INVALID or REJECTED. Notes do not count."""
    severities = {diagnostic.severity for diagnostic in diagnostics}
    if Severity.REJECTED in severities:
        return REJECTED
    return INVALID if severities - {Severity.NOTE} else ACCEPTED
