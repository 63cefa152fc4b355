"""Checks of a model and of its fused nodes: ONNX's checker, and what that checker does not check."""
