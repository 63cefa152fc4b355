"""The graphs of tests/graphs.

`python -m tools.graphs.add` keeps one more, and `python -m tools.graphs.update` records what the compiler makes of
them.
"""
