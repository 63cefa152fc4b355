"""Attention operators of other domains, with inputs and attributes drawn: ai.onnx Attention of opset 23 to 25, and
MultiHeadAttention, DecoderMaskedMultiHeadAttention, Attention and GroupQueryAttention of com.microsoft.

Many of them are no model for ONNX Runtime; these are no cases, and cost next to nothing.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from tools.fuzz.difference import LARGEST
from tools.fuzz.grammar import FILLS, drawn_sizes
from tools.fuzz.graph import Case, Graph, Size

MASKS: tuple[tuple[Size, ...], ...] = (
    ("S", "T"), ("B", 1, "S", "T"), ("B", 1, 1, "T"), ("B", "N", "S", "T"), (1, 1, "S", "T"), (1, "N", "S", "T"),
    ("T",), ("N", "S", "T"),
)  # fmt: skip
PADDINGS: tuple[tuple[Size, ...], ...] = (("B", "T"), ("B",), ("B", "S", "T"), ("B", 1, "S", "T"), (2, "B"))


LATE = "late"
"""Said of ONNX Runtime's own kernels: they divide by the sum of the exponentials at the end, as the models do that the
other grammar says this word of."""


def operator(seed: int) -> Case:
    """The operator of a seed, alone in its model, or behind a mask that the model computes."""
    rng = random.Random(seed)
    made = rng.choice([*[_onnx] * 6, *[_multi_head, _attention, _group_query] * 2, _decoder])
    return made(rng)


def _graph(rng: random.Random, opset: int) -> tuple[Graph, str]:
    sizes = drawn_sizes(rng)
    opened = frozenset(letter for letter in "BST" if rng.random() < 0.4)
    dtype = "float16" if rng.random() < 0.35 else "float32"
    return Graph(rng, sizes, opened, opset), dtype


def _float_mask(g: Graph, dtype: str, dims: tuple[Size, ...]) -> str:
    """A float mask or a bias: an input, or made of a boolean."""
    number = g.rng.choice(FILLS)
    if dtype == "float16":
        number = max(number, -65504.0) if number != -np.inf else number
    match g.rng.choice(["fmask", "fmask", "where", "difference", "bias", "sum"]):
        case "fmask":
            return g.input("fmask", dtype, dims, number=number)
        case "where":
            return g.op("Where", g.input("bool", "bool", dims), g.const(0.0, dtype), g.number(number, dtype))
        case "difference":
            kept = g.cast(g.input("int01", "int64", dims), dtype)
            # No infinity, also where the masks hold numbers up to 5: 0 times one would be NaN, and one beside a window.
            least = max(number, -(65504.0 if dtype == "float16" else LARGEST) / 4)
            return g.op("Mul", g.op("Sub", g.const(1.0, dtype), kept), g.const(least, dtype))
        case "bias":
            return g.input("bias", dtype, dims)
        case _:
            return g.op("Add", g.input("bias", dtype, dims), g.input("fmask", dtype, dims, number=number))


def _onnx(rng: random.Random) -> Case:
    opset = rng.choice([23, 24, 25])
    g, dtype = _graph(rng, opset)
    n, k = g.sizes["N"], g.sizes["K"]
    attributes: dict[str, Any] = {}
    flat = rng.random() < 0.3
    if flat:
        attributes = {"q_num_heads": n, "kv_num_heads": k}
        q = g.input("value", dtype, ("B", "S", n * g.sizes["D"]), name="q")
        key = g.input("value", dtype, ("B", "T", k * g.sizes["D"]), name="k")
        value = g.input("value", dtype, ("B", "T", k * g.sizes["E"]), name="v")
    else:
        q = g.input("value", dtype, ("B", "N", "S", "D"), name="q")
        key = g.input("value", dtype, ("B", "K", "T", "D"), name="k")
        value = g.input("value", dtype, ("B", "K", "T", "E"), name="v")
    past, outputs = ["", ""], 1
    total: Size = "T"
    if rng.random() < 0.25:
        before = rng.choice([1, 1, 3, 0])
        g.open -= {"T"}
        total, outputs = before + g.sizes["T"], 3
        past = [g.input("value", dtype, ("B", "K", before, depth), name=f"past_{depth}") for depth in "DE"]
    mask = ""
    if rng.random() < 0.75:
        dims = tuple(total if each == "T" else each for each in rng.choice(MASKS))
        mask = g.input("bool", "bool", dims) if rng.random() < 0.35 else _float_mask(g, dtype, dims)
    inputs = [q, key, value, mask, *past]
    if opset >= 24 and outputs == 1 and rng.random() < 0.2:
        inputs += [g.input("lengths", "int64", ("B",), number=g.sizes["T"])]
        g.open -= {"T"}
    for name, choices in {
        "is_causal": [1],
        "scale": [0.5, 1.0, 0.125, -1.0],
        "softcap": [0.0, 5.0],
        "softmax_precision": [1, 10],
    }.items():
        if rng.random() < 0.3:
            attributes[name] = rng.choice(choices)
    if opset >= 25 and rng.random() < 0.3:
        attributes["left_window_size"] = rng.choice([0, 1, 2])
        attributes["right_window_size"] = rng.choice([-1, 0, 1])
    while not inputs[-1]:
        inputs.pop()
    result = g.op("Attention", *inputs, outputs=outputs, **attributes)
    g.words.append(f"Attention {opset} {attributes}")
    dims = ("B", "S", n * g.sizes["E"]) if flat else ("B", "N", "S", "E")
    return g.case([(result, dtype, dims)])


def _multi_head(rng: random.Random) -> Case:
    g, dtype = _graph(rng, 17)
    n, d, e = g.sizes["N"], g.sizes["D"], g.sizes["E"]
    q = g.input("value", dtype, ("B", "S", n * d), name="q")
    key = g.input("value", dtype, ("B", "T", n * d), name="k")
    value = g.input("value", dtype, ("B", "T", n * e), name="v")
    bias = g.input("value", dtype, (n * d + n * d + n * e,)) if rng.random() < 0.2 else ""
    padding = g.input("int01", "int32", rng.choice(PADDINGS)) if rng.random() < 0.5 else ""
    added = _float_mask(g, dtype, rng.choice(MASKS[1:6])) if rng.random() < 0.5 else ""
    attributes: dict[str, Any] = {"num_heads": n}
    if rng.random() < 0.3:
        attributes["unidirectional"] = 1
    if rng.random() < 0.3:
        attributes["scale"] = rng.choice([0.5, 1.0, 0.0])
    if rng.random() < 0.25:
        attributes["mask_filter_value"] = rng.choice([-1e4, -LARGEST, -1e9, -100.0, float("-inf")])
    result = g.op("MultiHeadAttention", q, key, value, bias, padding, added, domain="com.microsoft", **attributes)
    g.words += [f"MultiHeadAttention {attributes}", LATE]
    return g.case([(result, dtype, ("B", "S", n * e))])


def _decoder(rng: random.Random) -> Case:
    """One row in a cache with room; at times with the table that says in which beam's cache a key lies."""
    g, dtype = _graph(rng, 17)
    n, d = g.sizes["N"], g.sizes["D"]
    g.open -= {"B", "S", "T"}
    g.sizes["S"] = g.sizes["T"] = 1
    before = rng.choice([0, 1, 4])
    room = before + rng.choice([1, 3])
    row = [g.input("value", dtype, ("B", 1, n * d), name=name) for name in "qkv"]
    past = [g.input("value", dtype, ("B", n, room, d), name=f"past_{name}") for name in ("key", "value")]
    mask = g.input("int01", "int32", ("B", before + 1)) if rng.random() < 0.4 else ""
    added = ""
    if rng.random() < 0.3:  # in 16 bits no sum, which ONNX Runtime does not always round
        dims = ("B", 1, 1, before + 1)
        added = g.input("bias", dtype, dims) if dtype == "float16" else _float_mask(g, dtype, dims)
    beams, table = "", ""
    if rng.random() < 0.4:
        width = g.sizes["B"]
        beams = g.const([width], "int32")
        table = g.input("index", "int32", (1, width, room), number=width)
    bias = g.input("value", dtype, (3 * n * d,)) if rng.random() < 0.2 else ""
    attributes: dict[str, Any] = {"num_heads": n, "past_present_share_buffer": 1}
    if rng.random() < 0.3:
        attributes["scale"] = rng.choice([0.5, 1.0])
    inputs = [*row, mask, added, *past, g.const([before], "int32"), beams, table, bias]
    while not inputs[-1]:
        inputs.pop()
    result = g.op("DecoderMaskedMultiHeadAttention", *inputs, domain="com.microsoft", outputs=3, **attributes)
    g.words += [f"DecoderMaskedMultiHeadAttention {attributes}", LATE]
    return g.case([(result, dtype, ("B", 1, n * d))])


