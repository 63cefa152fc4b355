"""Ascend IR for the offline compiler ATC: GE graphs, and the files from which ATC reads a graph or an operator."""
