"""The sweep over models of other collections, which `make sweep` runs.

export.py makes the models, convert.py converts them, and judge.py fuses and compares one. `python -m
tools.sweep.report` judges all of them, and prints the tables.
"""
