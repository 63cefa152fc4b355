"""The operators, one file each. `registry.py` finds the files, and `operator.py` says how to write one."""
