"""The operators, one file each. `registry.py` finds the files, `operator.py` says how to write one."""
