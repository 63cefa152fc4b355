"""Decoders whose caches are divided among ranks, run by threads over several steps, against one process.

A text may be padded on the left by so many tokens that the first new ones see no other. Keys of caches may be NaN.
"""

from __future__ import annotations

import random
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.errors import InputError
from fa_compiler.parallel.communicator import Array, Communicator
from fa_compiler.parallel.session import ShardedSession
from fa_compiler.parallel.threads import run_threads
from tools.fuzz.difference import run_original, session
from tools.fuzz.kind import Finding, Kind, Outcome
from tools.fuzz.kinds.ranks import TIMEOUT, fault

MASKS = ("padding", "added padding", "causal", "window", "distance", "table")
CHANGES = (*["none"] * 8, *["scaled", "cast", "turned twice"] * 2, "summed", "sliced")
"""What becomes of joined keys before the attention reads them. The last two mix tokens, or take some out."""
LONGEST = 40


@dataclass
class Decoder:
    """A decoder of one or two layers while it is drawn. x holds new tokens, and past_* the caches."""

    rng: random.Random
    batch: int
    past: int
    rows: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)
    inputs: dict[str, tuple[int, list[int | str]]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = np.random.default_rng(self.rng.getrandbits(32))
        self.key_heads, self.size = self.rng.choice((1, 2, 3)), self.rng.choice((2, 4))
        self.heads = self.key_heads * self.rng.choice((1, 1, 2))
        self.width = self.heads * self.size
        self.lowest = self.rng.choice((np.finfo(np.float32).min, -np.inf))
        named = self.rng.random() < 0.8
        self.sizes: list[int | str] = ["batch", "past", "rows"] if named else [self.batch, "past", self.rows]
        self.inputs["x"] = (TensorProto.FLOAT, [self.sizes[0], self.sizes[2], self.width])
        self.by_head = self.rng.random() < 0.7
        self.padded = self.rng.choice(
            (0, self.rng.randint(0, self.past), self.past + self.rng.randint(0, self.rows + 1))
        )
        x = "x"
        self.layers = self.rng.randint(1, 2)
        if self.layers > 1 and np.isinf(self.lowest):
            # A row without a key is NaN. The layer behind would have NaN in values at masked keys, which are not read.
            self.padded = min(self.padded, self.past)
        for layer in range(self.layers):
            x = self.layer(x, layer)
        self.nodes.append(helper.make_node("Identity", [x], ["y"], "Identity_y"))
        self.outputs.append("y")

    def constant(self, array: Array) -> str:
        """A weight."""
        name = f"w{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(array, name))
        return name

    def op(self, kind: str, *inputs: str, **attrs: object) -> str:
        """The result of a node."""
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], f"{kind}_{name}", **attrs))
        return name

    def ints(self, *numbers: int) -> str:
        """A vector of integers."""
        return self.constant(np.array(numbers, np.int64))

    def layer(self, x: str, layer: int) -> str:
        """An attention over a cache, added to x."""
        query = self.op("Transpose", self.projected(x, self.heads), perm=[0, 2, 1, 3])
        key, value = (self.grown(self.projected(x, self.key_heads), f"{name}{layer}") for name in ("k", "v"))
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.constant(np.array(self.size**-0.5, np.float32)))
        for word in self.rng.sample(MASKS, self.rng.choice((0, 1, 1, 2))):
            self.words.append(word)
            scores = self.masked(scores, word, key)
        mixed = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        back = self.op("Reshape", self.op("Transpose", mixed, perm=[0, 2, 1, 3]), self.ints(0, 0, self.width))
        return self.op("Add", x, back)

    def projected(self, x: str, heads: int) -> str:
        """[B, R, heads, size]."""
        weight = self.numbers.standard_normal((self.width, heads * self.size)).astype(np.float32) / self.width**0.5
        return self.op("Reshape", self.op("MatMul", x, self.constant(weight)), self.ints(0, 0, heads, self.size))

    def grown(self, new: str, name: str) -> str:
        """Keys or values [B, heads, P + R, size], with the new ones behind those of the cache."""
        shape = [self.sizes[0], self.key_heads, self.sizes[1], self.size]
        if not self.by_head:
            shape = [shape[0], shape[2], shape[1], shape[3]]
        self.inputs[f"past_{name}"] = (TensorProto.FLOAT, shape)
        new = self.op("Transpose", new, perm=[0, 2, 1, 3]) if self.by_head else new
        joined = f"present_{name}"
        axis = 2 if self.by_head else 1
        self.nodes.append(helper.make_node("Concat", [f"past_{name}", new], [joined], f"Concat_{name}", axis=axis))
        self.outputs.append(joined)
        found = self.changed(joined, axis)
        found = found if self.by_head else self.op("Transpose", found, perm=[0, 2, 1, 3])
        return found if self.heads == self.key_heads else self.repeated(found)

    def changed(self, joined: str, axis: int) -> str:
        """Joined keys after one of CHANGES."""
        word = self.rng.choice(CHANGES)
        self.words.append(word)
        if word == "scaled":
            return self.op("Mul", joined, self.constant(np.array([0.5] * self.size, np.float32)))
        if word == "cast":
            return self.op("Cast", self.op("Cast", joined, to=TensorProto.DOUBLE), to=TensorProto.FLOAT)
        if word == "turned twice":
            return self.op("Transpose", self.op("Transpose", joined, perm=[1, 2, 0, 3]), perm=[2, 0, 1, 3])
        if word == "summed":
            return self.op("Add", joined, self.op("ReduceMean", joined, axes=[axis], keepdims=1))
        if word == "sliced":
            start = self.rng.choice((-3, -1, 1))
            return self.op("Slice", joined, self.ints(start), self.ints(1 << 40), self.ints(axis))
        return joined

    def repeated(self, key: str) -> str:
        """Each key head for all query heads of its group."""
        group = self.heads // self.key_heads
        shape = self.op("Shape", key)
        keys, batch = (self.op("Gather", shape, self.ints(axis)) for axis in (2, 0))
        wide = self.op("Concat", batch, self.ints(self.key_heads, group), keys, self.ints(self.size), axis=0)
        flat = self.op("Concat", batch, self.ints(self.heads), keys, self.ints(self.size), axis=0)
        return self.op("Reshape", self.op("Expand", self.op("Unsqueeze", key, self.ints(2)), wide), flat)

    def positions(self, key: str) -> tuple[str, str]:
        """The positions of the rows [R, 1], behind the past, and those of the keys [P + R]."""
        keys = self.op("Squeeze", self.op("Gather", self.op("Shape", key), self.ints(2)), self.ints(0))
        rows = self.op("Squeeze", self.op("Gather", self.op("Shape", "x"), self.ints(1)), self.ints(0))
        zero, one = self.constant(np.array(0)), self.constant(np.array(1))
        line = self.op("Range", zero, keys, one)
        begin = self.op("Sub", keys, rows)
        return self.op("Unsqueeze", self.op("Range", begin, keys, one), self.ints(1)), line

    def masked(self, scores: str, word: str, key: str) -> str:
        """Scores with a mask or a bias."""
        lowest = self.constant(np.array(self.lowest, np.float32))
        if word.endswith("padding"):
            self.inputs["mask"] = (TensorProto.INT64, [self.sizes[0], "total"])
            wide = self.op("Unsqueeze", "mask", self.ints(1, 2))
        if word == "added padding":
            masked = self.op("Sub", self.constant(np.array(1, np.float32)), self.op("Cast", wide, to=TensorProto.FLOAT))
            least = self.constant(np.array(np.finfo(np.float32).min, np.float32))
            return self.op("Add", scores, self.op("Mul", masked, least))
        if word == "padding":
            return self.op("Where", self.op("Equal", wide, self.constant(np.array(0))), lowest, scores)
        rows, line = self.positions(key)
        apart = self.op("Sub", rows, line)
        if word == "causal":
            return self.op("Where", self.op("Less", apart, self.constant(np.array(0))), lowest, scores)
        if word == "window":
            return self.op("Where", self.op("Greater", apart, self.constant(np.array(4))), lowest, scores)
        if word == "distance":
            far = self.op("Cast", apart, to=TensorProto.FLOAT)
            return self.op("Add", scores, self.op("Mul", far, self.constant(np.array(-0.1, np.float32))))
        low, high = self.constant(np.array(0)), self.constant(np.array(6))
        table = self.constant(self.numbers.standard_normal((7, self.heads)).astype(np.float32))
        looked_up = self.op("Gather", table, self.op("Clip", apart, low, high))
        return self.op(
            "Add", scores, self.op("Unsqueeze", self.op("Transpose", looked_up, perm=[2, 0, 1]), self.ints(0))
        )

    def model(self) -> onnx.ModelProto:
        """The model."""
        inputs = [helper.make_tensor_value_info(name, *each) for name, each in self.inputs.items()]
        outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in self.outputs]
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)

    def step(self, past: int, rows: int) -> dict[str, Array]:
        """Inputs for new tokens, without those of the caches."""
        feeds: dict[str, Array] = {"x": self.numbers.standard_normal((self.batch, rows, self.width)).astype(np.float32)}
        if "mask" in self.inputs:
            feeds["mask"] = np.ones((self.batch, past + rows), np.int64)
            feeds["mask"][-1, : self.padded] = 0
        return feeds

    def caches(self) -> dict[str, Array]:
        """The caches before the first step. Only keys of the last layer may be NaN or infinite: a layer behind them
        would have NaN in values at masked keys, which are not read."""
        shape = (self.batch, self.key_heads, self.past, self.size)
        shape = shape if self.by_head else (shape[0], shape[2], shape[1], shape[3])
        names = [name for name in self.inputs if name.startswith("past_")]
        found: dict[str, Array] = {name: self.numbers.standard_normal(shape).astype(np.float32) for name in names}
        for name, array in found.items():
            if array.size and name == f"past_k{self.layers - 1}" and self.rng.random() < 0.05:
                array.flat[self.numbers.integers(array.size)] = self.rng.choice((np.nan, np.inf))
                self.words.append("not finite")
        return found


