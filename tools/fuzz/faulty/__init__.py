"""Kinds for the tests of the engine."""
