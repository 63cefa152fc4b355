"""IncreFlashAttention: attention of one token of each batch entry over cached keys and values.

    S = scale*(q K^T) + pse;  masked keys have the score -1e12;  O = softmax(S) V
    with cpu_softcap c: S = c * tanh(scale*(q K^T) / c) + pse

So a row whose keys are all masked gives the mean of the values. An entry without keys gives 0, as
INT8 with any offset, too. The value of a masked key is not read if its probability is 0.

INT8 keys and values with a float query represent (x + antiquant_offset) * antiquant_scale. With an
INT8 query the products are products of integers: S = scale*((q K^T) * dequant_scale1) + pse.
exp(S - max) is replaced by round(exp(S - max) * quant_scale1), saturated to INT8, and O = (P V) *
dequant_scale2 / sum. An INT8 result is round(O * quant_scale2 + quant_offset2), with ties to even,
saturated. NaN becomes -128, as in ONNX Runtime's QuantizeLinear.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from fa_compiler.reference.caches import Caches
from fa_compiler.reference.call import Array, Bools, Floats, OpCall, Output, operator
from fa_compiler.reference.quantised import Integers, saturated
from fa_compiler.reference.softmax import capped, weighted_sum

MASKED = -1e12
"""The score of a masked key."""

_CHAIN = ("dequant_scale1", "quant_scale1", "dequant_scale2")
_FLOATS = ("float16", "bfloat16", "float32", "float64")


@operator("IncreFlashAttention")
def incre_flash_attention(call: OpCall) -> dict[str, Output]:
    """attention_out in query's shape and type; INT8 with quant_scale2, float16 for an INT8 query
    without it."""
    caches = Caches(call)
    dtypes = _dtypes(call, caches)
    scale, softcap = (
        float(call.attrs["scale_value"]),
        float(np.float32(call.attrs.get("cpu_softcap", 0.0))),
    )
    mask, pse = _mask(call, caches), _pse(call, caches)
    integers = Integers(call, _CHAIN) if dtypes.query == np.int8 else None
    antiquant = _antiquant(call, caches) if dtypes.key == np.int8 and integers is None else {}
    query = caches.query().astype(np.float64)
    out = np.zeros((caches.batch, caches.heads, caches.width))
    group = caches.heads // caches.key_heads
    for entry, (first, count) in enumerate(caches.valid):
        if count == 0:
            continue
        key, value = (caches.stored(name, entry).astype(np.float64) for name in ("key", "value"))
        if antiquant:
            key, value = (
                (x + antiquant[n][1]) * antiquant[n][0] for n, x in (("key", key), ("value", value))
            )
        masked = np.zeros(count, np.bool_) if mask is None else mask[entry, first : first + count]
        for head in range(caches.heads):
            with np.errstate(invalid="ignore", over="ignore"):
                scores = key[head // group] @ query[entry, head]
                if integers is not None:
                    scores = scores * integers.dequant_scale1
                scores = capped(scale * scores, softcap)
                if pse is not None:
                    scores = scores + pse[entry % len(pse), head, first : first + count]
            weights, total = _exponentials(np.where(masked, MASKED, scores))
            if integers is not None:
                weights = integers.rounded(weights)
            read = np.logical_not(masked & (weights == 0))
            row = weighted_sum(weights[None, :], value[head // group], read[None, :])[0]
            if integers is not None:
                row = row * integers.dequant_scale2
            out[entry, head] = row / total
    result, dtype = _quantised(call, caches, out), dtypes.out
    return {"attention_out": Output(result.reshape(call.tensor("query").shape), dtype)}


def _exponentials(scores: Floats) -> tuple[Floats, np.float64]:
    with np.errstate(invalid="ignore", over="ignore"):
        weights = np.exp(scores - scores.max())
        return weights, weights.sum()


class _Types(NamedTuple):
    query: np.dtype[np.generic]
    key: np.dtype[np.generic]
    out: np.dtype[np.generic]


def _dtypes(call: OpCall, caches: Caches) -> _Types:
    query = call.tensor("query").dtype
    if query.name not in (*_FLOATS, "int8"):
        raise call.error("query", f"dtype {query.name} is not one of {', '.join(_FLOATS)}, int8")
    key = caches.tensors["key"][0].dtype
    for name in ("key", "value"):
        for tensor in caches.tensors[name]:
            if tensor.dtype != key or key.name not in (query.name, "int8"):
                raise call.error(
                    name,
                    f"dtype {tensor.dtype.name} beside a query of {query.name}, key of {key.name}",
                )
    out = np.dtype(np.float16) if query == np.int8 else query
    return _Types(
        query, key, np.dtype(np.int8) if call.optional("quant_scale2") is not None else out
    )


def _mask(call: OpCall, caches: Caches) -> Bools | None:
    """[B, keys], True for a masked key."""
    mask = call.optional("atten_mask")
    if mask is None:
        return None
    if mask.ndim not in (2, 3, 4) or mask.shape[:-1] != (caches.batch, *(1,) * (mask.ndim - 2)):
        raise call.error(
            "atten_mask",
            f"shape {list(mask.shape)} is not [{caches.batch},keys], with ones between",
        )
    _covers(call, caches, "atten_mask", mask)
    masked: Bools = mask.reshape(caches.batch, -1) != 0
    return masked


def _pse(call: OpCall, caches: Caches) -> Floats | None:
    """The bias [B or 1, N1, keys], or None."""
    pse = call.optional("pse_shift")
    if pse is None:
        return None
    if (
        pse.ndim != 4
        or pse.shape[0] not in (1, caches.batch)
        or pse.shape[1:3] != (caches.heads, 1)
    ):
        raise call.error(
            "pse_shift",
            f"shape {list(pse.shape)} is not [{caches.batch} or 1,{caches.heads},1,keys]",
        )
    _covers(call, caches, "pse_shift", pse)
    return pse[:, :, 0].astype(np.float64)


def _covers(call: OpCall, caches: Caches, name: str, tensor: Array) -> None:
    needed = max(caches.room)
    if tensor.shape[-1] < needed:
        raise call.error(name, f"has {tensor.shape[-1]} columns for {needed} keys")


def _antiquant(call: OpCall, caches: Caches) -> dict[str, tuple[Floats, Floats]]:
    """Scale and offset of key and of value, each [1,1,1] or [N2,1,D]."""
    scale, offset = call.tensor("antiquant_scale"), call.optional("antiquant_offset")
    if offset is not None and offset.shape != scale.shape:
        raise call.error(
            "antiquant_offset",
            f"shape {list(offset.shape)} is not {list(scale.shape)} as the scale",
        )
    n2, d = caches.key_heads, caches.width
    if scale.shape not in ((2,), (2, n2, 1, d), (2, n2, d), (2, n2 * d)):
        raise call.error("antiquant_scale", f"shape {list(scale.shape)} is not [2] or [2,{n2},{d}]")
    form = (2, 1, 1, 1) if scale.shape == (2,) else (2, n2, 1, d)
    scales = scale.astype(np.float64).reshape(form)
    offsets = np.zeros(form) if offset is None else offset.astype(np.float64).reshape(form)
    return {name: (scales[index], offsets[index]) for index, name in enumerate(("key", "value"))}


def _quantised(call: OpCall, caches: Caches, out: Floats) -> Floats:
    scale, offset = call.optional("quant_scale2"), call.optional("quant_offset2")
    if scale is None:
        return out
    sizes = (1, caches.heads * caches.width)
    if scale.size not in sizes or (offset is not None and offset.size != scale.size):
        raise call.error(
            "quant_scale2",
            f"has {scale.size} numbers (its offset as many), expected 1 or {sizes[1]}",
        )
    form = (1, 1) if scale.size == 1 else (caches.heads, caches.width)
    result: Floats = out * scale.astype(np.float64).reshape(form)
    if offset is not None:
        result = result + offset.astype(np.float64).reshape(form)
    for entry, (_, count) in enumerate(caches.valid):
        if count == 0:
            result[entry] = 0.0
    return result if call.exact else saturated(result)
