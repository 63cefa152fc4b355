"""The facts of the operators, one file each; `registry.py` finds them, `macros.py` says how to write one."""
