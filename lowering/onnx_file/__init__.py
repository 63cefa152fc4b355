"""The form of fused nodes in ONNX files that other tools read: one output, and a body in standard operators."""

from fa_compiler.lowering.onnx_file.form import canonical, finish, mark

__all__ = ["canonical", "finish", "mark"]
