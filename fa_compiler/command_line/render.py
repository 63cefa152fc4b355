"""Prints reports, comparisons and the registry on a terminal. Names come from files and are printed
literally."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TextIO

from rich.box import SIMPLE_HEAD, Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fa_compiler import op_registry
from fa_compiler.passes import Block, Report
from fa_compiler.passes.answer.options import ASSUMPTIONS
from fa_compiler.passes.answer.report import printable
from fa_compiler.pipeline.keywords import flags_only

if TYPE_CHECKING:
    from fa_compiler.comparison.compare import Comparison
    from fa_compiler.measuring.figures import Benchmark
    from fa_compiler.pipeline.how_to_run import HowToRun
    from fa_compiler.pipeline.runtime_choices import Choices

_STYLES = {
    "fused": "green",
    "already_fused": "green",
    "declined": "yellow",
    "not_attention": "dim",
    "linear_attention": "dim",
}
_PIPE_WIDTH = 200
"""Columns when the output is no terminal and COLUMNS is not set. They are many, so that a search
finds whole lines."""
_HEIGHT = 25
"""Rows, on which nothing here depends. Rich heeds the width on a terminal of the kind "dumb" only
with a height."""

GAP = 3
"""The spaces between two columns of a table."""
LATER, LATER_RANGE = 2, 6
"""How many more columns the cells of later rows may need, where they are one number, and where two
more follow. The two are one word."""
_RULE, _DASH = "─", "-"
_PLAIN_HEAD = Box(str(SIMPLE_HEAD).replace(_RULE, _DASH), ascii=True)
"""The lines of tables where the output cannot show Rich's, as in a pipe of Windows. Rich's own
choice has others."""


_PAGE_LINK = re.compile(r"\[([^]]+)\]\((?:(\w[\w.]*)\.md(#[\w-]+)?|#[\w-]+)\)")
"""A link to a page, or to a heading of the same one: its text, the name of the other page and the
heading there."""


class _Console(Console):
    """On a broken pipe Rich would exit with code 1, which here means "different"."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(stream: TextIO | None = None) -> Console:
    """A console on a stream, standard output by default. It is as wide as COLUMNS says, or else as
    the terminal is."""
    stream = stream or sys.stdout
    return _Console(file=stream, highlight=False, width=_width(stream), height=_HEIGHT)


def _width(stream: TextIO) -> int:
    return _told_width(stream) or _PIPE_WIDTH


