"""Exports three small decoders that process several tokens at once with cached keys and values: chunked prefill.

    python -m tools.makers.export_chunks DIR

    chunk_static__dynamo    Llama-like; preallocated caches, updated at given positions; mask by position
    chunk_gqa__tsn          half as many key heads, concatenated to the past; torch.onnx's old exporter
    chunk_window__dynamo    concatenated to the past; every token sees a window of five keys, its own the last one

Needs torch and onnxscript (the `export` extra). Writes NAME.onnx with its weights and NAME.npz with inputs; nothing is
downloaded. `python -m tools.graphs.add` keeps them as regression tests.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

HEADS, KEY_HEADS, SIZE, LAYERS, WORDS = 4, 2, 16, 2, 64
ROOM, WINDOW = 32, 5


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions by halves, as in Llama; x [B, N, S, D], positions [S]."""
    frequency = 10000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float32) / SIZE)
    angles = positions[:, None].to(torch.float32) * frequency[None]
    angles = torch.cat((angles, angles), dim=-1)
    first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return x * angles.cos() + torch.cat((-second, first), dim=-1) * angles.sin()


class Norm(nn.Module):
    """Root mean square normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(HEADS * SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Layer(nn.Module):
    """Attention over a cache, and a gated layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        width = HEADS * SIZE
        self.kind = kind
        self.norms = nn.ModuleList([Norm(), Norm()])
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, KEY_HEADS * SIZE, bias=False) for _ in "kv")
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in "gu")
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(
        self, x: Tensor, keys: Tensor, values: Tensor, positions: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        batch, rows, _ = x.shape
        y = self.norms[0](x)
        q, k, v = (part(y).view(batch, rows, -1, SIZE).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = rotated(q, positions), rotated(k, positions)
        if self.kind == "static":
            keys, values = keys.index_copy(2, positions, k), values.index_copy(2, positions, v)
        else:
            keys, values = torch.cat((keys, k), dim=2), torch.cat((values, v), dim=2)
        wide_keys, wide_values = (self.repeated(each) for each in (keys, values))
        if self.kind == "gqa":
            scores = q @ wide_keys.transpose(2, 3) / SIZE**0.5 + mask
            out = scores.softmax(dim=-1) @ wide_values
        else:
            out = nn.functional.scaled_dot_product_attention(q, wide_keys, wide_values, attn_mask=mask)
        x = x + self.o(out.transpose(1, 2).reshape(batch, rows, -1))
        y = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)), keys, values

    @staticmethod
    def repeated(x: Tensor) -> Tensor:
        """Each key head, repeated for all query heads of its group."""
        batch, heads, length, size = x.shape
        x = x[:, :, None].expand(batch, heads, HEADS // heads, length, size)
        return x.reshape(batch, HEADS, length, size)


class Decoder(nn.Module):
    """A decoder for tokens [B, S] and the caches of all layers, keys and values alternately; `kind` as above."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(WORDS, HEADS * SIZE)
        self.layers = nn.ModuleList([Layer(kind) for _ in range(LAYERS)])
        self.norm, self.head = Norm(), nn.Linear(HEADS * SIZE, WORDS, bias=False)

    def forward(self, ids: Tensor, start: Tensor, *caches: Tensor) -> tuple[Tensor, ...]:
        rows, past = ids.shape[1], caches[0].shape[2]
        if self.kind == "static":
            positions = start + torch.arange(rows)
            mask = torch.arange(past)[None, :] <= positions[:, None]
        else:
            positions = torch.arange(past, past + rows)
            distance = torch.arange(past + rows)[None, :] - positions[:, None]
            mask = distance <= 0
            if self.kind == "window":
                mask = mask & (distance > -WINDOW)
            else:
                mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        x, new = self.words(ids), []
        for index, layer in enumerate(self.layers):
            x, keys, values = layer(x, caches[2 * index], caches[2 * index + 1], positions, mask)
            new.extend((keys, values))
        return self.head(self.norm(x)), *new


@dataclass(frozen=True)
class Export:
    """One export: the kind of decoder, the exporter and the opset."""

    kind: str
    dynamo: bool
    opset: int


EXPORTS = {
    "chunk_static__dynamo": Export("static", True, 20),
    "chunk_gqa__tsn": Export("gqa", False, 17),
    "chunk_window__dynamo": Export("window", True, 20),
}


def export(name: str, folder: Path) -> None:
    """Export one model with its inputs: six tokens after ten."""
    torch.manual_seed(0)
    chosen = EXPORTS[name]
    model = Decoder(chosen.kind).eval()
    room = ROOM if chosen.kind == "static" else 10
    caches = [torch.randn(2, KEY_HEADS, room, SIZE) for _ in range(2 * LAYERS)]
    ids, start = torch.randint(0, WORDS, (2, 6)), torch.tensor(10)
    names = [f"past_{each}_{index}" for index in range(LAYERS) for each in ("key", "value")]
    outputs = ["logits", *(each.replace("past", "present") for each in names)]
    long = {} if chosen.kind == "static" else {2: "past"}
    given = (ids, start, *caches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if chosen.dynamo:
            sizes = {key: torch.export.Dim(value, min=2, max=512) for key, value in long.items()}
            shapes = {"ids": {1: torch.export.Dim("tokens", min=2, max=512)}, "start": {}, "caches": (sizes,) * 4}
            torch.onnx.export(
                model, given, str(folder / f"{name}.onnx"), input_names=["ids", "start", *names], output_names=outputs,
                dynamic_shapes=shapes, opset_version=chosen.opset, dynamo=True, external_data=False,
            )  # fmt: skip
        else:
            axes = {"ids": {1: "tokens"}, **{each: {2: "past"} for each in names}}
            torch.onnx.export(
                model, given, str(folder / f"{name}.onnx"), input_names=["ids", "start", *names], output_names=outputs,
                dynamic_axes=axes, opset_version=chosen.opset, dynamo=False,
            )  # fmt: skip
    arrays = dict(zip(["ids", "start", *names], (each.numpy() for each in given), strict=True))
    np.savez(folder / f"{name}.npz", **arrays)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    for name in EXPORTS:
        export(name, arguments.folder)


if __name__ == "__main__":
    main()
