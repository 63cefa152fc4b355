"""Models of any size: one attention, or several, and one thing that grows with the size.

`GROWING` holds a function for each of them. Its name says what grows and how: in depth (a chain), in width (many beside
one another) or by sharing (a ladder, each of whose steps reads the step before it twice). `model(name, size)` composes
one.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FLOAT, BOOL, INT64 = TensorProto.FLOAT, TensorProto.BOOL, TensorProto.INT64
HEADS, DEPTH, ROWS = 2, 8, 4
DOMAIN = "local"
OPSET = 17
CHANGED_ROWS = 40
"""The rows of attentions with keys in parts, of which few are left as they are."""
NESTED = 20
"""Subgraphs of more levels cannot be written: protobuf reads messages of 100 levels."""


class Graph:
    """A model under composition: attention over [B, HEADS, S, DEPTH], with sizes B and S that are symbols."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.functions: list[onnx.FunctionProto] = []
        self.names = True
        self._constants: dict[str, str] = {}

    def op(self, op_type: str, *inputs: str, count: int = 1, domain: str = "", **attrs: Any) -> str:
        """Add a node; its first output."""
        place = len(self.nodes)
        outputs = [f"t{place}", *(f"t{place}_{index}" for index in range(1, count))]
        name = f"n{place}" if self.names else ""
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, domain=domain, **attrs))
        return outputs[0]

    def const(self, number: Any, dtype: str = "float32") -> str:
        """An initializer; the same one for equal content."""
        array = np.asarray(number, dtype=dtype)
        key = f"{array.dtype}{array.shape}{zlib.crc32(array.tobytes())}"
        if key not in self._constants:
            self._constants[key] = f"c{len(self._constants)}"
            self.initializers.append(numpy_helper.from_array(array, self._constants[key]))
        return self._constants[key]

    @property
    def given(self) -> set[str]:
        """The names of the inputs."""
        return {info.name for info in self.inputs}

    def input(self, name: str, dtype: int, *shape: int | str) -> str:
        """A graph input."""
        self.inputs.append(helper.make_tensor_value_info(name, dtype, shape))
        return name

    def operand(self, name: str) -> str:
        """A query, key or value."""
        return self.input(name, FLOAT, "B", HEADS, "S", DEPTH)

    def operands(self, suffix: str = "") -> tuple[str, str, str]:
        """Query, key and value, inputs all."""
        query, key, value = (self.operand(letter + suffix) for letter in "qkv")
        return query, key, value

    def scores(self, query: str, key: str) -> str:
        """query . key."""
        return self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))

    def probabilities(self, scores: str) -> str:
        """The softmax over the keys."""
        return self.op("Softmax", scores, axis=-1)

    def attention(self, bias: str = "", mask: str = "", suffix: str = "") -> str:
        """A whole attention, with a bias that is added or a mask of what is kept."""
        query, key, value = self.operands(suffix)
        return self.attend(query, key, value, bias, mask)

    def attend(self, query: str, key: str, value: str, bias: str = "", mask: str = "") -> str:
        """Attention of operands at hand."""
        scores = self.scores(query, key)
        scores = self.op("Add", scores, bias) if bias else scores
        scores = self.op("Where", mask, scores, self.const(-np.inf)) if mask else scores
        return self.op("MatMul", self.probabilities(scores), value)

    def output(self, value: str, dtype: int = FLOAT, rank: int = 4) -> None:
        """One more output of the model."""
        name = f"y{len(self.outputs)}"
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"{name}_made" if self.names else ""))
        self.outputs.append(helper.make_tensor_value_info(name, dtype, [None] * rank))

    def size(self, axis: int = 2) -> str:
        """A size of the query, int64 [1]."""
        return self.op("Gather", self.op("Shape", "q"), self.const([axis], "int64"), axis=0)

    def positions(self) -> tuple[str, str]:
        """The numbers of rows [S, 1] and of columns [S]."""
        length = self.op("Squeeze", self.size(), self.const([0], "int64"))
        columns = self.op("Range", self.const(0, "int64"), length, self.const(1, "int64"))
        return self.op("Unsqueeze", columns, self.const([1], "int64")), columns

    def model(self) -> onnx.ModelProto:
        """The finished model."""
        graph = helper.make_graph(self.nodes, "growing", self.inputs, self.outputs, self.initializers)
        imports = [helper.make_opsetid("", OPSET)]
        imports += [helper.make_opsetid(DOMAIN, 1)] if self.functions else []
        return helper.make_model(graph, opset_imports=imports, functions=self.functions, ir_version=8)


Growing = Callable[[Graph, int], None]
GROWING: dict[str, Growing] = {}


def growing(make: Growing) -> Growing:
    """List a function under its name."""
    GROWING[make.__name__] = make
    return make


def model(name: str, size: int) -> onnx.ModelProto:
    """The model of a name, of a size."""
    graph = Graph()
    GROWING[name](graph, size)
    return graph.model()


def _finish(graph: Graph, bias: str = "", mask: str = "") -> None:
    graph.output(graph.attention(bias=bias, mask=mask))


MIXED = ("bias", "mask", "number", "size", "scores", "query", "value")
"""The places of a random ladder."""


def mixed(seed: int, size: int) -> onnx.ModelProto:
    """A model with a ladder of random steps, each of which reads two of the last values. Its steps repeat after a few,
    so that a model of another size is more of the same."""
    rng, graph = random.Random(seed), Graph()
    query, key, value = graph.operands()
    place = rng.choice(MIXED)
    length, condition = graph.size(), graph.input("c", BOOL, "B", 1, "S", "S")
    scores = graph.scores(query, key) if place == "scores" else ""
    rows, columns = graph.positions()
    start = {"bias": "", "mask": condition, "number": rows, "size": length, "scores": scores}.get(place, query)
    ladder = [start or _lowered(graph)]
    words = rng.choices(_STEPS[_KIND_OF.get(place, place)], k=rng.randint(1, 4))
    for index in range(size):
        one, other = ladder[-1], rng.choice(ladder[-3:])
        word = words[index % len(words)]
        operands = (one,) if word in _OF_ONE else _operands(word, one, other, graph, place)
        ladder.append(graph.op(word, *operands))
    end = ladder[-1]
    if place == "number":
        graph.output(graph.attend(query, key, value, mask=graph.op("LessOrEqual", columns, end)))
    elif place == "size":
        one = graph.const([1], "int64")
        bias = graph.op("Expand", _bias(graph), graph.op("Concat", one, one, end, end, axis=0))
        graph.output(graph.attend(query, key, value, bias=bias))
    elif place == "scores":
        graph.output(graph.op("MatMul", graph.probabilities(end), value))
    elif place in ("query", "value"):
        graph.output(graph.attend(end, key, value) if place == "query" else graph.attend(query, key, end))
    else:
        graph.output(graph.attend(query, key, value, **{place: end}))
    return graph.model()


