"""Measures whole models with linear attention, as exported and fused: time, memory, differences, and the compilation.

    python -m bench.linear_models --models DIR --export-python TORCH/bin/python
    python -m bench.linear_models --models DIR --names "falcon.*step" --threads 1 --rounds 9

The models are exported once into DIR, with random weights and few layers of real widths, by an interpreter that has
torch and transformers (tools/makers/export_hybrids.py): a prompt of 500 tokens, and a step behind `--past` cached ones.
Each model runs in these variants, each in its own process, in turns:

    exported    the original, with all optimisations of ONNX Runtime
    contrib     fused by fa_compiler, with LinearAttention of com.microsoft in the place of FlashLinearAttention
    ours        fused by fa_compiler

The time is the median of the calls: with one thread the processor time, so that other work on the machine counts less,
with more threads the elapsed time. The memory is the peak of the process while it runs. The difference is that of any
output of ours from that of the original, relative to the largest number of this output. The load is that of the machine
in the last minute, ours included.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx

from bench.model_worker import ort_session
from bench.models import servers
from fa_compiler.op_registry import DOMAIN
from tools.processes import module

NAMES, PARTS = ("qwen3-next", "kimi-linear", "falcon-h1"), ("prefill", "step")
TOKENS = 500
WINDOW = 4
"""The width of the short convolutions, of which a step gets the last tokens."""
PEER = "LinearAttention"
TOLERANCE = 1e-3
"""The largest difference that still is one of rounding: float32 sums in another order, through four layers."""
HEADING = (
    "| model | | threads | exported ms | contrib ms | ours ms | memory MiB | contrib | ours | difference | load |\n"
    "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def main() -> None:
    """Prints a row for each model and number of threads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="where the exported models are kept")
    parser.add_argument("--export-python", metavar="PYTHON", help="has torch, transformers, onnxscript")
    parser.add_argument("--names", type=re.compile, default=re.compile(""), metavar="REGEX", help="NAME/PART")
    parser.add_argument("--threads", type=_numbers, default=(1, 2), help="numbers of threads, separated by commas")
    parser.add_argument("--past", type=int, default=1024, help="the cached tokens of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--kept", action="store_true", help="takes the fused files of an earlier run, if they are there"
    )
    options = parser.parse_args()
    print(HEADING)
    for name in NAMES:
        for part in PARTS:
            for row in _rows(name, part, options):
                print(row, flush=True)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _rows(name: str, part: str, options: argparse.Namespace) -> Iterator[str]:
    """The rows of one part of a model, if it is selected."""
    if not options.names.search(f"{name}/{part}"):
        return
    folder = options.models.resolve() / name
    original = folder / part / "model.onnx"
    if not original.exists() and options.export_python:
        subprocess.run(module(options.export_python, "tools.makers.export_hybrids", folder, name), check=True)
    ours = folder / f"{part}-ours" / "model.onnx"
    if not (options.kept and ours.exists()):
        print(f"# {name} {part}: {compiled(original, ours)}", file=sys.stderr)
    files = {"exported": original, "contrib": with_peer(ours), "ours": ours}
    given = feeds(onnx.load(original, load_external_data=False), options.past)
    off = difference(original, ours, given)
    if not off <= TOLERANCE:
        raise SystemExit(f"{name} {part}: an output differs by {off:.1e}")
    for threads in options.threads:
        found = measured(files, given, threads, options.rounds)
        cells = [f"{time:.4g}" for time, _ in found] + [f"{peak:.0f}" for _, peak in found]
        cells += [f"{off:.0e}", f"{os.getloadavg()[0]:.1f}"]
        yield f"| {name} | {part} | {threads} | {' | '.join(cells)} |"


