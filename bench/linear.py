"""Measures linear attention and the short convolution beside ONNX Runtime's own operators and the machine's limit.

    python -m bench.linear --tokens 1,8,256,1024,4096 --heads 16 --threads 1
    python -m bench.linear --rules gated,gated_delta --gates head,key --dtype bfloat16 --peer-python TORCH/bin/python
    python -m bench.linear --rules gated_delta --gates head --layer --ggml LIBRARY --mnn-python MNN/bin/python

The time is the processor time with one thread, so other work on the machine does not count; with more threads it is the
elapsed time. The methods of a case run in turns, and the least time of each is shown, for one token and head.

    ours          FlashLinearAttention, ShortConvolution
    contrib       LinearAttention and CausalConvWithState of com.microsoft, which take float32 only
    opset 27      those of ai.onnx, which ONNX Runtime expands to other operators
    transformers  the chunked code of transformers in torch, in the interpreter of --peer-python (linear_peers.py), for
                  more than a few tokens
    ggml          ggml_gated_delta_net and ggml_ssm_conv of llama.cpp, from the shared library of --ggml
                  (linear_ggml.py), in float32
    MNN           LinearAttention of MNN, for a layer in float32, in the interpreter of --mnn-python (linear_mnn.py)

With --layers a step of so many layers is measured, too, each with a state of its own that is computed in place.

A `layer` (--layer) is a part of one of Qwen3-Next: the convolution with SiLU, and behind it the gated delta rule with a
gate for each head. Its states begin with zeros, as those of MNN do.

The limit of several tokens is the time of the multiply-adds of the recurrence without its decay: 6 Dk Dv operations for
each token and head with a correction, 4 Dk Dv without one, in float32, also where the processor multiplies bfloat16
faster. That of a layer leaves its convolution out. A chunked method needs more operations than that, 111,000 instead of
98,000 for 128 x 128 numbers in our chunks of 24 tokens. The limit of one token is the time of reading and writing the
state once, and that of the convolution of reading the input and writing the result.
Each result is compared with ours before it is timed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
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
PEERS = {"FlashLinearAttention": "LinearAttention", "ShortConvolution": "CausalConvWithState"}
"""The names of our operators in the other domains."""
FEW = 8
"""From one token to this number the state bounds the time."""

Run = Callable[[], np.ndarray]
Timed = Callable[[], float]
"""A run that returns its seconds."""


@dataclass(frozen=True)
class Case:
    """A model of one or more nodes and its inputs, and the operations and the bytes of its limit."""

    name: str
    nodes: Callable[[str], list[onnx.NodeProto]]
    """With our operators, or those of another domain in their places."""
    outputs: Sequence[str]
    """The first one is compared."""
    inputs: Mapping[str, np.ndarray]
    in_place: Mapping[str, str]
    """Outputs that are written where these inputs are."""
    heads: int
    units: int
    """Tokens times heads, or tokens times channels."""
    operations: float
    moved: float
    """The bytes that are read and written, where these are the limit."""


def node(
    op_type: str, domain: str, inputs: Mapping[str, str], outputs: Sequence[str], attrs: Mapping[str, Any]
) -> onnx.NodeProto:
    """One of our operators, or the one of this domain in its place. The inputs are names of tensors by those of the
    operator."""
    names = [name or "" for name in place_inputs(get(op_type), inputs)]
    return helper.make_node(op_type if domain == DOMAIN else PEERS[op_type], names, outputs, domain=domain, **attrs)


def single(op_type: str, inputs: Mapping[str, np.ndarray], attrs: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a case of one operator that say what runs."""
    names, outputs = {name: name for name in inputs}, get(op_type).output_names
    return {
        "nodes": lambda domain: [node(op_type, domain, names, outputs, attrs)],
        "outputs": list(outputs),
        "inputs": inputs,
        "in_place": {},
    }


