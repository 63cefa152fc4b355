"""Measures tokens a second of a Llama from transformers' own exporter: its files, and what is made of them.

    python -m bench.exporter_tokens --models DIR --export-python TORCH/bin/python [--genai-python GENAI/bin/python]

The model has random weights and the widths of Llama 3.2 1B, in few layers (tools/makers/export_tokens.py). Each variant
runs in a process of its own, in turns: a prompt, and then one token after the other, with the likeliest one as the
next.

    plain       the exporter's two files, with all optimisations of ONNX Runtime
    cpu         the same, rewritten by the exporter with ort_fusions="cpu"
    genai       the model of the builder of onnxruntime-genai, in its own engine
    ours        the exporter's files fused by fa_compiler, the decode file with --in-place-caches
    ours-one    fused as well: one file for prompt and steps, which the exporter writes with multi_token_decode

The steps of the exporter's files run in DecodingSession, which keeps growing caches in ONNX Runtime's memory, too: what
is compared are the files. The numbers are the best of the rounds. The tokens of a prompt are counted in the time until
the first new token, and `same` says how many of the new tokens are those of the exporter's files.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.processes import module

FUSED = {
    "ours/prefill": ("plain/prefill", ()),
    "ours/decode": ("plain/decode", ("--in-place-caches",)),
    "ours-one/decode": ("one/decode", ("--in-place-caches",)),
}
"""The folders of the fused files, those of the originals, and the options."""
HEADING = (
    "| variant | threads | prompt | tokens | prompt tokens/s | new tokens/s | memory MiB | same | load |\n"
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main() -> None:
    """Prints a row for each variant and number of threads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="where the exported models are kept")
    parser.add_argument("--export-python", metavar="PYTHON", help="has torch, transformers, onnxscript")
    parser.add_argument("--genai-python", metavar="PYTHON", help="has onnxruntime-genai; for its builder torch, too")
    parser.add_argument("--layers", type=int, default=6, help="the layers of a model that is exported")
    parser.add_argument("--threads", type=_numbers, default=(1, 2), help="numbers of threads, separated by commas")
    parser.add_argument("--prompts", type=_numbers, default=(128, 2048), help="tokens of the prompts")
    parser.add_argument("--tokens", type=int, default=64, help="the tokens behind a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    folder = options.models.resolve()
    make(folder, options)
    print(HEADING)
    for threads, prompt in itertools.product(options.threads, options.prompts):
        for row in rows(folder, threads, prompt, options):
            print(row, flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def make(folder: Path, options: argparse.Namespace) -> None:
    """Export what is not there, and fuse the exporter's files anew."""
    if options.export_python:
        words = [str(folder), "--layers", str(options.layers)]
        words += ["--genai-python", options.genai_python] if options.genai_python else []
        subprocess.run(module(options.export_python, "tools.makers.export_tokens", *words), check=True)
    for fused, (original, flags) in FUSED.items():
        target = folder / fused / "model.onnx"
        target.parent.mkdir(parents=True, exist_ok=True)
        files = [str(folder / original / "model.onnx"), "-o", str(target)]
        subprocess.run(module(sys.executable, "fa_compiler", "optimize", *files, *flags, "--quiet"), check=True)


def rows(folder: Path, threads: int, prompt: int, options: argparse.Namespace) -> list[str]:
    """A row for each variant that is there."""
    folders = {name: folder / name for name in ("plain", "cpu", "ours", "ours-one")}
    interpreters = dict.fromkeys(folders, sys.executable)
    if options.genai_python:
        folders["genai"], interpreters["genai"] = folder / "genai", options.genai_python
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in folders}
    for _ in range(options.rounds):
        for name, own in folders.items():
            words = [str(own), str(threads), str(prompt), str(options.tokens)]
            command = module(interpreters[name], "bench.exporter_worker", *words)
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            answers[name].append(json.loads(done.stdout.splitlines()[-1]))
    wanted = answers["plain"][0]["chosen"]
    return [_row(name, threads, prompt, own, wanted) for name, own in answers.items()]


def _row(name: str, threads: int, prompt: int, answers: list[dict[str, Any]], wanted: list[int]) -> str:
    """One line of the table: the best of the rounds, and the tokens that are the wanted ones up to the first other."""
    new = len(wanted) - 1
    prefill, decode = (min(answer[part] for answer in answers) for part in ("prefill", "decode"))
    pairs = zip(answers[0]["chosen"], wanted, strict=True)
    same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    peak = max(answer["peak_mib"] for answer in answers)
    cells = [name, threads, prompt, new, f"{prompt / prefill:.4g}", f"{new / decode:.4g}", peak]
    cells += [f"{same} of {new + 1}", f"{os.getloadavg()[0]:.1f}"]
    return f"| {' | '.join(map(str, cells))} |"


if __name__ == "__main__":
    main()