_NUMBERS = ("Add", "Sub", "Mul", "Max", "Min", "Where", "Neg", "Abs")
_STEPS = {
    "bias": (*_NUMBERS, "Sigmoid", "Identity"),
    "mask": ("And", "Or", "Xor", "Not", "Identity", "And", "Or"),
    "number": (*_NUMBERS, "Identity"),
    "size": ("Add", "Sub", "Mul", "Max", "Min", "Div", "Identity"),
}
_KIND_OF = {"scores": "bias", "query": "bias", "value": "bias"}
_OF_ONE = ("Neg", "Abs", "Sigmoid", "Identity", "Not")


def _operands(word: str, one: str, other: str, graph: Graph, place: str) -> tuple[str, ...]:
    if word == "Where":
        row = ("B", 1, "S", 1)
        shape = {"query": row, "value": row, "number": ("S", 1)}.get(place, ("B", 1, "S", "S"))
        return ("w" if "w" in graph.given else graph.input("w", BOOL, *shape)), one, other
    return one, other


# -- biases ---------------------------------------------------------------------------------------


def _bias(graph: Graph) -> str:
    return graph.input("bias", FLOAT, "B", 1, "S", "S")


def _lowered(graph: Graph, name: str = "mask") -> str:
    """A float mask of 0 and -1e9, computed from one of 0 and 1."""
    kept = graph.input(name, FLOAT, "B", 1, 1, "S")
    return graph.op("Mul", graph.op("Sub", graph.const(1.0), kept), graph.const(-1e9))


def _bias_ladder(op_type: str, lowered: bool) -> Growing:
    def make(graph: Graph, size: int) -> None:
        bias = _lowered(graph) if lowered else _bias(graph)
        for _ in range(size):
            bias = graph.op(op_type, bias, bias)
        _finish(graph, bias=bias)

    return make


for _op in ("Add", "Sub", "Mul", "Max", "Min"):
    GROWING[f"bias_ladder_{_op.lower()}"] = _bias_ladder(_op, lowered=False)
    GROWING[f"lowered_ladder_{_op.lower()}"] = _bias_ladder(_op, lowered=True)


@growing
def lowered_ladder_where(graph: Graph, size: int) -> None:
    bias, choice = _lowered(graph), graph.input("choice", BOOL, "B", 1, 1, "S")
    for _ in range(size):
        bias = graph.op("Where", choice, bias, bias)
    _finish(graph, bias=bias)


@growing
def bias_ladder_where(graph: Graph, size: int) -> None:
    bias, choice = _bias(graph), graph.input("choice", BOOL, "B", 1, 1, "S")
    for _ in range(size):
        bias = graph.op("Where", choice, bias, graph.op("Neg", bias))
    _finish(graph, bias=bias)


@growing
def bias_ladder_concat(graph: Graph, size: int) -> None:
    bias = _bias(graph)
    axis, first = graph.const([0], "int64"), graph.const([0], "int64")
    for _ in range(size):
        bias = graph.op("Slice", graph.op("Concat", bias, bias, axis=0), first, graph.size(0), axis)
    _finish(graph, bias=bias)


@growing
def bias_chain(graph: Graph, size: int) -> None:
    bias = _bias(graph)
    for index in range(size):
        bias = graph.op(("Neg", "Abs", "Sigmoid", "Relu", "Tanh")[index % 5], bias)
    _finish(graph, bias=bias)


@growing
def bias_chain_of_moves(graph: Graph, size: int) -> None:
    bias = _bias(graph)
    for _ in range(size):
        bias = graph.op("Transpose", bias, perm=[0, 1, 3, 2])
    _finish(graph, bias=bias)


@growing
def bias_chain_of_reshapes(graph: Graph, size: int) -> None:
    bias = _bias(graph)
    for _ in range(size):
        bias = graph.op("Unsqueeze", bias, graph.const([0], "int64"))
        bias = graph.op("Squeeze", bias, graph.const([0], "int64"))
    _finish(graph, bias=bias)


@growing
def bias_sum(graph: Graph, size: int) -> None:
    """Biases of their own, summed up before they are added."""
    total = _bias(graph)
    for index in range(size):
        total = graph.op("Add", total, graph.input(f"bias{index}", FLOAT, "B", 1, "S", "S"))
    _finish(graph, bias=total)


@growing
def lowered_sum(graph: Graph, size: int) -> None:
    """Masks of 0 and -1e9 of their own, summed up."""
    total = _lowered(graph)
    for index in range(size):
        total = graph.op("Add", total, _lowered(graph, f"mask{index}"))
    _finish(graph, bias=total)


# -- boolean masks --------------------------------------------------------------------------------


def _kept(graph: Graph, name: str) -> str:
    return graph.input(name, BOOL, "B", 1, "S", "S")


@growing
def mask_ladder(graph: Graph, size: int) -> None:
    """Or(And(m, a), And(m, b)), so that a tree of it doubles with each step."""
    mask, one, other = (_kept(graph, name) for name in ("m", "a", "b"))
    for _ in range(size):
        mask = graph.op("Or", graph.op("And", mask, one), graph.op("And", mask, other))
    _finish(graph, mask=mask)


