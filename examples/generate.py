"""Generates tokens one at a time with a small Llama-like model of random weights, as exported and fused.

    python examples/generate.py [--tokens 200] [--prompt 16] [--room 2048] [--folder build/generate]

The model has a cache of fixed size for each layer: a step takes the cache, a token and its position, writes the
token's key and value into the cache with ScatterND, and attends the positions up to its own. `original` runs the graph
as it is, by Session.run, which hands over a new cache in each step. `fused` is the graph that fa_compiler makes of it,
with each cache bound as input and output on one piece of memory (IOBinding): ONNX Runtime's ScatterND then finds its
output where its input is and writes one row. This is sound because the caches are read by nothing but the ScatterND of
their own layer, and the attention reads what that gives.

Both must choose the same tokens. Tokens per second are printed, and the time of each step is drawn against the position
in FOLDER/generate.svg.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import fa_compiler

LAYERS, HEADS, KEY_HEADS, SIZE, WIDTH, INNER, WORDS = 4, 8, 2, 64, 512, 1024, 1000
OPSET = 18


@dataclass
class Graph:
    """Nodes and weights of a model under construction; every method gives the name of a value."""

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
        """[1, heads, 1, SIZE]."""
        split = self.op("Reshape", x, self.ints(1, 1, heads, SIZE))
        return self.op("Transpose", split, perm=[0, 2, 1, 3])

    def rotated(self, x: str, cos: str, sin: str) -> str:
        """Rotary positions by halves."""
        low = self.op("Slice", x, self.ints(0), self.ints(SIZE // 2), self.ints(3))
        high = self.op("Slice", x, self.ints(SIZE // 2), self.ints(SIZE), self.ints(3))
        turned = self.op("Concat", self.op("Neg", high), low, axis=3)
        return self.op("Add", self.op("Mul", x, cos), self.op("Mul", turned, sin))

    def repeated(self, x: str, room: int) -> str:
        """Key heads repeated to the heads of the query, as Llama does."""
        shape = self.ints(1, KEY_HEADS, HEADS // KEY_HEADS, room, SIZE)
        wide = self.op("Expand", self.op("Unsqueeze", x, self.ints(2)), shape)
        return self.op("Reshape", wide, self.ints(1, HEADS, room, SIZE))


def build(room: int, seed: int = 0) -> onnx.ModelProto:
    """One decoding step: token [1,1], position [1] and the caches give logits [1,WORDS] and the caches after it."""
    g = Graph(np.random.default_rng(seed))
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, [1]) for name in ("token", "position")]
    outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, [1, WORDS])]
    x = g.op("Unsqueeze", g.op("Gather", g.weight(WORDS, WIDTH), "token"), g.ints(0))
    angles = np.arange(room)[:, None] / 10000 ** (np.arange(SIZE // 2) / (SIZE // 2))[None]
    angles = np.concatenate([angles, angles], axis=1).astype(np.float32)
    cos, sin = (g.op("Gather", g.constant(table), "position") for table in (np.cos(angles), np.sin(angles)))
    seen = g.op("LessOrEqual", g.constant(np.arange(room, dtype=np.int64)), "position")
    lowest = g.constant(np.float32(np.finfo(np.float32).min))
    mask = g.op("Where", seen, g.constant(np.float32(0)), lowest)
    mask = g.op("Unsqueeze", mask, g.ints(0, 1, 2))
    heads = g.constant(np.arange(KEY_HEADS, dtype=np.int64).reshape(1, KEY_HEADS, 1, 1))
    zeros = g.constant(np.zeros((1, KEY_HEADS, 1, 1), np.int64))
    place = g.op("Expand", g.op("Reshape", "position", g.ints(1, 1, 1, 1)), g.ints(1, KEY_HEADS, 1, 1))
    rows = g.op("Concat", zeros, heads, place, axis=3)  # [1, KEY_HEADS, 1, 3]: where the new rows go
    for layer in range(LAYERS):
        normed = g.norm(x)
        query = g.rotated(g.by_heads(g.op("MatMul", normed, g.weight(WIDTH, HEADS * SIZE)), HEADS), cos, sin)
        key = g.rotated(g.by_heads(g.op("MatMul", normed, g.weight(WIDTH, KEY_HEADS * SIZE)), KEY_HEADS), cos, sin)
        value = g.by_heads(g.op("MatMul", normed, g.weight(WIDTH, KEY_HEADS * SIZE)), KEY_HEADS)
        caches = []
        for name, new in ((f"key{layer}", key), (f"value{layer}", value)):
            shape = [1, KEY_HEADS, room, SIZE]
            inputs.append(helper.make_tensor_value_info(f"past_{name}", TensorProto.FLOAT, shape))
            outputs.append(helper.make_tensor_value_info(f"present_{name}", TensorProto.FLOAT, shape))
            caches.append(g.op("ScatterND", f"past_{name}", rows, new, output=f"present_{name}"))
        keys, values = (g.repeated(cache, room) for cache in caches)
        scores = g.op("MatMul", query, g.op("Transpose", keys, perm=[0, 1, 3, 2]))
        scores = g.op("Mul", scores, g.constant(np.float32(SIZE**-0.5)))
        weights = g.op("Softmax", g.op("Add", scores, mask), axis=-1)
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


def cache_names(model: onnx.ModelProto) -> list[str]:
    """Of the caches, without past_ and present_."""
    return [info.name.removeprefix("past_") for info in model.graph.input if info.name.startswith("past_")]


class Plain:
    """Session.run: a step gives new caches, which the next one takes."""

    def __init__(self, path: Path, room: int) -> None:
        self.session = ort.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        self.names = cache_names(onnx.load(path))
        self.caches = {name: np.zeros((1, KEY_HEADS, room, SIZE), np.float32) for name in self.names}

    def step(self, token: int, position: int) -> int:
        """The next token."""
        feeds = {f"past_{name}": cache for name, cache in self.caches.items()}
        feeds |= {"token": np.array([token]), "position": np.array([position])}
        logits, *caches = self.session.run(["logits", *(f"present_{name}" for name in self.names)], feeds)
        self.caches = dict(zip(self.names, caches, strict=True))
        return int(logits.argmax())


class Bound:
    """Each cache is one piece of memory, input and output of every step."""

    def __init__(self, path: Path, room: int) -> None:
        options = ort.SessionOptions()
        fa_compiler.register_custom_ops(options)
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        self.caches = {}
        for name in cache_names(onnx.load(path)):
            cache = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, KEY_HEADS, room, SIZE), np.float32))
            self.binding.bind_ortvalue_input(f"past_{name}", cache)
            self.binding.bind_ortvalue_output(f"present_{name}", cache)
            self.caches[name] = cache
        self.logits = ort.OrtValue.ortvalue_from_numpy(np.zeros((1, WORDS), np.float32))
        self.binding.bind_ortvalue_output("logits", self.logits)

    def step(self, token: int, position: int) -> int:
        """The next token."""
        for name, number in (("token", token), ("position", position)):
            self.binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(np.array([number])))
        self.session.run_with_iobinding(self.binding)
        return int(self.logits.numpy().argmax())


def generate(step: Callable[[int, int], int], prompt: list[int], tokens: int) -> tuple[list[int], list[float]]:
    """The tokens after the prompt, and the seconds of every step, those of the prompt included."""
    seconds, chosen = [], []
    token = prompt[0]
    for position in range(len(prompt) + tokens - 1):
        started = time.perf_counter()
        following = step(token, position)
        seconds.append(time.perf_counter() - started)
        inside = position + 1 < len(prompt)
        token = prompt[position + 1] if inside else following
        if not inside:
            chosen.append(token)
    return chosen, seconds


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Milliseconds of each step against its position, smoothed over 8 steps by their median."""
    wide, high, margin = 640, 320, 48
    smooth = {
        name: [1e3 * float(np.median(seconds[max(0, i - 7) : i + 1])) for i in range(len(seconds))]
        for name, seconds in curves.items()
    }
    top = 1.1 * max(max(curve) for curve in smooth.values())
    steps = max(len(curve) for curve in smooth.values())
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide}" height="{high}" font-family="sans-serif">']
    parts.append(f'<path d="M{margin} 16V{high - margin}H{wide - 16}" fill="none" stroke="#888"/>')
    for (name, curve), colour in zip(smooth.items(), ("#c44", "#269"), strict=True):
        points = " ".join(
            f"{margin + i * (wide - margin - 16) / steps:.1f},{high - margin - y * (high - margin - 16) / top:.1f}"
            for i, y in enumerate(curve)
        )
        end = high - margin - curve[-1] * (high - margin - 16) / top
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(f'<text x="{wide - 90}" y="{end - 6:.0f}" fill="{colour}" font-size="13">{name}</text>')
    parts.append(f'<text x="{wide // 2}" y="{high - 14}" font-size="13">tokens in the cache</text>')
    parts.append(f'<text x="6" y="12" font-size="13">ms a token (up to {top:.2f})</text></svg>')
    path.write_text("\n".join(parts))


