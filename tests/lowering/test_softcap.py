"""The vector tanh of soft caps: a row with one key has its score as softmax_max."""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler import ops

from .problems import Form, check

OP = "FlashAttentionScore"


@pytest.mark.usefixtures("isa")
def test_tanh_is_within_two_units_in_the_last_place() -> None:
    """Over all exponents, with both signs, and densely where tanh bends and around the limit of its polynomial."""
    rng = np.random.default_rng(0)
    dense = [rng.uniform(0.05, 10.0, 20000), 0.625 + np.arange(-200, 200) * 2.0**-24]
    x = np.concatenate([2.0 ** rng.uniform(-126, 127, 5000), *dense]).astype(np.float32)
    x = np.concatenate([x, -x, np.array([0.0, -0.0, np.inf, -np.inf], np.float32)])
    one = np.ones((1, 1, 1, 1), np.float32)
    inputs = {"query": x.reshape(1, 1, -1, 1), "key": one, "value": one}
    attrs = {"head_num": 1, "input_layout": "BNSD", "scale_value": 1.0, "cpu_softcap": 1.0}
    got = ops.run(OP, inputs, attrs, ["softmax_max", "attention_out"])["softmax_max"][0, 0, :, 0]
    wanted = np.tanh(x.astype(np.float64))
    unit = np.spacing(np.abs(wanted).astype(np.float32)).astype(np.float64)
    assert (np.abs(got - wanted) / unit).max() <= 2.0
    np.testing.assert_array_equal(got[-4:], [0.0, 0.0, 1.0, -1.0])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("queries", [3, 40])
def test_products_that_are_no_numbers(queries: int) -> None:
    """An infinite product is capped to c or -c, a NaN stays NaN, in few rows and in many."""
    form = Form("BNSD", "float32", 1, 2, 1, queries, 70, 8, 8, {"scale_value": 0.5, "cpu_softcap": 3.0})
    inputs = form.inputs(np.random.default_rng(1))
    inputs["query"][0, 0, 0, 0] = np.inf
    inputs["query"][0, 1, 1, 2] = np.nan
    inputs["key"][0, 0, 5, :] = 1e38
    with np.errstate(invalid="ignore"):
        got = check(inputs, form.all_attrs)
    assert np.isnan(got["attention_out"][0, 1, 1]).all()
    assert np.isfinite(got["attention_out"][0, 0, 0]).all()
