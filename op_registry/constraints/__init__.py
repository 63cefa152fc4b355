"""How numbered constraints are written (`core.py`), and the checks that the constraints of several operators share."""
