"""FlashAttentionScoreGrad on random compositions of everything the operator takes, against the float64 reference: the
gradients of the forward problems of test_random.py, whose lengths lie around the edges of vectors, tiles and panels.
Blocks of the gradient are up to 192 rows and 128 keys. The bound of the errors is derived in gradients.py.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tests.examples import examples

from .gradients import GRADIENTS, backward, check
from .problems import Inputs
from .test_random import Problem, problems


def repeated(inputs: Inputs, layout: str) -> Inputs:
    """With the batches of 1 repeated, which the gradient does not do."""
    axis = 1 if layout == "SBH" else 0
    names = [name for name in inputs if name.removesuffix("_rope") in ("query", "key", "value")]
    batch = max(inputs[name].shape[axis] for name in names)
    if layout == "TND":
        return inputs
    return inputs | {name: np.repeat(inputs[name], batch // inputs[name].shape[axis], axis) for name in names}


@st.composite
def gradient_problems(draw: st.DrawFn) -> tuple[Problem, tuple[str, ...]]:
    forward = draw(problems())
    attrs: dict[str, Any] = dict(forward.attrs)
    attrs.pop("cpu_masked_values", None)  # the gradient has no such extension
    if attrs["cpu_empty_rows"] == "unmasked":
        attrs["cpu_empty_rows"] = ""
    if "atten_mask" in forward.inputs and draw(st.integers(0, 3)) == 0:
        attrs["cpu_mask_value"] = draw(st.sampled_from([-1.0, -9.0, -10000.0]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    order = draw(st.sampled_from(["", "same_as_input"]))
    inputs, attrs = backward(repeated(forward.inputs, attrs["input_layout"]), attrs, rng, order)
    # softmax_max is rounded to float32: where that is coarser than a score's error, P is as wrong as the difference,
    # and where a bias swallows the scores, arbitrary. (An empty row has -FLT_MAX, exactly.)
    top = np.abs(inputs["softmax_max"])
    assume(not ((top > 1e4) & (top < 3.3e38)).any())
    wanted = draw(st.one_of(st.just(GRADIENTS), st.sets(st.sampled_from(GRADIENTS), min_size=1).map(tuple)))
    return Problem(inputs, attrs), wanted


# The fixture only sets an environment variable, which holds for all examples of a test.
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(problem=gradient_problems())
@pytest.mark.usefixtures("isa")
def test_random_gradients(problem: tuple[Problem, tuple[str, ...]]) -> None:
    check(problem[0].inputs, problem[0].attrs, problem[1])
