"""The sizes of inputs as texts in ATC's notation."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fa_compiler.errors import InputError

Size = int | tuple[int, int]
"""A fixed size, or the inclusive bounds of a dynamic one; an upper bound of -1 means no bound."""

Sizes = Mapping[str, Sequence[Size]]

DYNAMIC: Size = (1, -1)
"""A size about which nothing is known."""

_SIZE = re.compile(r"(?P<fixed>\d{1,10})|(?P<open>-1)|(?P<low>\d{1,10})~(?P<high>\d{1,10}|-1)")

_NOT_ASCII = {
    "\uff0c": "a full-width comma",
    "\uff1b": "a full-width semicolon",
    "\uff1a": "a full-width colon",
    "\uff5e": "a full-width tilde",
    "\u201c": "a typographic quotation mark",
    "\u201d": "a typographic quotation mark",
}
"""Signs that input methods make of ASCII's."""


def parse_shapes(text: str) -> dict[str, tuple[Size, ...]]:
    """The sizes of each input from a text such as "ids:1,128;mask:1~8,-1". Nothing follows the
    colon of a scalar.

    Raises:
        InputError: the text does not have this form, or names an input twice.
    """
    shapes: dict[str, tuple[Size, ...]] = {}
    if wrong := next((sign for sign in text if sign in _NOT_ASCII), None):
        raise InputError(f"--input-shape has {_NOT_ASCII[wrong]}, {wrong!r}: use the sign of ASCII")
    for part in filter(None, (piece.strip() for piece in text.split(";"))):
        name, colon, dims = part.rpartition(":")
        if not colon or not name:
            raise InputError(f"--input-shape {part!r} is not of the form name:1,128")
        if name in shapes:
            raise InputError(f"--input-shape names {name} twice")
        shapes[name] = parse_sizes(dims, f"--input-shape {part!r}")
    return shapes


def parse_sizes(text: str, where: str) -> tuple[Size, ...]:
    """The sizes from a text such as "1,1~512,-1"; an empty text is a scalar.

    Raises:
        InputError: the text does not have this form. The message begins with `where`.
    """
    return tuple(_size(dim.strip(), where) for dim in text.split(",")) if text.strip() else ()


def _size(text: str, where: str) -> Size:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise InputError(
            f"{where}: {text!r} is not a size; give a number, 1~512 for a range, or -1"
        )
    if found["fixed"]:
        size: Size = int(found["fixed"])
    else:
        size = DYNAMIC if found["open"] else (int(found["low"]), int(found["high"]))
    if size == 0:
        raise InputError(f"{where}: ATC takes no size 0")
    if isinstance(size, tuple) and size[1] != -1 and size[1] < size[0]:
        raise InputError(f"{where}: the range {text} is empty")
    return size


def parse_gears(text: str) -> tuple[tuple[int, ...], ...]:
    """The groups of sizes from a text such as "1,128;4,256". Raises InputError for any other
    form."""
    groups = [group.split(",") for group in text.split(";") if group.strip()]
    if not groups or not all(
        re.fullmatch(r"\s*[1-9]\d{0,9}\s*", size) for group in groups for size in group
    ):
        raise InputError(f"--dynamic-dims {text!r} is not of the form 1,128;4,256")
    return tuple(tuple(int(size) for size in group) for group in groups)


def atc_text(sizes: Sizes) -> str:
    """The sizes in the notation of ATC's --input_shape."""
    return ";".join(f"{name}:{','.join(map(atc_size, shape))}" for name, shape in sizes.items())


def atc_size(size: Size) -> str:
    """One size in this notation."""
    if isinstance(size, int):
        return str(size)
    return "-1" if size[1] == -1 else f"{size[0]}~{size[1]}"