@growing
def mask_ladder_of_inputs(graph: Graph, size: int) -> None:
    """The same with masks of their own in each step."""
    mask = _kept(graph, "m")
    for index in range(size):
        one, other = _kept(graph, f"a{index}"), _kept(graph, f"b{index}")
        mask = graph.op("Or", graph.op("And", mask, one), graph.op("And", mask, other))
    _finish(graph, mask=mask)


@growing
def mask_ladder_xor(graph: Graph, size: int) -> None:
    mask = _kept(graph, "m")
    for index in range(size):
        mask = graph.op("Xor", mask, _kept(graph, f"a{index}"))
    _finish(graph, mask=mask)


@growing
def mask_ladder_where(graph: Graph, size: int) -> None:
    mask, other = _kept(graph, "m"), _kept(graph, "a")
    for index in range(size):
        mask = graph.op("Where", _kept(graph, f"c{index}"), mask, graph.op("And", mask, other))
    _finish(graph, mask=mask)


@growing
def mask_ladder_of_positions(graph: Graph, size: int) -> None:
    graph.operands()
    rows, columns = graph.positions()
    mask = graph.op("LessOrEqual", columns, rows)
    for index in range(size):
        one = graph.op("Less", columns, graph.op("Add", rows, graph.const(index + 2, "int64")))
        other = graph.op("Less", graph.op("Add", rows, graph.const(index + 2, "int64")), columns)
        mask = graph.op("Or", graph.op("And", mask, one), graph.op("And", mask, other))
    graph.output(graph.attend("q", "k", "v", mask=mask))


@growing
def mask_comparisons(graph: Graph, size: int) -> None:
    """Comparisons of positions joined by And, none of which implies another."""
    graph.operands()
    rows, columns = graph.positions()
    mask = graph.op("LessOrEqual", columns, rows)
    for index in range(size):
        scaled = graph.op("Mul", rows, graph.const(index % 9 + 2, "int64"))
        other = graph.op("LessOrEqual", columns, graph.op("Add", scaled, graph.const(index, "int64")))
        mask = graph.op("And", mask, other)
    graph.output(graph.attend("q", "k", "v", mask=mask))


@growing
def mask_conjunction(graph: Graph, size: int) -> None:
    mask = _kept(graph, "m")
    for index in range(size):
        mask = graph.op("And", mask, _kept(graph, f"a{index}"))
    _finish(graph, mask=mask)


@growing
def mask_balanced_conjunction(graph: Graph, size: int) -> None:
    """The same as a balanced tree."""
    level = [_kept(graph, f"a{index}") for index in range(size + 1)]
    while len(level) > 1:
        pairs = [graph.op("And", *level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) & ~1 :]
    _finish(graph, mask=level[0])


@growing
def mask_balanced_alternatives(graph: Graph, size: int) -> None:
    """A balanced tree whose levels are And and Or by turns."""
    level, turn = [_kept(graph, f"a{index}") for index in range(size + 1)], 0
    while len(level) > 1:
        word, turn = ("And", "Or")[turn % 2], turn + 1
        pairs = [graph.op(word, *level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) & ~1 :]
    _finish(graph, mask=level[0])


@growing
def mask_chain_of_negations(graph: Graph, size: int) -> None:
    mask = _kept(graph, "m")
    for _ in range(size):
        mask = graph.op("Not", mask)
    _finish(graph, mask=mask)


@growing
def mask_chain_of_casts(graph: Graph, size: int) -> None:
    mask = _kept(graph, "m")
    for _ in range(size):
        mask = graph.op("Cast", graph.op("Cast", mask, to=FLOAT), to=BOOL)
    _finish(graph, mask=mask)


@growing
def mask_chain_of_moves(graph: Graph, size: int) -> None:
    mask = _kept(graph, "m")
    for _ in range(size):
        mask = graph.op("Transpose", mask, perm=[0, 1, 3, 2])
    _finish(graph, mask=mask)


def _number_ladder(step: Callable[[Graph, str, int], str]) -> Growing:
    """A mask of positions, one side of which a ladder of numbers makes."""

    def make(graph: Graph, size: int) -> None:
        graph.operands()
        rows, columns = graph.positions()
        for index in range(size):
            rows = step(graph, rows, index)
        graph.output(graph.attend("q", "k", "v", mask=graph.op("LessOrEqual", columns, rows)))

    return make


GROWING["number_ladder_add"] = _number_ladder(lambda graph, x, _: graph.op("Add", x, x))
GROWING["number_ladder_less"] = _number_ladder(
    lambda graph, x, _: graph.op("Sub", graph.op("Add", x, x), graph.op("Mul", x, graph.const(1, "int64")))
)
GROWING["number_ladder_max"] = _number_ladder(
    lambda graph, x, i: graph.op("Max", x, graph.op("Sub", graph.const(i, "int64"), x))
)
GROWING["number_ladder_min"] = _number_ladder(
    lambda graph, x, i: graph.op("Min", x, graph.op("Add", graph.const(i, "int64"), graph.op("Neg", x)))
)
GROWING["number_ladder_where"] = _number_ladder(
    lambda graph, x, i: graph.op(
        "Where",
        graph.op("Less", x, graph.const(i, "int64")),
        x,
        graph.op("Add", x, graph.const(1, "int64")),
    )
)
GROWING["number_ladder_concat"] = _number_ladder(
    lambda graph, x, _: graph.op(
        "Slice",
        graph.op("Concat", x, x, axis=1),
        graph.const([0], "int64"),
        graph.const([1], "int64"),
        graph.const([1], "int64"),
    )
)


# -- scores and probabilities ---------------------------------------------------------------------


def _score_steps(step: Callable[[Graph, str, int], str]) -> Growing:
    def make(graph: Graph, size: int) -> None:
        query, key, value = graph.operands()
        scores = graph.scores(query, key)
        for index in range(size):
            scores = step(graph, scores, index)
        graph.output(graph.op("MatMul", graph.probabilities(scores), value))

    return make


