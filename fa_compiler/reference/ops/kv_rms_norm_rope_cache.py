"""KvRmsNormRopeCache: normalised and rotated keys, written into caches.

    latent = x / sqrt(mean(x^2) + epsilon) gamma
    key = (e cos1 - o sin1, o cos2 + e sin2)        e and o are the elements of even and of odd
                                                    places, and cos1 and cos2 the halves of cos

What goes into a cache of INT8 is multiplied by a scale, moved by an offset, rounded to even and
saturated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fa_compiler.op_registry.ops.kv_rms_norm_rope_cache import BLOCKS, NORM, SORTED
from fa_compiler.reference.call import Array, Floats, OpCall, Output, operator
from fa_compiler.reference.ops.rms_norm import reciprocal


@operator("KvRmsNormRopeCache")
def kv_rms_norm_rope_cache(call: OpCall) -> dict[str, Output]:
    """Both caches after the call, and k_rope and c_kv [B,N,S,D], which hold 0 if the call does not
    ask for them."""
    kv, value = call.tensor("kv"), call.optional("v")
    key, latent = _rows(call)
    shown = call.attrs["is_output_kv"]
    names = (("k_cache", key, "k_rope"), ("ckv_cache", latent, "c_kv"))
    found = {cache: _written(call, cache, rows, name) for cache, rows, name in names}
    if (
        value is not None
        and call.attrs["cache_mode"] == NORM
        and call.optional("k_rope_scale") is None
    ):
        shown = shown and call.optional("c_kv_scale") is not None
    return found | {
        name: Output(rows if shown else np.zeros_like(rows), kv.dtype) for _, rows, name in names
    }


def _rows(call: OpCall) -> tuple[Floats, Floats]:
    """What goes into k_cache and into ckv_cache, [B,N,S,D], before it is quantised."""
    kv, gamma = (call.tensor(name).astype(np.float64) for name in ("kv", "gamma"))
    value, width = call.optional("v"), call.tensor("cos").shape[-1]
    normalised = kv[..., : len(gamma)]
    normalised = normalised * reciprocal(normalised, 1, call.attrs["epsilon"]) * gamma
    if value is None:
        return _rotated(call, kv[..., len(gamma) :]), normalised
    turned = _rotated(call, normalised[..., :width])
    return np.concatenate([turned, normalised[..., width:]], axis=-1), value.astype(np.float64)


def _rotated(call: OpCall, x: Floats) -> Floats:
    """Pairs of neighbours, rotated; the first numbers of all pairs stand in front."""
    cos, sin = (call.tensor(name).astype(np.float64) for name in ("cos", "sin"))
    even, odd = x[..., ::2], x[..., 1::2]
    return np.concatenate([even, odd], -1) * cos + np.concatenate([-odd, even], -1) * sin


def _written(call: OpCall, name: str, rows: Floats, output: str) -> Output:
    """A cache with the rows in their places."""
    given = call.tensor(name)
    cache = given.astype(np.float64, order="C")
    pages = _by_token(call, cache, given.dtype)
    for page, place, row in _places(call, pages, _quantised(call, given.dtype, rows, output)):
        pages[page, place] = row
    return Output(cache, given.dtype)


def _by_token(call: OpCall, cache: Floats, dtype: np.dtype[Any]) -> Floats:
    """A view of a cache with its pages, or batch entries, and their tokens in front."""
    mode = call.attrs["cache_mode"]
    if mode == NORM:
        return cache.transpose(0, 2, 1, 3)
    if mode not in SORTED:
        return cache
    pages, size, heads, width = cache.shape
    part = 32 if dtype == np.int8 else 16
    return cache.reshape(pages, heads, width // part, size, part).transpose(0, 3, 1, 2, 4)


def _quantised(call: OpCall, dtype: np.dtype[Any], rows: Floats, output: str) -> Floats:
    """Rows as a cache of a type holds them."""
    scale, offset = (call.optional(f"{output}_{word}") for word in ("scale", "offset"))
    if scale is None:
        return rows
    if dtype != np.int8:
        raise call.error(
            f"{output}_scale", f"how a cache of {dtype} is rounded is not known, expected int8"
        )
    moved = rows * _beside_tokens(scale) + (0 if offset is None else _beside_tokens(offset))
    return np.clip(np.rint(moved), -128, 127)


def _beside_tokens(numbers: Array) -> Floats:
    """Numbers of heads and of elements, with an axis for the tokens."""
    return np.expand_dims(np.atleast_2d(numbers.astype(np.float64)), 1)


def _places(call: OpCall, pages: Floats, rows: Floats) -> Iterator[tuple[int, int, Floats]]:
    """The page and the place in it of each token that is written, with the row in the shape of the
    place."""
    index, mode, size = call.tensor("index"), call.attrs["cache_mode"], pages.shape[1]
    batch, _, tokens, _ = rows.shape
    step = size if mode in BLOCKS else 1
    entries = index.reshape(batch, -(-tokens // step))
    for entry in range(batch):
        for token in range(tokens):
            found = int(entries[entry, token // step])
            if found < 0:
                continue
            row = rows[entry, :, token].reshape(pages.shape[2:])
            if mode == NORM:
                yield entry, found, row
            else:
                yield found // size, token % step if mode in BLOCKS else found % size, row
