"""What happens to the scores besides their scale: terms become masks, biases, bands and packed
sequences.

`MaskPlanner` makes the plan of the terms (mask.py). score_ops.py has the operations on the scores.
structure.py reads bands and padding, and packing.py reads packed sequences.
"""
