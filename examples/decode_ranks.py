"""Generates tokens on 1, 2 and 4 processes, each with its part of the caches.

    pip install 'fa_compiler[mpi]'
    python examples/decode_ranks.py [--past 60000] [--tokens 20] [--ranks 1,2,4] [--folder build/decode_ranks]

The model is the one of examples/generate.py: 4 layers, 8 query heads on 2 key heads of 64 numbers. It is divided along
its caches for each number of ranks (`fa_compiler.shard`), and run by mpirun. The caches begin with --past keys, and
each rank makes its own. All numbers of ranks must choose the same tokens. A table tells for each of them the time of a
token, how much memory the largest rank needed for its caches and the step, and how many bytes a rank sent for a token.

Processes of one machine share its cores and its memory: a step gets faster only where they have their own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
from generate import KEY_HEADS, SIZE, build
from long_context import mpirun, resident

import fa_compiler


def part_of_caches(names: list[str], positions: np.ndarray) -> dict[str, np.ndarray]:
    """The keys and values of some positions: numbers that depend on the name, the position and the place in the row."""
    made = {}
    for number, name in enumerate(names):
        angles = positions[:, None] * (1 + number) * 0.37 + np.arange(KEY_HEADS * SIZE) * 1.7
        rows = np.sin(angles, dtype=np.float32).reshape(len(positions), KEY_HEADS, SIZE)
        made[name] = np.ascontiguousarray(rows.transpose(1, 0, 2))[None]
    return made


def run_rank(model: Path, past: int, tokens: int, outputs: Path) -> None:
    """One rank, as mpirun starts it: rank 0 writes the tokens and what all ranks measured."""
    from fa_compiler.parallel.mpi import communicator
    from fa_compiler.parallel.session import Caches

    own = communicator()
    session = fa_compiler.ShardedSession(model, own, threads=1)
    _, short = session.step({"token": np.array([1])}, session.empty_caches())  # makes the sessions of the kernels
    before = resident()
    names = list(short.arrays)
    caches = Caches(past, part_of_caches(names, np.arange(own.rank, past, own.size)))
    chosen, times, sent = [1], [], own.sent
    for _ in range(tokens):
        start = time.perf_counter()
        results, caches = session.step({"token": np.array(chosen[-1:])}, caches)
        times.append(time.perf_counter() - start)
        chosen.append(int(results["logits"].argmax()))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    measured = [float(np.median(times)), grown, (own.sent - sent) / tokens]
    every = [json.loads(each) for each in own.share(json.dumps(measured).encode())]
    if own.rank == 0:
        outputs.write_text(json.dumps({"tokens": chosen, "measured": every}))


def numbers(text: str) -> list[int]:
    """The numbers of a list such as 1,2,4."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Compare the numbers of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--past", type=int, default=60_000)
    parser.add_argument("--tokens", type=int, default=20)
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--folder", type=Path, default=Path("build/decode_ranks"))
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(args.rank[0], args.past, args.tokens, args.rank[1])
        return
    if min(args.past, args.tokens) < 1:
        parser.error("--past and --tokens have to be at least 1")
    args.folder.mkdir(parents=True, exist_ok=True)
    step = args.folder / "step.onnx"
    onnx.save(build(args.past + args.tokens), step)
    first: list[int] | None = None
    print("ranks   milliseconds a token   memory of the largest rank, MiB   sent by a rank for a token, KiB")
    for ranks in args.ranks:
        result = fa_compiler.shard(step, args.folder / f"{ranks}-ranks", ranks, length=args.past)
        outputs = args.folder / f"{ranks}.json"
        words = ["--rank", str(result.path), str(outputs), "--past", str(args.past), "--tokens", str(args.tokens)]
        subprocess.run([mpirun(), "-n", str(ranks), sys.executable, __file__, *words], check=True)
        told = json.loads(outputs.read_text())
        first = told["tokens"] if first is None else first
        seconds, grown, sent = np.array(told["measured"]).max(0)
        print(f"{ranks:5} {seconds * 1e3:22.1f} {grown / 2**20:33.1f} {sent / 2**10:33.1f}")
        if told["tokens"] != first:
            sys.exit(f"error: {ranks} ranks choose other tokens")


if __name__ == "__main__":
    try:
        main()
    except fa_compiler.InputError as error:
        sys.exit(f"error: {error}")
