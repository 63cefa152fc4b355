"""Measures whole models, original and fused: latency, tokens per second, memory, and the share of attention.

    python -m bench models --models DIR --export-python TORCH/bin/python [--peer-python OPENVINO/bin/python]

The models are exported once into DIR, with random weights, by an interpreter that has torch and transformers
(export_models.py): BERT-base, GPT-2 small, ViT-B, and a Llama-like model with 8 layers of 2048 and grouped heads. They
process one sentence or image at a time. Each model runs in these variants, each in its own process, round by round:

    ort             the original, with all optimisations of ONNX Runtime
    ort-optimizer   optimised by onnxruntime.transformers; the table has the number of attention operators that it made
    ours            fused by fa_compiler
    ours-contrib    fused for ONNX Runtime's own operators, which need no library (--target contrib --runtime ort-cpu)
    openvino        the original in OpenVINO, if an interpreter has it
    ours-openvino   fused into ONNX's Attention, in OpenVINO (--target onnx --runtime openvino)

The results are compared with those of `ort`. In `ours` the share of attention is the share of its operator in ONNX
Runtime's profile. In the original it is the time of the original minus the time of the other operators in `ours`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.line_server import HelperError, LineServer
from bench.speed.tables import number, table
from bench.speed.workers import ROOT, TIMEOUT, interpreters

OUT = Path("build/bench")
LENGTHS = (128, 512, 2048, 4096)
ROUNDS = 5
TOLERANCE = 1e-3
"""The allowed difference from `ort`, relative to the largest value. The models have many float32 layers, and the order
of summation differs."""


@dataclass(frozen=True)
class Model:
    """A model. `kind` is its name in onnxruntime.transformers. A model for images has one length, and the side of the
    images in pixels."""

    kind: str
    length: int = 0
    pixels: int = 0


MODELS = {
    "bert-base": Model("bert"),
    "gpt2": Model("gpt2"),
    "vit-b-224": Model("vit", 197, 224),
    "vit-b-512": Model("vit", 1025, 512),
    "llama-8x2048": Model("gpt2"),
}

FUSED: dict[str, tuple[str, tuple[str, ...]]] = {
    "ours": ("ort", ()),
    "ours-contrib": ("ort", ("--target", "contrib", "--runtime", "ort-cpu")),
    "ours-openvino": ("openvino", ("--target", "onnx", "--runtime", "openvino")),
}
"""The variants that fa_compiler makes: the runtime that they run in, and the options."""


class NotPrepared(Exception):
    """A model could not be exported or fused. The text is the message of the tool."""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    made = argparse.ArgumentParser(prog="python -m bench models", description=head, epilog=rest,
                                   formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    made.add_argument("--models", type=Path, required=True, metavar="DIR", help="where the exported models are kept")
    made.add_argument("--export-python", metavar="PYTHON", help="has torch, transformers, onnxscript")
    made.add_argument("--peer-python", action="append", default=[], metavar="PYTHON", help="has OpenVINO")
    made.add_argument("--names", type=re.compile, default=re.compile(""), metavar="REGEX", help=", ".join(MODELS))
    made.add_argument("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=list(LENGTHS),
                      metavar="N,N", help="tokens; default: %(default)s")  # fmt: skip
    made.add_argument("--threads", type=int, default=2)
    made.add_argument("--rounds", type=int, default=ROUNDS, help="fewer where one takes long; default: %(default)s")
    made.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"models.json, models.md; default: {OUT}")
    return made


def prepare(name: str, folder: Path, export_python: str | None) -> dict[str, tuple[str, str]]:
    """Exports and fuses the missing variants; returns (runtime, file) by variant.

    optimizer/outcome.txt holds the number of attention operators that onnxruntime.transformers made, or its error.
    """
    original, theirs = (folder / each / "model.onnx" for each in (".", "optimizer"))
    fused = {each: folder / each / "model.onnx" for each in FUSED}
    if not original.exists():
        if export_python is None:
            raise NotPrepared(f"{original} does not exist, and cannot be made without --export-python")
        _made([export_python, str(ROOT / "bench" / "export_models.py"), str(folder.parent), name])
    for each in (*fused.values(), theirs):
        each.parent.mkdir(exist_ok=True)
    for variant, file in fused.items():
        options = FUSED[variant][1]
        _made([sys.executable, "-m", "fa_compiler", "optimize", str(original), "-o", str(file), "--quiet", *options])
    variants = {"ort": ("ort", str(original)), "openvino": ("openvino", str(original))}
    variants |= {variant: (FUSED[variant][0], str(file)) for variant, file in fused.items()}
    outcome = theirs.with_name("outcome.txt")
    if not outcome.exists():
        worker = [sys.executable, "-m", "bench.model_worker", "optimise", MODELS[name].kind]
        try:
            outcome.write_text(_made([*worker, str(original), str(theirs)]).split()[-1])
        except NotPrepared as failure:
            outcome.write_text(str(failure))
    return variants | ({"ort-optimizer": ("ort", str(theirs))} if outcome.read_text().isdigit() else {})


def _made(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise NotPrepared(f"{' '.join(command[1:4])} failed: {last}")
    return done.stdout


def feeds(model: Model, length: int) -> dict[str, np.ndarray]:
    """One image, or one sentence whose last eighth is padding."""
    rng = np.random.default_rng(length)
    if model.pixels:
        return {"pixel_values": rng.standard_normal((1, 3, model.pixels, model.pixels), np.float32)}
    mask = np.ones((1, length), np.int64)
    mask[:, length - length // 8 :] = 0
    return {"input_ids": rng.integers(0, 1000, (1, length)), "attention_mask": mask}


@contextlib.contextmanager
def servers(
    variants: Mapping[str, tuple[str, str]], pythons: Mapping[str, str], threads: int, absent: dict[str, str]
) -> Iterator[dict[str, LineServer]]:
    """A running worker for each variant. `absent` gets the reasons for the variants without a worker."""
    with contextlib.ExitStack() as stack:
        running = {}
        for name, (runtime, file) in variants.items():
            if runtime not in pythons:
                continue
            command = ["env", f"PYTHONPATH={ROOT}", pythons[runtime], "-m", "bench.model_worker", runtime]
            server = stack.enter_context(LineServer([*command, str(threads), file], TIMEOUT))
            try:
                server.start()
                running[name] = server
            except HelperError as error:
                absent[name] = str(error)
        yield running


def measure(name: str, length: int, running: Mapping[str, LineServer], rounds: int) -> dict[str, Any]:
    """One row of the results."""
    row: dict[str, Any] = {"model": name, "length": length, "variants": {}, "absent": {}}
    times: dict[str, list[float]] = {}
    estimates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as scratch:
        given = Path(scratch) / "feeds"
        given.mkdir()
        for key, array in feeds(MODELS[name], length).items():
            np.save(given / f"{key}.npy", array)
        for variant, server in running.items():
            answer = _asked(server, {"feeds": str(given), "save": f"{scratch}/{variant}.npy"})
            if "not" in answer:
                row["absent"][variant] = answer["not"]
                continue
            times[variant], estimates[variant] = [], answer["seconds"]
            row["variants"][variant] = {"difference": _difference(Path(scratch), variant), "peak_mib": 0.0}
    slowest = max(estimates.values(), default=0.0)
    for _ in range(rounds if slowest < 1 else min(rounds, 3) if slowest < 5 else min(rounds, 2)):
        for variant in list(times):
            time.sleep(0.05)
            calls = max(1, min(5, int(0.2 / estimates[variant])))
            answer = _asked(running[variant], {"calls": calls, "warm": int(estimates[variant] < 1)})
            if "not" in answer:
                row["absent"][variant] = answer["not"]
                del times[variant], row["variants"][variant]
                continue
            times[variant] += answer["seconds"]
            made = row["variants"][variant]
            made["peak_mib"] = max(made["peak_mib"], answer["peak_mib"])
    for variant, seconds in times.items():
        row["variants"][variant] |= {"ms": 1e3 * statistics.median(seconds), "calls": len(seconds)}
    if "ours" in times:
        row["kinds"] = _asked(running["ours"], {"profile": True}).get("kinds", {})
    return row


def _asked(server: LineServer, question: dict[str, Any]) -> dict[str, Any]:
    try:
        return server.ask(question)
    except HelperError as error:
        return {"not": str(error)}


def _difference(folder: Path, variant: str) -> float | None:
    """The difference from the result of `ort`, relative to its largest value; None for NaN, or without `ort`."""
    if not (folder / "ort.npy").exists():
        return None
    right, result = np.load(folder / "ort.npy"), np.load(folder / f"{variant}.npy")
    off = float(np.abs(result - right).max() / np.abs(right).max())
    return off if np.isfinite(off) else None


def shares(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The share of attention in the original and in ours."""
    kinds, variants = row.get("kinds") or {}, row["variants"]
    attention = sum(seconds for kind, seconds in kinds.items() if kind == "FlashAttentionScore")
    if not attention:
        return None, None
    mine = attention / sum(kinds.values())
    if "ort" not in variants:
        return None, mine
    return max(0.0, 1 - variants["ours"]["ms"] * (1 - mine) / variants["ort"]["ms"]), mine


