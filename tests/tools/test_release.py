"""The checklist of a release names what is not ready, and lists what was built."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tests.systems import TOOLS
from tools.release import PLATFORMS, built, checklist, faults

PROJECT = '[project]\nversion = "1.2.0"\n'


def checkout(root: Path, version: str, heading: str) -> Path:
    """A checkout of version 1.2.0 whose other two places say what they say."""
    for folder in ("fa_compiler", "docs"):
        (root / folder).mkdir()
    (root / "pyproject.toml").write_text(PROJECT)
    (root / "fa_compiler" / "version.py").write_text(f'"""The version."""\n\n__version__ = "{version}"\n')
    (root / "docs" / "changelog.md").write_text(f"# Changes\n\n{heading}\n\n## 1.1.0, 2026-01-01\n")
    return root


def test_a_release_that_is_ready(tmp_path: Path) -> None:
    assert list(faults(checkout(tmp_path, "1.2.0", "## 1.2.0, 2026-11-28"))) == []


@pytest.mark.parametrize(
    ("version", "heading", "told"),
    [
        ("1.1.0", "## 1.2.0, 2026-11-28", "pyproject.toml has the version 1.2.0, and fa_compiler/version.py 1.1.0"),
        ("1.2.0", "## 1.2.0, not released yet", "docs/changelog.md gives 1.2.0 no date: write '## 1.2.0, YYYY-MM-DD'"),
        ("1.2.0", "## 1.2.0, 2026-13-28", "docs/changelog.md gives 1.2.0 no date: write '## 1.2.0, YYYY-MM-DD'"),
        (
            "1.2.0",
            "Words.",
            "the first heading of docs/changelog.md is that of 1.1.0: write '## 1.2.0, YYYY-MM-DD'",
        ),
    ],
)
def test_what_is_not_ready(version: str, heading: str, told: str, tmp_path: Path) -> None:
    assert list(faults(checkout(tmp_path, version, heading))) == [told]


@TOOLS
def test_the_list_of_what_was_built(tmp_path: Path) -> None:
    folder = tmp_path / "build" / "wheels"
    folder.mkdir(parents=True)
    names = [f"fa_compiler-1.2.0-py3-none-{platform}.whl" for platform in PLATFORMS]
    for name in names:
        (folder / name).write_bytes(name.encode())
    (folder / "fa_compiler-1.1.0.tar.gz").touch()  # of an earlier version
    files, lost = built(folder, "1.2.0")
    assert [file.name for file in files] == names
    assert lost == [f"{folder} has no fa_compiler-1.2.0.tar.gz, the source distribution: make wheels builds it"]
    lines = "\n".join(checklist(files, "1.2.0", "abc"))
    for name in names:
        assert f"{hashlib.sha256(name.encode()).hexdigest()}  {name}" in lines
        assert f"build/wheels/{name}" in lines
    assert "git tag -s v1.2.0 abc" in lines
