"""Changes of a model in front of the matcher."""
