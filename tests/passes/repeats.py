"""Keys and values with as many heads as the query has: one function for each way to repeat them.

Each takes [B, K, length, depth] and gives [B, N, length, depth], with N = K * G. "grouped" and "broadcast" leave the
repetition to the product.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.passes.writer import Writer

Repeat = Callable[[Writer, str, str, str], str]


def _expand(writer: Writer, value: str, length: str, depth: str) -> str:
    apart = writer.unsqueeze(value, 2)
    full = writer.op("Expand", apart, writer.shape(["B", "K", "G", length, depth]))
    return writer.reshape(full, ["B", "N", length, depth], ["B", "K", "G", length, depth])


def _tile_apart(writer: Writer, value: str, length: str, depth: str) -> str:
    apart = writer.unsqueeze(value, 2)
    full = writer.op("Tile", apart, writer.const([1, 1, writer.sizes["G"], 1, 1], "int64"))
    return writer.reshape(full, ["B", "N", length, depth], ["B", "K", "G", length, depth])


def _concat_apart(writer: Writer, value: str, length: str, depth: str) -> str:
    apart = writer.unsqueeze(value, 2)
    full = writer.op("Concat", *[apart] * writer.sizes["G"], axis=2)
    return writer.reshape(full, ["B", "N", length, depth], ["B", "K", "G", length, depth])


def _gather(writer: Writer, value: str, length: str, depth: str) -> str:
    heads = [head // writer.sizes["G"] for head in range(writer.sizes["N"])]
    return writer.op("Gather", value, writer.const(heads, "int64"), axis=1)


def _interleave(writer: Writer, value: str, length: str, depth: str) -> str:
    apart = writer.unsqueeze(value, 1)
    full = writer.op("Expand", apart, writer.shape(["B", "G", "K", length, depth]))
    return writer.reshape(full, ["B", "N", length, depth], ["B", "G", "K", length, depth])


def _tile(writer: Writer, value: str, length: str, depth: str) -> str:
    return writer.op("Tile", value, writer.const([1, writer.sizes["G"], 1, 1], "int64"))


def _concat(writer: Writer, value: str, length: str, depth: str) -> str:
    return writer.op("Concat", *[value] * writer.sizes["G"], axis=1)


def _gather_turns(writer: Writer, value: str, length: str, depth: str) -> str:
    heads = [head % writer.sizes["K"] for head in range(writer.sizes["N"])]
    return writer.op("Gather", value, writer.const(heads, "int64"), axis=1)


def _same(writer: Writer, value: str, length: str, depth: str) -> str:
    return value


def _group_axis(writer: Writer, value: str, length: str, depth: str) -> str:
    return writer.unsqueeze(value, 2)


REPEATS: dict[str, Repeat] = {
    "none": _same,
    "broadcast": _same,
    "grouped": _group_axis,
    "expand": _expand,
    "tile_apart": _tile_apart,
    "concat_apart": _concat_apart,
    "gather": _gather,
    "interleave": _interleave,
    "tile": _tile,
    "concat": _concat,
    "gather_turns": _gather_turns,
}
IN_TURNS = ("interleave", "tile", "concat", "gather_turns")
"""Query head n reads key head n % K, with all others n // G."""
EXPLICIT = tuple(name for name in REPEATS if name not in ("none", "broadcast", "grouped"))
"""Those after which key and value have N heads of their own."""
