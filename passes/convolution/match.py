"""A short causal convolution in plain operators: each channel by itself, over the last K tokens.

    y = silu(conv1d(x, weight, bias, padding=K - 1, groups=C)[..., :T])     # a prompt
    window = cat([state, x], dim=-1)                                        # the next tokens
    y = silu(conv1d(window, weight, bias, groups=C)[..., -T:])
    new_state = window[..., -K:]

Grammar; the code cites the numbers of the cases. x is [B,C,T], and `front` columns stand before it:

    window :=
      1     x                              the Conv has `front` pads before it, and any number
                                           behind it
      2   | Pad(x)                         the same zeros, by a Pad along the tokens; the Conv has
                                           none
      3   | Concat(state, x)               along the tokens; `front` is the number of columns of the
                                           state
    convolved :=
      4     Conv(window, weight, bias)     C groups, weight [C,1,K] with K of 2 or more, strides and
                                           dilations of 1
    kept :=
      5     convolved                      where it has T columns
      6   | Slice(convolved)               the T columns from front - (K - 1) on; nothing else reads
                                           `convolved`
    y :=
      7     kept
      8   | Mul(kept, Sigmoid(kept))       nothing else reads `kept`
      9   | Swish(kept)                    alpha is 1; also QuickGelu of com.microsoft, as ONNX
                                           Runtime writes 8
     10   | 7 to 9 of Transpose(kept)      [B,T,C]
    new_state :=
     11     Slice(window)                  the last K - 1 columns of 3
     12   | Slice(window)                  the last K - 1 + T of them, where T is a number

Column j of `convolved` is the sum over i < K of weight[i] window[j + i]. Token t is column front +
t of the window, so that column front + t - (K - 1) is the sum over the last K tokens: the output of
ShortConvolution for the token t, whose past is the K - 1 columns before x. In 1 and 2 `front` is
K - 1: the past is 0. In 3 it has to be K - 1 or more in each run. Where it is a name and T is 1,
that holds as well: with fewer columns the result of the Conv would be empty, which ONNX Runtime
refuses (values/conv_lengths.py). The places of columns are compared as formulas over the sizes, so
they agree for all sizes; the first tokens, of which there may be fewer than K, are no case of their
own.

What else reads x or the window stays as it is: a state of another number of columns, such as the
last K tokens of a prompt, which are fewer in a short one. So do masks in front of the convolution.
In 16 bits the model rounds the sum and the sigmoid, and the operator only its result. The results
differ by these roundings. Where a sum of 16 bits is -inf, the model gives NaN and the operator -0.

Left with a reason: strides, dilations, columns before or behind those of the tokens that something
reads, a state that may be too short, and operands of 8 bits. Not looked at: convolutions whose pads
are those of no causal one, and those of a channel with others.

A step may also be written as ReduceSum(Mul(window, weight)). It stays: with activation and new
state, ONNX Runtime takes as long for 4,096 channels as the operator would, 64 and 63 us (one thread
of an AMD EPYC with AVX2).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeGuard

import onnx_ir as ir

from fa_compiler.passes.algebra.symbolic import Atom, Dim, consts, simplify_given
from fa_compiler.passes.answer.decline import Decline
from fa_compiler.passes.answer.report import Code
from fa_compiler.passes.ir.nodes import (
    FLOATS,
    all_known,
    any_op,
    certain,
    distinct_consumers,
    first,
    float_attr,
    inputs_of,
    int_attr,
    ints_attr,
    is_op,
    nodes_of_type,
    only_reader,
    operand_at,
    operand_orders,
    permutation,
    producer,
    text_attr,
)
from fa_compiler.passes.ir.surgery import depends
from fa_compiler.passes.ops.cuts import NO_PADS, filler_of, pads_along
from fa_compiler.passes.ops.parts import concat_of
from fa_compiler.passes.values.positions import Positions
from fa_compiler.passes.values.shapes import ShapeInfo

RANK, TOKENS = 3, 2
"""The tensors are [B,C,T]."""
ATTRIBUTES = {"pads": (0, 0), "strides": (1,), "dilations": (1,)}
"""The attributes of a Conv along one axis, with their defaults."""
TURNED = [0, 2, 1]
"""The permutation between [B,C,T] and [B,T,C]."""


@dataclass(frozen=True)
class Window:
    """What a Conv reads: `front` columns, which are those of `state` or zeros, then x, then
    `behind` zeros."""

    x: ir.Value
    front: Dim
    behind: int = 0
    state: ir.Value | None = None


@dataclass(frozen=True)
class Result:
    """The value of a convolution with its activation. It is [B,T,C] if it is turned. `copies` are
    the outputs of Transposes to [B,T,C], if nothing else reads it."""

    value: ir.Value
    activation: str
    is_turned: bool = False
    copies: tuple[ir.Value, ...] = ()


@dataclass(frozen=True)
class Convolution:
    """A causal convolution of `width` weights for each channel, with a proof that it is one.

    `last_columns` holds the last K - 1 columns of the window, and `more_columns` the last K - 1 + T
    of them, if the model has such a value.
    """

    node: ir.Node
    window: Window
    width: int
    dtype: ir.DataType
    result: Result
    last_columns: ir.Value | None = None
    more_columns: ir.Value | None = None

    @property
    def history(self) -> int:
        """K - 1, the tokens before the first one that the convolution reads."""
        return self.width - 1


def convolution(node: ir.Node, info: ShapeInfo) -> Convolution | None:
    """The causal convolution that a Conv is; None where it is none. Raises Decline where it is one
    that stays."""
    width = _width(node, info)
    if width is None:
        return None
    reach = (width - 1) * _only(node, "dilations")
    window = _window(node, info)
    if window is None or not _is_causal(node, window, reach):
        return None
    return _Match(node, window, width, _plain_type(node, info), info).match()


def _width(node: ir.Node, info: ShapeInfo) -> int | None:
    """K of a convolution of each channel by itself along one axis; None for other convolutions.
    (4)"""
    shape, weight = (info.sizes(operand_at(node, place)) for place in (0, 1))
    groups = int_attr(node, "group", 1)
    if not is_op(node, "Conv") or len(shape) != RANK or len(weight) != RANK:
        return None
    rows, columns, width = consts(weight)
    if width is None or width < 2 or groups < 2 or (rows, columns) != (groups, 1):
        return None
    is_formed = all(
        len(_numbers(node, name)) == len(default) for name, default in ATTRIBUTES.items()
    )
    return width if is_formed else None


def _numbers(node: ir.Node, name: str) -> tuple[int, ...]:
    """An attribute that is a list of integers."""
    return tuple(ints_attr(node, name, ATTRIBUTES[name]))


def _only(node: ir.Node, name: str) -> int:
    """The stride or dilation of a convolution along one axis."""
    return _numbers(node, name)[0]


def _window(node: ir.Node, info: ShapeInfo) -> Window | None:
    """What the Conv reads. None where auto_pad spreads the pads over both sides."""
    if text_attr(node, "auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        return None
    source, pads = operand_at(node, 0), _numbers(node, "pads")
    if any(pads):
        return Window(source, Dim(pads[0]), pads[1])  # 1
    maker = producer(source)
    if is_op(maker, "Pad"):
        return _padded(maker, info)
    joined = concat_of(maker, info)
    if joined is not None and len(joined.parts) == 2 and joined.axis == TOKENS:
        state, x = joined.parts
        shape = info.shape(state)
        return None if shape is None else Window(x, shape[TOKENS], state=state)  # 3
    return None


def _padded(node: ir.Node, info: ShapeInfo) -> Window | None:
    """What a Pad makes of x, if it puts a known number of zeros before and behind its tokens, and
    nothing else. (2)"""
    pads = pads_along(node, info, RANK)
    if pads is None or filler_of(node, info) != 0.0:
        return None
    columns = all_known(consts(pads.pop(TOKENS, NO_PADS)))
    if columns is None or min(columns) < 0 or any(pair != NO_PADS for pair in pads.values()):
        return None
    front, behind = columns
    return Window(operand_at(node, 0), Dim(front), behind)


def _is_causal(node: ir.Node, window: Window, reach: int) -> bool:
    """Is it for the tokens before each one? A state says so, or as many zeros before the tokens as
    the weights reach back to, if the columns for the zeros behind them are cut off."""
    if window.state is not None:
        return True
    cut = any_op(distinct_consumers(node.outputs[0]), "Slice")
    return window.front == reach and (not window.behind or cut)


def left(node: ir.Node, reason: str, culprit: ir.Node | None = None) -> Decline:
    """A Decline of a causal convolution, to be raised."""
    return Decline(Code.CONVOLUTION, reason, culprit or node)


def _plain_type(node: ir.Node, info: ShapeInfo) -> ir.DataType:
    """The type of a Conv of which the operator is the counterpart. Raises Decline for others.
    (4)"""
    for name, word in (("strides", "stride"), ("dilations", "dilation")):
        if (number := _only(node, name)) != 1:
            raise left(
                node,
                f"this causal convolution has a {word} of {number}, and ShortConvolution has none",
            )
    dtype = info.dtype(node.outputs[0])
    if dtype not in FLOATS:
        raise left(
            node,
            f"the type of this causal convolution is {'unknown' if dtype is None else dtype.name}",
        )
    if all(is_op(producer(operand_at(node, place)), "DequantizeLinear") for place in (0, 1)):
        raise left(
            node,
            "ONNX Runtime computes this causal convolution in integers, as its operands are quantised",
        )
    return dtype


@dataclass(frozen=True)
class _Match:
    """The proof for one Conv."""

    node: ir.Node
    window: Window
    width: int
    dtype: ir.DataType
    info: ShapeInfo

    def match(self) -> Convolution:
        """The convolution. Raises Decline."""
        result = self._activated(self._kept())
        states = list(self._new_states())
        last = first(value for value, columns in states if columns == self.history)  # 11
        known = self.tokens + self.history if self.tokens.is_const else None
        more = first(value for value, columns in states if columns == known)  # 12
        return Convolution(self.node, self.window, self.width, self.dtype, result, last, more)

    @property
    def history(self) -> int:
        return self.width - 1

    @cached_property
    def tokens(self) -> Dim:
        """T."""
        return self._size(self.window.x, TOKENS)

    @cached_property
    def front(self) -> Dim:
        return self.window.front.substitute(self.known)

    @cached_property
    def known(self) -> Mapping[Atom, Dim]:
        """What is known of the number of columns of a state: it is K - 1 or more. Raises Decline
        where it may be less in a run that succeeds."""
        front, tokens = self.window.front, self.info.sizes(self.window.x)[TOKENS:]
        if front.is_at_least(self.history):
            return {}
        atom = (front - front.addend).single_atom
        if consts(tokens) != [1] or atom is None:
            reason = (
                f"the state of this causal convolution may have fewer than {self.history} columns"
            )
            raise left(self.node, reason, producer(self.node.inputs[0]))
        return {atom: Dim.fresh(0) + (self.history - front.addend)}

    def _size(self, value: ir.Value, axis: int) -> Dim:
        shape = self.info.sizes(value)
        if len(shape) != RANK:
            raise left(self.node, f"the shape of {value.name!r} is not known")
        return self._in_runs(shape[axis])

    def _in_runs(self, size: Dim) -> Dim:
        """A size in the runs that succeed."""
        return simplify_given(size, [self.window.front - self.history]).substitute(self.known)

    def _kept(self) -> ir.Value:
        """The columns of the tokens. Raises Decline where they are not told apart from others."""
        convolved = self.node.outputs[0]
        start, reader = self.front - self.history, only_reader(convolved)
        if self._place_in(reader, convolved) == start:
            cut = certain(reader).outputs[0]
            if self._size(cut, TOKENS) == self.tokens:
                return cut  # 6
        if self._size(convolved, TOKENS) == self.tokens and start == 0:
            return convolved  # 5
        if reader is None:
            reason = "the columns that this causal convolution computes beside those of its tokens are read, too"
            raise left(self.node, reason)
        reason = (
            "what is kept of this causal convolution is not proven to be one column for each token"
        )
        raise left(self.node, reason, reader)

    def _place_in(self, cut: ir.Node | None, source: ir.Value) -> Dim | None:
        """The column of a source from which on a Slice takes columns, with all that the other axes
        hold; None for other nodes, and where it is not known."""
        if not is_op(cut, "Slice") or cut.inputs[0] is not source:
            return None
        shape, whole = self.info.sizes(cut.outputs[0]), self.info.sizes(source)
        if len(shape) != RANK or shape[:TOKENS] != whole[:TOKENS]:
            return None
        positions = Positions(self.info, tuple(map(self._in_runs, shape)), self.known)
        here, moved = positions.identity_index, positions.moved(cut, positions.identity_index)
        if moved is None or moved[1][:TOKENS] != here[:TOKENS]:
            return None
        start = moved[1][TOKENS] - here[TOKENS]
        return start.offset if start.is_number else None

    def _activated(self, kept: ir.Value) -> Result:
        """The value behind the activation, and how it is arranged."""
        reader = only_reader(kept)
        is_turned = _turns(reader)
        value = certain(reader).outputs[0] if is_turned else kept
        activated = _silu(value, self.node.graph)
        if activated is None:  # 7
            return Result(kept, "none", copies=tuple(self._copies(kept)))
        copies = () if is_turned else tuple(self._copies(activated))
        return Result(activated, "silu", is_turned, copies)  # 8 to 10

    def _copies(self, value: ir.Value) -> list[ir.Value]:
        """The outputs of the Transposes to [B,T,C] that read a value; none where something else
        reads it."""
        readers = distinct_consumers(value)
        alone = all(_turns(reader) and reader.graph is self.node.graph for reader in readers)
        return (
            []
            if value.is_graph_output() or not alone
            else [reader.outputs[0] for reader in readers]
        )

    def _new_states(self) -> Iterator[tuple[ir.Value, Dim]]:
        """The values that are the last columns of the window, with their numbers. One that the
        weights depend on is none."""
        if self.window.state is None:
            return
        window = operand_at(self.node, 0)
        length = self.front + self.tokens
        for cut in nodes_of_type(distinct_consumers(window), "Slice"):
            if cut.graph is self.node.graph:
                columns = self._size(cut.outputs[0], TOKENS)
                is_last = self._place_in(cut, window) == length - columns
                if is_last and not any(
                    depends(operand, cut) for operand in inputs_of(self.node)[1:]
                ):
                    yield cut.outputs[0], columns


def _turns(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Does a node exchange channels and tokens?"""
    return is_op(node, "Transpose") and permutation(node, RANK) == TURNED


