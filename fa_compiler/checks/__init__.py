"""Checks of a model and of its fused nodes.

`fault` asks ONNX's checker, without the model's weights (checker.py). `unchecked_fault` has what
that checker does not check (unchecked.py). `verify_nodes` is the last check of fused nodes
(operators.py).
"""
