"""Exact arithmetic on what is not known before a model runs: sizes, formulas over indices, and arrangements of axes."""
