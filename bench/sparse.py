"""Speed of the sparse family beside torch's dense masked and gathered formulations and beside the machine's limit.

    python bench/sparse.py --keys 16384 --heads 16 --rows 64 --selected 2048
    python bench/sparse.py --keys 16384,65536,131072 --only attention --threads 2

Processor time on one thread, so that other work on the machine does not count; the clock on more. Every method of a
case is run in turn, and the least of its times is shown, per query row. The limit is that of fused multiply-adds
(float32) for the selected pairs: 2 (D + Dr + Dv) operations a pair and head for attention, 5 products instead of 2 for
its gradient, 2 D for the indexer's scores and 6 D for its gradient. Memory is what a method's first run took at most
beside its inputs, its results included. Each result is compared with torch's before it is timed; without torch our own
are timed alone. A gradient's sums are as long as the keys: with few rows it looks slower than it is.
"""

from __future__ import annotations

import argparse
import ctypes
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

import fa_compiler
from bench.speed.limits import Machine
from fa_compiler import ops
from fa_compiler.op_registry import DOMAIN, VERSION, full_attrs, get, place_inputs

LATENT, ROPE = 512, 64
INDEX_HEADS, INDEX_WIDTH = 64, 128
GRADIENTS = ("d_query", "d_key", "d_value", "d_query_rope", "d_key_rope")
Run = Callable[[], Any]
Case = tuple[str, float, dict[str, Run]]


