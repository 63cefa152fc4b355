"""load -> fuse -> check -> write: the pipeline of the command line, of `optimize` and of `InferenceSession`.

`run` is the part in the middle, fuse and check. The command line has the same steps (command_line/models.py), with
--verify before the files get their names.
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import onnx
import onnx_ir as ir

from fa_compiler import op_registry
from fa_compiler.checks import checker
from fa_compiler.checks.operators import registry_nodes, verify_nodes
from fa_compiler.checks.runtime import remarks
from fa_compiler.errors import InputError, InternalError, origin
from fa_compiler.lowering.onnx_file import finish_proto, to_file_operators
from fa_compiler.model_files.flex_attention import expand_flex, may_hold_flex, with_definitions
from fa_compiler.model_files.foreign_types import put_back
from fa_compiler.model_files.inline_weights import make_inline
from fa_compiler.model_files.reading import LoadedModel, ModelLike, load
from fa_compiler.model_files.writing import check_place, relocate, staging, write_model
from fa_compiler.op_registry.products import product
from fa_compiler.op_registry.runtimes import Runtime
from fa_compiler.passes import Options, Report, fuse
from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.answer.report import Progress
from fa_compiler.passes.values.shapes import ShapeInfo

_LOGGER = logging.getLogger("fa_compiler")

Weights = Literal["copy", "keep"]
"""What happens to external weights if the result is written to another folder."""


@dataclass(frozen=True)
class Result:
    """The result of `optimize`: the report and the fused model.

    `model` is an `onnx_ir.Model` if the input was one, otherwise an `onnx.ModelProto`. External data stay external:
    their locations are relative to the output's folder or, without an output, to the input's folder. If an output was
    written, the weights inside the input's file are read on the first access to `model`. Until then the input's file
    may be removed or replaced, but not modified.
    """

    report: Report
    _make: Callable[[], onnx.ModelProto | ir.Model] = field(repr=False)

    @cached_property
    def model(self) -> onnx.ModelProto | ir.Model:
        """The fused model."""
        return self._make()

    def __reduce__(self) -> tuple[Callable[..., Result], tuple[Report, onnx.ModelProto | ir.Model]]:
        """Pickled with its model, so that a process pool can return it."""
        return _finished, (self.report, self.model)


def _finished(report: Report, model: onnx.ModelProto | ir.Model) -> Result:
    return Result(report, lambda: model)


def optimize(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    target: Target = "ort",
    *,
    soc_version: str | None = None,
    cann: str | None = None,
    assume: Iterable[str] = (),
    in_place_caches: bool = False,
    weights: Weights = "copy",
    bodies: bool = True,
    runtime: str | None = None,
    opset: int = 0,
) -> Result:
    """Fuse the attention of a model, and write it to `output` if given.

    Args:
        model: a path, the bytes of a file, an `onnx.ModelProto`, an `onnx_ir.Model` or an `ONNXProgram` of
            torch.onnx.export; it is not changed.
        output: the file to write; it may not be the input.
        target: "ort" for ONNX Runtime with our kernels, "ascend", "onnx" for ONNX's Attention, or "contrib" for
            MultiHeadAttention and GroupQueryAttention of ONNX Runtime.
        soc_version: the Ascend product the result is verified for, such as "Ascend910B2" (target "ascend").
        cann: the CANN version it is made for, such as "8.5.0" (target "ascend").
        assume: assumptions that you vouch for: "no-empty-rows", "masks-dominate", "binary-masks", "bounded-scores",
            "same-sizes", "unbroken-sequences", "close-ranks", "loss-floor", "decode", "shared-caches",
            "separate-caches", "half-attention", "empty-bias", "finite-scores", "non-finite-scores",
            "drop-activation-quantisation".
            `fa-compiler optimize --help` says what each means.
        in_place_caches: replace caches that grow by a Concat by preallocated buffers (target "ort"). Their inputs and
            outputs then have a capacity, and a new input `cache_length`, int64 [1], is the number of tokens that they
            hold. The report's `caches` name them.
        weights: what happens to external weights if `output` is not in the model's folder: "copy" copies them into one
            file beside it. "keep" leaves them where they are, which must be below the output's folder.
        bodies: give the fused nodes their computation in standard operators, too, as functions of the model (target
            "ort"). ONNX Runtime without the custom-op library and other tools run these. Without bodies the file
            needs the library everywhere.
        runtime: the runtime that the targets "onnx" and "contrib" are narrowed to, such as "ort-cpu" or "ort-cpu=1.27".
            None for what the operators' schemas say.
        opset: the least opset of the result (target "onnx"), to which an older model is raised. 0 for 23, the first
            with Attention. From 25 on windows become attributes, but no runtime is known to have a kernel.

    Raises:
        InputError: the model, an option or the output is at fault; nothing was written.
        InternalError: the result failed our own checks; nothing was written.
    """
    options = make_options(target, soc_version, cann, assume, in_place_caches, runtime, opset)
    keep = is_kept(weights)
    loaded = load(model)
    place = None if output is None else Path(output)
    if place is not None:
        check_place(place, loaded)
    fused, report = run(loaded, options, form=file_form(options, bodies))
    proto = copy_of(loaded) if fused is None else fused
    if place is None:
        relocate(proto, loaded.relative)
        make_inline(proto, loaded.weights)
    else:
        with staging() as stage:
            write_model(proto, loaded, place, stage, report, keep)
            stage.commit()
    if not isinstance(model, ir.Model):
        return Result(report, lambda: make_inline(proto, loaded.weights))
    result = ir.from_proto(proto)
    base = loaded.folder.base if place is None else place.absolute().parent
    ir.external_data.set_base_dir(result.graph, base)
    return Result(report, lambda: result)


def inspect(
    model: ModelLike,
    target: Target = "ort",
    *,
    soc_version: str | None = None,
    cann: str | None = None,
    assume: Iterable[str] = (),
    in_place_caches: bool = False,
    runtime: str | None = None,
    opset: int = 0,
) -> Report:
    """Tell what `optimize` would fuse with the same arguments, and why not the rest. Nothing is written.

    Raises:
        InputError: the model or an option is at fault.
        InternalError: the result failed our own checks.
    """
    _, report = run(load(model), make_options(target, soc_version, cann, assume, in_place_caches, runtime, opset))
    return report


def is_kept(weights: str) -> bool:
    """Whether weights stay where they are, by the user's word.

    Raises:
        InputError: the word is unknown.
    """
    if weights not in get_args(Weights):
        raise InputError(f"unknown value {weights!r} for the weights: use {' or '.join(map(repr, get_args(Weights)))}")
    return weights == "keep"


def make_options(
    target: str,
    soc_version: str | None,
    cann: str | None,
    assume: Iterable[str],
    in_place_caches: bool = False,
    runtime: str | Runtime | None = None,
    opset: int = 0,
) -> Options:
    """The options from the user's values.

    Raises:
        InputError: an option has an unknown value, or cannot be used with the target.
    """
    words = frozenset((assume,) if isinstance(assume, str) else assume)
    if target != "ascend" and (soc_version is not None or cann is not None):
        raise InputError("a SoC version and a CANN version go with the target 'ascend' only")
    try:
        if soc_version is not None:
            product(soc_version)
        if cann is not None:
            op_registry.get("FlashAttentionScore", cann)
        return Options(
            target,  # type: ignore[arg-type]  # Options checks it
            soc_version,
            cann,
            words,
            in_place_caches=in_place_caches,
            runtime=Runtime.of(runtime) if isinstance(runtime, str) else runtime,
            opset=opset,
        )
    except ValueError as error:
        raise InputError(str(error)) from None


Form = Literal["graph", "file", "file with bodies"]
"""The operators of fused nodes (lowering/onnx_file): those of the registry, those of files for ONNX Runtime, or the
same with functions."""


def file_form(options: Options, bodies: bool) -> Form:
    """The form of the fused nodes in a file for the target."""
    if options.target != "ort":
        return "graph"
    return "file with bodies" if bodies else "file"


def run(
    loaded: LoadedModel, options: Options, progress: Progress | None = None, form: Form = "graph"
) -> tuple[onnx.ModelProto | None, Report]:
    """Fuse and check a loaded model.

    Returns:
        A new proto, or None if there is nothing to change, and the report. The `location` of an external tensor of the
        proto is an absolute path.

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
    report.seconds = time.perf_counter() - start
    _log(report)
    return proto, report


