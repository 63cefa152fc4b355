"""Puts operators of ONNX and ONNX Runtime in the places of what is around attention, for the
runtimes that are given them (op_registry/around_kernels.py).

    RMSNorm                       SimplifiedLayerNormalization, or RMSNormalization of ONNX
    a sum and its RMSNorm         SkipSimplifiedLayerNormalization, where the runtime is given it
    rotary positions              RotaryEmbedding, of heads in front of the tokens, or of rows with
                                  all heads
    GELU written out              Gelu or FastGelu of ONNX Runtime

RotaryEmbedding has one number for each pair. Of a table with one for each element the half is
taken, where both numbers of a pair are proven to be equal (tables.py). In 16 bits the model rounds
both products, and they may overflow: so the tables are proven to hold nothing larger than 1. Pairs
of neighbours that the model joins as halves are moved into halves in front of the operator. ONNX
Runtime's operator reads its tables by positions. If all batch entries have the same tables, this is
the position of the first token, 0; else the rows of the tables are counted. Norms and rotations
that the model has ready made stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from fa_compiler.op_registry.around_kernels import (
    AROUND,
    FAST_GELU,
    GELU,
    RMS_NORM,
    ROTARY,
    SIMPLIFIED,
    SKIP_SIMPLIFIED,
    is_given,
)
from fa_compiler.passes.algebra.symbolic import Dim, consts
from fa_compiler.passes.answer.budget import limited_attempt
from fa_compiler.passes.answer.decline import Decline, label
from fa_compiler.passes.answer.report import Around, Code
from fa_compiler.passes.around import gelu, rms_norm, rotary
from fa_compiler.passes.around.lines import first_built
from fa_compiler.passes.around.records import (
    HALF,
    INTERLEAVE,
    Activation,
    Norm,
    Rotary,
    SummedNorm,
    known_shape,
)
from fa_compiler.passes.around.tables import (
    LARGEST,
    has_equal_halves,
    has_equal_neighbours,
    is_bounded,
)
from fa_compiler.passes.around.turned import pairs_as_halves, without_pair_axis
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.emit.operators import AttrValue
from fa_compiler.passes.ir.nodes import (
    SIXTEEN_BITS,
    certain,
    constant,
    is_op,
    is_read,
    name_of,
    operand_at,
)
from fa_compiler.passes.ir.surgery import replace_value, sweep
from fa_compiler.passes.values.facts import Facts

T = TypeVar("T")

CONTRIB = "com.microsoft"
INT64 = ir.DataType.INT64
OLDEST_OPSET = 11
"""The first opset whose Slice and Range take part in the tables of rotary positions."""


def _fitting(found: Sequence[T] | Decline, fits: Callable[[T], bool]) -> Sequence[T] | Decline:
    """What is found that fits; a decline stays one."""
    return found if isinstance(found, Decline) else [one for one in found if fits(one)]


def _holds(dtype: ir.DataType, numbers: np.ndarray) -> bool:
    """Does a type hold each of these numbers as it is?"""
    return np.array_equal(
        numbers.astype(dtype.numpy()).astype(numbers.dtype), numbers, equal_nan=True
    )


@dataclass(frozen=True)
class StandardFuser:
    """Fuses in one graph."""

    builder: Builder
    facts: Facts
    made: list[ir.Node] = field(default_factory=list)

    def rotary_at(self, node: ir.Node) -> Around | None:
        """Fuse the rotary positions around a node; None where there are none."""
        if not self._has(ROTARY) or not rotary.is_anchor(node):
            return None
        found = limited_attempt(
            node, lambda: rotary.rotary(node, self.facts.info, self.facts.options)[-1:]
        )
        return first_built(node, found, self.builder, self._rotary)

    def norm_or_activation_at(self, node: ir.Node) -> Around | None:
        """Fuse the norm or the activation around a node; None where there is none."""
        info, options = self.facts.info, self.facts.options
        if self._has(GELU) and gelu.is_anchor(node):
            found = limited_attempt(node, lambda: gelu.activations(node, info, options))
            alone = _fitting(found, lambda one: one.op_type == "GeluV2")
            return first_built(node, alone, self.builder, self._gelu)
        if is_op(node, *rms_norm.READY_MADE) or (node.domain, node.op_type) == rms_norm.SKIP:
            return None
        if self._has(self._norm_operator) and rms_norm.is_anchor(node, info):
            norms = limited_attempt(node, lambda: [*rms_norm.norms(node, info)])
            return first_built(node, _fitting(norms, self._may_be), self.builder, self._norm)
        return None

    def _may_be(self, norm: Norm | SummedNorm) -> bool:
        """Is a norm alone, or is the runtime given an operator of it and the sum?"""
        return isinstance(norm, Norm) or self._is_given(
            SKIP_SIMPLIFIED, self._dtype(norm.operands[0])
        )

    @property
    def _norm_operator(self) -> str:
        return RMS_NORM if self.facts.options.target == "onnx" else SIMPLIFIED

    def _has(self, operator: str) -> bool:
        """Is the runtime given the operator for some type?"""
        options = self.facts.options
        kernels = AROUND.get(options.target, {}).get(operator, {})
        return options.runtime is not None and options.runtime.name in kernels

    def _expect(self, operator: str, dtype: ir.DataType, anchor: ir.Node) -> None:
        """Raises Decline where the runtime is not given the operator for a type."""
        if not self._is_given(operator, dtype):
            reason = (
                f"{self.facts.options.runtime} is not given {operator} for {dtype.numpy().name}"
            )
            raise Decline(Code.RUNTIME, reason, anchor, "")

    def _is_given(self, operator: str, dtype: ir.DataType) -> bool:
        options = self.facts.options
        return is_given(options.target, operator, options.runtime, dtype.numpy().name)

    # Norms and GELU.

    def _norm(self, found: Norm | SummedNorm) -> Around:
        return self._of_sum(found) if isinstance(found, SummedNorm) else self._alone(found)

    def _alone(self, norm: Norm) -> Around:
        dtype, operator = self._dtype(norm.x), self._norm_operator
        gamma = self._gamma(norm, norm.x)
        self._expect(operator, dtype, norm.anchor)
        attrs: dict[str, AttrValue] = {"axis": -1, "epsilon": norm.epsilon, "stash_type": 1}
        result = self.builder.op(operator, [norm.x, gamma], attrs, dtype=dtype)
        return self._put(result, norm.anchor, norm.nodes, norm.rounded, {norm.result: result})

    def _of_sum(self, found: SummedNorm) -> Around:
        norm, x = found.norm, found.operands[0]
        dtype, gamma = self._dtype(x), self._gamma(norm, x)
        self._expect(SKIP_SIMPLIFIED, dtype, norm.anchor)
        if len(known_shape(x, self.facts.info, norm.anchor)) != 3:
            raise Decline(
                Code.RANK,
                f"{x.name!r} has not the three axes that {SKIP_SIMPLIFIED} takes",
                norm.anchor,
                "",
            )
        inputs, attrs = [*found.operands, gamma], {"epsilon": norm.epsilon}
        result = self.builder.op(
            SKIP_SIMPLIFIED, inputs, attrs, dtype=dtype, outputs=4, domain=CONTRIB
        )
        maker = certain(result.producer())
        results = {norm.result: result, found.total: maker.outputs[3]}
        return self._put(result, norm.anchor, found.nodes, norm.rounded, results)

    def _gamma(self, norm: Norm, x: ir.Value) -> ir.Value:
        """The weight of a norm as a value of the type of x: ones where there is none. Raises
        Decline where that type does not hold its numbers."""
        dtype, value = self._dtype(x), norm.gamma.value
        if value is not None and self.facts.info.dtype(value) == dtype:
            return value
        numbers = norm.gamma.numbers if value is None else constant(value, LARGEST)
        if not norm.gamma.is_given:
            numbers = np.ones(self.facts.info.sizes(x)[-1].const or 0, dtype.numpy())
        if numbers is None or not _holds(dtype, numbers):
            raise Decline(
                Code.DTYPE, "the weight has another type than what is normalised", norm.anchor
            )
        return self.builder.constant(numbers.astype(dtype.numpy()), "weight")

    def _gelu(self, found: Activation) -> Around:
        (x,), operator = found.operands, GELU if found.attrs["approximate"] == "none" else FAST_GELU
        dtype = self._dtype(x)
        self._expect(operator, dtype, found.anchor)
        result = self.builder.op(operator, [x], dtype=dtype, domain=CONTRIB)
        return self._put(result, found.anchor, found.nodes, found.rounded, {found.result: result})

    # Rotary positions.

    def _rotary(self, found: Rotary) -> Around:
        dtype, anchor, info = self._dtype(found.x), found.anchor, self.facts.info
        self._expect(ROTARY, dtype, anchor)
        if self.builder.opset < OLDEST_OPSET:
            reason = f"the tables are cut and counted by operators of opset {OLDEST_OPSET}"
            raise Decline(
                Code.OPSET, reason, anchor, f"export again with opset {OLDEST_OPSET} or newer"
            )
        if dtype in SIXTEEN_BITS and not (
            is_bounded(found.cos, info) and is_bounded(found.sin, info)
        ):
            raise Decline(
                Code.DTYPE,
                "it is not proven that products with the tables do not overflow",
                anchor,
                "",
            )
        if found.is_complex:
            found = without_pair_axis(found, self.builder)
        heads, rows, behind = self._turned(found)
        inputs, attrs = (
            self._operands(found, rows),
            {"interleaved": int(found.mode == INTERLEAVE), **heads},
        )
        domain = "" if self.facts.options.target == "onnx" else CONTRIB
        result = self.builder.op(ROTARY, inputs, attrs, dtype=dtype, domain=domain)
        before, after = found.others
        whole = self.builder.concat([*before, behind(result), *after], 3)
        results = {found.result: whole}
        return self._put(result, anchor, found.nodes, dtype in SIXTEEN_BITS, results)

    def _turned(
        self, found: Rotary
    ) -> tuple[dict[str, int], ir.Value, Callable[[ir.Value], ir.Value]]:
        """What is rotated, with the attribute that says how many heads its rows hold, and what
        makes of the result what the model has. Raises Decline."""
        if found.heads_first and found.read_behind is None:
            return {}, self._heads(found), lambda result: result
        rows, heads = self._rows(found)
        return {"num_heads": heads}, rows, self._behind(found, heads)

    def _rows(self, found: Rotary) -> tuple[ir.Value, int]:
        """What is rotated as rows with all heads, and their number. Raises Decline."""
        x = found.read_behind or found.x
        heads, size = consts(known_shape(x, self.facts.info, found.anchor)[2:])
        if heads is None or size is None:
            raise Decline(
                Code.SHAPE, "the number of heads or their size is not known", found.anchor, ""
            )
        rows = self._flat_source(x)
        if found.moves_pairs:
            pairs = self.builder.reshape(rows or x, [0, 0, heads, size // 2, 2])
            x, rows = self.builder.transpose(pairs, (0, 1, 2, 4, 3)), None
        return rows or self.builder.reshape(x, [0, 0, heads * size]), heads

    def _heads(self, found: Rotary) -> ir.Value:
        """What is rotated with its heads in front, with the elements of even places in front of
        those of odd ones where the rotation wants them so. Raises Decline."""
        if not found.moves_pairs:
            return found.x
        size = known_shape(found.x, self.facts.info, found.anchor)[3].const
        if size is None:
            raise Decline(Code.SHAPE, "the size of a head is not known", found.anchor, "")
        return pairs_as_halves(found.x, size, self.builder)

    def _flat_source(self, x: ir.Value) -> ir.Value | None:
        """The rows that a Reshape cuts into heads, where that makes x."""
        node, info = x.producer(), self.facts.info
        source, (batch, tokens, heads, size) = operand_at(node, 0), info.sizes(x)
        is_flat = is_op(node, "Reshape") and info.shape(source) == (batch, tokens, heads * size)
        return source if is_flat else None

    def _behind(self, found: Rotary, heads: int) -> Callable[[ir.Value], ir.Value]:
        """What makes of rotated rows what the model has."""
        size = known_shape(found.x, self.facts.info, found.anchor)[3].const or 0

        def cut(result: ir.Value) -> ir.Value:
            whole = self.builder.reshape(result, [0, 0, heads, size])
            if not found.heads_first:
                return whole
            return self.builder.transpose(whole, rotary.SWAP)

        return cut

    def _operands(self, found: Rotary, x: ir.Value) -> list[ir.Value]:
        """The operands of the operator: rows, tables and positions in the order of the target."""
        shape = known_shape(found.cos, self.facts.info, found.anchor)
        tokens = 2 if found.heads_first else 1
        batch = known_shape(found.x, self.facts.info, found.anchor)[0]
        cos, sin = (self._half(table, found) for table in (found.cos, found.sin))
        if self.facts.options.target == "onnx" and shape[0] == batch:
            return [x, *(self.builder.squeeze(table, [3 - tokens]) for table in (cos, sin))]
        rows = [self.builder.reshape(table, [-1, self._width(table)]) for table in (cos, sin)]
        count = self.builder.dimension(found.cos, tokens)
        if self.facts.options.target == "onnx":
            sizes = self.builder.concat([self.builder.dimension(found.x, 0), count], 0)
            return [x, *rows, self.builder.expand(self.builder.range(count), sizes)]
        if shape[0] == Dim(1):
            return [x, self.builder.ints([0]), *rows]
        entries = self.builder.dimension(found.cos, 0)
        every = self.builder.range(self.builder.mul(entries, count))
        sizes = self.builder.concat([entries, count], 0)
        return [x, self.builder.reshape(every, sizes), *rows]

    def _half(self, table: ir.Value, found: Rotary) -> ir.Value:
        """A table with one number for each pair. Raises Decline where it is not proven that the
        others are the same."""
        if found.is_half_table:
            return table
        width, is_half = self._width(table), found.mode == HALF
        proof = has_equal_halves if is_half else has_equal_neighbours
        if not width or not proof(table, self.facts.info):
            raise Decline(
                Code.SHAPE,
                "it is not proven that both numbers of a pair have one angle",
                found.anchor,
                "",
            )
        bounds = (0, width // 2, 3, 1) if is_half else (0, width, 3, 2)
        return self.builder.slice(table, *([bound] for bound in bounds))

    # What both need.

    def _dtype(self, value: ir.Value) -> ir.DataType:
        return certain(self.facts.info.dtype(value))

    def _width(self, table: ir.Value) -> int:
        return self.facts.info.sizes(table)[-1].const or 0

    def _put(
        self,
        result: ir.Value,
        anchor: ir.Node,
        nodes: tuple[ir.Node, ...],
        rounded: bool,
        results: Mapping[ir.Value, ir.Value],
    ) -> Around:
        """Put what was made in the place of `nodes`; `results` are the values of the model with
        what replaces them."""
        node, name = certain(result.producer()), label(anchor)
        added = len(self.builder.nodes) - len(self.made)
        self.made.extend(self.builder.nodes[len(self.made) :])
        for old, new in results.items():
            if is_read(old):
                replace_value(old, self.builder.for_output(old, new), rename=old.is_graph_output())
        swept = sweep(
            self.builder.graph, [one for one in nodes if one.graph is self.builder.graph][::-1]
        )
        removed = sum(one in nodes for one, _ in swept.nodes)
        return Around(
            name,
            "fused",
            node.op_type,
            name_of(node),
            replaced=removed,
            added=added,
            rounded=rounded,
        )
