"""Compiles models of real sizes, and runs one or two layers of some of them, original and fused.

    python -m bench.real_sizes                    all models of real_models.py, and the runs: 10 minutes
    python -m bench.real_sizes --quick            three models with at most 16,384 tokens, and one short run
    python -m bench.real_sizes --models gemma --runs none

The graphs have the real numbers of layers, heads, channels and tokens, a constant mask for each kind of layer, and
weights that are holes in a file. The first table is about `fa_compiler optimize`, each time in a process of its own:

    constants   MiB of constants in the file that are no holes: masks, and the tables of rotary positions
    dense       MiB of the masks that the fused model still has, one number for each row and key
    fused       fused blocks of all blocks
    masks       how often each kind of mask was chosen
    seconds     from the call to the written file, as the report says
    CPU s       processor time beyond that of a model of one layer without a mask, which is mostly that of imports: on a
                busy machine it is more reliable
    memory      the peak of the process, MiB, and its rise over that model

The second table compares latencies of ONNX Runtime in the same run: both variants are separate processes, which run in
turns. The layers have narrow feed-forward parts, so most of the time is that of attention and its projections. The
result is compared with that of the original. This works on Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper

from bench.model_tables import TOLERANCE
from bench.models import servers
from bench.real_models import FILLED_ROWS, MODELS, Mask, RealModel, build
from bench.speed.tables import number, table
from tools.processes import HelperError

QUICK = ("bert-large", "llama-3.1-8b", "mistral-7b")
RUNS = (
    MODELS["bert-large"].cut(1),
    MODELS["packed-bert"].cut(1),
    MODELS["gpt2-xl"].cut(1),
    MODELS["llama-3.2-1b"].cut(1, 2048),
    replace(MODELS["llama-3.2-1b"].cut(1, 2048), name="llama-3.2-1b in chunks", masks=(Mask("chunks", 512),)),
    MODELS["gemma-3-1b"].cut(1, 4096),
)  # fmt: skip
OUT = Path("build/bench/real_sizes.md")
ROUNDS = 3

MEASURED = """
import json, re, sys, time
from fa_compiler.command_line.main import main
code = main(sys.argv[1:])
peak = re.search("VmHWM:[^0-9]*([0-9]+) kB", open("/proc/self/status").read()).group(1)
print(json.dumps({"cpu": time.process_time(), "memory": int(peak)}))
sys.exit(code)
"""
"""Tells its own peak. What the system tells of a child that has ended counts the memory of its parent, too."""

Row = dict[str, Any]


def compiled(path: Path) -> Row:
    """One run of `fa_compiler optimize` in a process of its own; the result is `fused.onnx` beside the model."""
    report = path.with_name("report.json")
    words = ["optimize", str(path), "-o", str(path.with_name("fused.onnx")), "--report", str(report), "--quiet"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *words], stdout=subprocess.PIPE, text=True, check=True)
    usage = json.loads(done.stdout)
    found = json.loads(report.read_text())
    blocks = found["blocks"]
    return {
        "blocks": len(blocks),
        "fused": sum(block["status"] == "fused" for block in blocks),
        "masks": Counter(block["mask"] or block["code"] for block in blocks),
        "seconds": found["seconds"],
        "cpu": usage["cpu"],
        "memory": usage["memory"] / 1024,
    }


def coverage(model: RealModel) -> Row:
    """The row of a model in the first table."""
    with tempfile.TemporaryDirectory() as folder:
        path = build(model, Path(folder))
        constants = path.with_name("model.bin").stat().st_blocks * 512 / 2**20
        row = {"model": model.name, "layers": model.layers, "tokens": model.tokens, "constants": constants,
               **compiled(path)}  # fmt: skip
        given, left = (
            onnx.load(path.with_name(file), load_external_data=False).graph.initializer
            for file in ("model.onnx", "fused.onnx")
        )
        wide = {tensor.name for tensor in given if [*tensor.dims[-2:]] == [model.buffer or model.tokens] * 2}
        square = [tensor for tensor in left if tensor.name in wide]
        sizes = [math.prod(each.dims) * helper.tensor_dtype_to_np_dtype(each.data_type).itemsize for each in square]
        return {**row, "dense": sum(sizes) / 2**20}


def run(model: RealModel, threads: int, rounds: int) -> Row:
    """The row of a model in the second table.

    Raises:
        ValueError: the results differ.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = build(model, Path(folder), numbers=0)
        row = compiled(path)
        feeds = path.with_name("feeds")
        feeds.mkdir()
        np.save(feeds / "input_ids.npy", np.random.default_rng(1).integers(0, FILLED_ROWS, (1, model.tokens)))
        variants = {"original": ("ort", str(path)), "fused": ("ort", str(path.with_name("fused.onnx")))}
        absent: dict[str, str] = {}
        with servers(variants, {"ort": sys.executable}, threads, absent) as running:
            if absent:
                raise HelperError("; ".join(absent.values()))
            for name, server in running.items():
                _checked(server.ask({"feeds": str(feeds), "save": str(path.with_name(f"{name}.npy"))}))
            right, result = (np.load(path.with_name(f"{name}.npy")) for name in variants)
            times: dict[str, list[float]] = {name: [] for name in variants}
            peaks = dict.fromkeys(variants, 0.0)
            for _ in range(rounds):
                for name, server in running.items():
                    answer = _checked(server.ask({"calls": 1, "warm": 0}))
                    times[name] += answer["seconds"]
                    peaks[name] = max(peaks[name], answer["peak_mib"])
    difference = float(np.abs(result - right).max() / np.abs(right).max())
    if not difference <= TOLERANCE:
        raise ValueError(f"{model.name}: the results differ by {difference:.1e}")
    medians = {name: statistics.median(each) for name, each in times.items()}
    return {"model": model.name, "layers": model.layers, "tokens": model.tokens, "masks": row["masks"],
            "ms": {name: 1e3 * each for name, each in medians.items()}, "peaks": peaks,
            "ratio": statistics.median(a / b for a, b in zip(times["original"], times["fused"], strict=True)),
            "difference": difference}  # fmt: skip


