"""Measures speed and memory of attention, in comparison with other libraries and with the limits of the machine.

    python -m bench kernel --peer-python ../torch/bin/python --peer-python ../openvino/bin/python
    python -m bench all --quick                  a minute, to check that everything works
    python -m bench gradient --threads 1,2 --cases 4k --out gradients
    python -m bench long --threads 2             many keys: flat percentage, flat memory
    python -m bench show build/bench/bench.json  tables and plots of an earlier run
    python -m bench show build/bench/bench.json build/long/bench.json --plots docs/plots

Our operators and ONNX Runtime's run in the current interpreter. torch and OpenVINO run in it, too, if they are
installed, or in the first --peer-python that has them. The peers of a case run in turns, round by round, with the same
number of threads. Each result is compared with float64 before it is timed; a wrong result is marked and does not count.
The limit of a case is measured in the same rounds. The folder --out gets bench.json, bench.md and plots: bars for each
number of threads, the roofline, and the time and memory by length where these cases were measured.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import models
from bench.speed import bars, chart, curves, memory, rounds, tables
from bench.speed.cases import CASES, LONG, QUICK, Case
from bench.speed.limits import Machine, NoCompiler
from bench.speed.workers import Workers, interpreters

PARTS = {
    "kernel": "the forward part and decode steps",
    "gradient": "the backward part, alone and together with the forward part",
    "memory": "the memory by which one call makes a process grow",
    "all": "the three above; memory of our operators only, unless --peers is given",
    "long": "32 K to 1 M keys: a row, a chunk of a cached prompt, 8,192 rows; of the others only torch-sdpa",
}
ROUNDS, QUICK_ROUNDS = 5, 3
OUT = Path("build/bench")


def parser() -> argparse.ArgumentParser:
    """The command line."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    shape = argparse.RawDescriptionHelpFormatter
    main = argparse.ArgumentParser(prog="python -m bench", description=head, epilog=rest, formatter_class=shape)
    commands = main.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, words in PARTS.items():
        command = commands.add_parser(name, help=words, description=f"Measures {words}.", formatter_class=shape)
        command.add_argument("--threads", type=_counts, default=[1, 2], metavar="N,N", help="default: 1,2")
        command.add_argument("--cases", type=_pattern, default=re.compile(""), metavar="REGEX",
                             help="only cases whose name has a match")  # fmt: skip
        command.add_argument("--peers", type=_pattern, metavar="REGEX", help="only these peers, and ours")
        command.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
        command.add_argument("--quick", action="store_true", help=f"a few cases, {QUICK_ROUNDS} rounds, about a minute")
        command.add_argument("--peer-python", action="append", default=[], metavar="PYTHON",
                             help="an interpreter with torch or OpenVINO; may be given several times")  # fmt: skip
        command.add_argument("--isa", help="forces a variant of our kernels, as FA_COMPILER_ISA does; avx2 also holds "
                             "torch, OpenVINO and the limits to it, but not ONNX Runtime's own kernels")  # fmt: skip
        command.add_argument("--out", type=Path, default=OUT, metavar="DIR", help=f"default: {OUT}")
    commands.add_parser("models", help="whole models (its own options: python -m bench models --help)")
    show = commands.add_parser("show", help="tables and plots of the JSON of an earlier run")
    show.add_argument("file", type=Path, nargs="+", help="of a case that several have, the last one counts")
    show.add_argument("--plots", type=Path, metavar="DIR", help="writes nothing but the plots of docs/speed.md, there")
    return main


