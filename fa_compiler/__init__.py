"""fa_compiler: finds attention in ONNX graphs and fuses it into FlashAttentionScore.

    import fa_compiler

    result = fa_compiler.optimize("model.onnx", "fused.onnx")       # result.model, result.report
    report = fa_compiler.inspect("model.onnx")                      # what would be fused, and why not the rest
    fa_compiler.graph("model.onnx").nodes(data="blocks")            # a networkx graph: which nodes are which attention
    fa_compiler.verify("model.onnx", "fused.onnx").same             # the same outputs in ONNX Runtime?
    session = fa_compiler.InferenceSession("model.onnx")            # onnxruntime's, fusing while it loads
    fused = fa_compiler.FuseAttention()(ir_model).model             # a pass of onnx_ir, for pipelines in memory
    options.add_provider_for_devices(fa_compiler.register_provider(), {})    # or: in any session of ONNX Runtime
    import fa_compiler.everywhere                                   # or: in all sessions of this process
    fa_compiler.plan("model.onnx", "model.plan")                    # the same for programs without Python
    fa_compiler.bench("model.onnx", [128, 2048]).measures           # how much faster, with how much memory
    fa_compiler.DecodingSession("decoder.onnx").step(inputs)        # a decoder whose session holds the caches
    fa_compiler.compile_for_atc("model.onnx", "folder", "Ascend910B2")
    fa_compiler.shard("model.onnx", "out", 4)                       # the model that 4 ranks run with mpirun
    fa_compiler.ops.run("FlashAttentionScore", inputs, attrs)       # one operator on the CPU kernel
    fa_compiler.reference.run("FlashAttentionScore", inputs, attrs) # the same in float64 NumPy

A fused file loads in plain ONNX Runtime after `register_custom_ops(session_options)`. Importing the
package registers the ONNX schemas of the domain "ascend"; everything else is imported when it is
first used. What a run does is logged by the logger "fa_compiler".
"""

from __future__ import annotations

from fa_compiler.command_line import interrupts as _interrupts

if _interrupts.is_command():  # before the other imports, which take most of a second
    _interrupts.end_at_once()

import importlib
import sys
from typing import TYPE_CHECKING, Any

from fa_compiler.op_registry import schemas as _schemas
from fa_compiler.version import __version__

if TYPE_CHECKING:
    from fa_compiler import ops, reference
    from fa_compiler.atc.run import compile_for_atc
    from fa_compiler.comparison.compare import Comparison
    from fa_compiler.comparison.verification import verify
    from fa_compiler.decoding import DecodingSession
    from fa_compiler.errors import FaCompilerError, InputError, InternalError
    from fa_compiler.fuse_pass import FuseAttention
    from fa_compiler.lowering.ort import custom_ops_library, register_custom_ops
    from fa_compiler.measuring.benchmark import bench
    from fa_compiler.page.model_graph import graph
    from fa_compiler.parallel.session import ShardedSession
    from fa_compiler.parallel.sharding import shard
    from fa_compiler.passes import Report
    from fa_compiler.pipeline.optimize import Result, inspect, optimize
    from fa_compiler.provider import register_provider
    from fa_compiler.provider.plan import plan
    from fa_compiler.session import InferenceSession

__all__ = [
    "Comparison",
    "DecodingSession",
    "FaCompilerError",
    "FuseAttention",
    "InferenceSession",
    "InputError",
    "InternalError",
    "Report",
    "Result",
    "ShardedSession",
    "__version__",
    "bench",
    "compile_for_atc",
    "custom_ops_library",
    "graph",
    "inspect",
    "ops",
    "optimize",
    "plan",
    "reference",
    "register_custom_ops",
    "register_provider",
    "shard",
    "verify",
]

_LAZY = {
    "Comparison": "fa_compiler.comparison.compare",
    "DecodingSession": "fa_compiler.decoding",
    "FaCompilerError": "fa_compiler.errors",
    "FuseAttention": "fa_compiler.fuse_pass",
    "InferenceSession": "fa_compiler.session",
    "InputError": "fa_compiler.errors",
    "InternalError": "fa_compiler.errors",
    "Report": "fa_compiler.passes",
    "Result": "fa_compiler.pipeline.optimize",
    "ShardedSession": "fa_compiler.parallel.session",
    "bench": "fa_compiler.measuring.benchmark",
    "compile_for_atc": "fa_compiler.atc.run",
    "custom_ops_library": "fa_compiler.lowering.ort",
    "graph": "fa_compiler.page.model_graph",
    "inspect": "fa_compiler.pipeline.optimize",
    "optimize": "fa_compiler.pipeline.optimize",
    "plan": "fa_compiler.provider.plan",
    "register_custom_ops": "fa_compiler.lowering.ort",
    "register_provider": "fa_compiler.provider",
    "shard": "fa_compiler.parallel.sharding",
    "verify": "fa_compiler.comparison.verification",
}
_MODULES = ("ops", "reference")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _LAZY:
        # With the module, so that Python suggests a name of it.
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}", name=name, obj=sys.modules[__name__]
        )
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


_schemas.register()
