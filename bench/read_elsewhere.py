"""Measures attention whose scores or probabilities the model needs besides: as it is, and with a fused attention.

    python -m bench.read_elsewhere [--threads 1,2] [--cases REGEX] [--rounds 9] [--out build/bench/read_elsewhere.md]

A model whose scores or probabilities are outputs has to compute them in any case. The attention could still be fused
beside the nodes that compute them. The product of query and key is then computed twice, and what the fused node saves
is the product with the values, the copies in front of it and behind it, and, where only the scores are needed, the
softmax.

`plain` is the original, `both` is the fused attention beside the nodes that compute what is needed, and `fused` is the
fused attention alone, as if nothing else were needed. They run in turns on the same inputs, in sessions with all of
ONNX Runtime's optimisations. `both / plain` is the median of the ratios of neighbouring runs: above 1, `both` loses.
The outputs of both are compared first.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

import fa_compiler
from bench.table import print_table, table_parser
from fa_compiler.lowering.ort import register_custom_ops

TOLERANCE = 1e-4
"""The allowed difference, relative to the largest value, as in bench/speed/truth.py."""


@dataclass(frozen=True)
class Case:
    """One attention: [1, heads, rows, size] on [1, key_heads, keys, size], with a mask of [1, 1, rows or 1, keys].

    `needed` is what the model needs besides, "scores" (scaled and masked) or "probabilities". The keys are cached, in
    BNSD, where there is one row; else query, key and value are projections in BSH, as BERT has them.
    """

    name: str
    needed: str
    heads: int
    key_heads: int
    rows: int
    keys: int
    size: int

    def model(self) -> onnx.ModelProto:
        """The original, with the outputs y and `needed`."""
        cached, groups = self.rows == 1, self.heads // self.key_heads
        shapes: dict[str, Sequence[int]] = {"mask": (1, 1, 1, self.keys)}
        nodes, numbers = [], {"scale": np.float32(self.size**-0.5)}
        for name, heads, tokens in (
            ("q", self.heads, self.rows),
            ("k", self.key_heads, self.keys),
            ("v", self.key_heads, self.keys),
        ):
            split, last = f"{name}_heads", "transposed" if name == "k" else "heads"
            if cached and name != "q":
                shapes[name] = (1, heads, tokens, self.size)
                nodes.append(helper.make_node("Identity", [name], [split]))
            else:
                shapes[name] = (1, tokens, heads * self.size)
                numbers[f"{name}_shape"] = np.array([1, tokens, heads, self.size])
                nodes.append(helper.make_node("Reshape", [name, f"{name}_shape"], [f"{name}_split"]))
                nodes.append(helper.make_node("Transpose", [f"{name}_split"], [split], perm=[0, 2, 1, 3]))
            if name != "q" and groups > 1:
                numbers["repeats"] = np.array([1, heads, groups, tokens, self.size])
                numbers["repeated"] = np.array([1, self.heads, tokens, self.size])
                numbers["second"] = np.array([2])
                nodes.append(helper.make_node("Unsqueeze", [split, "second"], [f"{name}_apart"]))
                nodes.append(helper.make_node("Expand", [f"{name}_apart", "repeats"], [f"{name}_expanded"]))
                nodes.append(helper.make_node("Reshape", [f"{name}_expanded", "repeated"], [f"{name}_all"]))
                split = f"{name}_all"
            if last == "transposed":
                nodes.append(helper.make_node("Transpose", [split], ["k_transposed"], perm=[0, 1, 3, 2]))
            operand = split if name == "v" else ""
        numbers["joined"] = np.array([1, self.rows, self.heads * self.size])
        nodes += [
            helper.make_node("MatMul", ["q_heads", "k_transposed"], ["product"]),
            helper.make_node("Mul", ["product", "scale"], ["scaled"]),
            helper.make_node("Add", ["scaled", "mask"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["probabilities"], axis=-1),
            helper.make_node("MatMul", ["probabilities", operand], ["values"]),
            helper.make_node("Transpose", ["values"], ["rows"], perm=[0, 2, 1, 3]),
            helper.make_node("Reshape", ["rows", "joined"], ["y"]),
        ]
        given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", self.needed)]
        constants = [onnx.numpy_helper.from_array(np.asarray(array), name) for name, array in numbers.items()]
        graph = helper.make_graph(nodes, "attention", given, results, constants)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
        return onnx.shape_inference.infer_shapes(model)

    def feeds(self) -> dict[str, np.ndarray]:
        """Random inputs, and a mask that hides the last eighth of the keys."""
        rng = np.random.default_rng(0)
        feeds = {}
        for given in self.model().graph.input:
            shape = [dim.dim_value for dim in given.type.tensor_type.shape.dim]
            feeds[given.name] = rng.standard_normal(shape, np.float32)
        feeds["mask"] = np.zeros_like(feeds["mask"])
        feeds["mask"][..., self.keys - self.keys // 8 :] = np.finfo(np.float32).min
        return feeds


def cases() -> Iterator[Case]:
    """BERT-base, a GPT-2's step and a Llama's with grouped heads."""
    for needed in ("probabilities", "scores"):
        for tokens in (128, 256, 512, 1024):
            yield Case(f"bert-{tokens}", needed, 12, 12, tokens, tokens, 64)
        yield Case("gpt2-step-1024", needed, 12, 12, 1, 1024, 64)
        yield Case("llama-step-4096", needed, 32, 8, 1, 4096, 128)
        yield Case("llama-prompt-512", needed, 32, 8, 512, 512, 128)


def needing(model: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """The model with these outputs only, without the nodes that they do not need."""
    wanted, kept = set(outputs), []
    for node in reversed(model.graph.node):
        if wanted & set(node.output):
            wanted |= set(node.input)
            kept.insert(0, node)
    found = onnx.ModelProto()
    found.CopyFrom(model)
    del found.graph.node[:], found.graph.output[:]
    del found.graph.initializer[:]
    found.graph.node.extend(kept)
    found.graph.initializer.extend(each for each in model.graph.initializer if each.name in wanted)
    found.graph.output.extend(each for each in model.graph.output if each.name in outputs)
    return found


def fused_and_both(case: Case) -> tuple[onnx.ModelProto, onnx.ModelProto]:
    """The fused attention alone, and beside the original nodes that compute what is needed."""
    original = case.model()
    result = fa_compiler.optimize(needing(original, ["y"]), bodies=False)
    fused = result.model
    if result.report.count("fused") != 1 or not isinstance(fused, onnx.ModelProto):
        raise ValueError(f"{case.name}: {result.report}")
    besides = needing(original, [case.needed])
    both = onnx.ModelProto()
    both.CopyFrom(fused)
    for field in ("node", "initializer"):
        mine, theirs = getattr(both.graph, field), getattr(besides.graph, field)
        made = {name for each in mine for name in (each.output if field == "node" else [each.name])}
        more = [each for each in theirs if made.isdisjoint(each.output if field == "node" else [each.name])]
        rest = list(mine)
        del mine[:]
        mine.extend([*more, *rest])
    both.graph.output.extend(besides.graph.output)
    return fused, both


def session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """The model with all of ONNX Runtime's optimisations."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    register_custom_ops(options)
    return ort.InferenceSession(model.SerializeToString(), options)


