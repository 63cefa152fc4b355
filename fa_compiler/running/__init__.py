"""Runs one model in this process: `run_model` (one_process.py)."""
