"""FA_COMPILER_FLOAT32_PRODUCTS: float32 inputs with products of bfloat16, off unless asked for.

Rounding to bfloat16 is wrong by at most 2^-9 of a number. A score is a sum of products of two rounded numbers: wrong by
at most 2^-8 sum |q_d k_d| <= 2^-8 |q| |k|, a probability by twice that of itself (its own score and the sum) and by
2^-9 more where it is rounded, an output in addition by 2^-9 of the values: together 2 * 2^-8 |scale| |q| |k| + 2^-8 of
the largest value, with the norms of the largest rows. Independent errors stay far below.
"""

from __future__ import annotations

import numpy as np
import pytest

from fa_compiler import ops, reference
from tests.lowering.problems import OP, OUTPUTS, TRIANGLE, Form, check

SETTING = "FA_COMPILER_FLOAT32_PRODUCTS"

FORMS = {
    "plain": Form(queries=70, keys=83, size=64),
    "odd sizes": Form(queries=33, keys=45, size=7, value_size=5),
    "causal": Form(queries=300, keys=300, size=32, attrs={"sparse_mode": 3}),
    "BSND, grouped": Form(layout="BSND", heads=4, kv_heads=1, queries=20, keys=301, size=80),
}


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def problem(name: str, rng: np.random.Generator) -> dict[str, np.ndarray]:
    inputs = FORMS[name].inputs(rng)
    return inputs | {"atten_mask": TRIANGLE} if name == "causal" else inputs


@pytest.mark.parametrize("name", FORMS)
def test_rounded_products(name: str, isa: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, attrs = problem(name, rng), FORMS[name].all_attrs
    both = ops.run(OP, inputs, attrs, OUTPUTS)
    exact = ops.run(OP, inputs, attrs, ["attention_out"])
    monkeypatch.setenv(SETTING, "bfloat16")
    for output, value in ops.run(OP, inputs, attrs, OUTPUTS).items():
        np.testing.assert_array_equal(value, both[output], "statistics are for the gradient, which does not round")
    got = ops.run(OP, inputs, attrs, ["attention_out"])
    if isa not in ("avx512bf16", "amx"):
        np.testing.assert_array_equal(got["attention_out"], exact["attention_out"])
        return
    assert not np.array_equal(got["attention_out"], exact["attention_out"])
    want = reference.run(OP, inputs, attrs, OUTPUTS)
    size = FORMS[name].size
    norms = [np.sqrt((inputs[x].reshape(-1, size).astype(np.float64) ** 2).sum(-1)).max() for x in ("query", "key")]
    score = 2.0**-8 * attrs["scale_value"] * norms[0] * norms[1]
    largest = float(np.abs(inputs["value"]).max())
    assert np.abs(got["attention_out"] - want["attention_out"]).max() <= (2 * score + 2.0**-8) * largest


@pytest.mark.parametrize("setting", [None, "", "float32"])
def test_off_unless_asked_for(
    setting: str | None, isa: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is None:
        monkeypatch.delenv(SETTING, raising=False)
    else:
        monkeypatch.setenv(SETTING, setting)
    check(FORMS["plain"].inputs(rng), FORMS["plain"].all_attrs)


def test_few_rows_are_not_rounded(isa: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "bfloat16")
    form = Form(queries=3, keys=600, size=64)
    check(form.inputs(rng), form.all_attrs)


def test_infinite_values(isa: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that is not attended is not read, rounded or not."""
    monkeypatch.setenv(SETTING, "bfloat16")
    form = Form(queries=40, keys=40, size=16, attrs={"sparse_mode": 3})
    inputs = form.inputs(rng) | {"atten_mask": TRIANGLE}
    inputs["value"][:, :, 30:] = np.inf
    out = ops.run(OP, inputs, form.all_attrs, ["attention_out"])["attention_out"]
    assert np.isfinite(out[:, :, :30]).all()
    assert np.isposinf(out[:, :, 30:]).all()


def test_an_unknown_type_is_an_error(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "int8")
    form = FORMS["plain"]
    with pytest.raises(ops.KernelError, match="FA_COMPILER_FLOAT32_PRODUCTS=int8 is neither float32 nor bfloat16"):
        ops.run(OP, form.inputs(rng), form.all_attrs, OUTPUTS)
