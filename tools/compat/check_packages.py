"""Runs the recipes of docs/recipes.md for other packages, as they stand there, and measures them.

    python -m tools.compat.check_packages ENVIRONMENT [--only REGEX]

ENVIRONMENT is `packages` (tools/compat/requirements-packages.txt) or `optimum` (tools/sweep/requirements-optimum.txt,
an older transformers). The Python blocks of a recipe are files, whose names are in their first lines. Its commands are
run in order, with the models of tools/makers/recipe_models.py in the current folder. Where a recipe runs scripts
without our kernels and with them, the last statement of each has to give the same, and some attention has to be fused.
Its time, and the peak memory of the process, are the least of `ROUNDS` runs. The memory with the provider includes the
matcher's.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from fa_compiler.op_registry import DOMAINS
from tests.startup import as_installed

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text()
ROUNDS = 3
CLOSE = 2e-4
"""How much numbers may differ, beside the largest of them."""


@dataclass(frozen=True)
class Recipe:
    """A section of the page."""

    title: str
    environment: str
    model: str = ""
    """What recipe_models makes for it."""

    writes: str = ""
    """The fused file that the recipe writes; its fused attentions are counted."""


RECIPES = (
    Recipe("fastembed", "packages", "nomic"),
    Recipe("sentence-transformers", "optimum", "minilm"),
    Recipe("sentence-transformers, long texts", "optimum", "modernbert"),
    Recipe("optimum", "optimum", "minilm"),
    Recipe("Whisper: onnx-asr", "optimum", "whisper"),
    Recipe("rapidocr", "packages"),
    Recipe("onnxruntime-genai", "packages", "llama", "fused/model.onnx"),
    Recipe("torch.onnx.export", "packages", writes="fused.onnx"),
    Recipe("The exporter of transformers", "packages", writes="fused/model.onnx"),
    Recipe("From AutoModel to tokens", "packages", writes="decoder.onnx"),
    Recipe("Olive", "packages", writes="out/model.onnx"),
)
ARABIC = """
```python
# names.py
import arabic_name_romanizer

names = ["خوارزمشاهيان", "قنديلخان زغبور", "شكربلطيم"]
arabic_name_romanizer.transliterate(names[0])  # the first call makes the sessions
found = [arabic_name_romanizer.transliterate(name) for name in names]
```

    python names.py
    FA_COMPILER_PROVIDER=1 python names.py
"""
"""A package that is too small for the page. Its decoder's attention is fused in each step."""


@dataclass(frozen=True)
class Measure:
    """One run of a script."""

    seconds: float
    bytes: int
    made: dict[str, Any]
    attentions: int
    """How many were fused by the provider."""


class Workplace:
    """A folder with the models and files of a recipe, in which `python` and `fa-compiler` are this interpreter's."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "work"
        self.result = folder / "result.json"
        tools = folder / "bin"
        for each in (self.folder, tools):
            each.mkdir()
        shutil.copy(ROOT / "examples" / "models" / "bert.onnx", self.folder)
        measured = Path(__file__).with_name("measured.py")
        runs = {"fa-compiler": "-m fa_compiler", "python": f"{measured} {self.result}"}
        for name, words in runs.items():
            (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
            (tools / name).chmod(0o755)
        self.environment = as_installed(folder) | {"HF_HUB_OFFLINE": "1"}
        self.environment["PATH"] = f"{tools}{os.pathsep}{self.environment['PATH']}"

    def run(self, line: str) -> Measure | None:
        """Run a command; what it measured, if it runs a script."""
        self.result.unlink(missing_ok=True)
        line = line.replace("FA_COMPILER_PROVIDER=1", "FA_COMPILER_PROVIDER=report")
        done = subprocess.run(
            line, shell=True, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{line}: {done.stdout[-1000:]}{done.stderr[-2000:]}")
        if not self.result.exists():
            return None
        told = re.findall(r"^fa_compiler: \d+ sessions?, (\d+) of \d+ attentions? fused", done.stderr, re.MULTILINE)
        return Measure(**json.loads(self.result.read_text()), attentions=int(told[-1]) if told else 0)


def section(title: str) -> str:
    """The text of a section of the page."""
    (found,) = re.findall(rf"^### {re.escape(title)}\n(.*?)(?=^##|\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return str(found)


def differ(first: Any, second: Any) -> bool:
    """Whether two results differ: texts and integers at all, other numbers by more than rounding."""
    if isinstance(first, dict):
        return first.keys() != second.keys() or any(differ(first[name], second[name]) for name in first)
    try:
        one, other = np.asarray(first), np.asarray(second)
    except ValueError:  # lists of different lengths
        return bool(first != second)
    if one.dtype.kind != "f":
        return bool(first != second)
    return one.shape != other.shape or not bool((np.abs(one - other) <= CLOSE * np.abs(one).max()).all())


def check(text: str, model: str, writes: str) -> tuple[bool, str]:
    """Run a recipe; whether all is well, and a line that says what was found."""
    with tempfile.TemporaryDirectory() as folder:
        place = Workplace(Path(folder))
        if model:
            making = [sys.executable, "-m", "tools.makers.recipe_models", model, str(place.folder)]
            subprocess.run(making, cwd=ROOT, env=place.environment, check=True, capture_output=True)
        for name, block in re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL):
            (place.folder / name).write_text(block)
        lines = re.findall(r"^    (\S.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
        runs = {line: measure for line in lines if (measure := place.run(line))}
        seconds, peaks = ({line: [getattr(run, name)] for line, run in runs.items()} for name in ("seconds", "bytes"))
        for line in [*runs] * (ROUNDS - 1 if model or "FA_COMPILER_PROVIDER" in text else 0):
            again = place.run(line)
            assert again is not None
            seconds[line].append(again.seconds)
            peaks[line].append(again.bytes)
        fused = sum(measure.attentions for measure in runs.values())
        if writes:
            written = onnx.load(place.folder / writes, load_external_data=False)
            fused = sum(node.domain in DOMAINS for node in written.graph.node)
        first, *_, last = [*runs.values()] * 2
        same = not differ(first.made, last.made)
        told = (f"{line}: {min(seconds[line]):.2f} s, {min(peaks[line]) / 2**30:.2f} GiB" for line in runs)
        return same and fused > 0, "; ".join((f"{fused} fused", "the same" if same else "NOT the same", *told))


def main(arguments: Sequence[str]) -> int:
    """Print one line for each recipe. The exit code is 1 if one of them gives another result, or fuses nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("environment", choices=sorted({recipe.environment for recipe in RECIPES}))
    parser.add_argument("--only", default="", metavar="REGEX", help="recipes whose titles match")
    args = parser.parse_args(arguments)
    jobs = [
        (recipe.title, section(recipe.title), recipe.model, recipe.writes)
        for recipe in RECIPES
        if recipe.environment == args.environment
    ]
    if args.environment == "packages":
        jobs.append(("arabic-name-romanizer", ARABIC, "", ""))
    failed = False
    for title, *job in jobs:
        if not re.search(args.only, title):
            continue
        good, line = check(*job)
        failed |= not good
        print(f"{title}: {line}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
