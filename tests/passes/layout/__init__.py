"""Tensors as arrangements of axes."""
