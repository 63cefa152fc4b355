"""`optimize` and `inspect`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Unpack, get_args

import onnx
import onnx_ir as ir

from fa_compiler.errors import InputError
from fa_compiler.model_files.destination import file_place
from fa_compiler.model_files.inline_weights import make_inline
from fa_compiler.model_files.reading import ModelLike, load
from fa_compiler.model_files.writing import check_place, relocate, staging, write_model
from fa_compiler.passes import Options, Report
from fa_compiler.passes.answer.options import FusionKeywords, Target
from fa_compiler.passes.answer.report import printable
from fa_compiler.passes.answer.shown import Shown
from fa_compiler.pipeline.fusing import copy_of, file_form, run
from fa_compiler.pipeline.how_to_run import HowToRun, how_to_run_result
from fa_compiler.pipeline.keywords import takes
from fa_compiler.pipeline.options import FileKeywords, FileOptions, python_options


@dataclass(frozen=True, repr=False)
class Result(Shown):
    """The result of `optimize`: the report and the fused model, and where a file was written, its
    place and how it is run. `print` and notebooks show the report and how the file is run.

    `model` is an `onnx_ir.Model` if the input was one, otherwise an `onnx.ModelProto`. External
    data stay external: their locations are relative to the output's folder or, without an output,
    to the input's folder. If an output was written, the weights inside the input's file are read on
    the first access to `model`. Until then the input's file may be removed or replaced, but not
    modified.
    """

    report: Report
    _make: Callable[[], onnx.ModelProto | ir.Model]
    output: Path | None = None
    how_to_run: HowToRun | None = None

    @cached_property
    def model(self) -> onnx.ModelProto | ir.Model:
        """The fused model."""
        return self._make()

    @property
    def _short(self) -> str:
        written = "" if self.output is None else f", wrote {printable(str(self.output))}"
        return f"{self.report._short}{written}"

    @property
    def _rows(self) -> Sequence[Sequence[str]]:
        return self.report._rows

    @property
    def _lines(self) -> list[str]:
        if self.output is None:
            return self.report._lines
        return [*self.report._lines, printable(f"wrote {self.output}")]

    @property
    def _code(self) -> list[str]:
        if self.how_to_run is None:
            return []
        return ["How to run it:", *map(printable, str(self.how_to_run).splitlines())]

    def __reduce__(self) -> tuple[Callable[..., Result], tuple[object, ...]]:
        """Pickled with its model, so that a process pool can return it."""
        return _finished, (self.report, self.model, self.output, self.how_to_run)


def _finished(
    report: Report,
    model: onnx.ModelProto | ir.Model,
    output: Path | None,
    how_to_run: HowToRun | None,
) -> Result:
    return Result(report, lambda: model, output, how_to_run)


@takes(FileKeywords, FileOptions)
def optimize(
    model: ModelLike,
    output: str | os.PathLike[str] | None = None,
    target: Target = Options.target,
    **options: Unpack[FileKeywords],
) -> Result:
    """Fuse the attention of a model, and write it to `output` if given.

    Args:
        model: a path, the bytes of a file, an `onnx.ModelProto`, an `onnx_ir.Model` or an
            `ONNXProgram` of torch.onnx.export; it is not changed.
        output: the file to write; it may not be the input.
        target: "ort" for ONNX Runtime with our kernels, "ascend", "onnx" for ONNX's Attention, or
            "contrib" for MultiHeadAttention and GroupQueryAttention of ONNX Runtime.
        **options: the fields of `FileOptions`.

    Raises:
        InputError: the model, an option or the output is at fault; nothing was written.
        InternalError: the result failed our own checks; nothing was written.
    """
    chosen = python_options(target, **options)
    if output in get_args(Target):
        raise InputError(
            f"the second argument is the file to write; the target is given as target={output!r}"
        )
    loaded = load(model)
    place = None if output is None else file_place(output)
    if place is not None:
        check_place(place, loaded)
    fused, report = run(loaded, chosen, form=file_form(chosen))
    proto = copy_of(loaded) if fused is None else fused
    if place is None:
        relocate(proto, loaded.relative)
        make_inline(proto, loaded.weights)
    else:
        with staging() as stage:
            write_model(proto, loaded, place, stage, report, chosen.keeps_weights)
            stage.commit()
    how = None if place is None else how_to_run_result(place, report, chosen, proto, loaded.proto)
    if not isinstance(model, ir.Model):
        return Result(report, lambda: make_inline(proto, loaded.weights), place, how)
    result = ir.from_proto(proto)
    base = loaded.folder.base if place is None else place.absolute().parent
    ir.external_data.set_base_dir(result.graph, base)
    return Result(report, lambda: result, place, how)


@takes(FusionKeywords, Options)
def inspect(
    model: ModelLike, target: Target = Options.target, **options: Unpack[FusionKeywords]
) -> Report:
    """Tell what `optimize` would fuse with the same arguments, and why not the rest. Nothing is
    written.

    Raises:
        InputError: the model or an option is at fault.
        InternalError: the result failed our own checks.
    """
    _, report = run(load(model), python_options(target, **options))
    return report
