"""Checks with other releases, runtimes, tools, packages and languages, which `make compat` runs."""
