"""The ONNX route to ATC: a model its ONNX parser takes, and the source of a plugin for the operators it does not know.

`lower` converts a fused model down to an opset the parser knows, `check` judges any model by the parser's rules,
`plugin` generates the C++ source of the plugin, `npu` writes attention with the operators ATC has plugins for.
"""

from fa_compiler.lowering.ascend.onnx_route.errors import UnfitModel
from fa_compiler.lowering.ascend.onnx_route.lower import lower, only_known_entries

__all__ = ["UnfitModel", "lower", "only_known_entries"]
