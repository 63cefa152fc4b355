"""How numbered constraints are written, as `Rules` (core.py), and the checks that the constraints
of several operators share.
"""
