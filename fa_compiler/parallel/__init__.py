"""Divides a model among ranks (`shard`, sharding.py), and runs it on them (`run_sharded`, run.py).

The other files have the ranks, how they talk, and how they compute an attention together.
"""
