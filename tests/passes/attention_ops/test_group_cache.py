"""com.microsoft GroupQueryAttention with a past gives what ONNX Runtime gives, caches included, bit for bit, where the
buffers of past and present are as the user says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given, settings
from onnx import TensorProto, helper

from fa_compiler.passes import analyse
from tests.examples import examples
from tests.passes.running import Array, assert_same, bound_run, fused, run

pytestmark = pytest.mark.usefixtures("declines_change_nothing")

HEADS, KEY_HEADS, SIZE = 4, 2, 16
PLACES = (
    *("q", "k", "v", "past_key", "past_value", "seqlens", "total", "cos", "sin", "positions", "addend", "sink"),
    *("k_scale", "v_scale"),
)
SCALES = ("k_scale", "v_scale")
SEPARATE, SHARED, DECODE = "separate-caches", "shared-caches", "decode"
TOLERANCE = {"float32": 1e-5, "float16": 4e-3}
"""Of the results; caches are copied, and rotary positions are the same kernel."""


@dataclass(frozen=True)
class Case:
    """One node and one run of it: `rows` new keys, `total` in the longest batch entry, room for `room` in past."""

    lengths: Sequence[int] = (5, 2)
    rows: int = 1
    total: int = 6
    room: int = 9
    dtype: str = "float32"
    batch: int | str = "B"
    length: int | str = "S"
    packed: bool = False
    empty: bool = False
    """Are there no new keys, because another layer has written them?"""
    rotary: int = 0
    positions: Sequence[Sequence[int]] | None = None
    sink: bool = False
    bias: str = ""
    broadcast: tuple[bool, bool] = (False, False)
    quantised: str = ""
    attrs: Mapping[str, float] = field(default_factory=dict)

    def feeds(self, seed: int = 0) -> dict[str, Array]:
        """Numbers for a run; what lies behind the lengths is not a number."""
        rng, batch = np.random.default_rng(seed), len(self.lengths)

        def numbers(*shape: int) -> Array:
            return rng.standard_normal(shape).astype(self.dtype)

        width = SIZE * (HEADS + 2 * KEY_HEADS if self.packed else HEADS)
        feeds: dict[str, Array] = {"q": numbers(batch, self.rows, width)}
        if not self.packed:
            new = 0 if self.empty else self.rows
            feeds |= {name: numbers(batch, new, KEY_HEADS * SIZE) for name in ("k", "v")}
        for name in ("past_key", "past_value"):
            feeds[name] = numbers(batch, KEY_HEADS, self.room, SIZE)
            for entry, length in enumerate(self.lengths):
                feeds[name][entry, :, length + 1 :] = np.nan
        if self.quantised:
            feeds |= self._int8(rng, feeds)
        feeds["seqlens"] = np.array(self.lengths, np.int32)
        feeds["total"] = np.array(self.total, np.int32)
        if self.rotary:
            feeds |= {name: numbers(16, self.rotary) for name in ("cos", "sin")}
        if self.positions is not None:
            feeds["positions"] = np.array(self.positions, np.int64)
        if self.sink:
            feeds["sink"] = numbers(HEADS)
        if self.bias:
            form = tuple(1 if one else size for one, size in zip(self.broadcast, (batch, HEADS), strict=True))
            feeds["addend"] = self._bias(rng, (*form, self.rows, self.total))
        return feeds

    def _bias(self, rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        """Numbers, some of which exclude, in some rows all."""
        bias = rng.standard_normal(shape).astype(self.dtype)
        if self.bias != "numbers":
            fill = -np.inf if self.bias == "infinite" else np.finfo(self.dtype).min
            bias[rng.random(shape) < 0.4] = fill
            bias[rng.random(shape[:-1]) < 0.3] = fill
        return bias

    def _int8(self, rng: np.random.Generator, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Caches of any int8, and new keys and values many of which lie half-way between two, or beyond all."""
        form = (1, KEY_HEADS, 1, SIZE) if self.quantised == "PER_CHANNEL" else (1,)
        found: dict[str, Array] = {}
        for name in ("k", "v"):
            scale = found[f"{name}_scale"] = (rng.random(form) * 0.02 + 0.01).astype(np.float32)
            halves = rng.integers(-140, 140, (len(self.lengths), KEY_HEADS, self.rows, SIZE)).astype(np.float32) + 0.5
            new = (halves * scale).transpose(0, 2, 1, 3)
            found[name] = np.ascontiguousarray(new).reshape(len(self.lengths), self.rows, -1).astype(self.dtype)
        for name in ("past_key", "past_value"):
            found[name] = rng.integers(-128, 128, feeds[name].shape).astype(np.int8)
        return found

    def model(self) -> onnx.ModelProto:
        """The node alone; `batch` and `length` are what the model declares."""
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        feeds = self.feeds()
        shapes: dict[str, list[int | str]] = {name: list(array.shape) for name, array in feeds.items()}
        for name, shape in shapes.items():
            if name not in ("total", "cos", "sin", "sink", "addend", *SCALES):
                shape[0] = self.batch
            if name in ("q", "k", "v", "positions") and shape[1]:
                shape[1] = self.length
            if name == "addend":
                whole = (self.batch, HEADS)
                shape[:2] = [1 if one else size for one, size in zip(self.broadcast, whole, strict=True)]
                shape[2:] = [self.length, "T"]
            if name in ("past_key", "past_value"):
                shape[2] = "P"
        types = {"seqlens": TensorProto.INT32, "total": TensorProto.INT32, "positions": TensorProto.INT64}
        cache = TensorProto.INT8 if self.quantised else kind
        types |= {f"{when}_{name}": cache for when in ("past", "present") for name in ("key", "value")}
        inputs = [
            helper.make_tensor_value_info(name, types.get(name, kind), shape)
            for name, shape in shapes.items()
            if name not in SCALES
        ]
        last = max(PLACES.index(name) for name in feeds)
        names = [name if name in feeds else "" for name in PLACES[: last + 1]]
        attrs: dict[str, Any] = {"num_heads": HEADS, "kv_num_heads": KEY_HEADS, **self.attrs}
        attrs |= {"do_rotary": 1} if self.rotary else {}
        if self.quantised:
            attrs |= {"k_quant_type": self.quantised, "v_quant_type": self.quantised, "kv_cache_bit_width": 8}
        outputs = ["y", "present_key", "present_value"]
        node = helper.make_node("GroupQueryAttention", names, outputs, name="op", domain="com.microsoft", **attrs)
        declared = [
            helper.make_tensor_value_info(name, types.get(name, kind), [None] * rank)
            for name, rank in zip(outputs, (3, 4, 4), strict=True)
        ]
        imports = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
        scales = [onnx.numpy_helper.from_array(feeds[name], name) for name in SCALES if name in feeds]
        return helper.make_model(
            helper.make_graph([node], "g", inputs, declared, scales), opset_imports=imports, ir_version=9
        )


