"""What the benchmarks share that print one table: the options of their command line, and the table, row by row."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

import onnx
import onnxruntime as ort


def table_parser(name: str, doc: str | None, rounds: int, threads: str = "1,2") -> argparse.ArgumentParser:
    """The command line of the module bench.`name`: --threads, --cases, --rounds and --out."""
    head, _, rest = (doc or "").partition("\n\n")
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=head, epilog=rest, formatter_class=raw)
    parser.add_argument("--threads", type=numbers, default=threads, help=f"default: {threads}")
    parser.add_argument("--cases", default="", help="only cases whose name has a match of this regular expression")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--out", type=Path, default=Path(f"build/bench/{name}.md"))
    return parser


def numbers(text: str) -> list[int]:
    """The numbers of "1,2"."""
    return [int(number) for number in text.split(",")]


def print_table(header: str, rows: Iterable[str], out: Path) -> None:
    """Print the table row by row, each as soon as it is measured, and write it to a file."""
    lines = [f"onnxruntime {ort.__version__}, onnx {onnx.__version__}", "", *header.splitlines()]
    print("\n".join(lines))
    for row in rows:
        print(row, flush=True)
        lines.append(row)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(lines) + "\n")
