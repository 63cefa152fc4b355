"""Model files. `load` reads a model without its weights (reading.py), and `write_model` writes one
(writing.py).

repairs.py makes of a model what ONNX Runtime reads in its file.
"""
