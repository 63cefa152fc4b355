"""Measures decoding steps of IncreFlashAttention, for every form of cache, against a plain read of the cache.

    python -m bench.decode [--threads 1,2] [--batches 1,8] [--keys 1024,4096,16384,65536] [--cases REGEX]
                           [--rounds 7] [--limit-mb 600] [--out build/bench/decode.md]

A step cannot be faster than one read of the keys and values. This read, with as many threads, is timed in the same
rounds; before each call and each read, other memory is read, so that the processor's caches hold nothing of the step.
Nor can it be faster than its multiply-adds. Their best rate is measured in the same rounds, too: of tiles or pairs of
bfloat16 for bfloat16, of float32 for float32 and float16. An int8 cache is multiplied as bytes where the processor can,
so that no such limit holds. The columns `of a read` and `of the products` are these times as a share of ours. The aim
is a share of the read, or 70 % of the products if that takes longer.

`peer` is the fastest of ONNX Runtime's own operators on the same problem (GroupQueryAttention, also with an int8 cache,
Attention, MultiHeadAttention; none has pages), and `ratio` is its time divided by ours. All times are medians of the
rounds. Results are first compared with float64. There are 32 query heads of size 128, on 8 key heads as in Llama 3, or
on 32. Steps of several rows (speculative decoding, a chunk of a prompt) use FlashAttentionScore; all keys are visible
to all rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from onnx import TensorProto, helper

from bench.speed import graphs, limits, ort_peers, truth
from bench.speed.cases import Case
from bench.speed.limits import Machine, Rates
from bench.speed.peer import NotOffered, Problem
from bench.table import numbers, print_table, table_parser
from fa_compiler import reference
from fa_compiler.op_registry import get, place_inputs

OP = "IncreFlashAttention"
HEADS, SIZE = 32, 128
BLOCKS = (16, 32, 128)
"""Tokens of a page; an int8 cache has at least 32."""
CACHES = {
    "float32": (np.float32, TensorProto.FLOAT),
    "float16": (np.float16, TensorProto.FLOAT16),
    "bfloat16": (np.uint16, TensorProto.BFLOAT16),
    "int8": (np.int8, TensorProto.INT8),
}
"""The NumPy type and the ONNX type."""
PRODUCTS = limits.PRODUCTS | {"int8": ()}
"""The rates of multiply-adds by the type of the cache, of which the best one counts."""
AIMS = {1: 60, 2: 85}
"""The aim in percent of a plain read by the number of threads; more threads have that of two."""
PRODUCTS_AIM = 70
"""The aim in percent of the multiply-adds."""

PEERS = {"gqa": ort_peers.group_query, "attention": ort_peers.attention, "mha": ort_peers.multi_head}
FLUSH = 64 << 20
PAUSE = 0.05
"""The seconds before each call and read. The threads of the other sessions, which are bound to the same cores, stop
spinning meanwhile. Then an untimed call wakes the threads of its own session, as the earlier nodes of a model do."""
ROWS = (4, 8, 16)
"""The numbers of rows of the steps with several rows."""


@dataclass(frozen=True)
class Step:
    """One decoding step. `query` is the type of query and result; with an int8 cache it is float16 or float32.

    `block` is the number of tokens of a page, or 0 if there are none.
    """

    cache: str
    query: str
    block: int
    batch: int
    key_heads: int
    keys: int
    layout: str = "BNSD"
    rows: int = 1

    @property
    def name(self) -> str:
        storage = f"pages{self.block}" if self.block else self.layout
        rows = f"-{self.rows}rows" if self.rows > 1 else ""
        return f"{self.cache}-{storage}-{HEADS}/{self.key_heads}-b{self.batch}-{self.keys}{rows}"

    @property
    def case(self) -> Case:
        """The same problem as a case of the forward benchmark, with the query's type in place of int8 for the cache."""
        dtype: Any = self.query
        return Case(self.name, "decode", self.batch, HEADS, self.key_heads, self.rows, self.keys, SIZE, dtype)

    @property
    def bytes(self) -> int:
        """The bytes of keys and values."""
        return 2 * self.batch * self.key_heads * self.keys * SIZE * np.dtype(CACHES[self.cache][0]).itemsize


