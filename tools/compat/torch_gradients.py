"""Compares our forward part and gradients with torch's autograd, on random problems.

    python -m tools.compat.torch_gradients [--count 300] [--seed 0] [--isa avx2]

The interpreter of fa_compiler needs torch and the `test` extra, so this is not one of the tests. The problems are those
of tests/lowering/test_random_grad.py: every layout, packed sequences included, grouped heads, biases, masks and sparse
modes, dropout, soft caps, sinks, rope inputs, and all types. Our gradient kernel reads the statistics of our forward
kernel. torch computes attention from the same numbers in float64 and differentiates it. The float64 reference tells
which pairs a mask excludes, which ones dropout keeps, and the generated biases.

Some problems have no counterpart in autograd. A row without any key has no gradient here and NaN in torch, so torch
gets only the other rows. Biases are finite, and masked keys have no score.
"""

from __future__ import annotations

import argparse
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

try:
    import torch
except ImportError:
    raise SystemExit("error: this needs torch: run it with an interpreter that has it") from None
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

from fa_compiler import ops
from fa_compiler.op_registry import full_attrs, get
from fa_compiler.reference.attention import Attention
from fa_compiler.reference.call import Array, OpCall
from tests.lowering.gradients import GRADIENTS, backward, gradient_bounds
from tests.lowering.problems import agree, bounds
from tests.lowering.test_random import Problem, problems
from tests.lowering.test_random_grad import repeated

FORWARD, GRADIENT = "FlashAttentionScore", "FlashAttentionScoreGrad"
HALF_ULP = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@st.composite
def comparable(draw: st.DrawFn) -> tuple[Problem, str, int]:
    """A forward problem that autograd can differentiate, the order of its statistics, and a seed for dy."""
    problem = draw(problems())
    inputs, attrs = repeated(problem.inputs, problem.attrs["input_layout"]), dict(problem.attrs)
    attrs |= {"cpu_empty_rows": "zero", "cpu_nan_rows": ""}
    for name in ("cpu_mask_value", "cpu_masked_values", "cpu_masked_bias"):
        attrs.pop(name, None)  # masked keys have no score
    if "real_shift" in inputs:
        wide = inputs["real_shift"].astype(np.float32)
        finite = np.where(np.abs(wide) < 1e4, wide, np.float32(-9))
        inputs = inputs | {"real_shift": finite.astype(inputs["real_shift"].dtype)}
    return Problem(inputs, attrs), draw(st.sampled_from(["", "same_as_input"])), draw(st.integers(0, 2**32 - 1))


def ours(problem: Problem, order: str, seed: int) -> tuple[dict[str, Array], dict[str, Any], dict[str, Array]]:
    """The inputs of the gradient, with the results of our forward kernel; its attributes; and our gradients."""
    given, attrs = backward(problem.inputs, problem.attrs, np.random.default_rng(seed), order)
    names = ("softmax_max", "softmax_sum", "attention_out")
    forward = ops.run(FORWARD, problem.inputs, problem.attrs | {"softmax_out_layout": order}, names)
    for name in names[:2]:
        turned = forward[name].shape != given[name].shape
        given[name] = np.swapaxes(forward[name], 0, 1).copy() if turned else forward[name]
    given["attention_in"] = forward["attention_out"]
    return given, attrs, ops.run(GRADIENT, given, attrs, GRADIENTS)


@dataclass
class Truth:
    """The result and its gradients by name, and the norms that bound the rounding errors (see `rounding`)."""

    results: dict[str, Array]
    norms: dict[str, float]
    column: float


def autograd(inputs: Mapping[str, Array], attrs: Mapping[str, Any]) -> Truth:
    """The truth from torch in float64."""
    problem = Attention(OpCall(GRADIENT, inputs, full_attrs(get(GRADIENT), dict(attrs)), exact=True), "pse_shift")
    rows, columns = problem.query_side, problem.key_side
    leaves = {
        name: [torch.from_numpy(np.ascontiguousarray(part)).requires_grad_() for part in parts]
        for name, parts in (("query", problem.query), ("key", problem.key), ("value", problem.value))
    }
    sink = None if problem.sink is None else torch.from_numpy(problem.sink).requires_grad_()
    dy = rows.split(inputs["dy"], problem.value_width)
    out = [np.zeros_like(part) for part in dy]
    sums = [np.zeros(part.shape[:-1]) for part in problem.key]
    total = torch.zeros((), dtype=torch.float64)
    for batch, head, kv_head in problem.heads():
        q, k, v = (leaves[name][batch][n] for name, n in (("query", head), ("key", kv_head), ("value", kv_head)))
        allowed = problem.allowed(batch, head)
        live = np.flatnonzero(allowed.any(axis=1))
        bias = problem.pse.bias(batch, head)
        full_bias = np.zeros(allowed.shape) if bias is None else np.broadcast_to(bias, allowed.shape)
        added = torch.from_numpy(full_bias[live])
        products = q[live] @ k.T
        before = bias is not None and problem.pse.before_scale
        scores = problem.scale * (products + added) if before else capped(problem, products) + added
        scores = scores.masked_fill(~torch.from_numpy(allowed[live]), -torch.inf)
        if sink is not None:
            scores = torch.cat([scores, sink[head].expand(len(live), 1)], dim=1)
        p = torch.softmax(scores, dim=1)[:, : allowed.shape[1]]
        sums[batch][kv_head] += p.detach().numpy().sum(axis=0)
        factors = problem.dropout.factors(batch, head)
        if factors is not None:
            p = p * torch.from_numpy(factors[live])
        result = p @ v
        out[batch][head][live] = result.detach().numpy()
        total = total + (result * torch.from_numpy(dy[batch][head][live])).sum()
    if total.requires_grad:
        total.backward()
    gradient = {name: [_gradient(leaf) for leaf in each] for name, each in leaves.items()}
    width = problem.width
    results = {"attention_out": rows.join(out, problem.value_width)}
    results["dv"] = columns.join(gradient["value"], problem.value_width)
    for name, side, parts in (("dq", rows, gradient["query"]), ("dk", columns, gradient["key"])):
        results[name] = side.join([part[..., :width] for part in parts], width)
        if problem.rope_width:
            results[f"{name}_rope"] = side.join([part[..., width:] for part in parts], problem.rope_width)
    if sink is not None:
        results["dsink"] = _gradient(sink)
    norms = {name: max((_norm(part) for part in parts), default=0.0) for name, parts in
             (("query", problem.query), ("key", problem.key), ("out", out), ("dy", dy))}  # fmt: skip
    return Truth(results, norms, max((float(each.max(initial=0.0)) for each in sums), default=0.0))