def _checked(answer: dict[str, Any]) -> dict[str, Any]:
    if "not" in answer:
        raise HelperError(answer["not"])
    return answer


def _masks(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in found.items())


COVERAGE = ("model", "layers", "tokens", "constants", "dense", "fused", "masks", "seconds", "CPU s", "memory", "rise")
LATENCY = ("run", "layers", "tokens", "masks", "ms", "fused ms", "times faster", "MiB", "fused MiB", "error")


def document(floor: Row, rows: Sequence[Row], runs: Sequence[Row]) -> str:
    """Both tables as Markdown. `floor` is the row of a model of one layer without a mask."""
    coverages = [
        (row["model"], str(row["layers"]), str(row["tokens"]), f"{row['constants']:.0f}", f"{row['dense']:.0f}",
         f"{row['fused']}/{row['blocks']}", _masks(row["masks"]), f"{row['seconds']:.2f}",
         f"{row['cpu'] - floor['cpu']:.2f}", f"{row['memory']:.0f}", f"{row['memory'] - floor['memory']:.0f}")
        for row in rows
    ]  # fmt: skip
    latencies = [
        (row["model"], str(row["layers"]), str(row["tokens"]), _masks(row["masks"]), *map(number, row["ms"].values()),
         f"{row['ratio']:.2f}", *(f"{peak:.0f}" for peak in row["peaks"].values()), f"{row['difference']:.0e}")
        for row in runs
    ]  # fmt: skip
    parts = ((COVERAGE, coverages), (LATENCY, latencies))
    return "\n".join(table(heading, cells) for heading, cells in parts if cells)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print both tables and write them; returns the exit code."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    shape = {"formatter_class": raw, "description": head, "epilog": rest}
    parser = argparse.ArgumentParser(prog="python -m bench.real_sizes", **shape)  # type: ignore[arg-type]
    parser.add_argument("--models", default="", help="only models whose name has a match of this regular expression")
    parser.add_argument("--runs", default="", help="only runs whose name has a match of this regular expression")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="three models, and one run with 1,024 tokens")
    parser.add_argument("--out", type=Path, default=OUT, help=f"default: {OUT}")
    arguments = parser.parse_args(words)
    models = [MODELS[name] for name in QUICK] if arguments.quick else list(MODELS.values())
    chosen = [MODELS["packed-bert"].cut(1, 1024)] if arguments.quick else RUNS
    try:
        floor = coverage(replace(MODELS["llama-3.1-8b"], layers=1, masks=(None,)))
        rows, runs = [], []
        for model in models:
            if re.search(arguments.models, model.name):
                rows.append(coverage(model))
                print(f"{model.name:18} {rows[-1]['seconds']:.2f} s  {_masks(rows[-1]['masks'])}", file=sys.stderr)
        for model in chosen:
            if re.search(arguments.runs, model.name):
                runs.append(run(model, arguments.threads, arguments.rounds))
                print(f"{model.name:18} {runs[-1]['ratio']:.2f} times as fast", file=sys.stderr)
    except (OSError, HelperError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = document(floor, rows, runs)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
