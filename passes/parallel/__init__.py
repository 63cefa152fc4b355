"""Sequence parallelism: a fused model becomes one whose ranks each compute their own part of the
sequence.

`shard` makes this model (shard.py), and `rank_graph` the graph of one rank for Ascend
(rank_graph.py). A `Sharder` makes the parts on demand (sharder.py), by the rules of local_rules.py,
move_rules.py and attention_rule.py.
"""
