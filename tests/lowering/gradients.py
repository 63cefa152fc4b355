"""Gradient problems for the kernel tests: made from forward problems, and compared with the float64 reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fa_compiler import ops, reference

from .problems import DTYPES, Inputs, _finite, agree, bounds

OP = "FlashAttentionScoreGrad"
GRADIENTS = ("dq", "dk", "dv", "dpse", "dq_rope", "dk_rope", "dsink")

_FORWARD_ONLY = ("softmax_out_layout",)


def backward(
    inputs: Mapping[str, Any], attrs: Mapping[str, Any], rng: np.random.Generator, order: str = ""
) -> tuple[Inputs, dict[str, Any]]:
    """Inputs and attributes of the gradient of a forward problem, by what the reference gives forward: a standard
    normal dy, and the statistics in the order `order`."""
    forward = {**attrs, "softmax_out_layout": order}
    result = reference.run("FlashAttentionScore", inputs, forward, ("softmax_max", "softmax_sum", "attention_out"))
    given = dict(inputs)
    if "real_shift" in given:
        shift = given.pop("real_shift")
        flat = attrs["input_layout"] == "TND" and attrs.get("pse_type", 1) < 2 and shift.ndim < 4
        given["pse_shift"] = shift.reshape(-1) if flat else shift
    for name in ("softmax_max", "softmax_sum"):
        # The operator wants [N,T,8] where the forward pass gives [T,N,8].
        turned = attrs["input_layout"] == "TND" and order == "same_as_input"
        given[name] = np.swapaxes(result[name], 0, 1).copy() if turned else result[name]
    given["attention_in"] = result["attention_out"]
    given["dy"] = rng.standard_normal(result["attention_out"].shape).astype(result["attention_out"].dtype)
    kept = {name: value for name, value in attrs.items() if name not in _FORWARD_ONLY}
    return given, {**kept, "softmax_in_layout": order}


def gradient_bounds(inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> dict[str, float]:
    """What float32 arithmetic may do to each gradient, whatever the order of its sums, as an absolute error.

    With u = 2^-24, e the error of a score (problems.bounds), |.| the largest norm of a row, and sums of n products
    wrong by sqrt(n) u of the sum of their magnitudes (see there):

        P        relative p = 2 e + 6 u          (its score; exp, the division, and rounding of the statistics)
        dP - D   absolute w (sqrt(Dv) + 4) u     where w = |dO| (|V| / keep_prob + |O|) bounds it
        dS       absolute P w r                  where r = p + (sqrt(Dv) + 6) u
        dQ       |scale| |K| w (r + sqrt(S2) u)            for the P of a row add up to 1
        dK       |scale| |Q| w (r + sqrt(n) u) c           n query rows of the group, c the largest sum of a column of P
        dV       |dO| / keep_prob (p + sqrt(n) u) c
        dsink    w (r + sqrt(S2) u) n                      for p_sink is at most 1

    Beside bfloat16 inputs P and dS may be rounded to bfloat16 before they are multiplied: t = 2^-9 of each of them
    more, in dQ, dK and dV. With a soft cap, dS is multiplied by 1 - tanh^2, whose error is 4 u of 1: r has 4 u more.
    """
    unit = 2.0**-24
    t = 2.0**-9 if inputs["query"].dtype == DTYPES["bfloat16"] else 0.0
    as_forward = {name: value for name, value in inputs.items() if name != "pse_shift"}
    if "pse_shift" in inputs:
        as_forward["real_shift"] = inputs["pse_shift"]
    defaults = {"pse_type": 1, "scale_value": 1.0, **attrs}
    p = 2 * bounds(as_forward, defaults).score + 6 * unit
    scale, keep = abs(defaults["scale_value"]), defaults.get("keep_prob", 1.0)
    heads = attrs["head_num"]
    folded = attrs["input_layout"] in ("BSH", "SBH")
    columns = _column_sums(inputs, attrs)
    key_heads = columns.shape[-1] if folded else _heads(inputs["key"], attrs["input_layout"])
    norm = {
        name: _norm(inputs, name, {"key": key_heads, "value": key_heads}.get(name, heads) if folded else 0)
        for name in ("query", "key", "value", "dy", "attention_in")
    }
    value_size = inputs["dy"].shape[-1] // heads if folded else inputs["dy"].shape[-1]
    keys, rows = max(inputs["key"].shape[:3]), max(inputs["query"].shape[:3]) * (heads // max(1, key_heads))
    largest = norm["dy"] * (norm["value"] / keep + norm["attention_in"])
    r = p + (math.sqrt(value_size) + (10 if "cpu_softcap" in attrs else 6)) * unit
    # A row that is NaN hides what the others add up to, which is at most 1 each.
    column = float(np.where(np.isnan(columns), rows, columns).max(initial=0.0))
    dq = scale * norm["key"] * largest * (r + t + math.sqrt(keys) * unit)
    dk = scale * norm["query"] * largest * (r + t + math.sqrt(rows) * unit) * column
    return {
        "dq": dq,
        "dq_rope": dq,
        "dk": dk,
        "dk_rope": dk,
        "dv": norm["dy"] / keep * (p + t + math.sqrt(rows) * unit) * column,
        "dsink": largest * (r + math.sqrt(keys) * unit) * max(inputs["query"].shape[:3]) * inputs["query"].shape[0],
        "dpse": 0.0,
    }


def _heads(tensor: np.ndarray, layout: str) -> int:
    return int(tensor.shape[{"BNSD": 1, "BSND": 2, "TND": 1}[layout]])


def _column_sums(inputs: Mapping[str, Any], attrs: Mapping[str, Any]) -> np.ndarray:
    """The sum of each column of P over the query rows that read it: dV without dropout for a dO of ones and values of
    one number."""
    heads, folded = attrs["head_num"], attrs["input_layout"] in ("BSH", "SBH")
    given = {name: value for name, value in inputs.items() if name != "drop_mask"}
    size = inputs["query"].shape[-1] // heads if folded else 0
    key_heads = inputs["key"].shape[-1] // max(1, size)
    for name, last in (("dy", heads), ("attention_in", heads), ("value", key_heads)):
        shape = (*inputs[name].shape[:-1], last if folded else 1)
        given[name] = np.ones(shape, inputs[name].dtype)
    plain = {**attrs, "keep_prob": 1.0}
    if plain.get("cpu_empty_rows") == "nan":
        plain["cpu_empty_rows"] = ""
    return reference.run(OP, given, plain, ("dv",), dtype="float64")["dv"]


def _norm(inputs: Mapping[str, Any], name: str, heads: int) -> float:
    """The largest norm of a row, rope part included; `heads` are folded into the last dimension."""
    square = 0.0
    for part in (name, f"{name}_rope"):
        if part in inputs:
            last = inputs[part].shape[-1]
            size = last // heads if heads else last
            rows = _finite(inputs[part]).reshape(-1, size) if size else np.zeros((1, 1))
            square += float((rows**2).sum(axis=1).max(initial=0.0))
    return math.sqrt(square)


def check(
    inputs: Mapping[str, Any], attrs: Mapping[str, Any], outputs: Sequence[str] = GRADIENTS
) -> dict[str, np.ndarray]:
    """Runs the kernel and the reference on a problem of `backward`, asserts that they agree, and returns what the
    kernel gave."""
    got = ops.run(OP, inputs, attrs, outputs)
    want = reference.run(OP, inputs, attrs, outputs)
    allowed = gradient_bounds(inputs, attrs)
    for name in outputs:
        assert got[name].dtype == want[name].dtype, name
        assert got[name].shape == want[name].shape, name
        agree(got[name], want[name], name, allowed[name])
    return got
