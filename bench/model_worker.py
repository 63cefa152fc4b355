"""A process that holds one model in one runtime; models.py asks it to run.

    python -m bench.model_worker RUNTIME THREADS MODEL       RUNTIME is ort or openvino
    python -m bench.model_worker optimise TYPE MODEL OUT     writes the model as onnxruntime.transformers optimises it

It uses line_server's protocol, with its `version` as greeting. The questions are

    {"feeds": folder, "save": file}   loads the inputs NAME.npy, runs once, saves the result -> {"seconds": s}
    {"calls": n, "warm": m}           -> {"seconds": [...], "peak_mib": m}, the peak memory of the process meanwhile
    {"profile": true}                 (ort) -> {"kinds": {op type: seconds}} of two calls, in a separate session
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.line_server import serve
from bench.speed.truth import Array
from bench.speed.worker import memory

Run = Callable[[Mapping[str, Array]], Array]


def ort_session(model: str, threads: int, profile: str = "") -> Any:
    """A session that knows our operators, also if the model has none of them."""
    import onnxruntime as ort

    from fa_compiler.lowering.ort import register_custom_ops

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    register_custom_ops(options)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def in_ort(model: str, threads: int) -> tuple[str, Run]:
    """ONNX Runtime with all its optimisations."""
    import onnxruntime as ort

    session = ort_session(model, threads)
    return f"onnxruntime {ort.__version__}", lambda feeds: session.run(None, dict(feeds))[0]


def in_openvino(model: str, threads: int) -> tuple[str, Run]:
    """OpenVINO's CPU plugin in float32, as for the other runtimes."""
    import openvino as ov

    core = ov.Core()
    config = {"INFERENCE_PRECISION_HINT": ov.Type.f32, "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1,
              "PERFORMANCE_HINT": "LATENCY"}  # fmt: skip
    request = core.compile_model(core.read_model(model), "CPU", config).create_infer_request()

    def run(feeds: Mapping[str, Array]) -> Array:
        request.infer(dict(feeds), share_inputs=True, share_outputs=True)
        result: Array = request.get_output_tensor(0).data
        return result

    return f"openvino {ov.__version__.split('-')[0]}", run


RUNTIMES = {"ort": in_ort, "openvino": in_openvino}


class Bench:
    """One loaded model."""

    def __init__(self, runtime: str, threads: int, model: str) -> None:
        self.threads = threads
        self.model = model
        self.version, self.run = RUNTIMES[runtime](model, threads)
        self.feeds: dict[str, Array] = {}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer one question of the protocol. The runtime's message of a failure is an answer, too."""
        try:
            if "feeds" in question:
                return self.take(Path(question["feeds"]), question["save"])
            if "profile" in question:
                return self.profile()
            return self.time(question["calls"], question["warm"])
        except Exception as failure:
            return {"not": " ".join((str(failure) or repr(failure)).split())[-200:]}

    def take(self, folder: Path, save: str) -> dict[str, Any]:
        """Run once and save the result, with which models.py compares."""
        self.feeds = {file.stem: np.load(file) for file in folder.glob("*.npy")}
        start = time.perf_counter()
        result = self.run(self.feeds)
        seconds = time.perf_counter() - start
        np.save(save, result)
        return {"seconds": seconds}

    def time(self, calls: int, warm: int) -> dict[str, Any]:
        """The seconds of each call."""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        for _ in range(warm):
            self.run(self.feeds)
        seconds = []
        for _ in range(calls):
            start = time.perf_counter()
            self.run(self.feeds)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "peak_mib": memory("VmHWM")}

    def profile(self) -> dict[str, Any]:
        """The seconds that ONNX Runtime spends in each operator."""
        kinds: Counter[str] = Counter()
        with tempfile.TemporaryDirectory() as folder:
            session = ort_session(self.model, self.threads, str(Path(folder) / "profile"))
            for _ in range(2):
                session.run(None, self.feeds)
            for event in json.loads(Path(session.end_profiling()).read_text()):
                if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
                    kinds[event["args"]["op_name"]] += event["dur"] * 1e-6
        return {"kinds": kinds}


def optimise(kind: str, model: str, out: str) -> int:
    """Runs onnxruntime.transformers; returns the number of attention operators that it made."""
    from onnxruntime.transformers import optimizer

    made = optimizer.optimize_model(model, model_type=kind, num_heads=0, hidden_size=0, opt_level=0)
    made.save_model_to_file(out, use_external_data_format=True)
    return sum("Attention" in node.op_type for node in made.model.graph.node)


def main() -> None:
    """Serves until standard input ends, or optimises one file."""
    if sys.argv[1] == "optimise":
        print(optimise(*sys.argv[2:5]))
        return
    bench = Bench(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    serve(bench.answer, {"version": bench.version})


if __name__ == "__main__":
    main()
