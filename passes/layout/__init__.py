"""Tensors as arrangements of axes.

A `Viewer` says of which axes the dimensions of a value are made (views.py). `contraction` reads a
matrix product (contraction.py), and `plan_moves` plans how a tensor is rearranged (plan.py).
"""
