"""Where a file that the user names is written.

a new or a regular file     is made beside its place and then moved there, so that a failed run
                            leaves nothing
a link                      is written through: the file that it leads to is replaced, and the link
                            stays
a pipe or a device          is written to, and never replaced: /dev/null must stay
an open file of this run    such as /dev/stdout is written to where it is open; what `>> file` held
                            stays
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO, TextIO

from fa_compiler.errors import InputError

_DESCRIPTORS = re.compile(r"/proc/(?P<process>\d+)(/task/\d+)?/fd")
_MOST_LINKS = 40
"""Linux follows as many links."""


def file_place(name: str | os.PathLike[str]) -> Path:
    """The place of a file to write. Raises InputError for an empty name, and for one that ends as
    that of a folder."""
    text = _text_of(name)
    if not text:
        raise InputError("the path of the output is empty")
    if text.endswith((os.sep, os.altsep or os.sep)):
        raise InputError(f"{text} is a folder; give the name of the file to write")
    return Path(text)


def path_of(output: str | os.PathLike[str]) -> Path:
    """The path that a caller gives for what is written. Raises TypeError for what is none."""
    return Path(_text_of(output))


def _text_of(output: str | os.PathLike[str]) -> str:
    if not isinstance(output, (str, os.PathLike)):
        raise TypeError(f"`output` is a path, not {output!r}")
    return os.fspath(output)


def real_place(path: Path) -> Path:
    """The place of the file that a path leads to, which need not exist. Raises InputError for a
    circle of links."""
    place = Path(os.path.realpath(path))
    if place.is_symlink():
        raise InputError(f"{path} is a link that leads back to itself; choose another place")
    return place


def is_same(left: Path, right: Path) -> bool:
    """Whether two paths lead to one file, which need not exist."""
    try:
        return left.samefile(right)
    except OSError:
        return os.path.realpath(left) == os.path.realpath(right)


def is_special(path: Path) -> bool:
    """Whether a path is a pipe, a device or an open file of this process, which is written to and
    never replaced."""
    if descriptor(path) is not None:
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def open_for_writing(path: Path) -> BinaryIO:
    """Open a path for a whole content. An open file of this process goes on where it is."""
    number = descriptor(path)
    return path.open("wb") if number is None else os.fdopen(os.dup(number), "wb")


def is_stream(path: Path, stream: TextIO) -> bool:
    """Whether a path is the file that a stream of this process writes to."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except (OSError, ValueError):  # there is no such path, or the stream has no file
        return False


def descriptor(path: Path) -> int | None:
    """The number of the open file of this process that a path such as /dev/stdout is another name
    of."""
    for _ in range(_MOST_LINKS):
        found = _DESCRIPTORS.fullmatch(os.path.realpath(path.parent))
        if found is not None and int(found["process"]) == os.getpid() and path.name.isdecimal():
            return int(path.name)
        try:
            path = path.parent / path.readlink()
        except OSError:
            return None
    return None
