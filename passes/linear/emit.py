"""A proven linear attention becomes one operator of the target: FlashLinearAttention, or what
LinearAttention becomes there (attention_ops/linear.py), which also says what a target cannot
express."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from fa_compiler.passes.algebra.known import if_known
from fa_compiler.passes.algebra.symbolic import Dim
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.options import ANY_LENGTH, FINITE_STATES_HINT, Options
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.attention_ops.linear import LinearOperator, operator_of
from fa_compiler.passes.attention_ops.linear_call import LinearCall
from fa_compiler.passes.emit.build import Builder
from fa_compiler.passes.ir.nodes import (
    all_known,
    certain,
    constant,
    int_attr,
    is_op,
    producer,
    single,
    without_absent,
)
from fa_compiler.passes.linear.arrangement import axes_of_dims, without_units
from fa_compiler.passes.linear.candidates import Operand, own_sizes, rows_of
from fa_compiler.passes.linear.corrections import Correction
from fa_compiler.passes.linear.operators import holds
from fa_compiler.passes.linear.proof import LinearMatch
from fa_compiler.passes.linear.resets import Reset, Truth
from fa_compiler.passes.linear.search import State
from fa_compiler.passes.ops.linear import PRODUCTS
from fa_compiler.passes.values.facts import Facts

MOST_TOKENS = 1 << 17


@dataclass(frozen=True)
class Emitted:
    """The operator, which is in the graph, and the pairs of old values and what takes their
    places."""

    call: LinearCall
    operator: LinearOperator
    pairs: Sequence[tuple[ir.Value, ir.Value]]


@dataclass
class Emitter:
    """Makes the nodes of one linear attention."""

    match: LinearMatch
    builder: Builder

    is_any_length: bool = False
    """Is the attention meant for every length?"""

    def emit(self, facts: Facts) -> Emitted:
        """The operator of the target. Raises Decline."""
        call = self._call(facts)
        made = operator_of(call, facts, self.builder)
        self._check_lengths(facts.options)
        output, state = made.output, made.present_state
        self._complete(output, f"{made.node.name}_output", self._dtype)
        pairs = [(each.value, self._as(output, each)) for each in self.match.outputs]
        if state is not None:
            past = self.builder.info.dtype(call.inputs.get("past_state"))
            self._complete(state, f"{made.node.name}_present_state", past or self._dtype)
            pairs += [(each.value, self._as_state(state, each)) for each in self.match.states]
        return Emitted(call, made, pairs)

    def _complete(self, result: ir.Value, name: str, dtype: ir.DataType) -> None:
        """Give a result of the operator a name and a type, where it has none."""
        if result.name is None:
            result.name = self.builder.names.new(name)
        if result.dtype is None:
            result.dtype = dtype

    def _call(self, facts: Facts) -> LinearCall:
        """What the operator computes of which values, which are in the graph then. Raises
        Decline."""
        found, heads, target = self.match.found, self.match.sizes.heads, facts.options.target
        if found.reset is not None:
            self._check_reset(facts.options)
        repeats = target == "onnx" or (target == "ascend" and found.query.heads != found.key.heads)
        query_heads, key_heads = (heads, heads) if repeats else (found.query.heads, found.key.heads)
        query = self._guarded(self._tokens(found.query, query_heads))
        inputs = {
            "query": query,
            "key": self._tokens(found.key, key_heads),
            "value": self._value(),
            "past_state": if_known(self._state, found.state),
            "decay": self._whole_decay(query),
            "beta": self._beta(query),
            **(if_known(self._correction, found.correction) or {}),
        }
        rule, counts = self.match.rule, (query_heads, heads)
        return LinearCall(
            self.node, without_absent(inputs), counts, rule, self._scale, bool(self.match.states)
        )

    def _check_lengths(self, options: Options) -> None:
        """Decline an operator of Ascend where the file is right for some numbers of tokens only.
        This is asked last, because the assumption helps only where nothing else is in the way."""
        if options.target == "ascend" and not (self.match.lengths.are_all or self.is_any_length):
            reason = f"the file is right where the tokens are {self.match.lengths}, and a device refuses no others"
            hint = f"--assume {ANY_LENGTH} if it is meant for every number; or export it with a fixed number of tokens"
            raise Decline(Code.SHAPE, reason, self.node, hint)

    def _whole_decay(self, query: ir.Value) -> ir.Value | None:
        """The logarithm of what the states are multiplied by: a decay, a reset, or both; None where
        neither is."""
        found = self.match.found
        decay = if_known(self._decay, found.decay, query)
        return decay if found.reset is None else self._with_reset(found.reset, decay, query)

    def _beta(self, query: ir.Value) -> ir.Value | None:
        """The beta of a delta rule, 1 where the file has none; None for other rules."""
        found = self.match.found
        if not found.is_delta:
            return None
        return self._ones(query) if found.factor is None else self._rows(found.factor, query)

    def _check_reset(self, options: Options) -> None:
        """Decline a reset that the operator does not compute as the file does."""
        chosen = producer(self.match.chosen)
        if chosen is not None and not options.takes_scores_as_finite:
            reason = (
                "at some tokens a Where sets its state or decay to 0, which also ends NaN and infinity; the operator "
                "multiplies the state by 0, which does not"
            )
            hint = f"{FINITE_STATES_HINT}, or multiply the state by 0 or 1 in the model"
            raise Decline(Code.LINEAR, reason, chosen, hint)
        if options.target == "ascend":
            reason = "at some tokens its state becomes 0, which is a log decay of minus infinity, and CANN's takes none"
            raise Decline(
                Code.ILLEGAL, reason, self.node, "--target ort of optimize has an operator for it"
            )

    @property
    def _scale(self) -> float:
        """The scale as float32. One of 0 would stand for the default."""
        scale = float(np.float32(self.match.found.scale))
        if not np.isfinite(scale) or scale == 0.0:
            raise Decline(
                Code.LINEAR,
                f"the scale {self.match.found.scale} is 0 or infinite in float32",
                self.node,
            )
        return scale

    def _correction(self, correction: Correction) -> dict[str, ir.Value]:
        """The operands of a correction of rank one, for each state."""
        heads = self.match.sizes.heads
        write, read = self._tokens(correction.write, heads), self._tokens(correction.read, heads)
        if correction.gate is not None:
            write = self.builder.mul(write, self._tokens(correction.gate, heads))
        if correction.is_subtracted:
            write = self.builder.neg(write)
        return {"low_rank_write": write, "low_rank_read": read}

    def _ones(self, query: ir.Value) -> ir.Value:
        """A beta of 1 for each token."""
        one = self.builder.cast(
            self.builder.constant(np.ones((1, 1, 1), np.float32), "one"), self._dtype
        )
        return self._expanded(one, query, 1)

    def _expanded(self, value: ir.Value, query: ir.Value, width: int) -> ir.Value:
        """A value for each token of the query."""
        sizes = [
            self.builder.dimension(query, 0),
            self.builder.dimension(query, 1),
            self.builder.ints([width]),
        ]
        return self.builder.expand(value, self.builder.concat(sizes, 0))

    def _guarded(self, query: ir.Value) -> ir.Value:
        """The query times 1, where the file is right. At other lengths the file fails or gives
        other numbers, and here the 1 is looked up at a place that its table does not have, which is
        an error.

        ONNX Runtime's optimisations leave out a Reshape that would fail (1.32), but no lookup by a
        computed index.
        """
        lengths = self.match.lengths
        if lengths.are_all or self.is_any_length:
            return query
        tokens = self.builder.dimension(query, 1)
        if lengths.step > 1:
            place = self.builder.mod(tokens, self.builder.ints([lengths.step]))
        else:
            place = self._looked_up(self._places(), tokens)
        one = self._looked_up(self.builder.constant(np.ones(1, np.float32), "one"), place)
        return self.builder.mul(query, self.builder.cast(one, self._dtype))

    def _looked_up(self, table: ir.Value, place: ir.Value) -> ir.Value:
        """An element of a table. The node's name, which the error has where there is none, says
        what the file takes."""
        element = self.builder.gather(table, place, 0)
        node = certain(element.producer())
        words = f"right_for_{self.match.lengths}_tokens_only".replace(" ", "_")
        node.name = self.builder.names.new(words)
        return element

    def _places(self) -> ir.Value:
        """By the number of tokens, 0 where it is right and 1 where it is not. A larger number lies
        behind the end."""
        ranges = [(first, last or MOST_TOKENS + 1) for first, last in self.match.lengths.ranges]
        end = max(last for _, last in ranges)
        if end > MOST_TOKENS:
            reason = "the numbers of tokens for which the file is right cannot be told apart"
            raise Decline(
                Code.LINEAR,
                reason,
                self.node,
                f"--assume {ANY_LENGTH} if it is meant for every number",
            )
        table = np.ones(end + 1, dtype=np.int64)
        for first, last in ranges:
            table[first : last + 1] = 0
        return self.builder.constant(table, "places")

    @property
    def node(self) -> ir.Node:
        """The node of the output, which declines name."""
        return certain(self.match.found.output.value.producer())  # a region computes its output

    @property
    def _dtype(self) -> ir.DataType:
        """The type of all tokens: that of the output."""
        dtype = self.builder.info.dtype(self.match.found.output.value)
        if dtype is None:
            raise Decline(Code.DTYPE, "the type of the output is unknown", self.node)
        return dtype

    def _target(
        self, axes: Sequence[str], sizes: Mapping[str, int], source: ir.Value, own: Sequence[str]
    ) -> ir.Value:
        """The shape with these axes merged in each dimension. Sizes that differ from run to run are
        read from a source, whose dimensions have their `own` axes; one of them is -1."""
        parts: list[ir.Value] = []
        spare = max((place for place, each in enumerate(axes) if self._is_open(each)), default=-1)
        for place, each in enumerate(axes):
            if not self._is_open(each):
                parts.append(
                    self.builder.ints(
                        [int(np.prod([sizes[letter] for letter in each], dtype=np.int64))]
                    )
                )
            elif place == spare:
                parts.append(self.builder.ints([-1]))
            elif each in own:
                parts.append(self.builder.dimension(source, list(own).index(each)))
            else:
                raise Decline(
                    Code.SHAPE, "the sizes of a linear attention cannot be computed", self.node
                )
        known = all_known(map(constant, parts))
        return (
            self.builder.concat(parts, 0)
            if known is None
            else self.builder.ints([int(part[0]) for part in known])
        )

    def _is_open(self, letters: Iterable[str]) -> bool:
        """Is one of these axes a batch or tokens that differ from run to run?"""
        return any(self.match.is_open.get(letter, False) for letter in letters)

    def _reshaped(
        self, value: ir.Value, own: Sequence[str], wanted: Sequence[str], sizes: Mapping[str, int]
    ) -> ir.Value:
        """A value whose dimensions have their `own` axes, with the `wanted` ones."""
        if list(own) == list(wanted):
            return value
        self._check_fixed(value, own)
        return self.builder.reshape(value, self._target(wanted, sizes, value, own))

    def _check_fixed(self, value: ir.Value, own: Sequence[str]) -> None:
        """Decline a size that is written out as a number and is not known to be the same in every
        run. One without axes is 1, or 0 in a run without tokens. Where all sizes are written out,
        one may be its number or 0: the Reshape of a tensor without elements fails, as the file
        does."""
        is_closed = not any(map(self._is_open, own))
        for size, letters in zip(self.builder.info.sizes(value), own, strict=False):
            is_unit = not letters and size.upper is not None and size.upper <= 1
            is_fixed = size.const is not None or is_unit or (is_closed and _is_whole_or_none(size))
            if not is_fixed and not self._is_open(letters):
                reason = (
                    f"the size {size} of {value.name!r} is not known to be the same in every run"
                )
                raise Decline(Code.SHAPE, reason, self.node)

    def _moved(self, operand: Operand, wanted: Sequence[str]) -> ir.Value:
        """An operand with the wanted axes merged in each dimension, in the type of all tokens."""
        sizes = own_sizes(operand, self.match.sizes)
        value, shape = operand.value, self.match.shapes[operand.value]
        for _ in range(operand.cut):
            value, shape = self._first(value), shape[:-1]
        value = self.builder.cast(value, self._dtype)
        return self._arranged(value, shape, operand.order, wanted, sizes)

    def _first(self, value: ir.Value) -> ir.Value:
        zero = self.builder.constant(np.array(0, dtype=np.int64), "number")
        return self.builder.gather(value, zero, -1)

    def _arranged(
        self,
        value: ir.Value,
        shape: Sequence[int],
        order: str,
        wanted: Sequence[str],
        sizes: Mapping[str, int],
    ) -> ir.Value:
        """A value that has its axes in this order, with the wanted ones in each dimension."""
        own, usual = axes_of_dims(shape, order, sizes), "".join(wanted)
        if without_units(order, sizes) == without_units(usual, sizes):
            return self._reshaped(value, own, wanted, sizes)
        split = self._reshaped(value, _with_units(own, order, sizes), list(order), sizes)
        perm = [order.index(letter) for letter in usual]
        turned = self.builder.transpose(split, perm)
        return self._reshaped(turned, list(usual), wanted, sizes)

    def _tokens(self, operand: Operand, heads: int) -> ir.Value:
        """Query or key as [B,T,H*D]. Of fewer than these heads each is repeated for its
        neighbours."""
        if operand.heads == heads:
            return self._moved(operand, ["b", "t", "hd"])
        value, builder = self._moved(operand, ["b", "t", "h", "d"]), self.builder
        shape = builder.ints([1, 1, 1, heads // operand.heads, 1])
        repeated = builder.expand(builder.unsqueeze(value, [3]), shape)
        return builder.reshape(repeated, [0, 0, heads * self.match.sizes.key])

    def _value(self) -> ir.Value:
        """The value as [B,T,H*Dv]; times the factor, where nothing is corrected."""
        found = self.match.found
        if found.factor is None or found.is_delta:
            return self._moved(found.value, ["b", "t", "he"])
        value = self._moved(found.value, ["b", "t", "h", "e"])
        factor = self.builder.unsqueeze(self._moved(found.factor, ["b", "t", "h"]), [3])
        product = self.builder.mul(value, factor)
        sizes = own_sizes(found.value, self.match.sizes)
        return self._reshaped(product, ["b", "t", "h", "e"], ["b", "t", "he"], sizes)

    def _state(self, state: State) -> ir.Value:
        """A state as [B,H,Dk,Dv]."""
        sizes, value = self.match.sizes.of_state, state.value
        given = self.builder.info.dtype(value)
        for last in self.match.states:
            wanted = self.builder.info.dtype(last.value)
            if given != wanted and holds(wanted, given):
                is_rounded = self._is_rounded(last.value, certain(given))
                value = value if is_rounded else self.builder.cast(value, certain(wanted))
                given = self.builder.info.dtype(value)
        return self._arranged(
            value, self.match.shapes[state.value], state.order, ["b", "h", "k", "v"], sizes
        )

    def _is_rounded(self, state: ir.Value, dtype: ir.DataType) -> bool:
        """Is a last state rounded to this type by all that reads it, but for the products that are
        no more? The operator rounds it to the type of the first one. A product with weights
        stays."""
        region, readers = self.match.region, [reader for reader, _ in state.uses()]
        left = [
            node
            for node in readers
            if not (is_op(node, *PRODUCTS) and region.depth(node.outputs[0]))
        ]
        are_casts = all(
            is_op(reader, "Cast") and int_attr(reader, "to", 0) == dtype for reader in left
        )
        return are_casts and not state.is_graph_output()

    def _rows(self, operand: Operand, query: ir.Value) -> ir.Value:
        """A number for each token and head, or also for each key dimension, as [B,T,H] or
        [B,T,H*Dk]."""
        batch = "b" if operand.has_batch else ""
        tokens = "t" if operand.has_tokens else ""
        value = self._moved(operand, [batch, tokens, "hd" if "d" in operand.order else "h"])
        if operand.has_batch and operand.has_tokens:
            return value
        return self._expanded(
            value, query, operand.heads * (self.match.sizes.key if "d" in operand.order else 1)
        )

    def _decay(self, operand: Operand, query: ir.Value) -> ir.Value:
        """The logarithm of the decay."""
        logs = operand.value.const_value
        if logs is not None and operand.value.graph is None:  # the slopes of tables (powers.py)
            made = self.builder.constant(logs.numpy(), "decay")
            self.match.shapes[made] = self.match.shapes[operand.value]
            return self._rows(replace(operand, value=made), query)
        if operand.logarithmic:
            return self._rows(operand, query)
        maker = producer(operand.value)
        if is_op(maker, "Exp") and (power := maker.inputs[0]) is not None:
            self.match.shapes.setdefault(power, self.match.shapes[operand.value])
            return self._rows(replace(operand, value=power, logarithmic=True), query)
        return self.builder.op("Log", [self._rows(operand, query)])

    def _with_reset(self, reset: Reset, decay: ir.Value | None, query: ir.Value) -> ir.Value:
        """The logarithm of a decay, or of none, plus minus infinity where a state is reset. So a
        decay that is NaN or infinite stays NaN there, as its product with 0 is."""
        builder, heads = self.builder, self.match.sizes.heads
        ends = [builder.constant(np.array(end, np.float32), "decay") for end in (-np.inf, 0.0)]
        logs = builder.where(self._truth(reset.truth), *(ends[::-1] if reset.is_kept else ends))
        batch, sizes = (
            "b" if reset.operand.has_batch else "",
            rows_of(reset.operand, self.match.sizes),
        )
        made, wanted = builder.cast(logs, self._dtype), [batch, "t", "h"]
        rows = self._arranged(made, reset.shape, reset.operand.order, wanted, sizes)
        if decay is None:
            return self._expanded(rows, query, heads)
        if reset.operand.heads > 1 and self.match.decay_width != heads:
            size = self.match.sizes.key
            rows = builder.expand(builder.unsqueeze(rows, [3]), builder.ints([1, 1, 1, size]))
            rows = builder.reshape(rows, [0, 0, heads * size])
        return builder.add(decay, rows)

    def _truth(self, truth: Truth) -> ir.Value:
        """Truth values in front of the operator, also where they are made in a loop."""
        value = truth.source
        for node in truth.steps:
            arrays = map(single, node.inputs)
            inputs = [
                value if array is None else self.builder.constant(array, "number")
                for array in arrays
            ]
            value = self.builder.again(node, inputs)
        return value

    def _as(self, output: ir.Value, operand: Operand) -> ir.Value:
        """The output in the arrangement of the value that it replaces."""
        sizes = own_sizes(operand, self.match.sizes)
        made = self._returned(output, ["b", "t", "he"], operand.value, operand.order, sizes)
        return self._cast(made, operand.value)

    def _as_state(self, state: ir.Value, wanted: State) -> ir.Value:
        made = self._returned(
            state, ["b", "h", "k", "v"], wanted.value, wanted.order, self.match.sizes.of_state
        )
        return self._cast(made, wanted.value)

    def _cast(self, made: ir.Value, old: ir.Value) -> ir.Value:
        """A value in the type of the one that it replaces."""
        dtype = self.builder.info.dtype(old)
        return made if dtype is None else self.builder.cast(made, dtype)

    def _returned(
        self,
        value: ir.Value,
        own: Sequence[str],
        old: ir.Value,
        order: str,
        sizes: Mapping[str, int],
    ) -> ir.Value:
        axes = axes_of_dims(self.match.shapes[old], order, sizes)
        usual = "".join(own)
        if without_units(order, sizes) != without_units(usual, sizes):
            split = self._reshaped(value, own, list(usual), sizes)
            perm = [usual.index(letter) for letter in order]
            value, own = self.builder.transpose(split, perm), list(order)
        return self._reshaped_to(value, own, old, axes, sizes)

    def _reshaped_to(
        self,
        value: ir.Value,
        own: Sequence[str],
        old: ir.Value,
        axes: Sequence[str],
        sizes: Mapping[str, int],
    ) -> ir.Value:
        """A value with the dimensions of an old one, which may divide the tokens."""
        if "".join(axes).count("t") < 2:
            return self._reshaped(value, own, axes, sizes)
        sizes_now = list(self.match.shapes[old])
        if self.match.is_open["t"]:
            sizes_now[list(axes).index("t")] = -1
        parts = [self.builder.ints([size]) for size in sizes_now]
        if self.match.is_open["b"]:
            batch = self.builder.dimension(value, list(own).index("b"))
            parts = [batch if "b" in each else part for part, each in zip(parts, axes, strict=True)]
        target = self.builder.concat(parts, 0)
        return self.builder.reshape(value, target)


def _is_whole_or_none(size: Dim) -> bool:
    """Is a size one number, or 0, in every run?"""
    part = math.gcd(size.addend, *size.factors)
    parts = size.exact_div(part) if part else None
    return parts is not None and parts.upper == 1


def _with_units(own: Sequence[str], order: str, sizes: Mapping[str, int]) -> list[str]:
    """The axes of each dimension. One that has none is named by an axis of 1, if that makes the
    order whole."""
    units = iter([letter for letter in order if sizes[letter] == 1])
    named = [each or next(units, "") for each in own]
    return named if named == list(order) and not any(units) else list(own)