def fuse_loaded(
    loaded: LoadedModel, options: Options, progress: Progress | None = None
) -> tuple[ir.Model, Report, ShapeInfo | None]:
    """Fuse a loaded model, and check the fused nodes: the model, the report, and what is known of the model.

    Raises:
        InputError: the model, or the target for it, is at fault.
        InternalError: a fused node failed our own checks.
    """
    model = loaded.to_ir()
    report, info = fuse_checked(model, options, progress)
    if loaded.weights is not None:
        loaded.weights.check(by_path=True)  # the passes read the file by its path
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


def _log(report: Report) -> None:
    """Tell the logger `fa_compiler` what became of the model (INFO) and of each of its blocks (DEBUG)."""
    fused, total = report.count("fused"), report.softmaxes
    _LOGGER.info("%s: %d of %d attentions fused in %.2f s", report.model, fused, total, report.seconds)
    for block in report.blocks:
        what = block.op if block.status == "fused" else block.reason
        _LOGGER.debug("%s: block %d at %s: %s: %s", report.model, block.id, block.anchor, block.status, what)


@contextmanager
def without_collections() -> Iterator[None]:
    """Switch garbage collection off. The objects of the passes live until the passes end: a collection would find
    nothing, and all collections together would take a quarter of the time."""
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
    """The checked result; None if nothing was fused and no FlexAttention was expanded."""
    fused = bool(report.count("fused"))
    if not fused and not may_hold_flex(loaded.proto):
        return None
    functions = to_file_operators(model, info if form == "file with bodies" else None) if form != "graph" else []
    proto = proto_of(loaded, model)
    if form != "graph":
        finish_proto(proto, functions)
    put_back(proto, loaded.foreign)
    if (written := expand_flex(proto)) is not None:
        proto, note = written
        report.notes.append(note)
        report.changed_otherwise = True
    elif not fused:
        return None
    return _checked(loaded, proto)


