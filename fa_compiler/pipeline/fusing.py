"""load -> fuse -> check -> write: the pipeline of the command line, of `optimize` and of
`InferenceSession`.

`run` is the part in the middle, fuse and check. The command line has the same steps
(command_line/models.py), with --verify before the files get their names.
"""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import onnx
import onnx_ir as ir

from fa_compiler.checks import checker
from fa_compiler.checks.operators import needs_library, registry_nodes, verify_nodes
from fa_compiler.checks.runtime import remarks
from fa_compiler.errors import InputError, InternalError, origin
from fa_compiler.lowering.onnx_file import add_ascend_bodies, finish_proto, to_file_operators
from fa_compiler.model_files.flex_attention import expand_flex, may_hold_flex, with_definitions
from fa_compiler.model_files.foreign_types import put_back
from fa_compiler.model_files.reading import LoadedModel
from fa_compiler.model_files.writing import relocate
from fa_compiler.passes import Options, Report, fuse
from fa_compiler.passes.answer.options import DECODE
from fa_compiler.passes.answer.report import Progress
from fa_compiler.passes.values.shapes import ShapeInfo
from fa_compiler.pipeline.options import FileOptions
from fa_compiler.protos.metadata import ASSUMED

_LOGGER = logging.getLogger("fa_compiler")


EXPORTERS_NAMES = (
    "main_graph",
    "main",
    "graph",
    "torch_jit",
    "torch-jit-export",
    "tf2onnx",
    "OnnxGraph",
)
"""What exporters and converters call every graph."""

Form = Literal["graph", "file", "file with bodies"]
"""The operators of fused nodes (lowering/onnx_file): those of the registry, those of files for ONNX
Runtime, or the same with functions."""


_ANY_RUNTIME = (
    "no runtime was named: the file may use everything that its operators have, and some runtimes refuse parts of it "
    "or read them wrongly; name yours with --runtime (`fa-compiler inspect MODEL --runtime all` lists them)"
)

_OF_THE_LIBRARY = (
    "the model holds operators that an earlier run made for the library of fa_compiler; --target {target} does not "
    "change them: give the original model"
)


def file_form(options: FileOptions) -> Form:
    """The form of the fused nodes in a file for the target."""
    if options.target != "ort":
        return "graph"
    return "file with bodies" if options.bodies else "file"


def run(
    loaded: LoadedModel, options: Options, progress: Progress | None = None, form: Form = "graph"
) -> tuple[onnx.ModelProto | None, Report]:
    """Fuse and check a loaded model.

    Returns:
        A new proto, or None if there is nothing to change, and the report. The `location` of an
        external tensor of the proto is an absolute path.

    Raises:
        InputError: the model, or the target for it, is at fault.
        InternalError: the result failed our own checks.
    """
    start = time.perf_counter()
    with without_collections():
        model, report, info = fuse_loaded(loaded, options, progress)
        proto = _result(loaded, model, report, form, info)
        if options.target == "ort":
            report.notes.extend(remarks(loaded.proto if proto is None else proto))
        if options.is_standard and options.runtime is None and report.count("fused"):
            report.notes.append(_ANY_RUNTIME)
        if options.is_standard and needs_library(loaded.proto):
            report.notes.append(_OF_THE_LIBRARY.format(target=options.target))
    if sys.platform == "win32" and loaded.files:
        # Until the model, a circle of objects, is collected, weights are mapped, and nobody may
        # replace their files.
        del model, info
        gc.collect()
    report.seconds = time.perf_counter() - start
    log_report(report)
    return proto, report


def fuse_loaded(
    loaded: LoadedModel, options: Options, progress: Progress | None = None
) -> tuple[ir.Model, Report, ShapeInfo | None]:
    """Fuse a loaded model, and check the fused nodes: the model, the report, and what is known of
    the model.

    Raises:
        InputError: the model, or the target for it, is at fault.
        InternalError: a fused node failed our own checks.
    """
    model = loaded.to_ir()
    report, info = fuse_checked(model, options, progress)
    if loaded.weights is not None:
        loaded.weights.check(by_path=True)  # the passes read the file by its path
    if any(DECODE in block.assumed for block in report.blocks if block.status == "fused"):
        model.metadata_props[ASSUMED] = DECODE
    report.model, report.target = loaded.name, options.target
    report.notes[:0] = loaded.repairs
    report.changed_otherwise = bool(loaded.repairs)
    return model, report, info


def fuse_checked(
    model: ir.Model, options: Options, progress: Progress | None = None
) -> tuple[Report, ShapeInfo | None]:
    """Fuse the attention of a model in place, and check the fused nodes against the registry.

    Nodes that were fused before have to be in the form of the graph (lowering/onnx_file).

    Returns:
        The report, and what is known of the result if there were nodes to check.

    Raises:
        InputError: the target cannot take an operator that the model has already.
        InternalError: a fused node breaks a constraint of the registry.
    """
    with without_collections():
        given = registry_nodes(model)
        report = fuse(model, options, progress)
        return report, verify_nodes(model, given, options.platform, options.cann)


