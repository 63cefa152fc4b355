"""Run the kept graphs, rewritten for other runtimes, in those that run on any machine.

    PYTHONPATH=. python -m tools.compat.check_runtimes [--web build/web] [GRAPH...]

OpenVINO runs on its CPU plugin, if the interpreter has it; onnxruntime-web runs in Node, on WebAssembly, if the folder
`--web` holds it. Each graph is rewritten for each target of the runtime. The result has to give what the original gives
in ONNX Runtime. A graph whose original the runtime does not run, or runs to other numbers, is counted apart.

Layers of linear attention are checked in OpenVINO as docs/linear_attention.md says: fused for the target ort, with the
functions in place of their calls.
"""

from __future__ import annotations

import argparse
import base64
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper, inliner

import fa_compiler
from fa_compiler.passes.answer.options import Target
from tests.graphs import harness
from tools.compat.results import difference
from tools.processes import ROOT, HelperError, Server

HERE = Path(__file__).parent

TOLERANCE = {"float16": 2e-2, "float32": 2e-3, "float64": 2e-3}
"""Relative to the largest value of an output. The graphs are whole models, and runtimes sum up in other orders."""
HEADS, SIZE, TOKENS = 4, 32, 64
"""Of the layers of linear attention."""
TARGETS: tuple[Target, ...] = ("onnx", "contrib")

Feeds = Mapping[str, np.ndarray]


class Runner(Protocol):
    """A runtime. `name` is the one for --runtime, with the version."""

    name: str

    def run(self, model: str, feeds: Feeds) -> list[np.ndarray]:
        """The outputs of a model, in their order. Raises an exception of the runtime's own where it fails."""


class OpenVino:
    """The CPU plugin of OpenVINO, in float32."""

    def __init__(self) -> None:
        import openvino  # type: ignore[import-not-found,unused-ignore]

        self._core = openvino.Core()
        self.name = "openvino=" + ".".join(openvino.__version__.split("-")[0].split(".")[:2])

    def run(self, model: str, feeds: Feeds) -> list[np.ndarray]:
        compiled = self._core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        given = {name: feeds[name] for port in compiled.inputs for name in port.names if name in feeds}
        results = compiled(given)
        return [np.asarray(results[port]) for port in compiled.outputs]


class Web:
    """onnxruntime-web in Node. Its kernels on WebAssembly are those of ONNX Runtime's CPU provider."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.name = f"ort-cpu={server.start()['version']}"

    def run(self, model: str, feeds: Feeds) -> list[np.ndarray]:
        inputs = {
            name: {
                "type": str(array.dtype),
                "dims": list(array.shape),
                "data": base64.b64encode(np.ascontiguousarray(array).tobytes()).decode(),
            }
            for name, array in feeds.items()
        }
        answer = self._server.ask({"model": model, "inputs": inputs})
        if "error" in answer:
            raise HelperError(answer["error"])
        return [
            np.frombuffer(base64.b64decode(each["data"]), each["type"]).reshape(each["dims"])
            for each in answer["outputs"].values()
        ]


@contextmanager
def runners(web: Path) -> Iterator[dict[str, Runner]]:
    """The runtimes that are here."""
    found: dict[str, Runner] = {}
    try:
        found["OpenVINO"] = OpenVino()
    except ImportError:
        print("OpenVINO is not installed: left out")
    node = shutil.which("node")
    if node is None or not (web / "node_modules" / "onnxruntime-web").is_dir():
        print(f"Node or {web}/node_modules/onnxruntime-web is missing: onnxruntime-web is left out")
        yield found
        return
    with Server([node, str(HERE / "web_worker.mjs"), str(web)], timeout=120) as server:
        found["onnxruntime-web"] = Web(server)
        yield found


def expected(model: str, feeds: Feeds) -> list[np.ndarray] | None:
    """The outputs of the original in ONNX Runtime; None if it does not run there."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        return [np.asarray(each) for each in session.run(None, dict(feeds))]
    except Exception:  # of ONNX Runtime: they share no class
        return None