def check(case: Case, assume: tuple[str, ...] = (SEPARATE,), seed: int = 0) -> onnx.ModelProto:
    """The fused model, after it gave what the original gives, with caches in buffers as the user says."""
    model = case.model()
    feeds = {name: array for name, array in case.feeds(seed).items() if name not in SCALES}
    result, report = fused(model, assume=assume)
    (block,) = report.blocks
    assert block.status == "fused", (block.code, block.reason)
    assert set(block.assumed) == set(assume)
    bound = in_one_buffer if SHARED in assume else run
    for index, (got, wanted) in enumerate(zip(bound(result, feeds), bound(model, feeds), strict=True)):
        assert got.dtype == wanted.dtype
        assert_same(got, wanted, TOLERANCE[case.dtype] if index == 0 else 0.0)
    return result


EMPTY: dict[str, Case] = {
    "one token": Case(),
    "one token, declared": Case(batch=2, length=1),
    "no room": Case(lengths=(5, 2), room=6),
    "chunk": Case(lengths=(6,), rows=3, total=7),
    "prompt": Case(lengths=(3, 1), rows=4, total=4),
    "bidirectional": Case(lengths=(6,), rows=3, total=7, attrs={"causal": 0}),
    "16 bits": Case(lengths=(6,), rows=3, total=7, dtype="float16"),
    "window": Case(lengths=(6,), rows=3, total=7, attrs={"local_window_size": 2}),
    "window of a row of 16 bits": Case(dtype="float16", length=1, attrs={"local_window_size": 2}),
    "rotary": Case(rotary=8),
    "rotary chunk": Case(lengths=(6,), rows=3, total=7, rotary=8),
    "positions": Case(lengths=(6,), rows=3, total=7, rotary=8, positions=((5, 1, 2),)),
    "sink": Case(sink=True),
    "cap": Case(lengths=(6,), rows=3, total=7, attrs={"softcap": 0.8}),
    "bias": Case(lengths=(6,), rows=3, total=7, length=3, bias="infinite"),
    "bias of 16 bits": Case(lengths=(6,), rows=3, total=7, length=3, bias="infinite", dtype="float16"),
}


