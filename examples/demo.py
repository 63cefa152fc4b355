"""Optimises exported models, compares them with the originals, and times both.

    python examples/demo.py [--ratios]     --ratios: runs more often, and also prints the README's table

The models are three small exports of torch, and a BERT of real size (12 layers of 768), which is stored as a graph and
gets random weights here. "Before" is the original in ONNX Runtime with its default, full optimisation. "After" is the
same with fused attention. Both are compared with the original without optimisations. The exit code is 1 if a difference
is too large.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as rt
import weights
from rich.console import Console
from rich.table import Table

import fa_compiler

MODELS = Path(__file__).parent / "models"
LENGTHS = (512, 2048)
"""The tokens of a run. Without --ratios BERT-base, for which ONNX Runtime takes half a minute, gets fewer."""
TOLERANCE = 1e-5
"""The allowed difference in float32, relative to the largest value. ONNX Runtime's own optimisations change the results
of such models by up to 5e-6."""

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Example:
    """One model of the demo. `repetitions` are the runs for each length, with --ratios three times as many. With
    --ratios each model has the same `lengths`."""

    title: str
    file: str
    repetitions: tuple[int, int]
    lengths: tuple[int, int] = LENGTHS


EXAMPLES = (
    Example("BERT-like: 2 layers of 64, 4 heads, padding mask", "bert.onnx", (5, 2)),
    Example("GPT-2-like: 2 layers of 64, 4 heads, causal", "gpt2.onnx", (5, 2)),
    Example(
        "Llama-like: 2 layers of 64, 4 query heads on 2, causal, rotary",
        "llama.onnx",
        (5, 2),
    ),
    Example(
        "BERT-base: 12 layers of 768, 12 heads, padding mask",
        "bert_base.graph.onnx",
        (2, 2),
        (256, 512),
    ),
)


@dataclass
class Timing:
    """The median seconds for one length, the speed-ups of all runs, and the largest difference from the truth."""

    length: int
    before: float
    after: float
    spread: str
    difference: float


def inputs(length: int, padded: int) -> Feeds:
    """One sentence of `length` random tokens, the last `padded` of them masked."""
    ids = np.random.default_rng(length).integers(0, 256, (1, length))
    mask = np.ones_like(ids)
    mask[:, length - padded :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def session(path: Path, level: rt.GraphOptimizationLevel) -> rt.InferenceSession:
    """A session on the CPU, with the operators of fa_compiler's library."""
    options = rt.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = level
    fa_compiler.register_custom_ops(options)
    return rt.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def difference(truth: list[np.ndarray], other: list[np.ndarray]) -> float:
    """The largest difference of all outputs, each relative to its largest value; NaN if an output has a NaN."""
    worst = 0.0
    for a, b in zip(truth, other, strict=True):
        worst = max(worst, float(np.abs(a - b).max() / np.abs(a).max()))
        if not np.isfinite(b).all():
            return float("nan")
    return worst


def timed(model: rt.InferenceSession, feeds: Feeds) -> float:
    """Seconds of one run."""
    start = time.perf_counter()
    model.run(None, feeds)
    return time.perf_counter() - start


