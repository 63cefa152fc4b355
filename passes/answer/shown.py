"""Records that show themselves: as text in `print`, and as a table in a notebook."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


class Shown:
    """A record with a table, lines below it, and lines of code at the end. Their text is
    printable."""

    @property
    def _short(self) -> str:
        """What `repr` says of it, in some words."""
        raise NotImplementedError

    def __repr__(self) -> str:
        """The kind of the record and what it says in short, as an interactive Python shows it."""
        return f"<{type(self).__name__} {self._short}; print() shows all of it>"

    @property
    def _rows(self) -> Sequence[Sequence[str]]:
        """The table, its header first. A table without other rows is not shown."""
        raise NotImplementedError

    @property
    def _lines(self) -> Sequence[str]:
        """What stands below the table."""
        raise NotImplementedError

    @property
    def _code(self) -> Sequence[str]:
        """Lines whose breaks and indentation matter."""
        return ()

    def __str__(self) -> str:
        """The table and the lines, as the command line prints them."""
        rows = self._rows
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = [
            "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        return "\n".join(
            [*(line.rstrip() for line in table if len(rows) > 1), *self._lines, *self._code]
        )

    def _repr_html_(self) -> str:
        """What a notebook shows: the same as `str` gives."""
        header, *rows = [[escape(cell) for cell in row] for row in self._rows]
        head = "".join(f"<th scope='col'>{cell}</th>" for cell in header)
        body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
        table = (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if rows else ""
        )
        code = f"<pre>{escape(chr(10).join(self._code))}</pre>" if self._code else ""
        return table + "".join(f"<p>{escape(line)}</p>" for line in self._lines) + code
