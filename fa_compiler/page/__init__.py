"""What people see of a model: drawings, figures, and the page that holds them.

`page` makes the page that shows what became of the attention (page.py), and `graph` the graph of
networkx (model_graph.py).
"""
