"""Times the attention kernel beside what ONNX Runtime offers for the same problem.

    python bench/kernel.py [--threads 2] [--rounds 7] [--cases bert,gpt2] [--isa avx2]

Peers, all in the same process and interleaved round by round, so that a busy machine hurts all alike:
    ours      FlashAttentionScore
    unfused   MatMul, Mul, (Add), Softmax, MatMul: what an exporter writes
    mha       com.microsoft MultiHeadAttention, ONNX Runtime's own fused operator
    attn      ai.onnx Attention (opset 23), where this ONNX Runtime has it
A time is the median over the rounds of the best of a few calls. GFLOP/s counts 4*D for each visible pair of a
query and a key. Every result is compared with `unfused` before it is timed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from onnx import helper

from fa_compiler.lowering.ort import register_custom_ops

Feeds = dict[str, np.ndarray]


@dataclass(frozen=True)
class Case:
    """One problem in layout BNSD: `mask` is none, causal, pad (a [B,1,1,S2] padding mask) or bias ([1,N,S1,S2])."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    size: int
    mask: str = "none"
    dtype: str = "float32"

    @property
    def flops(self) -> float:
        pairs = self.queries * self.keys
        if self.mask == "causal":
            pairs = sum(min(self.keys, i + 1 + self.keys - self.queries) for i in range(self.queries))
        return 4.0 * self.batch * self.heads * pairs * self.size


CASES = {
    "bert": Case(1, 12, 12, 512, 512, 64),
    "bert-pad": Case(1, 12, 12, 512, 512, 64, "pad"),
    "bert-2048": Case(1, 12, 12, 2048, 2048, 64),
    "gpt2": Case(1, 12, 12, 1024, 1024, 64, "causal"),
    "gpt2-2048": Case(1, 12, 12, 2048, 2048, 64, "causal"),
    "t5-bias": Case(1, 12, 12, 512, 512, 64, "bias"),
    "llama": Case(1, 32, 8, 1024, 1024, 128, "causal"),
    "vit": Case(8, 12, 12, 197, 197, 64),
    "small": Case(1, 12, 12, 64, 64, 64),
    "cross": Case(1, 12, 12, 64, 1500, 64),
    "decode": Case(1, 32, 8, 1, 4096, 128),
    "bert-f16": Case(1, 12, 12, 512, 512, 64, "none", "float16"),
}

_MASKED = -1e30


