"""The comparison of two models on the same inputs: random ones, masks, caches, or the user's own."""
