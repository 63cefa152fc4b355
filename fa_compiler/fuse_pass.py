"""`FuseAttention`: the fusion as a pass of onnx_ir, for pipelines that hold their model in memory."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir as ir

from fa_compiler.checks.operators import registry_nodes, verify_nodes
from fa_compiler.lowering.onnx_file import add_functions, restore_graph_operators, to_file_operators
from fa_compiler.passes import Options, Report, fuse
from fa_compiler.passes.options import Target
from fa_compiler.passes.values.shapes import ShapeInfo
from fa_compiler.pipeline import make_options, without_collections


class FuseAttention(ir.passes.FunctionalPass):
    """Fuses the attention of a model: `FuseAttention()(model).model` is the fused model.

    The given model is not changed. The result shares its weights, which are neither copied nor read, apart from those
    that the matcher looks at. A model without attention that can be fused comes back as an equal copy, and `modified`
    is then False.

    Args:
        target, soc_version, cann, assume, in_place_caches, bodies, runtime, opset: as in `fa_compiler.optimize`.

    Raises:
        InputError: an option is unknown, or the target cannot take an operator that the model has already.
        InternalError: the result failed our own checks.
    """

    report: Report | None
    """What became of each attention of the last model; None before the first one."""

    def __init__(
        self,
        target: Target = "ort",
        *,
        soc_version: str | None = None,
        cann: str | None = None,
        assume: Iterable[str] = (),
        in_place_caches: bool = False,
        bodies: bool = True,
        runtime: str | None = None,
        opset: int = 0,
    ) -> None:
        super().__init__()
        self.report = None
        self._options = make_options(target, soc_version, cann, assume, in_place_caches, runtime, opset)
        self._bodies = bodies

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Fuse a copy of the model."""
        result = model.clone()
        self.report, info = fuse_checked(result, self._options)
        if not self.report.count("fused"):
            return ir.passes.PassResult(model.clone(), modified=False)
        if self._options.target == "ort":
            add_functions(result, to_file_operators(result, info if self._bodies else None))
        return ir.passes.PassResult(result, modified=True)


def fuse_checked(model: ir.Model, options: Options) -> tuple[Report, ShapeInfo | None]:
    """Fuse the attention of a model in place, and check the fused nodes against the registry.

    Nodes that were fused before have the form of the graph afterwards (lowering/onnx_file).

    Returns:
        The report, and what is known of the result if there were nodes to check.

    Raises:
        InputError: the target cannot take an operator that the model has already.
        InternalError: a fused node breaks a constraint of the registry.
    """
    with without_collections():
        restore_graph_operators(model)
        given = registry_nodes(model)
        report = fuse(model, options)
        report.model = model.graph.name or "model"
        return report, verify_nodes(model, given, options.platform, options.cann)
