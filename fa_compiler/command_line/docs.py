"""The command docs: lists and prints the pages of the documentation, which are a folder of the
package."""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from fa_compiler.command_line.exit_codes import OK
from fa_compiler.errors import InputError

PAGES = Path(__file__).parents[1] / "docs"
_INDEX = "index"
"""The page whose table has the other pages with one line each."""


def names() -> list[str]:
    """The names of the pages."""
    return sorted(path.stem for path in PAGES.glob("*.md") if path.stem != _INDEX)


def docs(args: argparse.Namespace) -> int:
    """List the pages, or print one of them or a part: laid out for a terminal, as it is for a
    pipe."""
    from fa_compiler.command_line.render import print_markdown, print_table

    if args.page is None:
        print_table(("page", "content"), contents())
        print(
            "fa-compiler docs PAGE prints a page, fa-compiler docs PAGE#HEADING the part below a heading"
        )
        return OK
    print_markdown(find(args.page))
    return OK


def contents() -> list[tuple[str, str]]:
    """Each page and what it is about."""
    return re.findall(r"^\| \[([\w.]+)\]\([\w.]+\.md\) \| (.+) \|$", _read(_INDEX), re.MULTILINE)


def find(word: str) -> str:
    """The text of a page, or of the part below one of its headings.

    Args:
        word: such as runtimes, docs/runtimes.md or commands#exit-codes.

    Raises:
        InputError: there is no such page or heading.
    """
    name, _, anchor = word.lower().partition("#")
    if name.partition(".")[0] == "readme":
        raise InputError(
            f"{word!r} is the page of the repository; the pages of the package begin with the tutorial"
        )
    name = _known(name.removeprefix("docs/").removesuffix(".md"), names(), "page")
    text = _read(name)
    if not anchor:
        return text
    headings = [*_headings(text)]
    _known(anchor, [slug for _, _, slug in headings], f"heading of the page {name}")
    lines = text.splitlines()
    first, level = next((line, level) for line, level, slug in headings if slug == anchor)
    last = next(
        (line for line, other, _ in headings if line > first and other <= level), len(lines)
    )
    return "\n".join(lines[first:last]).rstrip()


def _known(word: str, known: Iterable[str], what: str) -> str:
    known = [*known]
    if word in known:
        return word
    close = difflib.get_close_matches(word, known, n=1)
    advice = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(known)}"
    raise InputError(f"{word!r} is no {what}: {advice}")


def _read(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8").rstrip()


def _headings(text: str) -> Iterator[tuple[int, int, str]]:
    """The headings: the line, the level, and the anchor as Markdown's forges and Sphinx make it."""
    is_code = False
    for number, line in enumerate(text.splitlines()):
        is_code ^= line.startswith("```")
        heading = re.match(r"(#+) (.+)", line)
        if heading is not None and not is_code:
            words = re.sub(r"[^\w\s-]", "", heading[2].lower())
            yield number, len(heading[1]), words.strip().replace(" ", "-")
