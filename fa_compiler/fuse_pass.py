"""`FuseAttention`: the fusion as a pass of onnx_ir, for pipelines that hold their model in
memory."""

from __future__ import annotations

from typing import Unpack

import onnx_ir as ir

from fa_compiler.lowering.onnx_file import (
    add_around_functions,
    add_functions,
    restore_graph_operators,
    to_file_operators,
)
from fa_compiler.passes import Options, Report
from fa_compiler.passes.answer.options import Target
from fa_compiler.pipeline.fusing import fuse_checked, name_of
from fa_compiler.pipeline.keywords import takes, tells_of
from fa_compiler.pipeline.options import FileOptions, PassKeywords, python_options


@tells_of(PassKeywords, FileOptions)
class FuseAttention(ir.passes.FunctionalPass):
    """Fuses the attention of a model: `FuseAttention()(model).model` is the fused model.

    The given model is not changed. The result shares its weights, which are neither copied nor
    read, apart from those that the matcher looks at. A model without attention that can be fused
    comes back as an equal copy, and `modified` is then False.

    Args:
        target: as in `fa_compiler.optimize`.
        **options: the fields of `FileOptions` without the weights.

    Raises:
        InputError: an option is unknown, or the target cannot take an operator that the model has
            already.
        InternalError: the result failed our own checks.
    """

    report: Report | None
    """What became of each attention of the last model; None before the first one."""

    @takes(PassKeywords, FileOptions)
    def __init__(self, target: Target = Options.target, **options: Unpack[PassKeywords]) -> None:
        super().__init__()
        self.report = None
        self._options = python_options(target, **options)

    def __repr__(self) -> str:
        """The target, and what became of the last model."""
        outcome = "" if self.report is None else f": {self.report.outcome}"
        return f"<FuseAttention for {self._options.target}{outcome}>"

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse a copy of the model."""
        if not isinstance(model, ir.Model):
            kind = type(model).__name__
            raise TypeError(
                f"FuseAttention takes an onnx_ir.Model, not {kind}; fa_compiler.optimize takes other kinds"
            )
        result = model.clone()
        restore_graph_operators(result)
        self.report, info = fuse_checked(result, self._options)
        self.report.model = name_of(model)
        if not self.report.is_changed:
            return ir.passes.PassResult(model.clone(), modified=False)
        if self._options.target == "ort":
            add_functions(result, to_file_operators(result, info if self._options.bodies else None))
        elif self._options.target == "ascend":
            add_around_functions(result, self.report.around_operators, model)
        return ir.passes.PassResult(result, modified=True)