def capped(problem: Attention, products: torch.Tensor) -> torch.Tensor:
    """The scaled products, capped if the problem has a soft cap."""
    cap, scaled = problem.softcap, problem.scale * products
    return cap * torch.tanh(scaled / cap) if cap else scaled


def _gradient(leaf: torch.Tensor) -> Array:
    gradient: Array = np.zeros(leaf.shape) if leaf.grad is None else leaf.grad.numpy()
    return gradient


def _norm(part: Array) -> float:
    """The largest norm of a row."""
    return float(np.sqrt((part**2).sum(axis=-1)).max(initial=0.0))


def rounding(truth: Truth, inputs: Mapping[str, Array], attrs: Mapping[str, Any]) -> dict[str, float]:
    """The additional error bounds of 16-bit types. The kernel tests do not need them: their truth uses the rounded
    attention_in.

    With h half a unit in the last place, |.| the largest norm of a row and c the largest sum of a column of P: the
    rounding of attention_in changes rowsum(dO O) by h |dO| |O|. Through P, this changes dQ by |scale| |K| times as
    much, dK by |scale| |Q| c times as much, and dsink once for each row.
    """
    moved = HALF_ULP[inputs["query"].dtype.name] * truth.norms["dy"] * truth.norms["out"]
    scale = abs(attrs["scale_value"])
    dq, dk = moved * scale * truth.norms["key"], moved * scale * truth.norms["query"] * truth.column
    count = max(inputs["query"].shape[:3]) * inputs["query"].shape[0]
    return {"dq": dq, "dq_rope": dq, "dk": dk, "dk_rope": dk, "dsink": moved * count}


def compare(problem: Problem, order: str, seed: int) -> list[str]:
    """Raises AssertionError if the results differ; returns the names of the compared results."""
    given, attrs, gradients = ours(problem, order, seed)
    truth = autograd(given, attrs)
    limits, more = gradient_bounds(given, attrs), rounding(truth, given, attrs)
    forward = bounds(problem.inputs, problem.attrs).of("attention_out")
    for name, want in truth.results.items():
        got = given["attention_in"] if name == "attention_out" else gradients[name]
        allowed = forward if name == "attention_out" else (limits[name] + more.get(name, 0.0), 0.0)
        agree(got, want.astype(got.dtype), name, *allowed)
    return list(truth.results)


def main() -> None:
    """Draws problems, compares, and prints what was covered."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=300, help="problems; default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--isa", help="a variant of our kernels, as FA_COMPILER_ISA names it")
    arguments = parser.parse_args()
    if arguments.isa:
        os.environ["FA_COMPILER_ISA"] = arguments.isa
    covered: Counter[str] = Counter()

    @seeded(arguments.seed)
    @settings(max_examples=arguments.count, deadline=None, database=None, phases=[Phase.generate, Phase.shrink],
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(drawn=comparable())
    def all_agree(drawn: tuple[Problem, str, int]) -> None:
        covered.update(compare(*drawn))
        inputs, attrs = drawn[0].inputs, drawn[0].attrs
        covered.update([attrs["input_layout"], inputs["query"].dtype.name])
        covered.update(name for name in ("real_shift", "atten_mask", "prefix", "drop_mask", "sink") if name in inputs)
        covered.update(["cpu_softcap"] if "cpu_softcap" in attrs else [])
        covered.update([f"sparse_mode {attrs['sparse_mode']}"] if "atten_mask" in inputs else [])

    all_agree()
    print(f"torch {torch.__version__}: agreed on " + ", ".join(f"{name} {n}" for name, n in sorted(covered.items())))


if __name__ == "__main__":
    main()
