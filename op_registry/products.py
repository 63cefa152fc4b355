"""Ascend products: the short names of the documents, and the SoC versions that ATC takes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from fa_compiler.op_registry.errors import UnknownProduct, suggestion


@dataclass(frozen=True)
class Product:
    """A family of processors. `socs` are the names under which operator definitions register it,
    `title` is its name in the documents, and `pattern` matches the SoC versions that belong to
    it."""

    name: str
    title: str
    socs: tuple[str, ...]
    pattern: str


PRODUCTS = (
    Product("A2", "Atlas A2", ("ascend910b",), r"Ascend910B\d\w*(-\d)?"),
    Product("A3", "Atlas A3", ("ascend910_93",), r"Ascend910_93\d\d"),
    Product(
        "950", "Ascend 950", ("ascend910_95", "ascend950"), r"Ascend(950(PR|DT)_\w+|910_95\w+)"
    ),
    Product("310P", "Atlas inference (310P)", ("ascend310p",), r"Ascend310P\d"),
    Product("310B", "Atlas 200I/500 A2 inference (310B)", ("ascend310b",), r"Ascend310B\d"),
    Product("910", "Atlas training (910)", ("ascend910",), r"Ascend910(A|B|PremiumA|ProA|ProB)"),
)
"""The product families that the documents distinguish. Ascend910B without a digit is a chip of the
training family (910), not an A2."""

EVERYDAY = {"910B": "A2", "910C": "A3", "910_93": "A3", "910_95": "950"}
"""The products of names that people use, without "Ascend" in front."""


def product(name: str) -> Product:
    """The product of a short name ("A2", "950"), of a SoC version ("Ascend910B2") or of an operator
    definition's name ("ascend910_93"). Upper and lower case matter in SoC versions, because
    Ascend910B and ascend910b are different products. Raises UnknownProduct."""
    for entry in PRODUCTS:
        if name.upper() == entry.name or name in entry.socs or re.fullmatch(entry.pattern, name):
            return entry
    known = (
        *(entry.name for entry in PRODUCTS),
        "Ascend910B2",
        "Ascend910_9392",
        "Ascend950PR_9589",
        "Ascend310P3",
    )
    meant = family_of(name)
    hint = f"; {meant.title} is {meant.name!r}" if meant else suggestion(name, known)
    raise UnknownProduct(f"unknown product or SoC version {name!r}{hint}")


def family_of(name: str) -> Product | None:
    """The product that a name without a SoC version's number means: its short name, the name of its
    operator definitions, or one in everyday use, each with or without "Ascend" in front. None for
    any other name."""
    short = name.upper().removeprefix("ASCEND")
    meant = EVERYDAY.get(short, short)
    return next((entry for entry in PRODUCTS if meant == entry.name or name in entry.socs), None)
