"""From fused nodes to something that runs: kernels for ONNX Runtime (`ort`) and graphs for Ascend (`ascend`)."""
