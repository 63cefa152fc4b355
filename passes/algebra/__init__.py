"""Exact arithmetic on numbers that are not known before a model runs.

A size is a `Dim`, a polynomial in symbols (symbolic.py). `Affine` and `Formula` are expressions
over the indices of a tensor (formula.py). A `Case` is a number that depends on a condition
(cases.py), and a `Bound` is an end of an interval (intervals.py). An `Arrangement` says of which
axes the dimensions of a tensor are made (axes.py).
"""
