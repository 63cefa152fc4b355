"""The kinds of cases: one module each, with one subclass of `tools.fuzz.kind.Kind`."""
