"""Measures linear attention and the short convolution beside ONNX Runtime's own operators and the machine's limit.

    python -m bench.linear --tokens 1,8,256,1024,4096 --heads 16 --threads 1
    python -m bench.linear --rules gated,gated_delta --gates head,key --dtype bfloat16 --peer-python TORCH/bin/python

The time is the processor time with one thread, so other work on the machine does not count; with more threads it is the
elapsed time. The methods of a case run in turns, and the least time of each is shown, for one token and head.

    ours          FlashLinearAttention, ShortConvolution
    contrib       LinearAttention and CausalConvWithState of com.microsoft, which take float32 only
    opset 27      those of ai.onnx, which ONNX Runtime expands to other operators
    transformers  the chunked code of transformers in torch, in the interpreter of --peer-python (linear_peers.py), for
                  more than a few tokens

The limit of several tokens is the time of the multiply-adds of the recurrence without its decay: 6 Dk Dv operations for
each token and head with a correction, 4 Dk Dv without one, in float32, also where the processor multiplies bfloat16
faster. A chunked method needs more operations than that, 111,000 instead of 98,000 for 128 x 128 numbers in our chunks
of 24 tokens. The limit of one token is the
time of reading and writing the state once, and that of the convolution of reading the input and writing the result.
Each result is compared with ours before it is timed.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import helper

import fa_compiler
from bench.sparse import multiply_adds, ort_value
from bench.speed.limits import Machine
from fa_compiler.lowering.ort.eager import from_ort
from fa_compiler.op_registry import DOMAIN, VERSION, get, place_inputs
from tools.processes import Server, module

TYPES = {"float32": np.dtype(np.float32), "float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOLERANCE = 1e-4
"""The allowed difference of float32 results, relative to the largest number: sums of thousands of products in another
order."""
TOLERANCES = {"float32": TOLERANCE, "float16": 2.0**-9, "bfloat16": 2.0**-6}
"""The same by type for peers that round a result of 16 bits, and in bfloat16 other operands, too."""
TIMEOUT = 600.0
"""Seconds in which a peer has to answer."""
FEW = 8
"""From one token to this number the state bounds the time."""

Run = Callable[[], np.ndarray]
Timed = Callable[[], float]
"""A run that returns its seconds."""


@dataclass(frozen=True)
class Case:
    """Inputs and attributes of a call, and the operations and the bytes of its limit."""

    name: str
    op_type: str
    peer: str
    inputs: Mapping[str, np.ndarray]
    attrs: Mapping[str, Any]
    units: int
    """Tokens times heads, or tokens times channels."""
    operations: float
    moved: float
    """The bytes that are read and written, where these are the limit."""


def session_of(case: Case, domain: str, threads: int) -> Run:
    """A call of the operator in its own session, with bound inputs. It returns the first output."""
    own = domain == DOMAIN
    op_type = case.op_type if own else case.peer
    placed = place_inputs(get(case.op_type), dict(case.inputs))
    names = ["" if array is None else f"input_{place}" for place, array in enumerate(placed)]
    outputs = list(get(case.op_type).output_names)
    node = helper.make_node(op_type, names, outputs, domain=domain, **case.attrs)
    arrays = {name: array for name, array in zip(names, placed, strict=True) if array is not None}
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in arrays.items()
    ]
    kind = helper.np_dtype_to_tensor_dtype(placed[0].dtype)
    results = [helper.make_tensor_value_info(name, kind, None) for name in outputs]
    opsets = [helper.make_opsetid("", 27)]
    if domain:
        opsets.append(helper.make_opsetid(domain, VERSION))
    model = helper.make_model(
        helper.make_graph([node], op_type, declared, results), opset_imports=opsets, ir_version=10
    )
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if own:
        fa_compiler.register_custom_ops(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {name: ort_value(array) for name, array in arrays.items()}
    return lambda: from_ort(session.run_with_ort_values(outputs, feeds)[0])


def attention(rule: str, gate: str, tokens: int, options: argparse.Namespace) -> Case:
    """A prompt or a step of the sizes of Qwen3-Next."""
    rng, heads, size, dtype = np.random.default_rng(0), options.heads, options.size, TYPES[options.dtype]

    def rows(columns: int) -> np.ndarray:
        return rng.standard_normal((1, tokens, heads, columns))

    key = rows(size)
    key /= np.sqrt((key**2).sum(axis=-1, keepdims=True))
    inputs = {"query": rows(size), "key": key, "value": rows(size)}
    if rule.startswith("gated"):
        inputs["decay"] = -np.exp(rng.standard_normal((1, tokens, heads, size if gate == "key" else 1)) - 2)
    if rule.endswith("delta"):
        inputs["beta"] = rng.uniform(0, 1, (1, tokens, heads, 1))
    inputs = {name: array.reshape(1, tokens, -1).astype(dtype) for name, array in inputs.items()}
    inputs["past_state"] = rng.standard_normal((1, heads, size, size)).astype(dtype)
    attrs = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": rule}
    name = rule + (f", {gate}" if "decay" in inputs else "")
    operations = (6.0 if "beta" in inputs else 4.0) * size * size * tokens * heads
    moved = 2.0 * heads * size * size * dtype.itemsize if tokens <= FEW else 0.0
    return Case(name, "FlashLinearAttention", "LinearAttention", inputs, attrs, tokens * heads, operations, moved)


def convolution(tokens: int, options: argparse.Namespace) -> Case:
    """The convolution in front of query, key and value."""
    rng, channels, dtype = np.random.default_rng(0), 3 * options.heads * options.size, TYPES[options.dtype]
    inputs = {
        "input": rng.standard_normal((1, channels, tokens)).astype(dtype),
        "weight": rng.standard_normal((channels, 1, 4)).astype(dtype),
        "past_state": rng.standard_normal((1, channels, 3)).astype(dtype),
    }
    moved = 2.0 * channels * tokens * dtype.itemsize
    units = tokens * channels
    return Case(
        "convolution", "ShortConvolution", "CausalConvWithState", inputs, {"activation": "silu"}, units, 0, moved
    )


def methods(case: Case, threads: int, server: Server | None) -> dict[str, Timed]:
    """The methods that take the case, each with its result compared with ours."""
    ours = session_of(case, DOMAIN, threads)
    made, expected = {"ours": timed(ours, threads)}, ours()
    if server is not None and case.operations and not case.moved:
        made |= peers(case, threads, server, expected.astype(np.float32))
    if case.inputs[next(iter(case.inputs))].dtype != np.float32:
        return made
    for name, domain in (("contrib", "com.microsoft"), ("opset 27", "")):
        try:
            run = session_of(case, domain, threads)
        except (RuntimeError, onnx.checker.ValidationError) as error:
            print(f"# {name} does not take {case.name}: {str(error).splitlines()[0][:100]}")
            continue
        check(case, name, run(), expected, TOLERANCE)
        made[name] = timed(run, threads)
    return made


def check(case: Case, name: str, found: np.ndarray, expected: np.ndarray, tolerance: float) -> None:
    """Raise SystemExit if a result differs from ours by more than this, relative to the largest number."""
    difference = np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max()
    if not difference <= tolerance:
        raise SystemExit(f"{case.name}: the result of {name} differs from ours by {difference:.1e}")


def peers(case: Case, threads: int, server: Server, expected: np.ndarray) -> dict[str, Timed]:
    """The methods of another interpreter, each with its result compared with ours."""
    rule, _, gate = case.name.partition(", ")
    dtype = str(case.inputs["query"].dtype)
    question = {"case": rule, "gate": gate, "heads": case.attrs["q_num_heads"], "threads": threads, "type": dtype}
    made: dict[str, Timed] = {}
    with tempfile.TemporaryDirectory() as name:
        inputs, result = Path(name) / "inputs.npz", Path(name) / "result.npy"
        np.savez(inputs, allow_pickle=False, **{key: each.astype(np.float32) for key, each in case.inputs.items()})
        for peer in server.ask(question | {"inputs": str(inputs)})["peers"]:
            server.ask({"result": peer, "to": str(result)})
            check(case, peer, np.load(result).reshape(expected.shape), expected, TOLERANCES[dtype])
            made[peer] = lambda peer=peer: float(server.ask({"time": peer})["seconds"])
    return made


def measure(case: Case, threads: int, seconds: float, server: Server | None = None) -> dict[str, float]:
    """The least time of each method in seconds. They run in turns for so many seconds."""
    return least(methods(case, threads, server), seconds)


def timed(run: Callable[[], Any], threads: int) -> Timed:
    """A call that runs once and returns the seconds that it took. With one thread it is the processor's time, so that
    other work on the machine does not count."""
    clock = time.process_time if threads == 1 else time.perf_counter

    def seconds() -> float:
        start = clock()
        run()
        return clock() - start

    return seconds


def least(runs: Mapping[str, Timed], seconds: float) -> dict[str, float]:
    """The least time of each run in seconds, in turns for so many seconds and three times at least."""
    best = dict.fromkeys(runs, float("inf"))
    end, rounds = time.monotonic() + seconds, 0
    while rounds < 3 or time.monotonic() < end:
        rounds += 1
        for name, run in runs.items():
            best[name] = min(best[name], run())
    return best


def reading(machine: Machine, moved: float, threads: int) -> float:
    """The least seconds in which so many bytes are read."""
    halves = [np.ones(int(moved) // 8, np.float32) for _ in range(2)]
    return min(machine.read(*halves, threads) for _ in range(20))


def cases(options: argparse.Namespace) -> Iterator[tuple[int, Case]]:
    """The cases that the command line selects, each with its tokens."""
    for tokens in options.tokens:
        for rule in options.rules:
            for gate in options.gates if rule.startswith("gated") else ["head"]:
                yield tokens, attention(rule, gate, tokens, options)
        if options.convolution:
            yield tokens, convolution(tokens, options)


def main() -> None:
    """Prints a line for each method of each case."""

    def listed(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
        return lambda text: [kind(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=listed(int), default=[1, 8, 256, 1024, 4096], help="separated by commas")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--size", type=int, default=128, help="of a head of query, key and value")
    parser.add_argument("--rules", type=listed(str), default=["gated", "gated_delta"], help="separated by commas")
    parser.add_argument("--gates", type=listed(str), default=["head", "key"], help="head, key")
    parser.add_argument("--threads", type=listed(int), default=[1], help="numbers of threads, separated by commas")
    parser.add_argument("--dtype", choices=[*TYPES], default="float32")
    parser.add_argument("--seconds", type=float, default=3.0, help="for each case")
    parser.add_argument("--peer-python", metavar="PYTHON", help="an interpreter that has torch and transformers")
    parser.add_argument("--convolution", action="store_true", help="measure the short convolution, too")
    options = parser.parse_args()
    print(f"{'threads':>7}  {'tokens':>6}  {'case':20}  {'method':12}  ns a token and head  of the limit  times ours")
    helper = module(options.peer_python or "", "bench.linear_peers")
    with tempfile.TemporaryDirectory() as folder, Server(helper, TIMEOUT) as running:
        machine, server = Machine.compile(Path(folder)), running if options.peer_python else None
        for threads in options.threads:
            rate = max(multiply_adds(machine, threads) for _ in range(5))
            for tokens, case in cases(options):
                measured = measure(case, threads, options.seconds, server)
                least = reading(machine, case.moved, threads) if case.moved else case.operations / rate
                for method, seconds in measured.items():
                    print(
                        f"{threads:7}  {tokens:6}  {case.name:20}  {method:12}  {1e9 * seconds / case.units:19.2f}"
                        f"  {least / seconds:12.1%}  {seconds / measured['ours']:10.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
