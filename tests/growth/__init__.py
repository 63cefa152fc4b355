"""Graphs that grow: what a compilation costs as depth, width and sharing of a graph grow."""
