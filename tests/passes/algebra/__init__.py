"""Sizes, formulas and axes as algebras."""
