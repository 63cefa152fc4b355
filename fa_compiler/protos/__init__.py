"""Parts of a protobuf model: nodes and graphs (`all_nodes`, subgraphs.py), and tensors
(`all_tensors`, tensors.py), with the files of those that are external.
"""
