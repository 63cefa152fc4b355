"""Puts a folder of models through the compiler and judges each result: fused, equal, or not.

`coverage`, `provider`, `ascend`, `onnx_route` and `check_shapes` are programs. `compare_*.py` and `peers.py` are the
processes that they start to optimise, run and compare a model.
"""
