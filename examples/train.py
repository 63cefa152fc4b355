"""Trains a small GPT for 50 steps, once with the training graph that torch exports and once with the fused graph.

    python examples/train.py [--steps 50] [--plot curves.svg]

The graph computes the loss and the gradient of every parameter. tools/makers/example_training.py wrote it; torch is not
needed here. The updates of Adam are in NumPy. Both runs start with the same parameters and read the same batches, which
are bytes of this project's licence. The program prints the loss curves, their largest difference, and the time of a
step in ONNX Runtime with its default optimisations. The steps of both runs alternate. The exit code is 1 if the curves
differ by more than TOLERANCE.
"""

from __future__ import annotations

import argparse
import lzma
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as rt
from rich.console import Console
from rich.table import Table

import fa_compiler

ROOT = Path(__file__).parents[1]
GRAPH = ROOT / "examples" / "models" / "gpt_training.onnx.xz"
TEXT = ROOT / "LICENSE"
TOLERANCE = 1e-5
"""The allowed difference of two losses, relative to the larger one. In the first step it is float32 rounding, 1e-7. It
grows, because these differences change the parameters of the two runs."""

Array = np.ndarray
Feeds = dict[str, Array]


@dataclass
class Adam:
    """The update of all parameters in place."""

    parameters: Feeds
    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    count: int = 0
    moments: dict[str, tuple[Array, Array]] = field(default_factory=dict)

    def step(self, gradients: Mapping[str, Array]) -> None:
        """One step against the gradients."""
        self.count += 1
        first, second = self.betas
        for name, gradient in gradients.items():
            mean, square = self.moments.get(name, (np.zeros_like(gradient), np.zeros_like(gradient)))
            mean, square = first * mean + (1 - first) * gradient, second * square + (1 - second) * gradient**2
            self.moments[name] = mean, square
            scale = np.sqrt(square / (1 - second**self.count)) + 1e-8
            self.parameters[name] = self.parameters[name] - self.rate * mean / (1 - first**self.count) / scale


@dataclass
class Training:
    """A graph in training, with its losses and times so far."""

    session: rt.InferenceSession
    adam: Adam
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def step(self, batch: Feeds) -> dict[str, Array]:
        """Compute the loss and the gradients of one batch and update the parameters; returns the gradients."""
        start = time.perf_counter()
        loss, *gradients = self.session.run(None, batch | self.adam.parameters)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(float(loss))
        names = (output.name.removeprefix("grad.") for output in self.session.get_outputs()[1:])
        found = dict(zip(names, gradients, strict=True))
        self.adam.step(found)
        return found


def load_graph() -> onnx.ModelProto:
    """The training graph of the repository."""
    return onnx.load_from_string(lzma.decompress(GRAPH.read_bytes()))


def session_of(model: onnx.ModelProto) -> rt.InferenceSession:
    """The model in ONNX Runtime with this package's operators."""
    options = rt.SessionOptions()
    options.log_severity_level = 3
    fa_compiler.register_custom_ops(options)
    return rt.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def start_parameters(model: onnx.ModelProto, seed: int = 0) -> Feeds:
    """Small random matrices, ones for the weights of normalisations and zeros for biases."""
    rng = np.random.default_rng(seed)
    result: Feeds = {}
    for value in model.graph.input:
        if value.name in ("tokens", "targets"):
            continue
        shape = [dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if len(shape) > 1:
            result[value.name] = (0.02 * rng.standard_normal(shape)).astype(np.float32)
        else:
            result[value.name] = np.full(shape, float(value.name.endswith("weight")), np.float32)
    return result


def draw_batch(model: onnx.ModelProto, rng: np.random.Generator) -> Feeds:
    """Pieces of the text as tokens, and the same pieces shifted by one byte as targets."""
    text = np.frombuffer(TEXT.read_bytes(), np.uint8).astype(np.int64)
    size, length = (dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim)
    starts = rng.integers(0, len(text) - length - 1, size)
    pieces = np.stack([text[start : start + length + 1] for start in starts])
    return {"tokens": pieces[:, :-1], "targets": pieces[:, 1:]}


def train(steps: int) -> tuple[Training, Training]:
    """The original and the fused graph, trained side by side."""
    model = load_graph()
    fused = fa_compiler.optimize(model)
    assert isinstance(fused.model, onnx.ModelProto)
    parameters = start_parameters(model)
    pair = tuple(Training(session_of(each), Adam(dict(parameters))) for each in (model, fused.model))
    rng = np.random.default_rng(1)
    for _ in range(steps):
        batch = draw_batch(model, rng)
        for training in pair:
            training.step(batch)
    return pair[0], pair[1]


def difference(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest difference of two curves, relative to the larger loss."""
    return max(abs(a - b) / max(abs(a), abs(b)) for a, b in zip(one, other, strict=True))


def plot(curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """Draw the loss curves. The first one is wide and pale, so that the other one on top of it is visible."""
    from matplotlib.figure import Figure

    axes = Figure((8, 4.5)).subplots()
    for (name, losses), (colour, width) in zip(curves.items(), (("#99bbdd", 6), ("#cc3300", 1.5)), strict=True):
        axes.plot(range(1, len(losses) + 1), losses, color=colour, linewidth=width, label=name, gid=name)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    axes.figure.savefig(path)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, print, plot."""
    parser = argparse.ArgumentParser(description="train a small GPT with the original and with the fused graph")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--plot", type=Path, metavar="SVG", help="write both loss curves here")
    args = parser.parse_args(arguments)
    if args.steps < 1:
        parser.error("--steps has to be at least 1")
    if args.plot is not None and not args.plot.parent.is_dir():
        parser.error(f"--plot {args.plot}: there is no folder {args.plot.parent}")
    if args.plot is not None and find_spec("matplotlib") is None:
        parser.error(f"--plot {args.plot}: this needs matplotlib; install it, or fa_compiler with its extra [bench]")
    original, fused = train(args.steps)
    out = Console(highlight=False)
    table = Table("step", "loss, original", "loss, fused")
    for step in sorted({*range(0, args.steps, 10), args.steps - 1}):
        table.add_row(str(step + 1), f"{original.losses[step]:.6f}", f"{fused.losses[step]:.6f}")
    out.print(table)
    apart = difference(original.losses, fused.losses)
    out.print(f"largest relative difference of a loss: {apart:.1e} (allowed: {TOLERANCE:.0e})")
    times = [1e3 * statistics.median(each.seconds) for each in (original, fused)]
    out.print(f"loss and gradients of a step: {times[0]:.1f} ms original, {times[1]:.1f} ms fused")
    if args.plot is not None:
        plot({"original": original.losses, "fused": fused.losses}, args.plot)
        out.print(f"curves: {args.plot}")
    return int(not apart <= TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
