"""The lowering of fused nodes: CPU kernels for ONNX Runtime (`ort`), the form of a file for other
tools (`onnx_file`), and Ascend's file formats (`ascend`). drawing.py draws graphs.
"""
