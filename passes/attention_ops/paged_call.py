"""What PagedAttention and SparsePagedAttention of com.microsoft have in common: their operands and their caches.

    1  query, key, value    [T, N * D] and twice [T, K * D], or all three side by side in query
    2  norms                query and key are divided by the root of the mean of their squares and qk_norm_epsilon, for
                            each head, and multiplied by the weights
    3  do_rotary            query and key are rotated, from the element rotary_offset of each head on. Token i of a
                            sequence has the position past_seqlens + i
    4  caches               [blocks, tokens, K, D]. The new keys and values are written into them first: each at its
                            place in block_table, or where slot_mapping says. Below 0 the latter writes nothing
    5  int8 caches          a number x is written as x / scale, rounded and saturated, and read as itself times scale
    6  LATENT               there is one cache and one key head. Values are the first v_head_size elements of the keys

A ScatterND writes the caches; it copies a cache only if input and output are bound to different memory.
attention_metadata is a hint to the runtime and changes no result.

Refused: caches that no output hands on, because an input would have to change; caches of other types; sizes that are
not known before the model runs; an opset below 16.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.answer.decline import first_reason
from fa_compiler.passes.attention_ops.call import OpConverter
from fa_compiler.passes.attention_ops.direct import Attributes, DirectConversion
from fa_compiler.passes.attention_ops.pages import ADDING_SINCE, Pages, Rows, Sequences
from fa_compiler.passes.emit.build import INT64
from fa_compiler.passes.ir.nodes import FLOATS, input_of, int_attr, text_attr
from fa_compiler.passes.ir.signatures import CONTRIB, SIGNATURES, unknown_part

FLOAT, INT8, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.INT8, ir.DataType.BFLOAT16
SEPARATE, LATENT = "SEPARATE", "LATENT"
CACHES = ("key_cache", "value_cache")
CACHE_NAMES = {ir.DataType.FLOAT16: "float16", BFLOAT16: "bfloat16", INT8: "int8"}
"""The types of caches as k_cache_dtype and v_cache_dtype name them."""


@dataclass(frozen=True)
class Sizes:
    """Query heads, key heads, the size of a head, and that of the values."""

    heads: int
    kv_heads: int
    size: int
    width: int


@dataclass(frozen=True)
class Prepared:
    """The query [T, heads, size] as it meets the keys, the tokens of the run, and the caches with the new keys."""

    query: ir.Value
    tokens: Rows
    caches: list[ir.Value]


@dataclass(frozen=True)
class PagedCall(DirectConversion):
    """The conversion of an operator whose keys and values lie in the pages of a cache."""

    # -- what the inputs and attributes say ------------------------------------------------------------

    @property
    def window(self) -> int:
        """The number of keys that a row sees at most; -1 where there is no window."""
        return int_attr(self.node, "local_window_size", -1)

    @property
    def is_causal(self) -> bool:
        """Does a row see the keys of no later token?"""
        return int_attr(self.node, "is_causal", 1) != 0

    @property
    def layout(self) -> str:
        """The layout of the caches."""
        return text_attr(self.node, "kv_cache_layout", SEPARATE)

    @property
    def is_latent(self) -> bool:
        """Is there one cache, of keys that hold the values, too?"""
        return self.layout == LATENT

    def input(self, name: str) -> ir.Value | None:
        """An input by its name in the schema."""
        return input_of(self.node, SIGNATURES[CONTRIB, self.node.op_type].inputs.index(name))

    def required(self, name: str) -> ir.Value:
        """An input that has to be there. Raises Decline."""
        value = self.input(name)
        if value is None:
            raise self.decline(f"its {name} is missing")
        return value

    def dtype(self, value: ir.Value) -> ir.DataType | None:
        """The type of a value."""
        return self.facts.info.dtype(value)

    @property
    def kind(self) -> ir.DataType:
        """The type of query. Raises Decline."""
        kind = self.dtype(self.required("query"))
        if kind not in FLOATS or kind is None:
            raise self.decline("its query is not float32, float16 or bfloat16")
        return kind

    def width(self, value: ir.Value, rank: int) -> int:
        """The last size of a tensor of this rank. Raises Decline where it is not known."""
        shape = self.facts.info.shape(value)
        size = shape[-1].const if shape and len(shape) == rank else None
        if not size:
            raise self.decline(f"the width of {value.name!r} is not known before the model runs")
        return size

    def check(self) -> None:
        """Decline what is not computed. The shapes are checked with the operands."""
        node = self.node
        if self.facts.options.target != "ort":
            raise self.decline("its keys lie in the pages of a cache, which is written in place")
        if (unknown := unknown_part(node)) is not None:
            raise self.decline(f"it has {unknown}, and what it means is not known here")
        scale, handed_on = node.attributes.get("scale"), node.outputs[1 : 2 if self.is_latent else 3]
        reason = first_reason(
            {
                f"its kv_cache_layout is {self.layout!r}": self.layout not in (SEPARATE, LATENT),
                f"its local_window_size is {self.window}": self.window < -1 or self.window == 0,
                "its scale is 0": scale is not None and scale.as_float() == 0.0,
                "one of its norms has no weight": (self.input("q_norm_weight") is None)
                != (self.input("k_norm_weight") is None),
                "its caches are written in place, and no output hands them on": not all(
                    output.name for output in handed_on
                )
                or len(handed_on) < (1 if self.is_latent else 2),
                f"opset {self.builder.opset} has no ScatterElements that adds": self.builder.opset < ADDING_SINCE,
            }
        )
        if reason is not None:
            raise self.decline(reason)

    @cached_property
    def sizes(self) -> Sizes:
        """The heads and their sizes. Raises Decline where they are not known."""
        heads, kv_heads = int_attr(self.node, "num_heads", 0), int_attr(self.node, "kv_num_heads", 0)
        size = self.width(self.required("key_cache"), 4)
        if heads < 1 or kv_heads < 1 or heads % kv_heads:
            raise self.decline(f"its num_heads is {heads} and its kv_num_heads {kv_heads}")
        for name in CACHES[: 1 if self.is_latent else 2]:
            shape = self.facts.info.shape(self.required(name))
            if shape is None or len(shape) != 4 or [each.const for each in shape[2:]] != [kv_heads, size]:
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
                f"its v_head_size is {width} beside a head size of {size}": not 0 < width <= size or not self.is_latent,
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
        return Sequences.of(self.builder, self.required("cumulative_sequence_length"), self.required("past_seqlens"))

    @cached_property
    def pages(self) -> Pages:
        """The pages of the caches."""
        return Pages.of(self.builder, self.required("block_table"), self.required("key_cache"))

    # -- query, key and value --------------------------------------------------------------------------

    def prepared(self) -> Prepared:
        """The query, and the caches after the new keys and values are written. Raises Decline."""
        self.check()
        sizes, tokens = self.sizes, self.sequences.tokens()
        query, key, *value = self._operands()
        query, key = self._placed(query, "q", sizes.heads, tokens), self._placed(key, "k", sizes.kv_heads, tokens)
        return Prepared(query, tokens, self._written([key, *value], tokens))

    def _operands(self) -> list[ir.Value]:
        """Query, key and value, [T, heads, size]; without values in a LATENT cache."""
        sizes, query = self.sizes, self.required("query")
        counts = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
        parts = [query, self.input("key"), self.input("value")]
        if parts[1:] == [None, None] and not self.is_latent:  # (1)
            if self.width(query, 2) != sum(counts) * sizes.size:
                raise self.decline(f"query, key and value together are not {sum(counts)} heads of {sizes.size}")
            parts = [*self.builder.split(query, 1, [count * sizes.size for count in counts])]
        elif self.is_latent:
            parts.pop()
        if None in parts:
            raise self.decline("key or value is missing")
        given = [part for part in parts if part is not None]
        return [self._of_heads(part, count) for part, count in zip(given, counts, strict=False)]

    def _of_heads(self, part: ir.Value, heads: int) -> ir.Value:
        if self.width(part, 2) != heads * self.sizes.size:
            raise self.decline(f"{part.name!r} is not {heads} heads of {self.sizes.size}")
        return self.builder.op("Reshape", [part, self.builder.ints([0, heads, self.sizes.size])], self.kind)

    def _placed(self, part: ir.Value, letter: str, heads: int, tokens: Rows) -> ir.Value:
        """Query or key after its norm and its rotation."""
        weight = self.input(f"{letter}_norm_weight")
        if weight is not None:
            part = self._normed(part, weight)
        if int_attr(self.node, "do_rotary", 0):
            part = self._rotated(part, heads, tokens)
        return part

    def _normed(self, part: ir.Value, weight: ir.Value) -> ir.Value:
        """Query or key after its norm, which is computed in float32."""
        builder, epsilon = self.builder, self.node.attributes.get("qk_norm_epsilon")  # (2)
        least = builder.constant(np.array(1e-6 if epsilon is None else epsilon.as_float(), np.float32), "epsilon")
        wide = builder.cast(part, FLOAT)
        mean = builder.reduced("ReduceMean", builder.op("Mul", [wide, wide], FLOAT), -1)
        root = builder.op("Sqrt", [builder.op("Add", [mean, least], FLOAT)], FLOAT)
        scaled = builder.op("Mul", [builder.op("Div", [wide, root], FLOAT), builder.cast(weight, FLOAT)], FLOAT)
        return builder.cast(scaled, self.kind)

    def _rotated(self, part: ir.Value, heads: int, tokens: Rows) -> ir.Value:
        """Query or key after the rotation, which ONNX Runtime does not compute in bfloat16."""
        builder, size, kind = self.builder, self.sizes.size, FLOAT
        if self.kind == ir.DataType.FLOAT16:
            kind = ir.DataType.FLOAT16
        cos, sin = self.required("cos_cache"), self.required("sin_cache")
        turned, offset = 2 * self.width(cos, 2), int_attr(self.node, "rotary_offset", 0)
        if offset < 0 or offset + turned > size:
            raise self.decline(f"a head of {size} has no {turned} elements from {offset} on")
        before, rest = [], part
        if offset:  # (3)
            first, rest = builder.split(part, 2, [offset, size - offset])
            before = [first]
        attrs = {"interleaved": int_attr(self.node, "rotary_interleaved", 0)}
        if offset + turned < size:
            attrs |= {"num_heads": heads, "rotary_embedding_dim": turned}
        # Each token is a batch entry of its own: the operator refuses more rows of one entry than its tables have.
        rows = builder.op("Reshape", [rest, builder.ints([-1, 1, heads * (size - offset)])], self.kind)
        inputs = [builder.cast(rows, kind), builder.units("Unsqueeze", tokens.positions, (1,))]
        inputs += [builder.cast(table, kind) for table in (cos, sin)]
        result = builder.cast(builder.op("RotaryEmbedding", inputs, kind, attrs, domain=CONTRIB), self.kind)
        back = builder.op("Reshape", [result, builder.ints([-1, heads, size - offset])], self.kind)
        return builder.joined([*before, back], self.kind, 2)

    # -- the caches ------------------------------------------------------------------------------------

    def _written(self, rows: list[ir.Value], tokens: Rows) -> list[ir.Value]:
        """The caches with the new keys and values."""
        builder, given = self.builder, self.input("slot_mapping")
        caches = [self.required(name) for name in CACHES[: len(rows)]]
        stored = [self._stored(*pair, place) for place, pair in enumerate(zip(rows, caches, strict=True))]
        slots = self.pages.slots(tokens) if given is None else builder.cast(given, INT64)
        if given is not None:  # (4)
            is_wanted = builder.op("GreaterOrEqual", [slots, builder.ints([0])], ir.DataType.BOOL)
            slots, *stored = (
                builder.op("Compress", [value, is_wanted], self.dtype(value), {"axis": 0}) for value in (slots, *stored)
            )
        return [self.pages.write(cache, value, slots) for cache, value in zip(caches, stored, strict=True)]

    def _stored(self, rows: ir.Value, cache: ir.Value, place: int) -> ir.Value:
        """New keys or values as the cache holds them. Raises Decline for a cache of another type."""
        builder, letter, kind = self.builder, "kv"[place], self.dtype(cache)
        named, quantised = (text_attr(self.node, f"{letter}_{what}", "") for what in ("cache_dtype", "quant_type"))
        if kind not in (self.kind, INT8) or kind is None or named not in ("", CACHE_NAMES.get(kind)):
            raise self.decline(f"its {CACHES[place]} is of another type than query and int8")
        scale = self._scale(place)
        if (scale is None) != (kind != INT8) or (scale is None) != (quantised in ("", "NONE")):
            raise self.decline(f"its {letter}_quant_type {quantised!r}, {letter}_scale and cache do not fit together")
        if scale is None:
            return rows
        shares = builder.op("Div", [builder.cast(rows, FLOAT), scale], FLOAT)  # (5)
        low, high = (builder.constant(np.array(number, np.float32), "number") for number in (-128, 127))
        return builder.cast(builder.op("Clip", [builder.op("Round", [shares], FLOAT), low, high], FLOAT), INT8)

    def _scale(self, place: int) -> ir.Value | None:
        """The scale of the keys or the values of int8, which broadcasts to [T, heads, size]."""
        scale, kind = self.input(f"{'kv'[place]}_scale"), text_attr(self.node, f"{'kv'[place]}_quant_type", "NONE")
        if scale is None or kind not in ("PER_TENSOR", "PER_CHANNEL"):
            return None
        shape = [1] if kind == "PER_TENSOR" else [self.sizes.kv_heads, -1]
        return self.builder.op("Reshape", [scale, self.builder.ints(shape)], FLOAT)

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
        return rows[0], self.builder.split(rows[0], 2, [sizes.width, sizes.size - sizes.width])[0]  # (6)

    def _plain(self, rows: ir.Value, place: int) -> ir.Value:
        """Keys or values as the cache holds them, in the type of query."""
        scale = self._scale(place)
        if scale is None:
            return rows
        return self.builder.cast(self.builder.op("Mul", [self.builder.cast(rows, FLOAT), scale], FLOAT), self.kind)

    # -- the attention ---------------------------------------------------------------------------------

    def scale_value(self) -> float:
        """What the scores are multiplied by."""
        given = self.node.attributes.get("scale")
        return float(np.float32(self.sizes.size**-0.5 if given is None else given.as_float()))

    def softcap(self) -> float:
        """c of c * tanh(scores / c); 0 where the scores are not capped. Raises Decline."""
        return float(np.float32(OpConverter.of(self.node, self.facts, self.builder).softcap()))

    def sink(self) -> ir.Value | None:
        """One more score in every row of a head, float32 [N]."""
        sink = self.input("head_sink")
        return None if sink is None else self.builder.cast(sink, FLOAT)

    def added(self, op_type: str, inputs: dict[str, ir.Value | None], attrs: Attributes, place: int) -> ir.Node:
        """A node of the registry in the graph. Its output in this place has the type of query. Raises Decline."""
        made = self.registered(op_type, inputs, attrs, used=("attention_out",) if place else None)
        self.builder.graph.append(made)
        made.outputs[place].dtype = self.kind
        return made

    def put_results(self, out: ir.Value, caches: list[ir.Value]) -> None:
        """Put a result [T, heads, width] and the caches in the places of the outputs."""
        shape = self.builder.ints([0, self.sizes.heads * self.sizes.width])
        self.put(self.node.outputs[0], self.builder.op("Reshape", [out, shape], self.kind))
        for output, cache in zip(self.node.outputs[1:], caches, strict=False):
            self.put(output, cache)
