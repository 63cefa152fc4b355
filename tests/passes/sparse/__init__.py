"""Attention to selected keys."""