def document(results: Mapping[str, Any]) -> str:
    """The tables."""
    rows = results["rows"]
    names = list(dict.fromkeys(name for row in rows for name in row["variants"]))
    time_rows, memory_rows, kind_rows = [], [], []
    for row in rows:
        variants, head = row["variants"], [row["model"], str(row["length"])]
        before, after = shares(row)
        mine = variants.get("ours")
        times = [_time(variants.get(name)) for name in names]
        ratio = f"{variants['ort']['ms'] / mine['ms']:.2f}" if mine and "ort" in variants else "-"
        speed = number(row["length"] / mine["ms"] * 1e3) if mine else "-"
        time_rows.append([*head, *times, ratio, speed, *(f"{100 * s:.0f} %" if s is not None else "-"
                                                         for s in (before, after))])  # fmt: skip
        memory_rows.append([*head, *(number(variants[n]["peak_mib"]) if n in variants else "-" for n in names)])
        total = sum(row.get("kinds", {}).values())
        largest = sorted(row.get("kinds", {}).items(), key=lambda item: -item[1])[:5]
        kind_rows.append([*head, ", ".join(f"{kind} {100 * s / total:.0f} %" for kind, s in largest)])
    heading = ["model", "tokens", *(f"{name} ms" for name in names), "ours is faster", "ours tokens/s",
               "attention in ort", "in ours"]  # fmt: skip
    text = [
        f"# Whole models, {results['threads']} threads, {results['date']}\n",
        f"{', '.join(results['versions'])}. One sentence or image; times in brackets differ from ort's result.\n",
        table(heading, time_rows),
        "Peak memory of the process, weights included, MiB:\n",
        table(["model", "tokens", *names], memory_rows),
        "Where ours spends its time:\n",
        table(["model", "tokens", "operators"], kind_rows),
        "Attention operators that onnxruntime.transformers made: "
        + ", ".join(f"{name} {count}" for name, count in results["optimizer"].items())
        + ".\n",
    ]
    absent = [f"- {row['model']} {row['length']}: {name}: {why}" for row in rows for name, why in row["absent"].items()]
    return "\n".join([*text, *absent]) + "\n" * bool(absent)


