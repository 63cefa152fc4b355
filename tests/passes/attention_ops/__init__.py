"""Attention operators that the model already holds."""
