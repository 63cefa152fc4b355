"""Makers of models: exporters of the models in examples/ and of test graphs. Each file is a program.

`python -m tools.makers.repeat_layers` makes a model deeper.
"""
