"""Model files: reading them without their weights, mending what ONNX Runtime takes, and writing results."""
