"""What a user is told of a model, and what the user has asked for.

A `Report` holds a `Block` for each attention, with a `Code` if it is declined (report.py). A
`Decline` is raised, and `attempt` makes it a value (decline.py). `Options` are those of a run
(options.py). `spend` counts the steps of proofs (budget.py).
"""