class Caches(Kind):
    """A random decoder over caches. The ranks give what one process gives, step by step, or it is refused by name."""

    innocent = ("run_original",)

    def check(self, seed: int) -> Outcome:
        rng = random.Random(seed)
        rows = rng.choice((1, 1, 1, 2, 3))
        drawn = Decoder(rng, rng.choice((1, 2, 3)), rng.choice((0, 1, 2, 3, rng.randint(4, LONGEST))), rows)
        model = drawn.model()
        names = [each.name for each in model.graph.output]
        pairs = {name: name.replace("past", "present") for name in drawn.inputs if name.startswith("past_")}
        fixed = not isinstance(drawn.sizes[2], str)
        counts = [rows, *(rows if fixed else rng.choice((1, 1, 2)) for _ in range(rng.randint(0, 2)))]
        steps = [drawn.step(drawn.past + sum(counts[:n]), count) for n, count in enumerate(counts)]
        given, expected = drawn.caches(), []
        try:
            original = session(model, custom=False)
            grown = given
            for feeds in steps:
                expected.append(dict(zip(names, run_original(original, {**feeds, **grown}), strict=True)))
                grown = {past: expected[-1][present] for past, present in pairs.items()}
        except Exception:  # of ONNX Runtime: a Slice that leaves nothing, say
            return Outcome("skipped")
        ranks = rng.randint(1, 4)
        detail = f"{ranks} ranks, past {drawn.past}, rows {counts}, {drawn.heads}/{drawn.key_heads}: {drawn.words}"
        with tempfile.TemporaryDirectory(prefix="fa_compiler-caches-") as folder:
            try:
                made = fa_compiler.shard(model, Path(folder) / "out", ranks)
            except InputError as error:
                named = "node '" in str(error) or "' was not fused" in str(error)
                return Outcome("refused", None if named else Finding("unnamed", f"{error}\n{detail}"))
            if set(made.report.caches) != set(pairs):
                return Outcome("of another sequence")

            def task(communicator: Communicator) -> list[dict[str, Array]]:
                own = ShardedSession(made.path, communicator, threads=1)
                feeds = {**steps[0], **given}
                first = own.run(feeds)
                parts = own.parts({name: array.shape for name, array in feeds.items()})
                found = [own.gather(first, feeds)]
                caches = own.take_caches(first, own.parts_of_outputs(first, parts).positions(communicator.rank))
                for feeds in steps[1:]:
                    outputs, caches = own.step(feeds, caches)
                    found.append(outputs)
                return found

            results = run_threads(ranks, task, TIMEOUT)
        for step, wanted in enumerate(expected):
            for name, array in wanted.items():
                if step == 0 or name == "y":
                    wrong = fault(array, results[0][step][name])
                    if wrong is not None:
                        title = f"ranks give {wrong} [{' '.join(sorted(set(drawn.words)))}]"
                        text = f"{name} of step {step}, {detail}"
                        return Outcome("wrong", Finding(title, text, model.SerializeToString()))
        return Outcome("divided")
