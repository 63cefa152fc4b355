"""Builds the nodes that replace a matched attention."""