@pytest.mark.parametrize("word", [SEPARATE, SHARED])
@pytest.mark.parametrize("name", EMPTY)
def test_caches_of_another_layer(name: str, word: str) -> None:
    """Without new keys the past is read where it lies, and present holds its keys."""
    result = check(replace(EMPTY[name], empty=True), (word,))
    (attention,) = [node for node in result.graph.node if node.op_type == "FlashAttentionScore"]
    assert list(attention.input[1:3]) == ["past_key", "past_value"]


def test_caches_of_another_layer_without_presents() -> None:
    """Nobody has to vouch for how past and present are bound where there is no present."""
    for bias in ("", "infinite"):
        case = Case(lengths=(6,), rows=3, total=7, length=3, empty=True, bias=bias)
        model, feeds = case.model(), case.feeds()
        del model.graph.output[1:], model.graph.node[0].output[1:]
        result, report = fused(model)
        assert report.blocks[0].status == "fused", report.blocks[0].reason
        assert not report.blocks[0].assumed
        assert_same(run(result, feeds)[0], run(model, feeds)[0], 1e-5)


def in_one_buffer(model: onnx.ModelProto, feeds: Mapping[str, Array]) -> list[Array]:
    """The outputs of a run in which each present is bound to the memory of its past."""
    return bound_run(model, feeds, {f"present_{name}": f"past_{name}" for name in ("key", "value")})


