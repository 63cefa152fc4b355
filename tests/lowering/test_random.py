"""FlashAttentionScore on random compositions of everything the kernel takes, against the float64 reference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .problems import DTYPES, TRIANGLE, Form, Inputs, check

LENGTHS = st.one_of(st.integers(1, 40), st.sampled_from([95, 96, 97, 128, 300, 511, 512, 513, 600]))
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([64, 80, 96, 128]))
TOKENS = st.one_of(st.integers(-5, 60), st.just(2147483647))


def _one_or(draw: st.DrawFn, *dims: int) -> tuple[int, ...]:
    """A shape that broadcasts to `dims`."""
    return tuple(draw(st.sampled_from([1, dim])) for dim in dims)


@dataclass(repr=False)
class Problem:
    inputs: Inputs
    attrs: dict[str, Any]

    def __repr__(self) -> str:
        return f"{({name: f'{a.dtype}{list(a.shape)}' for name, a in self.inputs.items()})} {self.attrs}"


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layout = draw(st.sampled_from(["BSH", "SBH", "BSND", "BNSD", "TND"]))
    packed = layout == "TND"
    kv_heads = draw(st.integers(1, 3))
    queries: Any = draw(LENGTHS)
    keys: Any = draw(LENGTHS)
    if packed:
        batch = draw(st.integers(1, 3))
        queries = tuple(draw(st.integers(0, 60)) for _ in range(batch))
        keys = tuple(draw(st.integers(0, 60)) for _ in range(batch))
    else:
        batch = draw(st.integers(1, 2))
    attrs: dict[str, Any] = {
        "scale_value": draw(st.sampled_from([0.125, 0.3, 1.0, -0.2, 0.0])),
        "pse_type": draw(st.integers(0, 1)),
        "cpu_empty_rows": draw(st.sampled_from(["", "zero", "mean", "unmasked", "nan"])),
        "cpu_nan_rows": draw(st.sampled_from(["", "zero", "infinite"])),
        "softmax_out_layout": draw(st.sampled_from(["", "same_as_input"])),
    }
    form = Form(
        layout,
        draw(st.sampled_from(list(DTYPES))),
        batch,
        kv_heads * draw(st.integers(1, 4)),
        kv_heads,
        queries,
        keys,
        draw(SIZES),
        draw(SIZES),
        attrs,
    )
    inputs = form.inputs(rng)
    if batch == 2 and not packed:
        # One or two of them have batch 1, which is repeated.
        for name in draw(st.sampled_from([(), ("query",), ("key",), ("value",), ("key", "value"), ("query", "key")])):
            inputs[name] = inputs[name][:, :1] if layout == "SBH" else inputs[name][:1]
    full = (batch, form.heads, int(np.max(queries)), int(np.max(keys)))
    mode = draw(st.sampled_from([None, 0, 0, 1, 2, 3, 4]))
    if mode is not None:
        attrs |= {"sparse_mode": mode, "pre_tockens": draw(TOKENS), "next_tockens": draw(TOKENS)}
        shape = full[2:] if packed or draw(st.booleans()) else _one_or(draw, *full)
        share = draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        inputs["atten_mask"] = TRIANGLE if mode >= 2 else rng.random(shape) < share
    if draw(st.booleans()) and not packed:
        bias = rng.standard_normal(_one_or(draw, *full)).astype(np.float32)
        low = draw(st.sampled_from([None, -np.inf, -3.0e38, np.inf, np.nan]))
        if low is not None:
            bias[rng.random(bias.shape) < 0.2] = low
        own = draw(st.sampled_from([np.dtype(np.float32), DTYPES[form.dtype]]))
        with np.errstate(over="ignore"):
            inputs["real_shift"] = bias.astype(own)
    else:
        attrs["pse_type"] = 1
    return Problem(inputs, form.all_attrs)


# The fixture only sets an environment variable, which holds for all examples of a test.
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(problem=problems())
@pytest.mark.usefixtures("isa")
def test_random_problems(problem: Problem) -> None:
    check(problem.inputs, problem.attrs)
