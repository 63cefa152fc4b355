"""Parts of a protobuf model: its nodes and graphs, and its tensors with the files of the external ones."""
