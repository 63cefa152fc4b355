"""Attention by a state that each token changes: found in the graph, proven, and emitted as one operator."""