CASES: dict[str, Case] = {
    "one token": Case(),
    "one token, declared": Case(batch=2, length=1),
    "one batch entry": Case(lengths=(4,), batch=1, length=1),
    "no room but for it": Case(room=5),
    "no room but for it, one batch entry": Case(lengths=(4,), room=5, batch=1),
    "the first token": Case(lengths=(0, 0), total=1),
    "the first token, longer lengths": Case(lengths=(3, 0), total=1),
    "nothing before": Case(lengths=(0, 5)),
    "capped scores": Case(attrs={"softcap": 0.8}),
    "a chunk of capped scores, biased": Case(
        lengths=(6,), rows=3, total=7, batch=1, bias="numbers", attrs={"softcap": 2.0}
    ),
    "prompt": Case(lengths=(3, 3), rows=4, total=4),
    "prompt, shorter batch entry": Case(lengths=(3, 1), rows=4, total=4),
    "prompt, longer lengths": Case(lengths=(6, 1), rows=4, total=4),
    "prompt without a past": Case(lengths=(3, 1), rows=4, total=4, room=0),
    "prompt, one batch entry": Case(lengths=(3,), rows=4, total=4, batch=1),
    "chunk": Case(lengths=(6,), rows=3, total=7),
    "chunk that fills the room": Case(lengths=(6,), rows=3, total=7, room=7),
    "chunk, declared": Case(lengths=(6,), rows=3, total=7, batch=1, length=3),
    "chunk, shorter": Case(lengths=(4,), rows=3, total=7, batch=1),
    "16 bits": Case(dtype="float16"),
    "chunk of 16 bits": Case(lengths=(6,), rows=3, total=7, dtype="float16"),
    "side by side": Case(packed=True),
    "scale": Case(attrs={"scale": 0.3}),
    "bidirectional": Case(attrs={"causal": 0}),
    "bidirectional chunk": Case(lengths=(6,), rows=3, total=7, attrs={"causal": 0}),
    "window": Case(attrs={"local_window_size": 2}),
    "window, declared": Case(attrs={"local_window_size": 2}, length=1),
    "window of a chunk": Case(lengths=(6,), rows=3, total=7, attrs={"local_window_size": 2}),
    "window of a prompt": Case(lengths=(3, 1), rows=4, total=4, attrs={"local_window_size": 2}),
    "window of 16 bits": Case(dtype="float16", length=1, attrs={"local_window_size": 2}),
    "sink": Case(sink=True),
    "smooth softmax": Case(lengths=(6,), rows=3, total=7, attrs={"smooth_softmax": 1}),
    "rotary": Case(rotary=8),
    "rotary prompt": Case(lengths=(3, 1), rows=4, total=4, rotary=8),
    "rotary chunk": Case(lengths=(6,), rows=3, total=7, rotary=8),
    "rotary pairs": Case(rotary=8, attrs={"rotary_interleaved": 1}),
    "rotary, side by side": Case(rotary=8, packed=True),
    "rotary of 16 bits": Case(rotary=8, dtype="float16"),
    "positions": Case(rotary=8, positions=((7,), (1,))),
    "positions of a chunk": Case(lengths=(6,), rows=3, total=7, rotary=8, positions=((5, 1, 2),)),
    "positions of a prompt": Case(lengths=(3, 1), rows=4, total=4, rotary=8, positions=((3, 2, 1, 0), (1, 2, 3, 4))),
    "bias": Case(bias="numbers", attrs={"causal": 0}),
    "bias of a chunk": Case(lengths=(6,), rows=3, total=7, length=3, bias="infinite"),
    "bias of a chunk, the lowest number": Case(lengths=(6,), rows=3, total=7, length=3, bias="lowest"),
    "bias of a chunk that fills the room": Case(lengths=(6,), rows=3, total=7, room=7, length=3, bias="infinite"),
    "bias of a prompt": Case(lengths=(3, 1), rows=4, total=4, length=4, bias="infinite", broadcast=(True, False)),
    "bias of 16 bits": Case(dtype="float16", bias="infinite", broadcast=(False, True)),
    "bias of 16 bits, the lowest number": Case(dtype="float16", bias="lowest", broadcast=(True, True)),
    "bias and a window": Case(lengths=(6,), rows=3, total=7, length=3, bias="infinite", attrs={"local_window_size": 2}),
    "bias and a sink": Case(bias="lowest", sink=True),
    "positions of the first token": Case(lengths=(0, 0), total=1, rotary=8, positions=((3,), (5,))),
}


@pytest.mark.parametrize("name", CASES)
def test_separate_buffers(name: str) -> None:
    check(CASES[name])


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.room >= case.total])
def test_one_buffer(name: str) -> None:
    """The update alone writes, and nothing else reads what it was."""
    result = check(CASES[name], (SHARED,))
    assert [node.op_type for node in result.graph.node if "past_key" in node.input] == ["ScatterND"]
    assert all(node.op_type not in ("Pad", "Slice") for node in result.graph.node if "past_value" in node.input)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("length", [1, "S"])
