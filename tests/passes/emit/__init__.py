"""Nodes that are made: opsets, origins, and quantised neighbours."""
