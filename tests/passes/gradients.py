"""Fusing training graphs and running them: ONNX Runtime for the original, the float64 reference for the fused one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir

from fa_compiler.op_registry import DOMAIN, verify
from fa_compiler.passes import Options, Report, analyse, fuse
from fa_compiler.passes.answer.options import Target
from fa_compiler.passes.rewrite.node_view import node_view
from fa_compiler.reference.op_runs import _Evaluator
from tests.contrib_ops import DropoutGrad, FusedMatMul, SoftmaxGrad_13, TanhGrad
from tests.passes.running import PRODUCT, Array, Feeds, assert_same


def fused_pair(
    model: onnx.ModelProto, target: Target = "ort", assume: Sequence[str] = ()
) -> tuple[onnx.ModelProto, Report]:
    """The model after the fusion of attention and gradients, which has passed the registry's checks."""
    graph = ir.from_proto(model)
    report = fuse(graph, Options(target, assume=frozenset(assume)))
    info = analyse(graph)
    for node in graph.graph.all_nodes():
        if node.domain == DOMAIN:
            faults = verify(node_view(node, info), "ort" if target == "ort" else PRODUCT)
            assert not [each for each in faults if target == "ascend" or each.extension is None]
    return ir.to_proto(graph), report


def evaluate(model: onnx.ModelProto, feeds: Feeds) -> dict[str, Array]:
    """All outputs, computed by the reference evaluator."""
    session = _Evaluator(model, new_ops=[SoftmaxGrad_13, TanhGrad, DropoutGrad, FusedMatMul])
    names = [output.name for output in model.graph.output]
    with np.errstate(all="ignore"):
        return dict(zip(names, session.run(None, dict(feeds)), strict=True))


def assert_close(got: Array, wanted: Array, tolerance: float) -> None:
    """As `assert_same`, but relative to 1 at least: sums of numbers around 1 may cancel to nothing but rounding."""
    finite = np.abs(wanted[np.isfinite(wanted)])
    assert_same(got, wanted, tolerance / min(1.0, max(float(finite.max(initial=0.0)), 1e-38)))


def named(model: onnx.ModelProto, results: Sequence[Array]) -> Mapping[str, Array]:
    """Results by the names of the model's outputs."""
    return dict(zip((output.name for output in model.graph.output), results, strict=True))
