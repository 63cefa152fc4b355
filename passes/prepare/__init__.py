"""Changes in front of the matcher. The ordinary matcher can match what they make; otherwise they
are undone.

`inline_functions` inlines the functions of a model (functions.py), and `prepare` changes the whole
model (preparation.py). Most other files change the graph around one attention, and each such change
is a `Substitution` (substitutions.py).
"""
