"""Model files: they are read without their weights, repaired as ONNX Runtime reads them, and written."""
