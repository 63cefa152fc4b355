"""The search for faults, `make fuzz`: random cases against two promises, never wrong and always explained.

`python -m tools.fuzz` runs it: an `Engine` hands seeds to workers (engine.py), and each module of kinds/ has one `Kind`
of cases (kind.py). oracle.py says what is a fault of a fused model. `python -m tools.fuzz.checks` measures the power of
the search.
"""
