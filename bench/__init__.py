"""Measurements. Nothing here is needed to use fa_compiler, nor by its tests of correctness.

`python -m bench` measures speed and memory: the operators beside their peers and the machine's limits (the folder
speed/), and whole models (models.py). The other files are programs of their own: coverage.py and its helpers compare
what is fused in a corpus of models, compile_time.py measures the compiler, torch_gradients.py compares gradients with
torch's autograd.
"""
