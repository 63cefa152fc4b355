"""The five input layouts, and the common view of all computations: [N, S, D] of each batch entry.

The layouts are BSH (B,S,N*D), SBH (S,B,N*D), BSND (B,S,N,D), BNSD (B,N,S,D) and TND (T,N,D). In TND
the batch entries lie back to back, and cumulative lengths give their ends.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from fa_compiler.op_registry.geometry import BATCH_AXIS, SEQUENCE_AXIS
from fa_compiler.reference.call import Array, Floats, OpCall

RANKS = {"BSH": 3, "SBH": 3, "BSND": 4, "BNSD": 4, "TND": 3}

# Axes that turn the 4-D form of a layout into [B,N,S,D].
_TO_BNSD = {"BSH": (0, 2, 1, 3), "SBH": (1, 2, 0, 3), "BSND": (0, 2, 1, 3), "BNSD": (0, 1, 2, 3)}


@dataclass(frozen=True)
class Side:
    """The positions of the batch entries of the query, or of key and value.

    `lengths` has one length for each batch entry. `total` is S, or in TND T, which may exceed the
    sum of the lengths.
    """

    layout: str
    heads: int
    lengths: tuple[int, ...]
    total: int

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """The first token of each batch entry in a packed (TND) tensor."""
        return tuple(itertools.accumulate(self.lengths, initial=0))[:-1]

    @property
    def longest(self) -> int:
        """The longest length, 0 without any batch entry."""
        return max(self.lengths, default=0)

    def shape(self, width: int) -> tuple[int, ...]:
        """The shape of a tensor of this side with head size `width`."""
        batch, seq, heads = len(self.lengths), self.total, self.heads
        return {
            "BSH": (batch, seq, heads * width),
            "SBH": (seq, batch, heads * width),
            "BSND": (batch, seq, heads, width),
            "BNSD": (batch, heads, seq, width),
            "TND": (seq, heads, width),
        }[self.layout]

    def width(self, call: OpCall, name: str) -> int:
        """The head size of a tensor of this side. Raises ReferenceInputError if its shape does not
        fit the side."""
        shape = call.tensor(name).shape
        width = shape[-1] if shape else 0
        if self.layout in ("BSH", "SBH"):
            width = width // self.heads if self.heads else 0
        if shape != self.shape(width):
            raise call.error(
                name,
                f"shape {list(shape)} does not fit {self.layout} {list(self.shape(width))} "
                f"(batches {len(self.lengths)}, heads {self.heads})",
            )
        return width

    def split(self, tensor: Array, width: int) -> list[Floats]:
        """The batch entries of a tensor, each as [N, S_b, width] in float64."""
        data = tensor.astype(np.float64)
        if self.layout == "TND":
            return [
                data[start : start + length].transpose(1, 0, 2)
                for start, length in zip(self.starts, self.lengths, strict=True)
            ]
        return list(self._four_d(data, width).transpose(_TO_BNSD[self.layout]))

    def join(self, parts: list[Floats], width: int) -> Floats:
        """The inverse of `split`. Rows of a packed tensor that belong to no batch entry are 0."""
        out = np.zeros(self.shape(width))
        if self.heads == 0:  # the head size of such a tensor is unknown in BSH and SBH
            return out
        if self.layout == "TND":
            for start, length, part in zip(self.starts, self.lengths, parts, strict=True):
                out[start : start + length] = part.transpose(1, 0, 2)
        else:
            view = self._four_d(out, width).transpose(_TO_BNSD[self.layout])
            for batch, part in enumerate(parts):
                view[batch] = part
        return out

    def _four_d(self, data: Floats, width: int) -> Floats:
        if self.layout not in ("BSH", "SBH"):
            return data
        return data.reshape(*data.shape[:2], self.heads, width)


def repeat_batch(call: OpCall) -> OpCall:
    """The call with query, key and value of the same batch: a tensor of batch 1 and its rope input
    are repeated.

    This is the extension EXT-BATCH-BROADCAST. TND has no such batch.
    """
    axis = BATCH_AXIS.get(_checked_layout(call))
    if axis is None:
        return call
    sizes = {name: call.tensor(name).shape[axis] for name in ("query", "key", "value")}
    common = next((size for size in sizes.values() if size != 1), 1)
    repeated: dict[str, Array] = {}
    for name, size in sizes.items():
        for part in (name, f"{name}_rope"):
            tensor = call.optional(part)
            if tensor is None or tensor.ndim <= axis:
                continue
            own = tensor.shape[axis]
            if own not in (1, common) or own != size:
                expected = f"1 or {common}" if part == name else f"{size} as {name}"
                raise call.error(
                    part, f"shape {list(tensor.shape)} has batch {own}, expected {expected}"
                )
            shape = (*tensor.shape[:axis], common, *tensor.shape[axis + 1 :])
            repeated[part] = np.broadcast_to(tensor, shape)
    return dataclasses.replace(call, inputs={**call.inputs, **repeated})


def shorten_keys(call: OpCall) -> OpCall:
    """The call with key, value and key_rope shortened to the number of keys that actual_seq_kvlen
    gives outside TND.

    This is the extension EXT-KEY-LENGTH.
    """
    given, axis = call.optional("actual_seq_kvlen"), SEQUENCE_AXIS.get(_checked_layout(call))
    if given is None or axis is None:
        return call
    if given.shape != (1,):
        raise call.error("actual_seq_kvlen", f"shape {list(given.shape)} is not [1]")
    length = int(given[0])
    inputs = {name: array for name, array in call.inputs.items() if name != "actual_seq_kvlen"}
    for name in ("key", "value", "key_rope"):
        tensor = call.optional(name)
        if tensor is None or tensor.ndim <= axis:
            continue
        if not 0 <= length <= tensor.shape[axis]:
            raise call.error(
                "actual_seq_kvlen", f"{length} is not 0 to {tensor.shape[axis]}, the rows of {name}"
            )
        inputs[name] = tensor[(slice(None),) * axis + (slice(length),)]
    return dataclasses.replace(call, inputs=inputs)


def _checked_layout(call: OpCall) -> str:
    """input_layout. Raises ReferenceInputError for an unknown layout, or for a query, key or value
    of another rank."""
    layout = str(call.attrs["input_layout"])
    if layout not in RANKS:
        raise call.error("input_layout", f"{layout!r} is not one of {', '.join(RANKS)}")
    for name in ("query", "key", "value"):
        rank = call.tensor(name).ndim
        if rank != RANKS[layout]:
            raise call.error(name, f"layout {layout} takes rank {RANKS[layout]}, got rank {rank}")
    return layout


def sides(call: OpCall) -> tuple[Side, Side]:
    """The query side and the key/value side of a call, from `input_layout`, `head_num` and the
    shapes."""
    layout = _checked_layout(call)
    query, key = call.tensor("query").shape, call.tensor("key").shape
    heads = int(call.attrs["head_num"])
    if heads <= 0:
        raise call.error("head_num", f"must be positive, got {heads}")
    if layout in ("BSH", "SBH"):
        kv_heads = _folded_kv_heads(call, query[2], key[2], heads)
    else:
        axis = {"BSND": 2, "BNSD": 1, "TND": 1}[layout]
        if query[axis] != heads and query[axis] != 0:
            raise call.error("query", f"has {query[axis]} heads, but head_num is {heads}")
        heads, kv_heads = query[axis], key[axis]
    if kv_heads and heads % kv_heads:
        raise call.error("key", f"{heads} query heads are not a multiple of {kv_heads} key heads")
    if layout == "TND":
        q_lengths, kv_lengths = (
            _packed_lengths(call, "actual_seq_qlen", query[0]),
            _packed_lengths(call, "actual_seq_kvlen", key[0]),
        )
        if len(q_lengths) != len(kv_lengths):
            raise call.error(
                "actual_seq_kvlen", f"has {len(kv_lengths)} batches, the query has {len(q_lengths)}"
            )
        return Side(layout, heads, q_lengths, query[0]), Side(layout, kv_heads, kv_lengths, key[0])
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        if call.optional(name) is not None:
            raise call.error(name, f"has a meaning for layout TND only, not for {layout}")
    batch, seq = BATCH_AXIS[layout], SEQUENCE_AXIS[layout]
    return (
        Side(layout, heads, (query[seq],) * query[batch], query[seq]),
        Side(layout, kv_heads, (key[seq],) * query[batch], key[seq]),
    )


def _folded_kv_heads(call: OpCall, query_hidden: int, key_hidden: int, heads: int) -> int:
    """The number of key heads in BSH and SBH. No attribute gives it; it follows from the query's
    head size."""
    if query_hidden % heads:
        raise call.error(
            "query", f"hidden size {query_hidden} is not a multiple of head_num {heads}"
        )
    width = query_hidden // heads
    if width == 0:
        return heads
    if key_hidden % width:
        raise call.error(
            "key", f"hidden size {key_hidden} is not a multiple of the query's head size {width}"
        )
    return key_hidden // width


def _packed_lengths(call: OpCall, name: str, total: int) -> tuple[int, ...]:
    """Lengths from cumulative values without a leading 0. Trailing zeros are batch entries that are
    not computed."""
    ends = [int(end) for end in call.tensor(name).reshape(-1)]
    while ends and ends[-1] == 0:
        ends.pop()
    if any(after < before for before, after in itertools.pairwise([0, *ends])):
        raise call.error(
            name, f"cumulative values must not decrease (except to trailing zeros), got {ends}"
        )
    if ends and ends[-1] > total:
        raise call.error(
            name, f"the last cumulative value {ends[-1]} exceeds the {total} packed tokens"
        )
    lengths = [after - before for before, after in itertools.pairwise([0, *ends])]
    return tuple(lengths + [0] * (call.tensor(name).size - len(lengths)))
