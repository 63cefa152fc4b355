"""What users are told of an option, written at the field that holds the option.

A record of options is a frozen dataclass. The fields with `metadata=told(...)` are the options that
users set; a field without is set by the program. The command line, the keywords of the Python
functions and the tables of the docs take name, default and text from here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

_KEY = "option"

_OF_THE_FIELD = object()


def as_given(value: Any) -> Any:
    """The reading of an option whose value needs none."""
    return value


@dataclass(frozen=True)
class Told:
    """What users are told of an option, and how its value is read.

    Texts: `help` is that of --help. There `usage` follows, and in Python `details`. `in_python`
    stands in the place of `help` where Python cannot say the same. `negated` is the text of the
    option --no-NAME of a Boolean that is True by default.

    Values: `choices` are all that there are. `completed` are the words that a shell completes
    besides. `meanings` are sentences about words, which the value `help` prints on the command
    line. `metavar` stands for a value in --help, where it is not the choices.

    Names: `name` is the keyword, if it is not the name of the field, and `flag` the option of the
    command line, if it is not made of the keyword. An option that is not `on_command_line` is one
    of Python only.

    Readings: `default` is what users see, where the field has another form. `kind` reads one text
    of the command line, and tells argparse of a fault. `repeated` options may stand there several
    times. `parse` makes the value of Python from that of the command line, and `read` that of the
    field from the one of Python; both raise ValueError.
    """

    help: str = ""
    usage: str = ""
    details: str = ""
    in_python: str = ""
    negated: str = ""
    choices: tuple[str, ...] = ()
    completed: Collection[str] = ()
    meanings: Mapping[str, str] = field(default_factory=dict)
    metavar: str | None = None
    name: str = ""
    flag: str = ""
    on_command_line: bool = True
    default: Any = _OF_THE_FIELD
    kind: Callable[[str], Any] | None = None
    repeated: bool = False
    parse: Callable[[Any], Any] = as_given
    read: Callable[[Any], Any] = as_given


def told(help: str = "", **more: Any) -> dict[str, Told]:
    """The metadata of a field that holds an option of users: the arguments are those of `Told`."""
    return {_KEY: Told(help, **more)}


@dataclass(frozen=True)
class Option:
    """An option of users: the field that holds it, its keyword in Python, its default, and what is
    told of it."""

    field: str
    name: str
    default: Any
    told: Told

    @property
    def is_required(self) -> bool:
        """Has it no default?"""
        return self.default is MISSING

    @property
    def flag(self) -> str:
        """The option on the command line."""
        return (
            self.told.flag or f"--{'no-' if self.told.negated else ''}{self.name.replace('_', '-')}"
        )

    @property
    def metavar(self) -> str | None:
        """What stands for a value on the command line."""
        return self.told.metavar or "|".join(self.told.choices) or None

    @property
    def words(self) -> Collection[str]:
        """The words that a shell completes."""
        return self.told.choices or self.told.completed or self.told.meanings

    @property
    def sentences(self) -> str:
        """The text of a docstring and of the docs."""
        told = self.told
        names = [f'"{choice}"' for choice in told.choices]
        choices = ""
        if names:
            choices = f"One of {', '.join(names[:-1])} and {names[-1]}."
        return " ".join(filter(None, (f"{told.in_python or told.help}.", choices, told.details)))


def options_of(*records: type) -> Mapping[str, Option]:
    """The options of users in records, by name, in the order of the fields."""
    options = {}
    for record in records:
        for own in fields(record):
            if (told := own.metadata.get(_KEY)) is not None:
                default = own.default if told.default is _OF_THE_FIELD else told.default
                option = Option(own.name, told.name or own.name, default, told)
                options[option.name] = option
    return options


def read_options(given: Mapping[str, Any], *records: type) -> dict[str, Any]:
    """The values of fields from those that users give by keyword. Raises ValueError."""
    options = options_of(*records)
    return {options[name].field: options[name].told.read(value) for name, value in given.items()}