def test_bias_where_every_row_has_a_key(dtype: str, length: int | str) -> None:
    """With one key ONNX Runtime takes another kernel than with several, which differ in rows without a key."""
    words = (SEPARATE, "no-empty-rows") if dtype == "float32" else (SEPARATE,)
    for lengths, total in (((5, 2), 6), ((0, 0), 1)):
        check(Case(lengths=lengths, total=total, length=length, dtype=dtype, bias="numbers"), words)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.rows == 1 and case.length == "S"])
def test_one_row_by_the_users_word(name: str) -> None:
    check(CASES[name], (SEPARATE, DECODE))


@pytest.mark.parametrize("word", [SEPARATE, SHARED])
@pytest.mark.parametrize("kind", ["PER_TENSOR", "PER_CHANNEL"])
@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_int8_caches(kind: str, word: str, declared: bool, dtype: str) -> None:
    """They are read where they lie, and what is written is what ONNX Runtime writes, bit for bit."""
    case = Case(quantised=kind, length=1 if declared else "S", rotary=0, dtype=dtype)
    result = check(case, (word,) if declared else (word, DECODE))
    operators = [node.op_type for node in result.graph.node]
    assert "IncreFlashAttention" in operators
    assert "DequantizeLinear" not in operators


INT8: dict[str, tuple[Case, str]] = {
    "chunk": (Case(lengths=(6,), rows=3, total=7, length=3), "FlashAttentionScore"),
    "prompt": (Case(lengths=(3, 1), rows=4, total=4, length=4, rotary=0), "FlashAttentionScore"),
    "prompt and a window": (
        Case(lengths=(3, 1), rows=4, total=4, length=4, attrs={"local_window_size": 2}),
        "FlashAttentionScore",
    ),
    "chunk and a sink": (Case(lengths=(6,), rows=3, total=7, length=3, sink=True), "FlashAttentionScore"),
    "chunk and a bias": (Case(lengths=(6,), rows=3, total=7, length=3, bias="infinite"), "FlashAttentionScore"),
    "chunk and a bias of the lowest number": (
        Case(lengths=(6,), rows=3, total=7, length=3, bias="lowest"),
        "FlashAttentionScore",
    ),
    "bidirectional": (Case(length=1, attrs={"causal": 0}), "IncreFlashAttention"),
    "window": (Case(lengths=(5,), batch=1, length=1, attrs={"local_window_size": 2}), "IncreFlashAttention"),
    "window on a short cache": (
        Case(lengths=(1,), total=2, batch=1, length=1, attrs={"local_window_size": 4}),
        "IncreFlashAttention",
    ),
}


@pytest.mark.parametrize(("kind", "dtype"), [("PER_TENSOR", "float32"), ("PER_CHANNEL", "float16")])
@pytest.mark.parametrize("name", INT8)
def test_int8_caches_of_several_rows_and_windows(name: str, kind: str, dtype: str) -> None:
    case, operator = INT8[name]
    result = check(replace(case, quantised=kind, dtype=dtype))
    assert operator in [node.op_type for node in result.graph.node]


def test_int8_of_what_is_no_number() -> None:
    """Infinities are held; NaN becomes the largest number."""
    case = Case(quantised="PER_TENSOR", length=1)
    model, feeds = case.model(), case.feeds()
    feeds = {name: array for name, array in feeds.items() if name not in SCALES}
    feeds["k"][0, 0, :3] = np.nan, np.inf, -np.inf
    result, _ = fused(model, assume=(SEPARATE,))
    got, wanted = run(result, feeds)[1], run(model, feeds)[1]
    np.testing.assert_array_equal(got, wanted)
    assert list(got[0, 0, 5, :3]) == [127, 127, -128]


def test_an_update_in_place_keeps_its_address() -> None:
    """With present bound to past, the cache is where it was, and only the new row differs."""
    case = Case(batch=2, length=1)
    result, _ = fused(case.model(), assume=(SHARED,))
    feeds = case.feeds()
    y, key, value = in_one_buffer(result, feeds)
    for got, name, new in ((key, "past_key", "k"), (value, "past_value", "v")):
        wanted = feeds[name].copy()
        for entry, length in enumerate(case.lengths):
            wanted[entry, :, length] = feeds[new][entry].reshape(KEY_HEADS, SIZE)
        np.testing.assert_array_equal(got, wanted)
    assert np.isfinite(y).all()