def _time(variant: Mapping[str, Any] | None) -> str:
    if variant is None:
        return "-"
    right = variant["difference"] is not None and variant["difference"] <= TOLERANCE
    return number(variant["ms"]) if right else f"({number(variant['ms'])})"


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements, with a line of progress for each. Raises NotPrepared."""
    pythons = interpreters(arguments.peer_python)
    results: dict[str, Any] = {"threads": arguments.threads, "date": time.strftime("%Y-%m-%d"), "versions": [],
                               "optimizer": {}, "rows": []}  # fmt: skip
    for name, model in MODELS.items():
        if not arguments.names.search(name):
            continue
        folder = arguments.models.resolve() / name
        absent: dict[str, str] = {}
        variants = prepare(name, folder, arguments.export_python)
        results["optimizer"][name] = (folder / "optimizer" / "outcome.txt").read_text()
        with servers(variants, pythons, arguments.threads, absent) as running:
            for version in (server.greeting["version"] for server in running.values()):
                if version not in results["versions"]:
                    results["versions"].append(version)
            for length in [model.length] if model.pixels else arguments.lengths:
                row = measure(name, length, running, arguments.rounds)
                row["absent"] |= absent
                results["rows"].append(row)
                words = "  ".join(f"{key} {each['ms']:.1f}" for key, each in row["variants"].items())
                print(f"{name:14} {length:5} ms: {words}", file=sys.stderr, flush=True)
    return results


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit code."""
    arguments = parser().parse_args(words)
    try:
        results = run(arguments)
    except (NotPrepared, OSError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "models.json").write_text(json.dumps(results, indent=1) + "\n")
    text = document(results)
    (arguments.out / "models.md").write_text(text)
    print(text)
    return 0