def _attention(rng: random.Random) -> Case:
    g, dtype = _graph(rng, 17)
    n, d = g.sizes["N"], g.sizes["D"]
    g.open -= {"T"}
    g.sizes["T"] = g.sizes["S"]
    g.open -= {"S"}
    x = g.input("value", dtype, ("B", "S", n * d), name="q")
    numbers = np.random.default_rng(rng.getrandbits(32))
    weights = g.const(numbers.standard_normal((n * d, 3 * n * d)) / np.sqrt(n * d), dtype)
    bias = g.const(numbers.standard_normal(3 * n * d), dtype)
    padding = g.input("int01", "int32", rng.choice([("B", "T"), ("B", "S", "T"), ("B", 1, "S", "S")]))
    added = _float_mask(g, dtype, rng.choice([("B", "N", "S", "T"), (1, "N", "S", "T")])) if rng.random() < 0.4 else ""
    attributes: dict[str, Any] = {"num_heads": n}
    if rng.random() < 0.4:
        attributes["unidirectional"] = 1
    if rng.random() < 0.25:
        attributes["mask_filter_value"] = rng.choice([-1e4, -LARGEST, -1e9, -100.0, float("-inf")])
    given = [x, weights, bias, padding if rng.random() < 0.7 else "", "", added]
    result = g.op("Attention", *given, domain="com.microsoft", **attributes)
    g.words += [f"com.microsoft Attention {attributes}", LATE]
    return g.case([(result, dtype, ("B", "S", n * d))])


