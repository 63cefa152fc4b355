"""The operators, one file each with an `OPERATOR`. registry.py finds the files; operator.py says
how to write one."""
