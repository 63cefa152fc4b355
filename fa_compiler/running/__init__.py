"""Runs models: one model in this process, or a sharded model on one rank of several."""
