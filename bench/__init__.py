"""Measurements. Neither the users of fa_compiler nor its correctness tests need them.

`python -m bench` measures speed and memory of the operators, of other libraries (peers) and of the machine's limits (in
speed/), and of whole models (models.py). The other files are separate programs: compile_time.py measures the compiler,
and real_sizes.py with models of real sizes, which real_models.py generates.
"""