def feeds_of(case: Case, rng: np.random.Generator) -> tuple[Feeds, np.ndarray | None]:
    """Query, key, value, and the boolean mask (True: not attended) or float bias of the case."""
    q = (case.batch, case.heads, case.queries, case.size)
    k = (case.batch, case.kv_heads, case.keys, case.size)
    data = {
        name: rng.standard_normal(shape, np.float32).astype(case.dtype)
        for name, shape in (("q", q), ("k", k), ("v", k))
    }
    if case.mask == "causal":
        return data, np.triu(np.ones((case.queries, case.keys), bool), 1 + case.keys - case.queries)
    if case.mask == "pad":
        mask = np.zeros((case.batch, 1, 1, case.keys), bool)
        mask[..., case.keys * 7 // 8 :] = True
        return data, mask
    if case.mask == "bias":
        return data, rng.standard_normal((1, case.heads, case.queries, case.keys), np.float32)
    return data, None


def session(nodes: list, case: Case, constants: Feeds, options: ort.SessionOptions, opset: int) -> ort.InferenceSession:
    """A session of these nodes with inputs q, k, v (BNSD) and output out."""
    dtype = helper.np_dtype_to_tensor_dtype(np.dtype(case.dtype))
    graph = helper.make_graph(
        nodes,
        "attention",
        [helper.make_tensor_value_info(name, dtype, [None] * 4) for name in "qkv"],
        [helper.make_tensor_value_info("out", dtype, None)],
        [helper.make_tensor(n, helper.np_dtype_to_tensor_dtype(a.dtype), a.shape, a.tobytes(), raw=True)
         for n, a in constants.items()],
    )
    model = helper.make_model(
        graph,
        ir_version=8 if opset < 23 else 11,
        opset_imports=[
            helper.make_opsetid("", opset),
            helper.make_opsetid("ascend", 1),
            helper.make_opsetid("com.microsoft", 1),
        ],
    )
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def ours(case: Case, mask: np.ndarray | None, options: ort.SessionOptions) -> ort.InferenceSession:
    register_custom_ops(options)
    inputs, constants, attrs = ["q", "k", "v"], {}, {}
    if case.mask == "bias" and mask is not None:
        inputs, constants, attrs = [*inputs, "bias"], {"bias": mask}, {"pse_type": 0}
    elif case.mask == "causal":
        inputs += ["", "", "", "mask"]
        constants = {"mask": np.triu(np.ones((2048, 2048), bool), 1)}
        attrs = {"sparse_mode": 3}
    elif mask is not None:
        inputs, constants = [*inputs, "", "", "", "mask"], {"mask": mask}
    node = helper.make_node(
        "FlashAttentionScore", inputs, ["", "", "", "out"], domain="ascend", head_num=case.heads,
        input_layout="BNSD", scale_value=case.size**-0.5, **attrs,
    )
    return session([node], case, constants, options, 17)


def _additive(case: Case, mask: np.ndarray | None) -> Feeds:
    if mask is None:
        return {}
    return {"mask": (mask if mask.dtype != bool else np.where(mask, np.float32(_MASKED), 0)).astype(np.float32)}


def unfused(case: Case, mask: np.ndarray | None, options: ort.SessionOptions) -> ort.InferenceSession:
    constants: Feeds = {"scale": np.array(case.size**-0.5, case.dtype)}
    nodes, k, v = [], "k", "v"
    if case.kv_heads != case.heads:
        group = case.heads // case.kv_heads
        constants |= {
            "one": np.array([2], np.int64),
            "wide": np.array([case.batch, case.kv_heads, group, case.keys, case.size], np.int64),
            "flat": np.array([case.batch, case.heads, case.keys, case.size], np.int64),
        }
        for x in "kv":
            nodes += [
                helper.make_node("Unsqueeze", [x, "one"], [f"{x}1"]),
                helper.make_node("Expand", [f"{x}1", "wide"], [f"{x}2"]),
                helper.make_node("Reshape", [f"{x}2", "flat"], [f"{x}3"]),
            ]
        k, v = "k3", "v3"
    nodes += [
        helper.make_node("Transpose", [k], ["kt"], perm=[0, 1, 3, 2]),
        helper.make_node("MatMul", ["q", "kt"], ["s0"]),
        helper.make_node("Mul", ["s0", "scale"], ["s1"]),
    ]
    scores = "s1"
    if mask is not None:
        constants |= {name: array.astype(case.dtype) for name, array in _additive(case, mask).items()}
        nodes.append(helper.make_node("Add", ["s1", "mask"], ["s2"]))
        scores = "s2"
    nodes += [helper.make_node("Softmax", [scores], ["p"], axis=-1), helper.make_node("MatMul", ["p", v], ["out"])]
    return session(nodes, case, constants, options, 17)


def mha(case: Case, mask: np.ndarray | None, options: ort.SessionOptions) -> ort.InferenceSession | None:
    """Its query is [B,S,N*D]; key and value may be BNSD. The transposition of the query is the operator's own cost
    in a model, too, and is left out for a query of one row."""
    if case.kv_heads != case.heads or case.dtype != "float32":
        return None
    constants: Feeds = {"flat": np.array([case.batch, case.queries, case.heads * case.size], np.int64)}
    back = np.array([case.batch, case.queries, case.heads, case.size], np.int64)
    constants["back"] = back
    inputs = ["q1", "k", "v"]
    attrs: dict[str, int] = {}
    if case.mask == "causal":
        attrs["unidirectional"] = 1
    elif mask is not None:
        constants |= {n: np.broadcast_to(a, (a.shape[0], a.shape[1], case.queries, case.keys)).copy()
                      for n, a in _additive(case, mask).items()}
        inputs += ["", "", "mask"]
    nodes = [
        helper.make_node("Transpose", ["q"], ["q0"], perm=[0, 2, 1, 3]),
        helper.make_node("Reshape", ["q0", "flat"], ["q1"]),
        helper.make_node("MultiHeadAttention", inputs, ["o"], domain="com.microsoft", num_heads=case.heads, **attrs),
        helper.make_node("Reshape", ["o", "back"], ["o1"]),
        helper.make_node("Transpose", ["o1"], ["out"], perm=[0, 2, 1, 3]),
    ]
    return session(nodes, case, constants, options, 17)


def attn(case: Case, mask: np.ndarray | None, options: ort.SessionOptions) -> ort.InferenceSession | None:
    constants = {} if case.mask == "causal" else _additive(case, mask)
    constants = {
        n: np.broadcast_to(a, (*a.shape[:-2], case.queries, case.keys)).astype(case.dtype)
        for n, a in constants.items()
    }
    node = helper.make_node("Attention", ["q", "k", "v", *constants], ["out"], is_causal=int(case.mask == "causal"))
    try:
        return session([node], case, constants, options, 23)
    except Exception:  # ONNX Runtime before 1.23 has no such kernel, and says so in several ways
        return None


PEERS: dict[str, Callable[[Case, np.ndarray | None, ort.SessionOptions], ort.InferenceSession | None]] = {
    "ours": ours, "unfused": unfused, "mha": mha, "attn": attn,
}


def measure(case: Case, threads: int, rounds: int) -> dict[str, float]:
    """Seconds by peer."""
    rng = np.random.default_rng(1)
    feeds, mask = feeds_of(case, rng)
    sessions = {}
    for name, make in PEERS.items():
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        made = make(case, mask, options)
        if made is not None:
            sessions[name] = made
    results = {name: s.run(None, feeds)[0].astype(np.float32) for name, s in sessions.items()}
    tolerance = 1e-5 if case.dtype == "float32" else 4e-3
    for name in list(sessions):
        error = np.abs(results[name] - results["unfused"]).max() / np.abs(results["unfused"]).max()
        if not error < tolerance:
            print(f"  {name}: differs from unfused by {error:.1e}, not timed")
            del sessions[name]
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(rounds):
        for name, s in sessions.items():
            best, end = float("inf"), time.perf_counter() + 0.1
            calls = 0
            while calls < 2 or (time.perf_counter() < end and calls < 20):
                start = time.perf_counter()
                s.run(None, feeds)
                best = min(best, time.perf_counter() - start)
                calls += 1
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
        mine = times.pop("ours")
        line = f"{name:10} ours {mine * 1e3:8.2f} ms {case.flops / mine * 1e-9:5.0f} GFLOP/s"
        for peer, seconds in times.items():
            line += f"   {peer} {seconds * 1e3:8.2f} ({seconds / mine:.2f}x)"
        print(line, flush=True)


if __name__ == "__main__":
    main()
