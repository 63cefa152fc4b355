"""How the ranks compute one CacheAttention together.

Every rank has all queries, and attends with them to its own keys. It sends the result of each row
to all other ranks, with the maximum and the sum of the row's softmax. Every rank then merges the
results of all ranks, to the same numbers:

    lse_r  = max_r - top + log(sum_r)           top is the largest max_r: the differences keep their
                                                digits
    result = sum over r of result_r exp(lse_r) / sum over r of exp(lse_r)
                                                (AttentionUpdate)

A sink takes part as a result of zeros, whose lse is that of the sink. A part that excludes all keys
of a row has no weight. A result or a statistic may be NaN or infinite, or a row may have no key at
all and a result that is not 0. The ranks then gather the keys and values of this attention, and
compute it as one process does. They decide alike, because all of them know all statistics.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fa_compiler.lowering.ort import eager
from fa_compiler.op_registry.collectives import FORWARD_OUTPUTS, STATISTICS
from fa_compiler.op_registry.geometry import SEQUENCE_AXIS, UNLIMITED
from fa_compiler.parallel.attend import LARGEST, sizes_of, without_key
from fa_compiler.parallel.communicator import Array, Communicator, as_bytes
from fa_compiler.parallel.parts import Parts, gathered

KEYS = ("key", "value", "key_rope")
QUERIES = ("query", "query_rope")

ROWS = 256
"""The most rows of one call: a mask of rows and keys is made for each call."""

MOST_MERGED = 16
"""The most results that one AttentionUpdate merges."""


@dataclass(frozen=True)
class Partial:
    """Results of rows whose softmax was over some of their keys: out [rows, Dv], top and total
    [rows] in float32.

    The rows are those of [B, N, S]. `top` is their maximum and `total` their sum; of a row without
    a key they are -LARGEST and LARGEST.
    """

    out: Array
    top: Array
    total: Array

    @property
    def message(self) -> Array:
        """The bytes of all three."""
        return np.concatenate(
            [as_bytes(np.ascontiguousarray(part)) for part in (self.top, self.total, self.out)]
        )

    def read(self, message: Array) -> Partial:
        """The partial result of another rank, which has the same shapes."""
        size = self.top.nbytes
        top, total = (message[start : start + size].view(np.float32) for start in (0, size))
        return Partial(message[2 * size :].view(self.out.dtype).reshape(self.out.shape), top, total)

    @property
    def is_finite(self) -> bool:
        """Is everything a finite number?"""
        return all(bool(np.isfinite(part).all()) for part in (self.out, self.top, self.total))


def cache_attention(
    communicator: Communicator, parts: Parts, attrs: Mapping[str, Any], inputs: Mapping[str, Array]
) -> Array:
    """attention_out, whole, in the layout of query.

    `attrs` and `inputs` are those of the node, by name (op_registry/collectives.py); `parts`
    divides the keys. Raises RankError, and KernelError if the kernel does not take the call.
    """
    call = _Call.of(attrs, inputs, parts.length)
    keys = {name: inputs[name] for name in KEYS if name in inputs}
    own = call.partial(keys, parts.positions(communicator.rank))
    message = own.message
    every = [
        own.read(sent)
        for sent in communicator.gather_all(message, [message.shape] * communicator.size)
    ]
    out = merged(every, call.sink_levels, call.empty_rows)
    if out is None:
        axis = SEQUENCE_AXIS[call.layout]
        whole = {name: gathered(communicator, parts, tensor, axis) for name, tensor in keys.items()}
        out = call.whole(whole)
    return _from_heads(out.reshape(call.shape), call.layout)


def merged(every: Sequence[Partial], sink: Array | None, empty_rows: str) -> Array | None:
    """The results of all keys, [rows, Dv]; None where they do not follow from the partial ones.

    `sink` is the score of each row's sink. `empty_rows` is cpu_empty_rows.
    """
    if not all(partial.is_finite for partial in every):
        return None
    levels = [np.where(without_key(partial.total), -np.inf, partial.top) for partial in every]
    top = np.max(levels, axis=0)
    if (top == -np.inf).any() and empty_rows not in ("", "zero"):
        return None
    top = np.where(top == -np.inf, np.float32(0), top)
    with np.errstate(over="ignore"):  # the difference of the lowest and the largest number
        lse = [
            level - top + np.log(partial.total)
            for level, partial in zip(levels, every, strict=True)
        ]
        results = [partial.out for partial in every]
        if sink is not None:
            lse, results = [*lse, sink - top], [*results, np.zeros_like(results[0])]
    while len(results) > 1:
        groups = range(0, len(results), MOST_MERGED)
        joined = [
            _updated(lse[at : at + MOST_MERGED], results[at : at + MOST_MERGED]) for at in groups
        ]
        results, lse = (
            [update["output"] for update in joined],
            [update["lse_m"] for update in joined],
        )
    return results[0]


def _updated(lse: Sequence[Array], results: Sequence[Array]) -> dict[str, Array]:
    inputs = {"lse": [level.astype(np.float32) for level in lse], "go": list(results)}
    return eager.run("AttentionUpdate", inputs, {"update_type": 1, "sp": len(results)})


@dataclass(frozen=True)
class _Call:
    """The attention of one rank: all that does not depend on which keys it has. `length` is the
    number of all keys."""

    attrs: Mapping[str, Any]
    layout: str
    heads: int
    length: int
    query: Mapping[str, Array]
    value_width: int
    batch: int
    mask: Array | None
    bias: Array | None
    sink: Array | None

    @staticmethod
    def of(attrs: Mapping[str, Any], inputs: Mapping[str, Array], length: int) -> _Call:
        sizes = sizes_of(attrs, inputs)
        for name in ("atten_mask", "real_shift"):
            if name in inputs and inputs[name].shape[-1] not in (1, length):
                found = f"{name} has {inputs[name].shape[-1]} columns, and there are {length} keys"
                raise eager.KernelError(f"FlashAttentionScore: {found}")
        return _Call(
            attrs=attrs,
            layout=sizes.layout,
            heads=int(attrs["head_num"]),
            length=length,
            query={name: inputs[name] for name in QUERIES if name in inputs},
            value_width=int(sizes.dv or 0),
            batch=int(sizes.b or 0),
            mask=inputs.get("atten_mask"),
            bias=inputs.get("real_shift"),
            sink=inputs.get("sink"),
        )

    @property
    def rows(self) -> int:
        """The number of query rows."""
        return int(self.query["query"].shape[SEQUENCE_AXIS[self.layout]])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape [B, N, S, Dv] of the results."""
        return self.batch, self.heads, self.rows, self.value_width

    @property
    def empty_rows(self) -> str:
        """What a row without a key gives."""
        return str(self.attrs.get("cpu_empty_rows", ""))

    @property
    def sink_levels(self) -> Array | None:
        """The score of the sink of each row; None without a sink."""
        if self.sink is None:
            return None
        each = self.sink.reshape(1, self.heads, 1).astype(np.float32)
        return np.broadcast_to(each, self.shape[:3]).reshape(-1)

    def partial(self, keys: Mapping[str, Array], positions: Array) -> Partial:
        """The results of all rows for keys of these positions, which increase."""
        attrs = {name: value for name, value in self.attrs.items() if name != "cpu_nan_rows"}
        found = self._run(
            {**attrs, "cpu_empty_rows": "zero"}, keys, positions, "cpu_mask_value" not in attrs
        )
        top, total = (found[name][..., 0].reshape(-1) for name in STATISTICS)
        return Partial(found["attention_out"].reshape(-1, self.value_width), top, total)

    def whole(self, keys: Mapping[str, Array]) -> Array:
        """The results of all rows for all keys, as one process has them."""
        inputs = keys if self.sink is None else {**keys, "sink": self.sink}
        return self._run(self.attrs, inputs, np.arange(self.length), cut=False)["attention_out"]

    def _run(
        self, attrs: Mapping[str, Any], keys: Mapping[str, Array], positions: Array, cut: bool
    ) -> dict[str, Array]:
        """attention_out [B, N, S, Dv], softmax_max and softmax_sum [B, N, S, ..]. With `cut`, keys
        that the band excludes for all rows of a call are left out."""
        found = [self._run_block(attrs, keys, positions, block, cut) for block in self._blocks()]
        return {
            name: np.concatenate([outputs[name] for outputs in found], axis=2)
            for name in FORWARD_OUTPUTS
        }

    def _blocks(self) -> list[slice]:
        """The rows of each call; one call without rows where there are none."""
        return [
            slice(start, min(start + ROWS, self.rows))
            for start in range(0, max(self.rows, 1), ROWS)
        ]

    def _nothing(self, block: slice) -> dict[str, Array]:
        """The results of rows without keys."""
        rows = (self.batch, self.heads, block.stop - block.start)
        return {
            "attention_out": np.zeros((*rows, self.value_width), self.query["query"].dtype),
            "softmax_max": np.full((*rows, 1), -LARGEST, np.float32),
            "softmax_sum": np.full((*rows, 1), LARGEST, np.float32),
        }

    def _run_block(
        self,
        attrs: Mapping[str, Any],
        keys: Mapping[str, Array],
        positions: Array,
        block: slice,
        cut: bool,
    ) -> dict[str, Array]:
        """`_run` for some of the rows."""
        if block.start == block.stop:
            return self._nothing(block)
        axis = SEQUENCE_AXIS[self.layout]
        pre, after, from_end = (
            int(attrs[name]) for name in ("pre_tockens", "next_tockens", "sparse_mode")
        )
        rows = np.arange(block.start, block.stop) + (self.length - self.rows if from_end else 0)
        if cut:
            place = slice(*np.searchsorted(positions, (rows[0] - pre, rows[-1] + after + 1)))
            if place.stop - place.start < len(positions):
                positions = positions[place]
                keys = {
                    name: each if name == "sink" else along(each, axis, place)
                    for name, each in keys.items()
                }
        if not len(positions):
            return self._nothing(block)
        mask = _columns(self.mask, block, positions)
        if positions[0] < rows[-1] - pre or positions[-1] > rows[0] + after:
            distance = positions[None] - rows[:, None]
            band = (distance < -pre) | (distance > after)
            mask = band if mask is None else mask.astype(np.bool_) | band
        if mask is None and attrs.get("cpu_masked_bias"):  # this attribute goes with a mask
            mask = np.zeros((1, 1), np.bool_)
        query = {name: along(each, axis, block) for name, each in self.query.items()}
        bias = _columns(self.bias, block, positions)
        unlimited = {"sparse_mode": 0, "pre_tockens": UNLIMITED, "next_tockens": UNLIMITED}
        inputs = {**query, **keys, "atten_mask": mask, "real_shift": bias}
        found = eager.run("FlashAttentionScore", inputs, {**attrs, **unlimited}, FORWARD_OUTPUTS)
        return {
            **found,
            "attention_out": _by_heads(found["attention_out"], self.layout, self.heads),
        }


