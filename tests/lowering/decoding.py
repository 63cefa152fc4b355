"""Decoding problems: one set of keys and values, stored in every way the operator knows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np

from fa_compiler import ops, reference

OP = "IncreFlashAttention"
DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}

# Rounding of the result to its own type, and of float32 sums of some hundred terms, in units of the largest value.
RELATIVE = {"float32": 2e-6, "float16": 2**-11, "bfloat16": 2**-8, "int8": 0.0}
SUMS = 4e-6

Inputs = dict[str, Any]


@dataclass
class Form:
    """`storage` is plain, list, pages (blocks, block_size, H) or pages_by_head (blocks, heads, block_size, D)."""

    layout: str = "BNSD"
    dtype: str = "float32"
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    length: int = 40
    size: int = 16
    storage: str = "plain"
    block_size: int = 32
    int8_cache: bool = False
    lists: tuple[int, ...] = ()
    attrs: dict[str, Any] = field(default_factory=dict)

    @property
    def room(self) -> list[int]:
        """Tokens each batch entry has room for."""
        if self.storage == "list":
            return list(self.lists)
        if self.storage.startswith("pages"):
            return [-(-self.length // self.block_size) * self.block_size] * self.batch
        return [self.length] * self.batch

    @property
    def all_attrs(self) -> dict[str, Any]:
        paged = {"block_size": self.block_size} if self.storage.startswith("pages") else {}
        heads = {"num_heads": self.heads, "num_key_value_heads": self.key_heads}
        return {**heads, "input_layout": self.layout, "scale_value": 0.2, **paged, **self.attrs}

    def inputs(self, rng: np.random.Generator) -> Inputs:
        """Query, keys and values, the table and lengths of pages, the scales of INT8 caches."""
        shape = (self.batch, self.heads, self.size)
        inputs: Inputs = {"query": self.in_layout(rng.normal(size=shape).astype(DTYPES[self.dtype])[:, None])}
        if self.storage == "list":
            for name in ("key", "value"):
                inputs[name] = [
                    self.in_layout(self._numbers(rng, (1, n, self.key_heads, self.size))) for n in self.lists
                ]
        elif self.storage == "plain":
            for name in ("key", "value"):
                numbers = self._numbers(rng, (self.batch, self.length, self.key_heads, self.size))
                inputs[name] = self.in_layout(numbers)
        else:
            inputs |= self._pages(rng)
        if self.int8_cache:
            inputs["antiquant_scale"] = rng.uniform(0.01, 0.03, 2).astype(DTYPES[self.dtype])
        return inputs

    def in_layout(self, x: np.ndarray) -> np.ndarray:
        """[B,S,N,D] in the input layout."""
        if self.layout == "BSH":
            return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3])
        return np.ascontiguousarray(x.transpose(0, 2, 1, 3)) if self.layout == "BNSD" else x

    def _numbers(self, rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        if self.int8_cache:
            return rng.integers(-128, 128, shape, dtype=np.int8)
        return rng.normal(size=shape).astype(DTYPES[self.dtype])

    def _pages(self, rng: np.random.Generator) -> Inputs:
        columns = self.room[0] // self.block_size
        blocks = self.batch * columns + 3
        table = rng.permutation(blocks)[: self.batch * columns].reshape(self.batch, columns).astype(np.int32)
        inputs: Inputs = {"block_table": table}
        for name in ("key", "value"):
            pool = self._numbers(rng, (blocks, self.block_size, self.key_heads, self.size))
            by_head = self.storage == "pages_by_head"
            inputs[name] = (
                np.ascontiguousarray(pool.transpose(0, 2, 1, 3))
                if by_head
                else pool.reshape(blocks, self.block_size, -1)
            )
        inputs["actual_seq_lengths"] = np.array([self.length], np.int64)
        return inputs


def check(inputs: Inputs, attrs: dict[str, Any]) -> np.ndarray:
    """Runs the kernel and the reference, asserts that they agree, and returns what the kernel gave."""
    got: np.ndarray = ops.run(OP, inputs, attrs)["attention_out"]
    exact = reference.run(OP, inputs, attrs, dtype="float64")["attention_out"]
    want = reference.run(OP, inputs, attrs)["attention_out"]
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    if got.dtype == np.int8:
        # What is rounded may lie on either side of a tie.
        gap = np.abs(got - np.clip(exact, -128, 127))
        assert gap.max(initial=0.0) <= 0.5 + 1e-3
        return got
    dtype = got.dtype.name
    largest = np.abs(exact[np.isfinite(exact)]).max(initial=1.0)
    value_size = 4.0 if inputs["query"].dtype.name != "int8" else 1.0
    allowed = RELATIVE[dtype] * np.abs(exact) + SUMS * max(largest, value_size)
    assert np.array_equal(np.isnan(got.astype(np.float64)), np.isnan(exact))
    finite = ~np.isnan(exact)
    assert (np.abs(got.astype(np.float64) - exact)[finite] <= allowed[finite]).all()
    return got
