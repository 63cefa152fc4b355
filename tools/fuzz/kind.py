"""What the engine knows of a kind of case: `check(seed)` says what happened, and what was found.

A kind is one module in `tools/fuzz/kinds/`, named like the kind, with one subclass of `Kind`. The engine finds it by
its file. Everything a case needs is drawn from its seed, so that a seed is all there is to keep of it.
"""

from __future__ import annotations

import importlib
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from tools.fuzz import kinds

GROUPS = {
    "graphs": (
        *(
            "again",
            "around",
            "bounds",
            "compose",
            "facts",
            "gradients",
            "growth",
            "linear_plain",
            "mask_plans",
            "mutate",
            "quantised",
            "ready_made",
        ),
        *("runtimes", "schema_calls", "shapes", "spellings", "steps", "symbolic", "tested"),
    ),
    "parallel": ("caches", "rank_calls", "ranks", "rules"),
    "operators": ("atc_front_end", "calls", "wrong_calls"),
    "programs": ("commands", "verify"),
    "provider": ("plan_bytes", "sessions"),
    "damaged": ("onnx_bytes", "air_bytes", "json_bytes", "npz_bytes", "plan_bytes"),
}
"""Words for several kinds, on the command line; `all` is every kind there is."""


@dataclass(frozen=True)
class Finding:
    """One fault that a case shows.

    `title` groups equal faults: it names what is wrong, without the numbers of the case. `detail` is for the reader.
    `data` is what reproduces the fault (a model, a file, JSON), kept in a file with this `suffix`.
    """

    title: str
    detail: str = ""
    data: bytes = b""
    suffix: str = ".onnx"


@dataclass(frozen=True)
class Outcome:
    """What became of one case, in one word such as fused, declined, refused or skipped, and what it found."""

    word: str
    finding: Finding | None = None


class Kind(ABC):
    """A family of cases, one for each seed."""

    limit_s = 20.0
    """A case that takes longer hangs, which is a finding."""
    innocent: tuple[str, ...] = ()
    """Functions of the kind in which a process may end or hang: what others are to blame for is no finding."""

    @abstractmethod
    def check(self, seed: int) -> Outcome:
        """The case of a seed. Equal seeds give equal outcomes, in any order and in any process.

        An exception that leaves it is a finding as well: its type and the place it was raised at are the title.
        """

    def reduce(self, seed: int, finding: Finding) -> Finding | None:
        """A smaller case with the same title; None where there is none."""
        return None


def names() -> list[str]:
    """Every kind there is."""
    return sorted(module.name for module in pkgutil.iter_modules(kinds.__path__))


def chosen(words: Sequence[str]) -> list[str]:
    """The kinds that names, groups and `all` stand for; a name with a dot is a module from elsewhere.

    Raises:
        ValueError: a word is none of them.
    """
    known = names()
    found: list[str] = []
    for word in words:
        named = known if word == "all" else GROUPS.get(word, (word,))
        found.extend(name for name in named if (name in known or "." in name) and name not in found)
        if word not in known and word not in GROUPS and word != "all" and "." not in word:
            raise ValueError(f"unknown kind {word!r}: known are {', '.join([*known, *GROUPS, 'all'])}")
    return found


def load(name: str) -> Kind:
    """The kind of a name."""
    module = importlib.import_module(name if "." in name else f"{kinds.__name__}.{name}")
    (found,) = (
        each
        for each in vars(module).values()
        if isinstance(each, type) and issubclass(each, Kind) and each.__module__ == module.__name__
    )
    made: Kind = found()
    return made
