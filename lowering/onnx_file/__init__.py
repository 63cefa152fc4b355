"""The form of fused nodes in ONNX files that other tools read: one output, and a body in standard operators."""

from fa_compiler.lowering.onnx_file.form import (
    add_around_bodies,
    add_functions,
    finish_proto,
    restore_graph_operators,
    to_file_operators,
    to_graph_operators,
)

__all__ = [
    "add_around_bodies",
    "add_functions",
    "finish_proto",
    "restore_graph_operators",
    "to_file_operators",
    "to_graph_operators",
]
