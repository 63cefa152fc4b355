"""The sweep over models of other collections, which `make sweep` runs."""
