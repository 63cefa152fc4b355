"""The comparison of two models on the same inputs: random tensors, masks and caches, or the user's inputs."""
