"""`optimize` and `inspect`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, get_args

import onnx
import onnx_ir as ir

from fa_compiler.errors import InputError
from fa_compiler.model_files.inline_weights import make_inline
from fa_compiler.model_files.reading import ModelLike, load
from fa_compiler.model_files.writing import check_place, relocate, staging, write_model
from fa_compiler.passes import Report
from fa_compiler.passes.answer.options import Target
from fa_compiler.pipeline.fusing import copy_of, file_form, make_options, run

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
