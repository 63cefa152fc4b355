"""The node that an attention becomes."""
