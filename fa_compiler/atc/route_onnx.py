"""Routes `onnx` and `npu`: a model for ATC's ONNX parser.

`onnx` writes the source of a parser plugin for the fused operators; `npu` uses operators that the
parser knows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import onnx
import onnx_ir as ir

from fa_compiler.atc.job import Input, Job, RouteResult, check_inference
from fa_compiler.atc.layer import Step, layer_of
from fa_compiler.checks import checker
from fa_compiler.errors import InputError, InternalError
from fa_compiler.lowering.ascend.diagnostic import FileDiagnostic, Severity
from fa_compiler.lowering.ascend.graph import Op
from fa_compiler.lowering.ascend.onnx_route import (
    UnsupportedModel,
    lower,
    only_known_entries,
    plugin,
)
from fa_compiler.lowering.ascend.onnx_route.check import check
from fa_compiler.lowering.ascend.onnx_route.errors import grouped
from fa_compiler.lowering.ascend.onnx_route.fused import fused_ops
from fa_compiler.lowering.ascend.onnx_route.npu import Replaced, to_npu, to_prompts
from fa_compiler.model_files.writing import staging, write_model
from fa_compiler.op_registry import DOMAIN
from fa_compiler.op_registry.dtypes import from_onnx
from fa_compiler.passes.answer.options import EMPTY_BIAS
from fa_compiler.passes.answer.report import Around, Block, first_of
from fa_compiler.passes.ir.nodes import all_nodes, remember_versions
from fa_compiler.passes.values.declared import correct_shapes
from fa_compiler.passes.values.shapes import analyse
from fa_compiler.pipeline.fusing import invalid_result
from fa_compiler.pipeline.options import make_options
from fa_compiler.protos.subgraphs import graph_inputs

FILE, PLUGIN = "model.onnx", "plugin"
OTHER_ROUTES = "--route air or onnx"
"""The routes that take attention for which the route npu has no form."""


def build(job: Job) -> RouteResult:
    """Write `model.onnx` with the fused nodes in our domain, and the source of the plugin for them.

    Raises:
        InputError: the parser does not take a node, which has no older form either, or the model
            cannot run with the given sizes.
        InternalError: the written file fails our own checks.
    """
    _check_sizes(job)
    model, notes = _model(job)
    fused = _fused(model)
    _lower(job, model)
    before = []
    used = sorted({node.op_type for node in all_nodes(model.graph) if node.domain == DOMAIN})
    if used:
        (job.folder / PLUGIN).mkdir()
        for name, text in plugin.files(used, job.request.cann).items():
            (job.folder / PLUGIN / name).write_text(text, encoding="utf-8", newline="\n")
        before.append(
            f"build and install ATC's plugin for {', '.join(used)}, as {PLUGIN}/README.md says"
        )
    return _written(job, model, fused, notes, before)


def build_npu(job: Job) -> RouteResult:
    """Write `model.onnx` with the fused nodes as operators for which the parser brings its own
    plugins.

    Raises:
        InputError: an attention has no such form, the parser does not take a node, or the model
            cannot run with the given sizes.
        InternalError: the written file fails our own checks.
    """
    _check_sizes(job)
    (model, notes), request = _model(job), job.request
    options = make_options(
        "ascend", soc_version=request.soc.name, cann=request.cann, assume=request.assume
    )
    try:
        prompts = to_prompts(model, options)
        fused = _fused(model)
        written = to_npu(model, EMPTY_BIAS in options.assume)
    except UnsupportedModel as error:
        message = str(_input_error(job, error))
        raise InputError(
            message if OTHER_ROUTES in message else f"{message}; try {OTHER_ROUTES}"
        ) from None
    job.report.blocks = [_as_written(block, prompts, written) for block in job.report.blocks]
    job.report.around = [_around_as_written(line, written) for line in job.report.around]
    _lower(job, model)
    return _written(job, model, fused, notes)


def _as_written(
    block: Block, prompts: Mapping[str, Replaced], written: Mapping[str, Replaced]
) -> Block:
    """A block of the report with the node that the file has for it."""
    name = block.node or ""
    steps = [prompts[name]] if name in prompts else []
    name = steps[0].node if steps else name
    if name not in written:
        return block
    steps.append(written[name])
    assumed = dict.fromkeys((*block.assumed, *(word for step in steps for word in step.assumed)))
    return replace(
        block, op=steps[-1].op, node=steps[-1].node, layout=steps[-1].layout, assumed=tuple(assumed)
    )


def _around_as_written(line: Around, written: Mapping[str, Replaced]) -> Around:
    """A line of the report with the node that the file has for it."""
    found = written.get(line.node or "")
    return line if found is None else replace(line, op=found.op, node=found.node)


def _check_sizes(job: Job) -> None:
    """Raise InputError for sizes with which the model cannot run.

    These routes write no GE graph. The sizes are checked by GE's shape inference, if the model can
    be converted to a GE graph at all, and by ONNX's. The model is not changed.
    """
    check_inference(job, job.request.sizes)
    problem = checker.fault(job.loaded.proto, full=True, declared=False)
    if problem is not None:
        raise InputError(f"{job.loaded.name} is not valid with these sizes: {problem}")


def _model(job: Job) -> tuple[ir.Model, list[str]]:
    """The model without declared shapes that contradict its nodes, and the report's sentences about
    these shapes."""
    model = job.model()
    graphs = remember_versions(model)
    return model, correct_shapes(graphs, analyse(model))


def _fused(model: ir.Model) -> list[Op]:
    remember_versions(model)
    return fused_ops(model, analyse(model))


def _lower(job: Job, model: ir.Model) -> None:
    try:
        lower(model)
    except UnsupportedModel as error:
        raise _input_error(job, error) from None


def _input_error(job: Job, error: UnsupportedModel) -> InputError:
    return InputError(f"{job.loaded.name}: {'; '.join(grouped(error.problems))}")


def _written(
    job: Job, model: ir.Model, fused: list[Op], notes: list[str], before: Sequence[str] = ()
) -> RouteResult:
    proto = ir.to_proto(model)
    only_known_entries(proto)
    problem = checker.fault(proto, full=True)
    if problem is not None:
        raise invalid_result(job.loaded, proto, f"the model for ATC is not valid: {problem}")
    with staging() as stage:
        unfused = "is the model as ATC's parser takes it"
        write_model(proto, job.loaded, job.folder / FILE, stage, job.report, unfused=unfused)
        stage.commit()
    diagnostics = check(job.folder / FILE)
    serious = [diagnostic for diagnostic in diagnostics if diagnostic.severity is not Severity.NOTE]
    if serious:
        raise InternalError(
            f"{job.loaded.name}: ATC would not take the model ({serious[0].rule}): {serious[0]}"
        )
    notes += _open(diagnostics)
    details = {
        "opset": next(entry.version for entry in proto.opset_import if not entry.domain),
        "operators": dict(sorted(Counter(node.op_type for node in all_nodes(model.graph)).items())),
        "layer": layer_of(_steps(proto.graph), job),
        "outputs": [value.name for value in proto.graph.output],
    }
    return RouteResult(FILE, 5, _inputs(proto, job), fused, details, notes, before=before)


def _steps(graph: onnx.GraphProto) -> Iterator[Step]:
    """The nodes of the main graph, with those that they read. ATC's parser makes several operators
    of some of them."""
    makers = {value: node.name for node in graph.node for value in node.output}
    for node in graph.node:
        yield Step(
            node.name, node.op_type, [makers[value] for value in node.input if value in makers]
        )


def _open(diagnostics: Sequence[FileDiagnostic]) -> list[str]:
    """One sentence for each thing that the check of the written file leaves open, with the first
    nodes."""
    nodes: dict[str, list[str]] = {}
    for diagnostic in diagnostics:
        nodes.setdefault(f"{diagnostic.message}; {diagnostic.hint}", []).append(diagnostic.node)
    return [f"{first_of(names)}: {sentence}" for sentence, names in nodes.items()]


def _inputs(proto: onnx.ModelProto, job: Job) -> list[Input]:
    sizes = job.request.sizes
    for value in graph_inputs(proto):
        if ";" in value.name:
            problem = f"the name of the input {value.name!r} holds ';', which ends a name in ATC's --input_shape"
            raise InputError(f"{job.loaded.name}: {problem}; rename it, or use --route air")
    return [
        Input(
            value.name,
            from_onnx(value.type.tensor_type.elem_type) or "",
            tuple(sizes.get(value.name, ())),
        )
        for value in graph_inputs(proto)
    ]