def name_of(model: ir.Model) -> str:
    """What a model in memory, of which no file is known, is called: by its graph, unless its
    exporter calls every graph so."""
    name = model.graph.name
    return name if name and name not in EXPORTERS_NAMES else "model"


def log_report(report: Report) -> None:
    """Tell the logger `fa_compiler` what became of the model (INFO) and of each of its blocks
    (DEBUG)."""
    fused, total = report.fused_attentions, report.attentions - report.ready_attentions
    ready = f", {report.ready_attentions} already fused" if report.ready_attentions else ""
    _LOGGER.info(
        "%s: %d of %d attentions fused in %.2f s%s",
        report.model,
        fused,
        total,
        report.seconds,
        ready,
    )
    for block in report.blocks:
        what = block.op if block.status == "fused" else block.reason
        _LOGGER.debug(
            "%s: block %d at %s: %s: %s", report.model, block.id, block.anchor, block.status, what
        )


@contextmanager
def without_collections() -> Iterator[None]:
    """Switch garbage collection off. The objects of the passes live until the passes end: a
    collection would find nothing, and all collections together would take a quarter of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def copy_of(loaded: LoadedModel) -> onnx.ModelProto:
    """A copy of the model. The `location` of its external tensors is an absolute path."""
    proto = onnx.ModelProto()
    proto.CopyFrom(loaded.proto)
    relocate(proto, loaded.absolute)
    return proto


def _result(
    loaded: LoadedModel, model: ir.Model, report: Report, form: Form, info: ShapeInfo | None
) -> onnx.ModelProto | None:
    """The checked result; None if nothing was fused, no cache became a buffer, and no FlexAttention
    was expanded."""
    if not report.is_changed and not may_hold_flex(loaded.proto):
        return None
    functions: list[onnx.FunctionProto] = []
    if form != "graph":
        functions = to_file_operators(model, info if form == "file with bodies" else None)
    proto = proto_of(loaded, model)
    if form == "graph":
        add_ascend_bodies(proto, report.around_operators, loaded.proto)
    else:
        finish_proto(proto, functions)
    put_back(proto, loaded.foreign)
    if (written := expand_flex(proto)) is not None:
        proto, note = written
        report.notes.append(note)
        report.changed_otherwise = True
    elif not report.is_changed:
        return None
    return _checked(loaded, proto)


def proto_of(loaded: LoadedModel, model: ir.Model) -> onnx.ModelProto:
    """The model as a proto.

    Protobuf reads a text that is not UTF-8, but does not write it. Such a text may be in a field
    that no check reads: the producer's name, or a domain that no node uses. Joined weights are read
    when they are written, where they can.
    """
    if loaded.weights is not None:
        loaded.weights.keep_joined(model)
    try:
        return ir.to_proto(model)
    except ir.serde.SerdeError as error:
        cause = origin(error)
        if not isinstance(cause, UnicodeDecodeError):
            raise
        raise InputError(
            f"{loaded.name} holds the text {cause.object!r}, which is not UTF-8"
        ) from error


def _checked(loaded: LoadedModel, proto: onnx.ModelProto) -> onnx.ModelProto:
    if proto.ir_version != loaded.proto.ir_version:
        raise InternalError(f"{loaded.name}: the IR version changed from {loaded.proto.ir_version}")
    problem = checker.fault(proto, full=True)
    if problem is not None and checker.fault(loaded.proto, full=True) is not None:
        problem = checker.fault(proto, full=False)
    if problem is not None:
        raise invalid_result(loaded, proto, f"the optimised model is not valid: {problem}")
    return proto


def invalid_result(
    loaded: LoadedModel, result: onnx.ModelProto, problem: str
) -> InputError | InternalError:
    """The error for an invalid result: of the model, if it is at fault itself, otherwise of the
    compiler."""
    if checker.fault(result, full=True, declared=False) is None:
        # The checker knows the type and sizes of an output in the result. In the original it could
        # not infer them.
        return InputError(
            f"{loaded.name} declares other types or sizes than its nodes compute: {problem}"
        )
    # In a model with an operator that onnx does not know, the checker accepts a node that cannot
    # take its inputs. The result may no longer hold that operator, so only its check fails.
    if (cause := checker.contradiction(loaded.proto)) is not None:
        return InputError(f"{loaded.name}: {cause}")
    # The checker does not look into the definition of an operator.
    written_out = with_definitions(loaded.proto)
    if written_out is not None and (cause := checker.fault(written_out, full=True)) is not None:
        return InputError(f"{loaded.name}: a FlexAttention of it is not valid: {cause}")
    return InternalError(f"{loaded.name}: {problem}")