def session_of(case: Case, domain: str, threads: int) -> Run:
    """A call of the model in its own session, with bound inputs. It returns the first output."""
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in case.inputs.items()
    ]
    results = [
        helper.make_tensor_value_info(name, declared[0].type.tensor_type.elem_type, None) for name in case.outputs
    ]
    opsets = [helper.make_opsetid("", 27)]
    if domain:
        opsets.append(helper.make_opsetid(domain, VERSION))
    graph = helper.make_graph(case.nodes(domain), "case", declared, results)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    if domain == DOMAIN:
        fa_compiler.register_custom_ops(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {name: ort_value(array.copy()) for name, array in case.inputs.items()}
    if not case.in_place:
        return lambda: from_ort(session.run_with_ort_values(list(case.outputs), feeds)[0])
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_ortvalue_input(name, value)
    for name in case.outputs:
        if name in case.in_place:
            binding.bind_ortvalue_output(name, feeds[case.in_place[name]])
        else:
            binding.bind_output(name)

    def run() -> np.ndarray:
        session.run_with_iobinding(binding)
        return binding.get_outputs()[0].numpy()

    return run


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
    return Case(
        name, **single("FlashLinearAttention", inputs, attrs), **limit(tokens, options, 6 if "beta" in inputs else 4)
    )


def step(rule: str, gate: str, options: argparse.Namespace) -> Case:
    """One token of a model of several such layers, each with a state of its own that is computed in place. Many states
    do not fit into a cache together, as those of a model, whose weights are read between two layers."""
    one, count = attention(rule, gate, 1, options), options.layers
    inputs = {name: array for name, array in one.inputs.items() if name != "past_state"}
    states = {f"past_state_{layer}": one.inputs["past_state"].copy() for layer in range(count)}

    def nodes(domain: str) -> list[onnx.NodeProto]:
        attrs = {"q_num_heads": options.heads, "kv_num_heads": options.heads, "update_rule": rule}
        return [
            node(
                "FlashLinearAttention",
                domain,
                {name: name for name in inputs} | {"past_state": f"past_state_{layer}"},
                [f"output_{layer}", f"present_state_{layer}"],
                attrs,
            )
            for layer in range(count)
        ]

    in_place = {f"present_state_{layer}": f"past_state_{layer}" for layer in range(count)}
    outputs = [*(f"output_{layer}" for layer in range(count)), *in_place]
    return Case(
        f"{one.name}, {count} layers",
        nodes,
        outputs,
        inputs | states,
        in_place,
        options.heads,
        count * options.heads,
        count * one.operations,
        count * one.moved,
    )


def limit(tokens: int, options: argparse.Namespace, operations: int) -> dict[str, Any]:
    """The fields of a case that say how fast it can be, with so many operations for each number of a state."""
    state = options.heads * options.size**2
    return {
        "heads": options.heads,
        "units": tokens * options.heads,
        "operations": float(operations * state * tokens),
        "moved": 2.0 * state * TYPES[options.dtype].itemsize if tokens <= FEW else 0.0,
    }


def convolution(tokens: int, options: argparse.Namespace) -> Case:
    """The convolution in front of query, key and value."""
    rng, channels, dtype = np.random.default_rng(0), 3 * options.heads * options.size, TYPES[options.dtype]
    inputs = {
        "input": rng.standard_normal((1, channels, tokens)).astype(dtype),
        "weight": rng.standard_normal((channels, 1, 4)).astype(dtype),
        "past_state": rng.standard_normal((1, channels, 3)).astype(dtype),
    }
    made = single("ShortConvolution", inputs, {"activation": "silu"})
    moved = 2.0 * channels * tokens * dtype.itemsize
    return Case("convolution", **made, heads=options.heads, units=tokens * channels, operations=0, moved=moved)


def layer(tokens: int, options: argparse.Namespace) -> Case:
    """The convolution, and the gated delta rule of what it makes. The weights keep the keys about as long as 1."""
    rng, heads, size, dtype = np.random.default_rng(0), options.heads, options.size, TYPES[options.dtype]
    channels = heads * size
    weight = rng.standard_normal((3, channels, 1, 4))
    weight[1] /= np.sqrt(size)
    inputs = {
        "input": rng.standard_normal((1, 3 * channels, tokens)),
        "weight": weight.reshape(-1, 1, 4),
        "columns": np.zeros((1, 3 * channels, 3)),
        "decay": -np.exp(rng.standard_normal((1, tokens, heads)) - 2),
        "beta": rng.uniform(0, 1, (1, tokens, heads)),
        "past_state": np.zeros((1, heads, size, size)),
    }
    attrs = {"q_num_heads": heads, "kv_num_heads": heads, "update_rule": "gated_delta"}
    parts = ["query", "key", "value"]

    def nodes(domain: str) -> list[onnx.NodeProto]:
        given = {"input": "input", "weight": "weight", "past_state": "columns"}
        operands = {name: name for name in [*parts, "decay", "beta", "past_state"]}
        return [
            node("ShortConvolution", domain, given, ["mixed", "present_columns"], {"activation": "silu"}),
            helper.make_node("Transpose", ["mixed"], ["rows"], perm=[0, 2, 1]),
            helper.make_node("Split", ["rows"], parts, axis=2, num_outputs=3),
            node("FlashLinearAttention", domain, operands, ["output", "present_state"], attrs),
        ]

    outputs = ["output", "present_state", "present_columns"]
    typed = {name: array.astype(dtype) for name, array in inputs.items()}
    return Case("layer", nodes, outputs, typed, {}, **limit(tokens, options, 6))


def methods(case: Case, threads: int, servers: Sequence[Server]) -> dict[str, Timed]:
    """The methods that take the case, each with its result compared with ours."""
    ours = session_of(case, DOMAIN, threads)
    made, expected = {"ours": timed(ours, threads)}, ours()
    for server in servers:
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
    """The methods of another process, each with its result compared with ours."""
    rule, _, gate = case.name.partition(", ")
    dtype = str(next(iter(case.inputs.values())).dtype)
    question = {"case": rule, "gate": gate, "heads": case.heads, "threads": threads, "type": dtype}
    question["few"] = case.units <= FEW * case.heads
    made: dict[str, Timed] = {}
    with tempfile.TemporaryDirectory() as name:
        inputs, result = Path(name) / "inputs.npz", Path(name) / "result.npy"
        np.savez(inputs, allow_pickle=False, **{key: each.astype(np.float32) for key, each in case.inputs.items()})
        for peer in server.ask(question | {"inputs": str(inputs)})["peers"]:
            server.ask({"result": peer, "to": str(result)})
            check(case, peer, np.load(result).reshape(expected.shape), expected, TOLERANCES[dtype])
            made[peer] = lambda peer=peer: float(server.ask({"time": peer})["seconds"])
    return made


def measure(case: Case, threads: int, seconds: float, servers: Sequence[Server] = ()) -> dict[str, float]:
    """The least time of each method in seconds. They run in turns for so many seconds."""
    return least(methods(case, threads, servers), seconds)


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
                if tokens == 1 and options.layers > 1:
                    yield tokens, step(rule, gate, options)
        if options.convolution:
            yield tokens, convolution(tokens, options)
        if options.layer:
            yield tokens, layer(tokens, options)


def helpers(options: argparse.Namespace) -> Iterator[list[str]]:
    """The commands of the helper processes that the command line selects."""
    if options.peer_python:
        yield module(options.peer_python, "bench.linear_peers")
    if options.ggml:
        yield module(sys.executable, "bench.linear_ggml", options.ggml)
    if options.mnn_python:
        yield module(options.mnn_python, "bench.linear_mnn")


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
    parser.add_argument("--layers", type=int, default=1, help="measure one token of so many layers, too")
    parser.add_argument("--convolution", action="store_true", help="measure the short convolution, too")
    parser.add_argument("--layer", action="store_true", help="measure the convolution and the rule behind it, too")
    parser.add_argument("--ggml", metavar="LIBRARY", help="a shared library of ggml (linear_ggml.py)")
    parser.add_argument("--mnn-python", metavar="PYTHON", help="an interpreter that has MNN")
    options = parser.parse_args()
    print(f"{'threads':>7}  {'tokens':>6}  {'case':26}  {'method':12}  ns a token and head  of the limit  times ours")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        machine = Machine.compile(Path(folder))
        servers = [stack.enter_context(Server(command, TIMEOUT)) for command in helpers(options)]
        for threads in options.threads:
            rate = max(multiply_adds(machine, threads) for _ in range(5))
            for tokens, case in cases(options):
                measured = measure(case, threads, options.seconds, servers)
                least = reading(machine, case.moved, threads) if case.moved else case.operations / rate
                for method, seconds in measured.items():
                    print(
                        f"{threads:7}  {tokens:6}  {case.name:26}  {method:12}  {1e9 * seconds / case.units:19.2f}"
                        f"  {least / seconds:12.1%}  {seconds / measured['ours']:10.2f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
