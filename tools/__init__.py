"""What developers run, beside the tests and the benchmarks. Nothing of the product imports it."""