def seconds(run: ort.InferenceSession, values: dict[str, ort.OrtValue], outputs: list[str]) -> float:
    """The time of one run."""
    started = time.perf_counter()
    run.run_with_ort_values(outputs, values)
    return time.perf_counter() - started


def measure(case: Case, threads: int, rounds: int) -> str:
    """A row of the table."""
    fused, both = fused_and_both(case)
    feeds, names = case.feeds(), ["y", case.needed]
    plans = ((session(case.model(), threads), names), (session(both, threads), names), (session(fused, threads), ["y"]))
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds.items()}
    wanted, got, *_ = (run.run(outputs, feeds) for run, outputs in plans)
    for name, right, other in zip(names, wanted, got, strict=True):
        if not np.abs(right - other).max() <= TOLERANCE * np.abs(right).max():
            raise ValueError(f"{case.name}: {name} differs")
    times = [[seconds(run, values, outputs) for run, outputs in plans] for _ in range(rounds)]
    cells = [f"{1e3 * statistics.median(each):.2f}" for each in zip(*times, strict=True)]
    cells += [f"{statistics.median(row[index] / row[0] for row in times):.2f}" for index in (1, 2)]
    return f"| {' | '.join(map(str, (case.name, case.needed, threads, *cells)))} |"


HEADER = """| case | needed | threads | plain ms | both ms | fused ms | both / plain | fused / plain |
|---|---|--:|--:|--:|--:|--:|--:|"""


def main() -> int:
    """Print the table row by row, and write it to a file."""
    args = table_parser("read_elsewhere", __doc__, rounds=9).parse_args()
    chosen = [case for case in cases() if re.search(args.cases, case.name)]
    print_table(HEADER, (measure(*each, args.rounds) for each in itertools.product(chosen, args.threads)), args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
