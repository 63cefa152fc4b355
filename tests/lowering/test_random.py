"""FlashAttentionScore on random compositions of everything the operator takes, against the float64 reference.

Lengths lie around the edges of what the kernels cut sequences into: vectors (4, 8, 16), row tiles (6, 12), panels (8,
16, 32), spans (96 rows) and blocks (512 keys); head sizes around vectors and panels. The bound of the errors is derived
in problems.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples

from .problems import DTYPES, PREFIX_MASK, TRIANGLE, Form, Inputs, check

LENGTHS = st.one_of(
    st.integers(1, 40), st.sampled_from([47, 48, 49, 95, 96, 97, 128, 192, 193, 300, 511, 512, 513, 600])
)
SIZES = st.one_of(st.integers(1, 40), st.sampled_from([47, 48, 63, 64, 65, 80, 96, 127, 128, 129]))
TOKENS = st.one_of(st.integers(-5, 60), st.just(2147483647))


def _one_or(draw: st.DrawFn, *dims: int) -> tuple[int, ...]:
    """A shape that broadcasts to `dims`."""
    return tuple(draw(st.sampled_from([1, dim])) for dim in dims)


@dataclass(repr=False)
class Problem:
    inputs: Inputs
    attrs: dict[str, Any]

    def __repr__(self) -> str:
        return f"{ ({name: f'{a.dtype}{list(a.shape)}' for name, a in self.inputs.items()}) } {self.attrs}"


@dataclass
class Maker:
    """Adds inputs and attributes to a form, one feature a method."""

    draw: st.DrawFn
    rng: np.random.Generator
    form: Form
    inputs: Inputs
    attrs: dict[str, Any]

    @property
    def packed(self) -> bool:
        return self.form.layout == "TND"

    @property
    def lengths(self) -> list[tuple[int, int]]:
        """Queries and keys of each sequence."""
        if self.packed:
            return list(zip(self.form.queries, self.form.keys, strict=True))
        return [(self.form.queries, self.form.keys)] * self.form.batch

    @property
    def full(self) -> tuple[int, int, int, int]:
        queries, keys = zip(*self.lengths, strict=True)
        return len(self.lengths), self.form.heads, max(queries), max(keys)

    def mask(self) -> None:
        modes = [None, 0, 0, 1, 2, 3, 4, *((6, 7, 8) if self.packed else (5, 6))]
        mode = self.draw(st.sampled_from(modes))
        if mode is None:
            return
        self.attrs |= {"sparse_mode": mode, "pre_tockens": self.draw(TOKENS), "next_tockens": self.draw(TOKENS)}
        share = self.draw(st.sampled_from([0.0, 0.3, 0.9, 1.0]))
        if mode in (0, 1, 5):
            whole = self.packed or self.draw(st.booleans())
            shape = self.full[2:] if whole else _one_or(self.draw, *self.full)
            if self.packed and self.draw(st.booleans()):
                shape = tuple(int(n) for n in np.sum(self.lengths, axis=0))
            self.inputs["atten_mask"] = self.rng.random(shape) < share
        elif mode in (2, 3, 4) and not self.packed and self.draw(st.booleans()):
            shape = _one_or(self.draw, *self.full)
            self.inputs["atten_mask"] = self.rng.random((*shape[:2], 1, shape[3])) < share
        else:
            self.inputs["atten_mask"] = PREFIX_MASK if mode == 6 else TRIANGLE
        if mode == 6:
            prefixes = [self.rng.integers(max(0, keys - queries), keys + 1) for queries, keys in self.lengths]
            self.inputs["prefix"] = np.array(prefixes, np.int64)

    def bias(self) -> None:
        if self.packed:
            sizes = np.array([(queries * keys, keys) for queries, keys in self.lengths])
            full, rows = self.form.heads * sizes.sum(axis=0)
            shape: tuple[int, ...] = (int(self.draw(st.sampled_from([full, rows]))), 1)
            if full == rows:
                return
        else:
            shape = _one_or(self.draw, *self.full)
        bias = self.rng.standard_normal(shape).astype(np.float32)
        low = self.draw(st.sampled_from([None, -np.inf, -3.0e38, np.inf, np.nan]))
        if low is not None:
            bias[self.rng.random(bias.shape) < 0.2] = low
        own = self.draw(st.sampled_from([np.dtype(np.float32), DTYPES[self.form.dtype]]))
        with np.errstate(over="ignore"):
            self.inputs["real_shift"] = bias.astype(own)
        self.attrs["pse_type"] = self.draw(st.integers(0, 1))

    def slopes(self) -> None:
        mode = self.attrs.get("sparse_mode")
        square = all(queries == keys for queries, keys in self.lengths)
        if mode in (7, 8) or not (square or self.packed):
            return
        shape = self.draw(st.sampled_from([self.full[:2], self.full[1:2]]))
        self.inputs["real_shift"] = self.rng.random(shape, np.float32)
        self.attrs["pse_type"] = self.draw(st.integers(2, 3))
        for name in ("q_start_idx", "kv_start_idx"):
            if self.draw(st.booleans()):
                self.inputs[name] = np.array([self.draw(st.integers(-50, 50))], np.int64)

    def sink(self) -> None:
        self.inputs["sink"] = 3 * self.rng.standard_normal(self.form.heads, np.float32)
        self.attrs["cpu_empty_rows"] = self.draw(st.sampled_from(["", "zero"]))

    def rope(self) -> None:
        form = Form(**{**vars(self.form), "size": self.draw(st.integers(1, 40))})
        rope = form.inputs(self.rng)
        for name in ("query", "key"):
            batch = self.inputs[name].shape[1 if self.form.layout == "SBH" else 0]
            part = rope[name]
            if not self.packed:
                part = part[:, :batch] if self.form.layout == "SBH" else part[:batch]
            self.inputs[f"{name}_rope"] = part

    def masked_score(self) -> None:
        """Masked keys with a score, such as one that others undercut."""
        if "atten_mask" in self.inputs:
            self.attrs["cpu_mask_value"] = self.draw(st.sampled_from([2.0, -9.0, -1e4, -3e38]))
            self.attrs["cpu_masked_values"] = self.draw(st.sampled_from(["", "zero"]))
            if "real_shift" in self.inputs:
                self.attrs["cpu_masked_bias"] = self.draw(st.sampled_from(["", "added"]))
                if self.attrs["cpu_masked_bias"]:
                    self.attrs["cpu_masked_values"] = ""
                    if self.draw(st.booleans()):
                        del self.attrs["cpu_mask_value"]

    def softcap(self) -> None:
        """A soft cap far below, among or far above the scores; with the scale inside, a bias is scaled, too."""
        if "real_shift" not in self.inputs or self.attrs["pse_type"] != 1:
            self.attrs["cpu_softcap"] = self.draw(st.sampled_from([0.1, 2.0, 50.0, 1e6]))

    def dropout(self) -> None:
        self.attrs["keep_prob"] = self.draw(st.sampled_from([0.5, 0.9]))
        bits = sum(self.form.heads * queries * keys for queries, keys in self.lengths)
        drop = np.packbits(self.rng.random(bits) < 0.7, bitorder="little")
        self.inputs["drop_mask"] = np.append(drop, np.zeros(1, np.uint8))


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    layout = draw(st.sampled_from(["BSH", "SBH", "BSND", "BNSD", "TND"]))
    packed = layout == "TND"
    kv_heads = draw(st.integers(1, 3))
    queries: Any = draw(LENGTHS)
    square = draw(st.booleans())
    keys: Any = queries if square else draw(LENGTHS)
    batch = draw(st.integers(1, 3 if packed else 2))
    if packed:
        queries = tuple(draw(st.integers(0, 60)) for _ in range(batch))
        keys = queries if square else tuple(draw(st.integers(0, 60)) for _ in range(batch))
    attrs: dict[str, Any] = {
        "scale_value": draw(st.sampled_from([0.125, 0.3, 1.0, -0.2, 0.0])),
        "pse_type": 1,
        "cpu_empty_rows": draw(st.sampled_from(["", "zero", "mean", "unmasked", "nan"])),
        "cpu_nan_rows": draw(st.sampled_from(["", "zero", "infinite"])),
        "softmax_out_layout": draw(st.sampled_from(["", "same_as_input"])),
    }
    dtype = draw(st.sampled_from(list(DTYPES)))
    group = draw(st.integers(1, 4))
    form = Form(layout, dtype, batch, kv_heads * group, kv_heads, queries, keys, draw(SIZES), draw(SIZES), attrs)
    inputs = form.inputs(rng)
    if batch == 2 and not packed:
        # One or two of them have batch 1, which is repeated.
        for name in draw(st.sampled_from([(), ("query",), ("key",), ("value",), ("key", "value"), ("query", "key")])):
            inputs[name] = inputs[name][:, :1] if layout == "SBH" else inputs[name][:1]
    maker = Maker(draw, rng, form, inputs, attrs)
    maker.mask()
    for feature in draw(st.sampled_from([(), (maker.bias,), (maker.bias,), (maker.slopes,)])):
        feature()
    for feature in (maker.sink, maker.rope, maker.dropout, maker.masked_score, maker.softcap):
        if draw(st.integers(0, 2)) == 0:
            feature()
    return Problem(inputs, form.all_attrs)


# The fixture only sets an environment variable, which holds for all examples of a test.
@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(problem=problems())
@pytest.mark.usefixtures("isa")
def test_random_problems(problem: Problem) -> None:
    check(problem.inputs, problem.attrs)
