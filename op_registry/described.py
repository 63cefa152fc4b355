"""Enumerations of words that have a meaning in words of their own."""

from __future__ import annotations

from enum import StrEnum
from typing import Self


class Described(StrEnum):
    """A word, the value, with what it stands for, its `meaning`."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member
