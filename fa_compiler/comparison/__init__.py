"""The comparison of two models on the same inputs: random tensors, masks and caches, or the user's
inputs.

`verify` compares two models (verification.py), by `compare_models` (compare.py) on `random_inputs`
(feeds.py).
"""
