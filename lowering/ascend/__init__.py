"""Ascend IR for the offline compiler ATC: GE graphs, and the files from which ATC reads a graph or
an operator.

`convert` makes a GE graph (graph.py) of an ONNX model. `infer` gives types and shapes, and `air`
reads and writes the file. `onnx_route` writes ONNX for ATC's parser, and `single_op` the JSON file
of one operator.
"""
