"""New nodes: their names, constants and opsets, and where they may stand beside quantised tensors.

`Builder` makes nodes in a graph (build.py), with a method for each operator (operators.py). `Trial`
keeps or undoes a change (trial.py). `raise_opset` raises a model to a newer opset (raise_opset.py).
"""
