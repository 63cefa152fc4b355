"""The graph itself.

nodes.py answers questions about nodes, such as `is_op` and `constant`. signatures.py has the known
`SIGNATURES` of ready-made operators. surgery.py changes a graph: `replace_value`, and `sweep`,
which removes dead nodes.
"""
