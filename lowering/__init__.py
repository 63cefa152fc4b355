"""The lowering of fused nodes: CPU kernels for ONNX Runtime (`ort`) and Ascend's file formats (`ascend`)."""