def attempt(runner: Runner, model: str, feeds: Feeds, wanted: list[np.ndarray]) -> str:
    """What is wrong with a model in a runtime; empty if nothing is."""
    try:
        return difference(runner.run(model, feeds), wanted, lambda dtype: TOLERANCE[str(dtype)])
    except Exception as error:  # of any runtime
        return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def check(
    name: str, entry: Mapping[str, Any], ready: Mapping[str, Runner], counted: Counter[tuple[str, str, str]]
) -> None:
    """Count what becomes of one graph in each runtime, and print what fails."""
    feeds = harness.inputs(dict(entry))
    with tempfile.TemporaryDirectory() as folder:
        original, rewritten = f"{folder}/original.onnx", f"{folder}/rewritten.onnx"
        onnx.save(harness.load(name), original)
        wanted = expected(original, feeds)
        if wanted is None:
            return
        for title, runner in ready.items():
            alone: str | None = None
            for target in TARGETS:
                result = fa_compiler.optimize(original, target=target, runtime=runner.name)
                if not result.report.count("fused"):
                    counted[title, target, "nothing fused"] += 1
                    continue
                assert isinstance(result.model, onnx.ModelProto)
                onnx.save(result.model, rewritten)
                wrong = attempt(runner, rewritten, feeds, wanted)
                if wrong:
                    alone = attempt(runner, original, feeds, wanted) if alone is None else alone
                word = "ok" if not wrong else "the original fails, too" if alone else "WRONG"
                counted[title, target, word] += 1
                if word == "WRONG":
                    print(f"{title:16} {target:8} {name}: {wrong}", flush=True)


def linear_layer(rule: str) -> onnx.ModelProto:
    """A LinearAttention of ai.onnx 27 with an open number of tokens, as update_rule says."""
    shapes: dict[str, Sequence[int | str]] = dict.fromkeys(("query", "key", "value"), (1, "T", HEADS * SIZE))
    shapes["past_state"] = (1, HEADS, SIZE, SIZE)
    operands = [*shapes, "decay" if rule.startswith("gated") else "", "beta" if rule.endswith("delta") else ""]
    shapes |= {name: (1, "T", HEADS) for name in operands[4:] if name}
    node = helper.make_node(
        "LinearAttention",
        operands,
        ["output", "present_state"],
        q_num_heads=HEADS,
        kv_num_heads=HEADS,
        update_rule=rule,
    )
    results = {"output": shapes["query"], "present_state": shapes["past_state"]}
    inputs, outputs = (
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in values.items()]
        for values in (shapes, results)
    )
    graph = helper.make_graph([node], "layer", inputs, outputs)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 27)], ir_version=11)


def check_linear(title: str, runner: Runner, counted: Counter[tuple[str, str, str]]) -> None:
    """Count what becomes of each rule of linear attention, and print what fails."""
    rng = np.random.default_rng(0)
    for rule in ("linear", "gated", "delta", "gated_delta"):
        model = linear_layer(rule)
        feeds = {
            each.name: rng.random([size.dim_value or TOKENS for size in each.type.tensor_type.shape.dim], np.float32)
            / 4
            for each in model.graph.input
        }
        if "decay" in feeds:
            feeds["decay"] = -feeds["decay"]
        with tempfile.TemporaryDirectory() as folder:
            original, rewritten = f"{folder}/original.onnx", f"{folder}/rewritten.onnx"
            onnx.save(model, original)
            result = fa_compiler.optimize(original, target="ort")
            assert isinstance(result.model, onnx.ModelProto)
            onnx.save(inliner.inline_local_functions(result.model), rewritten)
            wanted = expected(original, feeds)
            wrong = "ONNX Runtime does not run it" if wanted is None else attempt(runner, rewritten, feeds, wanted)
        counted[title, "inlined", "WRONG" if wrong else "ok"] += 1
        if wrong:
            print(f"{title:16} inlined  LinearAttention, {rule}: {wrong}", flush=True)


def main() -> int:
    """Print a line for each failure and a table of counts; 1 if a graph fails whose original does not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--web", type=Path, default=ROOT / "build" / "web")
    parser.add_argument("graphs", metavar="GRAPH", nargs="*")
    args = parser.parse_args()
    index = harness.read_index()
    counted: Counter[tuple[str, str, str]] = Counter()
    with runners(args.web) as ready:
        print("; ".join(f"{title} as {runner.name}" for title, runner in ready.items()), flush=True)
        for name in args.graphs or sorted(index):
            check(name, index[name], ready, counted)
        if "OpenVINO" in ready:
            check_linear("OpenVINO", ready["OpenVINO"], counted)
    for (title, target, word), count in sorted(counted.items()):
        print(f"{title:16} {target:8} {count:5} {word}")
    return int(any(word == "WRONG" for _, _, word in counted))


if __name__ == "__main__":
    sys.exit(main())