def steps(batches: list[int], keys: list[int]) -> Iterator[Step]:
    """The steps: every form and type of cache with grouped heads; some of them also without groups, or tokens first."""
    for batch, length in itertools.product(batches, keys):
        for cache in CACHES:
            query = "float32" if cache == "int8" else cache
            for block in (0, *BLOCKS[cache == "int8" :]):
                yield Step(cache, query, block, batch, 8, length)
        yield Step("float32", "float32", 0, batch, HEADS, length)
        yield Step("int8", "float32", 0, batch, HEADS, length)
        yield Step("float32", "float32", 0, batch, 8, length, "BSND")
        yield Step("int8", "float32", 0, batch, 8, length, "BSND")
        for rows, cache in itertools.product(ROWS, ("float32", "float16", "bfloat16")):
            yield Step(cache, cache, 0, batch, 8, length, rows=rows)


def inputs_of(step: Step) -> dict[str, Any]:
    """The inputs by REG_OP name; bfloat16 as bits."""
    rng = np.random.default_rng(0)
    cell = CACHES[step.cache][0]
    by_token = step.layout == "BSND"
    query = rng.standard_normal((step.batch, 1, HEADS, SIZE), np.float32)
    blocks = step.batch * step.keys // max(1, step.block)
    shape: tuple[int, ...] = (step.batch, step.key_heads, step.keys, SIZE)
    shape = (step.batch, step.keys, step.key_heads, SIZE) if by_token else shape
    shape = (blocks, step.key_heads, step.block, SIZE) if step.block else shape
    inputs: dict[str, Any] = {"query": truth.to_bits(query if by_token else query.swapaxes(1, 2), step.query)}
    for name in ("key", "value"):
        if step.cache == "int8":
            inputs[name] = rng.integers(-128, 128, shape, cell)
        else:
            inputs[name] = truth.to_bits(rng.standard_normal(shape, np.float32), step.cache)
    if step.cache == "int8":
        inputs["antiquant_scale"] = np.array([0.01, 0.01], step.query)
    if step.block:
        inputs["block_table"] = rng.permutation(blocks).astype(np.int32).reshape(step.batch, -1)
        inputs["actual_seq_lengths"] = np.full(step.batch, step.keys, np.int64)
    return inputs


def attributes(step: Step) -> dict[str, Any]:
    """The attributes of the node."""
    attrs: dict[str, Any] = {"num_heads": HEADS, "num_key_value_heads": step.key_heads, "scale_value": SIZE**-0.5}
    return attrs | {"input_layout": step.layout} | ({"block_size": step.block} if step.block else {})


def ours(step: Step, inputs: dict[str, Any], threads: int) -> tuple[Callable[[], object], Any]:
    """A call of the node with all inputs and outputs bound, and the array that it writes."""
    kinds = {name: _kind(step, name, array) for name, array in inputs.items()}
    placed = place_inputs(get(OP), {name: name for name in inputs})
    node = helper.make_node(OP, ["" if name is None else name for name in placed], ["out"], domain="ascend",
                            **attributes(step))  # fmt: skip
    infos = [helper.make_tensor_value_info(name, kind, inputs[name].shape) for name, kind in kinds.items()]
    out = np.empty_like(inputs["query"])
    result = helper.make_tensor_value_info("out", kinds["query"], out.shape)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ascend", 1)]
    graph = helper.make_graph([node], "step", infos, [result])
    made = ort_peers.session(helper.make_model(graph, ir_version=8, opset_imports=opsets), threads)
    binding = made.io_binding()
    for name, kind in kinds.items():
        binding.bind_ortvalue_input(name, _value(inputs[name], kind))
    binding.bind_ortvalue_output("out", _value(out, kinds["query"]))
    return lambda: made.run_with_iobinding(binding), out


def _kind(step: Step, name: str, array: Any) -> int:
    if name in ("key", "value"):
        return int(CACHES[step.cache][1])
    return int(CACHES[step.query][1] if name == "query" else helper.np_dtype_to_tensor_dtype(array.dtype))


