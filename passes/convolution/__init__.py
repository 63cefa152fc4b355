"""Short causal convolutions in plain operators. `fuse_convolutions` replaces those of a graph
(fuse.py).

match.py has the grammar with its proof, and emit.py makes the operator.
"""
