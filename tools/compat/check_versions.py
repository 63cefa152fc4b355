"""Run the optimised kept graphs under other releases of onnxruntime.

    python -m tools.compat.check_versions [--versions 1.20.1 1.23.2] [--folder build/compat]

Makes a virtual environment for each release, optimises every graph here, and lets each release run the
original and the optimised model: one that runs the original has to run the optimised one to the same
outputs. Needs the package index the first time.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

from tests.graphs import harness
from tests.graphs.examine import prepare
from tools.corpus import compare_check
from tools.processes import ROOT, HelperError, Server, module

MASKED_FIRST = ("onnx_attention_4d_softcap_neginf_mask_poison__onnx123",)
"""Graphs that older releases compute otherwise: onnxruntime 1.23.2 adds the mask before the soft cap, as onnx 1.19 did,
so that masked keys have the score -c."""


def environment(folder: Path, version: str) -> Path:
    """The interpreter of a virtual environment that has this onnxruntime."""
    place = folder / version
    python = place / "bin" / "python"
    if not python.exists():
        print(f"installing onnxruntime {version}", flush=True)
        venv.create(place, with_pip=True, clear=True)
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--quiet",
            f"onnxruntime=={version}",
            "numpy",
        ]
        subprocess.run(command, check=True)
    return python


def check(python: Path, jobs: dict[str, dict[str, Any]]) -> int:
    """Run all jobs under one interpreter; print and count the failures."""
    ran = failures = 0
    with Server(module(python, "tools.corpus.compare_run"), timeout=120) as server:
        version = server.start()["onnxruntime"]
        for name, job in jobs.items():
            try:
                verdict = server.ask(job)
            except HelperError as failure:
                verdict = {"original_error": None, "problems": [str(failure)]}
            if verdict["original_error"] is not None:
                continue
            ran += 1
            for problem in verdict["problems"]:
                print(f"{version} {name}: {problem}")
            failures += bool(verdict["problems"])
    print(f"onnxruntime {version}: {ran} of {len(jobs)} originals run, {failures} optimised ones fail")
    return failures


def main() -> int:
    """The command line; the exit code is 1 if anything failed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--versions", nargs="*", default=["1.20.1", "1.23.2"])
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "compat")
    arguments = parser.parse_args()
    models = arguments.folder / "models"
    models.mkdir(parents=True, exist_ok=True)
    jobs = {}
    for name in harness.read_index():
        for stale in models.glob(f"{name}.*"):
            stale.unlink()
        job = prepare(name, models)
        del job["report"]
        jobs[name] = {**job, "coarsest": compare_check.check(job)["coarsest"]}
    pythons = [environment(arguments.folder, version) for version in arguments.versions]
    older = {name: job for name, job in jobs.items() if name not in MASKED_FIRST}
    failures = check(Path(sys.executable), jobs) + sum(check(python, older) for python in pythons)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
