"""Masks read as formulas, and bands, against brute force: graphs at random, compared with what ONNX Runtime gives."""

from __future__ import annotations

import itertools
import random

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.passes.algebra.formula import (
    Affine,
    All,
    AtLeastZero,
    BooleanLiteral,
    BooleanTensor,
    ElementComparison,
    Formula,
    IndexLessThanElement,
    Some,
)
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.masks.band import Band, SparseMode, mode_of
from fa_compiler.passes.masks.structure import _intersection
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import analyse
from tests.examples import examples

S, T = Dim.symbol("S"), Dim.symbol("T")
SIZES = [(1, 1), (2, 3), (3, 2), (4, 4), (1, 4), (4, 1), (3, 5)]


class Program:
    """Random arithmetic on positions, sizes, constants and inputs, and comparisons of it. Every value is [S or 1, T or
    1] and is broadcast to the mask."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, np.ndarray] = {}
        self.numbers: dict[int, list[str]] = {TensorProto.INT64: [], TensorProto.INT32: [], TensorProto.FLOAT: []}
        self.truths: list[str] = ["flags"]
        self._leaves()
        for _ in range(rng.randint(2, 9)):
            self._step()

    def constant(self, value: object, dtype: type = np.int64) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = np.array(value, dtype)
        return name

    def node(self, op: str, *inputs: str, **attributes: object) -> str:
        name = f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], **attributes))
        return name

    def _leaves(self) -> None:
        whole = self.numbers[TensorProto.INT64]
        zero, one = self.constant(0), self.constant(1)
        self.extent = self.node("Shape", "grid")
        self.width = self.node("Shape", "grid", start=1, end=2)
        for axis, other in ((0, 1), (1, 0)):
            size = self.node("Gather", self.node("Shape", "grid"), self.constant(axis))
            line = self.node("Range", zero, size, one)
            ones = self.node("Expand", one, self.node("Unsqueeze", size, self.constant([0])))
            counted = self.node("CumSum", ones, zero)
            whole += [self.node("Unsqueeze", self.rng.choice([line, counted]), self.constant([other]))]
            whole += [self.node("Reshape", size, self.constant([1, 1]))]
        whole += [self.constant([[self.rng.randint(-2, 4)]]), "rows", "columns", "rows"]

    def _step(self) -> None:
        kind = self.rng.choice(list(self.numbers))
        known, rng = self.numbers[kind], self.rng
        match rng.choice(
            ["cast", "arithmetic", "arithmetic", "extreme", "where", "compare", "compare", "logic", "move", "join"]
        ):
            case "cast":
                source = rng.choice([name for names in self.numbers.values() for name in names] + self.truths)
                known.append(self.node("Cast", source, to=kind))
            case "arithmetic" if known:
                known.append(self.node(rng.choice(["Add", "Sub", "Mul"]), rng.choice(known), rng.choice(known)))
            case "extreme" if known:
                made = self.node(rng.choice(["Min", "Max"]), rng.choice(known), rng.choice(known))
                known.append(rng.choice([made, self.node(rng.choice(["Neg", "Abs"]), made)]))
            case "where" if known:
                known.append(self.node("Where", rng.choice(self.truths), rng.choice(known), rng.choice(known)))
            case "compare" if known:
                op = rng.choice(["Less", "LessOrEqual", "Greater", "GreaterOrEqual", "Equal"])
                self.truths.append(self.node(op, rng.choice(known), rng.choice(known)))
            case "logic":
                op = rng.choice(["And", "Or", "Xor", "Not", "Trilu"])
                picked = [rng.choice(self.truths) for _ in range(1 if op in ("Not", "Trilu") else 2)]
                if op == "Trilu":
                    whole = self.node("Or", picked[0], "nothing")
                    self.truths.append(self.node(op, whole, self.constant(rng.randint(-1, 1)), upper=rng.randint(0, 1)))
                else:
                    self.truths.append(self.node(op, *picked))
            case "join" if known:
                parts = [self.node("Expand", rng.choice(known), self.extent) for _ in range(2)]
                start = self.constant([rng.randint(0, 2)])
                end = self.node("Add", self.width, start)
                joined = self.node("Concat", *parts, axis=1)
                known.append(self.node("Slice", joined, start, end, self.constant([1])))
            case "move" if known:
                found = self.node("Unsqueeze", rng.choice(known), self.constant([0]))
                known.append(self.node("Squeeze", self.node("Identity", found), self.constant([0])))

    def proto(self) -> onnx.ModelProto:
        self.node("Or", self.truths[-1], "nothing")  # as large as the scores
        inputs = [
            helper.make_tensor_value_info("grid", TensorProto.FLOAT, ["S", "T"]),
            helper.make_tensor_value_info("nothing", TensorProto.BOOL, ["S", "T"]),
            helper.make_tensor_value_info("flags", TensorProto.BOOL, ["S", "T"]),
            helper.make_tensor_value_info("rows", TensorProto.INT64, ["S", 1]),
            helper.make_tensor_value_info("columns", TensorProto.INT64, [1, "T"]),
        ]
        outputs = [onnx.ValueInfoProto(name=name) for node in self.nodes for name in node.output]
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)


def place(affine: Affine, index: tuple[int, int], sizes: dict[str, int]) -> int:
    offset = affine.offset.evaluate(sizes)
    assert offset is not None
    return offset + sum(step * each for step, each in zip(affine.steps, index, strict=True))


def holds(formula: Formula, index: tuple[int, int], sizes: dict[str, int], run: dict[str, np.ndarray]) -> bool:
    def element(value: ir.Value, places: tuple[Affine, ...]) -> int:
        return int(run[value.name or ""][tuple(place(each, index, sizes) for each in places)])

    match formula:
        case BooleanLiteral(value):
            return value
        case AtLeastZero(affine):
            return place(affine, index, sizes) >= 0
        case BooleanTensor(value, axes, when):
            own = tuple(0 if axis is None else index[axis] for axis in axes)
            return bool(run[value.name or ""][own]) == when
        case ElementComparison(value, one, other, relation, when):
            left, right = element(value, one), element(value, other)
            return (left == right if relation == "Equal" else left <= right) == when
        case IndexLessThanElement(affine, value, at, when):
            return (place(affine, index, sizes) < element(value, at)) == when
        case All(parts):
            return all(holds(part, index, sizes, run) for part in parts)
        case Some(parts):
            return any(holds(part, index, sizes, run) for part in parts)


@pytest.mark.parametrize("seed", range(4))
def test_a_formula_is_true_where_the_mask_is(seed: int) -> None:
    rng = random.Random(seed)
    read = 0
    for _ in range(examples(60)):
        proto = Program(rng).proto()
        model = ir.from_proto(proto)
        info = analyse(model)
        values = {value.name or "": value for node in model.graph for value in node.outputs}
        mask = values[proto.graph.node[-1].output[0]]
        positions = Positions(info, (S, T))
        formula = positions.truth(mask, positions.identity_index)
        if formula is None or isinstance(formula, BooleanTensor):
            continue
        read += 1
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = 1
        session = ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
        for s, t in SIZES:
            feeds = {
                "grid": np.zeros((s, t), np.float32),
                "nothing": np.zeros((s, t), np.bool_),
                "flags": np.random.default_rng(s * t).random((s, t)) < 0.5,
                "rows": np.random.default_rng(s).integers(-1, 4, (s, 1)),
                "columns": np.random.default_rng(t).integers(-1, 4, (1, t)),
            }
            results = session.run(None, feeds)
            run = dict(zip((item.name for item in session.get_outputs()), results, strict=True)) | feeds
            wanted = run[mask.name or ""]
            sizes = {"S": s, "T": t}
            for index in itertools.product(range(s), range(t)):
                assert holds(formula, index, sizes, run) == wanted[index], (formula, index, sizes, proto.graph.node)
    assert read > 5


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