def _group_query(rng: random.Random) -> Case:
    g, dtype = _graph(rng, 17)
    g.sizes["D"] = g.sizes["E"] = 8
    g.open -= {"S", "T", "B"}
    sliding = rng.random() < 0.08
    g.sizes["S"] = 1 if sliding else g.sizes["S"]
    g.sizes["T"] = g.sizes["S"]
    n, k, s = g.sizes["N"], g.sizes["K"], g.sizes["S"]
    q = g.input("value", dtype, ("B", "S", n * 8), name="q")
    key = g.input("value", dtype, ("B", "S", k * 8), name="k")
    value = g.input("value", dtype, ("B", "S", k * 8), name="v")
    lengths = g.const(np.full(g.sizes["B"], s - 1), "int32")
    if rng.random() < 0.3:
        lengths = g.const([max(0, s - 1 - index) for index in range(g.sizes["B"])], "int32")
    keys, past, assume, room = s, ("", ""), (), s
    if sliding or rng.random() < 0.5:  # caches with room, whose use differs from one batch entry to the next
        room = s + rng.choice([0, 2, 5])
        before = [rng.randint(0, room - s) for _ in range(g.sizes["B"])]
        if sliding:
            before = [each if rng.random() < 0.3 else room for each in before]
        keys, lengths = max(before) + s, g.const([each + s - 1 for each in before], "int32")
        past = tuple(g.input("value", dtype, ("B", k, room, 8), name=f"past_{name}") for name in ("key", "value"))
        assume = ("separate-caches",) if rng.random() < 0.95 else ()
    total = g.const(keys, "int32")
    added = _float_mask(g, dtype, rng.choice([("B", 1, "S", keys), (1, "N", "S", keys)])) if rng.random() < 0.4 else ""
    sink = g.input("sink", dtype, ("N",)) if rng.random() < 0.2 else ""
    attributes: dict[str, Any] = {"num_heads": n, "kv_num_heads": k}
    for name, choices in {
        "scale": [0.5, 1.0],
        "softcap": [5.0],
        "local_window_size": [0, 1, 2, 2, 3],
        "smooth_softmax": [1],
    }.items():
        if rng.random() < (0.35 if name == "local_window_size" else 0.15):
            attributes[name] = rng.choice(choices)
    if sliding:
        attributes |= {"sliding_window_cache": 1, "local_window_size": room}
    inputs = [q, key, value, *past, lengths, total, "", "", "", added, sink]
    count = 3 if past[0] or rng.random() < 0.7 else 1  # without present ONNX Runtime does not read the past
    result = g.op("GroupQueryAttention", *inputs, domain="com.microsoft", outputs=count, **attributes)
    g.words += [f"GroupQueryAttention {attributes}", LATE]
    present = [(f"{result}_{index}", dtype, ("B", k, room, 8)) for index in (1, 2)] if sliding else []
    return g.case([(result, dtype, ("B", "S", n * 8)), *present], assume)
