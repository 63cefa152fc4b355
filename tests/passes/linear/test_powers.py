"""Lightning attention in blocks: constant tables hold the powers of the decays of each head. Where a number of a table,
a decay of a block or the order of heads is changed, it is another function, and nothing is fused."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from fa_compiler.passes.linear.powers import Powers
from tests.passes.running import Array, assert_same, fused, run

HEADS, SIZE, BLOCK = 3, 4, 8
SLOPES = np.array([0.5, 0.03125, 0.7], np.float64)
STEEP = np.array([11.0, 0.25, 0.125], np.float64)
"""Powers of the first slope vanish in float32 within a block."""
TOLERANCE = 2e-6
"""float32 sums over 20 tokens in another order, and decays rounded to 2^-24 beside their powers."""
Tables: TypeAlias = dict[str, Array]


def tables_of(slopes: np.ndarray, tokens: int) -> Tables:
    """The constants of the blocks: by which rows, keys and the state of a block decay."""
    place = np.arange(BLOCK)
    made = dict[str, np.ndarray]()
    for start in range(0, tokens, BLOCK):
        count = min(BLOCK, tokens - start)
        distance = place[:count, None] - place[None, :count]
        inside = np.exp(-slopes[:, None, None] * np.maximum(distance, 0)) * (distance >= 0)
        made[f"inside{start}"] = inside[None]
        made[f"rows{start}"] = np.exp(-slopes[:, None] * (place[:count] + 1))[..., None]
        made[f"keys{start}"] = np.exp(-slopes[:, None] * (count - 1 - place[:count]))[..., None]
        made[f"all{start}"] = np.exp(-slopes * count)[:, None, None]
    return {name: array.astype(np.float32) for name, array in made.items()}


def lightning(tokens: int, tables: Tables) -> onnx.ModelProto:
    """Blocks as MiniMax writes them: o = (Q K^T * inside) V + (rows Q) S, S = all S + (keys K)^T V."""
    nodes = [helper.make_node("Transpose", [name], [f"{name}t"], perm=[0, 2, 1, 3]) for name in "qkv"]
    constants = dict(tables) | {"axis": np.array([2])}
    state = "s0"
    outputs = []
    for start in range(0, tokens, BLOCK):
        constants[f"from{start}"], constants[f"to{start}"] = np.array([start]), np.array([min(start + BLOCK, tokens)])
        for name in "qkv":
            ends = [f"from{start}", f"to{start}", "axis"]
            nodes.append(helper.make_node("Slice", [f"{name}t", *ends], [f"{name}{start}"]))
        for op, given, result in (
            ("Transpose", [f"k{start}"], f"kt{start}"),
            ("MatMul", [f"q{start}", f"kt{start}"], f"qk{start}"),
            ("Mul", [f"qk{start}", f"inside{start}"], f"weights{start}"),
            ("MatMul", [f"weights{start}", f"v{start}"], f"new{start}"),
            ("Mul", [f"q{start}", f"rows{start}"], f"qrows{start}"),
            ("MatMul", [f"qrows{start}", state], f"old{start}"),
            ("Add", [f"old{start}", f"new{start}"], f"out{start}"),
            ("Mul", [f"k{start}", f"keys{start}"], f"kkeys{start}"),
            ("Transpose", [f"kkeys{start}"], f"kkeyst{start}"),
            ("MatMul", [f"kkeyst{start}", f"v{start}"], f"written{start}"),
            ("Mul", [state, f"all{start}"], f"kept{start}"),
            ("Add", [f"kept{start}", f"written{start}"], f"state{start}"),
        ):
            extra = {"perm": [0, 1, 3, 2]} if op == "Transpose" else {}
            nodes.append(helper.make_node(op, given, [result], **extra))
        state = f"state{start}"
        outputs.append(f"out{start}")
    nodes.append(helper.make_node("Concat", outputs, ["o"], axis=2))
    nodes.append(helper.make_node("Identity", [state], ["last"]))
    row, square = [1, tokens, HEADS, SIZE], [1, HEADS, SIZE, SIZE]
    shapes = {**dict.fromkeys("qkv", row), "s0": square, "o": [1, HEADS, tokens, SIZE], "last": square}
    infos = {name: helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    weights = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(
        nodes, "lightning", [infos[name] for name in ("q", "k", "v", "s0")], [infos["o"], infos["last"]], weights
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def feeds(tokens: int) -> Tables:
    rng = np.random.default_rng(tokens)
    made = {name: rng.standard_normal((1, tokens, HEADS, SIZE), np.float32) for name in "qkv"}
    return made | {"s0": rng.standard_normal((1, HEADS, SIZE, SIZE), np.float32)}


def compared(tokens: int, tables: Tables) -> list[str]:
    """The rules of what is fused, after the results were compared."""
    model = lightning(tokens, tables)
    result, report = fused(model)
    for got, wanted in zip(run(result, feeds(tokens)), run(model, feeds(tokens)), strict=True):
        assert_same(got, wanted, TOLERANCE)
    return [block.rule or "" for block in report.blocks if block.status == "fused"]


@pytest.mark.parametrize("tokens", [3, 8, 11, 16, 20])
@pytest.mark.parametrize("slopes", [SLOPES, STEEP], ids=["plain", "steep"])
def test_blocks_are_fused(tokens: int, slopes: np.ndarray) -> None:
    assert compared(tokens, tables_of(slopes, tokens)) == ["rule: gated, a decay for each head"]


def changed(name: str, change: Callable[[Array], Array]) -> Tables:
    made = tables_of(SLOPES, 20)
    return made | {name: change(made[name].copy()).astype(np.float32)}


def scaled(at: tuple[int, ...], factor: float) -> Callable[[Array], Array]:
    def change(array: Array) -> Array:
        array[at] *= factor
        return array

    return change


NEAR = {
    "a number of a table": changed("inside8", scaled((0, 1, 5, 2), 1 + 1e-4)),
    "a masked number": changed("inside8", lambda array: array + np.eye(BLOCK, k=1)),
    "the heads of a block": changed("rows8", lambda array: array[::-1]),
    "the state of another head": changed("all0", lambda array: array[[1, 0, 2]]),
    "a block's length": changed("all0", lambda array: array ** (1 - 1 / BLOCK)),
    "rows one token earlier": changed(
        "rows8", lambda array: array ** (np.arange(BLOCK) / (np.arange(BLOCK) + 1))[:, None]
    ),
    "keys in the other direction": changed("keys8", lambda array: array[:, ::-1]),
    "a steeper block": {
        name: array if "8" not in name else tables_of(SLOPES * 2, 20)[name]
        for name, array in tables_of(SLOPES, 20).items()
    },
}


@pytest.mark.parametrize("name", NEAR)
def test_a_near_miss_of_tables(name: str) -> None:
    assert not compared(20, NEAR[name])


def test_what_is_no_table() -> None:
    """Random numbers, numbers beyond 1, a mask, two numbers, integers, and a ratio that changes by 10^-5."""
    powers = Powers()
    rng = np.random.default_rng(0)
    ratio = np.exp(-0.1 * np.arange(9, dtype=np.float64))
    ratio[4] *= 1 + 1e-5
    for array in (
        rng.random((4, 5)),
        np.exp(np.arange(9) * 0.1),
        np.tri(5),
        np.array([0.5, 0.25]),
        np.arange(9),
        ratio,
        np.ones(9),
        np.full(9, 0.5),
    ):
        powers.meet(np.asarray(array, np.float32 if array.dtype.kind == "f" else array.dtype))
    assert not powers.tables


def test_a_slope_is_as_exact_as_its_longest_table() -> None:
    powers = Powers()
    for count in (3, 200, 5):
        powers.meet(np.exp(-0.003 * np.arange(count)).astype(np.float32))
    (slope,) = powers.slopes
    assert abs(slope - 0.003) < 2**-21 * (1 + 0.6) / 199
