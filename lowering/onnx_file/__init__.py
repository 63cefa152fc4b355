"""The form of fused nodes in ONNX files that other tools read: one output, and a body in standard operators."""

from fa_compiler.lowering.onnx_file.form import finish_proto, to_file_operators, to_graph_operators

__all__ = ["finish_proto", "to_file_operators", "to_graph_operators"]
