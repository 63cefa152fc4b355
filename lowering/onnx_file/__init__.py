"""The form of fused nodes in ONNX files that other tools read: one output, and a body in standard
operators.

`to_file_operators` and `finish_proto` give a model this form, and `to_graph_operators` takes it
back (form.py). The bodies are in bodies.py (attention), linear_bodies.py and delta_bodies.py
(linear attention), and around_bodies.py (norms and others).
"""

from fa_compiler.lowering.onnx_file.form import (
    add_around_functions,
    add_ascend_bodies,
    add_functions,
    finish_proto,
    restore_graph_operators,
    to_file_operators,
    to_graph_operators,
)

__all__ = [
    "add_around_functions",
    "add_ascend_bodies",
    "add_functions",
    "finish_proto",
    "restore_graph_operators",
    "to_file_operators",
    "to_graph_operators",
]