def compiled(original: Path, fused: Path) -> str:
    """Fuse a file. Returns the processor time and the peak of the memory that it took, in words."""
    fused.parent.mkdir(exist_ok=True)
    words = ["optimize", str(original), "-o", str(fused), "--quiet"]
    process = subprocess.Popen(module(sys.executable, "fa_compiler", *words), stdout=subprocess.DEVNULL)
    _, code, used = os.wait4(process.pid, 0)
    if code:
        raise SystemExit(f"{original} could not be fused")
    return f"compiled in {used.ru_utime + used.ru_stime:.1f} s of the processor, {used.ru_maxrss >> 10} MiB"


def with_peer(fused: Path) -> Path:
    """The fused file with LinearAttention of com.microsoft, which takes the same operands and attributes."""
    model = onnx.load(fused, load_external_data=False)
    replaced = [node for node in model.graph.node if (node.domain, node.op_type) == (DOMAIN, "FlashLinearAttention")]
    if not replaced:
        raise SystemExit(f"{fused} has no linear attention")
    for node in replaced:
        node.domain, node.op_type = "com.microsoft", PEER
    model.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    target = fused.with_name("contrib.onnx")
    target.write_bytes(model.SerializeToString())
    return target


def feeds(model: onnx.ModelProto, past: int) -> dict[str, np.ndarray]:
    """Random inputs: words, their positions, caches of keys and values, windows of convolutions, and states."""
    rng = np.random.default_rng(0)
    is_step = any("cache" in value.name for value in model.graph.input)
    given: dict[str, np.ndarray] = {}
    for value in model.graph.input:
        is_token = value.name in ("input_ids", "position_ids")
        spare = WINDOW if "conv" in value.name else TOKENS if is_token else past
        dims = [_size(dim) or spare for dim in value.type.tensor_type.shape.dim]
        if value.name == "position_ids":
            given[value.name] = np.full(dims, past) if is_step else np.arange(dims[-1])[None]
        elif value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            given[value.name] = rng.integers(3, 8000, dims)
        else:
            given[value.name] = rng.standard_normal(dims, np.float32) / 8
    return given


def _size(dim: onnx.TensorShapeProto.Dimension) -> int:
    """A fixed size, 0 for an open one. The exporter writes some numbers as names."""
    return dim.dim_value or (int(dim.dim_param) if dim.dim_param.isdigit() else 0)


def difference(original: Path, fused: Path, given: Mapping[str, np.ndarray]) -> float:
    """The largest difference of any output, relative to its largest number."""
    results: list[Sequence[np.ndarray]] = [
        ort_session(str(file), os.cpu_count() or 1).run(None, dict(given)) for file in (original, fused)
    ]
    pairs = zip(*results, strict=True)
    return max(float(np.abs(one - other).max() / max(np.abs(one).max(), 1e-30)) for one, other in pairs)


def measured(
    files: Mapping[str, Path], given: Mapping[str, np.ndarray], threads: int, rounds: int
) -> list[tuple[float, float]]:
    """The milliseconds of a call and the peak memory in MiB of each file, in their order."""
    absent: dict[str, str] = {}
    variants = {name: ("ort", str(file)) for name, file in files.items()}
    clock = "processor" if threads == 1 else "seconds"
    times, peaks = {name: list[float]() for name in files}, dict.fromkeys(files, 0.0)
    with (
        tempfile.TemporaryDirectory() as scratch,
        servers(variants, {"ort": sys.executable}, threads, absent) as running,
    ):
        if absent:
            raise SystemExit(f"not run: {absent}")
        for name, array in given.items():
            np.save(Path(scratch) / f"{name}.npy", array)
        (Path(scratch) / "results").mkdir()
        questions = [{"feeds": scratch, "save": f"{scratch}/results/first"}, *([{"calls": 1, "warm": 0}] * rounds)]
        for question in questions:
            for name, server in running.items():
                answer = server.ask(question)
                if "not" in answer:
                    raise SystemExit(f"{name}: {answer['not']}")
                if "calls" not in question:
                    continue
                times[name] += answer[clock]
                peaks[name] = max(peaks[name], answer["peak_mib"])
    return [(1e3 * statistics.median(times[name]), peaks[name]) for name in files]


if __name__ == "__main__":
    main()
