"""What the wheel installs beside the package, for processes of this checkout, or of where the package is installed."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

import fa_compiler

ROOT = Path(__file__).parent.parent
PACKAGES = Path(fa_compiler.__file__).parent.parent
"""The folder with the package: that of the checkout, or site-packages."""


def beside_the_package(folder: Path) -> list[Path]:
    """Put the files that the wheel holds beside the package into a folder."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["scikit-build"]["wheel"]
    return [Path(shutil.copy(PACKAGES / source, folder / name)) for source, name in settings["force-include"].items()]


def as_installed(folder: Path, **variables: str) -> dict[str, str]:
    """An environment in which Python starts as if the wheel of this checkout were installed."""
    site = folder / "site"
    site.mkdir(exist_ok=True)
    beside_the_package(site)
    (folder / "sitecustomize.py").write_text(f"import site\nsite.addsitedir({str(site)!r})\n")
    others = {name: value for name, value in os.environ.items() if name != "FA_COMPILER_PROVIDER"}
    return others | {"PYTHONPATH": os.pathsep.join((str(folder), str(PACKAGES)))} | variables