def _value(array: Any, kind: int) -> ort.OrtValue:
    if kind == TensorProto.BFLOAT16:
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array, kind)
    return ort.OrtValue.ortvalue_from_numpy(array)


def error(step: Step, inputs: dict[str, Any], out: Any) -> float:
    """The largest difference from float64 in the first batch entry."""
    if step.block:
        used = inputs["block_table"][:1].reshape(-1)
        first = {name: inputs[name][used] for name in ("key", "value")}
        first = {name: pool.swapaxes(0, 1).reshape(1, step.key_heads, -1, SIZE) for name, pool in first.items()}
    else:
        first = {name: inputs[name][:1] for name in ("key", "value")}
    first["query"] = inputs["query"][:1]
    if step.cache == "bfloat16":
        first = {name: truth.from_bits(array, "bfloat16") for name, array in first.items()}
    if step.cache == "int8":
        first["antiquant_scale"] = inputs["antiquant_scale"]
    attrs = {name: value for name, value in attributes(step).items() if name != "block_size"}
    right = reference.run(OP, first, attrs, dtype="float64")["attention_out"]
    return float(np.abs(truth.from_bits(out[:1], step.query) - right).max())


def _drawn(step: Step) -> dict[str, Any]:
    """The inputs of the case. A query with several rows has its heads first."""
    data = truth.draw(step.case)
    if step.rows > 1:
        data["q"] = np.ascontiguousarray(truth.heads_first(data["q"], step.case, HEADS))
    return data


def several_rows(step: Step, threads: int, folder: Path) -> tuple[Callable[[], object], dict[str, Any], float]:
    """A call of FlashAttentionScore, its inputs, and the largest difference from float64 in the first batch entry."""
    case, data = step.case, _drawn(step)
    peer = ort_peers.ours(Problem(case, data, folder, threads))
    peer.call()
    first = {name: array[:1] for name, array in data.items()}
    right = truth.truth(dataclasses.replace(case, batch=1), first)[1][0]
    found = peer.results()[0][:1].swapaxes(1, 2).reshape(right.shape)
    difference = np.abs(found - right).max()
    return peer.call, {"key": data["k"], "value": data["v"]}, float(difference)


def peers(step: Step, threads: int, folder: Path) -> dict[str, Callable[[], object]]:
    """ONNX Runtime's own operators on the same sizes."""
    if step.block or step.layout != "BNSD":
        return {}
    if step.cache == "int8":
        return {"gqa": int8_group_query(step, threads)}
    case, data = step.case, _drawn(step)
    found: dict[str, Callable[[], object]] = {}
    for name, factory in PEERS.items():
        if step.rows > 1 and name != "attention":  # the others support only one new row of a cache
            continue
        try:
            found[name] = factory(Problem(case, data, folder, threads)).call
        except (NotOffered, RuntimeError, NotImplementedError, ort.capi.onnxruntime_pybind11_state.NotImplemented):
            continue
    return found


def int8_group_query(step: Step, threads: int) -> Callable[[], object]:
    """GroupQueryAttention with an int8 cache, which it updates in place."""
    model = graphs.group_query(step.case)
    node = model.graph.node[0]
    for name, value in (("k_quant_type", "PER_TENSOR"), ("v_quant_type", "PER_TENSOR"), ("kv_cache_bit_width", 8)):
        node.attribute.append(helper.make_attribute(name, value))
    scales = ("k_scale", "v_scale")
    node.input.extend([""] * (12 - len(node.input)) + list(scales))
    model.graph.input.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in scales)
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past_", "present_")):
            value.type.tensor_type.elem_type = TensorProto.INT8
    rng = np.random.default_rng(0)
    fixed: dict[str, Any] = dict.fromkeys(scales, np.float32(0.01))
    fixed |= {"lengths": np.int32(step.keys - 1), "total": np.int32(step.keys)}
    made = ort_peers.session(model, threads)
    arrays: dict[str, Any] = {"out": np.empty([step.batch, 1, HEADS * SIZE], np.float32)}
    for tensor in made.get_inputs():
        if tensor.name.startswith("past_"):
            arrays[tensor.name] = rng.integers(-128, 128, tensor.shape, np.int8)
        elif tensor.name in fixed:
            arrays[tensor.name] = np.full(tensor.shape, fixed[tensor.name])
        else:
            arrays[tensor.name] = rng.standard_normal(tensor.shape, np.float32)
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in arrays.items()}
    binding = made.io_binding()
    for tensor in made.get_inputs():
        binding.bind_ortvalue_input(tensor.name, values[tensor.name])
    for tensor in made.get_outputs():
        binding.bind_ortvalue_output(tensor.name, values[tensor.name.replace("present", "past")])
    return functools.partial(_run, made, binding, values)


