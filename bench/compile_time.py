"""Measures time and memory of a compilation, by the depth of the model and by the size of its weights.

    python -m bench.compile_time [--layers 2,8,32,128] [--weights 1,32,256,2048] [--json OUT]
                                 [--peer onnxruntime] [--peer onnxscript=OTHER/bin/python]...
                                 [--peer-layers 32] [--timeout 600]
    python -m bench.compile_time --growth plain_chain,attentions_of_one --sizes 1000,10000 [--json OUT]

The models are two graphs of tests/graphs: a Llama of two layers from each of torch's two exporters (grouped queries,
rotary positions, a mask made of comparisons, SDPA's guard against NaN). The second layer is repeated. The weights are
external data, and the output is in the same folder, so the weights are not copied. The second table also has these
models with the weights inside the file, if they fit into 2 GiB. The time is from the call to the written file. `CPU s`,
the processor time, is more reliable on a busy machine. Each measurement has its own process; `memory` is the rise of
its memory after the imports.

With --growth it measures the graphs of tests/growth/graphs.py instead, which grow in depth, in width and by sharing:
seconds of the processor for an inspection, and for 1,000 nodes of each.

A peer is a tool of compile_run.py and an interpreter that has it; the default is the current one. Peers get the same
files in the same run, each model after ours, up to the depth `--peer-layers`. This works on Linux only, because memory
is read from /proc.
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import onnx

from tools.makers.repeat_layers import place_weights, repeat
from tools.processes import ROOT, module

GRAPHS = {"dynamo": "llama__dynamon_sdpa_op20", "TorchScript": "llama__tsn_sdpa_op17"}
OURS = "fa_compiler"
INLINE_LIMIT = 2000 << 20
"""Weights of fewer bytes than this fit into an ONNX file together with the graph."""

HEADING = (
    "exporter     layers  nodes  tool                seconds   CPU s  per 1,000 nodes  memory MiB  fused  import s"
)

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--layers", type=_numbers, default=(2, 8, 32, 128), help="depths, separated by commas")
    parser.add_argument("--weights", type=_numbers, default=(1, 32, 256, 2048), help="sizes in MiB, of 8 layers")
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="TOOL[=PYTHON]")
    parser.add_argument("--peer-layers", type=int, default=32, help="the deepest model a peer gets")
    parser.add_argument("--timeout", type=float, default=600, help="seconds for one measurement")
    parser.add_argument("--growth", type=lambda text: text.split(","), help="names of growing graphs, or `all`")
    parser.add_argument("--sizes", type=_numbers, default=(100, 1000, 10000), help="of growing graphs")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), args.peer, args.peer_layers, args.timeout)
        if args.growth:
            rows = bench.by_growth(args.growth, args.sizes)
        else:
            rows = [*bench.by_depth(args.layers), *bench.by_weights(args.weights)]
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


class Bench:
    """Makes the models in a folder and measures."""

    def __init__(self, folder: Path, peers: list[tuple[str, str]], peer_layers: int, timeout: float) -> None:
        self.folder = folder
        self.peers = peers
        self.peer_layers = peer_layers
        self.timeout = timeout

    def by_depth(self, depths: Sequence[int]) -> list[Row]:
        """The first table."""
        print(HEADING)
        rows = []
        for exporter in GRAPHS:
            for depth in depths:
                model, nodes, size = self.model(exporter, depth, 1)
                for tool, python in [(OURS, sys.executable), *(self.peers if depth <= self.peer_layers else [])]:
                    found = self.measure(tool, python, model)
                    row = {"exporter": exporter, "layers": depth, "nodes": nodes, "weights": size, "tool": tool}
                    rows.append({**row, **found})
                    print(f"{exporter:12} {depth:6} {nodes:6}  {_depth_cells(tool, nodes, found)}", flush=True)
        return rows

    def by_weights(self, sizes: Sequence[int]) -> list[Row]:
        """The second table."""
        print("\nexporter     layers  weights MiB  place     seconds   CPU s  memory MiB")
        rows = []
        exporter, depth = "dynamo", 8
        _, _, narrow = self.model(exporter, depth, 1)
        _, _, double = self.model(exporter, depth, 2)
        for size in sizes:
            times = 1 + max(0, (size << 20) - narrow) // (double - narrow)
            model, nodes, length = self.model(exporter, depth, times)
            for place in ("external", "inline") if length < INLINE_LIMIT else ("external",):
                if place == "inline":
                    onnx.save(onnx.load(model), model)
                found = self.measure(OURS, sys.executable, model)
                row = {"exporter": exporter, "layers": depth, "nodes": nodes, "weights": length, "tool": OURS}
                rows.append({**row, "place": place, **found})
                cells = found.get("error") or "{seconds:7.2f} {cpu_seconds:7.2f}".format(**found)
                memory = found.get("memory", 0) / 2**20
                size = length / 2**20
                print(f"{exporter:12} {depth:6} {size:12.1f}  {place:8} {cells} {memory:11.1f}", flush=True)
        return rows

    def by_growth(self, names: Sequence[str], sizes: Sequence[int]) -> list[Row]:
        """The table of growing graphs."""
        from tests.growth.graphs import GROWING, model

        print("graph                            size   nodes   seconds   CPU s  per 1,000 nodes  memory MiB  fused")
        rows: list[Row] = []
        for name in GROWING if list(names) == ["all"] else names:
            for size in sizes:
                made, path = model(name, size), self.folder / "model.onnx"
                path.write_bytes(made.SerializeToString())
                found, nodes = self.measure(OURS, sys.executable, path), len(made.graph.node)
                rows.append({"graph": name, "size": size, "nodes": nodes, **found})
                cells = found.get("error") or (
                    f"{found['seconds']:9.2f} {found['cpu_seconds']:7.2f} {found['cpu_seconds'] / nodes * 1000:16.3f}"
                    f" {found['memory'] / 2**20:11.1f} {found['fused']:6}"
                )
                print(f"{name:30} {size:6} {nodes:7} {cells}", flush=True)
                if "error" in found:
                    break
        return rows

    def model(self, exporter: str, layers: int, times: int) -> tuple[Path, int, int]:
        """The file of a model, its number of nodes and the size of its weights."""
        packed = ROOT / "tests" / "graphs" / f"{GRAPHS[exporter]}.onnx.xz"
        deep = repeat(onnx.load_model_from_string(lzma.decompress(packed.read_bytes())), layers)
        path = self.folder / "model.onnx"
        size = place_weights(deep, path.with_suffix(".bin"), times)
        path.write_bytes(deep.SerializeToString())
        return path, len(deep.graph.node), size

    def measure(self, tool: str, python: str, model: Path) -> Row:
        """One compilation in its own process. `error` is the message of a failure."""
        command = module(python, "bench.compile_run", tool, model)
        with tempfile.TemporaryDirectory(dir=self.folder) as inner:
            # Our output goes beside the weights. A peer decides itself where it writes them.
            output = model.with_name("fused.onnx") if tool == OURS else Path(inner, "fused.onnx")
            try:
                run = subprocess.run([*command, str(output)], capture_output=True, text=True, timeout=self.timeout)
            except subprocess.TimeoutExpired:
                return {"error": f"not done in {self.timeout:g} s"}
        if run.returncode:
            return {"error": (run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1][:100]}
        found: Row = json.loads(run.stdout.splitlines()[-1])
        return found


def _depth_cells(tool: str, nodes: int, found: Row) -> str:
    if "error" in found:
        return f"{tool:18}  {found['error']}"
    cpu = found["cpu_seconds"]
    return (
        f"{tool + ' ' + found['version']:18} {found['seconds']:8.2f} {cpu:7.2f} {cpu / nodes * 1000:16.3f}"
        f" {found['memory'] / 2**20:11.1f} {found['fused']:6} {found['import_seconds']:9.2f}"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _peer(text: str) -> tuple[str, str]:
    tool, _, python = text.partition("=")
    return tool, python or sys.executable


if __name__ == "__main__":
    main()
