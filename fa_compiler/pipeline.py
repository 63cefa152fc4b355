"""load -> fuse -> check -> write: the one way every entrance of this package takes."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import onnx
import onnx_ir as ir

from fa_compiler import op_registry
from fa_compiler.checks import checker
from fa_compiler.checks.operators import registry_nodes, verify_nodes
from fa_compiler.checks.runtime import holds_flex, remarks, written_out
from fa_compiler.errors import InputError, InternalError, origin
from fa_compiler.model_files.foreign_types import put_back
from fa_compiler.model_files.inline_weights import bring_in
from fa_compiler.model_files.reading import Loaded, ModelLike, load
from fa_compiler.model_files.writing import Progress, check_place, relocate, staging, write_model
from fa_compiler.op_registry.products import product
from fa_compiler.passes import Options, Report, fuse
from fa_compiler.passes.options import Target


@dataclass(frozen=True)
class Result:
    """What `optimize` returns.

    `model` is an `onnx_ir.Model` if one was given, else an `onnx.ModelProto` (for a path or a proto).
    External data stay external: locations are relative to the output's folder, or to the input's when no
    output was given. Weights inside the model's file are read, into `model`, when it is first asked for, if the
    result was written to an output; until then that file may be removed or replaced, but not written to.
    """

    report: Report
    _make: Callable[[], onnx.ModelProto | ir.Model] = field(repr=False)

    @cached_property
    def model(self) -> onnx.ModelProto | ir.Model:
        """The fused model."""
        return self._make()


def optimize(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    target: Target = "ort",
    *,
    soc_version: str | None = None,
    cann: str | None = None,
    assume: Iterable[str] = (),
    in_place_caches: bool = False,
) -> Result:
    """Fuse the attention of a model, and write it to `output` if given.

    Args:
        model: a path, an `onnx.ModelProto` or an `onnx_ir.Model`; it is not changed.
        output: the file to write; it may not be the input.
        target: "ort" for ONNX Runtime, or "ascend".
        soc_version: the Ascend product the result is verified for, such as "Ascend910B2" (target "ascend").
        cann: the CANN version it is made for, such as "8.5.0" (target "ascend").
        assume: what you vouch for: "no-empty-rows", "masks-dominate", "binary-masks", "bounded-scores",
            "unbroken-sequences", "close-ranks", "loss-floor", "decode", "shared-caches", "separate-caches",
            "half-attention", "empty-bias". `fa-compiler optimize --help` says what each means.
        in_place_caches: makes buffers of caches that grow by a Concat (target "ort"). Their inputs and outputs then
            have room for more tokens, and an input `cache_length`, int64 [1], says how many they hold; the report's
            `caches` name them.

    Raises:
        InputError: the model, an option or the output is at fault; nothing was written.
        InternalError: the result failed its checks; nothing was written.
    """
    options = make_options(target, soc_version, cann, assume, in_place_caches)
    loaded = load(model)
    place = None if output is None else Path(output)
    if place is not None:
        check_place(place, loaded, force=False)
    fused, report = run(loaded, options)
    proto = copy_of(loaded) if fused is None else fused
    if place is None:
        relocate(proto, loaded.relative)
        bring_in(proto, loaded.weights)
    else:
        with staging() as stage:
            write_model(proto, loaded, place, stage, report)
            stage.commit()
    if not isinstance(model, ir.Model):
        return Result(report, lambda: bring_in(proto, loaded.weights))
    result = ir.from_proto(proto)
    base = loaded.folder.base if place is None else place.absolute().parent
    ir.external_data.set_base_dir(result.graph, base)
    return Result(report, lambda: result)


def make_options(
    target: str,
    soc_version: str | None,
    cann: str | None,
    assume: Iterable[str],
    in_place_caches: bool = False,
) -> Options:
    """Options from what a user typed.

    Raises:
        InputError: an option has an unknown value, or does not go with the target.
    """
    words = frozenset((assume,) if isinstance(assume, str) else assume)
    if target == "ort" and (soc_version is not None or cann is not None):
        raise InputError("a SoC version and a CANN version go with the target 'ascend' only")
    try:
        if soc_version is not None:
            product(soc_version)
        if cann is not None:
            op_registry.get("FlashAttentionScore", cann)
        return Options(
            target,  # type: ignore[arg-type]  # it checks by itself
            soc_version,
            cann,
            words,
            in_place_caches=in_place_caches,
        )
    except ValueError as error:
        raise InputError(str(error)) from None


def run(loaded: Loaded, options: Options, progress: Progress | None = None) -> tuple[onnx.ModelProto | None, Report]:
    """Fuse and check a loaded model.

    Returns a new proto, whose external tensors hold absolute paths as `location`, or None when there is nothing to
    change in the loaded one; and the report.
    """
    start = time.perf_counter()
    with _without_collections():
        model = loaded.to_ir()
        given = registry_nodes(model)
        report = fuse(model, options, progress)
        if loaded.weights is not None:
            loaded.weights.check(by_path=True)  # the passes read it by its path
        report.model, report.target = loaded.name, options.target
        report.notes[:0] = loaded.repairs
        verify_nodes(model, given, options.platform, options.cann)
        report.mended = bool(loaded.repairs)
        proto = _result(loaded, model, report)
        if options.target == "ort":
            report.notes.extend(remarks(loaded.proto if proto is None else proto))
    report.seconds = time.perf_counter() - start
    return proto, report


@contextmanager
def _without_collections() -> Iterator[None]:
    """No garbage collections meanwhile: what the passes make lives until they end, so that looking for garbage among
    it finds nothing and takes a quarter of the time."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def copy_of(loaded: Loaded) -> onnx.ModelProto:
    """The unchanged model, its external tensors with absolute paths as `location`."""
    proto = onnx.ModelProto()
    proto.CopyFrom(loaded.proto)
    relocate(proto, loaded.absolute)
    return proto


