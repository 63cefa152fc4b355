"""What is wrong with a file, or with a graph that is to be written."""

from __future__ import annotations


class AirError(ValueError):
    """A graph that no `.air` file can hold, or a file that GE's loader rejects. The text is one line, names the node
    and says what to do."""

    def __init__(self, text: str) -> None:
        super().__init__(" ".join(text.split()))
