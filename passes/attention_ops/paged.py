"""PagedAttention of com.microsoft: packed sequences whose keys and values lie in the pages of a cache.

    output, key_cache_out, value_cache_out = PagedAttention(query, key, value, key_cache, value_cache,
        cumulative_sequence_length, past_seqlens, block_table, cos_cache, sin_cache, slot_mapping, head_sink,
        q_norm_weight, k_norm_weight, k_scale, v_scale, attention_metadata)

    1  query, key, value    [T, N * D] and twice [T, K * D], or all three side by side in query
    2  norms                query and key are divided by the root of the mean of their squares and qk_norm_epsilon, for
                            each head, and multiplied by the weights
    3  do_rotary            query and key are rotated, from the element rotary_offset of each head on. Token i of a
                            sequence has the position past_seqlens + i
    4  caches               [blocks, tokens, K, D]. The new keys and values are written into them first: each at its
                            place in block_table, or where slot_mapping says. Below 0 the latter writes nothing
    5  keys                 those of the positions 0 to past_seqlens + i, read by block_table; with is_causal 0 those of
                            the later tokens, too
    6  local_window_size    w keys at most, the token's own one included; where the attention is not causal, it leaves
                            out only those before
    7  head_sink            one more score in every row, as softcap that of FlashAttentionScore
    8  LATENT               there is one cache and one key head. Values are the first v_head_size elements of the keys
    9  int8 caches          a number x is written as x / scale, rounded and saturated, and read as itself times scale

They become FlashAttentionScore with the layout TND, on the target ort: ONNX Runtime has no CPU kernel for them. A
ScatterND writes the pages; it copies a cache only if input and output are bound to different memory. Then a Gather
reads the keys that some row attends, without those before the window (pages.py). Sequences of one token are left to
IncreFlashAttention where it takes them (single_tokens.py): it reads the pages where they lie.

attention_metadata is a hint to the runtime and changes no result. A run in which a key that a row attends lies in no
page ends in an error.

Refused: caches that no output hands on, because an input would have to change; caches of other types; sizes that are
not known before the model runs; an opset below 16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry.constraints.training import compressed_mask
from fa_compiler.op_registry.geometry import UNLIMITED
from fa_compiler.passes.answer.decline import first_reason
from fa_compiler.passes.attention_ops import single_tokens
from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.attention_ops.direct import Attributes, Direct, DirectConversion
from fa_compiler.passes.attention_ops.pages import ADDING_SINCE, Pages, Rows, Sequences
from fa_compiler.passes.attention_ops.single_tokens import SingleTokens, takes_pages
from fa_compiler.passes.emit.build import INT64, Builder
from fa_compiler.passes.ir.nodes import FLOATS, input_of, int_attr, text_attr
from fa_compiler.passes.ir.signatures import unknown_part
from fa_compiler.passes.values.facts import Facts

OP = "FlashAttentionScore"
FLOAT, INT8, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.BFLOAT16
QUERY, KEY_CACHE, VALUE_CACHE, ENDS, PASTS, TABLE, COS, SIN, SLOTS, SINK = 0, 3, 4, 5, 6, 7, 8, 9, 10, 11
NORMS, SCALES = (12, 13), (14, 15)
SEPARATE, LATENT = "SEPARATE", "LATENT"
CACHE_NAMES = {ir.DataType.FLOAT16: "float16", BFLOAT16: "bfloat16", INT8: "int8"}
"""The types of caches as k_cache_dtype and v_cache_dtype name them."""


def convert_paged(node: ir.Node, facts: Facts, builder: Builder) -> Direct:
    """Replace a PagedAttention by FlashAttentionScore, on the target ort. Raises Decline."""
    return _Conversion(node, facts, builder).converted()


@dataclass(frozen=True)
class _Sizes:
    """Query heads, key heads, the size of a head, and that of the values."""

    heads: int
    kv_heads: int
    size: int
    width: int


@dataclass(frozen=True)
class _Conversion(DirectConversion):
    def converted(self) -> Direct:
        """The FlashAttentionScore that takes the operator's place."""
        self._check()
        sizes = self._sizes()
        query, *rows = self._operands(sizes)
        limits, past = self._required(ENDS, "cumulative_sequence_length"), self._required(PASTS, "past_seqlens")
        sequences = Sequences.of(self.builder, limits, past)
        pages = Pages.of(self.builder, self._required(TABLE, "block_table"), self._required(KEY_CACHE, "key_cache"))
        tokens = sequences.tokens()
        query, rows[0] = (self._placed(part, place, tokens, sizes) for place, part in enumerate((query, rows[0])))
        caches = self._written(rows, pages, tokens)
        single = self._single_tokens(sequences, pages, sizes)
        keys = sequences.keys(self._window, 1 if single is None else 2)  # (5)
        slots = pages.slots(keys)
        read = [
            self._plain(pages.read(cache, slots, sizes.kv_heads, sizes.size), place, sizes)
            for place, cache in enumerate(caches)
        ]
        if self._is_latent:
            read.append(self._leading(read[0], sizes))  # (8)
        made = self._attention(query, (read[0], read[1]), (tokens.ends, keys.ends), sizes)
        out = made.outputs[-1]
        if single is not None:
            out = self._with_single(out, single, query, caches, sizes)
        shape = self.builder.ints([0, sizes.heads * sizes.width])
        self.put(self.node.outputs[0], self.builder.op("Reshape", [out, shape], self._dtype(query)))
        for place, cache in enumerate(caches, 1):
            self.put(self.node.outputs[place], cache)
        return Direct(made, "TND", (sizes.heads, sizes.kv_heads), mask=self._mask_label)

    # -- what the attributes say -----------------------------------------------------------------------

    @property
    def _window(self) -> int:
        """The number of keys that a row sees at most; -1 where there is no window."""
        return int_attr(self.node, "local_window_size", -1)

    @property
    def _is_causal(self) -> bool:
        return int_attr(self.node, "is_causal", 1) != 0

    @property
    def _layout(self) -> str:
        return text_attr(self.node, "kv_cache_layout", SEPARATE)

    @property
    def _is_latent(self) -> bool:
        return self._layout == LATENT

    @property
    def _mask_label(self) -> str:
        if self._window > 0:
            return "packed+band"
        return "packed+causal" if self._is_causal else "packed"

    def _check(self) -> None:
        """Decline what is not computed. The shapes are checked with the operands."""
        node = self.node
        if self.facts.options.target != "ort":
            raise self.decline("its keys lie in the pages of a cache, which is written in place")
        if (unknown := unknown_part(node)) is not None:
            raise self.decline(f"it has {unknown}, and what it means is not known here")
        scale, caches = node.attributes.get("scale"), 1 if self._is_latent else 2
        reason = first_reason(
            {
                f"its kv_cache_layout is {self._layout!r}": self._layout not in (SEPARATE, LATENT),
                f"its local_window_size is {self._window}": self._window < -1 or self._window == 0,
                "its scale is 0": scale is not None and scale.as_float() == 0.0,
                "one of its norms has no weight": len({input_of(node, index) is None for index in NORMS}) > 1,
                "its caches are written in place, and no output hands them on": not all(
                    output.name for output in node.outputs[1 : caches + 1]
                )
                or len(node.outputs) <= caches,
                f"opset {self.builder.opset} has no ScatterElements that adds": self.builder.opset < ADDING_SINCE,
            }
        )
        if reason is not None:
            raise self.decline(reason)

    def _sizes(self) -> _Sizes:
        heads, kv_heads = int_attr(self.node, "num_heads", 0), int_attr(self.node, "kv_num_heads", 0)
        size = self._width(self._required(KEY_CACHE, "key_cache"), 4)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise self.decline(f"its num_heads is {heads} and its kv_num_heads {kv_heads}")
        for index in (KEY_CACHE,) if self._is_latent else (KEY_CACHE, VALUE_CACHE):
            shape = self.facts.info.shape(self._required(index, "value_cache"))
            if shape is None or len(shape) != 4 or [each.const for each in shape[2:]] != [kv_heads, size]:
                raise self.decline(f"its caches are not proven to have {kv_heads} heads of {size}")
        width = int_attr(self.node, "v_head_size", 0) or size
        if width != size or self._is_latent:
            self._check_latent(kv_heads, size, width)
        return _Sizes(heads, kv_heads, size, width)

    def _check_latent(self, kv_heads: int, size: int, width: int) -> None:
        """Decline what is not a cache of keys whose first elements are the values."""
        given = [name for name, index in (("value", 2), ("value_cache", VALUE_CACHE)) if input_of(self.node, index)]
        reason = first_reason(
            {
                f"its v_head_size is {width} beside a head size of {size}": not 0 < width <= size
                or not self._is_latent,
                f"its LATENT cache has {kv_heads} key heads": kv_heads != 1,
                f"its LATENT cache has a {' and a '.join(given)} beside it": bool(given),
                "its v_head_size is not the head size, and no scale is given": width != size
                and "scale" not in self.node.attributes,
            }
        )
        if reason is not None:
            raise self.decline(reason)

    # -- query, key and value --------------------------------------------------------------------------

    def _operands(self, sizes: _Sizes) -> list[ir.Value]:
        """Query, key and value, [T, heads, size]; without values in a LATENT cache."""
        counts = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        query = self._required(QUERY, "query")
        if self._dtype(query) not in FLOATS:
            raise self.decline("its query is not float32, float16 or bfloat16")
        parts = [query, input_of(self.node, 1), input_of(self.node, 2)]
        if parts[1:] == [None, None] and not self._is_latent:  # (1)
            if self._width(query, 2) != sum(counts) * sizes.size:
                raise self.decline(f"query, key and value together are not {sum(counts)} heads of {sizes.size}")
            parts = [*self.builder.split(query, 1, [count * sizes.size for count in counts])]
        elif self._is_latent:
            parts.pop()
        if None in parts:
            raise self.decline("key or value is missing")
        return [
            self._of_heads(part, count, sizes.size)
            for part, count in zip(parts, counts, strict=False)
            if part is not None
        ]

    def _of_heads(self, part: ir.Value, heads: int, size: int) -> ir.Value:
        if self._width(part, 2) != heads * size:
            raise self.decline(f"{part.name!r} is not {heads} heads of {size}")
        return self.builder.op("Reshape", [part, self.builder.ints([0, heads, size])], self._dtype(part))

    def _placed(self, part: ir.Value, place: int, tokens: Rows, sizes: _Sizes) -> ir.Value:
        """Query or key after its norm and its rotation."""
        part = self._normed(part, place)
        if not int_attr(self.node, "do_rotary", 0):
            return part
        return self._rotated(part, sizes.kv_heads if place else sizes.heads, tokens, sizes)

    def _normed(self, part: ir.Value, place: int) -> ir.Value:
        """Query or key after its norm, which is computed in float32."""
        weight, builder = input_of(self.node, NORMS[place]), self.builder
        if weight is None:
            return part
        epsilon = self.node.attributes.get("qk_norm_epsilon")  # (2)
        least = builder.constant(np.array(1e-6 if epsilon is None else epsilon.as_float(), np.float32), "epsilon")
        wide = builder.cast(part, FLOAT)
        mean = builder.reduced("ReduceMean", builder.op("Mul", [wide, wide], FLOAT), -1)
        root = builder.op("Sqrt", [builder.op("Add", [mean, least], FLOAT)], FLOAT)
        scaled = builder.op("Mul", [builder.op("Div", [wide, root], FLOAT), builder.cast(weight, FLOAT)], FLOAT)
        return self._cast_as(scaled, part)

    def _rotated(self, part: ir.Value, heads: int, tokens: Rows, sizes: _Sizes) -> ir.Value:
        """Query or key after the rotation, which ONNX Runtime does not compute in bfloat16."""
        builder, kind = self.builder, FLOAT
        if self._dtype(part) == ir.DataType.FLOAT16:
            kind = ir.DataType.FLOAT16
        cos, sin = self._required(COS, "cos_cache"), self._required(SIN, "sin_cache")
        turned, offset = 2 * self._width(cos, 2), int_attr(self.node, "rotary_offset", 0)
        if offset < 0 or offset + turned > sizes.size:
            raise self.decline(f"a head of {sizes.size} has no {turned} elements from {offset} on")
        before, rest = [], part
        if offset:  # (3)
            first, rest = builder.split(part, 2, [offset, sizes.size - offset])
            before = [first]
        attrs = {"interleaved": int_attr(self.node, "rotary_interleaved", 0)}
        if offset + turned < sizes.size:
            attrs |= {"num_heads": heads, "rotary_embedding_dim": turned}
        # Each token is a batch entry of its own: the operator refuses more rows of one entry than its tables have.
        rows = builder.op("Reshape", [rest, builder.ints([-1, 1, heads * (sizes.size - offset)])], self._dtype(part))
        inputs = [builder.cast(rows, kind), builder.units("Unsqueeze", tokens.positions, (1,))]
        inputs += [builder.cast(table, kind) for table in (cos, sin)]
        result = self._cast_as(builder.op("RotaryEmbedding", inputs, kind, attrs, domain="com.microsoft"), part)
        shape = builder.ints([-1, heads, sizes.size - offset])
        return builder.joined(
            [*before, builder.op("Reshape", [result, shape], self._dtype(part))], self._dtype(part), 2
        )

    # -- the caches ------------------------------------------------------------------------------------

    def _written(self, rows: list[ir.Value], pages: Pages, tokens: Rows) -> list[ir.Value]:
        """The caches with the new keys and values."""
        builder, given = self.builder, input_of(self.node, SLOTS)
        caches = [self._required(index, "value_cache") for index in (KEY_CACHE, VALUE_CACHE)[: len(rows)]]
        stored = [self._stored(*pair, place) for place, pair in enumerate(zip(rows, caches, strict=True))]
        slots = pages.slots(tokens) if given is None else builder.cast(given, INT64)
        if given is not None:  # (4)
            is_wanted = builder.op("GreaterOrEqual", [slots, builder.ints([0])], ir.DataType.BOOL)
            slots, *stored = (
                builder.op("Compress", [value, is_wanted], self._dtype(value), {"axis": 0})
                for value in (slots, *stored)
            )
        return [pages.write(cache, value, slots) for cache, value in zip(caches, stored, strict=True)]

    def _stored(self, rows: ir.Value, cache: ir.Value, place: int) -> ir.Value:
        """New keys or values as the cache holds them. Raises Decline for a cache of another type."""
        builder, letter, kind = self.builder, "kv"[place], self._dtype(cache)
        named, quantised = (text_attr(self.node, f"{letter}_{what}", "") for what in ("cache_dtype", "quant_type"))
        own = self._dtype(self._required(QUERY, "query"))
        if kind not in (own, INT8) or kind is None or named not in ("", CACHE_NAMES.get(kind)):
            raise self.decline(f"its {'value' if place else 'key'}_cache is of another type than query and int8")
        scale = self._scale(place)
        if (scale is None) != (kind != INT8) or (scale is None) != (quantised in ("", "NONE")):
            raise self.decline(f"its {letter}_quant_type {quantised!r}, {letter}_scale and cache do not fit together")
        if scale is None:
            return rows
        shares = builder.op("Div", [builder.cast(rows, FLOAT), scale], FLOAT)  # (9)
        low, high = (builder.constant(np.array(number, np.float32), "number") for number in (-128, 127))
        return builder.cast(builder.op("Clip", [builder.op("Round", [shares], FLOAT), low, high], FLOAT), INT8)

    def _scale(self, place: int) -> ir.Value | None:
        """The scale of the keys or the values of int8, which broadcasts to [T, heads, size]."""
        scale = input_of(self.node, SCALES[place])
        kind = text_attr(self.node, f"{'kv'[place]}_quant_type", "NONE")
        if scale is None or kind not in ("PER_TENSOR", "PER_CHANNEL"):
            return None
        if kind == "PER_TENSOR":
            return self.builder.op("Reshape", [scale, self.builder.ints([1])], FLOAT)
        heads = int_attr(self.node, "kv_num_heads", 0)
        return self.builder.op("Reshape", [scale, self.builder.ints([heads, -1])], FLOAT)

    def _plain(self, rows: ir.Value, place: int, sizes: _Sizes) -> ir.Value:
        """Keys or values as the cache holds them, in the type of query."""
        scale = self._scale(place)
        if scale is None:
            return rows
        whole = self.builder.op("Mul", [self.builder.cast(rows, FLOAT), scale], FLOAT)
        return self._cast_as(whole, self._required(QUERY, "query"))

    def _leading(self, keys: ir.Value, sizes: _Sizes) -> ir.Value:
        """The first elements of each key, which are the values of a LATENT cache."""
        if sizes.width == sizes.size:
            return keys
        return self.builder.split(keys, 2, [sizes.width, sizes.size - sizes.width])[0]

    # -- the attention ---------------------------------------------------------------------------------

    def _attention(
        self, query: ir.Value, read: tuple[ir.Value, ir.Value], ends: tuple[ir.Value, ir.Value], sizes: _Sizes
    ) -> ir.Node:
        """The FlashAttentionScore, whose result is the last of its outputs."""
        sink = input_of(self.node, SINK)
        attrs: Attributes = {
            "head_num": sizes.heads,
            "input_layout": "TND",
            **self._scaling(sizes),
        }
        mask: ir.Value | None = None
        if self._window > 0:  # (6)
            after = 0 if self._is_causal else UNLIMITED
            attrs |= {"sparse_mode": 4, "pre_tockens": self._window - 1, "next_tockens": after}
        elif self._is_causal:
            attrs["sparse_mode"] = 3
        if "sparse_mode" in attrs:
            mask = self.builder.constant(compressed_mask(3), "triangle")
        inputs = {
            "query": query,
            "key": read[0],
            "value": read[1],
            "atten_mask": mask,
            "actual_seq_qlen": ends[0],
            "actual_seq_kvlen": ends[1],
            "sink": None if sink is None else self.builder.cast(sink, FLOAT),  # (7)
        }
        made = self.registered(OP, inputs, attrs, used=("attention_out",))
        self.builder.graph.append(made)
        self._set_type(made.outputs[-1], query)
        return made

    def _scaling(self, sizes: _Sizes) -> Attributes:
        """The attributes for the scale and the soft cap."""
        given = self.node.attributes.get("scale")
        scale = sizes.size**-0.5 if given is None else given.as_float()
        cap = OpConverter.of(self.node, self.facts, self.builder).softcap()
        return {"scale_value": float(np.float32(scale)), "cpu_softcap": float(np.float32(cap))}

    def _single_tokens(self, sequences: Sequences, pages: Pages, sizes: _Sizes) -> SingleTokens | None:
        """The sequences of one token; None where IncreFlashAttention does not take them."""
        cache = self._required(KEY_CACHE, "key_cache")
        shape, has_sink = self.facts.info.shape(cache), input_of(self.node, SINK) is not None
        fits = shape is not None and takes_pages(sizes.heads, sizes.kv_heads, sizes.size, shape[1].const)
        if not fits or has_sink or self._window > 0 or self._is_latent or self._dtype(cache) == INT8:
            return None
        return SingleTokens.of(sequences, pages)

    def _with_single(
        self, out: ir.Value, single: SingleTokens, query: ir.Value, caches: list[ir.Value], sizes: _Sizes
    ) -> ir.Value:
        """The result of FlashAttentionScore with the rows of the sequences of one token."""
        shape = self.facts.info.shape(self._required(KEY_CACHE, "key_cache"))
        assert shape is not None and shape[1].const is not None
        attrs: Attributes = {
            "num_heads": sizes.heads,
            "num_key_value_heads": sizes.kv_heads,
            "input_layout": "BSND",
            "block_size": shape[1].const,
            **self._scaling(sizes),
        }
        made = self.registered(single_tokens.OP, single.inputs(query, caches), attrs)
        self.builder.graph.append(made)
        rows = made.outputs[0]
        self._set_type(rows, query)
        assert rows.dtype is not None
        return single.joined(out, rows, rows.dtype)

    def _set_type(self, out: ir.Value, query: ir.Value) -> None:
        dtype = self._dtype(query)
        assert dtype is not None
        out.dtype = dtype

    def _required(self, index: int, name: str) -> ir.Value:
        value = input_of(self.node, index)
        if value is None:
            raise self.decline(f"its {name} is missing")
        return value

    def _width(self, value: ir.Value, rank: int) -> int:
        """The last size of a tensor of this rank. Raises Decline where it is not known."""
        shape = self.facts.info.shape(value)
        size = shape[-1].const if shape and len(shape) == rank else None
        if not size:
            raise self.decline(f"the width of {value.name!r} is not known before the model runs")
        return size

    def _dtype(self, value: ir.Value) -> ir.DataType | None:
        return self.facts.info.dtype(value)

    def _cast_as(self, value: ir.Value, other: ir.Value) -> ir.Value:
        """A value in the type of another one, which is known."""
        dtype = self._dtype(other)
        assert dtype is not None
        return self.builder.cast(value, dtype)
