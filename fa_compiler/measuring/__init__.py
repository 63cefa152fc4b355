"""Measures a model and its fused form beside each other: runs of inputs, and a decoder as it is used."""
