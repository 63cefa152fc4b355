"""Masks read as formulas, and bands, against brute force: graphs at random, compared with what ONNX Runtime gives."""

from __future__ import annotations

import itertools
import random

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.passes.algebra.formula import (
    Affine,
)
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.masks.band import Band, SparseMode, mode_of
from fa_compiler.passes.masks.structure import _intersection
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import analyse
from tests.examples import examples
from tools.fuzz.kind import load

S, T = Dim.symbol("S"), Dim.symbol("T")
SIZES = [(1, 1), (2, 3), (3, 2), (4, 4), (1, 4), (4, 1), (3, 5)]


def test_what_is_proven_of_each_value_holds_in_runs() -> None:
    """Programs of the search (tools/fuzz/kinds/facts.py)."""
    kind = load("facts")
    outcomes = [kind.check(seed) for seed in range(examples(150))]
    assert [outcome.finding for outcome in outcomes if outcome.finding is not None] == []
    assert sum(outcome.word == "held" for outcome in outcomes) > 100


FACTORS: list[list[str | int]] = [["S", 2, 3, "T"], ["S", 3, 2], [2, "S", 3], [4, 1, "T", 2], ["S", 2, "T", 2]]


def grouped(factors: list[str | int], rng: random.Random) -> list[list[str | int]]:
    """Dimensions that merge neighbouring factors; now and then one of 1 between them."""
    dims: list[list[str | int]] = [[]]
    share = rng.random()
    for factor in factors:
        if dims[-1] and rng.random() < share:
            dims.extend([[]] * rng.choice([0, 0, 1]) + [[]])
        dims[-1] = [*dims[-1], factor]
    return dims


def test_places_behind_reshapes() -> None:
    """Numbers of known places in one grouping of the dimensions are read behind two reshapes to other groupings."""
    rng = random.Random(0)
    read = 0
    for _ in range(examples(30)):
        factors = rng.choice(FACTORS)
        groupings = [grouped(factors, rng) for _ in range(3)]
        groupings.sort(key=len if rng.random() < 0.8 else lambda _: rng.random())
        nodes: list[onnx.NodeProto] = []
        constants = {"zero": np.array(0), "one": np.array(1), "unit": np.array([1])}
        symbols = {"S": "s", "T": "t"}
        for name, axis in (("s", 0), ("t", 1)):
            nodes.append(helper.make_node("Shape", ["grid"], [name], start=axis, end=axis + 1))
        shapes = []
        for step, dims in enumerate(groupings):
            sizes = []
            for k, dim in enumerate(dims):
                size = "unit"
                for factor in dim:
                    other = symbols.get(str(factor), f"c{factor}")
                    constants |= {} if isinstance(factor, str) else {other: np.array([factor])}
                    nodes.append(helper.make_node("Mul", [size, other], [f"size{step}_{k}_{len(nodes)}"]))
                    size = nodes[-1].output[0]
                sizes.append(size)
            nodes.append(helper.make_node("Concat", sizes, [f"shape{step}"], axis=0))
            shapes.append(sizes)
        total = "zero"
        for k, size in enumerate(shapes[0]):
            constants |= {f"axes{k}": np.array([m for m in range(len(shapes[0])) if m != k], np.int64)}
            constants |= {f"weight{k}": np.array(rng.randint(1, 3))}
            nodes += [
                helper.make_node("Squeeze", [size], [f"end{k}"]),
                helper.make_node("Range", ["zero", f"end{k}", "one"], [f"line{k}"]),
                helper.make_node("Unsqueeze", [f"line{k}", f"axes{k}"], [f"lifted{k}"]),
                helper.make_node("Mul", [f"lifted{k}", f"weight{k}"], [f"weighted{k}"]),
                helper.make_node("Add", [total, f"weighted{k}"], [f"total{k}"]),
            ]
            total = f"total{k}"
        nodes.append(helper.make_node("Reshape", [total, "shape1"], ["between"]))
        nodes.append(helper.make_node("Reshape", ["between", "shape2"], ["y"]))
        inputs = [helper.make_tensor_value_info("grid", TensorProto.FLOAT, ["S", "T"])]
        held = [numpy_helper.from_array(array, name) for name, array in constants.items()]
        outputs = [helper.make_tensor_value_info("y", TensorProto.INT64, None)]
        graph = helper.make_graph(nodes, "g", inputs, outputs, held)
        proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
        model = ir.from_proto(proto)
        info = analyse(model)
        shape = info.shape(model.graph.outputs[0])
        assert shape is not None
        positions = Positions(info, shape)
        number = positions.number(model.graph.outputs[0], positions.identity_index)
        if not isinstance(number, Affine):
            continue
        read += 1
        session = ort.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        for s, t in SIZES:
            (wanted,) = session.run(None, {"grid": np.zeros((s, t), np.float32)})
            offset = number.offset.evaluate({"S": s, "T": t})
            got = sum(step * each for step, each in zip(number.steps, np.indices(wanted.shape), strict=True)) + offset
            assert (got == wanted).all(), (factors, groupings)
    assert read > 8


def bound(rng: random.Random) -> Dim | None:
    if rng.random() < 0.2:
        return None
    return rng.choice([Dim(0), T - S, T - S, T - S, S, T, -S, -T, Dim.min(S, T)]) + rng.randint(-2, 2)


def kept(band: Band, rows: int, columns: int, sizes: dict[str, int]) -> np.ndarray:
    distance = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    low = -UNLIMITED if band.lower is None else band.lower.evaluate(sizes)
    high = UNLIMITED if band.upper is None else band.upper.evaluate(sizes)
    return (distance >= low) & (distance <= high)


def kept_by(mode: SparseMode, rows: int, columns: int) -> np.ndarray:
    distance = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    if mode.sparse_mode == 2:
        return distance <= 0
    if mode.sparse_mode == 3:
        return distance <= columns - rows
    return (distance >= columns - rows - mode.pre_tockens) & (distance <= columns - rows + mode.next_tockens)


def test_bands_say_the_same_as_masks() -> None:
    rng = random.Random(0)
    modes = beside = full = diagonals = 0
    for _ in range(examples(700)):
        sides = rng.choice([(S, T), (S, S), (S, S + 2), (Dim(3), T), (S, Dim(4)), (S, Dim.max(S, T))])
        bands = [Band(bound(rng), bound(rng)) for _ in range(rng.randint(1, 3))]
        both = _intersection(bands)
        if both is None:
            continue
        mode = mode_of(both, *sides)
        modes, full = modes + (mode is not None), full + both.never_empty(*sides)
        beside += mode is not None and min(mode.pre_tockens, mode.next_tockens) < 0
        diagonals += both.has_diagonal
        for s, t in itertools.product(range(5), range(6)):
            sizes = {"S": s, "T": t}
            rows, columns = (side.evaluate(sizes) for side in sides)
            assert rows is not None and columns is not None
            mask = np.logical_and.reduce([kept(band, rows, columns, sizes) for band in bands])
            assert (kept(both, rows, columns, sizes) == mask).all(), (bands, sizes)
            assert mode is None or (kept_by(mode, rows, columns) == mask).all(), (both, mode, sizes)
            assert columns == 0 or not both.never_empty(*sides) or mask.any(axis=1).all(), (both, sizes)
            assert not both.has_diagonal or mask.diagonal().all(), (both, sizes)
    assert min(modes, beside, full, diagonals) > 4
