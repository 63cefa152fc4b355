"""Tensors as arrangements of axes, matrix products of them, and plans that rearrange them."""
