"""How many faults do the tests notice?

`python -m tools.mutants` puts small faults into the product, one at a time, and runs the tests that cover the line.
mutations.py has the kinds of faults, and trials.py says what counts as noticed.
"""
