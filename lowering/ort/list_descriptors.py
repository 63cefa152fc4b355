"""Type combinations of the operators whose key and value, say, are lists of tensors.

ONNX Runtime allows a list as the last input only, and not beside absent inputs; so such an operator is registered with
as many optional inputs as its lists may need, and its kernel reads the `<name>_count` attributes. What stands at a
place then varies, and with it the type. ONNX Runtime takes the type of a result from the first combination, in the
order registered, whose inputs fit; the combinations below are ordered and typed so that this is the right one, and
everything else about types is left to the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

MOST_LISTED = 32
"""Tensors in a list of keys or values that the CPU kernel of IncreFlashAttention takes; each makes every session a
little slower to begin."""

_MOST_RANKS = 16  # of AttentionUpdate
_ANY = "undefined"
_NONE = "string"  # fits no tensor that an operator has: the input must be absent


class Row(NamedTuple):
    """Types of the places an operator is registered with, and of its outputs, as ort::Element."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


def _decode() -> tuple[Row, ...]:
    """IncreFlashAttention: int8 results where quant_scale2 is given, else the type of query (float16 of int8).

    First the nodes without quant_scale2 in its usual place. Then those with it: a node with lists does not get here,
    for the place of atten_mask holds one of its keys or values, and where that may be taken for a mask, in int8, so is
    the place of pse_shift, which is not int8. What is left are lists, whose results have the type of query.
    """
    places = 13 + 2 * MOST_LISTED
    result = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "int8": "float16"}
    rows = [row_of((query, *(_ANY,) * 8, _NONE, *(_ANY,) * 5), places, out) for query, out in result.items()]
    scales = [("float32", "float32"), ("float16", "float32"), ("int8", "float32")]
    scales += [("bfloat16", "float32"), ("bfloat16", "bfloat16")]
    for query, scale in scales:
        for mask in ("boolean", "int8", "uint8"):
            before = (query, _ANY, _ANY, result[query], mask, "int64", _ANY, "float32", _ANY)
            behind = (scale, scale, result[query], result[query], "int32", "int64")
            rows.append(row_of((*before, *behind), places, "int8"))
    rows += [Row((query, *(_ANY,) * (places - 1)), (out,)) for query, out in result.items()]
    return tuple(rows)


_OF_QUERY = {"float32": "float32", "float16": "float16", "bfloat16": "bfloat16", "int8": "float16"}
"""The type of a result that is not quantised, by query's."""

_SCALE_PLACE = 10  # of quant_scale2 in PromptFlashAttention and, without lists, in FusedInferAttentionScore


def _prompt() -> tuple[Row, ...]:
    """PromptFlashAttention: int8 results where quant_scale2 is given, else the type of query (float16 of int8)."""
    others = (_ANY,) * (_SCALE_PLACE - 1)
    return tuple(
        row_of((query, *others, scale, _ANY), 12, out if scale == _NONE else "int8")
        for scale in (_NONE, _ANY)
        for query, out in _OF_QUERY.items()
    )


def _fused() -> tuple[Row, ...]:
    """FusedInferAttentionScore: as PromptFlashAttention, and softmax_lse in float32.

    Of lists the place of quant_scale2 may hold a key, a value or another input; the places of the lengths, which no key
    has the type of, and of pse_shift tell such nodes from those with a quant_scale2. Their results have query's type.
    """
    places = 29 + 2 * MOST_LISTED
    rows = [
        row_of((query, *(_ANY,) * (_SCALE_PLACE - 1), _NONE, *(_ANY,) * 20), places, out, "float32")
        for query, out in _OF_QUERY.items()
    ]
    for query, out in _OF_QUERY.items():
        for bias in dict.fromkeys((out, "float32")):  # slopes are float32
            before = (query, _ANY, _ANY, bias, _ANY, "int64", "int64")
            rows.append(row_of((*before, *(_ANY,) * 24), places, "int8", "float32"))
    rows += [Row((query, *(_ANY,) * (places - 1)), (out, "float32")) for query, out in _OF_QUERY.items()]
    return tuple(rows)


def _merge() -> tuple[Row, ...]:
    """AttentionUpdate: so many float32 levels, then as many results; the count tells where these begin."""
    places = 2 * _MOST_RANKS
    rows = [Row(("float32",) * places, ("float32", "float32"))]
    for result in ("float16", "bfloat16"):
        for ranks in range(1, _MOST_RANKS + 1):
            rows.append(row_of(("float32",) * ranks + (result,) * ranks, places, result, "float32"))
    return tuple(rows)


def row_of(inputs: tuple[str, ...], places: int, *outputs: str) -> Row:
    """These inputs and none at the other places."""
    return Row(inputs + (_NONE,) * (places - len(inputs)), outputs)


ROWS: Mapping[str, Callable[[], tuple[Row, ...]]] = {
    "IncreFlashAttention": _decode,
    "PromptFlashAttention": _prompt,
    "FusedInferAttentionScore": _fused,
    "AttentionUpdate": _merge,
}
"""By operator."""
