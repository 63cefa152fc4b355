"""Keeps the graphs of tests/graphs: adds one, and records what the compiler makes of them."""
