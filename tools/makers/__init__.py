"""Makers of models: exporters of test graphs and examples, and what changes a model's size."""