def proto_of(loaded: LoadedModel, model: ir.Model) -> onnx.ModelProto:
    """The model as a proto.

    Protobuf reads a text that is not UTF-8, but does not write it. Such a text may be in a field that no check reads:
    the producer's name, or a domain that no node uses.
    """
    try:
        return ir.to_proto(model)
    except ir.serde.SerdeError as error:
        cause = origin(error)
        if not isinstance(cause, UnicodeDecodeError):
            raise
        raise InputError(f"{loaded.name} holds the text {cause.object!r}, which is not UTF-8") from error


def _checked(loaded: LoadedModel, proto: onnx.ModelProto) -> onnx.ModelProto:
    if proto.ir_version != loaded.proto.ir_version:
        raise InternalError(f"{loaded.name}: the IR version changed from {loaded.proto.ir_version}")
    problem = checker.fault(proto, full=True)
    if problem is not None and checker.fault(loaded.proto, full=True) is not None:
        problem = checker.fault(proto, full=False)
    if problem is not None:
        raise invalid_result(loaded, proto, f"the optimised model is not valid: {problem}")
    return proto


def invalid_result(loaded: LoadedModel, result: onnx.ModelProto, problem: str) -> InputError | InternalError:
    """The error for an invalid result: of the model, if it is at fault itself, otherwise of the compiler."""
    if checker.fault(result, full=True, declared=False) is None:
        # The checker knows the type and sizes of an output in the result. In the original it could not infer them.
        return InputError(f"{loaded.name} declares other types or sizes than its nodes compute: {problem}")
    # In a model with an operator that onnx does not know, the checker accepts a node that cannot take its inputs. The
    # result may no longer hold that operator, so only its check fails.
    if (cause := checker.contradiction(loaded.proto)) is not None:
        return InputError(f"{loaded.name}: {cause}")
    # The checker does not look into the definition of an operator.
    written_out = with_definitions(loaded.proto)
    if written_out is not None and (cause := checker.fault(written_out, full=True)) is not None:
        return InputError(f"{loaded.name}: a FlexAttention of it is not valid: {cause}")
    return InternalError(f"{loaded.name}: {problem}")