REFUSED: dict[str, tuple[Case, tuple[str, ...], str, str]] = {
    "nobody vouches for the buffers": (Case(), (), "ready_made", "behind the last key"),
    "window of a prompt in 16 bits": (
        Case(dtype="float16", attrs={"local_window_size": 2}),
        (SEPARATE,),
        "ready_made",
        "padding behind a prompt",
    ),
    "int8 of several rows": (Case(quantised="PER_TENSOR"), (SEPARATE,), "ready_made", "one row"),
    "int8 and a window": (
        Case(quantised="PER_TENSOR", length=1, attrs={"local_window_size": 2}),
        (SEPARATE,),
        "ready_made",
        "no windows of several",
    ),
    "int8 and a sink": (Case(quantised="PER_TENSOR", length=1, sink=True), (SEPARATE,), "ready_made", "no sinks"),
    "int8 and a bias": (
        Case(quantised="PER_TENSOR", length=1, bias="numbers"),
        (SEPARATE,),
        "ready_made",
        "copy the caches",
    ),
    "one row that a bias may exclude wholly": (Case(length=1, bias="numbers"), (SEPARATE,), "empty_rows", "one key"),
    "rows that a bias may exclude wholly": (Case(bias="numbers"), (SEPARATE,), "empty_rows", "one key"),
    "a window kept in the cache": (
        Case(room=6, attrs={"sliding_window_cache": 1, "local_window_size": 4}),
        (SEPARATE,),
        "ready_made",
        "the cache holds a window",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    case, assume, code, words = REFUSED[name]
    result, report = fused(case.model(), assume=assume)
    (block,) = report.blocks
    assert (block.status, block.code) == ("declined", code)
    assert words in (block.reason or "")
    assert [node.op_type for node in result.graph.node] == ["GroupQueryAttention"]


def test_a_window_that_a_step_has() -> None:
    """The report names the assumption under which a file for prompts and steps is fused for its steps."""
    case = Case(dtype="float16", attrs={"local_window_size": 2})
    _, report = fused(case.model(), assume=(SEPARATE,))
    assert report.blocks[0].hint == "--assume decode if every run decodes one token"
    check(case, (SEPARATE, DECODE))
    _, report = fused(replace(case, length=4).model(), assume=(SEPARATE,))
    assert report.blocks[0].hint != "--assume decode if every run decodes one token"


@pytest.mark.parametrize("name", ["past_key", "past_value", "q"])
def test_an_operand_of_unknown_rank(name: str) -> None:
    model = Case().model()
    (node,) = model.graph.node
    node.input[PLACES.index(name)] = "inner"
    every = onnx.numpy_helper.from_array(np.array([2, 2, 4, 8]), "sizes")
    model.graph.initializer.append(every)
    # How many sizes there are is known when the model runs.
    model.graph.node.insert(0, helper.make_node("Reshape", [name, "some"], ["inner"]))
    model.graph.node.insert(0, helper.make_node("Compress", ["sizes", "which"], ["some"]))
    model.graph.input.append(helper.make_tensor_value_info("which", onnx.TensorProto.BOOL, ["W"]))
    _, report = fused(model, assume=(SEPARATE,))
    assert (report.blocks[0].status, report.blocks[0].code) == ("declined", "rank")
    assert "the rank of 'inner' is unknown" in (report.blocks[0].reason or "")


def test_a_query_of_one_dimension() -> None:
    model = Case().model()
    (node,) = model.graph.node
    node.input[0] = "flat"
    model.graph.input.append(helper.make_tensor_value_info("flat", onnx.TensorProto.FLOAT, [4]))
    _, report = fused(model, assume=(SEPARATE,))
    assert (report.blocks[0].status, report.blocks[0].code) == ("declined", "rank")
    assert "the rank of 'flat' is 1" in (report.blocks[0].reason or "")


@pytest.mark.parametrize("changed", ["past_key", "present_value"])
def test_caches_that_cannot_be_bound(changed: str) -> None:
    """One buffer is bound as input and output; what the model computes from or to has its own."""
    model = Case().model()
    (node,) = model.graph.node
    inner = f"inner_{changed}"
    if changed.startswith("past"):
        node.input[PLACES.index(changed)] = inner
        model.graph.node.insert(0, helper.make_node("Neg", [changed], [inner]))
    else:
        node.output[2] = inner
        model.graph.node.append(helper.make_node("Neg", [inner], [changed]))
    _, report = fused(model, assume=(SHARED,))
    assert "no buffer can be bound" in (report.blocks[0].reason or "")
    _, report = fused(model, assume=(SEPARATE,))
    assert report.blocks[0].status == "fused"


@pytest.mark.parametrize("quantised", ["", "PER_TENSOR"])
def test_a_generation_in_one_buffer(quantised: str) -> None:
    """A prompt and tokens after it, each step on the caches that the one before left."""
    steps = [Case((4, 2), 5, 5, quantised=quantised)]
    steps += [Case((4 + n, 2 + n), 1, 5 + n, quantised=quantised) for n in range(1, 4)]
    caches: dict[str, dict[str, Array]] = {"before": {}, "after": {}}
    for number, step in enumerate(steps):
        word = () if quantised and step.rows > 1 else (SHARED, *((DECODE,) if quantised else ()))
        model = step.model()
        models = {"before": model, "after": fused(model, assume=word)[0] if word else model}
        results: dict[str, list[Array]] = {}
        for name, each in models.items():
            feeds = {place: array for place, array in step.feeds(number).items() if place not in SCALES} | caches[name]
            results[name] = in_one_buffer(each, feeds)
            caches[name] = dict(zip(("past_key", "past_value"), results[name][1:], strict=True))
        assert_same(results["after"][0], results["before"][0], TOLERANCE["float32"])
        for got, wanted in zip(results["after"][1:], results["before"][1:], strict=True):
            assert_same(got, wanted, 0.0)


def test_new_keys_that_may_be_none() -> None:
    """Without new keys ONNX Runtime reads all of past."""
    model = Case().model()
    for value in model.graph.input:
        if value.name in ("k", "v"):
            value.type.tensor_type.shape.dim[1].dim_param = "L"
    _, report = fused(model, assume=(SEPARATE,))
    assert "as many as the rows" in (report.blocks[0].reason or "")


@settings(max_examples=examples(20))
@given(data=st.data())
def test_random(data: st.DataObject) -> None:
    """All features together."""
    draw = data.draw
    kind = draw(st.sampled_from(["token", "prompt", "chunk"]))
    rows = 1 if kind == "token" else draw(st.integers(1, 6))
    before = 0 if kind == "prompt" else draw(st.integers(1, 9))
    total = rows + before
    count = 1 if kind == "chunk" and rows > 1 else draw(st.integers(1, 3))
    least = 0 if kind == "prompt" else rows - 1
    lengths = [draw(st.integers(least, total - 1)) for _ in range(count)]
    shared = draw(st.booleans())
    room = draw(st.integers(total, total + 4)) if shared or draw(st.booleans()) else before
    single = draw(st.booleans()) and rows == 1
    causal = draw(st.booleans())
    attrs: dict[str, float] = {"causal": int(causal)}
    if causal and draw(st.booleans()):
        attrs["local_window_size"] = draw(st.integers(1, 8))
    rotary = draw(st.sampled_from([0, 8]))
    case = Case(
        lengths,
        rows,
        total,
        room,
        batch=draw(st.sampled_from(["B", count])),
        length=draw(st.sampled_from([rows, "S"])) if not single else 1,
        packed=draw(st.booleans()),
        rotary=rotary,
        positions=(
            [[draw(st.integers(0, 5)) for _ in range(rows)] for _ in range(count)]
            if rotary and draw(st.booleans())
            else None
        ),
        sink="local_window_size" not in attrs and draw(st.booleans()),
        bias=draw(st.sampled_from(["", "numbers", "infinite", "lowest"])),
        broadcast=(draw(st.booleans()), draw(st.booleans())),
        attrs=attrs,
    )
    plain = bool(case.bias) and causal and not case.sink and (case.length == "S" or rows == 1)
    if plain:
        case = replace(case, bias="numbers")
    words = (SHARED if shared else SEPARATE, *(("no-empty-rows",) if plain else ()))
    check(case, words, seed=draw(st.integers(0, 9)))


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("positions", [None, ((7,), (1,))])
def test_ascend_reads_a_number_of_keys(interleaved: int, positions: Sequence[Sequence[int]] | None) -> None:
    """Rotary positions in plain operators, and caches in buffers of their own without a word."""
    attrs = {"rotary_interleaved": interleaved}
    case = Case(dtype="float16", batch=2, length=1, rotary=8, positions=positions, attrs=attrs)
    model = case.model()
    result, report = fused(model, "ascend", only="attention")
    (block,) = report.blocks
    assert (block.op, block.mask, block.assumed) == ("IncreFlashAttention", "lengths", (SEPARATE,))
    assert {node.domain for node in result.graph.node} == {"", "ascend"}
    feeds = case.feeds()
    for got, wanted in zip(run(result, feeds), run(model, feeds), strict=True):
        assert_same(got, wanted, TOLERANCE[case.dtype])


def test_the_two_words_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="cannot both hold"):
        fused(Case().model(), assume=(SEPARATE, SHARED))


def test_a_total_that_is_known_says_how_large_the_caches_are() -> None:
    """Then all shapes are known before the run, as ATC wants them."""
    case = Case(dtype="float16", batch=2, length=1, rotary=8)
    model = case.model()
    for value in [value for value in model.graph.input if value.name == "total"]:
        model.graph.input.remove(value)
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(case.total, np.int32), "total"))
    for value in model.graph.input:
        if value.name.startswith("past"):
            value.type.tensor_type.shape.dim[2].dim_value = case.room
    result, _ = fused(model, "ascend")
    graph = ir.from_proto(result)
    info = analyse(graph)
    for node in graph.graph:
        for output in node.outputs:
            shape = info.shape(output)
            assert shape is not None
            assert all(size.const is not None for size in shape), node.name


