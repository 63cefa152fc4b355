"""Sizes, shapes, numbers and formulas."""