def _counts(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a regular expression: {error}") from None


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The cases of a command."""
    gradient = {"kernel": (False,), "gradient": (True,), "all": (False, True), "memory": (), "long": (False,)}
    return [
        case
        for case in (LONG if arguments.command == "long" else CASES)
        if case.gradient in gradient[arguments.command]
        and arguments.cases.search(case.name)
        and (not arguments.quick or case.name in QUICK)
    ]


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """All measurements, with a line of progress for each."""
    start = time.perf_counter()
    with Workers(interpreters(arguments.peer_python), arguments.isa) as workers:
        results: dict[str, Any] = {"about": about() | {"isa": arguments.isa}, "cases": [], "memory": []}
        count = arguments.rounds or (QUICK_ROUNDS if arguments.quick else ROUNDS)
        with tempfile.TemporaryDirectory() as scratch:
            machine = Machine.compile(Path(scratch), arguments.isa)
            for case in chosen(arguments):
                results["cases"] += _case(case, count, arguments, workers, machine)
        if arguments.command in ("memory", "all", "long") and not arguments.quick:
            results["memory"] = _memory(arguments, workers)
        results["about"]["versions"] += [workers.versions[name] for name in workers.pythons if name in workers.versions]
        results["about"]["minutes"] = round((time.perf_counter() - start) / 60, 1)
    return results


def _case(
    case: Case, count: int, arguments: argparse.Namespace, workers: Workers, machine: Machine
) -> list[dict[str, Any]]:
    done: list[dict[str, Any]] = []
    few = "^torch-sdpa$" if arguments.command == "long" else "^(?!torch-flex)" if arguments.quick else ""
    peers = arguments.peers or re.compile(few)  # the compilation of torch-flex takes long
    with tempfile.TemporaryDirectory() as name:
        rounds.write_case(case, Path(name))
        for threads in sorted(arguments.threads, reverse=True):
            out = {name: why for result in done for name, why in rounds.hopeless(result).items()}
            done.append(rounds.measure(case, Path(name), threads, count, workers, machine, peers, out))
            print(progress(done[-1]), file=sys.stderr, flush=True)
    return done


def progress(result: dict[str, Any]) -> str:
    """One line with the share of the limit that each peer reached."""
    shares = {name: tables.percent(result, name) for name in result["peers"]}
    order = sorted(shares, key=lambda name: (name != "ours", -shares[name]))
    words = [f"{name} {shares[name]:.0f}{'' if result['peers'][name]['right'] else '!'}" for name in order]
    return f"{result['case']['name']:20} {result['threads']} limit {result['limit_ms']:8.3f} ms; %: {'  '.join(words)}"


def _memory(arguments: argparse.Namespace, workers: Workers) -> list[dict[str, Any]]:
    peers = arguments.peers or re.compile("" if arguments.command == "memory" else "^$")
    threads = max(arguments.threads)
    wanted = []
    for library in workers.pythons:
        for peer in workers.get(library, threads).greeting["peers"]:
            if peer == "ours" or peers.search(peer):
                wanted.append((library, peer))
    done = []
    for case in LONG if arguments.command == "long" else memory.CASES:
        if arguments.cases.search(case.name):
            for row in memory.measure(case, threads, workers, wanted):
                done.append(row)
                text = f"{row['mib']:8.1f} MiB" if "mib" in row else row["not"]
                print(f"memory {row['case']:20} {row['peer']:14} {text}", file=sys.stderr, flush=True)
    return done


def about() -> dict[str, Any]:
    """The machine and the date."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "unknown processor")
    return {
        "processor": f"{os.cpu_count()} x {name}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "versions": [],
    }


def joined(files: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The results of several runs as those of one. What they tell about the machine is that of the first."""
    cases = {(row["case"]["name"], row["threads"]): row for file in files for row in file["cases"]}
    grown = {(row["case"], row["peer"]): row for file in files for row in file["memory"]}
    return {"about": files[0]["about"], "cases": list(cases.values()), "memory": list(grown.values())}


def save(results: dict[str, Any], folder: Path) -> str:
    """Writes the JSON, the Markdown and the plots; returns the Markdown."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "bench.json").write_text(json.dumps(results, indent=1) + "\n")
    text = tables.document(results)
    (folder / "bench.md").write_text(text)
    for threads in sorted({result["threads"] for result in results["cases"]}):
        mine = [result for result in results["cases"] if result["threads"] == threads]
        title = f"Share of the machine's limit, {threads} thread{'s' * (threads > 1)}, {results['about']['date']}"
        (folder / f"bars{threads}.svg").write_text(bars.picture(mine, title))
    draw(results["cases"], results["memory"], folder)
    return text


def draw(cases: Sequence[dict[str, Any]], grown: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes the plots for the largest number of threads: the roofline of the ordinary cases, and the long cases."""
    names, threads = {case.name for case in LONG}, max((result["threads"] for result in cases), default=0)
    long = [result for result in cases if result["case"]["name"] in names]
    if len(cases) > len(long):
        ordinary = [result for result in cases if result["case"]["name"] not in names]
        (folder / "roofline.svg").write_text(curves.roofline(ordinary, threads))
    if long:
        (folder / "lengths.svg").write_text(curves.lengths(long, grown, threads))


def main(words: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    words = sys.argv[1:] if words is None else list(words)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # temporary folders are removed in either case
    try:
        return command(words)
    except KeyboardInterrupt:
        return 130


def command(words: list[str]) -> int:
    """`main` without the handling of interruptions."""
    if words[:1] == ["models"]:
        return models.main(words[1:])
    arguments = parser().parse_args(words)
    try:
        chart.required()
        if arguments.command == "show":
            files = [json.loads(file.read_text()) for file in arguments.file]
            if arguments.plots:
                draw(joined(files)["cases"], joined(files)["memory"], arguments.plots)
            else:
                print(save(joined(files), arguments.file[0].parent))
            return 0
        results = run(arguments)
    except (NoCompiler, chart.NoMatplotlib, OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(save(results, arguments.out))
    print(f"written to {arguments.out} ({results['about']['minutes']} minutes)", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
