"""Times forward and backward together, and the backward alone, beside ONNX Runtime running the unfused graph.

    python bench/kernel_grad.py [--threads 2] [--rounds 7] [--cases bert,gpt2] [--isa avx2]

    ours      FlashAttentionScore, then FlashAttentionScoreGrad with its statistics
    alone     FlashAttentionScoreGrad alone
    unfused   the same as MatMul, Mul, (Add), Softmax and their gradients, as an autograd writes them

A time is the median over the rounds of the best of a few calls, all peers round by round in one process. GFLOP/s
counts 4*D for each visible pair of a query and a key forward and 10*D backward. Gradients are compared with those of
`unfused` before anything is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
import onnxruntime as ort
from kernel import CASES as KERNEL_CASES
from kernel import Case, Feeds, _additive, feeds_of
from onnx import NodeProto, helper

from fa_compiler.lowering.ort import register_custom_ops

CASES = {
    **{name: KERNEL_CASES[name] for name in ("bert", "bert-pad", "gpt2", "t5-bias", "vit", "small")},
    "d128": Case(1, 12, 12, 1024, 1024, 128, "causal"),
    "4k": Case(1, 8, 8, 4096, 4096, 64, "causal"),
}
OUTPUTS = ("out", "dq", "dk", "dv")


def session(
    nodes: list[NodeProto], case: Case, constants: Feeds, options: ort.SessionOptions, inputs: dict[str, str],
    outputs: tuple[str, ...],
) -> ort.InferenceSession:
    """Inputs and outputs are BNSD; `inputs` and the statistics among the outputs say their types."""
    own = np.dtype(case.dtype)
    graph = helper.make_graph(
        nodes,
        "training",
        [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(kind)), [None] * 4)
         for name, kind in inputs.items()],
        [helper.make_tensor_value_info(
            name, helper.np_dtype_to_tensor_dtype(np.dtype(np.float32) if name in ("max", "sum") else own), None)
         for name in outputs],
        [helper.make_tensor(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape, a.tobytes(), raw=True)
         for n, a in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ascend", 1)]
    model = helper.make_model(graph, ir_version=8, opset_imports=opsets)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def fused(case: Case, mask: np.ndarray | None) -> tuple[NodeProto, NodeProto, Feeds]:
    """The forward node, the backward node and their constants."""
    attrs = {"head_num": case.heads, "input_layout": "BNSD", "scale_value": case.size**-0.5}
    constants: Feeds = {}
    bias, excluded = "", ""
    if case.mask == "bias" and mask is not None:
        bias, constants["bias"] = "bias", mask
        attrs["pse_type"] = 0
    elif case.mask == "causal":
        excluded, constants["mask"] = "mask", np.triu(np.ones((2048, 2048), bool), 1)
        attrs["sparse_mode"] = 3
    elif mask is not None:
        excluded, constants["mask"] = "mask", mask
    forward = helper.make_node(
        "FlashAttentionScore", ["q", "k", "v", bias, "", "", excluded], ["max", "sum", "", "out"],
        domain="ascend", **attrs,
    )
    backward = helper.make_node(
        "FlashAttentionScoreGrad",
        ["q", "k", "v", "dy", bias, "", "", excluded, "max", "sum", "", "out"], ["dq", "dk", "dv"],
        domain="ascend", **attrs,
    )
    return forward, backward, constants


def unfused(case: Case, mask: np.ndarray | None) -> tuple[list[NodeProto], Feeds]:
    constants: Feeds = {"scale": np.array(case.size**-0.5, case.dtype), "last": np.array([-1], np.int64)}

    def turned(name: str) -> NodeProto:
        return helper.make_node("Transpose", [name], [f"{name}_t"], perm=[0, 1, 3, 2])

    nodes = [
        turned("k"),
        helper.make_node("MatMul", ["q", "k_t"], ["s0"]),
        helper.make_node("Mul", ["s0", "scale"], ["s1"]),
    ]
    scores = "s1"
    if mask is not None:
        constants |= {name: array.astype(case.dtype) for name, array in _additive(case, mask).items()}
        nodes.append(helper.make_node("Add", ["s1", "mask"], ["s2"]))
        scores = "s2"
    steps = [
        ("Softmax", [scores], "p"), ("MatMul", ["p", "v"], "out"), ("MatMul", ["dy", "v_t"], "dp"),
        ("Mul", ["p", "dp"], "pdp"), ("ReduceSum", ["pdp", "last"], "row"), ("Sub", ["dp", "row"], "apart"),
        ("Mul", ["p", "apart"], "ds0"), ("Mul", ["ds0", "scale"], "ds"), ("MatMul", ["ds", "k"], "dq"),
        ("MatMul", ["ds_t", "q"], "dk"), ("MatMul", ["p_t", "dy"], "dv"),
    ]  # fmt: skip
    nodes.append(turned("v"))
    for op, inputs, output in steps:
        nodes.append(helper.make_node(op, inputs, [output]))
        if output in ("p", "ds"):
            nodes.append(turned(output))
    return nodes, constants


def measure(case: Case, threads: int, rounds: int) -> dict[str, float]:
    """Seconds by peer."""
    rng = np.random.default_rng(1)
    feeds, mask = feeds_of(case, rng)
    feeds["dy"] = rng.standard_normal(feeds["q"].shape).astype(case.dtype)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    register_custom_ops(options)
    kinds = dict.fromkeys(("q", "k", "v", "dy"), case.dtype)
    forward, backward, constants = fused(case, mask)
    plain, plain_constants = unfused(case, mask)
    statistics_kinds = {"max": "float32", "sum": "float32", "out": case.dtype}
    both = session([forward, backward], case, constants, options, kinds, (*OUTPUTS, "max", "sum"))
    *given, maximum, total = both.run(None, feeds)
    calls = {
        "ours": (both, feeds),
        "alone": (
            session([backward], case, constants, options, kinds | statistics_kinds, ("dq", "dk", "dv")),
            feeds | {"max": maximum, "sum": total, "out": given[0]},
        ),
        "unfused": (session(plain, case, plain_constants, options, kinds, OUTPUTS), feeds),
    }
    tolerance = 1e-5 if case.dtype == "float32" else 8e-3
    for name, got, want in zip(OUTPUTS, given, calls["unfused"][0].run(None, feeds), strict=True):
        error = np.abs(got.astype(np.float32) - want).max() / np.abs(want).max()
        if not error < tolerance:
            raise SystemExit(f"{name}: differs from unfused by {error:.1e}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, (made, fed) in calls.items():
            best, end, count = float("inf"), time.perf_counter() + 0.1, 0
            while count < 2 or (time.perf_counter() < end and count < 20):
                start = time.perf_counter()
                made.run(None, fed)
                best = min(best, time.perf_counter() - start)
                count += 1
            times[name].append(best)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cases", default=",".join(CASES), help="of " + ", ".join(CASES))
    parser.add_argument("--isa", help="forces a kernel variant")
    arguments = parser.parse_args()
    if arguments.isa:
        os.environ["FA_COMPILER_ISA"] = arguments.isa
    print(f"onnxruntime {ort.__version__}, {arguments.threads} threads; ms, and how many times ours is faster")
    for name in arguments.cases.split(","):
        case = CASES[name]
        times = measure(case, arguments.threads, arguments.rounds)
        mine, alone, plain = (times[peer] for peer in ("ours", "alone", "unfused"))
        print(
            f"{name:10} forward and backward {mine * 1e3:8.2f} ms {3.5 * case.flops / mine * 1e-9:5.0f} GFLOP/s   "
            f"backward {alone * 1e3:8.2f} ms {2.5 * case.flops / alone * 1e-9:5.0f} GFLOP/s   "
            f"unfused {plain * 1e3:8.2f} ms ({plain / mine:.2f}x)",
            flush=True,
        )


if __name__ == "__main__":
    main()