def _result(loaded: Loaded, model: ir.Model, report: Report) -> onnx.ModelProto | None:
    """The checked result; None where nothing was fused or written out."""
    fused = bool(report.count("fused"))
    if not fused and not holds_flex(loaded.proto):
        return None
    proto = _proto_of(loaded, model)
    put_back(proto, loaded.foreign)
    if (written := written_out(proto)) is not None:
        proto, note = written
        report.notes.append(note)
        report.mended = True
    elif not fused:
        return None
    return _checked(loaded, proto)


def _proto_of(loaded: Loaded, model: ir.Model) -> onnx.ModelProto:
    """The serialised model. Protobuf reads texts that are not UTF-8 where nobody looks at them (a producer's name, a
    domain that no node uses), and does not write them."""
    try:
        return ir.to_proto(model)
    except ir.serde.SerdeError as error:
        cause = origin(error)
        if not isinstance(cause, UnicodeDecodeError):
            raise
        raise InputError(f"{loaded.name} holds the text {cause.object!r}, which is not UTF-8") from error


def _checked(loaded: Loaded, proto: onnx.ModelProto) -> onnx.ModelProto:
    if proto.ir_version != loaded.proto.ir_version:
        raise InternalError(f"{loaded.name}: the IR version changed from {loaded.proto.ir_version}")
    problem = checker.fault(proto, full=True)
    if problem is not None and checker.fault(loaded.proto, full=True) is not None:
        problem = checker.fault(proto, full=False)
    elif problem is not None and checker.fault(proto, full=True, declared=False) is None:
        # The result computes an output of known sizes, the original one of sizes that the checker did not follow.
        raise InputError(f"{loaded.name} declares other sizes than its nodes compute: {problem}")
    if problem is not None:
        raise InternalError(f"{loaded.name}: the optimised model is not valid: {problem}")
    return proto
