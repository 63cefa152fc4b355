"""From a softmax to the frozen record of an attention, without touching the graph.

`anchors` finds the softmaxes of a graph (softmax.py), and `Matcher` gives the `AttentionMatch` of
one, or raises `Decline` (attention.py). A later step may have to split the axes of a match further.
It then works on a copy of them.
"""
