"""The kinds of cases: one module each, with one subclass of `tests.fuzz.kind.Kind`."""
