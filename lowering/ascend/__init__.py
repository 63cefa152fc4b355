"""Ascend IR for the offline compiler ATC: GE graphs, the files that hold them, and what stands beside those."""
