"""Sequence parallelism: a fused model becomes one whose ranks each compute their own part of the sequence."""
