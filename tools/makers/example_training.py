"""Exports the training graph of a small GPT to ONNX: the loss and the gradients of every parameter in one graph.

This needs the `export` extra (torch). Nothing is downloaded. The resulting file is in the repository, without weights:
the parameters are inputs of the graph and their gradients are outputs. examples/train.py trains it. You need this
program only for another model:

    pip install -e '.[export]'
    python -m tools.makers.example_training
"""

from __future__ import annotations

import lzma
import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

GRAPH = Path(__file__).parents[2] / "examples" / "models" / "gpt_training.onnx.xz"
VOCABULARY, WIDTH, HEADS, LAYERS = 256, 128, 4, 2
BATCH, LENGTH = 4, 512


class Layer(torch.nn.Module):
    """Causal self-attention in plain operators and an MLP, each after a normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.between = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The output of the layer, [BATCH, LENGTH, WIDTH]."""
        parts = self.qkv(self.before(x)).view(BATCH, LENGTH, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = parts[0], parts[1], parts[2]
        scores = query @ key.transpose(-1, -2) / math.sqrt(WIDTH // HEADS)
        causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        probabilities = scores.masked_fill(~causal, float("-inf")).softmax(-1)
        mixed = (probabilities @ value).transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.between(x))))


class Gpt(torch.nn.Module):
    """A language model of bytes; the output is the loss of predicting the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("known", torch.arange(VOCABULARY), persistent=False)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(LAYERS))
        self.last, self.head = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """The mean cross entropy over [BATCH, LENGTH] tokens."""
        # A lookup's gradient is an adding ScatterND, whose ONNX Runtime kernel loses numbers with several threads.
        chosen = (tokens[..., None] == self.known).float()
        x = chosen @ self.bytes.weight + self.places.weight
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.last(x)).flatten(0, 1)
        return functional.cross_entropy(logits, targets.flatten())


def export() -> onnx.ModelProto:
    """The joint graph of loss and gradients from torch's autograd and exporter."""
    model = Gpt()
    parameters = dict(model.named_parameters())
    names = list(parameters)
    tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64)
    targets = torch.ones(BATCH, LENGTH, dtype=torch.int64)  # the same tensor for both would become one input

    def step(tokens: torch.Tensor, targets: torch.Tensor, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given: Mapping[str, Any] = dict(zip(names, values, strict=True))
        loss = torch.func.functional_call(model, given, (tokens, targets))
        return (loss, *torch.autograd.grad(loss, values))

    arguments = (tokens, targets, *parameters.values())
    graph = make_fx(step, decomposition_table=torch._decomp.core_aten_decompositions())(*arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            graph,
            tuple(each.detach() for each in arguments),
            dynamo=True,
            opset_version=20,
            input_names=["tokens", "targets", *names],
            output_names=["loss", *(f"grad.{name}" for name in names)],
        )
    assert program is not None
    proto = program.model_proto
    for node in proto.graph.node:  # the exporter's metadata are longer than the graph
        del node.metadata_props[:]
        node.ClearField("doc_string")
    for info in (*proto.graph.value_info, *proto.graph.input, *proto.graph.output):
        del info.metadata_props[:]
    return proto


if __name__ == "__main__":
    model = export()
    onnx.checker.check_model(model, full_check=True)
    GRAPH.write_bytes(lzma.compress(model.SerializeToString(), preset=9))
    print(f"{GRAPH}: {len(model.graph.node)} nodes, {GRAPH.stat().st_size} bytes")
