"""Runs sharded models: the ranks, how they talk, and how they compute an attention together."""
