"""The keys and values of a prompt as [N2, L, D] of each batch entry in float64, for every form of
storage.

    one tensor   in the layout of query; in TND and NTD the entries lie back to back
    a list       of tensors of batch 1, one for each entry
    pages        that block_table names: [blocks,block_size,N2*D], [blocks,N2,block_size,D] or
                 [blocks,N2,D/16,block_size,16] (for INT8: D/32 and 32)
    a prefix     key_shared_prefix and value_shared_prefix, before the keys of every entry
    INT8         with a floating-point query, an element represents (x + offset) * scale

Entry b has actual_seq_lengths_kv[b] keys. In TND and NTD the lengths are cumulative, but not with
pages. With kv_padding_size the keys end that many positions before the end of their storage; an
entry that does not fit has no keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from fa_compiler.reference.call import Array, Floats, OpCall
from fa_compiler.reference.quantised import FLOATS

RANKS = {"BSH": 3, "BSND": 4, "BNSD": 4, "TND": 3, "NTD": 3, "NSD": 3}
"""The layouts of query, key and value, and their ranks."""

_ANTIQUANT = ("antiquant_scale", "antiquant_offset")
_KEY_ANTIQUANT = ("key_antiquant_scale", "key_antiquant_offset")
_VALUE_ANTIQUANT = ("value_antiquant_scale", "value_antiquant_offset")
_PAGE_UNITS = {"int8": 32}


class Span(NamedTuple):
    """The positions [first, first + size) of a sequence."""

    first: int
    size: int


class Sizes(NamedTuple):
    """The properties of a call that follow from its attributes and its query."""

    layout: str
    key_heads: int
    width: int
    batch: int
    query_type: np.dtype[np.generic]

    @property
    def packed(self) -> bool:
        """Whether the batch entries lie back to back."""
        return "T" in self.layout


def typed(call: OpCall, name: str, *types: str) -> Array | None:
    """An optional tensor. Raises ReferenceInputError if it has none of these types."""
    tensor = call.optional(name)
    if tensor is not None and tensor.dtype.name not in types:
        raise call.error(name, f"dtype {tensor.dtype} is not {' or '.join(types)}")
    return tensor


def vector(call: OpCall, name: str) -> Array | None:
    """An optional tensor. Raises ReferenceInputError unless it is int64 and of rank 1."""
    tensor = typed(call, name, "int64")
    if tensor is not None and tensor.ndim != 1:
        raise call.error(name, f"shape {list(tensor.shape)} is not of rank 1")
    return tensor


def split(call: OpCall, name: str, array: Array, layout: str, heads: int) -> Array:
    """A tensor in a layout as [B,N,S,D]. In TND, NTD and NSD, B is 1."""
    if array.ndim != RANKS[layout]:
        raise call.error(name, f"rank {array.ndim} is not that of {layout}")
    if layout == "BSH":
        if array.shape[2] % heads:
            raise call.error(name, f"the width {array.shape[2]} is not a multiple of {heads} heads")
        array = array.reshape(*array.shape[:2], heads, array.shape[2] // heads)
    if layout == "TND":
        array = array.transpose(1, 0, 2)
    result: Array = array
    if layout in ("TND", "NTD", "NSD"):
        result = array[None]
    elif layout != "BNSD":
        result = array.transpose(0, 2, 1, 3)
    if result.shape[1] != heads:
        raise call.error(name, f"has {result.shape[1]} heads, expected {heads}")
    return result


def cumulative(call: OpCall, name: str, total: int) -> list[Span]:
    """The sequences of a packed tensor of `total` tokens, from their cumulative lengths."""
    vector(call, name)
    ends = [0, *(int(end) for end in call.tensor(name))]
    if any(end < before for before, end in itertools.pairwise(ends)) or ends[-1] > total:
        raise call.error(name, f"{ends[1:]} are not cumulative lengths of {total} tokens")
    return [Span(before, end - before) for before, end in itertools.pairwise(ends)]


def lengths(call: OpCall, name: str, room: list[int]) -> list[int]:
    """The length of each entry. A single given length is for all entries; lengths after the last
    entry are ignored."""
    given = vector(call, name)
    if given is None:
        return room
    numbers = [int(number) for number in given]
    numbers = numbers * len(room) if len(numbers) == 1 else numbers[: len(room)]
    if len(numbers) < len(room) or any(
        not 0 <= size <= most for size, most in zip(numbers, room, strict=True)
    ):
        raise call.error(
            name, f"{numbers} are not {len(room)} lengths from 0 to {max(room, default=0)}"
        )
    return numbers


class Keys:
    """The keys and values of a call. Raises ReferenceInputError for invalid inputs."""

    def __init__(self, call: OpCall, sizes: Sizes) -> None:
        self.call, self.sizes = call, sizes
        self.table = typed(call, "block_table", "int32")
        self.tensors = {name: self._list(name) for name in ("key", "value")}
        self.listed = len(self.tensors["key"]) > 1
        self._check_lists()
        self.widths = {name: self._width(name) for name in self.tensors}
        if self.widths["key"] != sizes.width:
            raise call.error(
                "key", f"has the head size {self.widths['key']}, expected {sizes.width} as query"
            )
        self.room = self._room("key")
        if self.room != self._room("value"):
            raise call.error("value", "key and value differ in their lengths")
        self.spans = self._spans()
        self._check_table()
        self.prefix = self._prefix()
        self.shared = self._shared()
        self.antiquant = self._antiquant()

    @property
    def columns(self) -> int:
        """The number of columns that a mask or bias for all scores needs."""
        if self.sizes.packed and self.table is None:
            return max((size for _, size in self.spans), default=0)
        return self.shared + max(self.room, default=0)

    def count(self, entry: int) -> int:
        """The number of keys of an entry, including the prefix."""
        return self.shared + self.spans[entry].size

    def column(self, entry: int) -> int:
        """The column of a mask or bias for the first key of an entry."""
        return 0 if self.sizes.packed else self.spans[entry].first

    def fetch(self, name: str, entry: int) -> Floats:
        """key, value or key_rope of an entry as [N2, L, D]."""
        first, size = self.spans[entry]
        tensors = self.tensors.get(name) or [self.call.tensor(name)]
        if self.table is not None:
            stored = self._pages(name, tensors[0], entry, size)
        else:
            tensor = self._split(name, tensors[entry if self.listed else 0])
            stored = tensor[0 if self.listed or self.sizes.packed else entry][
                :, first : first + size
            ]
        numbers = self._numbers(name, stored, entry, first)
        if name not in self.prefix:
            return numbers
        return np.concatenate(
            [self._numbers(name, self.prefix[name][:, : self.shared], entry, 0), numbers], axis=1
        )

    def _numbers(self, name: str, stored: Array, entry: int, first: int) -> Floats:
        numbers: Floats = stored.astype(np.float64)
        if name not in self.antiquant:
            return numbers
        scale, offset = self.antiquant[name]
        if scale.ndim == 2:  # by token
            columns = slice(first, first + stored.shape[1])
            scale, offset = scale[entry, columns, None], offset[entry, columns, None]
        return (numbers + offset) * scale

    def _list(self, name: str) -> list[Array]:
        value = self.call.inputs.get(name)
        tensors = [value] if isinstance(value, np.ndarray) else list(value or [])
        if not tensors or not all(isinstance(tensor, np.ndarray) for tensor in tensors):
            raise self.call.error(name, "this input is needed and absent")
        return tensors

    def _check_lists(self) -> None:
        sizes, call = self.sizes, self.call
        keys, values = self.tensors["key"], self.tensors["value"]
        if len(keys) != len(values):
            raise call.error("value", f"has {len(values)} tensors, expected {len(keys)} as key")
        if self.listed and (sizes.packed or self.table is not None or len(keys) != sizes.batch):
            raise call.error(
                "key",
                f"a list of {len(keys)} tensors for a batch of {sizes.batch} in {sizes.layout}",
            )
        for name, tensors in self.tensors.items():
            for tensor in tensors:
                self._check_tensor(name, tensor)

    def _check_tensor(self, name: str, tensor: Array) -> None:
        """A tensor of keys or values has the type of query, or INT8 with scales. It has the type of
        the first key and the batch size of the call."""
        sizes, call, first = self.sizes, self.call, self.tensors["key"][0]
        # PromptFlashAttention does not have the attribute key_antiquant_mode.
        scaled = sizes.query_type != np.int8 and "key_antiquant_mode" in call.attrs
        if tensor.dtype != sizes.query_type and not (scaled and tensor.dtype == np.int8):
            problem = f"dtype {tensor.dtype} beside a query of {sizes.query_type}; 4-bit keys are not computed"
            raise call.error(name, problem)
        if tensor.dtype != first.dtype:
            raise call.error(
                name, f"dtype {tensor.dtype} differs from {first.dtype} of the first key"
            )
        if self.table is None and not sizes.packed:
            batch = self._split(name, tensor).shape[0]
            if batch != (1 if self.listed else sizes.batch):
                raise call.error(name, f"has the batch {batch} in {sizes.layout}")

    def _split(self, name: str, tensor: Array) -> Array:
        return split(self.call, name, tensor, self.sizes.layout, self.sizes.key_heads)

    def _width(self, name: str) -> int:
        """The head size. Raises ReferenceInputError unless it is the same for all tensors."""
        tensors = self.tensors[name]
        if self.table is None:
            found = {self._split(name, tensor).shape[3] for tensor in tensors}
            if len(found) > 1:
                raise self.call.error(name, f"holds tensors of the head sizes {sorted(found)}")
            return int(found.pop())
        return self.page_width(name, tensors[0])

    def page_width(self, name: str, cache: Array) -> int:
        """The head size of a tensor of pages. Raises ReferenceInputError for an invalid shape."""
        size, unit = int(self.call.attrs["block_size"]), _PAGE_UNITS.get(cache.dtype.name, 16)
        shape, heads = cache.shape, self.sizes.key_heads
        forms = {
            3: 0 < size < 2**31 and shape[1:2] == (size,) and shape[-1] % heads == 0,
            4: shape[1:3] == (heads, size),
            5: shape[1:2] == (heads,) and shape[3:] == (size, unit),
        }
        if not forms.get(cache.ndim):
            by_unit = f"[blocks,{heads},D/{unit},{size},{unit}]"
            expected = f"[blocks,{size},{heads}*D], [blocks,{heads},{size},D] or {by_unit}"
            raise self.call.error(name, f"shape {list(shape)} is not {expected}")
        return int({3: shape[-1] // heads, 4: shape[-1], 5: shape[2] * shape[-1]}[cache.ndim])

    def _check_table(self) -> None:
        """Raise ReferenceInputError if the table names blocks that do not exist, or too few for the
        keys."""
        if self.table is None:
            return
        size, blocks = (
            int(self.call.attrs["block_size"]),
            min(len(tensors[0]) for tensors in self.tensors.values()),
        )
        for entry, (_, count) in enumerate(self.spans):
            used = self.table[entry, : -(-count // size)]
            if len(used) and not 0 <= used.min() <= used.max() < blocks:
                raise self.call.error(
                    "block_table", f"row {entry}, {used.tolist()}, names blocks that are not there"
                )

    def _pages(self, name: str, cache: Array, entry: int, count: int) -> Array:
        assert self.table is not None
        heads, size = self.sizes.key_heads, int(self.call.attrs["block_size"])
        width = self.page_width(name, cache)
        used = self.table[entry, : -(-count // size)]
        pages = cache[used]
        if cache.ndim == 3:
            pages = pages.reshape(len(used), size, heads, width).transpose(2, 0, 1, 3)
        elif cache.ndim == 4:
            pages = pages.transpose(1, 0, 2, 3)
        else:
            pages = pages.transpose(1, 0, 3, 2, 4)
        return pages.reshape(heads, len(used) * size, width)[:, :count]

    def _room(self, name: str) -> list[int]:
        """The capacity of each entry in tokens; in a packed tensor, the number of all tokens."""
        if self.table is not None:
            if self.table.ndim != 2 or len(self.table) != self.sizes.batch:
                expected = f"[{self.sizes.batch},blocks of an entry]"
                raise self.call.error(
                    "block_table", f"shape {list(self.table.shape)} is not {expected}"
                )
            return [self.table.shape[1] * int(self.call.attrs["block_size"])] * self.sizes.batch
        found = [self._split(name, tensor).shape[2] for tensor in self.tensors[name]]
        return found if self.listed else found * self.sizes.batch

    def _spans(self) -> list[Span]:
        call, name = self.call, "actual_seq_lengths_kv"
        if (self.table is not None or self.sizes.packed) and call.optional(name) is None:
            raise call.error(
                name, f"absent with {'pages' if self.table is not None else self.sizes.layout}"
            )
        padding = vector(call, "kv_padding_size")
        if padding is not None:
            self._check_padding("kv_padding_size", padding, name)
        if self.sizes.packed and self.table is None:
            spans = cumulative(call, name, self.room[0] if self.room else 0)
            if len(spans) != self.sizes.batch:
                raise call.error(
                    name,
                    f"has {len(spans)} lengths, expected {self.sizes.batch} as actual_seq_lengths",
                )
            return spans
        counts = lengths(call, name, self.room)
        if padding is None:
            return [Span(0, count) for count in counts]
        padding_size = max(0, int(padding.reshape(-1)[0]))
        firsts = [
            room - padding_size - count for room, count in zip(self.room, counts, strict=True)
        ]
        return [
            Span(first, size) if first >= 0 else Span(0, 0)
            for first, size in zip(firsts, counts, strict=True)
        ]

    def _check_padding(self, name: str, padding: Array, needed: str) -> None:
        if padding.shape != (1,):
            raise self.call.error(name, f"shape {list(padding.shape)} is not [1]")
        if self.sizes.packed or self.table is not None or self.listed:
            raise self.call.error(name, "given with a packed layout, pages or a list")
        if self.call.optional(needed) is None:
            raise self.call.error(needed, f"absent beside {name}")

    def _prefix(self) -> dict[str, Array]:
        """The prefix of key and value as [N2, S, D]; empty if there is no prefix."""
        given = {name: self.call.optional(f"{name}_shared_prefix") for name in ("key", "value")}
        if all(tensor is None for tensor in given.values()):
            return {}
        prefix = {name: self._prefix_of(name, tensor) for name, tensor in given.items()}
        if prefix["key"].shape[1] != prefix["value"].shape[1]:
            raise self.call.error(
                "value_shared_prefix", "key_shared_prefix and value_shared_prefix differ in length"
            )
        return prefix

    def _prefix_of(self, name: str, tensor: Array | None) -> Array:
        """The prefix of key or of value as [N2, S, D]."""
        full, integers = f"{name}_shared_prefix", self.sizes.query_type == np.int8
        if tensor is None:
            raise self.call.error(full, "is absent, expected with the prefix of the other")
        if self.sizes.packed or self.table is not None or self.listed or integers:
            raise self.call.error(
                full, "given with a packed layout, pages, a list or an INT8 query"
            )
        if self.call.optional("kv_padding_size") is not None:
            raise self.call.error(full, "given beside kv_padding_size")
        if tensor.dtype != self.tensors["key"][0].dtype:
            raise self.call.error(full, f"dtype {tensor.dtype} is not that of key")
        split_tensor = self._split(full, tensor)
        if split_tensor.shape[0] != 1 or split_tensor.shape[3] != self.widths[name]:
            raise self.call.error(full, f"shape {list(tensor.shape)} is not one entry as {name}")
        entry: Array = split_tensor[0]
        return entry

    def _shared(self) -> int:
        if not self.prefix:
            return 0
        prefix_length = int(self.prefix["key"].shape[1])
        given = vector(self.call, "actual_shared_prefix_len")
        if given is None:
            return prefix_length
        size = int(given.reshape(-1)[0])
        if given.shape != (1,) or not 0 <= size <= prefix_length:
            raise self.call.error(
                "actual_shared_prefix_len",
                f"{given.tolist()} is not a length from 0 to {prefix_length}",
            )
        return size

    def _antiquant(self) -> dict[str, tuple[Floats, Floats]]:
        """Scale and offset of INT8 keys and values with a floating-point query.

        They are [B,S] if they are by token; otherwise they broadcast to [N2,1,D].
        """
        call = self.call
        quantised = self.sizes.query_type != np.int8 and self.tensors["key"][0].dtype == np.int8
        names = itertools.chain(*zip(_ANTIQUANT, _KEY_ANTIQUANT, _VALUE_ANTIQUANT, strict=True))
        given = {
            name: tensor for name in names if (tensor := typed(call, name, *FLOATS)) is not None
        }
        if not quantised:
            for name in given:
                raise call.error(
                    name, "given, expected none: keys are not INT8 beside a query of floats"
                )
            return {}
        if not any(self.count(entry) for entry in range(self.sizes.batch)):
            return {}  # no keys: scales by token would be empty
        if not self._have_own_scales(given):
            scales, offsets = self._common_scales(given)
            mode = int(call.attrs["antiquant_mode"])
            return {
                "key": self._scale(_ANTIQUANT, mode, "key", scales[0], offsets[0]),
                "value": self._scale(_ANTIQUANT, mode, "value", scales[1], offsets[1]),
            }
        (key_scale, key_offset), (value_scale, value_offset) = _KEY_ANTIQUANT, _VALUE_ANTIQUANT
        key_mode, value_mode = self._own_modes()
        return {
            "key": self._scale(
                _KEY_ANTIQUANT, key_mode, "key", given[key_scale], given.get(key_offset)
            ),
            "value": self._scale(
                _VALUE_ANTIQUANT, value_mode, "value", given[value_scale], given.get(value_offset)
            ),
        }

    def _have_own_scales(self, given: Mapping[str, Array]) -> bool:
        """Whether keys and values have scales of their own: both, or neither."""
        (key_scale, key_offset), (value_scale, value_offset) = _KEY_ANTIQUANT, _VALUE_ANTIQUANT
        if (key_scale in given) != (value_scale in given):
            missing = value_scale if key_scale in given else key_scale
            raise self.call.error(missing, "is absent, expected with the scale of the other")
        if (key_offset in given) != (value_offset in given):
            raise self.call.error(value_offset, "key and value need offsets both, or none")
        return key_scale in given

    def _own_modes(self) -> tuple[int, int]:
        """The modes of the own scales of keys and values. Mode 3 means keys by channel (0) and
        values by token (1)."""
        key, value = (int(self.call.attrs[f"{name}_antiquant_mode"]) for name in ("key", "value"))
        if key != value and (key, value) != (0, 1):
            raise self.call.error(
                "value_antiquant_mode", f"is {value} beside a key_antiquant_mode of {key}"
            )
        return (0, 1) if key == 3 else (key, value)

    def _common_scales(self, given: Mapping[str, Array]) -> tuple[list[Array], list[Array | None]]:
        """antiquant_scale and antiquant_offset, whose first dimension is keys and values, for each
        of the two."""
        scales, offsets = (given.get(name) for name in _ANTIQUANT)
        if scales is None or scales.ndim == 0 or scales.shape[0] != 2:
            raise self.call.error(
                "antiquant_scale", "two scales, of keys and values, are needed for INT8 keys"
            )
        if offsets is not None and offsets.shape != scales.shape:
            problem = f"shape {list(offsets.shape)} is not {list(scales.shape)} as the scale"
            raise self.call.error("antiquant_offset", problem)
        return [*map(np.asarray, scales)], [None, None] if offsets is None else [*offsets]

    def _scale(
        self, names: tuple[str, str], mode: int, name: str, scale: Array, offset: Array | None
    ) -> tuple[Floats, Floats]:
        call, heads, width = self.call, self.sizes.key_heads, self.widths[name]
        if mode not in (0, 1, 2):
            raise call.error(names[0], f"the antiquantisation of mode {mode} is not computed")
        if offset is not None and np.shape(offset) != scale.shape:
            raise call.error(
                names[1], f"shape {list(np.shape(offset))} is not {list(scale.shape)} as the scale"
            )
        by_channel = ((heads, 1, width), (heads, width), (heads * width,))
        form: tuple[int, ...]
        if mode == 1:
            form = (self.sizes.batch, scale.shape[-1] if scale.ndim else 0)
            is_valid = scale.shape in (form, (1, *form)) and form[1] >= max(self.room, default=0)
            if self.prefix or self.sizes.packed:
                raise call.error(
                    names[0], "by token with a prefix or a packed layout is not computed"
                )
        elif mode == 2:
            form, is_valid = (heads, 1, 1), scale.shape == (heads,)
        else:
            form = (1, 1, 1) if scale.size == 1 else (heads, 1, width)
            is_valid = scale.shape in ((), (1,)) or scale.shape in (
                *by_channel,
                *((1, *shape) for shape in by_channel),
            )
        if not is_valid:
            raise call.error(names[0], f"shape {list(scale.shape)} does not fit mode {mode}")
        shift = np.zeros(form) if offset is None else np.asarray(offset, np.float64).reshape(form)
        return scale.astype(np.float64).reshape(form), shift