def _told_width(stream: TextIO) -> int | None:
    """The columns that COLUMNS or the terminal has; None where there is neither."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told):
        return int(told)
    with contextlib.suppress(OSError, ValueError):  # no terminal, or no file at all
        return os.get_terminal_size(stream.fileno()).columns or None
    return None


def print_report(report: Report, explain: bool) -> None:
    """Print the table of blocks, the hints for those declined, what fused ones miss, and the
    summary. With `explain` print full sentences about each block."""
    out = console()
    if report.blocks:
        _print_table(
            out, ("block", "status", "anchor", "what"), (_row(block) for block in report.blocks)
        )
    if explain:
        print_lines([line for block in report.blocks for line in _explained(block)])
        print_lines(map(str, (*report.around, *report.caches)))
    else:
        print_lines([*report.advice, *report.missed, *report.around_lines, *report.cache_lines])
    print_lines([*report.notes, report.summary])


def print_how_to_run(how: HowToRun) -> None:
    """Print how a file is run. The lines of a program or shell are not broken."""
    print("\nHow to run it:")
    print_lines(how.needs.split("\n"))
    print(*map(printable, how.told), sep="\n")


def print_comparison(comparison: Comparison) -> None:
    """Print the table of outputs and the verdict."""
    header, *rows = comparison._rows
    styles = ["green" if output.fault is None else "red" for output in comparison.outputs]
    shown: list[Sequence[str | Text]] = [
        (*row[:-1], Text(row[-1], style)) for row, style in zip(rows, styles, strict=True)
    ]
    _print_table(console(), header, shown)
    print_lines(comparison._lines)


def print_lines(lines: Iterable[str]) -> None:
    """Print sentences. On a terminal, or where COLUMNS is set, they are broken between words; in a
    pipe each one stays a line, which a search finds."""
    width = _told_width(sys.stdout)
    for line in (_encodable(line, sys.stdout.encoding or "utf-8") for line in lines):
        if width is None:
            print(line)
            continue
        indent = " " * (len(line) - len(line.lstrip()) + 2 * (line[:1] == " "))
        print("\n".join(_wrapped(line, width, indent)))


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    """A line that is broken between words, with `indent` in front of what follows the first
    break."""
    return textwrap.wrap(
        line, width, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent
    )


class MeasuredRows:
    """The table of a benchmark, whose rows are printed as they are measured. The first one sets the
    widths. Its columns stand closer together where no word would have to be broken then. Where a
    word would be broken nevertheless, each cell is a line with its heading."""

    def __init__(self) -> None:
        self._header: Sequence[str] = ()
        self._widths: list[int] = []
        self._gap = GAP
        self._count = 0

    def add(self, measured: Benchmark) -> None:
        """Print the rows that are new, and the header above the first one and where it is another
        one."""
        header, *rows = measured._rows
        for row in rows[self._count :]:
            self._print(header, row)
        self._count = len(rows)

    def _print(self, header: Sequence[str], row: Sequence[str]) -> None:
        out, words = console(), [_longest_word(cell) for cell in row]
        begins = header != self._header or any(map(int.__gt__, words, self._widths))
        if begins:
            self._header = header
            self._begin(header, row, out.width)
        lines = (
            self._lines(out, header, row, begins)
            if self._widths
            else _listed_lines(out, header, row)
        )
        out.file.write("".join(f"{line}\n" for line in lines))
        out.file.flush()

    def _begin(self, header: Sequence[str], row: Sequence[str], width: int) -> None:
        """Choose the widths for the rows from this one on; there are none where a word would be
        broken."""
        words = list(map(max, map(_longest_word, header), map(_longest_word, row)))
        grown = [
            count + (LATER_RANGE - LATER) * ("(" in cell)
            for count, cell in zip(words, row, strict=True)
        ]
        later = [len(cell) + (LATER_RANGE if "(" in cell else LATER) for cell in row]
        wanted = list(map(max, map(len, header), later))
        self._widths, self._gap = (
            _fitted(wanted, grown, width) or _fitted(wanted, words, width) or ([], GAP)
        )

    def _lines(
        self, out: Console, header: Sequence[str], row: Sequence[str], begins: bool
    ) -> list[str]:
        """The row of the table, with the header where it begins."""
        widths = list(map(max, self._widths, map(len, row)))
        if sum(widths) > out.width - self._gap * len(header):
            widths = self._widths
        shown = [line for line in _table_lines(out, header, [row], widths, self._gap) if line]
        rule = next(
            place for place, line in enumerate(shown) if set(line) in ({" ", _RULE}, {" ", _DASH})
        )
        return ["", *shown] if begins else shown[rule + 1 :]

    def end(self, measured: Benchmark) -> None:
        """Print what stands below the table."""
        print()
        print_lines(map(flags_only, measured._lines))


def _longest_word(text: str) -> int:
    return max(map(cell_len, text.split()), default=0)


def _fitted(
    widths: Sequence[int], words: Sequence[int], width: int
) -> tuple[list[int], int] | None:
    """The widths of the columns of a table, and the gap between them. The widest columns are made
    narrower until the table is no wider than `width`, and none is narrower than its longest word.
    None where the words have no room."""
    for gap in (GAP, GAP - 1):
        room = width - gap * len(words)
        if sum(words) <= room:
            return _narrowed(list(map(max, widths, words)), words, room), gap
    return None


def _narrowed(widths: list[int], words: Sequence[int], room: int) -> list[int]:
    """Widths of which the widest are made narrower until they have room. The words have to have
    room."""
    while sum(widths) > room:
        wide = [place for place, width in enumerate(widths) if width > words[place]]
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def print_choices(choices: Choices) -> None:
    """Print which runtimes take the attention of a model, and why the others do not."""
    rows = choices.table()
    if rows:
        print_table(("runtime", "blocks", "target", "operator, or why not"), rows)
    else:
        print_lines([f"{choices.model}: no attention found"])


def print_markdown(text: str) -> None:
    """Print a text in Markdown: laid out for a terminal, as it is for a pipe. A terminal cannot
    follow a link to a page; the name of the page, which `fa-compiler docs` takes, stands in its
    place."""
    if sys.stdout.isatty():
        from rich.markdown import Markdown

        console().print(Markdown(_PAGE_LINK.sub(_named, text)))
    else:
        print(text)


def _named(link: re.Match[str]) -> str:
    """A link as text: what it says, and the page unless that names it."""
    said, page, heading = link.groups(default="")
    return said if page in said else f"{said} ({page}{heading})"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table with a heading. Where a word would have to be broken, each cell is a line with
    its heading."""
    _print_table(console(), headings, rows)


