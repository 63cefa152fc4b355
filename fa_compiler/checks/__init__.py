"""Checks of a model and of the fused nodes, beyond ONNX's own checker."""
