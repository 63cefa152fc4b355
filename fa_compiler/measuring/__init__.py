"""Measures a model and its fused form beside each other: `bench` (benchmark.py).

It measures runs of inputs (runs.py), or a decoder as it is used (steps.py).
"""
