"""Generates tokens one at a time with a small Llama-like model of random weights: exported, fused, fused in place.

    python examples/generate.py [--tokens 200] [--prompt 16] [--room 2048] [--folder build/generate] [--plot SVG]

The model is a decoding step of an exporter. In each layer it concatenates the keys and values of earlier tokens with
those of the new token, and returns both, so every step copies every cache. It runs in three variants:

    original   the exported model
    fused      the result of `fa_compiler.optimize`: attention is one operator, but the caches are still copied
    in place   the result with `in_place_caches`: the caches are buffers for --room tokens, and an input is the number
               of tokens that they hold

In the last variant each buffer is bound as past and as present (IOBinding). The output of ONNX Runtime's ScatterND then
has the memory of its input, and only one row is written. The attention reads the used rows directly from the buffer.

All variants must choose the same tokens. The tokens per second are printed, and the plot shows the time of each step by
position.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import fa_compiler
from fa_compiler.passes.answer.report import CacheLine

LAYERS, HEADS, KEY_HEADS, SIZE, WIDTH, INNER, WORDS = 4, 8, 2, 64, 512, 1024, 1000
OPSET = 18


@dataclass
class Graph:
    """The nodes and weights of a model under construction. Every method returns the name of a value."""

    rng: np.random.Generator
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: list[onnx.TensorProto] = field(default_factory=list)

    def constant(self, array: Any) -> str:
        name = f"c{len(self.weights)}"
        self.weights.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant((self.rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32))

    def op(self, op_type: str, *inputs: str, output: str | None = None, **attrs: Any) -> str:
        output = output or f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, list(inputs), [output], f"n{len(self.nodes)}", **attrs))
        return output

    def ints(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def norm(self, x: str) -> str:
        """RMSNorm with a weight of ones."""
        square = self.op("ReduceMean", self.op("Mul", x, x), self.ints(-1))
        return self.op("Div", x, self.op("Sqrt", self.op("Add", square, self.constant(np.float32(1e-6)))))

    def by_heads(self, x: str, heads: int) -> str:
        """A projection as [1, heads, 1, SIZE]."""
        split = self.op("Reshape", x, self.ints(1, 1, heads, SIZE))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def rotated(self, x: str, cos: str, sin: str) -> str:
        """Rotary positions by halves."""
        low = self.op("Slice", x, self.ints(0), self.ints(SIZE // 2), self.ints(3))
        high = self.op("Slice", x, self.ints(SIZE // 2), self.ints(SIZE), self.ints(3))
        turned = self.op("Concat", self.op("Neg", high), low, axis=3)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", turned, sin))

    def repeated(self, x: str) -> str:
        """Key heads, repeated for all heads of the query as in Llama."""
        shape = self.ints(1, KEY_HEADS, HEADS // KEY_HEADS, 1, 1)
        wide = self.op("Expand", self.op("Unsqueeze", x, self.ints(2)), shape)
        return self.op("Reshape", wide, self.ints(1, HEADS, -1, SIZE))


def build(room: int, seed: int = 0) -> onnx.ModelProto:
    """One decoding step. Its inputs are a token [1] and the caches [1,KEY_HEADS,past,SIZE]; its outputs are logits
    [1,WORDS] and the caches with one more row. It has rotary tables for positions below `room`."""
    g = Graph(np.random.default_rng(seed))
    inputs = [helper.make_tensor_value_info("token", TensorProto.INT64, [1])]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, WORDS])]
    x = g.op("Unsqueeze", g.op("Gather", g.weight(WORDS, WIDTH), "token"), g.ints(0))
    position = g.op("Shape", "past_key0", start=2, end=3)
    angles = np.arange(room)[:, None] / 10000 ** (np.arange(SIZE // 2) / (SIZE // 2))[None]
    angles = np.concatenate([angles, angles], axis=1).astype(np.float32)
    cos, sin = (g.op("Gather", g.constant(table), position) for table in (np.cos(angles), np.sin(angles)))
    for layer in range(LAYERS):
        normed = g.norm(x)
        query = g.rotated(g.by_heads(g.op("MatMul", normed, g.weight(WIDTH, HEADS * SIZE)), HEADS), cos, sin)
        key = g.rotated(g.by_heads(g.op("MatMul", normed, g.weight(WIDTH, KEY_HEADS * SIZE)), KEY_HEADS), cos, sin)
        value = g.by_heads(g.op("MatMul", normed, g.weight(WIDTH, KEY_HEADS * SIZE)), KEY_HEADS)
        caches = []
        for name, new in ((f"key{layer}", key), (f"value{layer}", value)):
            for group, word, size in ((inputs, "past", "past"), (outputs, "present", "past + 1")):
                shape = [1, KEY_HEADS, size, SIZE]
                group.append(helper.make_tensor_value_info(f"{word}_{name}", TensorProto.FLOAT, shape))
            caches.append(g.op("Concat", f"past_{name}", new, output=f"present_{name}", axis=2))
        keys, values = map(g.repeated, caches)
        scores = g.op("MatMul", query, g.op("Transpose", keys, perm=[0, 1, 3, 2]))
        weights = g.op("Softmax", g.op("Mul", scores, g.constant(np.float32(SIZE**-0.5))), axis=-1)
        mixed = g.op("Transpose", g.op("MatMul", weights, values), perm=[0, 2, 1, 3])
        mixed = g.op("Reshape", mixed, g.ints(1, 1, HEADS * SIZE))
        x = g.op("Add", x, g.op("MatMul", mixed, g.weight(HEADS * SIZE, WIDTH)))
        gate = g.op("MatMul", g.norm(x), g.weight(WIDTH, INNER))
        inner = g.op("Mul", gate, g.op("Sigmoid", gate))
        x = g.op("Add", x, g.op("MatMul", inner, g.weight(INNER, WIDTH)))
    last = g.op("Reshape", g.norm(x), g.ints(1, WIDTH))
    g.op("MatMul", last, g.weight(WIDTH, WORDS), output="logits")
    graph = helper.make_graph(g.nodes, "step", inputs, outputs, g.weights)
    return helper.make_model(graph, ir_version=9, opset_imports=[helper.make_opsetid("", OPSET)])


def load(path: Path) -> ort.InferenceSession:
    """A session for a model that may hold fused operators."""
    options = ort.SessionOptions()
    fa_compiler.register_custom_ops(options)
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Growing:
    """Runs with Session.run: the new caches of a step are inputs of the next one."""

    def __init__(self, path: Path) -> None:
        self.session = load(path)
        names = [value.name.removeprefix("past_") for value in self.session.get_inputs() if value.name != "token"]
        self.caches = {name: np.zeros((1, KEY_HEADS, 0, SIZE), np.float32) for name in names}

    def step(self, token: int) -> int:
        """The next token."""
        feeds = {f"past_{name}": cache for name, cache in self.caches.items()} | {"token": np.array([token])}
        logits, *caches = self.session.run(["logits", *(f"present_{name}" for name in self.caches)], feeds)
        self.caches = dict(zip(self.caches, caches, strict=True))
        return int(logits.argmax())


class InPlace:
    """Each cache is one buffer, which is input and output of every step. `caches` are those of the report."""

    def __init__(self, path: Path, caches: Sequence[CacheLine], room: int) -> None:
        self.session = load(path)
        self.binding = self.session.io_binding()
        self.caches = {}
        for cache in caches:
            # The rows after the tokens are NaN: the results show that these rows are never read.
            memory = ort.OrtValue.ortvalue_from_numpy(np.full((1, KEY_HEADS, room, SIZE), np.nan, np.float32))
            self.binding.bind_ortvalue_input(cache.past, memory)
            self.binding.bind_ortvalue_output(cache.present, memory)
            self.caches[cache.present] = memory
        self.logits = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, WORDS), np.float32))
        self.binding.bind_ortvalue_output("logits", self.logits)
        self.lengths = {cache.length for cache in caches}
        self.tokens = 0

    def step(self, token: int) -> int:
        """The next token."""
        for name, number in {"token": token, **dict.fromkeys(self.lengths, self.tokens)}.items():
            self.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.array([number])))
        self.session.run_with_iobinding(self.binding)
        self.tokens += 1
        return int(self.logits.numpy().argmax())


def generate(step: Callable[[int], int], prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """The tokens after the prompt, and the seconds of every step, including those of the prompt."""
    seconds, chosen = [], []
    token = prompt[0]
    for position in range(len(prompt) + tokens - 1):
        started = time.perf_counter()
        following = step(token)
        seconds.append(time.perf_counter() - started)
        inside = position + 1 < len(prompt)
        token = prompt[position + 1] if inside else following
        if not inside:
            chosen.append(token)
    return chosen, seconds


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Plot the milliseconds of each step by its position, as the median of 8 steps."""
    from matplotlib.figure import Figure

    axes = Figure((8, 4)).subplots()
    for name, seconds in curves.items():
        smooth = [1e3 * float(np.median(seconds[max(0, i - 7) : i + 1])) for i in range(len(seconds))]
        axes.plot(smooth, label=name, gid=name)
    axes.set(xlabel="tokens in the cache", ylabel="ms a token")
    axes.set_ylim(bottom=0)
    axes.legend()
    axes.figure.savefig(path)


