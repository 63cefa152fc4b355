"""Measures what a soft cap costs: our operators with cpu_softcap and without, and ONNX Runtime's Attention with one.

    python -m bench.softcap [--threads 1,2] [--cases REGEX] [--rounds 9] [--out build/bench/softcap.md]

The two run in turns on the same inputs, and `cost` is the median of the ratios of neighbouring runs. The kernels
compute tanh by a polynomial where all scores of a vector are below 0.625 times the cap, and else by an exponential and
a division, too. The `near` scores are mostly below this limit, as those of a trained model are, and the `far` ones are
beyond it. Each result is first compared with float64. The heads and the cap are those of Gemma 2, and with size 64
those of BERT.
"""

from __future__ import annotations

import itertools
import re
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from bench.table import print_table, table_parser
from fa_compiler import reference
from fa_compiler.lowering.ort import register_custom_ops
from fa_compiler.op_registry import DOMAIN, get, place_inputs

FORWARD, BACKWARD = "FlashAttentionScore", "FlashAttentionScoreGrad"
CAP = 50.0
TOLERANCE = 1e-4
"""The allowed error, relative to the largest value, as in bench/speed/truth.py."""
CHECKED = 64
"""Rows of the smallest problem that float64 is computed for in full."""


@dataclass(frozen=True)
class Case:
    """One problem: [1, heads, rows, size] on [1, key_heads, keys, size], causal if there are several rows."""

    name: str
    op: str
    heads: int
    key_heads: int
    rows: int
    keys: int
    size: int
    far: bool = False

    @property
    def attrs(self) -> dict[str, Any]:
        plain = {"head_num": self.heads, "input_layout": "BNSD", "scale_value": self.size**-0.5}
        return plain | ({"sparse_mode": 3} if self.rows > 1 else {})

    def inputs(self, rows: int | None = None) -> dict[str, Any]:
        """The inputs of the forward operator, with fewer rows and keys if `rows` says so."""
        rng = np.random.default_rng(0)
        rows, keys = (self.rows, self.keys) if rows is None else (min(rows, self.rows), min(rows, self.keys))
        shapes = {"query": (self.heads, rows), "key": (self.key_heads, keys), "value": (self.key_heads, keys)}
        found = {name: rng.standard_normal((1, *shape, self.size), np.float32) for name, shape in shapes.items()}
        found["query"] *= 2 * CAP if self.far else 4.0
        if rows > 1:
            found["atten_mask"] = np.triu(np.ones((2048, 2048), np.bool_), 1)
        return found


def cases() -> Iterator[Case]:
    """Forward passes, decode steps and gradients, with scores near 0 and far from it."""
    for far in (False, True):
        end = "far" if far else "near"
        yield Case(f"gemma2-prefill-{end}", FORWARD, 8, 4, 1024, 1024, 256, far)
        yield Case(f"bert-{end}", FORWARD, 12, 12, 512, 512, 64, far)
        yield Case(f"gemma2-decode-{end}", FORWARD, 8, 4, 1, 4096, 256, far)
        yield Case(f"gemma2-gradient-{end}", BACKWARD, 8, 4, 512, 512, 256, far)


def backward_inputs(inputs: Mapping[str, Any], attrs: Mapping[str, Any], threads: int) -> dict[str, Any]:
    """The inputs of the gradient: those of the forward pass, its results, and numbers for dy."""
    names = ("softmax_max", "softmax_sum", "attention_out")
    results = dict(zip(names, Call(FORWARD, inputs, attrs, names, threads).run(), strict=True))
    dy = np.random.default_rng(1).standard_normal(results["attention_out"].shape, np.float32)
    return {**inputs, "dy": dy, "attention_in": results.pop("attention_out"), **results}


