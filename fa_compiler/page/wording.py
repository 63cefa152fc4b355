"""The text of messages, and links to files, as HTML."""

from __future__ import annotations

import os
import re
from html import escape
from urllib.parse import quote

_OPTION = re.compile(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*")
_QUOTED = re.compile(r"`([^`]+)`")


def unbroken(text: str) -> str:
    """The text, in which no line break divides an option."""
    return _OPTION.sub(r"<span class='option'>\g<0></span>", escape(text))


def worded(text: str) -> str:
    """A text of ours: what stands in backquotes is code."""
    return _QUOTED.sub(r"<code>\1</code>", unbroken(text))


def link_to(name: str) -> str:
    """A link to a file beside the page. Its name may be bytes that are no text here."""
    return f"<a href='{escape(quote(os.fsencode(name)))}'>{escape(name)}</a>"
