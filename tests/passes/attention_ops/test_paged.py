"""PagedAttention gives what its schema says: a float64 reading of it, written from its text, is beside each case."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper

from fa_compiler.passes.answer.options import Target
from tests.passes.running import LEVELS, ORIGINAL_OFF, Array, assert_same, bound_run, fused, refused, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

CONTRIB = "com.microsoft"
INPUTS = (
    *("query", "key", "value", "key_cache", "value_cache", "cumulative_sequence_length", "past_seqlens"),
    *("block_table", "cos_cache", "sin_cache", "slot_mapping", "head_sink", "q_norm_weight", "k_norm_weight"),
    *("k_scale", "v_scale", "attention_metadata"),
)
SPARSE_INPUTS = (
    *INPUTS[:8],
    *("slot_mapping", "selected_indices", "selected_counts", "auxiliary_key", "auxiliary_value", "auxiliary_lengths"),
    *("cos_cache", "sin_cache", *INPUTS[11:]),
)
TOLERANCE = {"float32": 2e-6, "float16": 4e-3, "bfloat16": 3e-2}
"""Rounding of float32 sums, and of rotated rows and results of 16 bits."""
BOUND = {"key_cache_out": "key_cache", "value_cache_out": "value_cache"}


@dataclass(frozen=True)
class Case:
    """A call: sizes, the numbers of new and of earlier tokens of each sequence, and the attributes besides."""

    heads: int = 4
    kv_heads: int = 2
    size: int = 16
    block: int = 16
    new: tuple[int, ...] = (3, 0, 17, 1, 2)
    past: tuple[int, ...] = (14, 5, 0, 31, 32)
    dtype: str = "float16"
    packed: bool = False
    slots: bool = False
    norms: bool = False
    rotary: int = 0
    sink: bool = False
    int8: str = ""
    selected: int = 0
    attrs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """The number of new tokens."""
        return sum(self.new)

    @property
    def latent(self) -> bool:
        """Is there one cache, of keys and values?"""
        return self.attrs.get("kv_cache_layout") == "LATENT"

    @property
    def width(self) -> int:
        """The size of a head of values."""
        return int(self.attrs.get("v_head_size", 0)) or self.size

    def table(self, rng: np.random.Generator) -> tuple[Array, int]:
        """A block table, and the number of blocks. A page that holds no key is -1."""
        used = [-(-(new + past) // self.block) for new, past in zip(self.new, self.past, strict=True)]
        count = sum(used) + 2
        blocks = iter(rng.permutation(count))
        table = np.full((len(used), max(used) + 1), -1, np.int32)
        for row, pages in zip(table, used, strict=True):
            row[:pages] = [next(blocks) for _ in range(pages)]
        return table, count

    def feeds(self, seed: int = 0) -> dict[str, Array]:
        """The inputs. What no key has written is NaN in the caches."""
        rng = np.random.default_rng(seed)
        drawn = lambda *shape: rng.standard_normal(shape).astype(np.dtype(self.dtype))  # noqa: E731
        wide, narrow = self.heads * self.size, self.kv_heads * self.size
        rows = {name: drawn(self.tokens, size) for name, size in zip(INPUTS, (wide, narrow, narrow), strict=False)}
        table, blocks = self.table(rng)
        shape = (blocks, self.block, self.kv_heads, self.size)
        caches: dict[str, Array] = {name: np.full(shape, np.nan, np.dtype(self.dtype)) for name in INPUTS[3:5]}
        if self.int8:
            caches = {name: rng.integers(-128, 128, shape).astype(np.int8) for name in caches}
        for cache in caches.values():
            for row, past in zip(table, self.past, strict=True):
                for position in range(past):
                    page = row[position // self.block], position % self.block
                    cache[page] = rng.integers(-128, 128) if self.int8 else drawn(*shape[2:])
        if self.packed:
            rows = {"query": np.concatenate(list(rows.values()), axis=1)}
        if self.latent:
            del rows["value"], caches["value_cache"]
        more: dict[str, Array] = {}
        if self.rotary:
            angles = rng.random((80, self.rotary // 2)) * 2 * np.pi
            more |= {"cos_cache": np.cos(angles).astype(self.dtype), "sin_cache": np.sin(angles).astype(self.dtype)}
        if self.slots:
            places = slots_of(self, table).astype(np.int32)
            places[::3] = -1
            more["slot_mapping"] = places
        if self.sink:
            more["head_sink"] = drawn(self.heads)
        if self.norms:
            more |= {name: drawn(self.size) for name in INPUTS[12:14]}
        if self.int8:
            scale = (1,) if self.int8 == "PER_TENSOR" else (self.kv_heads, 1, self.size)
            more |= {name: (rng.random(scale) / 40 + 0.01).astype(np.float32) for name in INPUTS[14:16]}
        if self.selected:
            more |= self.selection(rng)
        lengths = {
            "cumulative_sequence_length": np.cumsum([0, *self.new]).astype(np.int32),
            "past_seqlens": np.array(self.past, np.int32),
            "block_table": table,
        }
        return {**rows, **caches, **lengths, **more}

    def selection(self, rng: np.random.Generator) -> dict[str, Array]:
        """Keys of its sequence for each token, some of them later than the token. The first token has none."""
        indices = np.full((self.tokens, self.selected), -1, np.int32)
        counts = np.zeros(self.tokens, np.int32)
        lengths = np.repeat(np.add(self.new, self.past), self.new)
        for token, length in enumerate(lengths[1:], 1):
            counts[token] = rng.integers(0, min(length, self.selected) + 1)
            indices[token, : counts[token]] = rng.permutation(length)[: counts[token]]
        return {"selected_indices": indices, "selected_counts": counts}

    def model(self, feeds: Mapping[str, Array], opset: int = 21, outputs: int = 3) -> onnx.ModelProto:
        """A model of one node. The number of tokens is an open size."""
        op_type, known = "PagedAttention", INPUTS
        if self.selected:
            op_type, known = "SparsePagedAttention", SPARSE_INPUTS
        names = [name if name in feeds else "" for name in known]
        while not names[-1]:
            names.pop()
        results = ["output", "key_cache_out", *(() if self.latent else ("value_cache_out",))][:outputs]
        attrs: dict[str, Any] = {"num_heads": self.heads, "kv_num_heads": self.kv_heads, **self.attrs}
        attrs |= {"do_rotary": 1} if self.rotary else {}
        attrs |= {"k_quant_type": self.int8, "v_quant_type": self.int8} if self.int8 else {}
        node = helper.make_node(op_type, names, results, domain=CONTRIB, **attrs)
        declared = [
            helper.make_tensor_value_info(
                name,
                helper.np_dtype_to_tensor_dtype(array.dtype),
                ["T", *array.shape[1:]] if name in (*INPUTS[:3], "slot_mapping", *SPARSE_INPUTS[9:11]) else array.shape,
            )
            for name, array in feeds.items()
        ]
        kind = helper.np_dtype_to_tensor_dtype(feeds["query"].dtype)
        made = [helper.make_tensor_value_info("output", kind, ["T", self.heads * self.width])]
        made += [
            helper.make_tensor_value_info(
                name, helper.np_dtype_to_tensor_dtype(feeds[BOUND[name]].dtype), feeds[BOUND[name]].shape
            )
            for name in results[1:]
        ]
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid(CONTRIB, 1)]
        return helper.make_model(
            helper.make_graph([node], "paged", declared, made), opset_imports=opsets, ir_version=10
        )


def slots_of(case: Case, table: Array) -> Array:
    """Where each new token's key is in the caches."""
    return np.array(
        [
            int(row[position // case.block]) * case.block + position % case.block
            for row, new, past in zip(table, case.new, case.past, strict=True)
            for position in range(past, past + new)
        ]
    )


def normed(rows: Array, weight: Array, epsilon: float) -> Array:
    rows = rows / np.sqrt((rows**2).mean(axis=-1, keepdims=True) + epsilon)
    return rows * weight


def rotated(rows: Array, positions: Array, case: Case, feeds: Mapping[str, Array]) -> Array:
    """[T, heads, D], of which the elements from rotary_offset on are rotated."""
    cos, sin = (feeds[name].astype(np.float64)[positions][:, None] for name in ("cos_cache", "sin_cache"))
    first, rows = int(case.attrs.get("rotary_offset", 0)), rows.copy()
    part = rows[..., first : first + case.rotary]
    if case.attrs.get("rotary_interleaved"):
        one, other = part[..., ::2].copy(), part[..., 1::2].copy()
        part[..., ::2], part[..., 1::2] = one * cos - other * sin, other * cos + one * sin
    else:
        one, other = np.split(part.copy(), 2, axis=-1)
        part[...] = np.concatenate([one * cos - other * sin, other * cos + one * sin], axis=-1)
    return rows


def attended(case: Case, row: int, new: int, past: int) -> list[int]:
    """The positions that the token `row` of a sequence sees."""
    own, window = past + row, int(case.attrs.get("local_window_size", -1))
    last = own if case.attrs.get("is_causal", 1) else past + new - 1
    return [position for position in range(last + 1) if window < 0 or position > own - window]


def of_schema(case: Case, feeds: Mapping[str, Array]) -> dict[str, Array]:
    """All outputs, in float64."""
    given = {name: array.astype(np.float64) for name, array in feeds.items()}
    rows = [given[name] for name in INPUTS[:3] if name in given]
    if case.packed:
        rows = np.split(rows[0], np.cumsum([case.heads, case.kv_heads]) * case.size, axis=1)
    query, key, *value = (each.reshape(len(each), each.shape[1] // case.size, case.size) for each in rows)
    if case.norms:
        epsilon = case.attrs.get("qk_norm_epsilon", 1e-6)
        query, key = (
            normed(each, given[name], epsilon) for each, name in zip((query, key), INPUTS[12:14], strict=True)
        )
    positions = np.concatenate(
        [np.arange(past, past + new) for new, past in zip(case.new, case.past, strict=True)]
    ).astype(int)
    if case.rotary:
        query, key = (rotated(each, positions, case, feeds) for each in (query, key))
    caches = [given[name].copy() for name in INPUTS[3:5] if name in given]
    scales = [given[name] if case.int8 else None for name in INPUTS[14:16]]
    scales = [
        None if scale is None else scale.reshape((1,) if scale.size == 1 else (-1, case.size)) for scale in scales
    ]
    slots = feeds["slot_mapping"] if case.slots else slots_of(case, feeds["block_table"])
    for cache, new, scale in zip(caches, (key, *value), scales, strict=False):
        flat = cache.reshape(-1, case.kv_heads, case.size)
        for slot, row in zip(slots, new, strict=True):
            if slot >= 0:
                flat[slot] = row if scale is None else np.clip(np.round(row / scale), -128, 127)
    read = [cache if scale is None else cache * scale for cache, scale in zip(caches, scales, strict=False)]
    keys, values = read[0], read[-1][..., : case.width]
    out = np.zeros((case.tokens, case.heads, case.width))
    limits = np.cumsum([0, *case.new])
    for (first, end), past, pages in zip(pairwise(limits), case.past, feeds["block_table"], strict=True):
        for token in range(first, end):
            seen = attended(case, token - first, end - first, past)
            if case.selected:
                listed = feeds["selected_indices"][token, : feeds["selected_counts"][token]]
                seen = [int(position) for position in listed if position in seen]
                if not seen:
                    continue
            k, v = (np.stack([cache[pages[p // case.block], p % case.block] for p in seen]) for cache in (keys, values))
            for head in range(case.heads):
                out[token, head] = softmax_of(case, given, query[token, head], k, v, head)
    names = ("output", "key_cache_out", "value_cache_out")
    return dict(zip(names, [out.reshape(case.tokens, case.heads * case.width), *caches], strict=False))


def softmax_of(case: Case, given: Mapping[str, Array], query: Array, keys: Array, values: Array, head: int) -> Array:
    """One row of one head."""
    own = head // (case.heads // case.kv_heads)
    scores = keys[:, own] @ query * case.attrs.get("scale", case.size**-0.5)
    if cap := case.attrs.get("softcap", 0.0):
        scores = cap * np.tanh(scores / cap)
    if case.sink:
        scores = np.append(scores, given["head_sink"][head])
    weights = np.exp(scores - scores.max())
    return (weights / weights.sum())[: len(keys)] @ values[:, own]


def check(case: Case, mask: str = "packed+causal", levels: tuple[Any, ...] = (LEVELS[0], LEVELS[-1])) -> None:
    feeds = case.feeds()
    result, report = fused(case.model(feeds))
    (block,) = report.blocks
    assert (block.op, block.layout, block.mask) == ("FlashAttentionScore", "TND", mask), block.reason
    assert block.heads == (case.heads, case.kv_heads)
    wanted = of_schema(case, feeds)
    for level in levels:
        for got, (name, numbers) in zip(run(result, feeds, level), wanted.items(), strict=True):
            is_copied = name != "output" and not (case.norms or case.rotary)
            assert_same(got, numbers.astype(got.dtype), 0.0 if is_copied else TOLERANCE[case.dtype])


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(dtype="float32", heads=6, kv_heads=6, block=8),
        Case(dtype="float32", packed=True, kv_heads=1),
        Case(dtype="float32", slots=True, new=(5, 1, 4), past=(0, 16, 15)),
        Case(dtype="float32", norms=True, attrs={"qk_norm_epsilon": 0.3}),
        Case(dtype="float32", sink=True, attrs={"scale": 0.7}),
        Case(dtype="float32", attrs={"softcap": 0.5}, heads=2),
        Case(dtype="float32", rotary=16),
        Case(dtype="float32", rotary=8, norms=True, attrs={"rotary_interleaved": 1}),
        Case(dtype="float32", rotary=4, attrs={"rotary_offset": 8}),
        Case(dtype="float16", rotary=8, packed=True, norms=True, sink=True, attrs={"rotary_offset": 8}),
        Case(dtype="float32", int8="PER_TENSOR"),
        Case(dtype="float16", int8="PER_CHANNEL", packed=True),
        Case(dtype="float32", new=(1, 1, 1), past=(0, 16, 40), block=1),
        Case(dtype="float32", new=(0, 0), past=(3, 0)),
        Case(dtype="float32", new=(70,), past=(0,), rotary=16, slots=True),
    ],
    ids=lambda case: f"{case.dtype} {[*case.attrs]}",
)
def test_causal(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("window", [1, 4, 16, 17, 1000])
def test_a_window(window: int, dtype: str) -> None:
    """Pages that lie before the windows of all tokens need not be there."""
    case = Case(dtype=dtype, attrs={"local_window_size": window, "softcap": 2.0}, sink=dtype == "float16")
    check(case, "packed+band", LEVELS[:1])
    feeds = case.feeds()
    for row, past in zip(feeds["block_table"], case.past, strict=True):
        row[: max(0, past - window + 1) // case.block] = -1
    wanted, result = of_schema(case, feeds)["output"], fused(case.model(feeds))[0]
    assert_same(run(result, feeds)[0], wanted.astype(dtype), TOLERANCE[dtype])


@pytest.mark.parametrize(("window", "mask"), [(-1, "packed"), (3, "packed+band")])
def test_both_sides(window: int, mask: str) -> None:
    check(Case(dtype="float32", attrs={"is_causal": 0, "local_window_size": window}), mask)


@pytest.mark.parametrize("width", [0, 8, 16])
def test_latent(width: int) -> None:
    attrs = {"kv_cache_layout": "LATENT", "v_head_size": width, "scale": 0.3, "rotary_offset": 8}
    check(Case(dtype="float32", kv_heads=1, rotary=8, attrs=attrs))
    check(Case(kv_heads=1, int8="PER_CHANNEL", attrs=attrs))


@pytest.mark.parametrize(("name", "other", "place"), [("key", "value", 1), ("value", "key", 2)])
def test_one_cache_of_int8(name: str, other: str, place: int) -> None:
    """The other cache is of the type of query."""
    case = Case(int8="PER_TENSOR")
    feeds, plain = case.feeds(), Case().feeds()
    del feeds[f"{other[0]}_scale"]
    feeds[f"{other}_cache"] = plain[f"{other}_cache"]
    model = case.model(feeds)
    (attr,) = (each for each in model.graph.node[0].attribute if each.name == f"{other[0]}_quant_type")
    model.graph.node[0].attribute.remove(attr)
    result, report = fused(model)
    assert report.blocks[0].status == "fused", report.blocks[0].reason
    out, *caches = run(result, feeds)
    # The reading of two plain caches, of which this one holds the numbers that the new cache of int8 stands for.
    read = {**feeds, f"{name}_cache": (caches[place - 1] * feeds[f"{name[0]}_scale"]).astype(np.float16)}
    read[name] = read[f"{name}_cache"].reshape(-1, 32)[slots_of(case, feeds["block_table"])]
    assert_same(out, of_schema(Case(), read)["output"], TOLERANCE["float16"])


@pytest.mark.parametrize("seed", range(6))
def test_random_lengths(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    new, past = (tuple(int(each) for each in rng.choice([0, 1, 3, 15, 16, 17, 33], count)) for _ in range(2))
    window = int(rng.choice([-1, 1, 5, 16]))
    case = Case(
        heads=int(rng.choice([2, 4])),
        size=int(rng.choice([8, 16, 40])),
        block=int(rng.choice([4, 16])),
        new=new,
        past=past,
        dtype="float32",
        sink=bool(rng.integers(2)),
        slots=bool(rng.integers(2)),
        attrs={
            "local_window_size": window,
            "softcap": float(rng.choice([0.0, 1.5])),
            "is_causal": int(rng.integers(2)),
        },
    )
    mask = "packed+band" if window > 0 else ("packed+causal" if case.attrs["is_causal"] else "packed")
    if case.tokens:
        check(case, mask, LEVELS[:1])


@pytest.mark.parametrize(
    "case",
    [
        Case(selected=6),
        Case(selected=40, dtype="float32", sink=True, rotary=16, norms=True),
        Case(selected=3, dtype="float32", attrs={"is_causal": 0, "scale": 0.2}),
        Case(selected=8, dtype="float32", heads=6, kv_heads=3, size=8, block=4, packed=True, slots=True),
        Case(selected=2, new=(1, 1, 1), past=(0, 16, 40), dtype="float32"),
    ],
    ids=str,
)
def test_selected_keys(case: Case) -> None:
    feeds = case.feeds()
    result, report = fused(case.model(feeds))
    (block,) = report.blocks
    assert (block.op, block.layout, block.heads) == ("SparseFlashAttention", "TND", (case.heads, case.kv_heads))
    wanted = of_schema(case, feeds)
    for level in (LEVELS[0], LEVELS[-1]):
        for got, numbers in zip(run(result, feeds, level), wanted.values(), strict=True):
            assert_same(got, numbers.astype(got.dtype), TOLERANCE[case.dtype])


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"attention_mode": "local_plus_selected", "local_window_size": 4}, "see a window beside"),
        ({"selected_kv_source": "auxiliary"}, "selected from 'auxiliary'"),
        ({"local_window_size": 4}, "a window beside"),
        ({"softcap": 1.0}, "soft cap"),
        ({"k_quant_type": "PER_TENSOR"}, "do not fit together"),
        ({"later": 1}, "the attribute 'later'"),
    ],
)
def test_selections_that_are_declined(attrs: dict[str, Any], words: str) -> None:
    case = Case(selected=4, attrs=attrs)
    (block,) = fused(case.model(case.feeds()))[1].blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert words in (block.reason or "")
    whole = Case(selected=4)
    feeds = {**whole.feeds(), "auxiliary_key": np.zeros((5, 3, 2, 16), np.float16)}
    assert "auxiliary cache" in (fused(whole.model(feeds))[1].blocks[0].reason or "")


def test_nan_reaches_who_sees_it() -> None:
    """A NaN in a key or a value is in the rows that see it, and in no other one."""
    case = Case(dtype="float32", new=(3, 2), past=(2, 4))
    feeds = case.feeds()
    feeds["key"][1, 0] = feeds["value"][4, 20] = np.nan
    wanted = of_schema(case, feeds)["output"]
    assert np.isnan(wanted).any(axis=1).tolist() == [False, True, True, False, True]
    assert_same(run(fused(case.model(feeds))[0], feeds)[0], wanted.astype(np.float32), TOLERANCE["float32"])


def in_bfloat16(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model of one node with inputs and outputs of float32, which the node gets and gives in bfloat16."""
    (node,), floats = model.graph.node, set()
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            floats.add(value.name)
    given = [name for name in node.input if name in floats]
    before = [helper.make_node("Cast", [name], [f"{name}_16"], to=onnx.TensorProto.BFLOAT16) for name in given]
    after = [helper.make_node("Cast", [f"{name}_16"], [name], to=onnx.TensorProto.FLOAT) for name in node.output]
    for names in (node.input, node.output):
        names[:] = [f"{name}_16" if name in floats else name for name in names]
    nodes = [*before, node, *after]
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    return model


@pytest.mark.parametrize("rotary", [0, 8])
def test_bfloat16(rotary: int) -> None:
    case = Case(dtype="float32", rotary=rotary, norms=True, sink=True)
    feeds = {
        name: array.astype(ml_dtypes.bfloat16).astype(np.float32) if array.dtype == np.float32 else array
        for name, array in case.feeds().items()
    }
    result, report = fused(in_bfloat16(case.model(feeds)))
    assert report.count("fused") == 1
    for got, wanted in zip(run(result, feeds), of_schema(case, feeds).values(), strict=True):
        assert_same(got, wanted.astype(np.float32), TOLERANCE["bfloat16"])


def test_the_caches_are_written_in_place() -> None:
    """Where input and output are one buffer, only the new rows change."""
    case = Case(dtype="float32", slots=True)
    feeds = case.feeds()
    result, _ = fused(case.model(feeds))
    for got, wanted in zip(bound_run(result, feeds, BOUND), of_schema(case, feeds).values(), strict=True):
        assert_same(got, wanted.astype(np.float32), TOLERANCE["float32"])


@pytest.mark.parametrize(
    ("case", "is_read"),
    [
        (Case(new=(1, 1, 1), past=(0, 15, 40), attrs={"softcap": 0.7}), True),
        (Case(new=(1, 0, 5), past=(7, 3, 20), dtype="float32", rotary=16), True),
        *(
            (
                Case(new=(1, 1, 1, 2, 1), past=(0, 31, 32, 40, 70), dtype="float32", attrs={"local_window_size": size}),
                True,
            )
            for size in (1, 2, 16, 17, 33, 100)
        ),
        (Case(new=(1, 1), past=(3, 30), block=8), False),
        (Case(new=(1, 1), past=(3, 30), sink=True), False),
        (Case(new=(1, 1), past=(3, 30), int8="PER_TENSOR"), False),
        (Case(new=(1, 1), past=(3, 30), kv_heads=1, attrs={"kv_cache_layout": "LATENT"}), False),
    ],
    ids=str,
)
def test_a_single_token_reads_the_pages_where_they_lie(case: Case, is_read: bool) -> None:
    result, _ = fused(case.model(case.feeds()))
    assert ("IncreFlashAttention" in [node.op_type for node in result.graph.node]) == is_read
    check(case, "packed+band" if "local_window_size" in case.attrs else "packed+causal", LEVELS[:1])


def test_layers_share_the_places() -> None:
    case = Case(dtype="float32")
    feeds = case.feeds()
    model = case.model(feeds)
    second = onnx.NodeProto()
    second.CopyFrom(model.graph.node[0])
    second.input[0] = "output"
    second.output[:] = ["output_2", "key_2", "value_2"]
    model.graph.node.append(second)
    for old, name in zip(list(model.graph.output), second.output, strict=True):
        model.graph.output.add().CopyFrom(old)
        model.graph.output[-1].name = name
    result, report = fused(model)
    assert report.count("fused") == 2
    assert [node.op_type for node in result.graph.node].count("CumSum") == 3
    again = of_schema(case, {**feeds, "query": run(result, feeds)[0]})
    assert_same(run(result, feeds)[3], again["output"].astype(np.float32), 1e-5)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"block_table": -1}, "out of data bounds|invalid indice"),
        ({"block_table": 99}, "out of data bounds|invalid indice"),
        ({"past_seqlens": 100}, "invalid ind"),
    ],
)
def test_pages_that_are_not_there(change: dict[str, int], words: str) -> None:
    """A run that would read a key from no page ends in an error."""
    case = Case(dtype="float32")
    feeds = case.feeds()
    result, _ = fused(case.model(feeds))
    for name, number in change.items():
        feeds[name] = np.full_like(feeds[name], number)
    with refused(words):
        run(result, feeds, ORIGINAL_OFF)


@pytest.mark.parametrize("new", [(1, 1), (3, 3)], ids=["single", "several"])
@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("window", [-1, 1, 5, 17])
@pytest.mark.parametrize("past", [-1, -9, 64, 200])
def test_earlier_keys_that_no_table_has(new: tuple[int, ...], slots: bool, window: int, past: int) -> None:
    """A run in which the first key of a token would lie before or behind the pages of its sequence ends in an error,
    and writes nothing into the pages of others."""
    case = Case(dtype="float32", new=new, past=(20, 20), slots=slots, attrs={"local_window_size": window})
    feeds = case.feeds()
    result, _ = fused(case.model(feeds))
    feeds["past_seqlens"][1] = past
    feeds["block_table"] = np.maximum(feeds["block_table"], 0)
    with refused("invalid ind|IFA|must be >= 0"):
        run(result, feeds)


@pytest.mark.parametrize(
    "case",
    [
        Case(dtype="float32"),
        Case(dtype="float32", new=(1, 1), past=(20, 20)),
        Case(dtype="float32", slots=True),
        Case(dtype="float32", rotary=16),
        Case(dtype="float32", kv_heads=1, attrs={"kv_cache_layout": "LATENT"}),
        Case(new=(3, 2), past=(5, 6), int8="PER_TENSOR"),
    ],
    ids=str,
)
@pytest.mark.parametrize("more", [1, -1])
def test_rows_of_no_sequence_end_in_an_error_that_says_so(case: Case, more: int) -> None:
    feeds = case.feeds()
    result, _ = fused(case.model(feeds))
    for name in ("query", "key", "value", "slot_mapping"):
        if name in feeds:
            array = feeds[name]
            feeds[name] = array[:-1] if more < 0 else np.concatenate([array, np.zeros_like(array[:1])])
    with refused("the_last_of_cumulative_sequence_length_has_to_be_the_number_of_rows"):
        run(result, feeds)


def test_a_sequence_without_tokens_may_have_any_number_of_keys() -> None:
    case = Case(dtype="float32", new=(2, 0, 1), past=(20, 0, 3))
    feeds = case.feeds()
    feeds["past_seqlens"][1] = -1
    wanted = of_schema(case, feeds)["output"].astype(np.float32)
    assert_same(run(fused(case.model(feeds))[0], feeds)[0], wanted, TOLERANCE["float32"])


def other_cache(feeds: dict[str, Array], dtype: Any) -> dict[str, Array]:
    """The feeds with caches of another type, without a number."""
    return {**feeds, **{name: np.zeros_like(feeds[name], dtype) for name in INPUTS[3:5]}}


@pytest.mark.parametrize(
    ("attrs", "words"),
    [
        ({"local_window_size": 0}, "local_window_size is 0"),
        ({"scale": 0.0}, "scale is 0"),
        ({"kv_num_heads": 3}, "num_heads is 4 and its kv_num_heads 3"),
        ({"kv_num_heads": 4}, "not proven to have 4 heads of 16"),
        ({"kv_cache_layout": "OTHER"}, "kv_cache_layout is 'OTHER'"),
        ({"kv_cache_layout": "LATENT", "kv_num_heads": 2}, "LATENT cache has 2 key heads"),
        ({"v_head_size": 8, "scale": 1.0}, "v_head_size is 8"),
        ({"k_cache_dtype": "int4"}, "key_cache is of another type"),
        ({"v_quant_type": "PER_TENSOR"}, "v_quant_type 'PER_TENSOR', v_scale and cache do not fit"),
        ({"softcap": -1.0}, "softcap is -1"),
        ({"do_rotary": 1}, "cos_cache is missing"),
        ({"later": 1}, "the attribute 'later'"),
    ],
)
def test_what_is_declined(attrs: dict[str, Any], words: str) -> None:
    case = Case(attrs=attrs)
    _, report = fused(case.model(case.feeds()))
    assert report.blocks[0].status == "declined"
    assert words in (report.blocks[0].reason or "")


def test_inputs_that_are_declined() -> None:
    case = Case()
    feeds = case.feeds()
    models = {
        "another type than query": case.model(other_cache(feeds, np.float32)),
        "no output hands them on": case.model(feeds, outputs=1),
        "opset 15 has no ScatterElements": case.model(feeds, opset=15),
        "k_scale and cache do not fit": case.model(other_cache(feeds, np.int8)),
        "one of its norms": case.model({**feeds, "q_norm_weight": np.ones(16, np.float16)}),
        "key or value is missing": case.model({name: each for name, each in feeds.items() if name != "value"}),
        "not 4 heads of 16": case.model({**feeds, "query": feeds["query"][:, :-1]}),
        "not 8 heads of 16": case.model({name: each for name, each in feeds.items() if name not in ("key", "value")}),
    }
    unread = case.model(feeds)
    del unread.graph.output[1:]
    for words, model in (*models.items(), ("no output hands them on", unread)):
        _, report = fused(model)
        assert words in (report.blocks[0].reason or ""), report.blocks[0].reason


@pytest.mark.parametrize("target", ["ascend", "onnx", "contrib"])
def test_other_targets(target: Target) -> None:
    case = Case()
    (block,) = fused(case.model(case.feeds(), opset=23), target)[1].blocks
    assert (block.status, block.code) == ("declined", "ready_made")
    assert "written in place" in (block.reason or "")
