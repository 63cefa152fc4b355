"""Masks and biases: their plans, roundings and structure."""
