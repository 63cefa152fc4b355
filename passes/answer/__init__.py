"""What is said of a model: the report, its codes, declines, the budget of proofs, and what the user asked for."""
