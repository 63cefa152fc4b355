"""DynamicSparseAttention gives what its schema says: a float64 reading of it, written from its text, is beside each
case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from fa_compiler.passes.answer.options import Target
from tests.passes.running import LEVELS, Array, assert_same, bound_run, fused, refused, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

CONTRIB = "com.microsoft"
INPUTS = (
    *("query", "key", "value", "past_key", "past_value", "auxiliary_key", "auxiliary_value", "selected_indices"),
    *("selected_counts", "seqlens_k", "total_sequence_length", "cos_cache", "sin_cache", "position_ids"),
    *("q_norm_weight", "k_norm_weight", "head_sink", "committed_length", "key_scale", "value_scale"),
)
OUTPUTS = ("output", "present_key", "present_value")
TOLERANCE = {"float32": 2e-6, "float16": 4e-3}
"""Rounding of float32 sums, and of rotated rows and results of 16 bits."""
ROOM, ENTRIES = 24, 7
"""The rows of a cache, and the entries of a list."""


@dataclass(frozen=True)
class Case:
    """A call: the numbers of earlier keys of each batch entry, and what it has besides."""

    past: tuple[int, ...] = (0, 5, 17)
    rows: int = 4
    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    dtype: str = "float32"
    packed: bool = False
    norms: bool = False
    rotary: int = 0
    positions: bool = False
    sink: bool = False
    attrs: Mapping[str, Any] = field(default_factory=dict)

    def feeds(self) -> dict[str, Array]:
        """The inputs. What no key has written is NaN in the caches. The first token has no list, and some lists name
        later keys."""
        rng, batch = np.random.default_rng(0), len(self.past)
        drawn = lambda *shape: rng.standard_normal(shape).astype(self.dtype)  # noqa: E731
        widths = (self.heads * self.size, self.kv_heads * self.size, self.kv_heads * self.size)
        rows = {name: drawn(batch, self.rows, width) for name, width in zip(INPUTS, widths, strict=False)}
        if self.packed:
            rows = {"query": np.concatenate(list(rows.values()), axis=2)}
        caches = {name: drawn(batch, self.kv_heads, ROOM, self.size) for name in INPUTS[3:5]}
        for cache in caches.values():
            for entry, past in zip(cache, self.past, strict=True):
                entry[:, past:] = np.nan
        indices = np.full((batch * self.rows, ENTRIES), -1, np.int32)
        counts = np.zeros(len(indices), np.int32)
        for token, total in enumerate(np.repeat(np.add(self.past, self.rows), self.rows)):
            counts[token] = min(token, total, ENTRIES)
            indices[token, : counts[token]] = rng.permutation(total)[: counts[token]]
        more: dict[str, Array] = {}
        if self.rotary:
            more |= {name: drawn(ROOM + 9, self.rotary // 2) for name in INPUTS[11:13]}
        if self.positions:
            more["position_ids"] = rng.integers(0, ROOM + 9, (batch, self.rows))
        if self.norms:
            more |= {name: drawn(self.size) for name in INPUTS[14:16]}
        if self.sink:
            more["head_sink"] = drawn(self.heads)
        totals = np.add(self.past, self.rows)
        return {
            **rows,
            **caches,
            "selected_indices": indices,
            "selected_counts": counts,
            "seqlens_k": (totals - 1).astype(np.int32),
            "total_sequence_length": np.array([totals.max()], np.int32),
            **more,
        }

    def model(self, feeds: Mapping[str, Array], opset: int = 17, outputs: tuple[str, ...] = OUTPUTS) -> onnx.ModelProto:
        """A model of one node, with open sizes."""
        names = [name if name in feeds else "" for name in INPUTS]
        while not names[-1]:
            names.pop()
        attrs = {"num_heads": self.heads, "kv_num_heads": self.kv_heads, **self.attrs}
        attrs |= {"do_rotary": 1} if self.rotary else {}
        node = helper.make_node("DynamicSparseAttention", names, outputs, domain=CONTRIB, **attrs)
        shapes: dict[str, list[Any]] = {name: ["B", "S", feeds[name].shape[-1]] for name in INPUTS[:3] if name in feeds}
        cache = ["B", self.kv_heads, "P", self.size]
        shapes |= {"past_key": cache, "past_value": cache, "position_ids": ["B", "S"], "seqlens_k": ["B"]}
        shapes |= {"selected_indices": ["T", ENTRIES], "selected_counts": ["T"]}
        kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
        declared = [
            helper.make_tensor_value_info(name, kinds[name], shapes.get(name, list(array.shape)))
            for name, array in feeds.items()
        ]
        results = {"output": ["B", "S", self.heads * self.size], "present_key": cache, "present_value": cache}
        made = [
            helper.make_tensor_value_info(name, kinds["query"] if name in results else 6, results.get(name, [1]))
            for name in outputs
        ]
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
        graph = helper.make_graph([node], "selected", declared, made)
        return helper.make_model(graph, opset_imports=opsets, ir_version=8)


def rotated(rows: Array, positions: Array, case: Case, feeds: Mapping[str, Array]) -> Array:
    """[B, S, heads, D], of which the elements from rotary_offset on are rotated."""
    cos, sin = (feeds[name].astype(np.float64)[positions][:, :, None] for name in ("cos_cache", "sin_cache"))
    first, rows = int(case.attrs.get("rotary_offset", 0)), rows.copy()
    part = rows[..., first : first + case.rotary]
    one, other = np.split(part.copy(), 2, axis=-1)
    part[...] = np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
    return rows


def of_schema(case: Case, feeds: Mapping[str, Array]) -> list[Array]:
    """The result and the caches, in float64."""
    given = {name: array.astype(np.float64) for name, array in feeds.items()}
    batch, size = len(case.past), case.size
    rows = [given[name] for name in INPUTS[:3] if name in given]
    if case.packed:
        rows = np.split(rows[0], np.cumsum([case.heads, case.kv_heads]) * size, axis=2)
    query, key, value = (each.reshape(batch, case.rows, -1, size) for each in rows)
    if case.norms:
        query, key = (
            each / np.sqrt((each**2).mean(-1, keepdims=True) + 1e-6) * given[name]
            for each, name in zip((query, key), INPUTS[14:16], strict=True)
        )
    own = np.array(case.past)[:, None] + np.arange(case.rows)
    if case.rotary:
        places = feeds["position_ids"] if case.positions else own
        query, key = (rotated(each, places, case, feeds) for each in (query, key))
    keys, values = given["past_key"].copy(), given["past_value"].copy()
    for entry, past in enumerate(case.past):
        for cache, new in ((keys, key), (values, value)):
            cache[entry, :, past : past + case.rows] = new[entry].swapaxes(0, 1)
    out = np.zeros((batch, case.rows, case.heads, size))
    for entry, row, head in np.ndindex(out.shape[:3]):
        token, kv_head = entry * case.rows + row, head // (case.heads // case.kv_heads)
        listed = feeds["selected_indices"][token, : feeds["selected_counts"][token]]
        seen = [int(position) for position in listed if position <= own[entry, row]]
        if not seen:
            continue
        scores = keys[entry, kv_head, seen] @ query[entry, row, head] * case.attrs.get("scale", size**-0.5)
        if case.sink or case.attrs.get("smooth_softmax"):
            scores = np.append(scores, given["head_sink"][head] if case.sink else 0.0)
        weights = np.exp(scores - scores.max())
        out[entry, row, head] = (weights / weights.sum())[: len(seen)] @ values[entry, kv_head, seen]
    return [out.reshape(batch, case.rows, -1), keys, values]


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(dtype="float16", rotary=8, norms=True, positions=True),
        Case(rotary=8, packed=True, attrs={"rotary_offset": 8}),
        Case(rows=1, past=(3, 20), attrs={"smooth_softmax": 1}),
        Case(kv_heads=1, sink=True, attrs={"scale": 0.4, "smooth_softmax": 1}),
        Case(heads=6, kv_heads=6, size=8, rotary=8),
    ],
    ids=str,
)
def test_selected_keys(case: Case) -> None:
    feeds = case.feeds()
    model = case.model(feeds)
    result, report = fused(model)
    (block,) = report.blocks
    assert (block.op, block.layout, block.mask) == ("SparseFlashAttention", "BSND", "causal"), block.reason
    assert block.heads == (case.heads, case.kv_heads)
    wanted = of_schema(case, feeds)
    for level in (LEVELS[0], LEVELS[-1]):
        for got, numbers in zip(run(result, feeds, level), wanted, strict=True):
            assert_same(got, numbers.astype(got.dtype), TOLERANCE[case.dtype])
    buffers = {"present_key": "past_key", "present_value": "past_value"}
    for got, numbers in zip(bound_run(result, feeds, buffers), wanted, strict=True):
        assert_same(got, numbers.astype(got.dtype), TOLERANCE[case.dtype])


def test_fewer_keys_than_tokens() -> None:
    """A run in which the first tokens have no place in the cache ends in an error, and does not write its end."""
    case = Case(rows=3)
    feeds = case.feeds()
    feeds["seqlens_k"][1] = 1
    with refused("invalid indice"):
        run(fused(case.model(feeds))[0], feeds)


def test_without_presents() -> None:
    case = Case()
    feeds = case.feeds()
    result, _ = fused(case.model(feeds, outputs=OUTPUTS[:1]))
    assert_same(run(result, feeds)[0], of_schema(case, feeds)[0].astype(np.float32), TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"attention_mode": "local_plus_selected"}, "see a window beside"),
        ({"selected_kv_source": "auxiliary"}, "selected from 'auxiliary'"),
        ({"is_causal": 0}, "is_causal is 0"),
        ({"output_bf16": 1}, "gives bfloat16"),
        ({"scale": 0.0}, "scale is 0"),
        ({"kv_num_heads": 3}, "kv_num_heads 3"),
        ({"kv_num_heads": 4}, "4 heads of 16"),
        ({"later": 1}, "the attribute 'later'"),
    ],
)
def test_attributes_that_are_declined(attrs: dict[str, Any], words: str) -> None:
    case = Case(attrs=attrs)
    (block,) = fused(case.model(case.feeds()))[1].blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert words in (block.reason or "")


def test_inputs_that_are_declined() -> None:
    case = Case()
    feeds = case.feeds()
    models = {
        "has no past": case.model({name: each for name, each in feeds.items() if not name.startswith("past")}),
        "not of the type of query": case.model({**feeds, "past_key": feeds["past_key"].astype(np.float16)}),
        "the input committed_length": case.model({**feeds, "committed_length": np.zeros(1, np.int32)}),
        "the input auxiliary_key": case.model({**feeds, "auxiliary_key": feeds["past_key"]}),
        "several key heads": case.model({**feeds, "head_sink": np.zeros(4, np.float32)}),
        "one of its norms": case.model({**feeds, "q_norm_weight": np.zeros(16, np.float32)}),
        "validation_status": case.model(feeds, outputs=(*OUTPUTS, "validation_status")),
        "opset 12": case.model(feeds, opset=12),
    }
    for words, model in models.items():
        assert words in (fused(model)[1].blocks[0].reason or ""), fused(model)[1].blocks[0].reason


@pytest.mark.parametrize("target", ["ascend", "onnx", "contrib"])
def test_other_targets(target: Target) -> None:
    case = Case()
    (block,) = fused(case.model(case.feeds(), opset=23), target)[1].blocks
    assert (block.status, block.code) == ("declined", "ready_made")