def measure(original: Path, optimised: Path, lengths: Sequence[int], repetitions: Sequence[int]) -> list[Timing]:
    """Compare and time the two files at each length. Their runs alternate, so both have the same noise."""
    truth_of = session(original, rt.GraphOptimizationLevel.ORT_DISABLE_ALL)
    expected = {length: truth_of.run(None, inputs(length, length // 8)) for length in lengths}
    del truth_of
    before = session(original, rt.GraphOptimizationLevel.ORT_ENABLE_ALL)
    after = session(optimised, rt.GraphOptimizationLevel.ORT_ENABLE_ALL)
    timings = []
    for length, count in zip(lengths, repetitions, strict=True):
        feeds = inputs(length, length // 8)
        worst = difference(expected[length], after.run(None, feeds))
        before.run(None, feeds)
        pairs = [(timed(before, feeds), timed(after, feeds)) for _ in range(count)]
        medians = [statistics.median(column) for column in zip(*pairs, strict=True)]
        timings.append(Timing(length, medians[0], medians[1], spread(pairs), worst))
    return timings


def spread(pairs: Sequence[tuple[float, float]]) -> str:
    """The smallest and the largest speed-up of two runs that followed each other."""
    if len(pairs) == 1:
        return "one run"
    found = [before / after for before, after in pairs]
    return f"{min(found):.2f} to {max(found):.2f}"


def show_blocks(console: Console, report: fa_compiler.Report) -> None:
    """Print one row for each softmax of the model."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("softmax", "became", "layout", "mask", "heads"):
        table.add_column(name, header_style="dim")
    for block in report.blocks:
        heads = "/".join(map(str, block.heads)) if block.heads else ""
        became = f"[green]{block.op}[/]" if block.status == "fused" else f"[yellow]{block.code}[/]"
        name = block.anchor if len(block.anchor) <= 46 else "…" + block.anchor[-45:]
        table.add_row(name, became, block.layout or "", block.mask or block.reason or "", heads)
    console.print(table)


def show_timings(console: Console, timings: list[Timing]) -> None:
    """Print one row for each length."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in (
        "length",
        "ONNX Runtime",
        "fa_compiler",
        "speed-up",
        "in all runs",
        "largest difference",
    ):
        table.add_column(name, header_style="dim", justify="right")
    for row in timings:
        good = row.difference <= TOLERANCE
        table.add_row(
            str(row.length),
            f"{row.before * 1e3:.1f} ms",
            f"{row.after * 1e3:.1f} ms",
            f"[bold]{row.before / row.after:.2f} x[/]",
            row.spread,
            f"[{'green' if good else 'red'}]{row.difference:.1e}[/]",
        )
    console.print(table)


def ratios(timings: dict[str, list[Timing]]) -> str:
    """The speed-ups as a Markdown table: one row for each model, one column for each length."""
    lengths = " | ".join(f"{length} tokens" for length in LENGTHS)
    lines = [f"| model | {lengths} |", "| --- |" + " ---: |" * len(LENGTHS)]
    for title, rows in timings.items():
        lines.append(f"| {title} | {' | '.join(f'{row.before / row.after:.2f} x' for row in rows)} |")
    return "\n".join(lines)


def demonstrate(console: Console, example: Example, for_ratios: bool, folder: Path) -> list[Timing]:
    """Optimise, compare, time and print one model."""
    console.rule(f"[bold]{example.title}", align="left", style="dim")
    original, optimised = folder / "original.onnx", folder / "optimised.onnx"
    with console.status("loading"):
        model = weights.load(MODELS / example.file)
        onnx.save(model, str(original))
        exporter = f"{model.producer_name} {model.producer_version}"
        nodes = len(model.graph.node)
        del model
    with console.status("fusing attention"):
        result = fa_compiler.optimize(original, optimised, target="ort")
    report = result.report
    console.print(
        f"[dim]{example.file}, exported by {exporter}, {nodes} nodes:[/] "
        f"{report.count('fused')} of {len(report.blocks)} softmaxes fused in {report.seconds:.2f} s"
    )
    show_blocks(console, report)
    console.print()
    with console.status("running before and after"):
        lengths, times = (LENGTHS, 3) if for_ratios else (example.lengths, 1)
        timings = measure(original, optimised, lengths, [times * count for count in example.repetitions])
    show_timings(console, timings)
    console.print()
    return timings


def main() -> int:
    """Run the demo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ratios", action="store_true", help="run three times as often, and print the README's table")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)
    console.print(
        f"\n[bold]fa_compiler {fa_compiler.__version__}[/]: FlashAttention for ONNX models, "
        f"on ONNX Runtime {rt.__version__}, batch 1\n"
    )
    start = time.perf_counter()
    timings: dict[str, list[Timing]] = {}
    for example in EXAMPLES:
        with tempfile.TemporaryDirectory() as folder:
            timings[example.title] = demonstrate(console, example, arguments.ratios, Path(folder))
    same = all(row.difference <= TOLERANCE for rows in timings.values() for row in rows)
    console.print(
        "Times are medians; ONNX Runtime's are with its full optimisation. The two models run in turns. Differences\n"
        f"are to the original with no optimisation, relative to its largest value (allowed: {TOLERANCE:g}). "
        f"[dim]{time.perf_counter() - start:.0f} s in all.[/]"
    )
    if arguments.ratios:
        print(f"\nonnxruntime {rt.__version__}, {date.today():%Y-%m-%d}\n\n{ratios(timings)}")
    if not same:
        console.print("[bold red]A difference is too large.[/]")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