def along(array: Array, axis: int, place: slice) -> Array:
    """A part of an array along an axis."""
    return array[(*(slice(None),) * axis, place)]


def _columns(array: Array | None, rows: slice, positions: Array) -> Array | None:
    """The part of a mask or bias for some rows and for the keys of these positions; a size of 1
    stays."""
    if array is None:
        return None
    array = array if array.shape[-2] == 1 else array[..., rows, :]
    return array if array.shape[-1] == 1 else np.ascontiguousarray(array[..., positions])


def _by_heads(array: Array, layout: str, heads: int) -> Array:
    """A result as [B, N, S, D]."""
    if layout == "BNSD":
        return array
    if layout == "BSND":
        return array.transpose(0, 2, 1, 3)
    split = array.reshape(*array.shape[:2], heads, -1)
    return split.transpose(0, 2, 1, 3) if layout == "BSH" else split.transpose(1, 2, 0, 3)


def _from_heads(array: Array, layout: str) -> Array:
    """The inverse of `_by_heads`."""
    if layout == "BNSD":
        return array
    if layout == "SBH":
        return np.ascontiguousarray(array.transpose(2, 0, 1, 3)).reshape(
            array.shape[2], array.shape[0], -1
        )
    moved = np.ascontiguousarray(array.transpose(0, 2, 1, 3))
    return moved if layout == "BSND" else moved.reshape(*moved.shape[:2], -1)
