"""Caches as buffers."""
