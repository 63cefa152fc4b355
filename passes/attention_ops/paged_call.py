"""The caches of PagedAttention and SparsePagedAttention of com.microsoft, which lie in pages.

    1  positions            token i of a sequence has the position past_seqlens + i
    2  caches               [blocks, tokens, K, D]. The new keys and values are written into them
                            first: each at its place in block_table, or where slot_mapping says.
                            Below 0 the latter writes nothing
    3  int8 caches          a number x is written as x / scale, rounded and saturated, and read as
                            itself times scale
    4  LATENT               there is one cache and one key head. Values are the first v_head_size
                            elements of the keys

A ScatterND writes the caches; it copies a cache only if input and output are bound to different
memory. attention_metadata is a hint to the runtime and changes no result. The operands are those of
cached_call.py.

A run with rows behind the last sequence ends in an error whose node says so (ALL_ROWS): they belong
to no sequence.

Refused: caches that no output hands on, or one that nothing reads, because an input would have to
change; caches of other types; sizes that are not known before the model runs; an opset below 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import consts
from fa_compiler.passes.answer.decline import first_reason
from fa_compiler.passes.attention_ops.cached_call import FLOAT, LATENT, SEPARATE, CachedCall, Sizes
from fa_compiler.passes.attention_ops.direct import Outputs
from fa_compiler.passes.attention_ops.pages import ADDING_SINCE, Pages, Rows, Sequences
from fa_compiler.passes.emit.build import INT64
from fa_compiler.passes.ir.nodes import certain, int_attr, is_read, text_attr

INT8 = ir.DataType.INT8
CACHES = ("key_cache", "value_cache")
ALL_ROWS = "the_last_of_cumulative_sequence_length_has_to_be_the_number_of_rows"
"""Rows behind the last sequence belong to none, and their results would mean nothing."""
CACHE_NAMES = {ir.DataType.FLOAT16: "float16", ir.DataType.BFLOAT16: "bfloat16", INT8: "int8"}
"""The types of caches as k_cache_dtype and v_cache_dtype name them."""


@dataclass(frozen=True)
class Prepared:
    """The query [T, heads, size] as it meets the keys, the tokens of the run, and the caches with
    the new keys."""

    query: ir.Value
    tokens: Rows
    caches: list[ir.Value]


@dataclass(frozen=True)
class PagedCall(CachedCall):
    """The conversion of an operator whose keys and values lie in the pages of a cache."""

    def check(self) -> None:
        """Decline what is not computed. The shapes are checked with the operands."""
        self.check_common()
        handed_on = self.node.outputs[1 : 2 if self.is_latent else 3]
        reason = first_reason(
            {
                f"its kv_cache_layout is {self.layout!r}": self.layout not in (SEPARATE, LATENT),
                f"its local_window_size is {self.window}": self.window < -1 or self.window == 0,
                "its caches are written in place, and no output hands them on": not all(
                    is_read(output) for output in handed_on
                )
                or len(handed_on) < (1 if self.is_latent else 2),
                f"opset {self.builder.opset} has no ScatterElements that adds": self.builder.opset
                < ADDING_SINCE,
            }
        )
        if reason is not None:
            raise self.decline(reason)

    @cached_property
    def sizes(self) -> Sizes:
        """The heads and their sizes. Raises Decline where they are not known."""
        heads, kv_heads = (
            int_attr(self.node, "num_heads", 0),
            int_attr(self.node, "kv_num_heads", 0),
        )
        size = self.width(self.required("key_cache"), 4)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise self.decline(f"its num_heads is {heads} and its kv_num_heads {kv_heads}")
        for name in CACHES[: 1 if self.is_latent else 2]:
            shape = self.facts.info.sizes(self.required(name))
            if len(shape) != 4 or consts(shape[2:]) != [kv_heads, size]:
                raise self.decline(f"its caches are not proven to have {kv_heads} heads of {size}")
        width = int_attr(self.node, "v_head_size", 0) or size
        if width != size or self.is_latent:
            self._check_latent(kv_heads, size, width)
        return Sizes(heads, kv_heads, size, width)

    def _check_latent(self, kv_heads: int, size: int, width: int) -> None:
        """Decline what is not a cache of keys whose first elements are the values."""
        given = [name for name in ("value", "value_cache") if self.input(name) is not None]
        reason = first_reason(
            {
                f"its v_head_size is {width} beside a head size of {size}": not 0 < width <= size
                or not self.is_latent,
                f"its LATENT cache has {kv_heads} key heads": kv_heads != 1,
                f"its LATENT cache has a {' and a '.join(given)} beside it": bool(given),
                "its v_head_size is not the head size, and no scale is given": width != size
                and "scale" not in self.node.attributes,
            }
        )
        if reason is not None:
            raise self.decline(reason)

    @cached_property
    def sequences(self) -> Sequences:
        """The sequences of a run."""
        return Sequences.of(
            self.builder, self.required("cumulative_sequence_length"), self.required("past_seqlens")
        )

    @cached_property
    def pages(self) -> Pages:
        """The pages of the caches."""
        return Pages.of(self.builder, self.required("block_table"), self.required("key_cache"))

    def split_heads(self, part: ir.Value, heads: int) -> ir.Value:
        """Query, key or value as [T, heads, size], where T is the number of tokens in all
        sequences. The node's name, which the error of a run with other rows has, says what is wrong
        there."""
        sizes = [self.sequences.tokens().count, self.builder.ints([heads, self.sizes.size])]
        rows = self.builder.reshape(part, self.builder.concat(sizes, 0))
        node = certain(rows.producer())
        node.name = self.builder.names.new(ALL_ROWS)
        return rows

    def prepared(self) -> Prepared:
        """The query, and the caches after the new keys and values are written. Raises Decline."""
        self.check()
        sizes, tokens = self.sizes, self.sequences.tokens()
        query, key, *value = self.operands()
        positions = tokens.positions  # (1)
        query, key = (
            self.placed(query, "q", sizes.heads, positions),
            self.placed(key, "k", sizes.kv_heads, positions),
        )
        return Prepared(query, tokens, self._written([key, *value], tokens))

    # -- the caches
    # ------------------------------------------------------------------------------------

    def _written(self, rows: list[ir.Value], tokens: Rows) -> list[ir.Value]:
        """The caches with the new keys and values."""
        builder, given = self.builder, self.input("slot_mapping")
        caches = [self.required(name) for name in CACHES[: len(rows)]]
        stored = [
            self._stored(*pair, place) for place, pair in enumerate(zip(rows, caches, strict=True))
        ]
        slots = self.pages.slots(tokens) if given is None else builder.cast(given, INT64)
        if given is not None:  # (2)
            is_wanted = builder.greater_or_equal(slots, builder.ints([0]))
            slots, *stored = (
                builder.op("Compress", [value, is_wanted], {"axis": 0})
                for value in (slots, *stored)
            )
        return [
            self.pages.write(cache, value, slots)
            for cache, value in zip(caches, stored, strict=True)
        ]

    def _stored(self, rows: ir.Value, cache: ir.Value, place: int) -> ir.Value:
        """New keys or values as the cache holds them. Raises Decline for a cache of another
        type."""
        builder, letter, kind = self.builder, "kv"[place], self.dtype(cache)
        named, quantised = (
            text_attr(self.node, f"{letter}_{what}", "") for what in ("cache_dtype", "quant_type")
        )
        if kind not in (self.kind, INT8) or named not in ("", CACHE_NAMES.get(kind)):
            raise self.decline(f"its {CACHES[place]} is of another type than query and int8")
        scale = self._scale(place)
        if (scale is None) != (kind != INT8) or (scale is None) != (quantised in ("", "NONE")):
            raise self.decline(
                f"its {letter}_quant_type {quantised!r}, {letter}_scale and cache do not fit together"
            )
        if scale is None:
            return rows
        shares = builder.div(builder.cast(rows, FLOAT), scale)  # (3)
        low, high = (
            builder.constant(np.array(number, np.float32), "number") for number in (-128, 127)
        )
        return builder.cast(builder.op("Clip", [builder.op("Round", [shares]), low, high]), INT8)

    def _scale(self, place: int) -> ir.Value | None:
        """The scale of the keys or the values of int8, which broadcasts to [T, heads, size]."""
        scale, kind = (
            self.input(f"{'kv'[place]}_scale"),
            text_attr(self.node, f"{'kv'[place]}_quant_type", "NONE"),
        )
        if scale is None or kind not in ("PER_TENSOR", "PER_CHANNEL"):
            return None
        shape = [1] if kind == "PER_TENSOR" else [self.sizes.kv_heads, -1]
        return self.builder.reshape(scale, shape)

    def read(self, caches: list[ir.Value], slots: ir.Value) -> tuple[ir.Value, ir.Value]:
        """The keys and values in these places, in the type of query."""
        sizes = self.sizes
        rows = [
            self._plain(self.pages.read(cache, slots, sizes.kv_heads, sizes.size), place)
            for place, cache in enumerate(caches)
        ]
        if not self.is_latent:
            return rows[0], rows[1]
        if sizes.width == sizes.size:
            return rows[0], rows[0]
        # (4)
        return rows[0], self.builder.split(rows[0], 2, [sizes.width, sizes.size - sizes.width])[0]

    def _plain(self, rows: ir.Value, place: int) -> ir.Value:
        """Keys or values as the cache holds them, in the type of query."""
        scale = self._scale(place)
        if scale is None:
            return rows
        return self.builder.cast(self.builder.mul(self.builder.cast(rows, FLOAT), scale), self.kind)

    def outputs(self, out: ir.Value, caches: list[ir.Value]) -> Outputs:
        """A result [T, heads, width] and the caches, for the places of the outputs."""
        shape = self.builder.ints([0, self.sizes.heads * self.sizes.width])
        return tuple(
            zip(self.node.outputs, (self.builder.reshape(out, shape), *caches), strict=False)
        )
