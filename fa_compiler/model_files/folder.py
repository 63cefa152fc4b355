"""A folder that appears only when it is complete."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fa_compiler.errors import InputError
from fa_compiler.model_files.writing import FULL, cannot_write

REPORT = "report.json"
"""The file that lists the files of the folder. A folder with any other file is not replaced."""
DIGESTS = "sha256"
"""The key of the digests of those files that people edit, such as the addresses in
cluster_config.json. A folder in which one of them was changed is not replaced."""
MODELS = (".onnx", ".air", ".data", "")
"""The ends of the names of other files: models and their weights."""


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A hidden folder beside `target`, to be filled by the block.

    It replaces `target` when the block succeeds, and is removed when the block fails.

    Raises:
        InputError: `target` is a file, holds files that an earlier run did not write, or cannot be
            made.
    """
    check_target(target)
    place = target.absolute().with_name(f".{target.absolute().name}.{secrets.token_hex(4)}.tmp")
    try:
        place.mkdir()
    except OSError as error:
        if not target.absolute().parent.exists():
            raise InputError(
                f"{target} cannot be made: there is no folder {target.parent}; make it first"
            ) from None
        raise InputError(
            f"{target} cannot be made: {error.strerror}; choose another place"
        ) from None
    try:
        yield place
        _write_list(place)
        check_target(target)
        _replace(place, target)
    except InputError as error:
        raise InputError(str(error).replace(str(place), str(target))) from None
    except OSError as error:
        ours = error.filename is not None and Path(error.filename).is_relative_to(place)
        if not ours and error.errno not in FULL:
            raise
        raise cannot_write(target, error) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def check_target(target: Path) -> None:
    """Raise InputError for a folder with content that an earlier run did not write, or that was
    edited since."""
    if not os.path.lexists(target):
        return
    if target.is_symlink():
        raise InputError(
            f"{target} is a link; name the folder that it leads to, or choose another name"
        )
    if not target.is_dir():
        raise InputError(f"{target} is not a folder; choose another name")
    if (foreign := _foreign(target)) is not None:
        raise InputError(
            f"the folder {target} holds {foreign}; move it away, or choose an empty or new folder"
        )


def _foreign(folder: Path) -> str | None:
    """The first file of a folder that an earlier run did not write, or that was edited since, and
    which of these it is. Raises InputError for a folder that cannot be read."""
    listed = _listed(folder)
    try:
        for name in _files(folder):
            if name not in listed:
                return f"{name}, which fa-compiler did not write"
            if listed[name] not in (None, _digest(folder / name)):
                return f"{name}, which was edited since fa-compiler wrote it"
        return None
    except OSError as error:
        raise InputError(
            f"the folder {error.filename} cannot be read: {error.strerror}; choose another one"
        ) from None


def _files(folder: Path) -> Iterator[str]:
    """The files of a folder: its own in front of those in folders below it. A link is a file."""

    def stop(error: OSError) -> None:
        raise error

    for above, folders, files in os.walk(folder, onerror=stop):
        place = Path(above)
        folders.sort()
        links = [name for name in folders if (place / name).is_symlink()]
        yield from (
            (place / name).relative_to(folder).as_posix() for name in sorted([*files, *links])
        )


def _listed(folder: Path) -> dict[str, str | None]:
    """The files that the report lists, and the digests of those that have one."""
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        digests = report.get(DIGESTS, {})
        return {REPORT: None} | {str(name): digests.get(name) for name in report["files"]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _write_list(folder: Path) -> None:
    report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
    report["files"] = sorted(name for name in _files(folder) if name != REPORT)
    report[DIGESTS] = {
        name: _digest(folder / name) for name in report["files"] if Path(name).suffix not in MODELS
    }
    (folder / REPORT).write_text(
        json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", newline="\n"
    )


def _replace(place: Path, target: Path) -> None:
    old: Path | None = None
    try:
        if target.exists():
            old = place.with_name(f"{place.name}.old")
            target.rename(old)
        place.rename(target)
    except OSError as error:
        if old is not None and not target.exists():
            with suppress(OSError):
                old.rename(target)
        raise cannot_write(target, error) from None
    if old is not None:
        _remove(old)


def _remove(folder: Path) -> None:
    """Remove a folder with all that is below it, also where somebody has made folders read-only."""
    for above, _, _ in os.walk(folder):
        with suppress(OSError):
            Path(above).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
