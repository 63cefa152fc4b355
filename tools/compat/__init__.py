"""Checks beside what others make: releases of ONNX Runtime, runtimes, tools, packages, languages, torch's autograd.

`make compat` runs `check_*.py`. `torch_*.py` need torch, and are run by hand.
"""