def turned_source(x: ir.Value, graph: ir.Graph) -> ir.Value | None:
    """The value [B,T,C] that a Transpose of a graph makes x from; None where it is made in another
    way."""
    maker = producer(x)
    return operand_at(maker, 0) if _turns(maker) and maker.graph is graph else None


def _silu(value: ir.Value, graph: ir.Graph | ir.Function | None) -> ir.Value | None:
    """What SiLU makes of a value in the same graph; None where the value is read otherwise."""
    readers = distinct_consumers(value)
    if value.is_graph_output() or any(reader.graph is not graph for reader in readers):
        return None
    if len(readers) == 1:
        (node,) = readers
        is_quick = node.domain == "com.microsoft" and node.op_type == "QuickGelu"
        default = 1.702 if is_quick else 1.0
        is_swish = (is_quick or is_op(node, "Swish")) and float_attr(node, "alpha", default) == 1.0
        return node.outputs[0] if is_swish else None  # 9
    for sigmoid in readers:
        product = only_reader(sigmoid.outputs[0]) if is_op(sigmoid, "Sigmoid") else None
        is_product = (value, sigmoid.outputs[0]) in operand_orders(product, "Mul")
        if is_product and {*readers} == {sigmoid, product}:
            return certain(product).outputs[0]  # 8
    return None
