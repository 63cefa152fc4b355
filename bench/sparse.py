"""Measures the sparse operators beside torch's dense masked and gathered formulations and the machine's limit.

    python -m bench.sparse --keys 16384 --heads 16 --rows 64 --selected 2048 --peer-python TORCH/bin/python
    python -m bench.sparse --keys 16384,65536,131072 --only attention,gradient --threads 1,2 --dtype bfloat16

The time is the processor time with one thread, so other work on the machine does not count; with more threads it is the
elapsed time. The methods of a case run in turns, and the least time of each is shown, for one query row. The limit is
the time of the fused multiply-adds for the selected pairs, in float32 also for bfloat16: 2 (D + Dr + Dv) operations for
each pair and head for attention, 5 products instead of 2 for its gradient, 2 D for the indexer's scores and 6 D for its
gradient. MB is the peak memory of a method's first run, with its results but without its inputs.

Each result is compared with torch's before it is timed. torch runs in the interpreter of --peer-python
(sparse_peers.py); without it, only our operators are timed. The sums of a gradient are over all keys, so with few rows
it seems slower than it is.
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
import onnxruntime as ort
from onnx import TensorProto, helper

import fa_compiler
from bench.speed.limits import Machine
from bench.speed.worker import grown
from bench.speed.workers import TIMEOUT
from fa_compiler import ops
from fa_compiler.op_registry import DOMAIN, VERSION, full_attrs, get, place_inputs
from tools.processes import Server, module

LATENT, ROPE = 512, 64
INDEX_HEADS, INDEX_WIDTH = 64, 128
GRADIENTS = ("d_query", "d_key", "d_value", "d_query_rope", "d_key_rope")
TYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
TOLERANCES = {"float32": 1e-3, "bfloat16": 4e-2}
"""The allowed difference, relative to the largest number. float32 sums of 2048 products have another order; with
bfloat16 torch also rounds scores and probabilities to three digits."""

Arrays = dict[str, np.ndarray]
Run = Callable[[], np.ndarray]


@dataclass(frozen=True)
class Case:
    """Our operator with its `inputs`, which torch gets, too; the number of operations of the limit; and the scale of
    the scores."""

    name: str
    operations: float
    ours: Run
    inputs: Arrays
    scale: float = 1.0


def prepared(op_type: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], *outputs: str, threads: int) -> Run:
    """A call of an operator in its own session, with bound inputs; equal arrays share memory. It returns the first
    output as float32."""
    spec = get(op_type)
    placed = place_inputs(spec, dict(inputs))
    names = ["" if array is None else f"input_{place}" for place, array in enumerate(placed)]
    wanted = [entry.name if entry.name in outputs else "" for entry in spec.outputs]
    node = helper.make_node(op_type, names, wanted, domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in full_attrs(spec, attrs).items())
    widened = helper.make_node("Cast", [outputs[0]], ["first"], to=TensorProto.FLOAT)
    arrays = {name: array for name, array in zip(names, placed, strict=True) if array is not None}
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in arrays.items()}
    declared = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    results = [helper.make_tensor_value_info("first", TensorProto.FLOAT, None)]
    results += [helper.make_tensor_value_info(name, kinds[names[0]], None) for name in outputs[1:]]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    graph = helper.make_graph([node, widened], op_type, declared, results)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    fa_compiler.register_custom_ops(options)
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    tensors = {id(array): ort_value(array) for array in arrays.values()}
    feeds = {name: tensors[id(array)] for name, array in arrays.items()}
    return lambda: np.asarray(session.run_with_ort_values(["first", *outputs[1:]], feeds)[0].numpy())


def ort_value(array: np.ndarray) -> ort.OrtValue:
    """An array as a tensor of a session."""
    if array.dtype != TYPES["bfloat16"]:
        return ort.OrtValue.ortvalue_from_numpy(array)
    return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)


def lists(rng: np.random.Generator, rows: int, keys: int, selected: int) -> np.ndarray:
    """A list of distinct keys for each row, in random order as from an indexer: no prefetcher can predict it."""
    return np.stack([rng.permutation(keys)[:selected] for _ in range(rows)]).astype(np.int32)[:, None]


def attention(rng: np.random.Generator, keys: int, options: argparse.Namespace, threads: int) -> Iterator[Case]:
    """Attention to the selected latents, and its gradient."""
    rows, heads, dtype = options.rows, options.heads, TYPES[options.dtype]
    query, latent, rope, key_rope, d_out = (
        rng.standard_normal(shape).astype(dtype)
        for shape in (
            (rows, heads, LATENT), (keys, 1, LATENT), (rows, heads, ROPE), (keys, 1, ROPE), (rows, heads, LATENT)
        )
    )  # fmt: skip
    inputs = {
        "query": query,
        "key": latent,
        "value": latent,
        "sparse_indices": lists(rng, rows, keys, options.selected),
        "query_rope": rope,
        "key_rope": key_rope,
        "actual_seq_lengths_query": np.array([rows], np.int32),
        "actual_seq_lengths_kv": np.array([keys], np.int32),
    }
    scale = (LATENT + ROPE) ** -0.5
    shared = {"scale_value": scale, "sparse_block_size": 1, "sparse_mode": 0}
    forward = shared | {"layout_query": "TND", "layout_kv": "TND", "attention_mode": 2, "return_softmax_lse": True}
    pairs = rows * heads * options.selected
    if "attention" in options.only:
        ours = prepared("SparseFlashAttention", inputs, forward, "attention_out", threads=threads)
        yield Case("attention", pairs * 2 * (2 * LATENT + ROPE), ours, inputs, scale)
    if "gradient" not in options.only:
        return
    result = ops.run("SparseFlashAttention", inputs, forward)
    given = inputs | {"d_out": d_out, "out": result["attention_out"]}
    given |= {name: result[name] for name in ("softmax_max", "softmax_sum")}
    ours = prepared("SparseFlashAttentionGrad", given, shared | {"layout": "TND"}, *GRADIENTS, threads=threads)
    yield Case("gradient", pairs * 2 * (3 * (LATENT + ROPE) + 2 * LATENT), ours, given, scale)


def indexer(rng: np.random.Generator, keys: int, options: argparse.Namespace, threads: int) -> Iterator[Case]:
    """Scores of all keys and the best of them; the gradient of the scores of listed keys."""
    rows, selected, dtype = options.rows, options.selected, TYPES[options.dtype]
    inputs = {
        "query": rng.standard_normal((1, rows, INDEX_HEADS, INDEX_WIDTH)).astype(dtype),
        "key": rng.standard_normal((1, keys, 1, INDEX_WIDTH)).astype(dtype),
        "weights": rng.standard_normal((1, rows, INDEX_HEADS)).astype(dtype),
    }
    if "indexer" in options.only:
        attrs: dict[str, Any] = {"sparse_count": selected, "sparse_mode": 0, "return_values": True}
        values = prepared("LightningIndexer", inputs, attrs, "sparse_values", threads=threads)
        yield Case("indexer", rows * keys * INDEX_HEADS * 2.0 * INDEX_WIDTH, lambda: values()[:, :, 0], inputs)
    if "index-grad" not in options.only:
        return
    given = inputs | {
        "dy": rng.standard_normal((1, rows, selected)).astype(dtype),
        "sparse_indices": lists(rng, rows, keys, selected)[None],
    }
    attrs = {"headNum": INDEX_HEADS, "layout": "BSND", "sparseMode": 0}
    gradient = prepared("LightningIndexerGrad", given, attrs, "dq", "dk", "dweights", threads=threads)
    yield Case("index-grad", rows * selected * INDEX_HEADS * 6.0 * INDEX_WIDTH, gradient, given)


def multiply_adds(machine: Machine, threads: int) -> float:
    """The operations in a second of the time that `measure` counts. The machine's own rate is by elapsed time, which
    other work reduces."""
    clock, processor = time.perf_counter(), time.process_time()
    rate = machine.rate("fma_flops", threads)
    if threads > 1:
        return rate
    return rate * (time.perf_counter() - clock) / (time.process_time() - processor)


def measure(
    case: Case, server: Server | None, options: argparse.Namespace, threads: int
) -> dict[str, tuple[float, float]]:
    """The least time of each method in seconds, and its memory in MB. Its result is compared with ours first."""
    first, mb = grown(case.ours)
    memory = {"ours": mb}
    with tempfile.TemporaryDirectory() as name:
        if server is not None:
            inputs, result = Path(name) / "inputs.npz", Path(name) / "result.npy"
            wide = {key: a.astype(np.float32) if a.dtype in TYPES.values() else a for key, a in case.inputs.items()}
            np.savez(inputs, allow_pickle=False, **wide)
            question = {"case": case.name, "inputs": str(inputs), "scale": case.scale, "selected": options.selected}
            peers = server.ask(question | {"threads": threads, "bfloat16": options.dtype == "bfloat16"})["peers"]
            for peer in peers:
                memory[peer] = server.ask({"result": peer, "to": str(result)})["mb"]
                tolerance = TOLERANCES[options.dtype]
                if not np.allclose(np.load(result), first, rtol=tolerance, atol=tolerance * np.abs(first).max()):
                    raise SystemExit(f"{case.name}: the result of {peer} differs from ours")
    best = dict.fromkeys(memory, float("inf"))
    clock = time.process_time if threads == 1 else time.perf_counter
    for _ in range(options.rounds):
        for method in best:
            if server is not None and method != "ours":
                seconds = server.ask({"time": method})["seconds"]
            else:
                start = clock()
                case.ours()
                seconds = clock() - start
            best[method] = min(best[method], seconds)
    return {method: (best[method], memory[method]) for method in best}


CASES = ("attention", "gradient", "indexer", "index-grad")


def cases(keys: int, options: argparse.Namespace, threads: int) -> Iterator[Case]:
    """The cases for a sequence length that the command line selects."""
    rng = np.random.default_rng(0)
    if {"attention", "gradient"} & options.only:
        yield from attention(rng, keys, options, threads)
    if {"indexer", "index-grad"} & options.only:
        yield from indexer(rng, keys, options, threads)


def main() -> None:
    """Prints a line for each method of each case."""

    def numbers(text: str) -> list[int]:
        return [int(each) for each in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=numbers, default=[16384], help="sequence lengths, separated by commas")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="query tokens of a run")
    parser.add_argument("--selected", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=numbers, default=[1], help="numbers of threads, separated by commas")
    parser.add_argument("--dtype", choices=[*TYPES], default="float32")
    parser.add_argument("--only", type=lambda text: set(text.split(",")), default=set(CASES), help=", ".join(CASES))
    parser.add_argument("--peer-python", metavar="PYTHON", help="an interpreter that has torch")
    options = parser.parse_args()
    print(f"{'threads':>7}  {'keys':>7}  {'':10}  {'method':26}  ms a row  of the limit  times ours  MB")
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine.compile(Path(folder))
        for threads in options.threads:
            limit = max(multiply_adds(machine, threads) for _ in range(10))
            with Server(module(options.peer_python or "", "bench.sparse_peers"), TIMEOUT) as server:
                for keys in options.keys:
                    for case in cases(keys, options, threads):
                        measured = measure(case, server if options.peer_python else None, options, threads)
                        for method, (seconds, memory) in measured.items():
                            share, ratio = case.operations / seconds / limit, seconds / measured["ours"][0]
                            print(
                                f"{threads:7}  {keys:7}  {case.name:10}  {method:26}"
                                f"  {1e3 * seconds / options.rows:8.3f}  {share:12.1%}  {ratio:10.2f}  {memory:4.0f}",
                                flush=True,
                            )


if __name__ == "__main__":
    main()