GROWING["scores_ladder"] = _score_steps(lambda graph, s, _: graph.op("Add", s, s))
GROWING["scores_ladder_where"] = _score_steps(
    lambda graph, s, i: graph.op("Where", graph.input(f"c{i}", BOOL, "B", 1, "S", "S"), s, graph.op("Neg", s))
)
GROWING["scores_scaled"] = _score_steps(lambda graph, s, _: graph.op("Mul", s, graph.const(0.999)))
GROWING["scores_with_biases"] = _score_steps(
    lambda graph, s, i: graph.op("Add", s, graph.input(f"b{i}", FLOAT, "B", 1, "S", "S"))
)
GROWING["scores_with_lowered"] = _score_steps(lambda graph, s, i: graph.op("Add", s, _lowered(graph, f"mask{i}")))
GROWING["scores_with_one_bias"] = _score_steps(
    lambda graph, s, i: graph.op("Add", s, "b" if i else graph.input("b", FLOAT, "B", 1, "S", "S"))
)
GROWING["scores_masked"] = _score_steps(
    lambda graph, s, i: graph.op("Where", graph.input(f"m{i}", BOOL, "B", 1, "S", "S"), s, graph.const(-np.inf))
)
GROWING["scores_floored"] = _score_steps(lambda graph, s, i: graph.op("Max", s, graph.const(-1e30 - i * 1e25)))
GROWING["scores_copied"] = _score_steps(lambda graph, s, _: graph.op("Identity", s))
GROWING["scores_transposed"] = _score_steps(
    lambda graph, s, _: graph.op("Transpose", graph.op("Transpose", s, perm=[0, 2, 1, 3]), perm=[0, 2, 1, 3])
)
GROWING["scores_reshaped"] = _score_steps(
    lambda graph, s, _: graph.op(
        "Squeeze", graph.op("Unsqueeze", s, graph.const([2], "int64")), graph.const([2], "int64")
    )
)


def _probability_steps(step: Callable[[Graph, str, int], str]) -> Growing:
    def make(graph: Graph, size: int) -> None:
        query, key, value = graph.operands()
        probabilities = graph.probabilities(graph.scores(query, key))
        for index in range(size):
            probabilities = step(graph, probabilities, index)
        graph.output(graph.op("MatMul", probabilities, value))

    return make


GROWING["probabilities_copied"] = _probability_steps(lambda graph, p, _: graph.op("Identity", p))
GROWING["probabilities_scaled"] = _probability_steps(lambda graph, p, _: graph.op("Mul", p, graph.const(0.5)))
GROWING["probabilities_ladder"] = _probability_steps(lambda graph, p, _: graph.op("Add", p, p))
GROWING["probabilities_guarded"] = _probability_steps(
    lambda graph, p, _: graph.op("Where", graph.op("IsNaN", p), graph.const(0.0), p)
)


@growing
def readers_of_probabilities(graph: Graph, size: int) -> None:
    """Products of one softmax with values of their own."""
    query, key, _ = graph.operands()
    probabilities = graph.probabilities(graph.scores(query, key))
    for index in range(size):
        graph.output(graph.op("MatMul", probabilities, graph.operand(f"v{index}")))


@growing
def sums_of_probabilities(graph: Graph, size: int) -> None:
    """Products of one softmax, added up."""
    query, key, _ = graph.operands()
    probabilities = graph.probabilities(graph.scores(query, key))
    total = ""
    for index in range(size):
        one = graph.op("MatMul", probabilities, graph.operand(f"v{index}"))
        total = graph.op("Add", total, one) if total else one
    graph.output(total)


@growing
def readers_of_scores(graph: Graph, size: int) -> None:
    """Attentions that share their scores."""
    query, key, value = graph.operands()
    scores = graph.scores(query, key)
    for index in range(size):
        bias = graph.input(f"bias{index}", FLOAT, "B", 1, "S", "S")
        graph.output(graph.op("MatMul", graph.probabilities(graph.op("Add", scores, bias)), value))


@growing
def outputs_of_scores(graph: Graph, size: int) -> None:
    """Other readers of the scores."""
    query, key, value = graph.operands()
    scores = graph.scores(query, key)
    graph.output(graph.op("MatMul", graph.probabilities(scores), value))
    for _ in range(size):
        graph.output(graph.op("Relu", scores))


@growing
def passed_on_scores(graph: Graph, size: int) -> None:
    """Each attention adds the scores of the one before it to its own (RealFormer)."""
    before = ""
    for index in range(size):
        query, key, value = graph.operands(str(index))
        scores = graph.scores(query, key)
        before = graph.op("Add", scores, before) if before else scores
        graph.output(graph.op("MatMul", graph.probabilities(before), value))


# -- attentions -----------------------------------------------------------------------------------


@growing
def attentions_beside(graph: Graph, size: int) -> None:
    """Attentions of one query, key and value."""
    query, key, value = graph.operands()
    for _ in range(size):
        graph.output(graph.attend(query, key, value))


@growing
def attentions_behind(graph: Graph, size: int) -> None:
    """Each attention attends to what the one before it gives, with one mask for all."""
    query, key, value = graph.operands()
    mask = _lowered(graph)
    for _ in range(size):
        query = graph.attend(query, key, value, bias=mask)
    graph.output(query)


@growing
def attentions_of_one(graph: Graph, size: int) -> None:
    """Self-attention in a chain: the output is query, key and value of the next one."""
    hidden = graph.operand("q")
    for _ in range(size):
        hidden = graph.op("Add", hidden, graph.attend(hidden, hidden, hidden))
    graph.output(hidden)


@growing
def attentions_causal(graph: Graph, size: int) -> None:
    """A chain of causal self-attention, each with a mask of its own."""
    hidden = graph.operand("q")
    for _ in range(size):
        rows, columns = graph.positions()
        hidden = graph.attend(hidden, hidden, hidden, mask=graph.op("LessOrEqual", columns, rows))
    graph.output(hidden)


@growing
def attentions_without_names(graph: Graph, size: int) -> None:
    """The same as `attentions_of_one`, with nodes without names."""
    graph.names = False
    attentions_of_one(graph, size)


@growing
def attentions_declined(graph: Graph, size: int) -> None:
    """Softmaxes in a chain that are no attention."""
    hidden = graph.operand("q")
    for _ in range(size):
        hidden = graph.op("Mul", graph.op("Softmax", hidden, axis=-1), graph.op("Sigmoid", hidden))
    graph.output(hidden)