def _print_table(
    out: Console, headings: Sequence[str], rows: Iterable[Sequence[str | Text]]
) -> None:
    """Print a table."""
    shown = [[_cell(out, cell) for cell in row] for row in rows]
    columns = [
        [heading, *map(str, column)] for heading, *column in zip(headings, *shown, strict=True)
    ]
    wanted, words = (
        [max(map(size, column)) for column in columns] for size in (cell_len, _longest_word)
    )
    fitted = _fitted(wanted, words, out.width)
    if fitted is None:
        lines = [line for row in shown for line in _listed_lines(out, headings, row)]
    else:
        lines = _table_lines(out, headings, shown, *fitted)
    out.file.write("".join(f"{line}\n" for line in lines))


def _table_lines(
    out: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str | Text]],
    widths: Iterable[int],
    gap: int,
) -> list[str]:
    """The lines of a table, without the spaces with which Rich fills its last column. Its columns
    have these `widths` and stand `gap` apart."""
    box = SIMPLE_HEAD if out.encoding.startswith("utf") else _PLAIN_HEAD
    table = Table(box=box, pad_edge=False, padding=(0, 1, 0, gap - 2))
    for heading, width in zip(headings, widths, strict=True):
        table.add_column(heading, overflow="fold", width=width)
    for row in rows:
        table.add_row(*(_cell(out, cell) for cell in row))
    with out.capture() as captured:
        out.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def _listed_lines(out: Console, headings: Sequence[str], row: Sequence[str | Text]) -> list[str]:
    """A row as a line for each cell that says something, below an empty line. No word is broken."""
    lines = [Text("")]
    for heading, cell in zip(headings, map(partial(_cell, out), row), strict=True):
        if not cell.plain:
            continue
        indent = "  " * (len(lines) > 1)
        broken = _wrapped(f"{indent}{heading}: {cell.plain}", out.width, f"{indent}  ")
        lines += [Text(line, cell.style) for line in broken]
    with out.capture() as captured:
        for line in lines:
            out.print(line, soft_wrap=True)
    return captured.get().splitlines()


def _cell(out: Console, cell: str | Text) -> Text:
    """What a table shows of a cell."""
    return cell if isinstance(cell, Text) else Text(_encodable(cell, out.encoding))


def _encodable(cell: str, encoding: str) -> str:
    """The text as the output shows it: letters that its encoding does not have are escaped before
    it is laid out."""
    return printable(cell).encode(encoding, "backslashreplace").decode(encoding)


def _row(block: Block) -> tuple[str | Text, ...]:
    status = Text(block.status.replace("_", " "), _STYLES[block.status])
    return str(block.id), status, block.anchor, block.what


def _explained(block: Block) -> list[str]:
    """All that is known of a block."""
    lines = [f"block {block.id} ({block.kind}) at {block.anchor}: {block.status.replace('_', ' ')}"]
    if block.status == "fused":
        node = f", node {block.node}" if block.node else ""
        lines.append(f"  as {block.what}{node}")
    if block.pair is not None:
        lines.append(f"  belongs to block {block.pair}")
    if block.code is not None:
        lines.append(f"  {block.code.value}: {block.code.meaning}")
    lines += _labelled(
        "  ", {"reason: ": block.reason, "because of node ": block.culprit, "try: ": block.hint}
    )
    happens = {extension.id: extension.happens for extension in op_registry.EXTENSIONS}
    lines += [f"  {happens[name]}" for name in block.extensions if name in happens]
    lines += [f"  assumed {name}: {ASSUMPTIONS.get(name, '')}" for name in block.assumed]
    for missed in block.missed:
        lines.append(f"  missed {missed.word}: {missed.code.meaning}")
        told = {"reason: ": missed.reason, "because of ": missed.culprit, "try: ": missed.hint}
        lines += _labelled("    ", told)
    return lines


def _labelled(indent: str, told: Mapping[str, str | None]) -> list[str]:
    """A line for each label that has something to tell."""
    return [f"{indent}{label}{text}" for label, text in told.items() if text]
