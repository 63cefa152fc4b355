"""Route `air`: the whole model as a GE graph, in the file that ATC reads with --framework=1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import onnx_ir as ir

from fa_compiler.atc.job import Input, Job, RouteResult
from fa_compiler.atc.layer import Step, layer_of
from fa_compiler.atc.sizes import Size
from fa_compiler.errors import InputError, InternalError, one_line
from fa_compiler.lowering.ascend.air import AirError, write
from fa_compiler.lowering.ascend.air.check import check
from fa_compiler.lowering.ascend.air.check_shapes import DECLARED, INFERENCE
from fa_compiler.lowering.ascend.convert import UnmappedError, to_ge
from fa_compiler.lowering.ascend.diagnostic import Severity
from fa_compiler.lowering.ascend.graph import Model, Op, TensorDesc, Weight
from fa_compiler.op_registry import OpSpec, get, later_attrs, names
from fa_compiler.op_registry.errors import UnknownVariant

FILE = "model.air"


def build(job: Job) -> RouteResult:
    """Write `model.air`, and `air_weight/` beside it if the weights are large.

    Raises:
        InputError: a node has no counterpart in GE, the graph is too large for the format, or it
            cannot run with the given sizes.
        InternalError: the written file fails our own checks.
    """
    model = job.complete_model()
    given = [value.name or "" for value in model.graph.inputs if not value.is_initializer()]
    graph, notes = convert(job, model, job.folder / FILE, job.request.sizes)
    notes += _renamed(given, inputs_of(graph))
    ends = list(graph.root.of_type("NetOutput"))
    details = {
        "operators": operators_of(graph),
        "layer": layer_of(_steps(graph), job),
        "outputs": [
            f"{source.op}:{source.index}"
            for op in ends
            for source in op.inputs
            if source is not None
        ],
    }
    return RouteResult(
        FILE,
        1,
        inputs_of(graph),
        _fused(graph, job.request.cann),
        details,
        notes,
        _constants(graph),
    )


def _renamed(before: Sequence[str], after: Sequence[Input]) -> list[str]:
    """A note on inputs that have other names in the file, because ATC's command line cannot name
    them."""
    pairs = [(old, new.name) for old, new in zip(before, after, strict=True) if old != new.name]
    told = ", ".join(f"{old!r} is {new}" for old, new in pairs)
    return [f"inputs whose names ATC cannot read have other ones: {told}"] if pairs else []


def convert(
    job: Job, model: ir.Model, path: Path, sizes: Mapping[str, Sequence[Size]] | None = None
) -> tuple[Model, list[str]]:
    """Write a model as an `.air` file: its GE graph, and the notes of our checks. `sizes` are those
    of inputs that the model leaves open. Raises as `build` does."""
    try:
        graph = to_ge(model, input_shapes=dict(sizes or {}))
        _drop_newer_attributes(graph, job.request.cann)
        write(graph, path)
    except (UnmappedError, AirError, ValueError) as error:
        raise InputError(f"{job.loaded.name}: {one_line(error)}") from error
    diagnostics = check(path)
    serious = [
        entry
        for entry in diagnostics
        if entry.severity is not Severity.NOTE or entry.rule == DECLARED.name
    ]
    misfit = next((entry for entry in serious if entry.rule == INFERENCE.name), None)
    if misfit is not None:
        raise job.size_error(misfit.node, misfit.message)
    if serious:
        raise InternalError(
            f"{job.loaded.name}: the .air is not well formed ({serious[0].rule}): {serious[0]}"
        )
    return graph, [str(diagnostic) for diagnostic in diagnostics]


def _drop_newer_attributes(graph: Model, cann: str | None) -> None:
    """Leave out the attributes that the prototypes of a CANN version do not have. The optimisation
    was for this version, so they have their defaults. Raises ValueError for one that does not."""
    older = {} if cann is None else _prototypes(cann)
    for op in (op for part in graph.graphs for op in part.ops if op.type in older):
        for name, default in later_attrs(older[op.type]).items():
            attr = op.attrs.pop(name, None)
            if attr is not None and attr.value != default:
                raise ValueError(
                    f"{op.name}: {op.type} of CANN {cann} has no attribute {name}, which is set"
                )


def _prototypes(cann: str) -> dict[str, OpSpec]:
    """The prototypes that are known for a CANN version."""
    found = {}
    for name in names():
        with suppress(UnknownVariant):
            found[name] = get(name, cann)
    return found


def operators_of(graph: Model) -> dict[str, int]:
    """The number of operators of each type."""
    return dict(sorted(Counter(op.type for part in graph.graphs for op in part.ops).items()))


def _steps(graph: Model) -> Iterator[Step]:
    """The operators of the main graph, with those that they read."""
    for op in graph.root.ops:
        yield Step(op.name, op.type, [source.op for source in op.inputs if source is not None])


def inputs_of(graph: Model) -> list[Input]:
    """The inputs of the model, in the order of their indices."""
    ops = sorted(graph.root.of_type("Data"), key=lambda op: int(op.attrs["index"].value))  # type: ignore[arg-type]
    return [Input(op.name, op.output_descs[0].dtype, _sizes(op.output_descs[0])) for op in ops]


def _sizes(desc: TensorDesc) -> tuple[Size, ...]:
    shape = desc.shape or ()
    ranges: tuple[Size, ...] = desc.ranges or tuple((1, -1) for _ in shape)
    return tuple(size if size >= 0 else bounds for size, bounds in zip(shape, ranges, strict=True))


def _constants(graph: Model) -> dict[str, dict[str, Weight]]:
    """The constant inputs of the fused operators."""
    values: dict[str, dict[str, Weight]] = {}
    for part in graph.graphs:
        weights = {op.name: op.attrs["value"].value for op in part.of_type("Const")}
        for op in part.ops:
            if op.type in names():
                pairs = zip(op.input_descs, op.inputs, strict=False)
                known = {
                    desc.name: weights.get(source.op)
                    for desc, source in pairs
                    if source is not None
                }
                values[op.name] = {
                    name: weight for name, weight in known.items() if isinstance(weight, Weight)
                }
    return values


def _fused(graph: Model, cann: str | None) -> list[Op]:
    """The operators of the registry that a CANN version has."""
    types = {op.type for part in graph.graphs for op in part.ops}.intersection(names())
    fused = {name for name in types if _has(cann, name)}
    return [op for part in graph.graphs for op in part.ops if op.type in fused]


def _has(cann: str | None, op_type: str) -> bool:
    """Does the registry know an operator in a CANN version?"""
    try:
        get(op_type, cann)
    except UnknownVariant:
        return False
    return True