def prepared(op_type: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], *outputs: str, threads: int = 1) -> Run:
    """An operator in a session of its own, its inputs already there (the same array is the same memory); gives the
    first of the outputs."""
    spec = get(op_type)
    placed = place_inputs(spec, dict(inputs))
    names = ["" if array is None else f"input_{place}" for place, array in enumerate(placed)]
    wanted = [entry.name if entry.name in outputs else "" for entry in spec.outputs]
    node = helper.make_node(op_type, names, wanted, domain=DOMAIN)
    node.attribute.extend(helper.make_attribute(name, value) for name, value in full_attrs(spec, attrs).items())
    arrays = {name: array for name, array in zip(names, placed, strict=True) if array is not None}
    declared = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), None)
        for name, array in arrays.items()
    ]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(DOMAIN, VERSION)]
    model = helper.make_model(helper.make_graph([node], op_type, declared, results), opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    fa_compiler.register_custom_ops(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    tensors = {id(array): ort.OrtValue.ortvalue_from_numpy(array) for array in arrays.values()}
    feeds = {name: tensors[id(array)] for name, array in arrays.items()}
    return lambda: session.run_with_ort_values(list(outputs), feeds)[0].numpy()


def lists(rng: np.random.Generator, rows: int, keys: int, selected: int) -> np.ndarray:
    """A list of distinct keys for each row, in the order of an indexer: none that memory or a cache could guess."""
    return np.stack([rng.permutation(keys)[:selected] for _ in range(rows)]).astype(np.int32)[:, None]


def attention(
    rng: np.random.Generator, keys: int, heads: int, rows: int, selected: int, threads: int
) -> Iterator[Case]:
    """Attention to the selected latents, and its gradient."""
    query, latent, rope, key_rope = (
        rng.standard_normal(shape).astype(np.float32)
        for shape in ((rows, heads, LATENT), (keys, 1, LATENT), (rows, heads, ROPE), (keys, 1, ROPE))
    )
    inputs: dict[str, Any] = {
        "query": query,
        "key": latent,
        "value": latent,
        "sparse_indices": lists(rng, rows, keys, selected),
        "query_rope": rope,
        "key_rope": key_rope,
        "actual_seq_lengths_query": np.array([rows], np.int32),
        "actual_seq_lengths_kv": np.array([keys], np.int32),
    }
    scale = (LATENT + ROPE) ** -0.5
    shared = {"scale_value": scale, "sparse_block_size": 1, "sparse_mode": 0}
    forward = shared | {"layout_query": "TND", "layout_kv": "TND", "attention_mode": 2, "return_softmax_lse": True}

    ours = prepared("SparseFlashAttention", inputs, forward, "attention_out", threads=threads)
    pairs = rows * heads * selected
    yield "attention", pairs * 2 * (2 * LATENT + ROPE), {"ours": ours} | _torch_attention(inputs, scale)
    result = ops.run("SparseFlashAttention", inputs, forward)
    given = inputs | {"d_out": rng.standard_normal(query.shape).astype(np.float32), "out": result["attention_out"]}
    given |= {name: result[name] for name in ("softmax_max", "softmax_sum")}

    gradient = prepared("SparseFlashAttentionGrad", given, shared | {"layout": "TND"}, *GRADIENTS, threads=threads)
    operations = pairs * 2 * (3 * (LATENT + ROPE) + 2 * LATENT)
    yield "gradient", operations, {"ours": gradient} | _torch_gradient(given, scale)


def indexer(rng: np.random.Generator, keys: int, rows: int, selected: int, threads: int) -> Iterator[Case]:
    """Scores of all keys and the best of them; the gradient of the scores of listed keys."""
    inputs = {
        "query": rng.standard_normal((1, rows, INDEX_HEADS, INDEX_WIDTH)).astype(np.float32),
        "key": rng.standard_normal((1, keys, 1, INDEX_WIDTH)).astype(np.float32),
        "weights": rng.standard_normal((1, rows, INDEX_HEADS)).astype(np.float32),
    }

    attrs = {"sparse_count": selected, "sparse_mode": 0, "return_values": True}
    values = prepared("LightningIndexer", inputs, attrs, "sparse_values", threads=threads)

    def ours() -> Any:
        return values()[0, :, 0]

    peers: dict[str, Run] = {}
    if (torch := _torch()) is not None:
        q, k, w = (torch.from_numpy(inputs[name]) for name in ("query", "key", "weights"))

        def dense() -> Any:
            scores = torch.einsum("bshd,btnd->bsht", q, k).relu_()
            return torch.einsum("bsh,bsht->bst", w, scores).topk(selected).values[0].numpy()

        peers["torch"] = dense
    yield "indexer", rows * keys * INDEX_HEADS * 2.0 * INDEX_WIDTH, {"ours": ours} | peers
    given = inputs | {
        "dy": rng.standard_normal((1, rows, selected)).astype(np.float32),
        "sparse_indices": lists(rng, rows, keys, selected)[None],
    }
    attrs = {"headNum": INDEX_HEADS, "layout": "BSND", "sparseMode": 0}
    gradient = prepared("LightningIndexerGrad", given, attrs, "dq", "dk", "dweights", threads=threads)
    operations = rows * selected * INDEX_HEADS * 6.0 * INDEX_WIDTH
    yield "index grad", operations, {"ours": gradient} | _torch_index_gradient(given)


def _torch() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch


def _torch_attention(inputs: dict[str, Any], scale: float) -> dict[str, Run]:
    torch = _torch()
    if torch is None:
        return {}
    query = torch.from_numpy(np.concatenate([inputs["query"], inputs["query_rope"]], -1))
    key = torch.from_numpy(np.concatenate([inputs["key"], inputs["key_rope"]], -1)[:, 0])
    value = torch.from_numpy(inputs["value"][:, 0])
    index = torch.from_numpy(inputs["sparse_indices"][:, 0].astype(np.int64))

    def dense() -> Any:
        hidden = torch.ones(len(query), len(key), dtype=torch.bool).scatter_(1, index, False)
        scores = (query @ key.T * scale).masked_fill_(hidden[:, None], float("-inf"))
        return (scores.softmax(-1) @ value).numpy()

    def gathered() -> Any:
        scores = query @ key[index].transpose(1, 2) * scale
        return (scores.softmax(-1) @ value[index]).numpy()

    return {"torch, masked": dense, "torch, gathered": gathered}


def _torch_gradient(given: dict[str, Any], scale: float) -> dict[str, Run]:
    torch = _torch()
    if torch is None:
        return {}
    query = torch.from_numpy(np.concatenate([given["query"], given["query_rope"]], -1)).requires_grad_()
    key = torch.from_numpy(np.concatenate([given["key"], given["key_rope"]], -1)[:, 0]).requires_grad_()
    value = torch.from_numpy(given["value"][:, 0].copy()).requires_grad_()
    index = torch.from_numpy(given["sparse_indices"][:, 0].astype(np.int64))
    d_out = torch.from_numpy(given["d_out"])

    def gathered() -> Any:
        query.grad = key.grad = value.grad = None
        scores = query @ key[index].transpose(1, 2) * scale
        (scores.softmax(-1) @ value[index]).backward(d_out)
        return query.grad[..., :LATENT].numpy()

    return {"torch, gathered (both ways)": gathered}


def _torch_index_gradient(given: dict[str, Any]) -> dict[str, Run]:
    torch = _torch()
    if torch is None:
        return {}
    query, key, weights = (torch.from_numpy(given[name][0]).requires_grad_() for name in ("query", "key", "weights"))
    index = torch.from_numpy(given["sparse_indices"][0, :, 0].astype(np.int64))
    back = torch.from_numpy(given["dy"][0])

    def gathered() -> Any:
        query.grad = key.grad = weights.grad = None
        products = (query @ key[:, 0][index].transpose(1, 2)).relu()
        (products * weights[..., None]).sum(1).backward(back)
        return query.grad.numpy()[None]

    return {"torch, gathered (both ways)": gathered}


def multiply_adds(machine: Machine, threads: int) -> float:
    """Operations in a second of what `measure` counts; the machine's own rate is by the clock, which other work uses,
    too."""
    clock, processor = time.perf_counter(), time.process_time()
    rate = machine.rate("fma_flops", threads)
    if threads > 1:
        return rate
    return rate * (time.perf_counter() - clock) / (time.process_time() - processor)


def resident(field: str) -> float:
    """Megabytes of this process as Linux counts them."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) / 1024


def measure(methods: dict[str, Run], rounds: int, threads: int) -> dict[str, tuple[float, float]]:
    """The least time of each method, in seconds, after its result was found equal to the others', and its memory."""
    results, memory = {}, {}
    for name, method in methods.items():
        ctypes.CDLL(None).malloc_trim(0)  # or memory of an earlier method would not count
        Path("/proc/self/clear_refs").write_text("5")  # forgets the highest size so far
        before = resident("VmRSS")
        results[name] = np.asarray(method())
        memory[name] = resident("VmHWM") - before
    first = results["ours"]
    for name, result in results.items():
        if not np.allclose(result, first, rtol=1e-3, atol=1e-3 * np.abs(first).max()):
            raise SystemExit(f"{name} gives something else than ours")
    best = dict.fromkeys(methods, float("inf"))
    clock = time.process_time if threads == 1 else time.perf_counter
    for _ in range(rounds):
        for name, method in methods.items():
            start = clock()
            method()
            best[name] = min(best[name], clock() - start)
    return {name: (best[name], memory[name]) for name in methods}


def cases(keys: int, options: argparse.Namespace) -> Iterator[Case]:
    """The cases of a sequence length that the command line asks for, one after the other."""
    rng = np.random.default_rng(0)
    if options.only != "indexer":
        yield from attention(rng, keys, options.heads, options.rows, options.selected, options.threads)
    if options.only != "attention":
        yield from indexer(rng, keys, options.rows, options.selected, options.threads)


def main() -> None:
    """Prints a line for each method of each case."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", default="16384", help="sequence lengths, separated by commas")
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--rows", type=int, default=64, help="query tokens of a run")
    parser.add_argument("--selected", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", choices=["attention", "indexer"])
    options = parser.parse_args()
    threads = options.threads
    if (torch := _torch()) is not None:
        torch.set_num_threads(threads)
    print(f"{'keys':>7}  {'':10}  {'method':27}  ms a row  of the limit  times ours  MB")
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine.compile(Path(folder))
        limit = max(multiply_adds(machine, threads) for _ in range(10))
        for keys in map(int, options.keys.split(",")):
            for name, operations, methods in cases(keys, options):
                measured = measure(methods, options.rounds, threads)
                ours = measured["ours"][0]
                for method, (seconds, memory) in measured.items():
                    share, ratio = operations / seconds / limit, seconds / ours
                    print(
                        f"{keys:7}  {name:10}  {method:27}  {1e3 * seconds / options.rows:8.3f}  {share:12.1%}"
                        f"  {ratio:10.2f}  {memory:4.0f}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
