"""Softmaxes in all spellings: what is an attention, and what is not."""
