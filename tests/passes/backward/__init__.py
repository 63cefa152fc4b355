"""Attention with its gradient."""
