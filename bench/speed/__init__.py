"""How fast attention is: ours and its peers, round by round in the same minutes, beside what the machine can do.

cases.py       the problems, their limit and the aim
truth.py       their inputs, and what is right
graphs.py      the ONNX graphs of ours, of the unfused spelling and of ONNX Runtime's operators
*_peers.py     how each library is called
worker.py      a process that holds the peers of one library
rounds.py      the measurement
memory.py      how far one call makes a process grow
limits.py      multiply-adds, dot products, exponentials and reads per second (limits.cc)
tables.py      Markdown of results; plot.py an SVG
"""
