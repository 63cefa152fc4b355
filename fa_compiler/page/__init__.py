"""What people see of a model: a page that shows what became of its attention, drawings, a graph, figures."""
