"""Shape rules against ONNX Runtime: operators with random attributes, at small sizes, empty ones included.

Each model has inputs of the sizes a, b and c and one operator, whose other inputs are constants or made of those sizes.
Every size, type and content that is inferred must be that of every run that succeeds; the rules' own list of runs
that they leave out (`shapes.py`) is left out here, too.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from fa_compiler.passes.values.shapes import ShapeInfo, analyse
from tests.examples import examples
from tests.passes.values.test_shapes import same

NAMES = ("a", "b", "c")
RUNS = [(2, 3, 4), (1, 1, 1), (4, 1, 2), (5, 4, 3), (1, 6, 2), (6, 2, 5)]
EMPTY_RUNS = [(0, 2, 3), (3, 0, 1)]
NUMPY = {TensorProto.FLOAT: np.float32, TensorProto.INT64: np.int64, TensorProto.BOOL: np.bool_}
Sizes = list[int | str]


@dataclass
class Draft:
    """A model in the making."""

    rng: random.Random
    empty: bool = True
    """Whether sizes of 0 are tried: not where ONNX Runtime departs from the operator, or crashes."""
    inputs: dict[str, tuple[int, Sizes]] = field(default_factory=dict)
    constants: dict[str, np.ndarray] = field(default_factory=dict)
    nodes: list[onnx.NodeProto] = field(default_factory=list)

    def sizes(self, rank: int, least: int = 0) -> Sizes:
        return [self.rng.choice([*NAMES, self.rng.randint(least, 6), self.rng.randint(1, 4)]) for _ in range(rank)]

    def input(self, sizes: Sizes, dtype: int = TensorProto.FLOAT) -> str:
        name = f"x{len(self.inputs)}"
        self.inputs[name] = dtype, sizes
        return name

    def constant(self, value: object, dtype: type = np.int64) -> str:
        name = f"k{len(self.constants)}"
        self.constants[name] = np.array(value, dtype)
        return name

    def node(self, op: str, inputs: list[str], outputs: int = 1, **attributes: object) -> str:
        names = [f"t{len(self.nodes)}_{index}" for index in range(outputs)]
        given = {name: value for name, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(op, inputs, names, **given))
        return names[0]

    def size_of(self, value: str, axis: int, more: int = 0) -> str:
        """A vector of one size of a tensor, and a number more."""
        found = self.node("Gather", [self.node("Shape", [value]), self.constant([axis])])
        return self.node("Add", [found, self.constant([more])]) if more else found

    def joined(self, parts: list[str]) -> str:
        return self.node("Concat", parts, axis=0)

    def proto(self, opset: int) -> onnx.ModelProto:
        inputs = [helper.make_tensor_value_info(name, *given) for name, given in self.inputs.items()]
        outputs = [onnx.ValueInfoProto(name=name) for node in self.nodes for name in node.output]
        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, "g", inputs, outputs, constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def sliced(d: Draft) -> None:
    rank = d.rng.randint(1, 3)
    x, axes = d.input(d.sizes(rank)), d.rng.sample(range(rank), d.rng.randint(1, rank))

    def bound(ends: list[int]) -> str:
        if d.rng.random() < 0.55:
            return d.constant([d.rng.choice([-7, -3, -2, -1, 0, 1, 2, 3, 5, 9, *ends])])
        return d.size_of(x, d.rng.randrange(rank), d.rng.choice([0, -1, 1, -2]))

    starts, ends = [bound([]) for _ in axes], [bound([2**63 - 1, -(2**63), 2**31 - 1]) for _ in axes]
    steps = d.constant([d.rng.choice([1, 1, 1, 2, 3, -1, -2]) for _ in axes])
    places = d.constant([axis - d.rng.choice([0, rank]) for axis in axes])
    d.node("Slice", [x, d.joined(starts), d.joined(ends), places, *d.rng.choice([[], [steps]])])


def window(d: Draft) -> None:
    spatial, op = d.rng.randint(1, 2), d.rng.choice(["Conv", "MaxPool", "AveragePool", "ConvTranspose"])
    x = d.input(
        [d.rng.choice([1, "a", 2]), 2, *(d.rng.choice(["b", "c", d.rng.randint(1, 9)]) for _ in range(spatial))]
    )
    kernel = [d.rng.randint(1, 4) for _ in range(spatial)]
    mode = d.rng.choice([None, "NOTSET", "NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID"])
    attributes: dict[str, object] = {
        "strides": d.rng.choice([None, [d.rng.randint(1, 3) for _ in range(spatial)]]),
        "dilations": d.rng.choice([None, [d.rng.randint(1, 3) for _ in range(spatial)]]),
        "pads": [d.rng.randint(0, 1) for _ in range(2 * spatial)] if mode in (None, "NOTSET") else None,
        "auto_pad": mode,
    }
    if op.endswith("Pool"):
        d.node(op, [x], kernel_shape=kernel, ceil_mode=d.rng.choice([None, 0, 1]), **attributes)
    else:
        weights = np.zeros((3, 2, *kernel) if op == "Conv" else (2, 3, *kernel))
        d.node(op, [x, d.constant(weights, np.float32)], **attributes)


def split(d: Draft) -> None:
    rank, parts = d.rng.randint(1, 3), d.rng.randint(1, 4)
    x, axis = d.input(d.sizes(rank)), d.rng.randint(-rank, rank - 1)
    match d.rng.randrange(3):
        case 0:
            d.node("Split", [x], parts, axis=axis, num_outputs=parts)
        case 1:
            d.node("Split", [x, d.constant([d.rng.randint(0, 4) for _ in range(parts)])], parts, axis=axis)
        case _:
            d.node("Split", [x, d.joined([d.size_of(x, axis % rank, -1), d.constant([1])])], 2, axis=axis)


def split_to_sequence(d: Draft) -> None:
    rank = d.rng.randint(1, 3)
    x, keep = d.input(d.sizes(rank)), d.rng.choice([None, 0, 1])
    sizes = d.rng.choice([[], [d.constant(d.rng.randint(1, 3))], [d.constant([1, 2])]])
    parts = d.node("SplitToSequence", [x, *sizes], axis=d.rng.randint(-rank, rank - 1), keepdims=keep)
    d.node("SequenceAt", [parts, d.constant(d.rng.randint(-2, 1))])


def reshape(d: Draft) -> None:
    d.empty = False  # a 0 among sizes that are computed
    rank = d.rng.randint(1, 3)
    x = d.input(d.sizes(rank))
    numbers = [d.constant([d.rng.choice([0, -1, -1, 1, 2, 3, 4, 6])]) for _ in range(3)]
    sizes = [d.size_of(x, d.rng.randrange(rank), d.rng.choice([0, 0, 0, 1])) for _ in range(3)]
    target = d.joined(d.rng.sample([*numbers, *sizes], d.rng.randint(1, 4)))
    d.node("Reshape", [x, target], allowzero=d.rng.choice([None, None, 0, 1]))


def chunk(d: Draft) -> None:
    """Rows of a tensor as CANINE cuts them. A Reshape states their number, which may be -1, but is never 0 in RUNS."""
    d.empty = False
    length, start = d.rng.choice([("a", 3), ("b", 5)])
    x = d.input(["c", length, 4])
    stop = d.node("Min", [d.size_of(x, 1), d.constant([d.rng.randint(start + 1, 7)])])
    rows = d.node("Slice", [x, d.constant([start]), stop, d.constant([1])])
    stated = d.node("Sub", [stop, d.constant([d.rng.choice([start, start, 0])])])
    rest = d.rng.choice([[2, 2], [4], [1, 2]])
    d.node("Reshape", [rows, d.joined([d.size_of(x, 0), stated, d.constant(rest)])], allowzero=d.rng.choice([0, 1]))


def tile(d: Draft) -> None:
    rank = d.rng.randint(1, 3)
    x = d.input(d.sizes(rank))
    times = [d.rng.choice([d.constant([d.rng.randint(0, 3)]), d.size_of(x, axis, -1)]) for axis in range(rank)]
    d.node("Tile", [x, d.joined(times)])


def expand(d: Draft) -> None:
    rank = d.rng.randint(1, 3)
    x = d.input(d.sizes(rank))
    numbers = [d.constant([d.rng.choice([1, 1, 2, 3, 0])]) for _ in range(3)]
    sizes = [d.rng.choice([number, d.size_of(x, 0), d.size_of(x, 0, d.rng.choice([-1, -2]))]) for number in numbers]
    d.node("Expand", [x, d.joined(sizes[: d.rng.randint(1, 3)])])


def pad(d: Draft) -> None:
    rank = d.rng.randint(1, 3)
    x, axes = d.input(d.sizes(rank)), d.rng.sample(range(rank), d.rng.randint(1, rank))
    listed = d.rng.random() < 0.5
    pads = d.constant([d.rng.choice([0, 0, 1, 2, -1, -2]) for _ in range(2 * (len(axes) if listed else rank))])
    more = ["", d.constant([axis - d.rng.choice([0, rank]) for axis in axes])] if listed else []
    d.node("Pad", [x, pads, *more], mode=d.rng.choice([None, "constant", "edge", "reflect", "wrap"]))


def gather(d: Draft) -> None:
    rank, data = d.rng.randint(1, 3), ""
    if d.rng.random() < 0.4:
        ends = d.rng.choice([None, 0, 1, -2, -9, 9]), d.rng.choice([None, 2, -1, 9, -9, 1])
        rank, data = 1, d.node("Shape", [d.input(d.sizes(3))], start=ends[0], end=ends[1])
    indices = np.array([d.rng.randint(-2, 1) for _ in range(4)]).reshape(d.rng.choice([(4,), (2, 2)]))
    axis = d.rng.randint(-rank, rank - 1)
    d.node("Gather", [data or d.input(d.sizes(rank, 1)), d.constant(d.rng.choice([indices, -1]))], axis=axis)


def gather_points(d: Draft) -> None:
    rank = d.rng.randint(1, 3)
    sizes, batch = d.sizes(rank, 1), d.rng.randint(0, rank - 1)
    indices = d.input(
        [*sizes[:batch], *d.sizes(d.rng.randint(0, 1)), d.rng.randint(1, rank - batch)], TensorProto.INT64
    )
    d.node("GatherND", [d.input(sizes), indices], batch_dims=batch)


def count(d: Draft) -> None:
    x = d.input(d.sizes(3))

    def bound() -> str:
        size = d.node("Gather", [d.node("Shape", [x]), d.constant(d.rng.randrange(3))])
        moved = d.node(d.rng.choice(["Add", "Sub", "Mul"]), [size, d.constant(d.rng.randint(-2, 3))])
        return d.rng.choice([moved, d.constant(d.rng.randint(-4, 6))])

    d.node("Range", [bound(), bound(), d.rng.choice([bound(), *map(d.constant, (1, 1, 2, 3, -1, -2))])])


def count_floats(d: Draft) -> None:
    numbers = [0, 1, -1.5, 2.5, 7, -4, 0.1], [0, 1, 3.5, 7, -4], [1, 2, 0.5, 0.1, -1, 3]
    d.node("Range", [d.constant(d.rng.choice(each), np.float32) for each in numbers])


def one_hot(d: Draft) -> None:
    rank = d.rng.randint(1, 2)
    indices, depth = d.input(d.sizes(rank), TensorProto.INT64), d.constant(d.rng.choice([3, [4]]))
    axis = d.rng.choice([None, *range(-rank - 1, rank + 1)])
    d.node("OneHot", [indices, depth, d.constant([0, 1], np.float32)], axis=axis)


def top_k(d: Draft) -> None:
    rank = d.rng.randint(1, 3)
    x, axis = d.input(d.sizes(rank)), d.rng.randint(-rank, rank - 1)
    least = d.node("Min", [d.size_of(x, axis % rank), d.constant([2])])
    d.node("TopK", [x, d.rng.choice([least, d.constant([d.rng.randint(0, 3)])])], 2, axis=axis)


def non_zero(d: Draft) -> None:
    known = np.array([d.rng.randint(-1, 1) for _ in range(d.rng.randint(0, 6))])
    shape = d.rng.choice([known.shape, (1, known.size), (known.size, 1)])
    flags = d.constant(known.reshape(shape).tolist(), d.rng.choice([np.int64, np.float32]))
    d.node("NonZero", [d.rng.choice([d.input(d.sizes(d.rng.randint(0, 3))), flags])])


def einsum(d: Draft) -> None:
    d.empty = False  # ONNX Runtime divides by 0
    size: dict[str, int | str] = {"i": "a", "j": "b", "k": "c", "l": 3}
    terms, inputs = [], []
    for _ in range(d.rng.randint(1, 2)):
        letters = d.rng.sample("ijkl", d.rng.randint(1, 2)) + d.rng.choice([[], [], ["l", "l"]])
        place, more = d.rng.randint(0, len(letters)), d.rng.choice([None, [], [2], ["b", 1]])
        sizes = [size[letter] for letter in letters]
        inputs.append(d.input([*sizes[:place], *(more or []), *sizes[place:]]))
        terms.append("".join(letters) if more is None else "".join([*letters[:place], "...", *letters[place:]]))
    left = ",".join(terms)
    known = sorted(set(left) - set(".,"))
    right = d.rng.sample(known, d.rng.randint(0, len(known)))
    if "..." in left:
        right.insert(d.rng.randint(0, len(right)), "...")
    d.node("Einsum", inputs, equation=left + d.rng.choice(["", "->" + "".join(right)]))


def resize(d: Draft) -> None:
    x = d.input([1, 2, d.rng.choice(["a", 3, 4]), d.rng.choice(["b", 5, 2])])
    sizes, policy = [d.rng.randint(1, 6), d.rng.randint(1, 6)], d.rng.choice([None, "not_larger", "not_smaller"])
    match d.rng.randrange(3):
        case 0:
            target = d.constant([1, 2, *sizes])
            d.node("Resize", [x, "", "", target], mode="nearest", keep_aspect_ratio_policy=policy)
        case 1:
            d.node("Resize", [x, "", "", d.constant(sizes)], axes=[2, 3], mode="nearest")
        case _:
            scales = d.constant([1, 1, d.rng.choice([0.5, 1.5, 2]), 2], np.float32)
            d.node("Resize", [x, "", scales], mode="nearest")


def reduction(d: Draft) -> None:
    d.empty = False
    rank = d.rng.randint(0, 3)
    axes = [axis - d.rng.choice([0, rank]) for axis in d.rng.sample(range(rank), d.rng.randint(0, rank))]
    inputs = [d.input(d.sizes(rank, 1)), *d.rng.choice([[], [d.constant(np.array(axes, np.int64))]])]
    op, keep = d.rng.choice(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2"]), d.rng.choice([None, 0, 1])
    d.node(op, inputs, keepdims=keep, noop_with_empty_axes=d.rng.choice([None, 0, 1]))


def squeeze(d: Draft) -> None:
    rank = d.rng.randint(1, 4)
    x = d.input([d.rng.choice([1, 1, 2, "a", 3]) for _ in range(rank)])
    d.node("Squeeze", [x, *d.rng.choice([[], [d.constant([d.rng.randint(-rank, rank - 1)])]])])


def flatten(d: Draft) -> None:
    rank = d.rng.randint(0, 3)
    d.node("Flatten", [d.input(d.sizes(rank))], axis=d.rng.choice([None, d.rng.randint(-rank, rank)]))


def concat(d: Draft) -> None:
    d.empty = False
    rank = d.rng.randint(1, 3)
    sizes, axis = d.sizes(rank, 1), d.rng.randrange(rank)
    parts = [[*sizes[:axis], d.rng.choice(["a", "b", 2, 1]), *sizes[axis + 1 :]] for _ in range(d.rng.randint(1, 3))]
    d.node("Concat", [d.input(part) for part in parts], axis=axis - d.rng.choice([0, rank]))


def matmul(d: Draft) -> None:
    inner = d.rng.choice([3, "c"])
    batches = [[d.rng.choice(["a", 1, "b", 2]) for _ in range(d.rng.randint(0, 2))] for _ in range(2)]
    left = d.rng.choice([[inner], [*batches[0], d.rng.choice(["a", 2]), inner]])
    right = d.rng.choice([[inner], [*batches[1], inner, d.rng.choice(["b", 1])]])
    d.node("MatMul", [d.input(left), d.input(right)])


def elementwise(d: Draft) -> None:
    op = d.rng.choice(["Add", "Sum", "Where"])
    inputs = [d.input(d.sizes(d.rng.randint(0, 3))) for _ in range(2)]
    condition = [d.input(d.sizes(d.rng.randint(0, 3)), TensorProto.BOOL)] if op == "Where" else []
    d.node(op, [*condition, *inputs])


def blocks(d: Draft) -> None:
    sizes: Sizes = [
        d.rng.choice(["a", 1]),
        d.rng.choice([4, 8, "b"]),
        d.rng.choice(["c", 2, 4]),
        d.rng.choice(["a", 2]),
    ]
    d.node(d.rng.choice(["DepthToSpace", "SpaceToDepth"]), [d.input(sizes)], blocksize=d.rng.randint(1, 2))


def sizes_computed(d: Draft) -> None:
    """Arithmetic on sizes, whose contents are followed, and a tensor of such a size."""
    x = d.input(d.sizes(3))
    known = [d.size_of(x, axis) for axis in range(3)] + [d.constant([d.rng.randint(-3, 5)]) for _ in range(3)]
    for _ in range(d.rng.randint(1, 6)):
        one, other = d.rng.choice(known), d.rng.choice(known)
        match d.rng.choice(["binary", "binary", "Div", "Mod", "unary", "Where", "Cast", "reduction", "Gather"]):
            case "binary":
                made = d.node(d.rng.choice(["Add", "Sub", "Mul", "Min", "Max"]), [one, other])
            case "Div" | "Mod" as op:
                # A division by 0 ends the process.
                divisor = d.node("Max", [other, d.constant([1])])
                divisor = d.rng.choice([divisor, d.constant([d.rng.choice([-3, -2, 2, 3])])])
                made = d.node(op, [one, divisor], fmod=d.rng.choice([None, 1]) if op == "Mod" else None)
            case "unary":
                made = d.node(d.rng.choice(["Neg", "Abs"]), [one])
            case "Where":
                condition = d.node(d.rng.choice(["Less", "Equal", "Greater"]), [one, other])
                made = d.node("Where", [condition, d.rng.choice(known), d.rng.choice(known)])
            case "Cast":
                names = ["INT32", "UINT8", "INT8", "FLOAT", "UINT64", "FLOAT16", "BOOL"]
                narrow = d.node("Cast", [one], to=getattr(TensorProto, d.rng.choice(names)))
                made = d.node("Cast", [narrow], to=TensorProto.INT64)
            case "reduction":
                made = d.node(d.rng.choice(["ReduceSum", "ReduceMax", "ReduceProd"]), [d.joined([one, other])])
            case _:
                made = d.node("Gather", [d.joined([one, other]), d.constant([d.rng.randint(-2, 1)])])
        known.append(made)
    d.node("ConstantOfShape", [d.node("Min", [d.node("Max", [known[-1], d.constant([0])]), d.constant([50])])])


KINDS: list[Callable[[Draft], None]] = [
    *(sliced, window, split, split_to_sequence, reshape, chunk, tile, expand, pad),
    *(gather, gather_points, count, count_floats),
    *(one_hot, top_k, non_zero, einsum, resize, reduction, squeeze, flatten, concat, matmul, elementwise, blocks),
    *(sizes_computed, sliced, window, sizes_computed, split_to_sequence),
]


def session(proto: onnx.ModelProto) -> ort.InferenceSession | None:
    """None for a model that ONNX Runtime refuses."""
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    try:
        return ort.InferenceSession(proto.SerializeToString(), options, ["CPUExecutionProvider"])
    except Exception:
        return None


def compare(info: ShapeInfo, value: ir.Value, real: np.ndarray, bindings: dict[str, int], what: str) -> None:
    fact = info.fact(value)
    assert fact.dtype in (None, ir.DataType.from_numpy(real.dtype)), what
    if fact.shape is not None:
        assert len(fact.shape) == real.ndim, what
        for size, length in zip(fact.shape, real.shape, strict=True):
            same(size, length, bindings, what)
    if fact.content is not None:
        assert fact.content.shape == real.shape, what
        for item, element in zip(fact.content.reshape(-1), real.reshape(-1), strict=True):
            if fact.content.dtype == object:
                same(item, int(element), bindings, what)
            else:
                assert np.array_equal(item, element, equal_nan=True), what


def runs_compared(draft: Draft, opset: int) -> int:
    """How many runs succeeded, of each of which all claims hold."""
    proto = draft.proto(opset)
    model = ir.from_proto(proto)
    info, runner, done = analyse(model), session(proto), 0
    values = {value.name: value for node in model.graph for value in node.outputs}
    for lengths in [] if runner is None else RUNS + (EMPTY_RUNS if draft.empty else []):
        bindings = dict(zip(NAMES, lengths, strict=True))
        feeds = {
            name: np.ones([bindings[size] if isinstance(size, str) else size for size in sizes], NUMPY[dtype])
            for name, (dtype, sizes) in draft.inputs.items()
        }
        for name in (name for name, (dtype, _) in draft.inputs.items() if dtype == TensorProto.INT64):
            feeds[name][...] = 0
        assert runner is not None
        try:
            results = runner.run(None, feeds)
        except Exception:  # nothing is claimed of a run that fails
            continue
        done += 1
        text = f"{draft.nodes} {draft.inputs} {draft.constants} at {bindings}"
        for item, real in zip(runner.get_outputs(), results, strict=True):
            if not isinstance(real, list):
                compare(info, values[item.name], np.asarray(real), bindings, f"{item.name} of {text}")
    return done


@pytest.mark.parametrize("kind", sorted(set(KINDS), key=lambda kind: kind.__name__))
def test_every_size_is_that_of_each_run(kind: Callable[[Draft], None]) -> None:
    rng = random.Random(kind.__name__)
    done = 0
    for _ in range(examples(40 * KINDS.count(kind))):
        draft = Draft(rng)
        kind(draft)
        done += runs_compared(draft, rng.choice((18, 20, 23)))
    assert done > 10