@growing
def caches(graph: Graph, size: int) -> None:
    """Decoding attentions, each with caches of its own."""
    hidden = graph.operand("q")
    for index in range(size):
        grown = []
        for letter in "kv":
            past = graph.input(f"past_{letter}{index}", FLOAT, "B", HEADS, "P", DEPTH)
            grown.append(graph.op("Concat", past, graph.op("Relu", hidden), axis=2))
        graph.output(grown[0])
        graph.output(grown[1])
        hidden = graph.attend(hidden, *grown)
    graph.output(hidden)


def _changed_in_front(step: Callable[[Graph, str, str, str], str]) -> Growing:
    """Attentions in a chain that only a step in front of the matcher makes readable."""

    def make(graph: Graph, size: int) -> None:
        hidden = graph.input("q", FLOAT, 1, HEADS, CHANGED_ROWS, DEPTH)
        key, value = (graph.input(name, FLOAT, 1, HEADS, CHANGED_ROWS, DEPTH) for name in "kv")
        for _ in range(size):
            hidden = step(graph, hidden, key, value)
        graph.output(hidden)

    return make


def _added_to_a_part(graph: Graph, query: str, key: str, value: str) -> str:
    """A term is added to all scores but those of the first row and column."""
    scores, rows = graph.scores(query, key), range(1, CHANGED_ROWS)
    numbers = ([1, 1], [CHANGED_ROWS, CHANGED_ROWS], [2, 3])
    part = graph.op("Slice", scores, *(graph.const(each, "int64") for each in numbers))
    part = graph.op("Add", part, graph.const(np.ones((1, HEADS, len(rows), len(rows)))))
    box, last, places = graph.const([1, HEADS, len(rows), len(rows)], "int64"), graph.const([-1], "int64"), []
    for axis, along in enumerate((range(1), range(HEADS), rows, rows)):
        numbered = graph.const(np.reshape(along, [-1] + [1] * (3 - axis)), "int64")
        places.append(graph.op("Unsqueeze", graph.op("Expand", numbered, box), last))
    whole = graph.op("ScatterND", scores, graph.op("Concat", *places, axis=-1), part)
    return graph.op("MatMul", graph.probabilities(whole), value)


def _keys_in_parts(graph: Graph, query: str, key: str, value: str) -> str:
    """Two products with keys, joined; and two with values, added."""
    scores = graph.op("Concat", graph.scores(query, key), graph.scores(query, value), axis=-1)
    graph.op("Split", graph.probabilities(scores), count=2, axis=-1)
    first = f"t{len(graph.nodes) - 1}"
    return graph.op("Add", graph.op("MatMul", first, value), graph.op("MatMul", f"{first}_1", key))


def _difference(graph: Graph, query: str, key: str, value: str) -> str:
    """A sum of two distributions."""
    both = [graph.probabilities(graph.scores(query, each)) for each in (key, value)]
    return graph.op("MatMul", graph.op("Sub", *both), value)


def _several_values(graph: Graph, query: str, key: str, value: str) -> str:
    """One distribution, two values."""
    weights = graph.probabilities(graph.scores(query, key))
    return graph.op("Add", graph.op("MatMul", weights, value), graph.op("MatMul", weights, key))


for _name, _step in {
    "parts_of_scores": _added_to_a_part,
    "keys_in_parts": _keys_in_parts,
    "differences": _difference,
    "values_of_one": _several_values,
}.items():
    GROWING[_name] = _changed_in_front(_step)


# -- operands -------------------------------------------------------------------------------------


def _operand_steps(place: int, step: Callable[[Graph, str, int], str]) -> Growing:
    def make(graph: Graph, size: int) -> None:
        operands = list(graph.operands())
        for index in range(size):
            operands[place] = step(graph, operands[place], index)
        graph.output(graph.attend(*operands))

    return make


def _turned_twice(graph: Graph, value: str, _: int) -> str:
    return graph.op("Transpose", graph.op("Transpose", value, perm=[0, 2, 1, 3]), perm=[0, 2, 1, 3])


def _reshaped_twice(graph: Graph, value: str, _: int) -> str:
    turned = graph.op("Transpose", value, perm=[0, 2, 1, 3])
    joined = graph.op("Reshape", turned, graph.const([0, 0, HEADS * DEPTH], "int64"))
    split = graph.op("Reshape", joined, graph.const([0, 0, HEADS, DEPTH], "int64"))
    return graph.op("Transpose", split, perm=[0, 2, 1, 3])


def _cut_and_joined(graph: Graph, value: str, _: int) -> str:
    first = graph.op("Split", value, count=2, axis=3)
    return graph.op("Concat", first, f"{first}_1", axis=3)


for _letter, _place in (("query", 0), ("key", 1), ("value", 2)):
    GROWING[f"{_letter}_transposed"] = _operand_steps(_place, _turned_twice)
    GROWING[f"{_letter}_reshaped"] = _operand_steps(_place, _reshaped_twice)
    GROWING[f"{_letter}_cut_and_joined"] = _operand_steps(_place, _cut_and_joined)
    GROWING[f"{_letter}_scaled"] = _operand_steps(
        _place, lambda graph, value, _: graph.op("Mul", value, graph.const(0.5))
    )
    GROWING[f"{_letter}_ladder"] = _operand_steps(_place, lambda graph, value, _: graph.op("Add", value, value))
    GROWING[f"{_letter}_ladder_where"] = _operand_steps(
        _place,
        lambda graph, value, i: graph.op(
            "Where", graph.input(f"c{i}", BOOL, "B", 1, "S", 1), value, graph.op("Neg", value)
        ),
    )
    GROWING[f"{_letter}_activated"] = _operand_steps(_place, lambda graph, value, _: graph.op("Relu", value))
    GROWING[f"{_letter}_joined"] = _operand_steps(
        _place,
        lambda graph, value, i: graph.op(
            "Concat", value, graph.input(f"p{i}", FLOAT, "B", HEADS, f"P{i}", DEPTH), axis=2
        ),
    )