@pytest.mark.parametrize("word", [SEPARATE, SHARED])
def test_layers_share_what_is_computed_from_sizes(word: str) -> None:
    """A layer more adds what its own caches need, and no positions, lengths or masks."""
    counts = []
    for layers in (1, 2, 3):
        model = Case(rotary=8).model()
        (node,) = model.graph.node
        for layer in range(1, layers):
            again = model.graph.node.add()
            again.CopyFrom(node)
            again.input[0] = model.graph.node[-2].output[0]
            names = {name: f"{name}{layer}" for name in ("past_key", "past_value", *node.output)}
            again.input[3:5] = [names["past_key"], names["past_value"]]
            again.output[:] = [names[name] for name in node.output]
            again.name = f"op{layer}"
            for values in (model.graph.input, model.graph.output):
                for value in [value for value in values if value.name in names]:
                    copy = values.add()
                    copy.CopyFrom(value)
                    copy.name = names[value.name]
        result, report = fused(model, assume=(word,))
        assert [block.status for block in report.blocks] == ["fused"] * layers
        counts.append([node.op_type for node in result.graph.node])
    for shared in ("Range", "Less", "Where", "Expand", "Gather"):
        assert counts[2].count(shared) == counts[1].count(shared) == counts[0].count(shared), shared
    assert len(counts[2]) - len(counts[1]) == len(counts[1]) - len(counts[0])
