"""A process that holds one model in one runtime; models.py asks it to run.

    python -m bench.model_worker RUNTIME THREADS MODEL       RUNTIME is ort, ort-alone or openvino
    python -m bench.model_worker optimise TYPE HEADS HIDDEN MODEL OUT     as onnxruntime.transformers optimises it

It is a server of tools/processes.py. The greeting is the `version`, the process `pid`, and the seconds `made` in which
the runtime made a session of the file. The questions are

    {"feeds": folder, "save": file}   loads the inputs NAME.npy, runs once, saves the first result -> {"seconds": s}
    {"calls": n, "warm": m}           -> {"seconds": [...], "processor": [...], "peak_mib": m}: elapsed, of the
                                      processor, and the peak memory of the process meanwhile
    {"profile": true}                 (ort) -> {"nodes": [[name, operator, seconds], ...]} in a separate session

A model whose caches are changed in place (its metadata name them) gets buffers with room for `ROOM` further tokens.
They are inputs and outputs of each run.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from bench.speed.peer import set_spinning
from bench.speed.truth import Array
from bench.speed.worker import memory
from tools.processes import serve

Run = Callable[[Mapping[str, Array]], Array]

ROOM = 64
"""The further tokens of a cache that is changed in place."""
PROFILED, FEWEST = 1.0, 3
"""The seconds of profiled runs, and the fewest of them."""


def ort_session(model: str, threads: int, profile: str = "", alone: bool = False) -> Any:
    """A session that knows our operators, also if the model has none of them; `alone` one that does not, so that the
    bodies run."""
    import onnxruntime as ort

    from fa_compiler.lowering.ort import register_custom_ops

    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    set_spinning(options)
    options.log_severity_level = 4
    if profile:
        options.enable_profiling, options.profile_file_prefix = True, profile
    if not alone:
        register_custom_ops(options)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def ort_run(session: Any) -> Run:
    """Runs a session; caches that are changed in place are bound as input and as output."""
    caches = json.loads(session.get_modelmeta().custom_metadata_map.get("fa_compiler.caches", "[]"))
    if not caches:
        return lambda feeds: session.run(None, dict(feeds))[0]
    bindings: dict[int, Any] = {}

    def run(feeds: Mapping[str, Array]) -> Array:
        if id(feeds) not in bindings:
            bindings[id(feeds)] = _bound(session, caches, feeds)
        session.run_with_iobinding(bindings[id(feeds)])
        result: Array = bindings[id(feeds)].get_outputs()[0].numpy()
        return result

    return run


def _bound(session: Any, caches: list[dict[str, Any]], feeds: Mapping[str, Array]) -> Any:
    """The inputs of a step in which the caches have the rows of `feeds`."""
    import onnxruntime as ort

    binding, buffers, lengths = session.io_binding(), {}, {}
    for cache in caches:
        past = feeds[cache["past"]]
        more = [(0, ROOM if axis == cache["axis"] else 0) for axis in range(past.ndim)]
        buffers[cache["past"]] = buffers[cache["present"]] = ort.OrtValue.ortvalue_from_numpy(np.pad(past, more))
        lengths[cache["length"]] = np.array([past.shape[cache["axis"]]])
    for value in session.get_inputs():
        given = buffers.get(value.name) or ort.OrtValue.ortvalue_from_numpy({**feeds, **lengths}[value.name])
        binding.bind_ortvalue_input(value.name, given)
    for value in session.get_outputs():
        if value.name in buffers:
            binding.bind_ortvalue_output(value.name, buffers[value.name])
        else:
            binding.bind_output(value.name)
    return binding


def in_ort(model: str, threads: int) -> tuple[str, Run]:
    """ONNX Runtime with all its optimisations."""
    import onnxruntime as ort

    return f"onnxruntime {ort.__version__}", ort_run(ort_session(model, threads))


def in_ort_alone(model: str, threads: int) -> tuple[str, Run]:
    """The same without our library."""
    import onnxruntime as ort

    return f"onnxruntime {ort.__version__}", ort_run(ort_session(model, threads, alone=True))


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


RUNTIMES = {
    "ort": ("onnxruntime", in_ort),
    "ort-alone": ("onnxruntime", in_ort_alone),
    "openvino": ("openvino", in_openvino),
}


class Bench:
    """One loaded model."""

    def __init__(self, runtime: str, threads: int, model: str) -> None:
        package, load = RUNTIMES[runtime]
        __import__(package)  # which is not a part of making a session
        self.threads = threads
        self.model = model
        start = time.perf_counter()
        self.version, self.run = load(model, threads)
        self.made = time.perf_counter() - start
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
        """The seconds of each call, elapsed and of the processor."""
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        for _ in range(warm):
            self.run(self.feeds)
        seconds, processor = [], []
        for _ in range(calls):
            start, own = time.perf_counter(), time.process_time()
            self.run(self.feeds)
            seconds.append(time.perf_counter() - start)
            processor.append(time.process_time() - own)
        return {"seconds": seconds, "processor": processor, "peak_mib": memory("VmHWM")}

    def profile(self) -> dict[str, Any]:
        """The median seconds of each node that ONNX Runtime runs. The first run does not count."""
        times: dict[tuple[str, str], list[float]] = defaultdict(list)
        with tempfile.TemporaryDirectory() as folder:
            session = ort_session(self.model, self.threads, str(Path(folder) / "profile"))
            run, runs, start = ort_run(session), 0, 0.0
            while runs <= FEWEST or time.perf_counter() - start < PROFILED:
                run(self.feeds)
                runs += 1
                start = start or time.perf_counter()
            for event in json.loads(Path(session.end_profiling()).read_text()):
                if event["cat"] == "Node" and event["name"].endswith("_kernel_time"):
                    name = event["name"].removesuffix("_kernel_time")
                    times[name, event["args"]["op_name"]].append(event["dur"] * 1e-6)
        return {"nodes": [[*key, statistics.median(each[1:])] for key, each in times.items()]}


def optimise(kind: str, heads: str, hidden: str, model: str, out: str) -> int:
    """Runs onnxruntime.transformers; returns the number of attention operators that it made."""
    from onnxruntime.transformers import optimizer

    sizes = {"num_heads": int(heads), "hidden_size": int(hidden)}
    made = optimizer.optimize_model(model, model_type=kind, opt_level=0, **sizes)
    made.save_model_to_file(out, use_external_data_format=True)
    return sum("Attention" in node.op_type for node in made.model.graph.node)


def main() -> None:
    """Serves until standard input ends, or optimises one file."""
    if sys.argv[1] == "optimise":
        print(optimise(*sys.argv[2:7]))
        return
    bench = Bench(sys.argv[1], int(sys.argv[2]), sys.argv[3])
    serve(bench.answer, {"version": bench.version, "made": bench.made, "pid": os.getpid()})


if __name__ == "__main__":
    main()
