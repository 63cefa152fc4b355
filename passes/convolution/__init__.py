"""Short causal convolutions in plain operators."""
