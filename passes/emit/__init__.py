"""New nodes: their names, constants and opsets, and where they may stand beside quantised tensors."""
