"""Folders for temporary files. A service may run where none can be made, so one is made only where
it is needed."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import TracebackType

from fa_compiler.errors import InputError


def new_folder() -> tempfile.TemporaryDirectory[str]:
    """A new folder for temporary files. Raises InputError if none can be made."""
    try:
        return tempfile.TemporaryDirectory(prefix="fa_compiler-")
    except OSError as error:
        raise InputError(
            f"no folder for temporary files can be made: {error.strerror}; let the environment variable TMPDIR name a "
            "folder that can be written"
        ) from None


class TemporaryFolder:
    """A folder that is made when its path is first asked for, and is removed at the end of the
    block."""

    def __init__(self) -> None:
        self._made: tempfile.TemporaryDirectory[str] | None = None

    @property
    def path(self) -> Path:
        """The path of the folder. Raises InputError if it cannot be made."""
        if self._made is None:
            self._made = new_folder()
        return Path(self._made.name)

    def __enter__(self) -> TemporaryFolder:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._made is not None:
            self._made.cleanup()