@growing
def result_steps(graph: Graph, size: int) -> None:
    """Operators behind an attention."""
    result = graph.attention()
    for index in range(size):
        result = graph.op(("Relu", "Neg", "Tanh")[index % 3], result)
    graph.output(result)


@growing
def result_ladder(graph: Graph, size: int) -> None:
    result = graph.attention()
    for _ in range(size):
        result = graph.op("Add", result, result)
    graph.output(result)


@growing
def result_moved(graph: Graph, size: int) -> None:
    result = graph.attention()
    for _ in range(size):
        result = _reshaped_twice(graph, result, 0)
    graph.output(result)


# -- sizes ----------------------------------------------------------------------------------------


def _size_steps(step: Callable[[Graph, str, int], str]) -> Growing:
    """A bias that is stretched to a size which a ladder computes, and cut to the scores again."""

    def make(graph: Graph, size: int) -> None:
        graph.operands()
        length = graph.size()
        for index in range(size):
            length = step(graph, length, index)
        one = graph.const([1], "int64")
        stretched = graph.op("Expand", _bias(graph), graph.op("Concat", length, one, one, one, axis=0))
        cut = graph.op("Slice", stretched, graph.const([0], "int64"), graph.size(0), graph.const([0], "int64"))
        graph.output(graph.attend("q", "k", "v", bias=cut))

    return make


def _unsized(graph: Graph, index: int) -> str:
    """A size of its own."""
    name = graph.input(f"sized{index}", FLOAT, f"D{index}")
    return graph.op("Shape", name)


GROWING["size_ladder_add"] = _size_steps(lambda graph, n, _: graph.op("Add", n, n))
GROWING["size_ladder_mul"] = _size_steps(lambda graph, n, _: graph.op("Mul", n, n))
GROWING["size_sum"] = _size_steps(lambda graph, n, i: graph.op("Add", n, _unsized(graph, i)))
GROWING["size_product"] = _size_steps(lambda graph, n, i: graph.op("Mul", n, _unsized(graph, i)))
GROWING["size_product_of_sums"] = _size_steps(
    lambda graph, n, i: graph.op("Mul", n, graph.op("Add", n, _unsized(graph, i)))
)
GROWING["size_halved"] = _size_steps(
    lambda graph, n, i: graph.op("Div", graph.op("Add", n, graph.const([i], "int64")), graph.const([2], "int64"))
)
GROWING["size_ladder_quotients"] = _size_steps(
    lambda graph, n, _: graph.op(
        "Add", graph.op("Div", n, graph.const([2], "int64")), graph.op("Div", n, graph.const([3], "int64"))
    )
)
GROWING["size_ladder_mod"] = _size_steps(
    lambda graph, n, i: graph.op("Add", n, graph.op("Mod", n, graph.const([i + 2], "int64")))
)
GROWING["size_ladder_min"] = _size_steps(lambda graph, n, i: graph.op("Min", n, _unsized(graph, i)))
GROWING["size_ladder_max"] = _size_steps(lambda graph, n, i: graph.op("Max", n, graph.op("Sub", _unsized(graph, i), n)))
GROWING["size_ladder_where"] = _size_steps(
    lambda graph, n, i: graph.op(
        "Where", graph.op("Less", n, graph.const([i], "int64")), n, graph.op("Add", n, _unsized(graph, i))
    )
)


@growing
def size_broadcasts(graph: Graph, size: int) -> None:
    """Sums of tensors whose sizes are all different names."""
    total = _bias(graph)
    for index in range(size):
        total = graph.op("Add", total, graph.input(f"b{index}", FLOAT, f"B{index}", 1, f"R{index}", f"C{index}"))
    _finish(graph, bias=total)


@growing
def shape_ladder(graph: Graph, size: int) -> None:
    """The vector of a shape that is joined with itself, and read at one place."""
    graph.operands()
    shape = graph.op("Shape", "q")
    for _ in range(size):
        shape = graph.op("Concat", shape, shape, axis=0)
    length = graph.op("Gather", shape, graph.const([2], "int64"), axis=0)
    bias = graph.op("Expand", _bias(graph), graph.op("Concat", graph.const([1, 1], "int64"), length, length, axis=0))
    graph.output(graph.attend("q", "k", "v", bias=bias))


@growing
def size_slices(graph: Graph, size: int) -> None:
    """A key that is cut again and again, each time by a size of its own."""
    query, key, value = graph.operands()
    first, axis = graph.const([0], "int64"), graph.const([2], "int64")
    for index in range(size):
        length = _unsized(graph, index)
        key, value = (graph.op("Slice", each, first, length, axis) for each in (key, value))
    graph.output(graph.attend(query, key, value))


# -- constants ------------------------------------------------------------------------------------


def _constant_steps(step: Callable[[Graph, str, int], str], shape: Sequence[int] = (1, 1, 1, 1)) -> Growing:
    """A bias that is computed from constants alone. Its first element is added to the scores."""

    def make(graph: Graph, size: int) -> None:
        constant = graph.const(np.full(shape, 0.5))
        for index in range(size):
            constant = step(graph, constant, index)
        first, last, axes = ([0] * 4, [1] * 4, [0, 1, 2, 3])
        cut = graph.op("Slice", constant, *(graph.const(each, "int64") for each in (first, last, axes)))
        _finish(graph, bias=cut)

    return make


GROWING["constant_concat"] = _constant_steps(lambda graph, c, _: graph.op("Concat", c, c, axis=3))
GROWING["constant_tile"] = _constant_steps(lambda graph, c, _: graph.op("Tile", c, graph.const([1, 1, 1, 2], "int64")))
GROWING["constant_pad"] = _constant_steps(
    lambda graph, c, i: graph.op("Pad", c, graph.const([0, 0, 0, 0, 0, 0, 0, 1 << min(i, 40)], "int64"))
)
GROWING["constant_expand"] = _constant_steps(
    lambda graph, c, i: graph.op("Expand", c, graph.const([1 << min(i, 40), 1, 1, 1], "int64")), (1, 1, 1, 1)
)
GROWING["constant_ladder"] = _constant_steps(lambda graph, c, _: graph.op("Add", c, c))
GROWING["constant_chain"] = _constant_steps(lambda graph, c, _: graph.op("Neg", c))
GROWING["constant_outer"] = _constant_steps(
    lambda graph, c, i: graph.op("Mul", c, graph.op("Transpose", graph.op("Concat", c, c, axis=3), perm=[0, 1, 3, 2]))
)


