"""The ONNX route to ATC: a model for ATC's ONNX parser, and a plugin for the operators that the
parser does not know.

`lower` converts a fused model to an opset that the parser knows. `check` checks any model by the
parser's rules. `plugin` generates the C++ source of the plugin. `npu` writes attention with
operators for which ATC has plugins.
"""

from fa_compiler.lowering.ascend.onnx_route.errors import UnsupportedModel
from fa_compiler.lowering.ascend.onnx_route.lower import lower, only_known_entries

__all__ = ["UnsupportedModel", "lower", "only_known_entries"]
