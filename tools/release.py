"""The checklist of a release: what has to be right before the wheels are built, and what is then published.

    python -m tools.release before    # what a release would get wrong; the exit code is 1 if there is anything
    python -m tools.release after     # examines build/wheels, tries the wheel of this machine, lists what to publish

`make release` runs both, and between them the linter, the tests, the pages and `make wheels`. Nothing is published and
no tag is made: the list ends with the commands for that.
"""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from collections.abc import Iterator
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WHEELS = ROOT / "build" / "wheels"
PLATFORMS = ("manylinux_2_28_aarch64", "manylinux_2_28_x86_64", "win_amd64", "win_arm64")
EXAMPLE = ROOT / "examples" / "models" / "bert.onnx"


def main() -> None:
    """Run the part that the command line names."""
    parts = {"before": before, "after": after}
    if len(sys.argv) != 2 or sys.argv[1] not in parts:
        sys.exit("usage: python -m tools.release before|after")
    sys.exit(parts[sys.argv[1]]())


def before() -> int:
    """Print what is not ready for a release; 1 if there is anything."""
    found = [*faults(ROOT), *_faults_of_the_checkout(ROOT)]
    for line in found:
        print(f"release: {line}", file=sys.stderr)
    return int(bool(found))


def faults(root: Path) -> Iterator[str]:
    """What the files of a checkout get wrong, each as a sentence that says what to do."""
    named = version(root)
    told = re.findall(r'^__version__ = "(.+)"$', (root / "fa_compiler" / "version.py").read_text(), re.MULTILINE)
    if told != [named]:
        yield f"pyproject.toml has the version {named}, and fa_compiler/version.py {', '.join(told) or 'none'}"
    headings = re.findall(r"^## (.+)$", (root / "docs" / "changelog.md").read_text(), re.MULTILINE)
    newest, _, when = (headings[0] if headings else "").partition(", ")
    if newest != named:
        told_first = newest or "no version"
        yield f"the first heading of docs/changelog.md is that of {told_first}: write '## {named}, YYYY-MM-DD'"
    elif not _is_date(when):
        yield f"docs/changelog.md gives {named} no date: write '## {named}, YYYY-MM-DD'"


def _faults_of_the_checkout(root: Path) -> Iterator[str]:
    """What git knows: changes that are not committed, and a tag that exists already."""
    if _git(root, "status", "--porcelain"):
        yield "the checkout has changes that are not committed"
    tag = f"v{version(root)}"
    if _git(root, "tag", "--list", tag):
        yield f"the tag {tag} exists already: raise the version in pyproject.toml and fa_compiler/version.py"


def after() -> int:
    """Examine what was built, and print the list; 1 if something is missing or does not run."""
    files, lost = built(WHEELS, version(ROOT))
    for line in lost:
        print(f"release: {line}", file=sys.stderr)
    if lost:
        return 1
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *map(str, files)], check=True)
    _try(next(file for file in files if file.name.endswith(f"_{platform.machine()}.whl")))
    print("\n".join(checklist(files, version(ROOT), _git(ROOT, "rev-parse", "HEAD"))))
    return 0


def built(folder: Path, named: str) -> tuple[list[Path], list[str]]:
    """The files of a version in a folder, and a sentence for each that is missing."""
    wanted = {f"fa_compiler-{named}.tar.gz": "the source distribution"}
    wanted |= {f"fa_compiler-{named}-*-{platform}.whl": f"the wheel for {platform}" for platform in PLATFORMS}
    files, lost = [], []
    for pattern, what in wanted.items():
        found = sorted(folder.glob(pattern))
        files += found
        if not found:
            lost.append(f"{folder} has no {pattern}, {what}: make wheels builds it")
    return files, lost


def _try(wheel: Path) -> None:
    """Install a wheel into an environment of its own, and fuse and compare a model with it, in another folder."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        programs = Path(folder) / "bin"
        subprocess.run([programs / "python", "-m", "pip", "install", "--quiet", str(wheel)], check=True, cwd=folder)
        words = ["optimize", str(EXAMPLE), "-o", "fused.onnx", "--verify", "--strict"]
        subprocess.run([programs / "fa-compiler", *words], check=True, cwd=folder)


def checklist(files: list[Path], named: str, commit: str) -> list[str]:
    """What to publish, and the commands that a person runs for it."""
    lines = [f"fa_compiler {named}, commit {commit}", ""]
    for file in files:
        content = file.read_bytes()
        lines.append(f"  {hashlib.sha256(content).hexdigest()}  {file.name}  {len(content) / 1e6:.1f} MB")
    return [
        *lines,
        "",
        "What only a person does:",
        f"  1. git tag -s v{named} {commit} && git push origin v{named}",
        f"  2. python -m twine upload {' '.join(str(file.relative_to(file.parents[2])) for file in files)}",
        f"  3. publish build/docs as the pages of {named}, and the entry of docs/changelog.md as the release notes",
        "  4. start the next version in pyproject.toml, fa_compiler/version.py and docs/changelog.md",
    ]


def version(root: Path) -> str:
    """The version in pyproject.toml."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def _is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def _git(root: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=root, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