def _run(made: ort.InferenceSession, binding: ort.IOBinding, values: dict[str, ort.OrtValue]) -> None:
    """Run once. `values` are the bound tensors; the reference to them keeps the arrays alive."""
    made.run_with_iobinding(binding)


def measure(step: Step, threads: int, rounds: int, machine: Machine, folder: Path) -> str:
    """A row of the table."""
    if step.rows > 1:
        call, inputs, difference = several_rows(step, threads, folder)
    else:
        inputs = inputs_of(step)
        call, out = ours(step, inputs, threads)
        call()
        difference = error(step, inputs, out)
    flush = np.ones(FLUSH, np.uint8)
    calls = {"ours": call, **peers(step, threads, folder)}
    times: dict[str, list[float]] = {name: [] for name in (*calls, "read")}
    rates = Rates(machine, threads)
    for _ in range(rounds):
        for name, each in calls.items():
            time.sleep(PAUSE)
            each()
            flush.max()
            started = time.perf_counter()
            each()
            times[name].append(time.perf_counter() - started)
        time.sleep(PAUSE)
        flush.max()
        times["read"].append(machine.read(inputs["key"].reshape(-1), inputs["value"].reshape(-1), threads))
        rates.probe(PRODUCTS[step.cache])
    median = {name: statistics.median(found) for name, found in times.items()}
    products = step.case.flops / max(rates.best.values()) if rates.best else 0.0
    limit = max(median["read"] * 100 / AIMS[min(threads, max(AIMS))], products * 100 / PRODUCTS_AIM)
    others = {name: value for name, value in median.items() if name not in ("ours", "read")}
    best = min(others, key=lambda name: others[name], default="")
    peer = f"{best} {100 * median['read'] / others[best]:.0f} %" if best else "-"
    ratio = f"{others[best] / median['ours']:.2f}" if best else "-"
    speed = step.bytes / median["ours"] / 1e9
    cells = [step.name, threads, f"{step.bytes / 1e6:.1f}", f"{1e3 * median['ours']:.3f}", f"{speed:.1f}"]
    cells += [f"{100 * part / median['ours']:.0f} %" if part else "-" for part in (median["read"], products)]
    cells += ["yes" if median["ours"] <= limit else "no", peer, ratio, f"{difference:.1e}"]
    return f"| {' | '.join(map(str, cells))} |"


HEADER = """| step | threads | MB | ms | GB/s | of a read | of the products | reached | best peer | ratio | error |
|---|--:|--:|--:|--:|--:|--:|---|---|--:|--:|"""


def main() -> int:
    """Print the table row by row, and write it to a file."""
    parser = table_parser("decode", __doc__, rounds=7)
    for name, default in {"batches": "1,8", "keys": "1024,4096,16384,65536"}.items():
        parser.add_argument(f"--{name}", type=numbers, default=default, help=f"default: {default}")
    parser.add_argument("--limit-mb", type=float, default=600, help="leave out larger caches (default: 600)")
    args = parser.parse_args()
    chosen = [
        step
        for step in steps(args.batches, args.keys)
        if re.search(args.cases, step.name) and step.bytes <= args.limit_mb * 1e6
    ]
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine.compile(Path(folder))
        pairs = itertools.product(chosen, args.threads)
        rows = (measure(step, count, args.rounds, machine, Path(folder)) for step, count in pairs)
        print_table(HEADER, rows, args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
