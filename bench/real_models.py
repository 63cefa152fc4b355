"""Graphs of well-known models at their real sizes, without their weights.

    build(MODELS["llama-3.1-8b"], Path("folder"))    # folder/model.onnx and folder/model.bin

A graph has the real numbers of layers, heads and channels, the real vocabulary, a fixed number of tokens, and the
spelling of one of torch's two exporters. Its masks are constants of tokens x tokens, as exporters and simplifiers leave
them: they are written, piece by piece. The weights are external data that lie in holes of the same file, so a file of
hundreds of gigabytes takes no space. `fill` writes random numbers into these holes, for a model that is run.

    family   positions   norms           feed-forward    projections
    llama    rotary      RMS             gated           three, without biases
    gpt2     learned     LayerNorm       GELU            one Gemm and a Split
    bert     learned     LayerNorm       GELU            three, with biases; norms behind the additions
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FILLED_ROWS = 1 << 10
"""`fill` writes no more rows of an embedding than this; the ids that a model is run with are below it."""
NARROW = 64
"""The channels of the feed-forward parts of models that are run."""
_PAGE = 1 << 12
_PIECE = 1 << 22
"""Elements that are made at a time."""


@dataclass(frozen=True)
class Mask:
    """The keys that each row of a constant mask keeps.

    kind        row i keeps the key j where
    causal      j <= i
    window      i - size < j <= i
    local       abs(j - i) <= size
    prefix      j <= i or j < size
    chunks      j <= i, and both are in the same chunk of `size` tokens
    packed      both are in the same sequence; their lengths are size, 2 size, 3 size, size, ...
    padding     j < size
    """

    kind: Literal["causal", "window", "local", "prefix", "chunks", "packed", "padding"]
    size: int = 0

    def kept(self, rows: np.ndarray, tokens: int) -> np.ndarray:
        """The kept keys of some rows, bool [rows, tokens]."""
        row, key = rows[:, None], np.arange(tokens, dtype=np.int32)[None]
        match self.kind:
            case "causal":
                return key <= row
            case "window":
                return (key <= row) & (key > row - self.size)
            case "local":
                return np.abs(key - row) <= self.size
            case "prefix":
                return (key <= row) | (key < self.size)
            case "chunks":
                return (key <= row) & (key >= row - row % self.size)
            case "packed":
                label = np.searchsorted(self.ends(tokens), np.arange(tokens), side="right")
                return label[rows][:, None] == label[None]
            case "padding":
                return np.broadcast_to(key < self.size, (len(rows), tokens))

    def ends(self, tokens: int) -> np.ndarray:
        """The ends of packed sequences."""
        lengths = np.resize(np.array([1, 2, 3]) * self.size, 1 + tokens // self.size)
        return np.minimum(np.cumsum(lengths), tokens)


@dataclass(frozen=True)
class RealModel:
    """A model. `masks` are those of the layers, in turns; a layer without one attends to all keys.

    `stored` is the type of a mask: `bool`, chosen by a Where, or `float32`, added. With `buffer`, each layer has a mask
    of its own, of that many tokens, of which it takes a part. Without `logits` the output is the last hidden state.
    """

    name: str
    family: Literal["llama", "gpt2", "bert"]
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    size: int
    inner: int
    vocabulary: int
    tokens: int
    masks: tuple[Mask | None, ...]
    exporter: Literal["dynamo", "torchscript"] = "dynamo"
    attention: Literal["sdpa", "eager"] = "sdpa"
    stored: Literal["bool", "float32"] = "bool"
    buffer: int = 0
    softcap: float = 0.0
    logits: bool = True

    def cut(self, layers: int, tokens: int | None = None) -> RealModel:
        """The model with fewer layers and tokens: one that can be run. It has no logits, its feed-forward parts are
        narrow, and the sizes of the masks shrink as the tokens do."""
        tokens = tokens or self.tokens
        masks = tuple(mask and replace(mask, size=mask.size * tokens // self.tokens) for mask in self.masks)
        buffer = self.buffer * tokens // self.tokens
        return replace(self, layers=layers, tokens=tokens, masks=masks, buffer=buffer, inner=NARROW, logits=False)

    def mask(self, layer: int) -> Mask | None:
        """The mask of a layer."""
        return self.masks[layer % len(self.masks)]


CAUSAL, WINDOW_1K, WINDOW_4K = Mask("causal"), Mask("window", 1024), Mask("window", 4096)
_ALL = (
    RealModel("bert-large", "bert", 24, 1024, 16, 16, 64, 4096, 30522, 2048, (Mask("padding", 1800),),
              "torchscript", "eager", "float32"),
    RealModel("modernbert-large", "bert", 28, 1024, 16, 16, 64, 2624, 50368, 8192,
              (None, Mask("local", 64), Mask("local", 64))),
    RealModel("packed-bert", "bert", 24, 1024, 16, 16, 64, 4096, 30522, 4096, (Mask("packed", 300),)),
    RealModel("gpt2-xl", "gpt2", 48, 1600, 25, 25, 64, 6400, 50257, 2048, (CAUSAL,),
              "torchscript", "eager", buffer=2048),
    RealModel("gpt-neo-2.7b", "gpt2", 32, 2560, 20, 20, 128, 10240, 50257, 2048, (CAUSAL, Mask("window", 256)),
              attention="eager", buffer=4096),
    RealModel("llama-3.1-8b", "llama", 32, 4096, 32, 8, 128, 14336, 128256, 8192, (CAUSAL,),
              "torchscript", "eager", "float32"),
    RealModel("llama-3.1-405b", "llama", 126, 16384, 128, 8, 128, 53248, 128256, 4096, (CAUSAL,)),
    RealModel("mistral-7b", "llama", 32, 4096, 32, 8, 128, 14336, 32000, 16384, (WINDOW_4K,)),
    RealModel("gemma-2-9b", "llama", 42, 3584, 16, 8, 256, 14336, 256000, 8192, (WINDOW_4K, CAUSAL),
              "torchscript", "eager", "float32", softcap=50.0),
    RealModel("gemma-3-27b", "llama", 62, 5376, 32, 16, 128, 21504, 262208, 8192, (*[WINDOW_1K] * 5, CAUSAL)),
    RealModel("paligemma-3b", "llama", 18, 2048, 8, 1, 256, 16384, 257216, 4096, (Mask("prefix", 1024),)),
    RealModel("llama-4-scout", "llama", 48, 5120, 40, 8, 128, 16384, 202048, 16384,
              (*[Mask("chunks", 8192)] * 3, CAUSAL)),
    RealModel("qwen-2.5-7b", "llama", 28, 3584, 28, 4, 128, 18944, 152064, 32768, (CAUSAL,)),
    # These are small enough to be run.
    RealModel("llama-3.2-1b", "llama", 16, 2048, 32, 8, 64, 8192, 128256, 4096, (CAUSAL,)),
    RealModel("gemma-3-1b", "llama", 26, 1152, 4, 1, 256, 6912, 262144, 8192, (*[Mask("window", 512)] * 5, CAUSAL)),
)  # fmt: skip
MODELS = {model.name: model for model in _ALL}
"""By name. The experts of llama-4-scout are left out: its layers have one feed-forward part."""


def build(model: RealModel, folder: Path, numbers: int | None = None) -> Path:
    """Write a model and its external data into a folder, and return the path of the model.

    The weights are holes; `numbers` is the seed of random weights instead.
    """
    path = folder / "model.onnx"
    with (folder / "model.bin").open("wb") as file:
        writer = _Writer(model, _Weights(file, numbers))
        path.write_bytes(writer.model().SerializeToString())
    return path


@dataclass
class _Weights:
    """A file of external data."""

    file: Any
    numbers: int | None
    end: int = 0

    def hole(self, name: str, dims: Sequence[int]) -> TensorProto:
        """A float32 weight."""
        tensor = self._placed(name, dims, np.float32)
        if self.numbers is not None:
            rng = np.random.default_rng([self.numbers, self.end])
            rows = min(dims[0], FILLED_ROWS) if dims[0] > 8 * FILLED_ROWS else dims[0]
            spread = 1.0 if len(dims) == 1 else math.sqrt(1 / dims[0]) if dims[0] == rows else 1.0
            self._write(tensor, (rng.standard_normal((rows, *dims[1:]), np.float32) * spread,))
        return tensor

    def filled(self, name: str, dims: Sequence[int], dtype: Any, pieces: Iterator[np.ndarray]) -> TensorProto:
        """A constant whose numbers come in pieces."""
        tensor = self._placed(name, dims, dtype)
        self._write(tensor, pieces)
        return tensor

    def _placed(self, name: str, dims: Sequence[int], dtype: Any) -> TensorProto:
        kind = np.dtype(dtype)
        tensor = TensorProto(name=name, dims=dims, data_type=helper.np_dtype_to_tensor_dtype(kind))
        tensor.data_location = TensorProto.EXTERNAL
        length = math.prod(dims) * kind.itemsize
        for key, value in (("location", Path(self.file.name).name), ("offset", self.end), ("length", length)):
            tensor.external_data.add(key=key, value=str(value))
        self.end += -(-length // _PAGE) * _PAGE
        self.file.truncate(self.end)
        return tensor

    def _write(self, tensor: TensorProto, pieces: Any) -> None:
        self.file.seek(int(tensor.external_data[1].value))
        for piece in pieces:
            self.file.write(piece.tobytes())


@dataclass
class _Writer:
    """Writes the nodes of one model, in order."""

    of: RealModel
    weights: _Weights
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    initializers: dict[str, TensorProto] = field(default_factory=dict)
    masks: dict[Mask, str] = field(default_factory=dict)

    @property
    def opset(self) -> int:
        """That of the exporter."""
        return 20 if self.of.exporter == "dynamo" else 17

    def model(self) -> onnx.ModelProto:
        """The model, of one sequence of ids."""
        of = self.of
        stream = self.op("Gather", self.weight("embed_tokens", of.vocabulary, of.hidden), "input_ids")
        if of.family != "llama":
            stream = self.op("Add", stream, self.weight("position", of.tokens, of.hidden))
        for layer in range(of.layers):
            stream = self.layer(layer, stream)
        if of.family != "bert":
            stream = self.norm("final", stream)
        if of.logits:
            stream = self.op("MatMul", stream, self.weight("lm_head", of.hidden, of.vocabulary))
        self.nodes.append(helper.make_node("Identity", [stream], ["output"]))
        ids = helper.make_tensor_value_info("input_ids", TensorProto.INT64, [1, of.tokens])
        width = of.vocabulary if of.logits else of.hidden
        output = helper.make_tensor_value_info("output", TensorProto.FLOAT, [1, of.tokens, width])
        graph = helper.make_graph(self.nodes, of.name, [ids], [output], list(self.initializers.values()))
        imports = [helper.make_opsetid("", self.opset)]
        return helper.make_model(graph, ir_version=10, opset_imports=imports)

    # -- parts of a graph -----------------------------------------------------------------------

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attrs: Any) -> str:
        """The first output of a new node; the further ones have its name and a number."""
        name = f"{kind}_{len(self.nodes)}"
        names = [name, *(f"{name}.{k}" for k in range(1, outputs))]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=f"/{name}", **attrs))
        return name

    def weight(self, name: str, *dims: int) -> str:
        """A float32 weight."""
        self.initializers[name] = self.weights.hole(name, dims)
        return name

    def const(self, numbers: Any, dtype: Any = np.float32) -> str:
        """A small constant, once."""
        array = np.array(numbers, dtype)
        name = f"val_{array.dtype}_{array.tolist()}"
        self.initializers.setdefault(name, numpy_helper.from_array(array, name))
        return name

    def ints(self, *numbers: int) -> str:
        """A vector of int64."""
        return self.const(numbers, np.int64)

    def mean(self, value: str) -> str:
        """The mean along the last axis."""
        if self.opset < 18:
            return self.op("ReduceMean", value, axes=[-1], keepdims=1)
        return self.op("ReduceMean", value, self.ints(-1), keepdims=1)

    def norm(self, name: str, value: str) -> str:
        """The norm of the family."""
        weight = self.weight(f"{name}.weight", self.of.hidden)
        if self.of.family != "llama":
            bias = self.weight(f"{name}.bias", self.of.hidden)
            return self.op("LayerNormalization", value, weight, bias, axis=-1, epsilon=1e-5)
        square = self.mean(self.op("Pow", value, self.const(2.0)))
        root = self.op("Sqrt", self.op("Add", square, self.const(1e-5)))
        return self.op("Mul", weight, self.op("Mul", value, self.op("Reciprocal", root)))

    def linear(self, name: str, value: str, inside: int, outside: int) -> str:
        """A projection, with a bias where the family has one."""
        result = self.op("MatMul", value, self.weight(f"{name}.weight", inside, outside))
        if self.of.family == "llama":
            return result
        return self.op("Add", result, self.weight(f"{name}.bias", outside))

    # -- a layer --------------------------------------------------------------------------------

    def layer(self, layer: int, stream: str) -> str:
        """Attention and the feed-forward part, with their norms: in front of them, or behind the additions."""
        name, behind = f"layers.{layer}", self.of.family == "bert"
        for part, branch in (("attention", self.attention), ("mlp", self.feed_forward)):
            given = stream if behind else self.norm(f"{name}.{part}_norm", stream)
            stream = self.op("Add", stream, branch(layer, f"{name}.{part}", given))
            stream = self.norm(f"{name}.{part}_norm", stream) if behind else stream
        return stream

    def feed_forward(self, layer: int, name: str, value: str) -> str:
        """Gated in a Llama, with a GELU in the others."""
        of = self.of
        up = self.linear(f"{name}.up", value, of.hidden, of.inner)
        if of.family == "llama":
            gate = self.linear(f"{name}.gate", value, of.hidden, of.inner)
            inner = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), up)
        else:
            error = self.op("Erf", self.op("Div", up, self.const(math.sqrt(2))))
            inner = self.op("Mul", self.op("Mul", up, self.op("Add", error, self.const(1.0))), self.const(0.5))
        return self.linear(f"{name}.down", inner, of.inner, of.hidden)

    def attention(self, layer: int, name: str, value: str) -> str:
        """From the projections to the output projection."""
        of = self.of
        query, key, values = self.projections(name, value)
        if of.family == "llama":
            query, key = self.rotated(query), self.rotated(key)
        if of.heads != of.kv_heads:
            key, values = self.repeated(key), self.repeated(values)
        probabilities = self.op("Softmax", self.scores(layer, query, key), axis=-1)
        if of.attention == "sdpa" and of.exporter == "dynamo" and of.mask(layer):
            guard = self.op("IsNaN", probabilities)
            probabilities = self.op("Where", guard, self.const(0.0), probabilities)
        result = self.op("Transpose", self.op("MatMul", probabilities, values), perm=[0, 2, 1, 3])
        width = of.heads * of.size
        result = self.op("Reshape", result, self.ints(1, of.tokens, width))
        return self.linear(f"{name}.output", result, width, of.hidden)

    def projections(self, name: str, value: str) -> tuple[str, str, str]:
        """Query, key and value, [1, heads, tokens, size]."""
        of = self.of
        if of.family == "gpt2":
            width = of.heads * of.size
            flat = self.op("Reshape", value, self.ints(-1, of.hidden))
            weight = self.weight(f"{name}.c_attn.weight", of.hidden, 3 * width)
            joined = self.op("Gemm", flat, weight, self.weight(f"{name}.c_attn.bias", 3 * width))
            joined = self.op("Reshape", joined, self.ints(1, of.tokens, 3 * width))
            first = self.op("Split", joined, self.ints(*[width] * 3), outputs=3, axis=2)
            parts = [first, f"{first}.1", f"{first}.2"]
        else:
            heads = {"query": of.heads, "key": of.kv_heads, "value": of.kv_heads}
            parts = [self.linear(f"{name}.{one}", value, of.hidden, n * of.size) for one, n in heads.items()]
        counts = (of.heads, of.kv_heads, of.kv_heads)
        query, key, values = (
            self.op("Transpose", self.op("Reshape", part, self.ints(1, of.tokens, n, of.size)), perm=[0, 2, 1, 3])
            for part, n in zip(parts, counts, strict=True)
        )
        return query, key, values

    def rotated(self, value: str) -> str:
        """Rotary positions: the cosines and sines are constants, as the ids of the positions are."""
        of, half = self.of, self.of.size // 2
        for name, function in (("cos", np.cos), ("sin", np.sin)):
            if name not in self.initializers:
                rates = 10000.0 ** (-np.arange(half) / half)
                angles = function(np.arange(of.tokens)[:, None] * rates).astype(np.float32)
                pieces = iter((np.concatenate([angles, angles], axis=1),))
                self.initializers[name] = self.weights.filled(name, (1, 1, of.tokens, of.size), np.float32, pieces)
        ends = ((0, half), (half, np.iinfo(np.int64).max))
        first, second = (
            self.op("Slice", value, self.ints(start), self.ints(end), self.ints(3), self.ints(1)) for start, end in ends
        )
        turned = self.op("Concat", self.op("Neg", second), first, axis=-1)
        return self.op("Add", self.op("Mul", value, "cos"), self.op("Mul", turned, "sin"))

    def repeated(self, value: str) -> str:
        """The heads of a key or value, repeated for the query's heads."""
        of = self.of
        wide = self.op("Unsqueeze", value, self.ints(2))
        shape = self.ints(1, of.kv_heads, of.heads // of.kv_heads, of.tokens, of.size)
        return self.op("Reshape", self.op("Expand", wide, shape), self.ints(1, of.heads, of.tokens, of.size))

    def scores(self, layer: int, query: str, key: str) -> str:
        """The scores with their scale, cap and mask."""
        of, scale = self.of, self.of.size**-0.5
        key = self.op("Transpose", key, perm=[0, 1, 3, 2])
        if of.attention == "sdpa":
            query, key = (self.op("Mul", each, self.const(math.sqrt(scale))) for each in (query, key))
            scores = self.op("MatMul", query, key)
        else:
            scores = self.op("Mul", self.op("MatMul", query, key), self.const(scale))
        if of.softcap:
            capped = self.op("Tanh", self.op("Div", scores, self.const(of.softcap)))
            scores = self.op("Mul", capped, self.const(of.softcap))
        mask = self.stored_mask(layer)
        if mask is None:
            return scores
        least = float(np.finfo(np.float32).min)
        if of.stored == "float32":
            return self.op("Add", scores, mask)
        if of.attention == "sdpa":
            return self.op("Add", scores, self.op("Where", mask, self.const(0.0), self.const(-math.inf)))
        return self.op("Where", mask, scores, self.const(least))

    def stored_mask(self, layer: int) -> str | None:
        """The constant mask of a layer, [1, 1, tokens, tokens]; None where the layer has none."""
        of, mask = self.of, self.of.mask(layer)
        if mask is None:
            return None
        size = of.buffer or of.tokens
        if of.buffer or mask not in self.masks:
            name = f"layers.{layer}.attention.bias" if of.buffer else f"mask.{mask.kind}"
            pieces = _pieces(mask, size, of.stored)
            self.initializers[name] = self.weights.filled(name, (1, 1, size, size), of.stored, pieces)
            self.masks[mask] = name
        name = self.masks[mask]
        if not of.buffer:
            return name
        ends, start = self.ints(of.tokens, of.tokens), self.ints(0, 0)
        return self.op("Slice", name, start, ends, self.ints(2, 3), self.ints(1, 1))


def _pieces(mask: Mask, size: int, stored: str) -> Iterator[np.ndarray]:
    """The rows of a mask as they are stored."""
    step = max(1, _PIECE // size)
    for start in range(0, size, step):
        kept = mask.kept(np.arange(start, min(start + step, size), dtype=np.int32), size)
        yield kept if stored == "bool" else np.where(kept, np.float32(0), np.finfo(np.float32).min)
