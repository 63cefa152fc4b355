"""Measures the speed of our operators and their peers, round by round in the same minutes, and the machine's limits.

cases.py       the problems, their limits and aims
truth.py       their inputs and correct results
graphs.py      the ONNX graphs of our operators, of the unfused spelling and of ONNX Runtime's operators
*_peers.py     the calls of each library
worker.py      a process that holds the peers of one library
rounds.py      the measurement
memory.py      the memory by which one call makes a process grow
limits.py      multiply-adds, dot products, products of tiles, exponentials and reads per second (limits.cc)
tables.py      Markdown of results; bars.py and curves.py the plots, chart.py draws them
"""