def main() -> int:
    """Builds, fuses, generates twice, compares."""
    head, _, rest = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(description=head, epilog=rest, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--prompt", type=int, default=16, help="length of the prompt, random tokens")
    parser.add_argument("--room", type=int, default=2048, help="tokens the cache has room for")
    parser.add_argument("--folder", type=Path, default=Path("build/generate"))
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    original, fused = args.folder / "step.onnx", args.folder / "step.fused.onnx"
    onnx.save(build(args.room), original)
    result = fa_compiler.optimize(original, fused)
    print(f"fused {sum(block.status == 'fused' for block in result.report.blocks)} of {LAYERS} attentions")
    prompt = [int(token) for token in np.random.default_rng(1).integers(0, WORDS, args.prompt)]
    runs = {"original": Plain(original, args.room), "fused": Bound(fused, args.room)}
    found = {name: generate(run.step, prompt, args.tokens) for name, run in runs.items()}
    for name, (_, seconds) in found.items():
        print(f"{name:9} {len(seconds) / sum(seconds):8.1f} tokens/s")
    draw({name: seconds for name, (_, seconds) in found.items()}, args.folder / "generate.svg")
    print(f"wrote {args.folder / 'generate.svg'}")
    same = found["original"][0] == found["fused"][0]
    print(f"{args.tokens} tokens: {'the same' if same else 'DIFFERENT'}")
    return 0 if same else 1


if __name__ == "__main__":
    raise SystemExit(main())
