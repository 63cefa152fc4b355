"""The version of the package, which messages and written files name."""

__version__ = "0.1.0"