@growing
def constant_integers(graph: Graph, size: int) -> None:
    """Integers joined with themselves: sizes, positions."""
    graph.operands()
    numbers = graph.const([0, 1], "int64")
    for _ in range(size):
        numbers = graph.op("Concat", numbers, numbers, axis=0)
    length = graph.op("Gather", numbers, graph.const([1], "int64"), axis=0)
    bias = graph.op("Expand", _bias(graph), graph.op("Concat", length, length, length, length, axis=0))
    graph.output(graph.attend("q", "k", "v", bias=bias))


@growing
def constant_range(graph: Graph, size: int) -> None:
    """A mask of a constant number of positions, which doubles with each step."""
    graph.operands()
    limit = graph.const(ROWS, "int64")
    for _ in range(size):
        limit = graph.op("Add", limit, limit)
    zero, one = graph.const(0, "int64"), graph.const(1, "int64")
    columns = graph.op("Range", zero, limit, one)
    columns = graph.op("Slice", columns, graph.const([0], "int64"), graph.size(), graph.const([0], "int64"))
    rows = graph.op("Unsqueeze", columns, graph.const([1], "int64"))
    graph.output(graph.attend("q", "k", "v", mask=graph.op("LessOrEqual", columns, rows)))


@growing
def initializers(graph: Graph, size: int) -> None:
    """Weights of their own, behind one another."""
    hidden = graph.operand("q")
    for index in range(size):
        weight = graph.const(np.full((DEPTH, DEPTH), index))
        hidden = graph.op("MatMul", hidden, weight)
    graph.output(graph.attend(hidden, hidden, hidden))


@growing
def gathered_tables(graph: Graph, size: int) -> None:
    """Tables, each indexed by an input of its own: verify makes indices for each."""
    query, key, value = graph.operands()
    for index in range(size):
        table = graph.const(np.full((index + 2, DEPTH), index))
        ids = graph.input(f"ids{index}", INT64, "B", 1, "S")
        ids = graph.op("Identity", ids)
        query = graph.op("Add", query, graph.op("Gather", table, ids, axis=0))
    graph.output(graph.attend(query, key, value))


# -- subgraphs and functions ----------------------------------------------------------------------


def _branch(name: str, nodes: Sequence[onnx.NodeProto], output: str, dtype: int = FLOAT) -> onnx.GraphProto:
    info = helper.make_tensor_value_info(output, dtype, None)
    return helper.make_graph(nodes, name, [], [info])


@growing
def branches_behind(graph: Graph, size: int) -> None:
    """A chain of If whose branches read the value before."""
    query, key, value = graph.operands()
    condition = graph.input("condition", BOOL)
    for index in range(size):
        bodies = [
            _branch(f"{word}{index}", [helper.make_node(op, [query], [f"{word}{index}_y"])], f"{word}{index}_y")
            for word, op in (("then", "Relu"), ("else", "Neg"))
        ]
        query = graph.op("If", condition, then_branch=bodies[0], else_branch=bodies[1])
    graph.output(graph.attend(query, key, value))


@growing
def branches_nested(graph: Graph, size: int) -> None:
    """An If inside an If, as deep as protobuf allows, and the rest as a chain inside."""
    query, key, value = graph.operands()
    condition = graph.input("condition", BOOL)
    chain = [helper.make_node("Relu", [query], ["inmost_0"])]
    chain += [helper.make_node("Relu", [f"inmost_{at}"], [f"inmost_{at + 1}"]) for at in range(size)]
    body = _branch("inmost", chain, f"inmost_{size}")
    for index in range(min(size, NESTED)):
        other = _branch(f"o{index}", [helper.make_node("Neg", [query], [f"o{index}_y"])], f"o{index}_y")
        node = helper.make_node("If", [condition], [f"i{index}_y"], then_branch=body, else_branch=other)
        body = _branch(f"i{index}", [node], f"i{index}_y")
    query = graph.op("If", condition, then_branch=body, else_branch=other)
    graph.output(graph.attend(query, key, value))


@growing
def branches_of_masks(graph: Graph, size: int) -> None:
    """A chain of If that give the bias."""
    bias, condition = _lowered(graph), graph.input("condition", BOOL)
    for index in range(size):
        bodies = [
            _branch(f"{word}{index}", [helper.make_node("Identity", [bias], [f"{word}{index}_y"])], f"{word}{index}_y")
            for word in ("then", "else")
        ]
        bias = graph.op("If", condition, then_branch=bodies[0], else_branch=bodies[1])
    _finish(graph, bias=bias)


