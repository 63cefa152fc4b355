"""The SoC versions that ATC takes. `soc_versions.tsv` holds one per line, from the platform files
of CANN's runtime."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

from fa_compiler.op_registry.errors import UnknownProduct, suggestion
from fa_compiler.op_registry.products import PRODUCTS, Product, family_of, product


@dataclass(frozen=True)
class SocVersion:
    """One processor. `short` is the family that its operators are compiled for, `arch` the number
    of its instruction set, `memory` its size in bytes. A count that the platform file does not
    state is None."""

    name: str
    short: str
    arch: int
    ai_cores: int | None
    vector_cores: int | None
    memory: int | None

    @property
    def has_bfloat16(self) -> bool:
        """Whether its instruction set has bfloat16. The first generation (910, 310P) does not."""
        return self.arch not in (1001, 2002)

    @property
    def has_hifloat8(self) -> bool:
        """Whether its matrix unit supports HiFloat8, which was introduced with Ascend 950."""
        return self.arch == 3510


FEW = 12
"""So many SoC versions may stand in one message."""


@cache
def soc_versions() -> dict[str, SocVersion]:
    """All SoC versions by name."""
    lines = (
        resources.files(__package__)
        .joinpath("soc_versions.tsv")
        .read_text(encoding="utf-8")
        .splitlines()[1:]
    )
    rows = [line.split("\t") for line in lines]
    return {
        row[0]: SocVersion(row[0], row[1], int(row[2]), *(int(n) if n else None for n in row[3:]))
        for row in rows
    }


def soc_version(name: str) -> SocVersion:
    """The SoC version of that name, spelled as ATC spells it.

    Raises UnknownProduct. The message suggests the name that was probably meant. For a family
    ("A2"), and for a name that only a member of a family could have ("Ascend910B5"), it lists the
    members.
    """
    known = soc_versions()
    if not isinstance(name, str):
        raise UnknownProduct(f"a SoC version is a text such as 'Ascend910B2', not {name!r}")
    if name in known:
        return known[name]
    if family := family_of(name):
        members = ", ".join(_members(family))
        raise UnknownProduct(f"{name} is a family; ATC wants one SoC version of it: {members}")
    raise UnknownProduct(f"unknown SoC version {name!r}{_hint(name)}")


def check_name(name: str) -> None:
    """Raise UnknownProduct for a name that is neither that of a product nor a SoC version. Names
    that have only the form of a SoC version, as Ascend910B9 has, are none."""
    if re.fullmatch(product(name).pattern, name):
        soc_version(name)


def _hint(name: str) -> str:
    known = soc_versions()
    letters = _letters(name)
    spelled = next(
        (other for other in known if _letters(other) in (letters, f"ascend{letters}")), None
    )
    if spelled:
        return f", did you mean {spelled!r}?"
    family = next((entry for entry in PRODUCTS if re.fullmatch(entry.pattern, name)), None)
    similar = (
        _members(family)
        if family
        else [other for other in known if _is_part(letters, _letters(other))]
    )
    if len(similar) == 1:
        return f", did you mean {similar[0]!r}?"
    if 0 < len(similar) <= FEW:
        return f"; {'known are' if family is None else f'those of {family.name} are'} {', '.join(similar)}"
    close = suggestion(name, known) if not similar else ""
    if "did you mean" in close:
        return close
    families = ", ".join(entry.name for entry in PRODUCTS)
    return f"; give a family to see those of it: {families}"


def _letters(name: str) -> str:
    """The letters and digits of a name, without what people write between them."""
    return re.sub(r"[^0-9a-z]", "", name.lower())


def _is_part(letters: str, name: str) -> bool:
    """Does a name begin or end so, with its "ascend" or without?"""
    return letters != "" and (
        name.startswith((letters, f"ascend{letters}")) or name.endswith(letters)
    )


def _members(family: Product) -> list[str]:
    return [name for name in soc_versions() if re.fullmatch(family.pattern, name)]
