"""Runs a prefill of a long text on 1, 2 and 4 processes, each with its part of the tokens.

    pip install 'fa_compiler[mpi]'
    python examples/long_context.py [--tokens 8192] [--ranks 1,2,4] [--method auto] [--folder build/long_context]

The model is the small Llama of examples/models: 2 layers, 4 query heads on 2 key heads, a causal mask, rotary
positions. It is divided along the sequence for each number of ranks (`fa_compiler.shard`), and run by mpirun. The
logits of all tokens must be those of one process. A table tells for each number of ranks how long the run took, how
much memory the largest rank needed for what grows with the text, and how many bytes a rank sent.

Processes of one machine share its cores: the run gets faster only where they have cores of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import fa_compiler

MODEL = Path(__file__).parent / "models" / "llama.onnx"
TOLERANCE = 1e-5
"""Of the largest logit: the ranks add in another order."""


def resident() -> int:
    """The memory of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def run_rank(model: Path, inputs: Path, outputs: Path) -> None:
    """One rank, as mpirun starts it: rank 0 writes the logits and what all ranks measured."""
    from fa_compiler.parallel.mpi import communicator

    own = communicator()
    session = fa_compiler.ShardedSession(model, own, threads=1)
    with np.load(inputs) as archive:
        feeds = dict(archive)
    short = {name: array[:, :64] for name, array in feeds.items()}
    session.run(short)  # makes the sessions of the kernels
    before, sent, start = resident(), own.sent, time.perf_counter()
    results = session.run(feeds)
    seconds = time.perf_counter() - start
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    measured = [json.loads(each) for each in own.share(json.dumps([seconds, grown, own.sent - sent]).encode())]
    whole = session.gather(results, feeds)
    if own.rank == 0:
        np.savez(outputs, measured=np.array(measured), **whole)


def mpirun() -> str:
    """The launcher of MPI: that of this environment, or another one on the path."""
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    found = shutil.which("mpirun", path=folders)
    if found is None:
        sys.exit("error: there is no mpirun; install one with pip install 'fa_compiler[mpi]'")
    return found


def measure(tokens: int, ranks: int, method: str, folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """The logits, and for each rank the seconds, the bytes of memory and the bytes sent."""
    result = fa_compiler.shard(MODEL, folder / f"{ranks}-ranks", ranks, method=method, length=tokens)
    outputs = folder / f"{ranks}.npz"
    words = ["--rank", str(result.path), str(folder / "inputs.npz"), str(outputs)]
    subprocess.run([mpirun(), "-n", str(ranks), sys.executable, __file__, *words], check=True)
    with np.load(outputs) as archive:
        return archive["logits"], archive["measured"]


def numbers(text: str) -> list[int]:
    """The numbers of a list such as 1,2,4."""
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Compare the numbers of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--ranks", type=numbers, default=[1, 2, 4])
    parser.add_argument("--method", default="auto")
    parser.add_argument("--folder", type=Path, default=Path("build/long_context"))
    parser.add_argument("--rank", nargs=3, type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        run_rank(*args.rank)
        return
    if args.tokens < 1:
        parser.error("--tokens has to be at least 1")
    args.folder.mkdir(parents=True, exist_ok=True)
    ids = np.random.default_rng(0).integers(0, 256, (1, args.tokens))
    np.savez(args.folder / "inputs.npz", input_ids=ids, attention_mask=np.ones_like(ids))
    first: np.ndarray | None = None
    print("ranks   seconds   memory of the largest rank, MiB   sent by a rank, MiB   difference of logits")
    for ranks in args.ranks:
        logits, measured = measure(args.tokens, ranks, args.method, args.folder)
        first = logits if first is None else first
        difference = float(np.abs(logits - first).max() / np.abs(first).max())
        seconds, grown, sent = measured.max(0)
        print(f"{ranks:5} {seconds:9.2f} {grown / 2**20:33.1f} {sent / 2**20:21.2f} {difference:22.1e}")
        if difference > TOLERANCE:
            sys.exit(f"error: the logits of {ranks} ranks differ")


if __name__ == "__main__":
    try:
        main()
    except fa_compiler.InputError as error:
        sys.exit(f"error: {error}")