def main() -> int:
    """Builds, fuses, generates three times, compares."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=16, help="length of the prompt, random tokens")
    parser.add_argument("--room", type=int, default=2048, help="the most tokens of a cache")
    parser.add_argument("--folder", type=Path, default=Path("build/generate"))
    parser.add_argument("--plot", type=Path, metavar="SVG", help="draw the time of each step here")
    args = parser.parse_args()
    if min(args.tokens, args.prompt) < 1 or args.prompt + args.tokens > args.room + 1:
        parser.error("--tokens and --prompt have to be at least 1, and --room at least their sum minus 1")
    if args.plot is not None and not args.plot.parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no folder {args.plot.parent}")
    if args.plot is not None and args.plot.suffix != ".svg":
        parser.error(f"--plot {args.plot}: the name has to end with .svg")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error(f"--plot {args.plot}: this needs matplotlib; install it, or fa_compiler with its extra [bench]")
    try:
        args.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--folder {args.folder} cannot be made: {error.strerror}")
    original, fused, in_place = (args.folder / f"step{word}.onnx" for word in ("", ".fused", ".in_place"))
    onnx.save(build(args.room), original)
    fa_compiler.optimize(original, fused)
    report = fa_compiler.optimize(original, in_place, in_place_caches=True).report
    print(f"fused {report.count('fused')} of {LAYERS} attentions; {len(report.caches)} caches in place")
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, WORDS, args.prompt)]
    runs: dict[str, Growing | InPlace] = {"original": Growing(original), "fused": Growing(fused)}
    runs["in place"] = InPlace(in_place, report.caches, args.room)
    found = {name: generate(run.step, prompt, args.tokens) for name, run in runs.items()}
    for name, (_, seconds) in found.items():
        print(f"{name:9} {len(seconds) / sum(seconds):8.1f} tokens/s")
    if args.plot is not None:
        draw({name: seconds for name, (_, seconds) in found.items()}, args.plot)
        print(f"wrote {args.plot}")
    same = all(tokens == found["original"][0] for tokens, _ in found.values())
    print(f"{args.tokens} tokens: {'the same' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
