"""Options of commands: those of records of options, and the ones that several commands share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fa_compiler.errors import InputError
from fa_compiler.passes.answer.option import Option, options_of

SHARED = {
    "explain": "print the reasons in full sentences",
    "strict": "exit with 1 if an attention was declined or none was fused; the output is written",
    "quiet": "print nothing but errors",
}
"""Options without a value that several commands have, and their texts."""


def add_shared(command: argparse.ArgumentParser, *names: str) -> None:
    """Add options of `SHARED`."""
    for name in names:
        command.add_argument(f"--{name}", action="store_true", help=SHARED[name])


def add_options(command: argparse.ArgumentParser, record: type, *names: str) -> None:
    """Add the options of a record to a command: those with the names, or all of them."""
    options = options_of(record)
    for name in names or options:
        if options[name].told.on_command_line:
            _add(command, options[name])


def _add(command: argparse.ArgumentParser, option: Option) -> None:
    told = option.told
    if isinstance(option.default, bool):
        action = "store_false" if told.negated else "store_true"
        command.add_argument(
            option.flag, action=action, dest=option.name, help=told.negated or told.help
        )
        return
    settings: dict[str, Any] = {
        "default": None if option.is_required else option.default,
        "type": _kind(option),
    }
    if told.repeated:
        settings = {"action": "append", "default": []}
    if told.meanings:
        settings["action"] = _word_or_help(told.meanings)
    added = command.add_argument(
        option.flag,
        dest=option.name,
        metavar=option.metavar,
        required=option.is_required,
        help=f"{told.help}{told.usage}",
        **settings,
    )
    if option.words:
        completed(added, option.words)


def _word_or_help(meanings: Mapping[str, str]) -> type[argparse.Action]:
    """The action of an option whose word `help` prints what its words mean, and ends the
    program."""

    class WordOrHelp(argparse._AppendAction):
        def __call__(
            self,
            parser: argparse.ArgumentParser,
            namespace: argparse.Namespace,
            values: Any,
            *_: object,
        ) -> None:
            if values == "help":
                from fa_compiler.command_line.render import print_table

                print_table((self.dest, "what it says"), meanings.items())
                parser.exit()
            super().__call__(parser, namespace, values)

    return WordOrHelp


def _kind(option: Option) -> Callable[[str], Any] | None:
    """What reads the text of the command line; None for texts."""
    if option.told.kind is not None:
        return reading(option.told.kind)
    return type(option.default) if isinstance(option.default, int | float) else None


def reading(kind: Callable[[str], Any]) -> Callable[[str], Any]:
    """A function that reads a text, as argparse wants it: the user sees the text of its ValueError.

    The text of a type would not help him. argparse has one of its own for types.
    """
    if isinstance(kind, type):
        return kind

    def read(text: str) -> Any:
        try:
            return kind(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read


def path(text: str) -> Path:
    """The path that a user named. That of a variable of the shell that is not set is empty: it is
    no folder."""
    if not text:
        raise argparse.ArgumentTypeError("the path is empty")
    return Path(text)


def given(args: argparse.Namespace, *records: type) -> dict[str, Any]:
    """The values of a command's options, as keywords of a Python function.

    Raises:
        InputError: a value does not have the form of its option.
    """
    try:
        return {
            name: option.told.parse(getattr(args, name))
            for name, option in options_of(*records).items()
            if hasattr(args, name)
        }
    except ValueError as error:
        raise InputError(str(error)) from None


def words_given(args: argparse.Namespace, *records: type) -> list[str]:
    """The words of a command line that give the same options once more."""
    words: list[str] = []
    for name, option in options_of(*records).items():
        value = getattr(args, name, option.default)
        if option.told.repeated:
            words += [option.flag, ",".join(value)] if value else []
        elif value != option.default:
            words += [option.flag] if isinstance(value, bool) else [option.flag, str(value)]
    return words


def completed(action: argparse.Action, words: Iterable[str]) -> None:
    """Tell argcomplete the words that an option takes."""
    action.completer = lambda **_: words  # type: ignore[attr-defined]
