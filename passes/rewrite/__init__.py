"""Builds the nodes that replace a matched attention.

The `Rewriter` does so for the operators of the registry (rewriter.py), and a `MaskBuilder` makes
their masks (mask_builder.py). standard.py makes the operators of ONNX and of ONNX Runtime.
"""