class Call:
    """One operator in a session of its own, with its inputs in place."""

    def __init__(
        self, op: str, inputs: Mapping[str, Any], attrs: Mapping[str, Any], outputs: tuple[str, ...], threads: int
    ) -> None:
        spec = get(op)
        names = place_inputs(spec, {name: name for name in inputs})
        made = [name if name in outputs else "" for name in (output.name for output in spec.outputs)]
        node = helper.make_node(op, [name or "" for name in names], made, domain=DOMAIN, **attrs)
        self._prepare(node, inputs, outputs, threads, DOMAIN)

    def _prepare(
        self, node: onnx.NodeProto, inputs: Mapping[str, Any], outputs: tuple[str, ...], threads: int, domain: str
    ) -> None:
        kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in inputs.items()}
        given = [helper.make_tensor_value_info(name, kinds[name], array.shape) for name, array in inputs.items()]
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid(domain, 1)][: 1 if domain == "" else 2]
        model = helper.make_model(helper.make_graph([node], "g", given, results), opset_imports=opsets, ir_version=10)
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        register_custom_ops(options)
        self.session = ort.InferenceSession(model.SerializeToString(), options)
        self.values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
        self.outputs = list(outputs)

    def run(self) -> list[Any]:
        """The results as arrays."""
        return [value.numpy() for value in self.session.run_with_ort_values(self.outputs, self.values)]

    def seconds(self) -> float:
        """The time of one run."""
        started = time.perf_counter()
        self.session.run_with_ort_values(self.outputs, self.values)
        return time.perf_counter() - started


class Peer(Call):
    """ai.onnx Attention with softcap, which ONNX Runtime has a kernel for."""

    def __init__(self, case: Case, inputs: Mapping[str, Any], threads: int) -> None:
        attrs = {"is_causal": 1} if case.rows > 1 else {}
        node = helper.make_node("Attention", ["query", "key", "value"], ["y"], softcap=CAP, **attrs)
        self._prepare(node, {name: inputs[name] for name in ("query", "key", "value")}, ("y",), threads, "")


def error(case: Case, attrs: Mapping[str, Any], outputs: tuple[str, ...]) -> float:
    """The largest error of a smaller problem with the same heads, relative to the largest value."""
    inputs = case.inputs(CHECKED)
    given = inputs if case.op == FORWARD else backward_inputs(inputs, attrs, 1)
    wanted = reference.run(case.op, given, attrs, outputs, dtype="float64")
    got = dict(zip(outputs, Call(case.op, given, attrs, outputs, 1).run(), strict=True))
    return max(float(np.abs(got[name] - wanted[name]).max() / np.abs(wanted[name]).max()) for name in outputs)


def measure(case: Case, threads: int, rounds: int) -> str:
    """A row of the table."""
    outputs = ("attention_out",) if case.op == FORWARD else ("dq", "dk", "dv")
    capped = {**case.attrs, "cpu_softcap": CAP}
    found = error(case, capped, outputs)
    if not found <= TOLERANCE:
        raise ValueError(f"{case.name}: the result is {found:.1e} off")
    inputs, calls = case.inputs(), []
    for attrs in (case.attrs, capped):
        given = inputs if case.op == FORWARD else backward_inputs(inputs, attrs, threads)
        calls.append(Call(case.op, given, attrs, outputs, threads))
    if case.op == FORWARD:
        calls.append(Peer(case, inputs, threads))
    for call in calls:
        call.run()
    times = list(zip(*([call.seconds() for call in calls] for _ in range(rounds)), strict=True))
    plain, own, *peer = (statistics.median(each) for each in times)
    cost = statistics.median(mine / other for other, mine in zip(times[0], times[1], strict=True))
    beside = [f"{1e3 * peer[0]:.2f}", f"{peer[0] / own:.2f}"] if peer else ["-", "-"]
    cells = [case.name, threads, f"{1e3 * plain:.2f}", f"{1e3 * own:.2f}", f"{cost:.2f}", *beside, f"{found:.0e}"]
    return f"| {' | '.join(map(str, cells))} |"


HEADER = """| case | threads | plain ms | capped ms | cost | Attention ms | times faster | error |
|---|--:|--:|--:|--:|--:|--:|--:|"""


def main() -> int:
    """Print the table row by row, and write it to a file."""
    args = table_parser("softcap", __doc__, rounds=9).parse_args()
    chosen = [case for case in cases() if re.search(args.cases, case.name)]
    print_table(HEADER, (measure(*each, args.rounds) for each in itertools.product(chosen, args.threads)), args.out)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
