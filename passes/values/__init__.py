"""What is known of values before a model runs.

`analyse` gives the shapes of a model as `ShapeInfo` (shapes.py). `Positions` gives formulas over
the indices of a mask (positions.py), `Bounds` and `ValueSets` the numbers that a tensor can hold
(bounds.py, value_sets.py), and `Facts` holds all of these for one model (facts.py). patterns.py
matches small patterns of operators.
"""