@growing
def branches_with_attention(graph: Graph, size: int) -> None:
    """Many If, each with an attention in a branch."""
    query, key, value = graph.operands()
    condition = graph.input("condition", BOOL)
    for index in range(size):
        names = [f"b{index}_{place}" for place in range(4)]
        nodes = [
            helper.make_node("Transpose", [key], [names[0]], perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", [query, names[0]], [names[1]]),
            helper.make_node("Softmax", [names[1]], [names[2]], axis=-1),
            helper.make_node("MatMul", [names[2], value], [names[3]]),
        ]
        then = _branch(f"then{index}", nodes, names[3])
        other = _branch(f"else{index}", [helper.make_node("Neg", [query], [f"e{index}"])], f"e{index}")
        query = graph.op("If", condition, then_branch=then, else_branch=other)
    graph.output(query)


def _function(name: str, nodes: Sequence[onnx.NodeProto], imports: Sequence[str] = ("", DOMAIN)) -> onnx.FunctionProto:
    opsets = [helper.make_opsetid(domain, OPSET if domain == "" else 1) for domain in imports]
    return helper.make_function(DOMAIN, name, ["x"], ["y"], nodes, opsets)


@growing
def functions_called(graph: Graph, size: int) -> None:
    """Calls of one function."""
    graph.functions.append(_function("F", [helper.make_node("Relu", ["x"], ["y"])]))
    query, key, value = graph.operands()
    for _ in range(size):
        query = graph.op("F", query, domain=DOMAIN)
    graph.output(graph.attend(query, key, value))


@growing
def functions_nested(graph: Graph, size: int) -> None:
    """A function that calls a function, and so on."""
    graph.functions.append(_function("F0", [helper.make_node("Relu", ["x"], ["y"])]))
    for index in range(1, size + 1):
        graph.functions.append(_function(f"F{index}", [helper.make_node(f"F{index - 1}", ["x"], ["y"], domain=DOMAIN)]))
    query, key, value = graph.operands()
    graph.output(graph.attend(graph.op(f"F{size}", query, domain=DOMAIN), key, value))


@growing
def functions_of_their_own(graph: Graph, size: int) -> None:
    """Functions, each called once."""
    query, key, value = graph.operands()
    for index in range(size):
        graph.functions.append(_function(f"F{index}", [helper.make_node("Relu", ["x"], ["y"])]))
        query = graph.op(f"F{index}", query, domain=DOMAIN)
    graph.output(graph.attend(query, key, value))


# -- gradients ------------------------------------------------------------------------------------


def _gradient(graph: Graph, suffix: str = "", steps: int = 0) -> None:
    """An attention with its gradient, and steps between them."""
    query, key, value = graph.operands(suffix)
    given = graph.input(f"dy{suffix}", FLOAT, "B", HEADS, "S", DEPTH)
    scale = graph.const(0.25)
    probabilities = graph.probabilities(graph.op("Mul", graph.scores(query, key), scale))
    graph.output(graph.op("MatMul", probabilities, value))
    for _ in range(steps):
        given = graph.op("Identity", given)
    turned = graph.op("Transpose", value, perm=[0, 1, 3, 2])
    error = graph.op("MatMul", given, turned)
    product = graph.op("Mul", error, probabilities)
    total = graph.op("ReduceSum", product, graph.const([-1], "int64"), keepdims=1)
    change = graph.op("Mul", graph.op("Mul", graph.op("Sub", error, total), probabilities), scale)
    graph.output(graph.op("MatMul", change, key))
    graph.output(graph.op("MatMul", graph.op("Transpose", change, perm=[0, 1, 3, 2]), query))
    graph.output(graph.op("MatMul", graph.op("Transpose", probabilities, perm=[0, 1, 3, 2]), given))


@growing
def gradients(graph: Graph, size: int) -> None:
    for index in range(size):
        _gradient(graph, str(index))


@growing
def gradient_chain(graph: Graph, size: int) -> None:
    _gradient(graph, steps=size)


@growing
def gradient_ladder(graph: Graph, size: int) -> None:
    """A ladder between the probabilities and what is done with them, as in a gradient of a gradient."""
    query, key, value = graph.operands()
    probabilities = graph.probabilities(graph.scores(query, key))
    graph.output(graph.op("MatMul", probabilities, value))
    change = probabilities
    for _ in range(size):
        total = graph.op("ReduceSum", change, graph.const([-1], "int64"), keepdims=1)
        change = graph.op("Mul", graph.op("Sub", change, total), change)
    graph.output(graph.op("MatMul", change, key))


@growing
def gradient_sums(graph: Graph, size: int) -> None:
    """Gradients of an attention whose result many read."""
    query, key, value = graph.operands()
    probabilities = graph.probabilities(graph.scores(query, key))
    result = graph.op("MatMul", probabilities, value)
    graph.output(result)
    turned, total = graph.op("Transpose", value, perm=[0, 1, 3, 2]), ""
    for index in range(size):
        given = graph.input(f"dy{index}", FLOAT, "B", HEADS, "S", DEPTH)
        one = graph.op("MatMul", given, turned)
        total = graph.op("Add", total, one) if total else one
    product = graph.op("Mul", total or probabilities, probabilities)
    row = graph.op("ReduceSum", product, graph.const([-1], "int64"), keepdims=1)
    change = graph.op("Sub", product, graph.op("Mul", probabilities, row))
    graph.output(graph.op("MatMul", change, key))


# -- the whole graph ------------------------------------------------------------------------------


@growing
def plain_chain(graph: Graph, size: int) -> None:
    """Nodes that have nothing to do with the attention."""
    graph.output(graph.attention())
    other = graph.input("other", FLOAT, "B", "S")
    for _ in range(size):
        other = graph.op("Relu", other)
    graph.output(other, rank=2)


@growing
def plain_without_names(graph: Graph, size: int) -> None:
    """The same, with nodes without names."""
    graph.names = False
    plain_chain(graph, size)


@growing
def plain_width(graph: Graph, size: int) -> None:
    """Readers of one value, added up as a balanced tree."""
    graph.output(graph.attention())
    other = graph.input("other", FLOAT, "B", "S")
    level = [graph.op("Relu", other) for _ in range(size + 1)]
    while len(level) > 1:
        pairs = [graph.op("Add", *level[at : at + 2]) for at in range(0, len(level) - 1, 2)]
        level = pairs + level[len(level) & ~1 :]
    graph.output(level[0], rank=2)


@growing
def plain_ladder(graph: Graph, size: int) -> None:
    graph.output(graph.attention())
    other = graph.input("other", FLOAT, "B", "S")
    for _ in range(size):
        other = graph.op("Add", graph.op("Relu", other), graph.op("Neg", other))
    graph.output(other, rank=2)


@growing
def key_ladder_in_front(graph: Graph, size: int) -> None:
    """A ladder in front of query, key and value alike."""
    hidden = graph.operand("q")
    for _ in range(size):
        hidden = graph.op("Add", graph.op("Relu", hidden), graph.op("Neg", hidden))
    graph.output(graph.attend(hidden, hidden, hidden))


@growing
def reversed_nodes(graph: Graph, size: int) -> None:
    """Outputs in large number."""
    for _ in range(size):
        graph.output(graph.op("Relu", "q"))
    graph.output(graph.attention())
